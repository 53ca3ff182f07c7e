"""One step, function by function. The pipeline knows how each stage is done, never when.

 Prompt          data/prompts          PromptStream.take(n) -> [Prompt]
   |  collect    trainer/collector     Collector.collect(prompts, request) -> [Group]
   |             agents                Agent.run(prompt, generate, sampling) -> Trajectory
   |             rollout/engine        generate(token_ids, sampling) -> Completion
   |             rewards               Reward.score(group) -> [Score]
   |  collate    algorithms/batching   collate(groups, pad_id) -> ExperienceBatch
   |  annotate   trainer/pipeline      reward, policy, reference, critic: ModelWorker.forward
   |  credit     algorithms/shaping    shape_rewards, place_rewards; then algorithms/advantages: estimator(batch)
   |  update     algorithms/batching   plan_steps(...) -> StepPlan of each step and rank
   |             training/updates      forward -> policy loss -> step_loss -> backward, one optimizer step
   v  publish    weights/buckets       fill_buckets -> load_bucket ... finish_sync -> version
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openrl.algorithms.batching import collate, join_rows, plan_steps, split_rows
from openrl.cluster.group import WorkerGroup
from openrl.cluster.rollout_worker import CollectRequest
from openrl.config.rollout import SamplingFlags
from openrl.errors import UserError
from openrl.tracking.metrics import Metric, merge_all
from openrl.trainer.collector import Collector
from openrl.trainer.credit import Credit
from openrl.types import ExperienceBatch, Group, Prompt, Sampling


@dataclass(frozen=True)
class Roles:
    """The worker groups of a run; None where the run has no such model."""

    policy: WorkerGroup
    rollout: WorkerGroup
    critic: WorkerGroup | None = None
    reference: WorkerGroup | None = None
    reward: WorkerGroup | None = None

    def models(self) -> dict[str, WorkerGroup]:
        named = {"actor": self.policy, "critic": self.critic, "reference": self.reference, "reward": self.reward}
        return {name: group for name, group in named.items() if group is not None}
