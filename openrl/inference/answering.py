"""What batch_inference and evaluate share: the inputs, and the engines and rewards that turn units
of work into rows of output."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedTokenizerBase

from openrl.agents.build import check_agents
from openrl.agents.setup import AgentSetup
from openrl.cluster.group import WorkerContext, WorkerDied
from openrl.config import derived
from openrl.config.commands import AnsweringConfig, BatchInferenceConfig, EvaluateConfig
from openrl.config.conditions import VLLM
from openrl.config.groups.agent import AgentFlags, EnvironmentTagFlags
from openrl.config.groups.reward import bearer_token, split
from openrl.config.lengths import longest_judged
from openrl.config.reward_plan import RewardPlan, reward_plan
from openrl.data.environments import EVALUATED_SEEDS, environment_prompts
from openrl.data.images import image_budget, row_images
from openrl.data.prompts import PromptBuilder, load_prompts
from openrl.data.tokenizer import policy_tokenizer
from openrl.errors import ErrorCollector, UserError, printable
from openrl.flags.dump import effective_flags
from openrl.inference.output import Output, Row, rows_of
from openrl.inference.scoring import ModelScorer, check_reward_model, load_reward_model
from openrl.models.attention import check_attention
from openrl.models.causal_lm import Loading
from openrl.models.device import Device, resolve_device
from openrl.models.stored import (
    JUDGED,
    JUDGED_FIX,
    check_language_model,
    check_length,
    check_tokens,
)
from openrl.rewards.build import (
    RewardSetup,
    check_labels,
    check_prompts,
    check_reward_sources,
)
from openrl.rollout_engines.build import sampling_from_flags
from openrl.rollout_engines.engine import EngineSpec
from openrl.rollout_engines.parallel import check_engine
from openrl.rollout_engines.vllm_fields import check_engine_kwargs
from openrl.types import Prompt, PromptGroup
from openrl.waiting import in_order
from openrl.workers.rollout_worker import RolloutRequest, RolloutWorker

WIDTH = 256  # prompts that are answered or scored concurrently
# Flags that decide how an output is computed but not what it holds: they may change when a run is
# resumed.
RUNTIME_FLAGS = [
    "device",
    "plugin",
    "micro_batch_size",
    "vllm_tensor_parallel_size",
    "vllm_gpu_memory_utilization",
    "vllm_max_num_seqs",
    "vllm_max_num_batched_tokens",
    "reward_num_workers",
    "reward_timeout",
    "reward_memory_gb",
    "reward_max_retries",
    "rollout_dump_dir",
    "max_reward_failure_rate",
]


@dataclass(frozen=True)
class Unit:
    """A unit of work: a prompt, or the rows of one prompt that compete."""

    id: str
    position: int  # in the data
    rows: list[Prompt]


@dataclass(frozen=True)
class Done:
    """What has become of a unit."""

    rows: list[Row]
    group: PromptGroup  # the rows are of


Work = Callable[[Unit], Awaitable[Done]]


@dataclass(frozen=True)
class AnsweringInputs:
    """The checked inputs of a command, and what it has to do."""

    device: Device
    tokenizer: PreTrainedTokenizerBase
    plan: RewardPlan
    builder: PromptBuilder
    prompts: list[Prompt]
    reports: list[str]  # a line on each source of data
    units: list[Unit] = field(default_factory=list)
    output: Output | None = None


def read_inputs(config: AnsweringConfig, reward_models: str | None, limit: int) -> AnsweringInputs:
    """Read tokenizer and data, and try the reward functions. Prompts have at most ``limit`` tokens.
    Raises UserError."""
    device: Device = "cuda"
    collector = ErrorCollector()
    with collector:
        device = resolve_device(config.device)
    path, trusted = config.model.pretrain, config.model.trust_remote_code
    if VLLM.holds(config):
        collector.run(check_engine, path, config.engine, device, trusted)
        collector.run(check_engine_kwargs, config.engine.vllm_engine_kwargs)
    with collector:
        check_models(config, reward_models)
    if reward_models or not VLLM.holds(config):
        collector.run(check_attention, config.model, device)
    with collector:
        plan = reward_plan(config.reward, reward_models)
        check_reward_sources(config.reward, plan.sources, config.debug.plugin)
    with collector:
        tokenizer = policy_tokenizer(config.model, config.templates.tokenizer_chat_template)
        images = row_images(config.vision, config.model)
        builder = PromptBuilder(config.data, config.templates, tokenizer, limit, images=images)
        prompts, reports = read_prompts(config, builder)
        reports = [*reports, *image_budget(images, limit, "prompt_max_len")]
    collector.raise_all()
    check_tokens(path, tokenizer, [p.token_ids for p in prompts], trusted)
    check_prompts(config.reward, plan, prompts)
    check_labels(config.reward, plan, prompts, config.debug.plugin)
    longest = config.sampling.lengths.both
    check_agents(agent_setup(config), tokenizer, plan.flag, longest)
    return AnsweringInputs(device, tokenizer, plan, builder, prompts, reports)


def check_models(config: AnsweringConfig, reward_models: str | None) -> None:
    """Raise UserError if a model is incomplete, of the wrong kind, or too short for the answers."""
    path = config.model.pretrain
    trusted = config.model.trust_remote_code
    lengths = config.sampling.lengths
    for model in split(reward_models):
        check_reward_model(model, config.rm, trusted)
    if not isinstance(config, BatchInferenceConfig) or config.task.eval_task != "rm":
        check_language_model(path, trusted)
        fix = "--generate_max_len and --prompt_max_len of {} together".format
        check_length(path, lengths.both, trusted, fix=fix)
        check_length(path, longest_judged(config), trusted, JUDGED, JUDGED_FIX.format)


def read_prompts(config: AnsweringConfig, builder: PromptBuilder) -> tuple[list[Prompt], list[str]]:
    if tags := agent_setup(config).environments.env_tags:
        count = min(config.data.max_samples, EVALUATED_SEEDS * len(tags))
        return environment_prompts(dict.fromkeys(tags, 1), count, config.debug.seed, "eval"), []
    return load_prompts(builder, config.debug.seed)


def make_units(rows: Iterable[list[Prompt]]) -> list[Unit]:
    """Number the units and give each an id of its own. A blend may hold a row several times; the
    second time it is ``id#2``."""
    seen: dict[str, int] = {}
    units = []
    for position, prompts in enumerate(rows):
        name = prompts[0].id
        seen[name] = seen.get(name, 0) + 1
        unique = name if seen[name] == 1 else f"{name}#{seen[name]}"
        units.append(Unit(unique, position, prompts))
    return units


def output_settings(
    config: AnsweringConfig, besides: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Return the flags that decide what the output holds, with their values."""
    left_out = besides.union(RUNTIME_FLAGS)
    return {name: v for name, v in effective_flags(config).items() if name not in left_out}


async def run_units(
    units: list[Unit], work: Work, output: Output | None, console: Console
) -> AsyncIterator[Done]:
    """Yield each unit that ``output`` does not hold yet once it is done, in order."""
    done = output.done if output else 0
    with output or nullcontext(), Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("prompts", total=len(units), completed=done)
        async for unit in in_order(units[done:], work, WIDTH):
            yield unit
            bar.advance(task)


@asynccontextmanager
async def open_answering(
    config: AnsweringConfig, inputs: AnsweringInputs, backend: str
) -> AsyncIterator[Work]:
    """Give a function that answers a unit's prompt as often as asked and scores the answers, as a
    worker of a training run does. They depend on the seed and the unit's position, not on when a
    run began."""
    engine_flags = config.engine
    if backend == "hf":
        engine_flags = replace(engine_flags, vllm_max_num_seqs=config.batch.micro_batch_size)
    spec = EngineSpec(
        config.model,
        engine_flags,
        config.vision,
        inputs.device,
        config.sampling.lengths.both,
        config.debug.seed,
        config.debug.full_determinism,
        judged=longest_judged(config),
    )
    sampling = sampling_from_flags(
        config.sampling, config.sampling.generate_max_len, max_len=spec.max_model_len
    )
    if config.sampling.greedy_sampling:
        sampling = replace(sampling, temperature=0.0)
    rewards_itself = bool({*derived.agents_of(config)} - {"tools"})
    request = RolloutRequest(
        config.task.n_samples_per_prompt,
        sampling,
        scored=bool(inputs.plan.sources) or rewards_itself,
    )
    agents = agent_setup(config)
    shown = isinstance(config, EvaluateConfig) and config.task.rollout_dump_dir is not None
    with open_reward_models(config, inputs) as models:
        rewards = RewardSetup(config.reward, inputs.plan, bearer_token())
        context = WorkerContext("vllm", plugins=config.debug.plugin)
        worker = RolloutWorker(context, backend, spec, agents, rewards, models=models)

        async def work(unit: Unit) -> Done:
            prompt = replace(unit.rows[0], render=shown)
            seed = (config.debug.seed, 0, unit.position)
            try:
                group = await worker.play(prompt, replace(request, seed=seed))
            except WorkerDied as died:
                raise UserError(died.message) from died
            return Done(rows_of(unit.id, group, config.data, inputs.tokenizer), group)

        try:
            await worker.start()
            yield work
        finally:
            await worker.close()


def agent_setup(config: AnsweringConfig) -> AgentSetup:
    agents, environments = AgentFlags(), EnvironmentTagFlags()
    if isinstance(config, EvaluateConfig):
        agents, environments = config.agents, config.environments
    plugins = config.debug.plugin
    return AgentSetup(agents, environments, config.templates, config.vision, plugins)


@contextmanager
def open_reward_models(
    config: AnsweringConfig, inputs: AnsweringInputs
) -> Iterator[Mapping[str, ModelScorer]]:
    """Load the reward models into this process; at the end, print what of the texts they did not
    read."""
    models = {}
    for source in inputs.plan.sources:
        if source.kind == "model":
            model = load_reward_model(
                source.address,
                config.rm,
                Loading(config.model, inputs.device),
                normalize=config.rm.normalize_reward,
            )
            models[source.name] = ModelScorer(model, batch_size=config.batch.micro_batch_size)
    try:
        yield models
    finally:
        for name, scorer in models.items():
            for line in scorer.counts.notes():
                print(printable(f"{name}: {line}"))
