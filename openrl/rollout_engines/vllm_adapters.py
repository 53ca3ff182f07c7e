"""Serves a policy in vLLM as a base model plus a LoRA adapter, without merging the weights."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from openrl.errors import UserError
from openrl.weights.host import HostReceiver
from openrl.weights.transport import Route, SentBucket, received_tensors

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM reserves memory for. Other adapters take the next larger one."""


def room_for_rank(rank: int) -> int:
    """Return the smallest of ``RANKS`` that fits an adapter of ``rank``."""
    return next(room for room in RANKS if room >= rank)


class AdapterSlot:
    """The adapter that answers requests. Each sync installs a new adapter under a new name, so that
    vLLM never reuses what it cached for an old one."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._receiver = HostReceiver(Route(), 0, torch.device("cpu"))
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._count = 0
        self.request: Any = None
        """The ``lora_request`` for ``AsyncLLM.generate``; None, the base alone, before a sync."""

    async def load(self, config: dict[str, Any], received: list[SentBucket]) -> None:
        """Serve the adapter in the buckets from now on. Raises UserError if vLLM refuses it; the
        old one then stays."""
        from vllm.lora.request import LoRARequest

        folder = self._written(config, received)
        self._count += 1
        request = LoRARequest(f"policy-{self._count}", self._count, folder.name)
        try:
            await self._llm.add_lora(request)
        except Exception as error:
            folder.cleanup()
            raise UserError(
                f"vLLM does not take the adapter: {error}", "--lora_sync merge"
            ) from error
        if self.request is not None:
            await self._llm.remove_lora(self.request.lora_int_id)
        self.clear()
        self.request, self._folder = request, folder

    def clear(self) -> None:
        """Delete the adapter's files. They must exist while the adapter serves, because vLLM reads
        them again if the adapter ever leaves its memory."""
        if self._folder is not None:
            self._folder.cleanup()

    def _written(
        self, config: dict[str, Any], received: list[SentBucket]
    ) -> tempfile.TemporaryDirectory[str]:
        """Write the adapter to a temporary directory in peft's format."""
        tensors = dict(received_tensors(self._receiver, received))
        folder = tempfile.TemporaryDirectory(prefix="openrl-adapter-")
        save_file(
            tensors, Path(folder.name) / "adapter_model.safetensors", metadata={"format": "pt"}
        )
        (Path(folder.name) / "adapter_config.json").write_text(json.dumps(config))
        return folder
