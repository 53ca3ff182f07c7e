"""Flags of evaluation."""

from __future__ import annotations

from functools import partial

from openrl.flags.schema import absent, flag, given, group

EVALUATED = given("eval_dataset") | given("env_tags")
evaluated = partial(flag, only_if=EVALUATED)


@group("Evaluation")
class PromptEvalFlags:
    eval_dataset: str | None = evaluated(
        None,
        "Evaluation prompts, comma separated; sources as for --prompt_data. None: no evaluation.",
    )
    eval_split: str = flag(
        "train", "Split of --eval_dataset.", only_if=(EVALUATED, given("eval_dataset"))
    )
    eval_steps: int = flag(
        -1,
        "Evaluate every N steps and after the last one; -1: never.",
        bounds="-1 or > 0",
        only_if=(EVALUATED, absent("eval_only")),
    )
    eval_before_train: bool = flag(
        False, "Evaluate once before the first step.", only_if=(EVALUATED, absent("eval_only"))
    )
    eval_n_samples_per_prompt: int = evaluated(
        4, "Responses per prompt in evaluation.", bounds="(0, 100000]"
    )
    eval_temperature: float = evaluated(
        0.6, "Temperature in evaluation; 0: greedy.", bounds="0 or >= 0.001"
    )
    eval_top_p: float = evaluated(1.0, "top_p in evaluation.", bounds="(0, 1]")
    eval_top_k: int = evaluated(-1, "top_k in evaluation; -1: off.", bounds="-1 or > 0")
    eval_generate_max_len: int | None = evaluated(
        None, "Most new tokens in evaluation. None: --generate_max_len.", bounds="> 0"
    )
    eval_batch_size: int = evaluated(
        -1, "Prompts submitted at a time in evaluation. -1: all.", bounds="-1 or > 0"
    )
    eval_only: bool = evaluated(False, "Evaluate once and exit without training.")
    eval_max_samples: int | None = evaluated(
        None,
        "Use at most this many evaluation rows, the same ones each time. None: all rows; with"
        " --env_tags 64 seeds that are never trained on.",
        bounds="> 0",
    )
    eval_generations_to_log: int = evaluated(
        0,
        "Answers of each evaluation that trackers show as a table, for the same prompts each time.",
        bounds=">= 0",
    )

    @property
    def asked_for(self) -> bool:
        """Whether any flag asks for an evaluation."""
        return self.eval_steps > 0 or self.eval_before_train or self.eval_only


of_rows = partial(flag, only_if=given("eval_dataset"))


@group("Evaluation")
class SupervisedEvalFlags:
    eval_dataset: str | None = of_rows(
        None, "Evaluation rows, comma separated; sources as for --dataset. None: no evaluation."
    )
    eval_split: str = of_rows("train", "Split of --eval_dataset.")
    eval_steps: int = of_rows(
        -1, "Evaluate every N steps and after the last one; -1: never.", bounds="-1 or > 0"
    )


@group("Evaluation")
class EvaluateFlags:
    n_samples_per_prompt: int = flag(8, "Responses for each prompt.", bounds="(0, 100000]")
    k: tuple[int, ...] = flag(
        (),
        "Values of k for pass@k and maj@k. Empty: powers of two up to --n_samples_per_prompt, and"
        " that number itself.",
        bounds="> 0",
    )
    pass_threshold: float | None = flag(
        None,
        "An answer counts as right if its verdict, or its reward if it has no verdict, is at least"
        " this. None: if its verdict is 1; without verdicts there is no pass@k and maj@k.",
    )
    output_path: str | None = flag(
        None,
        "JSON file for the results; the answers go beside it as .jsonl. None: only print"
        " the table.",
    )
    rollout_dump_dir: str | None = flag(
        None,
        "Keep a trace of every answer in this directory: its tokens and, of episodes, transcript,"
        " pictures and frames. None: no trace.",
    )
