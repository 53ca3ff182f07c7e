"""Advantage estimators turn shaped rewards, and values, into advantages and returns.

``credit.compute_advantages`` runs an estimator in one of two places. One ``from_scores`` turns the
rewards of trajectories into scores, for example by subtracting a baseline over siblings; the scores
are then placed on tokens and summed from the end. One ``from_tokens`` reads the finished token
rewards. ``suggests`` fills in flags that the user did not give.

Both kinds see N trajectories, however many rows each has; S is the largest number of sampled tokens
in any of them. One without any (a failed one) is not ``valid`` and does not count in its group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

from openrl.algorithms.masked import STD_EPS, standardise
from openrl.algorithms.shaping import place_scores
from openrl.algorithms.trajectories import SampledTokens, Trajectories, TrajectoryRewards
from openrl.config.groups.reward_shaping import part_weights
from openrl.errors import UserError
from openrl.experience import ExperienceBatch
from openrl.extension_points import advantage_estimators
from openrl.flags.schema import Options, flag
from openrl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

ScoreFn = Callable[[TrajectoryRewards, Any], "Tensor"]  # (N,) shaped rewards -> (N,) scores
# -> advantages and returns, (B, T) each
CreditFn = Callable[[ExperienceBatch, Any], "tuple[Tensor, Tensor]"]
TokenFn = Callable[[SampledTokens, Any], "tuple[Tensor, Tensor]"]  # the same, (N, S) each


def returns_to_go(rewards: Tensor, gamma: float = 1.0) -> Tensor:
    """Return the discounted sum of each token's reward and all later ones, (N, S)."""
    if gamma == 1:
        return rewards.flip(-1).cumsum(-1).flip(-1)
    result = torch.empty_like(rewards)
    running = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        result[:, t] = running = rewards[:, t] + gamma * running
    return result


def _on_rows(fn: TokenFn) -> CreditFn:
    """Wrap ``fn`` so that it takes a batch: gather each trajectory's tokens, apply ``fn`` and
    scatter the results back to the rows."""

    @wraps(fn)
    def credit(batch: ExperienceBatch, options: Any) -> tuple[Tensor, Tensor]:
        trajectories = Trajectories.of(batch)
        advantages, returns = fn(SampledTokens(batch, trajectories), options)
        return trajectories.scatter(advantages), trajectories.scatter(returns)

    return credit


@_on_rows
def sum_from_the_end(tokens: SampledTokens, options: Any) -> tuple[Tensor, Tensor]:
    """Returns-to-go as advantages; without rewards along the way, every token gets the score."""
    returns = returns_to_go(tokens.rewards)
    return returns, returns


def as_rewarded(outcomes: TrajectoryRewards, options: Any) -> Tensor:
    """Return the shaped rewards as scores, (N,), compared with nothing."""
    return outcomes.rewards


@dataclass(frozen=True)
class Estimator:
    """How rewards become advantages, in two steps around the shaping of token rewards."""

    scores: ScoreFn = as_rewarded
    credit: CreditFn = sum_from_the_end  # reads batch.token_rewards


def from_scores(fn: ScoreFn) -> Estimator:
    """Decorate a function that returns scores, (N,)."""
    return Estimator(scores=fn)


def from_tokens(fn: TokenFn) -> Estimator:
    """Decorate a function that returns advantages and returns, (N, S) each."""
    return Estimator(credit=_on_rows(fn))


@dataclass(frozen=True)
class DiscountOptions(Options):
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
def gae(tokens: SampledTokens, options: GAEOptions) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation, https://arxiv.org/abs/1506.02438 eq. 16. The last token of
    a segment is followed by the value of the next segment's first token."""
    rewards, values = tokens.rewards, tokens.values
    advantages = torch.empty_like(values)
    running, next_value = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + options.gamma * next_value - values[:, t]
        running = delta + options.gamma * options.lambd * running
        next_value, advantages[:, t] = values[:, t], running
    return advantages, advantages + values


def reinforce(tokens: SampledTokens, options: DiscountOptions) -> tuple[Tensor, Tensor]:
    """REINFORCE++: discounted returns-to-go, whitened over the batch;
    https://arxiv.org/abs/2501.03262."""
    returns = returns_to_go(tokens.rewards, options.gamma)
    return returns, returns


for _name in ("reinforce", "reinforce_pp"):
    advantage_estimators.register(
        _name, options=DiscountOptions, suggests={"whiten_advantages": True}
    )(from_tokens(reinforce))

# -- baselines among siblings ----------------------------------------------------------------------
# Each estimator suggests the --reward_norm_* scopes that its formula implies; other scopes replace
# the formula.

_GROUP_MEAN = {"reward_norm_mean": "group"}
_GROUP_NORM = {"reward_norm_mean": "group", "reward_norm_std": "group"}


def minus_group_mean(outcomes: TrajectoryRewards) -> Tensor:
    """Return each reward minus the mean over all siblings, the trajectory itself included, (N,)."""
    mean, _, _ = outcomes.group_moments(outcomes.rewards)
    return (outcomes.rewards.double() - mean).to(outcomes.rewards.dtype)


def group_norm(outcomes: TrajectoryRewards, options: None) -> Tensor:
    """GRPO: reward minus the siblings' mean, divided by their std; https://arxiv.org/abs/2402.03300
    section 4.1."""
    return outcomes.standardised(outcomes.rewards)


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
def dr_grpo(outcomes: TrajectoryRewards, options: None) -> Tensor:
    """Reward minus the siblings' mean, divided neither by the std nor, in the loss, by the length;
    https://arxiv.org/abs/2503.20783 (Dr. GRPO)."""
    return minus_group_mean(outcomes)


@advantage_estimators.register("maxrl", needs=("siblings", "no_reward_norm"))
@from_scores
def maxrl(outcomes: TrajectoryRewards, options: None) -> Tensor:
    """Reward minus the siblings' mean, divided by that mean; https://arxiv.org/abs/2602.02710
    (MaxRL). With rewards of 0 and 1 and n siblings this is the gradient of the maximum-likelihood
    objective up to the order n: prompts that are rarely solved weigh most. A group whose mean is
    not above 0 gets 0."""
    mean, _, _ = outcomes.group_moments(outcomes.rewards)
    scores = (outcomes.rewards.double() - mean) / mean.clamp(min=STD_EPS)
    return torch.where(mean > STD_EPS, scores, 0).to(outcomes.rewards.dtype)


@advantage_estimators.register(
    "reinforce_baseline", needs=("siblings",), suggests=_GROUP_MEAN | {"whiten_advantages": True}
)
@from_scores
def reinforce_baseline(outcomes: TrajectoryRewards, options: None) -> Tensor:
    """REINFORCE++-baseline: reward minus the siblings' mean, whitened over the batch;
    https://arxiv.org/abs/2501.03262."""
    return minus_group_mean(outcomes)


@advantage_estimators.register("rloo", needs=("siblings", "no_reward_norm"))
@from_scores
def rloo(outcomes: TrajectoryRewards, options: None) -> Tensor:
    """Reward minus the mean of the other siblings, https://arxiv.org/abs/2402.14740. A trajectory
    alone in its group gets 0."""
    mean, _, count = outcomes.group_moments(outcomes.rewards)
    return ((outcomes.rewards - mean) * count / (count - 1).clamp(min=1)).to(outcomes.rewards.dtype)


@advantage_estimators.register("opo", needs=("siblings", "no_reward_norm"))
@from_scores
def opo(outcomes: TrajectoryRewards, options: None) -> Tensor:
    """Reward minus the siblings' mean weighted by response length,
    https://arxiv.org/abs/2505.23585. Under the paper's simplifications this baseline has the least
    variance."""
    lengths = outcomes.lengths
    mean_product, _, _ = outcomes.group_moments(outcomes.rewards * lengths)
    mean_length, _, _ = outcomes.group_moments(lengths)
    return (outcomes.rewards - mean_product / mean_length.clamp(min=1)).to(outcomes.rewards.dtype)


@advantage_estimators.register("remax", needs=("greedy_rewards", "no_reward_norm"))
@from_scores
def remax(outcomes: TrajectoryRewards, options: None) -> Tensor:
    """Reward minus the reward of the greedy answer, https://arxiv.org/abs/2310.10505."""
    return outcomes.rewards - outcomes.greedy_rewards


@advantage_estimators.register("grpo_passk", needs=("siblings", "no_reward_norm"))
@from_scores
def grpo_passk(outcomes: TrajectoryRewards, options: None) -> Tensor:
    """The group's best sample gets its lead over the second best, divided by the group's std, and
    the others get 0; https://arxiv.org/abs/2503.19595. A tie for the best has no lead."""
    _, std, _ = outcomes.group_moments(outcomes.rewards)
    result = torch.zeros_like(outcomes.rewards)
    for number in outcomes.group_ids.unique():
        siblings = ((outcomes.group_ids == number) & outcomes.valid).nonzero().flatten()
        if len(siblings) > 1:
            (best, second), order = outcomes.rewards[siblings].topk(2)
            result[siblings[order[0]]] = (best - second) / (std[siblings[0]] + STD_EPS)
    return result


@advantage_estimators.register("gpg", needs=("siblings", "no_reward_norm"))
@from_scores
def gpg(outcomes: TrajectoryRewards, options: None) -> Tensor:
    """Reward minus the group mean, scaled up by samples / samples in groups with a signal;
    https://arxiv.org/abs/2504.02546."""
    mean, std, _ = outcomes.group_moments(outcomes.rewards)
    informative = ((std > STD_EPS) & outcomes.valid).sum().clamp(min=1)
    scores = (outcomes.rewards - mean) * outcomes.valid.sum() / informative
    return scores.to(outcomes.rewards.dtype)


@dataclass(frozen=True)
class PartOptions(Options):
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
def gdpo(outcomes: TrajectoryRewards, options: PartOptions) -> Tensor:
    """The parts of the reward, each normalised within the group, summed with their weights;
    https://arxiv.org/abs/2601.05242. Shaping of the total reward does not reach the parts."""
    parts = outcomes.parts
    weights = part_weights(options.gdpo_parts) or dict.fromkeys(parts, 1.0)
    if not weights:
        remedy = "a reward that returns extra_logs, or another estimator"
        raise UserError("gdpo: the reward has no parts", remedy)
    whole = [name for name, part in parts.items() if not part[outcomes.valid].isnan().any()]
    total = torch.zeros_like(outcomes.rewards)
    for name, weight in weights.items():
        if name not in whole:
            raise UserError(
                f"gdpo needs every part in every row, and reward part {name!r} is missing in some",
                f"--gdpo_parts with some of: {', '.join(whole)}"
                if whole
                else "a reward that returns the same extra_logs for every answer",
            )
        total = total + weight * outcomes.standardised(parts[name])
    return total


# -- turns and steps of agents ---------------------------------------------------------------------


@dataclass(frozen=True)
class TurnOptions(Options):
    turn_gamma: float = flag(
        1.0, "Discount per turn of a dialogue, or per step of an agent.", bounds="[0, 1]"
    )


def discounted_between(rewards: Tensor, ids: Tensor, gamma: float) -> Tensor:
    """Return returns-to-go, (N, S), discounted only where ``ids`` change between two tokens."""
    result = torch.empty_like(rewards)
    result[:, -1] = running = rewards[:, -1]
    for t in reversed(range(rewards.shape[1] - 1)):
        following = torch.where(ids[:, t] == ids[:, t + 1], running, gamma * running)
        result[:, t] = running = rewards[:, t] + following
    return result


@advantage_estimators.register("turn_reinforce", options=TurnOptions)
@from_tokens
def turn_reinforce(tokens: SampledTokens, options: TurnOptions) -> tuple[Tensor, Tensor]:
    """Returns-to-go over turns: every token of a turn gets the turn's reward plus ``turn_gamma``
    times the return of the next turn. A turn is a run of sampled tokens."""
    turns = tokens.turn_ids
    returns = discounted_between(tokens.rewards, turns, options.turn_gamma)
    # the return at a turn's first token is the return of the turn
    for t in range(1, returns.shape[1]):
        same = turns[:, t] == turns[:, t - 1]
        returns[:, t] = torch.where(same, returns[:, t - 1], returns[:, t])
    return returns, returns


@advantage_estimators.register("step_reinforce", options=TurnOptions, needs=("step_rows",))
@from_tokens
def step_reinforce(tokens: SampledTokens, options: TurnOptions) -> tuple[Tensor, Tensor]:
    """Returns-to-go discounted between the steps of an agent; a step is a segment."""
    returns = discounted_between(tokens.rewards, tokens.segment_ids, options.turn_gamma)
    return returns, returns


@dataclass(frozen=True)
class GiGPOOptions(Options):
    gigpo_episode_weight: float = flag(1.0, "Weight of the episode advantage.", bounds=">= 0")
    gigpo_step_weight: float = flag(
        1.0, "Weight of the advantage among steps from an equal state.", bounds=">= 0"
    )
    gigpo_gamma: float = flag(0.95, "Discount per step of the step return.", bounds="[0, 1]")


def gigpo_scores(outcomes: TrajectoryRewards, options: GiGPOOptions) -> Tensor:
    """Group-in-group advantages, https://arxiv.org/abs/2505.10978: the trajectory's reward
    normalised among its siblings, plus the step's return normalised among the steps of the same
    prompt that answer an equal observation."""
    return options.gigpo_episode_weight * outcomes.standardised(outcomes.rewards)


def gigpo_credit(batch: ExperienceBatch, options: GiGPOOptions) -> tuple[Tensor, Tensor]:
    """Give every token its trajectory's score, plus its step's part, minus any KL-to-go. Rewards
    along the way count only in the steps."""
    assert batch.shaped is not None and batch.scores is not None and batch.state_ids is not None
    returns = step_returns(batch, options.gigpo_gamma)
    states = batch.group_ids * (batch.state_ids.max() + 1) + batch.state_ids
    among_steps = standardise(returns, states, batch.valid)
    rows = batch.scores + options.gigpo_step_weight * among_steps
    penalties = batch.token_rewards - place_scores(batch, batch.scores, keep_process_rewards=False)
    to_go, _ = sum_from_the_end(batch.replace(token_rewards=penalties), options)
    advantages = to_go + rows[:, None] * batch.loss_mask
    return advantages, advantages


def step_returns(batch: ExperienceBatch, gamma: float) -> Tensor:
    """Return what each row earned plus the discounted returns of its trajectory's later rows, (B,).

    A row earns its process rewards. The last row also earns what these leave of the shaped reward.
    """
    trajectories = Trajectories.of(batch)
    earned = place_scores(batch, batch.shaped).sum(-1)
    result = torch.zeros_like(earned)
    following = torch.zeros_like(trajectories.first, dtype=earned.dtype)
    for row in reversed(range(len(batch))):
        trajectory = trajectories.index[row]
        result[row] = earned[row] + gamma * following[trajectory]
        following[trajectory] = result[row]
    return result


advantage_estimators.register(
    "gigpo", options=GiGPOOptions, needs=("siblings", "steps", "step_rows", "no_reward_norm")
)(Estimator(gigpo_scores, gigpo_credit))
