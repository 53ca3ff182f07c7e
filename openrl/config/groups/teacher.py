"""Flags of on-policy distillation: who the teacher is, and how the policy learns from it."""

from __future__ import annotations

from typing import Literal

from openrl.config.conditions import DIVERGENCE, TEACHER
from openrl.flags.schema import flag, given, group

TOKEN_VARIABLE = "OPENRL_TEACHER_TOKEN"
HINT, PROMPT = "{hint}", "{prompt}"
"""The places in --teacher_template."""

Hindsight = Literal["feedback", "solution"]
TeacherMode = Literal["advantage", "reverse_kl", "forward_kl", "jsd"]


@group("Teacher")
class TeacherFlags:
    teacher_pretrain: str | None = flag(
        None,
        "Model that teaches the policy: it gives log-probs of the tokens that the policy sampled."
        " It needs the policy's tokens. Rewards may stand beside it or be left out.",
    )
    teacher_url: str | None = flag(
        None,
        "Server that teaches the policy, such as http://HOST:8000/v1: it speaks vLLM's completions"
        f" with prompt_logprobs. The bearer token comes from ${TOKEN_VARIABLE}.",
    )
    teacher_timeout: float = flag(
        180.0,
        "Seconds for one request to a server.",
        bounds="(0, 1e7]",
        only_if=given("teacher_url") | given("teacher_routing"),
    )
    teacher_max_retries: int = flag(
        5,
        "Attempts at one request to a server, with growing pauses between them; one that is late is"
        " not repeated. A row without a reply has no teacher in this step, which is counted.",
        bounds="> 0",
        only_if=given("teacher_url") | given("teacher_routing"),
    )
    teacher_routing: str | None = flag(
        None,
        "YAML or JSON file {datasource: {teacher: weight}} with one teacher for each data source: a"
        " model, a URL, or start, ema or N as in --teacher_self. Other rows have none.",
    )
    teacher_self: str | None = flag(
        None,
        "The policy as its own teacher. start: with the weights that the run began with; ema: with"
        " their moving average; a number N: with those of the latest step that N divides, which"
        " for 1 are the present ones.",
    )
    teacher_ema_beta: float = flag(
        0.99,
        "The average is beta * average + (1 - beta) * weights after each optimizer step.",
        bounds="(0, 1)",
        only_if=given("teacher_self", "ema") | given("teacher_routing"),
    )
    teacher_prompt_key: str | None = flag(
        None,
        "Column with what only the teacher is told, such as a hint or a solution. It reads the"
        " policy's answers after a prompt that says so; the policy never sees it. A row without it"
        " has no teacher.",
        only_if=TEACHER,
    )
    teacher_hindsight: tuple[Hindsight, ...] = flag(
        (),
        "What the teacher is told of each answer after it was scored, in the places {feedback} and"
        " {solution} of --teacher_template. feedback: the text that a reward or an environment"
        " returns under this name; solution: another answer to the prompt, which passed. A"
        " paragraph whose place stays empty is left out; an answer about which nothing is told has"
        " no teacher.",
        only_if=TEACHER,
    )
    teacher_template: str = flag(
        "{hint}\n\n{prompt}",
        "How the teacher's prompt says it, as text or file: {hint} stands for the column and"
        " {prompt} for the row's own text, or that of the last user message. Without {prompt} it is"
        " a system message, or joins the one that is there.",
        only_if=given("teacher_prompt_key") | given("teacher_hindsight"),
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
        named = (self.teacher_pretrain, self.teacher_url, self.teacher_self, self.teacher_routing)
        return any(name is not None for name in named)

    @property
    def privileged(self) -> bool:
        """Whether teachers are told more than the policy."""
        return self.teacher_prompt_key is not None or bool(self.teacher_hindsight)

    @property
    def divergence(self) -> Literal["reverse_kl", "forward_kl", "jsd"] | None:
        """The divergence that is a loss; None without one."""
        return None if not self.used or self.teacher_mode == "advantage" else self.teacher_mode

    @property
    def top_k(self) -> int | None:
        """--teacher_topk if whole distributions are compared, else None."""
        return None if self.divergence is None else self.teacher_topk


@group("Teacher")
class AnswerTeacherFlags:
    """Flags of distillation on given answers."""

    teacher_pretrain: str | None = flag(
        None,
        "Model that also teaches the policy, by its distributions at the tokens of the answers. It"
        " needs the policy's tokens, and stands on the ranks that train.",
    )
    teacher_mode: Literal["forward_kl", "reverse_kl", "jsd"] = flag(
        "forward_kl",
        "The divergence that is learned: KL of teacher to policy, of policy to teacher, or the"
        " Jensen-Shannon divergence.",
        only_if=TEACHER,
    )
    teacher_coef: float = flag(1.0, "Weight of the divergence.", bounds="> 0", only_if=TEACHER)
    teacher_topk: int = flag(
        128,
        "The divergence compares the teacher's K likeliest tokens and all others as one. 0: the"
        " whole vocabulary, from hidden states of the teacher and a copy of its output head.",
        bounds=">= 0",
        only_if=TEACHER,
    )
    sft_loss_coef: float = flag(
        1.0,
        "Weight of the answers' negative log-likelihood. 0: the teacher alone.",
        bounds=">= 0",
        only_if=TEACHER,
    )

    @property
    def used(self) -> bool:
        return self.teacher_pretrain is not None

    @property
    def top_k(self) -> int | None:
        """--teacher_topk with a teacher, else None."""
        return self.teacher_topk if self.used else None
