"""How vLLM's workers receive weights: an engine among vLLM's own weight-transfer engines, under the
name ``BACKEND``.

vLLM's worker keeps the session (start, any number of updates, finish) and refuses what is out of
order; this engine opens buckets by any of the transports of ``openrl.weights`` and loads them by
vLLM's layerwise reload, as its own engines do. Those are not used themselves: none carries
checksums or says which parameters got no weight, and their other ends, which belong into the
trainer, changed from version to version."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from openrl.weights.buckets import Bucket
from openrl.weights.transport import (
    Receiver,
    Route,
    changed_on_the_way,
    make_receiver,
    read_message,
)

BACKEND = "openrl"


class Refused(Exception):
    """Buckets that cannot be loaded; nothing of them was."""

    def __init__(self, lost: list[str], changed: list[str]) -> None:
        super().__init__(lost, changed)
        self.lost, self.changed = lost, changed


@dataclass
class Connection(WeightTransferInitInfo):
    """``first_rank`` is that of this engine's first worker in the group of a broadcast."""

    route: dict[str, Any]
    first_rank: int


@dataclass
class Buckets(WeightTransferUpdateInfo):
    messages: list[dict[str, Any]]  # see ``SentBucket.message``


class BucketTransfer(WeightTransferEngine[Connection, Buckets]):
    """One of each worker. vLLM makes it when the model is loaded, with ``model``, ``model_config``
    and ``device``."""

    init_info_cls = Connection
    update_info_cls = Buckets
    supports_draft_weight_update = False

    _receiver: Receiver
    _kept: tuple[str, ...] = ()  # how the names of parameters begin that syncs do not bring
    # parameters of the model; None: no bucket of this session was loaded yet
    _wanted: set[str] | None = None
    _loaded: set[str] | None = None  # those that got a weight; None: the model does not tell
    absent: tuple[str, ...] = ()
    """Parameters that got no weight in the session that ended last; vLLM itself only logs them."""

    def init_transfer_engine(self, init_info: Connection) -> None:
        rank, route = init_info.first_rank + self.parallel_config.rank, Route(**init_info.route)
        self._receiver = make_receiver(route, rank, self.device)
        self._kept = _of_tower(self.model) if route.keeps_tower else ()

    def start_weight_update(self) -> None:
        """The model keeps its weights until the first bucket is open."""
        self._wanted = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """vLLM's, for a device of any kind."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Buckets) -> None:
        """Raises Refused, or what vLLM raises for names or shapes that it does not know: the model
        is then half loaded and must not be used."""
        sent = [read_message(message) for message in update_info.messages]
        try:
            buckets = [Bucket(one.manifest, self._receiver.open(one)) for one in sent]
        except OSError as error:
            raise Refused([str(error)], []) from error
        changed = [
            name
            for one, bucket in zip(sent, buckets, strict=True)
            for name in changed_on_the_way(one, bucket)
        ]
        if changed:
            raise Refused([], changed)
        if self._wanted is None:
            self._wanted = wanted_parameters(self.model)
            self._loaded = set()
            _forget_expert_kernels(self.model)
            initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights(
            chain.from_iterable(bucket.tensors() for bucket in buckets)
        )
        seen = self._loaded
        self._loaded = (
            None if seen is None or loaded is None else seen | set(map(parameter_key, loaded))
        )

    def finish_weight_update(self) -> None:
        if self._wanted is None:
            self.absent = tuple(name for name, _ in self.model.named_parameters())
            return
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_heads(self.model)
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()  # the trainer is next on a shared GPU
        missing = set() if self._loaded is None else self._wanted - self._loaded
        self.absent = tuple(sorted(n for n in missing if not n.startswith(self._kept)))

    def shutdown(self) -> None:
        """Receivers hold what the sender lent them, and nothing of their own."""

    # abstract in vLLM 0.26, where one class has both ends; ours is a ``Sender``
    trainer_send_weights = None


def _of_tower(model: nn.Module) -> tuple[str, ...]:
    """How the names of a vision tower's parameters begin, and of what joins it to the language
    model."""
    parts = model.get_mm_mapping()
    return (*parts.tower_model, *parts.connector)


def wanted_parameters(model: nn.Module) -> set[str]:
    """What a sync has to bring. As in vLLM's own loader, not the parameters of layers that are
    quantised while they load: their scales are in no checkpoint."""
    made_here = {
        f"{name}.{inner}"
        for name, module in model.named_modules()
        if getattr(getattr(module, "quant_method", None), "uses_meta_device", False)
        for inner, _ in module.named_parameters()
    }
    return {parameter_key(name) for name, _ in model.named_parameters() if name not in made_here}


def parameter_key(name: str) -> str:
    """A parameter as every ``load_weights`` may name it: of experts vLLM 0.28 leaves the inner
    module out, 0.32 does not."""
    return name.replace(".routed_experts.", ".")


# vLLM's CPU kernels work on packed copies. A reload packs linear layers again, but neither of the
# following two.


def _forget_expert_kernels(model: nn.Module) -> None:
    """Mixtures of experts pack when their kernel is built, and it is built once: make the reload
    build it anew."""
    for module in _on_cpu(model):
        if getattr(module.quant_method, "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None


def _repack_heads(model: nn.Module) -> None:
    """An output head tied to the embedding gets no weights of its own, so a reload passes it by."""
    for module in _on_cpu(model):
        # numel 0: packed and the original dropped
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


def _on_cpu(model: nn.Module) -> list[nn.Module]:
    """Modules with a kernel, if the model is on a CPU; CUDA kernels hold no copies."""
    if next(model.parameters()).device.type != "cpu":
        return []
    return [
        module for module in model.modules() if getattr(module, "quant_method", None) is not None
    ]


WeightTransferEngineFactory.register_engine(BACKEND, BucketTransfer)
