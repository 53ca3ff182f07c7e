"""Reads and checks everything before any process starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from itertools import chain
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from openrl.agents.build import check_agents
from openrl.algorithms.batching import PER_TOKEN
from openrl.algorithms.partition import RowCost
from openrl.cluster.planner import check_address
from openrl.config import derived
from openrl.config.algo_routes import read_algo_routes
from openrl.config.commands import PPOConfig, RMConfig, SupervisedConfig
from openrl.config.conditions import VLLM
from openrl.config.groups.checkpoint import CheckpointFlags
from openrl.config.groups.reward_shaping import part_weights
from openrl.config.lengths import fitting_lengths, length_flags, longest_judged, longest_sequence
from openrl.data.answers import SupervisedRow
from openrl.data.curriculum import check_mix
from openrl.data.environments import EVALUATED_SEEDS, MOST_SEEDS, environment_prompts
from openrl.data.images import RowImages, image_budget, row_images
from openrl.data.privileged import Hints
from openrl.data.prompts import PromptBuilder, load_eval_prompts, load_prompts
from openrl.data.tokenizer import policy_tokenizer
from openrl.errors import ErrorCollector, UserError
from openrl.models.attention import check_attention
from openrl.models.changes import check_changes
from openrl.models.checkpointing import check_recompute
from openrl.models.cost import row_cost
from openrl.models.device import Device, resolve_device
from openrl.models.experts import check_mixture
from openrl.models.exports import check_export, check_tokenizer_saves, try_to_save
from openrl.models.lora import check_targets
from openrl.models.routers import check_routers
from openrl.models.scalar_model import stored_moments
from openrl.models.sequence_parallel import check_shape
from openrl.models.stored import (
    JUDGED,
    JUDGED_FIX,
    check_backbone,
    check_head,
    check_language_model,
    check_length,
    check_tokens,
    check_trainable,
    load_config,
)
from openrl.rewards.build import check_labels, check_prompts, check_reward_sources
from openrl.rewards.known_parts import check_parts
from openrl.rollout_engines.parallel import check_engine
from openrl.rollout_engines.vllm_fields import check_engine_kwargs
from openrl.trainer.learning.ptx import load_ptx
from openrl.trainer.planning.memory_estimate import model_shape
from openrl.trainer.planning.other_models import (
    check_privileged,
    check_same_tokens,
    check_sources,
    check_teachers,
)
from openrl.trainer.rollout.evaluation import metric_names
from openrl.trainer.rollout.replay import check_steps_kept
from openrl.trainer.saving.checkpoints import find_start, step_of
from openrl.trainer.saving.disk import require_room
from openrl.trainer.saving.uploads import Uploads
from openrl.training_engine.deepspeed_config import check_device, check_overrides
from openrl.training_engine.optimizers import check_shard
from openrl.training_engine.whole_weights import check_layers
from openrl.types import Prompt
from openrl.vision.processor import sees
from openrl.workers.roles import agent_setup, check_ranks, model_paths


@dataclass(frozen=True)
class Inputs:
    """The checked inputs of an RL run."""

    device: Device
    tokenizer: PreTrainedTokenizerBase
    prompts: list[Prompt]
    eval_prompts: list[Prompt]
    reports: list[str]  # lines on the agent and on each source of data
    ptx_rows: list[SupervisedRow] = field(default_factory=list)
    row_cost: RowCost = PER_TOKEN


def prepare(config: PPOConfig) -> Inputs:
    """Read tokenizer and data, try the rewards. Raises one UserError that lists all problems."""
    elsewhere = config.debug.dry_run or config.placement.address is not None
    device = resolve_device(config.device, joined=elsewhere)
    path, trusted = config.model.pretrain, config.model.trust_remote_code
    overrides, roles = config.changes.model_config_overrides, config.model_roles
    collector = ErrorCollector()
    if (world := config.placement.ranks_of("actor", device)) is not None:
        collector.run(check_ranks, config, {"actor": world})
    if config.mixture.aux_loss_coef:
        collector.run(check_mixture, path, trusted)
    if config.routing.routing_replay:
        collector.run(check_routers, path, trusted, overrides)
        if VLLM.holds(config) and device == "cpu":
            with collector:
                raise UserError(
                    "--routing_replay: vLLM returns the experts that it chose only on a GPU",
                    "--rollout_backend hf",
                )
    check_training(config, device, collector)
    collector.run(check_critic_adapters, config)
    with collector:
        check_models_split(config, chain(*model_paths(config).values()))
    if VLLM.holds(config):
        collector.run(check_engine_kwargs, config.engine.vllm_engine_kwargs)
        collector.run(check_engine, path, config.engine, device, trusted)
        collector.run(check_synced, path, trusted)
    with collector:
        rewards = derived.rewards(config)
        check_reward_sources(config.reward, rewards.all_sources, config.debug.plugin)
        check_reward_models(config)
    estimator = config.algorithm.estimator
    if "reward_parts" in estimator.needs and not derived.agents_of(config):
        words = getattr(config.options["advantage_estimator"], "gdpo_parts", ())
        collector.run(check_parts, derived.rewards(config), estimator.name, part_weights(words))
    with collector:
        check_address(config.placement.address)
    collector.run(check_language_model, path, trusted, overrides)
    if "reference" in roles and config.others.ref_pretrain:
        collector.run(check_language_model, config.others.ref_pretrain, trusted)
    if "critic" in roles and config.others.critic_pretrain:
        critic, head = config.others.critic_pretrain, config.others.value_head_prefix
        collector.run(check_backbone, critic, trusted, head)
    with collector:
        longest, fix = longest_sequence(config), partial(fitting_lengths, config)
        names = ", ".join(f"--{name}" for name in length_flags(config))
        rows = f"{names}: prompt and response"
        check_length(path, longest, trusted, rows, fix, overrides)
    with collector:
        judged = longest_judged(config)
        check_length(path, judged, trusted, JUDGED, JUDGED_FIX.format, overrides)
    with collector:
        inputs = read_data(config, device)
        source = derived.rewards(config).flag
        longest = config.sampling.lengths.both
        check_agents(agent_setup(config), inputs.tokenizer, source, longest)
        check_steps(config, len(inputs.prompts))
        check_mix(config.curriculum, inputs.prompts)
        check_replay(config, len(inputs.prompts))
        check_best_metric(config, inputs.eval_prompts)
    collector.raise_all()
    inputs = replace(inputs, row_cost=row_cost(path, trusted))
    for prompts in (inputs.prompts, inputs.eval_prompts):
        check_prompts(config.reward, rewards, prompts)
        check_labels(config.reward, rewards, prompts, config.debug.plugin)
        check_tokens(path, inputs.tokenizer, [p.token_ids for p in prompts], trusted)
    for model in rewards.models:
        check_same_tokens(model, inputs.tokenizer, trusted)
    check_sources("algo_routing", read_algo_routes(config.algorithm.algo_routing), inputs.prompts)
    check_teachers(config, inputs.prompts, inputs.tokenizer)
    check_privileged(config, inputs.prompts, inputs.tokenizer)
    return inputs


def check_training(
    config: PPOConfig | SupervisedConfig, device: Device, collector: ErrorCollector
) -> None:
    """Run the checks that all commands make which train a model: of the model's flags, of its
    checkpoints and of the places where it is saved."""
    path, trusted = config.model.pretrain, config.model.trust_remote_code
    collector.run(check_attention, config.model, device)
    collector.run(check_trainable, path, config.lora.load_in_4bit, trusted)
    collector.run(check_targets, config.lora, path, trusted)
    collector.run(check_changes, path, config.changes, trusted)
    collector.run(check_device, config.model.param_dtype, device)
    collector.run(check_overrides, config.deepspeed, config.model.param_dtype, device)
    collector.run(check_recompute, path, config.deepspeed, trusted)
    collector.run(check_shards, config, device)
    collector.run(find_start, config.checkpoint, False)
    collector.run(check_places, path, config.checkpoint)
    collector.run(check_export, path, trusted, not isinstance(config, RMConfig))


def read_data(config: PPOConfig, device: Device) -> Inputs:
    """Read the tokenizer, the prompts, the evaluation prompts and the rows of --ptx_data. Raises
    one UserError that lists the problems of all sets."""
    tokenizer = policy_tokenizer(config.model, config.templates.tokenizer_chat_template)
    builder = PromptBuilder(
        config.data,
        config.templates,
        tokenizer,
        config.sampling.lengths.prompt,
        workers=config.order.preprocess_num_workers,
        images=row_images(config.vision, config.model),
    )
    collector = ErrorCollector()
    eval_prompts: list[Prompt] = []
    eval_reports: list[str] = []
    collector.run(check_saved_beside, tokenizer, builder.images)
    with collector:
        prompts, reports = training_prompts(config, builder)
    with collector:
        if config.evaluation.eval_dataset:
            eval_prompts, eval_reports = load_eval_prompts(builder, config.evaluation)
        elif config.environments.env_tags and config.evaluation.asked_for:
            count = config.evaluation.eval_max_samples or EVALUATED_SEEDS
            eval_prompts = seed_prompts(config, count, "eval")
    with collector:
        lengths, plays = config.sampling.lengths, config.environments.env_tags
        room = lengths.both if plays else lengths.prompt  # an episode shows more as it goes on
        budget = image_budget(builder.images, room, "prompt_max_len")
    with collector:
        ptx_rows, ptx_reports = load_ptx(config, tokenizer)
    collector.raise_all()
    reports += [*eval_reports, *budget, *ptx_reports]
    return Inputs(device, tokenizer, prompts, eval_prompts, reports, ptx_rows)


def check_saved_beside(tokenizer: PreTrainedTokenizerBase, images: RowImages | None) -> None:
    """Raise UserError if the tokenizer or the processor cannot be saved with the trained model."""
    check_tokenizer_saves(tokenizer)
    if images is not None and images.processor is not None:
        try_to_save("processor", tokenizer.name_or_path, images.processor.save)


def training_prompts(config: PPOConfig, builder: PromptBuilder) -> tuple[list[Prompt], list[str]]:
    """Return the prompts of --prompt_data, or seeds for --env_tags; none if nothing is trained."""
    shaping, data = config.shaping, config.data
    if config.environments.env_tags:
        of_steps = config.batch.max_steps * config.batch.rollout_batch_size
        count = min(data.max_samples, MOST_SEEDS, of_steps if of_steps > 0 else MOST_SEEDS)
        return seed_prompts(config, count, "train"), []
    if data.prompt_data is None:
        return [], []
    rated = shaping.difficulty_loss_weight and shaping.difficulty_key != "auto"
    key = shaping.difficulty_key if rated else None
    hints = Hints.of(config.teacher, config.templates.apply_chat_template)
    return load_prompts(builder, derived.data_seed(config), key, hints)


def seed_prompts(config: PPOConfig, count: int, kind: str) -> list[Prompt]:
    groups = config.environments.groups_per_tag(derived.prompts_running(config))
    return environment_prompts(groups, count, derived.data_seed(config), kind)


def check_steps(config: PPOConfig, prompts: int) -> None:
    """Raise UserError if the prompts do not fill a step, or if no step trains the actor."""
    if config.evaluation.eval_only:
        return
    sizes = {"rollout_batch_size": config.batch.rollout_batch_size}
    sizes["vllm_generate_batch_size"] = config.collecting.vllm_generate_batch_size or 0
    for name, size in sizes.items():
        if prompts < size:
            raise UserError(
                f"--{name} asks for {size} prompts per step, but the data has {prompts}",
                f"at most --{name} {prompts}, or more prompts",
            )
    steps = config.batch.total_steps(prompts)
    if (frozen := config.algorithm.frozen_actor_steps) >= steps:
        raise UserError(
            f"--freezing_actor_steps {frozen - 1} freezes the actor for {frozen} steps, but the"
            f" run has only {steps}",
            f"--freezing_actor_steps {steps - 2}, or a longer run" if steps > 1 else "leave it out",
        )


def check_replay(config: PPOConfig, prompts: int) -> None:
    """Raise UserError if --rollout_replay_dir lacks a step of the run."""
    if (directory := config.collecting.rollout_replay_dir) is not None:
        done = max(step_of(find_start(config.checkpoint, deep=False)[0]), 0)
        steps = config.batch.total_steps(prompts)
        check_steps_kept(Path(directory).expanduser(), done + 1, steps)


def check_places(pretrain: str, flags: CheckpointFlags) -> None:
    """Raise DiskFull if --save_path cannot hold the model, judged by its current size, and
    UserError if no installed library can write to --ckpt_upload_dir."""
    if flags.ckpt_upload_dir:
        Uploads(flags.ckpt_upload_dir)
    model = Path(pretrain).expanduser()
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors") if path.exists())
    require_room(Path(flags.save_path).expanduser(), weights, "--save_path: the trained model")


def check_shards(config: PPOConfig | SupervisedConfig, device: Device) -> None:
    """Raise UserError if ZeRO 1 or 2 leaves a rank of the trained model with a shard that
    --optimizer cannot step on. The engine checks again, with ranks that only the cluster knows."""
    ranks, tp = derived.trained_ranks(config), config.parallel.ds_tensor_parallel_size
    whole = config.deepspeed.zero_stage not in (1, 2) or config.lora.adapts
    if config.optim.optimizer == "adamw_8bit" and ranks is not None and not whole:
        shape = model_shape(config.model.pretrain, config.model.trust_remote_code).of_rank(tp)
        check_shard(config.optim.optimizer, shape.parameters // max(1, ranks // tp), device)


def check_critic_adapters(config: PPOConfig) -> None:
    """Raise UserError if the layers of --critic_pretrain do not accept the policy's adapters."""
    path = config.others.critic_pretrain
    if path is None or "critic" not in config.model_roles:
        return
    try:
        check_targets(config.lora.of_critic, path, config.model.trust_remote_code)
    except UserError as error:
        raise UserError(
            f"--critic_pretrain {path}: {error.message}", error.remedy
        ) from None  # the cause would repeat the message


def check_best_metric(config: PPOConfig, eval_prompts: list[Prompt]) -> None:
    """Raise UserError if --best_metric_key is not a metric of the evaluation, since then no
    checkpoint would ever be the best."""
    key = config.checkpoint.best_metric_key
    known = metric_names(eval_prompts, config.evaluation.eval_n_samples_per_prompt)
    if eval_prompts and key not in (*known, "auto", "none"):
        near = get_close_matches(key, known, 1) or known
        raise UserError(
            f"--best_metric_key: the evaluation has no metric {key!r}, but {', '.join(known)}",
            f"--best_metric_key {near[0]}",
        )


def check_reward_models(config: PPOConfig) -> None:
    """Raise UserError if a reward model has no scalar head, cannot see the images of prompts, or
    lacks the statistics for --normalize_reward."""
    trusted = config.model.trust_remote_code
    for model in derived.rewards(config).models:
        check_head(model, config.others.value_head_prefix, trusted)
        if config.vision.max_images_per_prompt and not sees(load_config(model, trusted)):
            message = f"--reward_pretrain: {model} reads only text, but prompts have images"
            raise UserError(message, "a vision-language reward model, or a reward function")
        if config.others.normalize_reward:
            stored_moments(model, trusted)


PAST_RELOADS = {"gpt_oss"}
"""Types whose vLLM model writes experts past the reload that a sync is (read in vLLM 0.32), so that
they keep their first weights. The first sync would say so; here it is said before the start."""


def check_synced(path: str, trust_remote_code: bool) -> None:
    """Raise UserError if vLLM cannot take new weights of the policy's type while it runs."""
    kind = load_config(path, trust_remote_code).model_type
    if kind in PAST_RELOADS:
        message = f"--pretrain: vLLM does not load new experts of {kind} into a running engine"
        raise UserError(message, "--rollout_backend hf")


def check_models_split(config: PPOConfig | SupervisedConfig, paths: Iterable[str]) -> None:
    """Raise UserError if a model cannot be split over the ranks that share rows."""
    for path in dict.fromkeys(paths):
        check_shape(path, config.model.trust_remote_code, config.parallel)
        check_layers(path, config.model.trust_remote_code, config.parallel.ds_tensor_parallel_size)
