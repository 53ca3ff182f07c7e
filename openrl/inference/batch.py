"""batch_inference: responses or rewards for all rows of a dataset, into a file that a killed run
goes on with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedTokenizerBase

from openrl.config.commands import BatchInferenceConfig
from openrl.config.inference import BatchTaskFlags
from openrl.config.placement import ParallelSizes
from openrl.config.reward_plan import RewardPlan, reward_plan
from openrl.data.prompts import PromptBuilder, Report, load_prompts
from openrl.data.tokenizer import policy_tokenizer
from openrl.errors import UserError
from openrl.inference.answering import (
    WIDTH,
    Answering,
    ColumnNames,
    RewardSetting,
    answer_sampling,
    numbered,
    rows_of,
    running_engine,
    running_reward,
    score,
    settings_of,
)
from openrl.inference.ordered import in_order
from openrl.inference.output import Output, Row
from openrl.inference.post_process import POST_PROCESSORS, Columns
from openrl.models.device import Device, resolve_device
from openrl.rewards.build import check_prompts, check_reward_sources
from openrl.rollout.build import check_engine_kwargs, engine_spec
from openrl.rollout.engine import EngineSpec
from openrl.rollout.parallel import check_parallel
from openrl.types import End, Group, Prompt, Segment, Trajectory

ONE_OF_MANY = ("rs", "iter_dpo")  # post-processors that compare the responses to a prompt
NO_LIMIT = 2**31  # tokens of a prompt whose response is there already


@dataclass(frozen=True)
class Unit:
    """What is worked on as a whole: a prompt, or the rows of one prompt that compete."""

    id: str
    position: int  # in the data
    rows: list[Prompt]


@dataclass(frozen=True)
class BatchInputs:
    """What the command starts from."""

    device: Device
    tokenizer: PreTrainedTokenizerBase
    plan: RewardPlan
    units: list[Unit]
    output: Output
    reports: list[Report]


def prepare_batch(config: BatchInferenceConfig) -> BatchInputs:
    """Read tokenizer and data, try the reward functions, look at what is done already. Raises
    UserError."""
    device = resolve_device(config.device)
    sizes = ParallelSizes(config.engine.vllm_tensor_parallel_size)
    check_parallel(config.model.pretrain, sizes, False, device, config.model.trust_remote_code)
    check_engine_kwargs(config.engine.vllm_engine_kwargs)
    plan = reward_plan(config.reward, reward_models(config))
    check_reward_sources(config.reward, plan.sources, config.debug.plugin)
    tokenizer = policy_tokenizer(config.model, config.templates.tokenizer_chat_template)
    limit = NO_LIMIT if config.task.eval_task == "rm" else config.sampling.prompt_max_len
    builder = PromptBuilder(config.data, config.templates, tokenizer, limit)
    prompts, reports = load_prompts(builder, config.debug.seed)
    prompts = slice_of(prompts, config.task)
    check_prompts(plan, prompts)
    if config.task.eval_task == "rm":
        require_responses(prompts, config.data.output_key)
    if config.task.enable_csft:
        prompts = [conditioned(prompt, config.task.csft_prompt, builder) for prompt in prompts]
    units = competing(prompts) if scores_compete(config.task) else alone(prompts)
    settings = settings_of(config)
    output = Output(
        Path(config.task.output_path),
        [unit.id for unit in units],
        rows_per_unit(config.task),
        settings,
    )
    return BatchInputs(device, tokenizer, plan, units, output, reports)


def scores_compete(task: BatchTaskFlags) -> bool:
    """Whether rows of the data are compared with each other."""
    return task.eval_task == "rm" and task.post_processor in ONE_OF_MANY


def rows_per_unit(task: BatchTaskFlags) -> int:
    """RewardRows of the output that a finished unit has at most."""
    return (
        1
        if task.eval_task == "rm" or task.post_processor in ONE_OF_MANY
        else task.n_samples_per_prompt
    )


def reward_models(config: BatchInferenceConfig) -> str | None:
    """--reward_pretrain; for rm without any other source --pretrain."""
    others = config.rm.reward_pretrain, config.reward.remote_rm_url, config.reward.reward_funcs
    return (
        config.model.pretrain
        if config.task.eval_task == "rm" and not any(others)
        else config.rm.reward_pretrain
    )


def slice_of(prompts: list[Prompt], task: BatchTaskFlags) -> list[Prompt]:
    """The rows of --iter. Raises UserError if there are none."""
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
    """Raises UserError, naming rows, unless every row holds a response."""
    if bad := [prompt.id for prompt in prompts if not isinstance(prompt.meta.get(key), str)]:
        shown = ", ".join(bad[:10]) + (f" and {len(bad) - 10} more" if len(bad) > 10 else "")
        raise UserError(
            f"--output_key: no text in the column {key!r} of {shown}", "the column of the responses"
        )


def conditioned(prompt: Prompt, wish: str, builder: PromptBuilder) -> Prompt:
    """The prompt with the wished reward behind it."""
    text = f"{prompt.text}{wish.strip()} "
    ids = builder.tokenizer(text, add_special_tokens=False).input_ids
    return replace(prompt, text=text, token_ids=[*builder.templates.leading, *ids])


def alone(prompts: list[Prompt]) -> list[Unit]:
    ids = numbered([prompt.id for prompt in prompts])
    return [
        Unit(name, i, [prompt]) for i, (name, prompt) in enumerate(zip(ids, prompts, strict=True))
    ]


def competing(prompts: list[Prompt]) -> list[Unit]:
    """The rows of equal prompt and label together, in the order of their first."""
    found: dict[tuple[str, str], list[Prompt]] = {}
    for prompt in prompts:
        found.setdefault((prompt.text, repr(prompt.label)), []).append(prompt)
    ids = numbered([rows[0].id for rows in found.values()])
    return [
        Unit(name, i, rows) for i, (name, rows) in enumerate(zip(ids, found.values(), strict=True))
    ]


async def run_batch(config: BatchInferenceConfig, inputs: BatchInputs) -> None:
    """Work through the units that are not done; every one is on disk as soon as those before it
    are."""
    console, output = Console(), inputs.output
    for report in inputs.reports:
        console.print(report.line(), highlight=False)
    todo = inputs.units[output.done :]
    if output.done or output.removed:
        torn = (
            f", {output.removed} rows of a unit that was cut short are done again"
            if output.removed
            else ""
        )
        console.print(
            f"{output.path}: {output.done} of {len(inputs.units)} prompts are done{torn}",
            highlight=False,
        )
    tally = Tally()
    if todo:
        async with working(config, inputs) as work:
            with output, Progress(console=console, disable=not console.is_terminal) as progress:
                bar = progress.add_task("prompts", total=len(inputs.units), completed=output.done)
                async for rows in in_order(todo, work, WIDTH):
                    output.write(tally.count(rows, config))
                    progress.advance(bar)
    console.print(tally.line(output.path, len(todo)), highlight=False)
    tally.check(config.reward.max_reward_failure_rate)


@asynccontextmanager
async def working(
    config: BatchInferenceConfig, inputs: BatchInputs
) -> AsyncIterator[Callable[[Unit], Awaitable[list[Row]]]]:
    """What turns a unit into rows, over running engines and rewards."""
    tokenizer, task = inputs.tokenizer, config.task
    names = ColumnNames(
        config.data.input_key, config.data.output_key, config.data.label_key or "label"
    )
    setting = RewardSetting(
        config.reward,
        inputs.plan,
        config.rm,
        config.model,
        config.batch.micro_batch_size,
        inputs.device,
        config.debug.plugin,
    )
    async with running_reward(setting, tokenizer) as reward:
        if task.eval_task == "rm":

            async def judge(unit: Unit) -> list[Row]:
                group = await score(reward, given_group(unit, names.response, tokenizer))
                return rows_of(unit.id, group, names, tokenizer)

            yield judge
            return
        backend, spec = engine_of(config, inputs.device)
        async with running_engine(backend, spec) as engine:
            sampling, n = answer_sampling(config.sampling), task.n_samples_per_prompt
            answering = Answering(engine, tokenizer, sampling, n, config.debug.seed)

            async def answer(unit: Unit) -> list[Row]:
                group = await score(reward, await answering.group(unit.position, unit.rows[0]))
                return rows_of(unit.id, group, names, tokenizer)

            yield answer


def engine_of(config: BatchInferenceConfig, device: Device) -> tuple[str, EngineSpec]:
    spec = engine_spec(
        config.model, config.engine, config.sampling.lengths.both, config.debug, device
    )
    if config.task.eval_task == "generate_vllm":
        return "vllm", spec
    return "hf", replace(spec, max_num_seqs=config.batch.micro_batch_size)


def given_group(unit: Unit, key: str, tokenizer: PreTrainedTokenizerBase) -> Group:
    """The responses that the data holds. Each ends with the end-of-text token, which reward models
    were trained on, unless its row says that it ran out of tokens."""
    trajectories = []
    for prompt in unit.rows:
        text, end = prompt.meta[key], End(prompt.meta.get("finish", End.STOP))
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if end is End.STOP and ids[-1:] != [tokenizer.eos_token_id]:
            ids.append(tokenizer.eos_token_id)
        row = Segment.answer(prompt.token_ids, ids)
        trajectories.append(Trajectory(prompt, [row], end, text=tokenizer.decode(ids)))
    return Group(unit.rows[0], trajectories)


@dataclass
class Tally:
    """What a run wrote, and what it could not score."""

    rows: int = 0
    answers: int = 0
    rewards: float = 0.0
    scored: int = 0
    failures: int = 0
    ties: int = 0
    example: str = ""

    def count(self, rows: list[Row], config: BatchInferenceConfig) -> list[Row]:
        """What is written of one unit's rows."""
        failed = [row for row in rows if "failure" in row]
        scored = [row["reward"] for row in rows if row.get("reward") is not None]
        self.answers, self.failures = self.answers + len(rows), self.failures + len(failed)
        self.scored, self.rewards = self.scored + len(scored), self.rewards + sum(scored)
        if failed and not self.example:
            self.example = f"{failed[0]['id']}: {failed[0]['failure']}"
        written = post_processed(rows, config)
        self.ties += not written and bool(scored)
        self.rows += len(written)
        return written

    def line(self, path: Path, prompts: int) -> str:
        text = f"{path}: {self.rows} rows written for {prompts} prompts"
        text += f", mean reward {self.rewards / self.scored:.4f}" if self.scored else ""
        text += f", {self.ties} prompts without a best response" if self.ties else ""
        return text + (
            f", {self.failures} responses without a reward, first {self.example}"
            if self.failures
            else ""
        )

    def check(self, most: float) -> None:
        """Raises UserError if too many responses have no reward."""
        if self.answers and self.failures / self.answers > most:
            raise UserError(
                f"{self.failures} of {self.answers} responses have no reward, more than"
                f" --max_reward_failure_rate {most:g}; first {self.example}",
                "mend the reward, then remove the output or take another --output_path",
            )


def post_processed(rows: list[Row], config: BatchInferenceConfig) -> list[Row]:
    """The rows as --post_processor leaves them; rows without a reward take no part."""
    task = config.task
    if task.post_processor is None:
        return rows
    columns = Columns(config.data.input_key, config.data.output_key, task.reward_template)
    scored = [row for row in rows if row.get("reward") is not None]
    return POST_PROCESSORS[task.post_processor](scored, columns) if scored else []
