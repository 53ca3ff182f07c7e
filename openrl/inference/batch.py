"""batch_inference: responses or rewards for all rows of a dataset, written to a file from which a
killed run resumes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from transformers import PreTrainedTokenizerBase

from openrl.config.commands import BatchInferenceConfig
from openrl.config.groups.inference import BatchTaskFlags
from openrl.config.groups.reward import bearer_token
from openrl.data.prompts import PromptBuilder
from openrl.data.tokenizer import with_leading
from openrl.errors import UserError, counted, listed
from openrl.inference.answering import (
    AnsweringInputs,
    Done,
    Unit,
    Work,
    make_units,
    open_answering,
    open_reward_models,
    output_settings,
    read_inputs,
    run_units,
)
from openrl.inference.output import Output, Row, rows_of
from openrl.inference.post_process import ONE_OF_MANY, post_process
from openrl.rewards.build import RewardSetup, build_reward
from openrl.tracking.console import PlainConsole
from openrl.types import FinishReason, Prompt, PromptGroup, Segment, Trajectory

NO_LIMIT = 2**31  # tokens of a prompt that already has its response


def prepare(config: BatchInferenceConfig) -> AnsweringInputs:
    """Read and check all inputs, and find out what is already done. Raises UserError."""
    task = config.task
    limit = NO_LIMIT if task.eval_task == "rm" else config.sampling.prompt_max_len
    read = read_inputs(config, reward_models(config), limit)
    prompts = slice_of(read.prompts, task)
    if task.eval_task == "rm":
        require_responses(prompts, config.data.output_key)
    if task.enable_csft:
        prompts = [add_target_reward(prompt, task.csft_prompt, read.builder) for prompt in prompts]
    compared = task.eval_task == "rm" and task.post_processor in ONE_OF_MANY
    units = make_units(group_competing(prompts) if compared else [[p] for p in prompts])
    ids, settings = [unit.id for unit in units], output_settings(config)
    output = Output(Path(task.output_path), ids, rows_per_unit(task), settings)
    return replace(read, units=units, output=output)


def rows_per_unit(task: BatchTaskFlags) -> int:
    """Return the most rows that a finished unit has in the output."""
    if task.eval_task == "rm" or task.post_processor in ONE_OF_MANY:
        return 1
    return task.n_samples_per_prompt


def reward_models(config: BatchInferenceConfig) -> str | None:
    """Return --reward_pretrain or, for rm without any other source, --pretrain."""
    others = config.rm.reward_pretrain, config.reward.remote_rm_url, config.reward.reward_funcs
    if config.task.eval_task == "rm" and not any(others):
        return config.model.pretrain
    return config.rm.reward_pretrain


def slice_of(prompts: list[Prompt], task: BatchTaskFlags) -> list[Prompt]:
    """Return the rows of --iter. Raises UserError if there are none."""
    if task.iter is None:
        return prompts
    start = task.iter * task.rollout_batch_size
    if start >= len(prompts):
        raise UserError(
            f"--iter {task.iter} of {task.rollout_batch_size} rows begins at row {start}, there are"
            f" {len(prompts)}",
            f"--iter {(len(prompts) - 1) // task.rollout_batch_size} is the last one",
        )
    return prompts[start : start + task.rollout_batch_size]


def require_responses(prompts: list[Prompt], key: str) -> None:
    """Raise UserError, naming rows, unless every row holds a response."""
    if bad := [prompt.id for prompt in prompts if not isinstance(prompt.meta.get(key), str)]:
        raise UserError(
            f"--output_key: no text in the column {key!r} of {listed(bad)}",
            "the column of the responses",
        )


def add_target_reward(prompt: Prompt, target: str, builder: PromptBuilder) -> Prompt:
    """Return the prompt followed by the desired reward."""
    text = f"{prompt.text}{target.strip()} "
    ids = builder.tokenizer(text, add_special_tokens=False).input_ids
    ids, images = with_leading(builder.templates.leading, ids), prompt.images
    if builder.images is not None:
        ids, images = builder.images.place(ids, [placed.image for placed in images])
    return replace(prompt, text=text, token_ids=ids, images=images)


def group_competing(prompts: list[Prompt]) -> list[list[Prompt]]:
    """Group the rows of equal prompt and label, in the order of each group's first row."""
    found: dict[tuple[str, str], list[Prompt]] = {}
    for prompt in prompts:
        found.setdefault((prompt.text, repr(prompt.label)), []).append(prompt)
    return list(found.values())


async def run(config: BatchInferenceConfig, inputs: AnsweringInputs) -> None:
    """Work through the units that are not done. Each is on disk as soon as all units before it
    are."""
    console, output, units = PlainConsole(), inputs.output, inputs.units
    assert output is not None
    for line in inputs.reports:
        console.print(line)
    if output.done or output.removed:
        again = f", {output.removed} rows of a unit that was cut short are done again"
        console.print(
            f"{output.path}: {output.done} of {len(units)} prompts are done"
            + (again if output.removed else "")
        )
    tally = Tally()
    tally.note_failures(output.kept)
    if output.done < len(units):
        async with open_work(config, inputs) as work:
            async for unit in run_units(units, work, output, console):
                output.write(tally.count(unit.rows, config))
    console.print(tally.line(output.path, len(units) - output.done))
    tally.check(config.reward.max_reward_failure_rate)


@asynccontextmanager
async def open_work(config: BatchInferenceConfig, inputs: AnsweringInputs) -> AsyncIterator[Work]:
    """Give the function that turns a unit into rows, with engines and rewards running."""
    if config.task.eval_task != "rm":
        backend = "vllm" if config.task.eval_task == "generate_vllm" else "hf"
        async with open_answering(config, inputs, backend) as work:
            yield work
        return
    tokenizer = inputs.tokenizer
    with open_reward_models(config, inputs) as models:
        setup = RewardSetup(config.reward, inputs.plan, bearer_token())
        reward = build_reward(setup, tokenizer, plugins=config.debug.plugin, models=models)
        assert reward is not None  # --pretrain is the reward model, if nothing else is a source

        async def score_given(unit: Unit) -> Done:
            group = given_group(unit, config.data.output_key, tokenizer)
            sound = [t for t in group.trajectories if not t.finish_reason.is_failure]
            scores = await reward.score(PromptGroup(group.prompt, sound))
            for trajectory, score in zip(sound, scores, strict=True):
                trajectory.score = score
            return Done(rows_of(unit.id, group, config.data, tokenizer), group)

        try:
            yield score_given
        finally:
            await reward.close()


def given_group(unit: Unit, key: str, tokenizer: PreTrainedTokenizerBase) -> PromptGroup:
    """Return the responses that the data holds. Each ends with the end-of-text token, which reward
    models were trained on, unless its row says that it ran out of tokens."""
    trajectories = []
    for prompt in unit.rows:
        text, finish = prompt.meta[key], prompt.meta.get("finish")
        end = (
            FinishReason(finish) if finish in [*FinishReason] else FinishReason.STOP
        )  # other systems have other words
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if end is FinishReason.STOP and ids[-1:] != [tokenizer.eos_token_id]:
            ids.append(tokenizer.eos_token_id)
        row = Segment.answer(prompt.token_ids, ids, images=prompt.images)
        trajectories.append(Trajectory(prompt, [row], end, text=tokenizer.decode(ids)))
    return PromptGroup(unit.rows[0], trajectories)


@dataclass
class Tally:
    """Counts what a run wrote and what it could not score."""

    rows: int = 0
    answers: int = 0
    ties: int = 0
    rewards: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def count(self, rows: list[Row], config: BatchInferenceConfig) -> list[Row]:
        """Count one unit's rows; return those to write."""
        self.note_failures(rows)
        scored = [row["reward"] for row in rows if row.get("reward") is not None]
        self.rewards += scored
        written = post_process(rows, config)
        self.ties += not written and bool(scored)
        self.rows += len(written)
        return written

    def note_failures(self, rows: list[Row]) -> None:
        """Count responses and those without a reward, also those that an earlier run wrote."""
        self.answers += len(rows)
        self.failures += [f"{row['id']}: {row['failure']}" for row in rows if "failure" in row]

    def line(self, path: Path, prompts: int) -> str:
        text = f"{path}: {counted(self.rows, 'row')} written for {counted(prompts, 'prompt')}"
        text += f", mean reward {fmean(self.rewards):.4f}" if self.rewards else ""
        text += f", {self.ties} prompts without a best response" if self.ties else ""
        if not (failed := self.failures):
            return text
        return f"{text}, {len(failed)} responses without a reward, first {failed[0]}"

    def check(self, most: float) -> None:
        """Raise UserError if too many responses have no reward."""
        if self.answers and len(self.failures) / self.answers > most:
            raise UserError(
                f"{len(self.failures)} of {self.answers} responses have no reward, more than"
                f" --max_reward_failure_rate {most:g}; first {self.failures[0]}",
                "fix the reward, then remove the output or give another --output_path",
            )
