"""Advantage estimators: shaped rewards, and values, to per-token advantages and returns. torch
only.

An estimator works in one of two places of ``openrl.algorithms.credit.assign_credit``, which runs
it: ``from_scores`` ones turn the samples' rewards into scores (a baseline among siblings, say),
which are then placed on tokens and summed from the end; ``from_tokens`` ones read the finished
token rewards. Names are resolved by ``openrl.extension_points.advantage_estimators``; ``suggests``
fills flags that were not given.

Rows without a sampled token (a failed sample) are no members of their group. Environment tokens
inside a response neither earn, nor discount, nor bootstrap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openrl.algorithms.masked import STD_EPS, grouped_moments, masked_sum, standardise
from openrl.config.shaping import part_weights
from openrl.errors import UserError
from openrl.extension_points import advantage_estimators
from openrl.flags.schema import flag
from openrl.types import ExperienceBatch

ScoreFn = Callable[[ExperienceBatch, Any], Tensor]
CreditFn = Callable[[ExperienceBatch, Any], tuple[Tensor, Tensor]]


def returns_to_go(token_rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Discounted sum of this and all later rewards on sampled tokens, (B, T); 0 outside the
    mask."""
    earned = token_rewards.masked_fill(~mask, 0)
    if gamma == 1:
        return earned.flip(-1).cumsum(-1).flip(-1).masked_fill(~mask, 0)
    result = torch.zeros_like(earned)
    running = torch.zeros_like(earned[:, 0])
    for t in _sampled_columns(mask):
        running = torch.where(mask[:, t], earned[:, t] + gamma * running, running)
        result[:, t] = running
    return result.masked_fill(~mask, 0)


def _sampled_columns(mask: Tensor) -> list[int]:
    """Columns with a sampled token, last first."""
    return mask.any(0).nonzero().flatten().flip(0).tolist()


def sum_from_the_end(batch: ExperienceBatch, options: Any) -> tuple[Tensor, Tensor]:
    """Undiscounted returns to go as advantages: with no rewards on the way, the score on every
    token."""
    returns = returns_to_go(batch.token_rewards, batch.loss_mask)
    return returns, returns


@dataclass(frozen=True)
class Estimator:
    """How rewards become advantages, in two steps around the shaping of token rewards."""

    scores: ScoreFn = lambda batch, options: (
        batch.scores
    )  # (B,) from shaped rewards in batch.scores
    credit: CreditFn = sum_from_the_end  # advantages, returns (B, T) from batch.token_rewards


def from_scores(fn: ScoreFn) -> Estimator:
    """Decorator: the function gives scores (B,)."""
    return Estimator(scores=fn)


def from_tokens(fn: CreditFn) -> Estimator:
    """Decorator: the function gives advantages and returns, both (B, T)."""
    return Estimator(credit=fn)


@dataclass(frozen=True)
class DiscountOptions:
    gamma: float = flag(
        1.0, "Discount per sampled token; environment tokens do not count.", bounds="[0, 1]"
    )


@dataclass(frozen=True)
class GAEOptions(DiscountOptions):
    lambd: float = flag(
        1.0, "Lambda of GAE: towards 1 less bias and more variance.", bounds="[0, 1]"
    )


@advantage_estimators.register(
    "gae", options=GAEOptions, needs=("values",), suggests={"whiten_advantages": True}
)
@from_tokens
def gae(batch: ExperienceBatch, options: GAEOptions) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation, https://arxiv.org/abs/1506.02438 eq. 16, over sampled
    tokens alone."""
    mask, rewards, values = batch.loss_mask, batch.token_rewards, batch.values
    advantages = torch.zeros_like(values)
    running, next_value = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for t in _sampled_columns(mask):
        delta = rewards[:, t] + options.gamma * next_value - values[:, t]
        running = torch.where(mask[:, t], delta + options.gamma * options.lambd * running, running)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = running
    advantages = advantages.masked_fill(~mask, 0)
    return advantages, (advantages + values).masked_fill(~mask, 0)


# -- baselines that are choices of --reward_norm_mean and --reward_norm_std ------------------------

_GROUP_MEAN = {"reward_norm_mean": "group"}
_GROUP_NORM = {"reward_norm_mean": "group", "reward_norm_std": "group"}


def group_norm(batch: ExperienceBatch, options: None) -> Tensor:
    """GRPO: reward minus the siblings' mean, divided by their std; https://arxiv.org/abs/2402.03300
    section 4.1."""
    return batch.scores


for _name in ("group_norm", "grpo"):
    advantage_estimators.register(_name, needs=("siblings",), suggests=_GROUP_NORM)(
        from_scores(group_norm)
    )


@advantage_estimators.register(
    "dr_grpo",
    needs=("siblings",),
    suggests=_GROUP_MEAN | {"loss_agg_mode": "seq-mean-token-sum-norm"},
)
@from_scores
def dr_grpo(batch: ExperienceBatch, options: None) -> Tensor:
    """Reward minus the siblings' mean, divided neither by the std nor, in the loss, by the length;
    Dr. GRPO, https://arxiv.org/abs/2503.20783."""
    return batch.scores


@advantage_estimators.register(
    "reinforce_baseline", needs=("siblings",), suggests=_GROUP_MEAN | {"whiten_advantages": True}
)
@from_scores
def reinforce_baseline(batch: ExperienceBatch, options: None) -> Tensor:
    """REINFORCE++-baseline: reward minus the siblings' mean, whitened over the batch;
    https://arxiv.org/abs/2501.03262."""
    return batch.scores


def reinforce(batch: ExperienceBatch, options: DiscountOptions) -> tuple[Tensor, Tensor]:
    """REINFORCE++: discounted returns to go, whitened over the batch;
    https://arxiv.org/abs/2501.03262."""
    returns = returns_to_go(batch.token_rewards, batch.loss_mask, options.gamma)
    return returns, returns


for _name in ("reinforce", "reinforce_pp"):
    advantage_estimators.register(
        _name, options=DiscountOptions, suggests={"whiten_advantages": True}
    )(from_tokens(reinforce))

# -- baselines of their own ------------------------------------------------------------------------


@advantage_estimators.register("rloo", needs=("siblings", "no_reward_norm"))
@from_scores
def rloo(batch: ExperienceBatch, options: None) -> Tensor:
    """Reward minus the mean of the other siblings, https://arxiv.org/abs/2402.14740. Alone in a
    group: 0."""
    mean, _, count = grouped_moments(batch.scores, batch.group_ids, batch.members)
    return ((batch.scores - mean) * count / (count - 1).clamp(min=1)).to(batch.scores.dtype)


@advantage_estimators.register("opo", needs=("siblings", "no_reward_norm"))
@from_scores
def opo(batch: ExperienceBatch, options: None) -> Tensor:
    """Reward minus the siblings' mean weighted by response length, the baseline of least variance
    under the simplifications of https://arxiv.org/abs/2505.23585."""
    lengths = batch.response_lengths
    mean_product, _, _ = grouped_moments(batch.scores * lengths, batch.group_ids, batch.members)
    mean_length, _, _ = grouped_moments(lengths, batch.group_ids, batch.members)
    return (batch.scores - mean_product / mean_length.clamp(min=1)).to(batch.scores.dtype)


@advantage_estimators.register("remax", needs=("greedy_rewards", "no_reward_norm"))
@from_scores
def remax(batch: ExperienceBatch, options: None) -> Tensor:
    """Reward minus the reward of the greedy answer, https://arxiv.org/abs/2310.10505."""
    return batch.scores - batch.greedy_rewards


@advantage_estimators.register("grpo_passk", needs=("siblings", "no_reward_norm"))
@from_scores
def grpo_passk(batch: ExperienceBatch, options: None) -> Tensor:
    """The group's best sample gets its lead over the second best, divided by the group's std, the
    others 0; https://arxiv.org/abs/2503.19595. A tie for the best has no lead."""
    _, std, _ = grouped_moments(batch.scores, batch.group_ids, batch.members)
    result = torch.zeros_like(batch.scores)
    for number in batch.group_ids.unique():
        rows = ((batch.group_ids == number) & batch.members).nonzero().flatten()
        if len(rows) > 1:
            (best, second), order = batch.scores[rows].topk(2)
            result[rows[order[0]]] = (best - second) / (std[rows[0]] + STD_EPS)
    return result


@advantage_estimators.register("gpg", needs=("siblings", "no_reward_norm"))
@from_scores
def gpg(batch: ExperienceBatch, options: None) -> Tensor:
    """Reward minus the group mean, scaled up by samples / samples in groups with a signal;
    https://arxiv.org/abs/2504.02546."""
    mean, std, _ = grouped_moments(batch.scores, batch.group_ids, batch.members)
    informative = ((std > STD_EPS) & batch.members).sum().clamp(min=1)
    return ((batch.scores - mean) * batch.members.sum() / informative).to(batch.scores.dtype)


@dataclass(frozen=True)
class PartOptions:
    gdpo_parts: tuple[str, ...] = flag(
        (), "Parts of the reward, each NAME or NAME=WEIGHT. None given: all, weight 1."
    )


@advantage_estimators.register(
    "gdpo",
    options=PartOptions,
    needs=("siblings", "reward_parts", "no_reward_norm"),
    suggests={"whiten_advantages": True},
)
@from_scores
def gdpo(batch: ExperienceBatch, options: PartOptions) -> Tensor:
    """Each part of the reward is normalised within the group by itself, then they are added with
    their weights; https://arxiv.org/abs/2601.05242. Shaping of the total reward does not reach the
    parts."""
    parts = batch.reward_parts or {}
    weights = part_weights(options.gdpo_parts) or dict.fromkeys(parts, 1.0)
    if not weights:
        raise UserError(
            "gdpo: the reward has no parts",
            "a reward that returns extra_logs, or another estimator",
        )
    total = torch.zeros_like(batch.scores)
    for name, weight in weights.items():
        if name not in parts or bool(parts[name][batch.members].isnan().any()):
            message = (
                f"gdpo needs every part in every row, and reward part {name!r} is missing in some"
            )
            raise UserError(
                message, f"--gdpo_parts with some of: {', '.join(parts) or 'none there are'}"
            )
        total = total + weight * standardise(parts[name], batch.group_ids, batch.members)
    return total


# -- turns and steps of agents ---------------------------------------------------------------------


@dataclass(frozen=True)
class TurnOptions:
    turn_gamma: float = flag(
        1.0, "Discount per turn of a dialogue, or per step of an agent.", bounds="[0, 1]"
    )


@advantage_estimators.register("turn_reinforce", options=TurnOptions)
@from_tokens
def turn_reinforce(batch: ExperienceBatch, options: TurnOptions) -> tuple[Tensor, Tensor]:
    """Returns to go over turns: every token of a turn gets the turn's reward plus ``turn_gamma``
    times the return of the next turn. A turn is a run of sampled tokens."""
    returns = torch.zeros_like(batch.token_rewards)
    following = torch.zeros_like(batch.token_rewards[:, 0])
    for turn in range(int(batch.turn_ids.max()), -1, -1):
        inside = (batch.turn_ids == turn) & batch.loss_mask
        earned = masked_sum(batch.token_rewards, inside, -1) + options.turn_gamma * following
        following = torch.where(inside.any(-1), earned, following)
        returns = torch.where(inside, following[:, None], returns)
    return returns, returns


def step_returns(batch: ExperienceBatch, gamma: float) -> Tensor:
    """(B,): score of the row plus the discounted scores of the later steps of its episode."""
    result = torch.zeros_like(batch.scores)
    following: dict[int, Tensor] = {}
    for row in reversed(range(len(batch))):
        episode = int(batch.trajectory_ids[row])
        following[episode] = result[row] = batch.scores[row] + gamma * following.get(episode, 0.0)
    return result


@advantage_estimators.register("step_reinforce", options=TurnOptions, needs=("steps",))
@from_scores
def step_reinforce(batch: ExperienceBatch, options: TurnOptions) -> Tensor:
    """Discounted return of each step of an episode, one row a step; normalised by
    --reward_norm_*."""
    return step_returns(batch, options.turn_gamma)


@dataclass(frozen=True)
class GiGPOOptions:
    gigpo_episode_weight: float = flag(1.0, "Weight of the episode advantage.", bounds=">= 0")
    gigpo_step_weight: float = flag(
        1.0, "Weight of the advantage among steps from an equal state.", bounds=">= 0"
    )
    gigpo_gamma: float = flag(0.95, "Discount per step of the step return.", bounds="[0, 1]")


@advantage_estimators.register(
    "gigpo", options=GiGPOOptions, needs=("siblings", "steps", "no_reward_norm")
)
@from_scores
def gigpo(batch: ExperienceBatch, options: GiGPOOptions) -> Tensor:
    """Group-in-group advantages, https://arxiv.org/abs/2505.10978: the episode's total among
    episodes of the prompt, plus the step's return among steps of the prompt that answer an equal
    observation.

    Each episode counts once among its siblings, however many steps it has.
    """
    total, _, steps = grouped_moments(batch.scores, batch.trajectory_ids, batch.members)
    first = torch.zeros_like(batch.members)
    for episode in batch.trajectory_ids[batch.members].unique():
        rows = ((batch.trajectory_ids == episode) & batch.members).nonzero().flatten()
        first[rows[0]] = True
    episodes = standardise((total * steps).to(batch.scores.dtype), batch.group_ids, first)
    states = batch.group_ids * (batch.state_ids.max() + 1) + batch.state_ids
    among_steps = standardise(step_returns(batch, options.gigpo_gamma), states, batch.members)
    return options.gigpo_episode_weight * episodes + options.gigpo_step_weight * among_steps
