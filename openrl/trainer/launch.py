"""From a checked config to a finished run: assembles the parts of an RL run."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from openrl.algorithms.collate import collate
from openrl.algorithms.credit import CreditSettings
from openrl.algorithms.credit_routes import CreditRoute
from openrl.config import derived
from openrl.config.algo_routes import read_algo_routes
from openrl.config.commands import PPOConfig
from openrl.config.curriculum_mix import read_mix
from openrl.config.groups.logging import TraceFlags
from openrl.data.curriculum import Curriculum
from openrl.data.order import PromptOrder, SeededStream
from openrl.data.prompts import prompts_fingerprint
from openrl.extension_points import advantage_estimators
from openrl.flags.dump import effective_flags
from openrl.models.device import Device
from openrl.report.finish import closing_table
from openrl.rewards.combined import RewardCombiner
from openrl.rollout_engines.build import sampling_from_flags
from openrl.trace.writer import TraceWriter, chosen, with_transcript
from openrl.tracking.console import PlainConsole
from openrl.tracking.health import HealthMonitor
from openrl.tracking.jsonl import read_jsonl
from openrl.tracking.loggers import build_trackers, run_name
from openrl.tracking.progress import Column, Progress
from openrl.tracking.summary import RunSummary
from openrl.trainer.learning.credit import CreditAssignment
from openrl.trainer.learning.learner import Learner, LearningSettings
from openrl.trainer.learning.losses import Losses
from openrl.trainer.learning.nonfinite import NonFiniteMonitor
from openrl.trainer.learning.ptx import SupervisedMix
from openrl.trainer.learning.rows import forward_rows, rollout_batching
from openrl.trainer.learning.teaching import Teaching
from openrl.trainer.planning.prepare import Inputs
from openrl.trainer.planning.sleep_estimate import dropped_parts
from openrl.trainer.planning.start_lines import start_lines, write_config
from openrl.trainer.planning.time_estimate import estimate_lines
from openrl.trainer.rl_trainer import FAILURES, RLTrainer, RunSettings
from openrl.trainer.rollout.buffer import BufferLimits, RolloutBuffer
from openrl.trainer.rollout.engine_pool import EnginePool, EngineRepair
from openrl.trainer.rollout.evaluation import Evaluation
from openrl.trainer.rollout.filtering import DynamicFilter
from openrl.trainer.rollout.replay import SavedRollouts
from openrl.trainer.rollout.replay_buffer import ReplayBuffer
from openrl.trainer.rollout.reward_models import RewardModels
from openrl.trainer.rollout.rollouts import Rollouts
from openrl.trainer.saving.checkpoints import Checkpoints, step_of
from openrl.trainer.watching.supervision import StopRequest, explain_end, supervise
from openrl.types import Prompt, PromptGroup, Sampling
from openrl.workers.profiling import Profiling
from openrl.workers.roles import Roles, Stage, start_roles
from openrl.workers.rollout_worker import RolloutRequest
from openrl.workers.weight_sync import WeightSync

COLUMNS = (
    Column("rollout/reward", "reward {:.3f}", curve=True),
    Column("rollout/pass_rate", "pass rate {:.3f}", curve=True),
    Column("actor/kl", "KL {:.4f}"),
    Column("actor/logprob_gap", "gap {:.1e}"),
    Column("rollout/age_max", "age {:.0f}"),
    Column("rollout/response_length", "length {:.1f}"),
    Column(FAILURES, "{:.0f} failures"),
    Column("perf/tokens_per_second", "{:.0f} tokens/s"),
)

A_YEAR = 365 * 24 * 3600  # seconds; --rpc_timeout 0 means no limit, but process groups need one

StartRoles = Callable[[PPOConfig, Device, int, Stage], AbstractAsyncContextManager[Roles]]
"""``start_roles``, or another function that starts worker groups for a config."""


async def train(config: PPOConfig, inputs: Inputs, start: StartRoles = start_roles) -> RunSummary:
    """Start everything, train, save and report. No process of ``start`` outlives this call."""
    os.environ |= config.placement.environment
    return await supervise(config, partial(train_once, inputs=inputs, start=start))


async def train_once(
    config: PPOConfig, stop: StopRequest, inputs: Inputs, start: StartRoles
) -> RunSummary:
    run_dir, console = Path(config.checkpoint.save_path), PlainConsole(quiet=config.logging.quiet)
    write_config(config, run_dir)
    device = inputs.device
    lines = [*start_lines(config, device), *inputs.reports, *estimate_lines(config, inputs)]
    for line in lines:
        console.print(line)
    name = run_name(config.logging, "ppo")
    steps = config.batch.total_steps(len(inputs.prompts))
    optimizer_steps = config.batch.total_optimizer_steps(len(inputs.prompts))
    checkpoints = Checkpoints(config.checkpoint, effective_flags(config))
    done, every = checkpoints.saved, config.logging.lines_every
    with (
        Progress(name, steps, COLUMNS, done=done, every=every) as progress,
        explain_end(progress, checkpoints, stop),
    ):
        async with start(config, device, optimizer_steps, progress.stage) as roles:
            trainer = build_trainer(config, inputs, roles, checkpoints, progress, stop)
            summary = await trainer.fit()
    console.print(closing_table(run_dir, summary))
    return summary


def build_trainer(
    config: PPOConfig,
    inputs: Inputs,
    roles: Roles,
    checkpoints: Checkpoints,
    progress: Progress,
    stop: StopRequest,
) -> RLTrainer:
    """Build the trainer over running worker groups."""
    learner, weight_sync = build_learner(config, inputs, roles), build_weight_sync(config, roles)
    restarts = config.faults.max_engine_restarts if roles.replaceable else 0
    repair = EngineRepair(restarts, weight_sync, progress) if restarts else None
    pool = EnginePool(roles.engines, repair, config.asynchrony.partial_rollout)
    run_dir, keep_until = Path(config.checkpoint.save_path), step_of(checkpoints.start_from)
    metrics = run_dir / "metrics.jsonl"
    resumes = keep_until >= 0 and metrics.exists()
    past = [r for r in read_jsonl(metrics) if r["step"] <= keep_until] if resumes else []
    return RLTrainer(
        build_rollouts(config, inputs, roles, learner, pool),
        learner,
        weight_sync,
        build_evaluation(config, inputs),
        checkpoints,
        build_trackers(
            config.logging,
            run_dir,
            name=progress.title,
            config=checkpoints.run_flags,
            keep_until=keep_until,
            answers=config.rl_logging.train_generations_to_log,
            evaluated=config.evaluation.eval_generations_to_log,
            trace=build_trace(config, inputs, keep_until),
        ),
        progress,
        RunSettings(
            config.checkpoint,
            config.evaluation,
            config.engine.weight_sync_interval,
            stop,
            config.sampling.lengths.both if config.rl_logging.log_max_throughput else None,
            HealthMonitor(config.health, past),
            rewarded=not derived.learns_without_rewards(config),
        ),
    )


def trace_flags(config: PPOConfig) -> TraceFlags:
    whole = config.collecting.rollout_dump_dir is not None
    return replace(config.trace, trace_sample_rate=1.0) if whole else config.trace


def build_trace(config: PPOConfig, inputs: Inputs, keep_until: int) -> TraceWriter | None:
    flags, directory = trace_flags(config), Path(config.checkpoint.save_path) / "trace"
    if dump := config.collecting.rollout_dump_dir:
        directory = Path(dump).expanduser()
    if not flags.trace_sample_rate:
        return None
    tokenizer = deepcopy(inputs.tokenizer)  # tokenizers may not be used by two threads at a time

    def pieces(token_ids: list[int]) -> list[str]:
        return [tokenizer.decode([token]) for token in token_ids]

    return TraceWriter(directory, flags, pieces, keep_until)


def build_learner(config: PPOConfig, inputs: Inputs, roles: Roles) -> Learner:
    plan = CreditSettings(
        estimator=config.algorithm.estimator,
        options=config.options["advantage_estimator"],
        shaping=config.shaping,
        norm_scopes=config.reward_norm_scopes,
        whiten_advantages=config.algorithm.whitens,
        max_new_tokens=config.sampling.lengths.response,
        whiten_std=not config.algorithm.no_advantage_std_norm,
        kl_estimator=config.kl.measured_estimator,
    )
    masks = config.asynchrony.staleness_policy == "mask"
    rows, pad_id, seed = inputs.ptx_rows, inputs.tokenizer.pad_token_id, config.debug.seed
    settings = LearningSettings(
        config.batch,
        rollout_batching(config, inputs.row_cost),
        seed,
        derived.compared_dtype(config),
        oldest_trained=config.asynchrony.staleness_bound if masks else None,
        frozen_actor_steps=config.algorithm.frozen_actor_steps,
        ptx=SupervisedMix(rows, pad_id, seed, config.ptx.ptx_coef) if rows else None,
        profiling=Profiling.of(config.debug, config.checkpoint.save_path),
    )
    return Learner(
        roles,
        inputs.tokenizer,
        settings,
        CreditAssignment(plan, config.kl, credit_routes(config, plan)),
        config.correction,
        Losses.from_config(config),
        NonFiniteMonitor(config.optim.max_nonfinite_steps, Path(config.checkpoint.save_path)),
        Teaching.from_config(config),
    )


def prompt_order(config: PPOConfig, prompts: list[Prompt]) -> PromptOrder:
    """Return what says which prompt is next."""
    seed, flags = derived.data_seed(config), config.curriculum
    shuffle = config.order.shuffle and not config.environments.env_tags
    if flags.chooses:
        mix = None if flags.curriculum_mix is None else read_mix(flags.curriculum_mix)
        return Curriculum(prompts, flags, mix, seed, shuffle=shuffle)
    return SeededStream(prompts, seed, shuffle=shuffle, data=prompts_fingerprint(prompts))


def credit_routes(config: PPOConfig, plan: CreditSettings) -> dict[str, CreditRoute]:
    """Return how the rows of the data sources in --algo_routing differ from ``plan``."""
    found = {}
    for source, route in read_algo_routes(config.algorithm.algo_routing).items():
        settings = plan
        if route.estimator is not None:
            estimator = advantage_estimators[route.estimator]
            settings = replace(
                plan,
                estimator=estimator,
                options=route.options,
                norm_scopes=config.norm_scopes_for(estimator),
                whiten_advantages=config.algorithm.whitens_for(estimator),
            )
        found[source] = CreditRoute(settings, route.rl_weight, route.kl_weight)
    return found


def build_rollouts(
    config: PPOConfig, inputs: Inputs, roles: Roles, learner: Learner, pool: EnginePool
) -> Rollouts:
    wanted, running = config.batch.rollout_batch_size, derived.prompts_running(config)
    filtered = config.filtering.dynamic_filtering
    to_try = derived.prompts_to_try(config, len(inputs.prompts))
    chosen = DynamicFilter(config.filtering, to_try, wanted, running) if filtered else None
    prompts = inputs.prompts or inputs.eval_prompts  # --eval_only has no training prompts
    order = prompt_order(config, prompts)
    limits = BufferLimits(
        wanted,
        running,
        config.asynchrony.steps_ahead,
        config.asynchrony.staleness_bound,
        config.asynchrony.staleness_policy,
        config.asynchrony.carries_over,
        in_waves=config.collecting.rollout_scheduler == "batch",
    )
    request = RolloutRequest(
        config.batch.n_samples_per_prompt,
        training_sampling(config),
        seed=(config.debug.seed, 0, 0) if config.debug.full_determinism else None,
        greedy="greedy_rewards" in config.algorithm.estimator.needs,
        redundancy=config.environments.env_group_redundancy,
    )
    buffer = RolloutBuffer(order, limits, chosen)
    if (saved := config.collecting.rollout_replay_dir) is not None:
        buffer = SavedRollouts(Path(saved).expanduser(), order, limits, chosen)
    # without agents a transcript would say again what the tokens say
    shown = trace_flags(config).trace_sample_rate if derived.agents_of(config) else 0.0
    return Rollouts(
        pool,
        buffer,
        roles.residency,
        request,
        build_reward_models(config, roles, learner),
        config.reward.max_reward_failure_rate,
        with_transcript(wanted, shown) if shown else lambda n: False,
        ReplayBuffer(config.replay) if config.replay.replay_groups else None,
    )


def build_reward_models(config: PPOConfig, roles: Roles, learner: Learner) -> RewardModels | None:
    if (group := roles.reward) is None:
        return None

    async def forward(groups: list[PromptGroup], model: int) -> Tensor:
        # the reward model is awake, since the stage "collect" covers engines and reward models
        batch = collate(groups, learner.pad_id)
        return await forward_rows(group, batch, learner.settings.batching, model)

    combiner = RewardCombiner(derived.rewards(config), config.reward.reward_failure_policy)
    return RewardModels(combiner, forward, most=1 if config.debug.full_determinism else None)


def build_weight_sync(config: PPOConfig, roles: Roles) -> WeightSync:
    return WeightSync(
        roles,
        config.engine,
        adapter=config.lora.lora_sync == "adapter",
        timeout=config.placement.rpc_timeout or A_YEAR,
        engines_forget="weights" in dropped_parts(config),
        keeps_tower=config.vision.freeze_visual_encoder,
    )


def build_evaluation(config: PPOConfig, inputs: Inputs) -> Evaluation | None:
    if not (prompts := [*inputs.eval_prompts]):
        return None
    if share := trace_flags(config).trace_sample_rate:
        for place in chosen([prompt.id for prompt in prompts], share):  # the trace keeps these
            prompts[place] = replace(prompts[place], render=True)
    sampling = evaluation_sampling(config)
    return Evaluation(config.evaluation, prompts, sampling, config.debug.seed)


def training_sampling(config: PPOConfig) -> Sampling:
    flags = config.sampling
    more = {"ignore_eos": flags.ignore_eos, "max_len": flags.max_len}
    more["kept_ids"] = flags.kept_ids_max if flags.cuts else 0
    if "rollout_kl" in config.algorithm.policy_loss.needs:
        more["likeliest"] = config.options["policy_loss_type"].centering_topk
    more["routes"] = config.routing.routing_replay
    return sampling_from_flags(flags, flags.lengths.response, **more)


def evaluation_sampling(config: PPOConfig) -> Sampling:
    """Return the sampling of evaluations. Temperature, top_p, top_k and length have flags of their
    own; stop texts are those of training."""
    flags, longer = config.evaluation, config.evaluation.eval_generate_max_len
    return Sampling(
        longer or config.sampling.lengths.response,
        flags.eval_temperature,
        flags.eval_top_p,
        flags.eval_top_k,
        stop=config.sampling.stop,
        max_len=None if longer else config.sampling.max_len,
    )
