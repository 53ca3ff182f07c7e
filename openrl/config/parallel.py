"""Flags of ranks that work on the same rows and split their sequences or their layers."""

from __future__ import annotations

from openrl.config.conditions import RING
from openrl.flags.schema import flag, group


@group("DeepSpeed")
class ParallelFlags:
    ulysses_size: int = flag(
        1,
        "Ranks that split each sequence and exchange attention heads by all-to-all (Ulysses).",
        bounds="> 0",
    )
    ring_attn_size: int = flag(
        1,
        "Ranks that split each sequence and pass keys and values around (ring attention). Turns"
        " on --packing_samples.",
        bounds="> 0",
    )
    ring_head_stride: int = flag(
        1,
        "Key-value heads per round of the ring; more are faster but need more memory.",
        bounds="> 0",
        only_if=RING,
    )
    ds_tensor_parallel_size: int = flag(
        1,
        "Ranks that split each layer in training (DeepSpeed AutoTP). Needs bf16 or fp16 and ZeRO"
        " 1 or 2.",
        bounds="> 0",
    )

    @property
    def sequence_size(self) -> int:
        """How many ranks hold one sequence together."""
        return self.ulysses_size * self.ring_attn_size

    @property
    def ranks_per_shard(self) -> int:
        """How many ranks get the same rows."""
        return self.sequence_size * self.ds_tensor_parallel_size
