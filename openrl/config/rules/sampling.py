"""Rules of how answers are drawn, in training and in evaluation."""

from __future__ import annotations

from openrl.config.commands import AnsweringConfig, PPOConfig
from openrl.flags.checks import Problems, check, problem, warning


@check
def truncated_sampling(config: PPOConfig) -> Problems:
    if cut := tuple(name for name in config.sampling.cuts if name != "repetition_penalty"):
        message = "answers from a truncated distribution train the full one, so ratios are biased"
        yield warning(cut, message, "leave it out and use --temperature")
    if config.sampling.repetition_penalty != 1:
        message = "the trained policy, without a penalty, is not the one that is sampled"
        fix = "leave it out, or use a reward that punishes repeats"
        yield warning(("repetition_penalty",), message, fix)


@check
def stop_texts_are_texts(config: PPOConfig | AnsweringConfig) -> Problems:
    if "" in config.sampling.stop:
        yield problem(("stop",), "an empty text would end every answer at once", "leave it out")


@check
def answers_end(config: PPOConfig) -> Problems:
    if config.sampling.ignore_eos:
        message = "answers continue past their end, so rewards and losses see meaningless text"
        fix = "leave it out, except to measure speed"
        yield warning(("ignore_eos",), message, fix)


@check
def lengths_add_up(config: PPOConfig) -> Problems:
    sampling = config.sampling
    for name in ("prompt_max_len", "generate_max_len"):
        part = getattr(sampling, name)
        if sampling.max_len is not None and part is not None and part >= sampling.max_len:
            message = f"{part} of {sampling.max_len} tokens leave no room for the other part"
            yield problem((name, "max_len"), message, f"--max_len {part + 1} or more")
