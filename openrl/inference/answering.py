"""Answers to prompts from one engine in this process, with their rewards, as rows of output."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase

from openrl.agents.single_turn import SingleTurn
from openrl.cluster.rollout_worker import request_seed
from openrl.config.inference import InferenceSamplingFlags, RewardModelFlags
from openrl.config.model import LoadFlags
from openrl.config.reward import RewardFlags, bearer_token
from openrl.config.reward_plan import RewardPlan, RewardSource
from openrl.flags.dump import dump_yaml
from openrl.inference.output import Row
from openrl.inference.scoring import ModelScorer, load_reward_model
from openrl.models.device import Device
from openrl.rewards.base import Reward
from openrl.rewards.build import build_reward
from openrl.rollout.build import sampling_of, start_engine
from openrl.rollout.engine import EngineSpec, RolloutEngine
from openrl.types import Group, Prompt, Sampling, Trajectory

WIDTH = 256  # prompts that are answered or scored side by side
HOW = frozenset(
    [
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
        "max_reward_failure_rate",
    ]
)
"""Flags that say how an output is computed, not what stands in it: they may change when a run goes
on."""


def answer_sampling(flags: InferenceSamplingFlags) -> Sampling:
    sampling = sampling_of(flags, flags.generate_max_len)
    return replace(sampling, temperature=0.0) if flags.greedy_sampling else sampling


class Answering:
    """Answers prompts ``n`` times each. A prompt's answers depend on the seed and its position, not
    on when a run began."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        n: int,
        seed: int,
    ) -> None:
        self._engine, self._agent = engine, SingleTurn(tokenizer.decode)
        self._sampling, self._n, self._seed = sampling, n, seed

    async def group(self, position: int, prompt: Prompt) -> Group:
        """The answers to one prompt, not yet scored."""
        return Group(
            prompt,
            await asyncio.gather(*(self._answer(position, prompt, i) for i in range(self._n))),
        )

    async def _answer(self, position: int, prompt: Prompt, sample: int) -> Trajectory:
        sampling = replace(self._sampling, seed=request_seed(self._seed, 0, position, sample))
        return await self._agent.run(prompt, self._engine.generate, sampling)


@asynccontextmanager
async def running_engine(backend: str, spec: EngineSpec) -> AsyncIterator[RolloutEngine]:
    engine = await start_engine(backend, spec)
    try:
        yield engine
    finally:
        await engine.close()


@dataclass(frozen=True)
class RewardSetting:
    """All that rewards are made from."""

    flags: RewardFlags
    plan: RewardPlan
    rm: RewardModelFlags
    load: LoadFlags
    batch_size: int  # texts of one forward pass of a reward model
    device: Device
    plugins: tuple[str, ...]


def model_source(source: RewardSource, s: RewardSetting) -> ModelScorer:
    model = load_reward_model(
        source.address, s.rm, s.load, s.device, normalize=s.flags.normalize_reward
    )
    return ModelScorer(model, batch_size=s.batch_size, name=source.name)


@asynccontextmanager
async def running_reward(
    setting: RewardSetting, tokenizer: PreTrainedTokenizerBase
) -> AsyncIterator[Reward | None]:
    """The reward of all sources, models in this process among them; None if there is no source."""
    s = setting
    models = {
        source.name: model_source(source, s) for source in s.plan.sources if source.kind == "model"
    }
    reward = build_reward(
        s.flags, s.plan, tokenizer, plugins=s.plugins, token=bearer_token(), models=models
    )
    try:
        yield reward
    finally:
        if reward is not None:
            await reward.close()
        for model in models.values():
            if model.counts.cut:
                print(
                    f"{model.name}: {model.counts.cut} of {model.counts.texts} texts lost tokens at"
                    " the start (--max_len)"
                )


async def score(reward: Reward | None, group: Group) -> Group:
    """The group, each answer with its score if there is a reward."""
    if reward is not None:
        for trajectory, given in zip(group.trajectories, await reward.score(group), strict=True):
            trajectory.score = given
    return group


@dataclass(frozen=True)
class ColumnNames:
    """Of the output."""

    prompt: str
    response: str
    label: str


def rows_of(
    unit: str, group: Group, names: ColumnNames, tokenizer: PreTrainedTokenizerBase
) -> list[Row]:
    """One row per answer: prompt, response without special tokens, how it ended, label and reward
    as far as there are."""
    return [
        {
            "id": unit,
            "sample": sample,
            names.prompt: group.prompt.text,
            names.response: tokenizer.decode(t.response_ids, skip_special_tokens=True),
            "finish": t.end.value,
            "source": group.prompt.source,
        }
        | ({} if group.prompt.label == "" else {names.label: group.prompt.label})
        | reward_columns(t)
        for sample, t in enumerate(group.trajectories)
    ]


def reward_columns(trajectory: Trajectory) -> Row:
    """``reward`` (null if it failed, then ``failure`` says why), ``passed`` and the reward's
    parts."""
    given = trajectory.score
    if given is None:
        return {}
    columns: Row = {"reward": None if given.dropped else given.reward}
    if given.failure is not None:
        columns["failure"] = given.failure
    if given.passed is not None:
        columns["passed"] = given.passed
    return columns | ({"parts": dict(given.parts)} if given.parts else {})


def numbered(ids: list[str]) -> list[str]:
    """The ids, each once: a blend may hold a row several times, the second is ``id#2``."""
    seen: dict[str, int] = {}
    unique = []
    for name in ids:
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return unique


def settings_of(config: Any, besides: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The flags that decide what stands in the output, with their values."""
    return {
        name: value
        for name, value in yaml.safe_load(dump_yaml(config)).items()
        if name not in HOW | besides
    }
