"""How long sequences may become: by which flags, and which values would fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from openrl.config.commands import AnsweringConfig, PPOConfig
from openrl.config.reward_plan import engine_judges
from openrl.extension_points import verifiers


def longest_sequence(config: PPOConfig | AnsweringConfig) -> int:
    """Return the most tokens of prompt and response together that engines are asked for."""
    lengths = config.sampling.lengths
    evaluated = isinstance(config, PPOConfig) and config.evaluation.eval_generate_max_len
    return max(lengths.both, lengths.prompt + evaluated) if evaluated else lengths.both


def length_flags(config: PPOConfig | AnsweringConfig) -> tuple[str, ...]:
    """Return the flags that decide ``longest_sequence``."""
    sampling = config.sampling
    if longest_sequence(config) > sampling.lengths.both:
        return "prompt_max_len", "eval_generate_max_len"
    if sampling.lengths.both == getattr(sampling, "max_len", None):
        return ("max_len",)
    return "prompt_max_len", "generate_max_len"


def fitting_lengths(config: PPOConfig, most: int) -> str:
    """Return flags with which no sequence has more than ``most`` tokens: --max_len where training
    is too long, and smaller values for what would not fit below it."""
    flags, new = config.sampling, dict[str, Any]()
    if flags.lengths.both > most:
        parts = {"prompt_max_len": flags.prompt_max_len, "generate_max_len": flags.generate_max_len}
        long = [name for name, part in parts.items() if part and part >= most]
        short = sum(part for name, part in parts.items() if part and name not in long)
        new |= {"max_len": most} | dict.fromkeys(long, most - short if short else most // 2)
        flags = replace(flags, **new)
    rest = most - flags.lengths.prompt
    if (config.evaluation.eval_generate_max_len or 0) > rest:
        new["eval_generate_max_len"] = rest
    return " ".join(f"--{name} {value}" for name, value in new.items())


JUDGE_TEXT = 256  # tokens of what a judge is told besides prompt and answers


def longest_judged(config: PPOConfig | AnsweringConfig) -> int:
    """Return the most tokens that the run's own engines need as judges, for a question and its
    reply; 0 if they judge nothing. A label has room for as many tokens as an answer."""
    if isinstance(config, PPOConfig):
        evaluated = config.evaluation.eval_n_samples_per_prompt
        siblings = max(config.batch.n_samples_per_prompt, evaluated)
    else:
        siblings = config.task.n_samples_per_prompt
    prompt, longest = config.sampling.lengths.prompt, longest_sequence(config)
    needed = [0]
    for name, kwargs in engine_judges(config.reward).items():
        options = verifiers[name].options if name in verifiers.names() else None
        shown = getattr(options, "SHOWN", 1) or siblings
        reply = kwargs.get("max_tokens", getattr(options, "max_tokens", 0))
        reply = reply if isinstance(reply, int) else 0  # the judge's options name what is no number
        needed.append(JUDGE_TEXT + prompt + (shown + 1) * (longest - prompt) + reply)
    return max(needed)
