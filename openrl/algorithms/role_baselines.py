"""Advantage estimators for episodes that several agents share: whom an agent is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from openrl.algorithms.advantages import from_scores
from openrl.algorithms.masked import grouped_moments
from openrl.algorithms.trajectories import TrajectoryRewards
from openrl.errors import UserError
from openrl.extension_points import advantage_estimators
from openrl.flags.schema import Options, flag
from openrl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RAEOptions(Options):
    rae_decay: float = flag(
        0.95,
        "Share of a role's baseline that one more trajectory of the role keeps.",
        bounds="[0, 1)",
    )


@advantage_estimators.register("rae", options=RAEOptions, needs=("no_reward_norm", "role_means"))
@from_scores
def rae(outcomes: TrajectoryRewards, options: RAEOptions) -> Tensor:
    """Role-conditioned advantages: reward minus the moving average of what the same role earned in
    earlier batches; https://arxiv.org/abs/2506.24119 (SPIRAL). A role is an agent's name in a data
    source.

    The baseline never contains the trajectory's own reward. In the first batch of a role it is the
    mean of the role's other trajectories. The n trajectories of a batch move the average at once,
    to decay^n of itself and 1 - decay^n of their mean, so their order does not matter.
    """
    means, rewards = outcomes.role_means, outcomes.rewards.double()
    scores = torch.zeros_like(rewards)
    roles = [*zip(outcomes.sources, outcomes.agents, strict=True)]
    for role in dict.fromkeys(roles):
        members = torch.tensor([own == role for own in roles]) & outcomes.valid
        own, n, name = rewards[members], int(members.sum()), "/".join(role)
        if not n:
            continue
        mean = float(own.mean())
        if name in means:
            scores[members], kept = own - means[name], options.rae_decay**n
            means[name] = kept * means[name] + (1 - kept) * mean
        else:
            scores[members], means[name] = (own - mean) * n / max(n - 1, 1), mean
    return scores.to(outcomes.rewards.dtype)


@dataclass(frozen=True)
class HierarchicalOptions(Options):
    episode_agents: tuple[str, ...] = flag(
        ("solver",),
        "Agents whose trajectories are compared within their episode; the others are compared"
        " among all episodes of the prompt.",
    )


@advantage_estimators.register(
    "hierarchical", options=HierarchicalOptions, needs=("agents", "no_reward_norm")
)
@from_scores
def hierarchical(outcomes: TrajectoryRewards, options: HierarchicalOptions) -> Tensor:
    """Reward minus the mean of the agent's peers, for agents that set each other tasks: several
    attempts on the task of one episode are compared with each other, and those that set the tasks
    with those of other episodes. A trajectory without peers gets 0. No paper; prime-rl (48a54ed)
    takes the agents that occur more than once in an episode for those of ``--episode_agents``.

    Raises UserError if no agent has one of the names.
    """
    within = torch.tensor([agent in options.episode_agents for agent in outcomes.agents])
    if outcomes.valid.any() and not (within & outcomes.valid).any():
        names = sorted({*outcomes.agents})
        raise UserError(
            f"hierarchical: no agent is called {' or '.join(options.episode_agents)}",
            f"--episode_agents with some of: {', '.join(names)}; or --advantage_estimator dr_grpo",
        )
    episodes = torch.where(within, outcomes.episodes + 1, 0)
    peers = outcomes.group_ids * (episodes.max() + 1) + episodes
    mean, _, _ = grouped_moments(outcomes.rewards, peers, outcomes.valid)
    return (outcomes.rewards.double() - mean).to(outcomes.rewards.dtype)
