"""Flags of the commands that do not train: a reward server, batch inference, evaluation, merging adapters."""

from __future__ import annotations

from openrl.flags.schema import REQUIRED, flag, group


@group("Reward model")
class RewardModelFlags:
    reward_pretrain: str | None = flag(None, "Reward model with a scalar head. None: no reward model.")
    value_head_prefix: str = flag("score", "Name of the scalar head; a name stored in the model's config.json wins.")
    max_len: int = flag(
        2048, "Tokens per scored text; longer ones lose tokens at the start and are counted.", bounds="> 0"
    )


@group("Server")
class ServerFlags:
    host: str = flag("127.0.0.1", "Address the server listens on.")
    port: int = flag(5000, "Port of the server. 0: any free one, printed.", bounds=">= 0")
    require_token: bool = flag(False, "Answer only requests with the bearer token of $OPENRL_RM_TOKEN.")
    batch_size: int = flag(
        32, "Most texts in one forward pass; concurrent requests are merged up to this.", bounds="> 0"
    )
    batch_wait_ms: int = flag(5, "Milliseconds a request waits for others to join its batch. 0: none.", bounds=">= 0")


@group("LoRA")
class MergeFlags:
    model_path: str = flag(REQUIRED, "Base model: Hugging Face name or local directory.")
    lora_path: str = flag(REQUIRED, "Directory of the adapter, as peft saves it.")
    output_path: str = flag(REQUIRED, "Directory for the merged model; it must not exist or be empty.")
    is_rm: bool = flag(
        False, "The base is a reward model; its head is the adapter's if that holds one, else the base's."
    )
    value_head_prefix: str = flag("score", "Name of the base's scalar head; a name in its config.json wins.")
