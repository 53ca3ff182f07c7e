"""Flags of on-policy distillation: who the teacher is, and how the policy learns from it."""

from __future__ import annotations

from typing import Literal

from openrl.config.conditions import DIVERGENCE, TEACHER
from openrl.flags.schema import flag, group

TeacherMode = Literal["advantage", "reverse_kl", "forward_kl", "jsd"]


@group("Teacher")
class TeacherFlags:
    teacher_pretrain: str | None = flag(
        None,
        "Model that teaches the policy: it gives log-probs of the tokens that the policy sampled."
        " It needs the policy's tokens. Rewards may stand beside it or be left out.",
    )
    teacher_mode: TeacherMode = flag(
        "advantage",
        "advantage adds the sampled token's log-prob under the teacher minus that under the policy"
        " to its advantage; reverse_kl, forward_kl and jsd are losses on whole distributions: KL of"
        " policy to teacher, of teacher to policy, and the Jensen-Shannon divergence.",
        only_if=TEACHER,
    )
    teacher_coef: float = flag(
        1.0, "Weight of the teacher's advantage or loss.", bounds="> 0", only_if=TEACHER
    )
    teacher_topk: int = flag(
        128,
        "A divergence compares the teacher's K likeliest tokens and all others as one; each token"
        " carries 8 K bytes. 0: the whole vocabulary, from hidden states of the teacher and a copy"
        " of its output head.",
        bounds=">= 0",
        only_if=DIVERGENCE,
    )

    @property
    def used(self) -> bool:
        return self.teacher_pretrain is not None

    @property
    def divergence(self) -> Literal["reverse_kl", "forward_kl", "jsd"] | None:
        """The divergence that is a loss; None without one."""
        return None if not self.used or self.teacher_mode == "advantage" else self.teacher_mode

    @property
    def top_k(self) -> int | None:
        """--teacher_topk if whole distributions are compared, else None."""
        return None if self.divergence is None else self.teacher_topk
