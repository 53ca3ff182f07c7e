"""Everything that is read and checked before any process starts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase

from openrl.config import derived
from openrl.config.checks import ranks_share_a_step
from openrl.config.commands import PPOConfig
from openrl.config.presets import PRESETS
from openrl.data.difficulty import with_difficulty
from openrl.data.prompts import PromptBuilder, Report, load_eval_prompts, load_prompts
from openrl.data.tokenizer import policy_tokenizer
from openrl.errors import UserError
from openrl.files import write_atomically
from openrl.flags.dump import dump_yaml
from openrl.flags.values import show
from openrl.models.device import Device, resolve_device
from openrl.models.scalar_model import stored_moments
from openrl.rewards.build import check_reward_sources
from openrl.rollout.engine import check_engine_kwargs
from openrl.types import Prompt


@dataclass(frozen=True)
class Inputs:
    """What an RL run starts from."""

    device: Device
    tokenizer: PreTrainedTokenizerBase
    prompts: list[Prompt]
    eval_prompts: list[Prompt]
    reports: list[Report]


def prepare(config: PPOConfig) -> Inputs:
    """Read tokenizer and data, try the reward functions. Raises UserError for the first thing that does not fit."""
    device = resolve_device(config.device)
    world = derived.actor_world(config.placement, device)
    if world is not None:
        check_batches(config, world)
    check_engine_kwargs(config.engine.vllm_engine_kwargs)
    rewards = derived.rewards(config)
    check_reward_sources(config.reward, rewards.sources, config.debug.plugin)
    check_reward_models(config)
    tokenizer = policy_tokenizer(config.model, config.templates.tokenizer_chat_template)
    builder = PromptBuilder(
        config.data,
        config.templates,
        tokenizer,
        config.sampling.prompt_max_len,
        workers=config.order.preprocess_num_workers,
    )
    prompts, reports = load_prompts(builder, derived.data_seed(config))
    shaping = config.shaping
    if shaping.difficulty_loss_weight and shaping.difficulty_key != "auto":
        prompts = with_difficulty(prompts, shaping.difficulty_key, config.data.prompt_data)
    eval_prompts: list[Prompt] = []
    if config.evaluation.eval_dataset:
        eval_prompts, more = load_eval_prompts(builder, config.evaluation)
        reports += more
    rewards.check_routes(prompt.source for prompt in (*prompts, *eval_prompts))
    if len(prompts) < config.batch.rollout_batch_size:
        raise UserError(
            f"--rollout_batch_size {config.batch.rollout_batch_size} prompts a step, but --prompt_data has {len(prompts)}",
            f"--rollout_batch_size {len(prompts)} or less, or more prompts",
        )
    steps = derived.total_steps(config.batch, len(prompts))
    if (frozen := derived.frozen_actor_steps(config)) >= steps:
        raise UserError(
            f"--freezing_actor_steps {frozen - 1} leaves the actor as it is for {frozen} steps, and the run has {steps}",
            f"--freezing_actor_steps {steps - 2}, or a longer run" if steps > 1 else "leave it out",
        )
    return Inputs(device, tokenizer, prompts, eval_prompts, reports)


def check_reward_models(config: PPOConfig) -> None:
    """Raises UserError if --normalize_reward has nothing to go by."""
    for source in derived.rewards(config).sources:
        if source.kind == "model" and config.reward.normalize_reward:
            stored_moments(source.address, config.model.trust_remote_code)


def check_batches(config: PPOConfig, actor_ranks: int) -> None:
    """Raises UserError if an optimizer step does not divide among the ranks; only the cluster may know their number."""
    if problems := list(ranks_share_a_step(config, actor_ranks)):
        raise UserError("\n".join(map(str, problems)))


def effective_flags(config: Any) -> dict[str, Any]:
    """Every flag of a config with its value, as plain data; kept beside checkpoints."""
    return json.loads(json.dumps(yaml.safe_load(dump_yaml(config))))


def preset_lines(config: PPOConfig) -> list[str]:
    """What --algo_preset stands for in this run: one line, none without a preset."""
    name = config.algorithm.algo_preset
    if name is None:
        return []
    now = effective_flags(config)
    flags = []
    for flag, value in PRESETS[name].items():
        differs = flag not in now or show(now[flag]) != show(value)
        other = f" (instead of {show(value)})" if differs else ""
        flags.append(f"--{flag} {show(now[flag]) if flag in now else 'left out'}{other}")
    return [f"--algo_preset {name}: {' '.join(flags)}"]


def start_lines(config: PPOConfig) -> list[str]:
    """What a run says before anything else: what its preset stands for, and a pass that it leaves out."""
    left_out = {
        "update": "one optimizer step per rollout: old log-probs are the update's own, without a pass before it",
        "engine": "--skip_old_logprob always: the engine's log-probs are the old ones",
    }
    source = derived.old_logprobs(config)
    return [*preset_lines(config), *([left_out[source]] if source in left_out else [])]


def write_config(config: Any, run_dir: Path) -> None:
    """The effective flags as config.yaml, which --config reads."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(run_dir / "config.yaml", dump_yaml(config))
