"""Flags of sampling: how tokens are drawn, and how many."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from openrl.flags.schema import Condition, absent, flag, group

GENERATES = absent("eval_task", "rm")
generates = partial(flag, only_if=GENERATES)
CUT = Condition(lambda config: config.sampling.cuts, "with --top_p, --top_k or --min_p")
OPEN_LEN = 1024  # length of a prompt, and of a response, that no flag limits


@dataclass(frozen=True)
class Lengths:
    """Most tokens of a prompt, of a response, and of both together."""

    prompt: int
    response: int
    both: int


@group("Sampling")
class DrawFlags:
    temperature: float = flag(
        1.0,
        "Sampling temperature; training divides logits by it too, for log-probs and KL.",
        bounds=">= 0.001",
    )
    top_p: float = flag(
        1.0,
        "Nucleus sampling: sample from the smallest set of tokens with this probability. 1: off.",
        bounds="(0, 1]",
    )
    top_k: int = flag(-1, "Sample among the k likeliest tokens. -1: off.", bounds="-1 or > 0")
    min_p: float = flag(
        0.0,
        "Drop tokens whose probability is below this share of the likeliest token's. 0: off.",
        bounds="[0, 1)",
    )
    repetition_penalty: float = flag(1.0, "Penalty on repeated tokens. 1: off.", bounds="> 0")
    stop: tuple[str, ...] = flag(
        (),
        "Texts that end a response; the response keeps them, so that training sees what"
        " was sampled.",
    )

    @property
    def cuts(self) -> tuple[str, ...]:
        """The flags in use that remove tokens from the distribution."""
        off = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
        return tuple(name for name, value in off.items() if getattr(self, name) != value)


@group("Sampling")
class SamplingFlags(DrawFlags):
    """Sampling in a training run."""

    kept_ids_max: int = flag(
        512,
        "Most tokens that may be left after --top_p, --top_k and --min_p for a sampled token to be"
        " trained: training normalises over these tokens, which travel with it.",
        bounds="> 0",
        only_if=CUT,
    )
    ignore_eos: bool = flag(
        False,
        "Keep generating after the end-of-text token, up to the length limit: for benchmarks.",
    )
    prompt_max_len: int | None = flag(
        None,
        "Most prompt tokens; --prompt_overflow says what happens to longer prompts. None:"
        f" {OPEN_LEN}, or with --max_len what --generate_max_len leaves (half of it if that is"
        " not given either).",
        bounds="> 0",
    )
    generate_max_len: int | None = flag(
        None,
        f"Most new tokens after the prompt. None: {OPEN_LEN}, or with --max_len whatever the"
        " prompt leaves.",
        bounds="> 0",
        alias=("max_new_tokens",),
    )
    max_len: int | None = flag(
        None,
        "Most tokens of prompt and response together. None: --prompt_max_len + --generate_max_len.",
        bounds="> 1",
    )

    @property
    def lengths(self) -> Lengths:
        prompt, response, both = self.prompt_max_len, self.generate_max_len, self.max_len
        if both is None:
            prompt, response = prompt or OPEN_LEN, response or OPEN_LEN
            return Lengths(prompt, response, prompt + response)
        if prompt is None:
            prompt = both - response if response else both // 2
        response = response or both - 1  # a prompt has at least one token
        return Lengths(prompt, response, min(both, prompt + response))


@group("Sampling")
class InferenceSamplingFlags(DrawFlags):
    temperature: float = generates(1.0, "Sampling temperature. 0: greedy.", bounds="0 or >= 0.001")
    greedy_sampling: bool = generates(False, "Same as --temperature 0.")
    prompt_max_len: int = generates(
        1024, "Most prompt tokens; longer prompts are left out, counted and reported.", bounds="> 0"
    )
    generate_max_len: int = generates(
        1024, "Most new tokens after the prompt.", bounds="> 0", alias=("max_new_tokens",)
    )

    @property
    def lengths(self) -> Lengths:
        return Lengths(
            self.prompt_max_len, self.generate_max_len, self.prompt_max_len + self.generate_max_len
        )
