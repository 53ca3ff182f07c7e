"""The losses of one optimizer step: picklable callables for every micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from openrl.algorithms.kl import Divergence, kl_estimate
from openrl.algorithms.masked import masked_metrics, step_loss
from openrl.algorithms.observations import observation_loss
from openrl.algorithms.off_policy import weigh
from openrl.algorithms.policy_losses import clamped_log_ratio
from openrl.algorithms.value_losses import clipped_value_loss
from openrl.config.groups.algorithm import LossAggMode
from openrl.config.groups.rollout_correction import RolloutCorrectionFlags
from openrl.config.groups.teacher import TeacherMode
from openrl.experience import ExperienceBatch, LossInputs, StepCounts, StepPlan, TokenBatch
from openrl.extension_points import policy_losses
from openrl.metrics import ByRow, Max, Mean, Metric
from openrl.models.logits import Output, Outputs


class Forward(Protocol):
    """Runs the model on a micro-batch with gradient. Returns its output, and further outputs."""

    def __call__(self, batch: TokenBatch, *outputs: Output) -> Outputs: ...


COMPARED = "mismatch/"
"""Prefix of metrics that compare policy and engine, see ``mismatch_figures``."""

TRACED = "traced"
"""The metric with what the policy's update measured on the tokens of ``ExperienceBatch.traced``."""

Measured = tuple[Tensor, dict[str, Metric]]
"""The loss of a micro-batch, and its metrics."""

LossOf = Callable[[Forward, Any, StepCounts], Measured]
"""``loss_of(forward, micro_batch, counts) -> (loss, metrics)`` computes the loss of one
micro-batch, a TokenBatch of the kind that it knows, divided by the counts of the whole optimizer
step and multiplied by dp_size. So the gradients, summed over micro-batches and averaged over ranks,
are those of the whole step."""


Shard = tuple[TokenBatch, list[StepPlan], LossOf]
"""What a rank trains: its rows, their plan in each optimizer step, and their loss."""


StepPart = tuple[TokenBatch, StepPlan, LossOf]
"""What one loss trains in an optimizer step: rows of the rank's shard, with their own plan."""


class RoleUpdate(Protocol):
    """The loss of a role that learns from rollouts: policy or critic."""

    def __call__(
        self, forward: Forward, batch: ExperienceBatch, counts: StepCounts
    ) -> Measured: ...

    def gradient_rows(self, batch: ExperienceBatch) -> Tensor:
        """Return the rows that may have a gradient, (B,) bool. In all other rows every term of the
        loss is exactly 0, so they need not be computed."""


@dataclass(frozen=True)
class PolicyUpdate:
    """The policy's loss: rl_coef * (policy loss + kl_coef * KL to the reference model) -
    entropy_coef * entropy + sft_coef * NLL of good samples + observation_coef * NLL of what others
    wrote + teacher_coef * divergence from the teacher. With the mode ``advantage`` the teacher has
    no term of its own: the advantage of each token rises by teacher_coef * (its log-prob under the
    teacher - under the old policy), whose policy gradient is that of the KL of policy and teacher.

    ``agg_mode`` aggregates every term. The batch's row and token weights multiply the policy loss
    only.

    If the batch has no ``old_logprobs``, the current log-probs count as old. That is right if the
    policy that sampled the batch trains on all of it in a single step."""

    loss_type: str  # name in the registry of policy losses
    options: Any  # that loss's options
    agg_mode: LossAggMode
    norm_const: float | None = None  # number of tokens, for seq-mean-token-sum-norm
    kl_coef: float = 0.0  # 0: the KL is measured but not part of the loss
    kl_estimator: str | None = None  # None: the KL is not even measured
    rl_coef: float = 1.0
    kl_by_ratio: bool = False  # the KL term of a token is multiplied by its ratio new / old
    entropy_coef: float = 0.0  # 0: the entropy is measured but has no gradient
    sft_coef: float = 0.0
    sft_threshold: float = 0.0  # good samples have an unshaped reward above it
    observation_coef: float = 0.0
    teacher_coef: float = 0.0
    teacher_mode: TeacherMode | None = None  # None: no teacher
    # how to compare the policy with the engine and to weigh tokens, which is right in the first
    # optimizer step on a batch alone. None: done before the update
    correction: RolloutCorrectionFlags | None = None

    def __call__(self, forward: Forward, batch: ExperienceBatch, counts: StepCounts) -> Measured:
        outputs: list[Output] = ["entropy"]
        if self.kl_estimator == "full":
            outputs.append("full_kl")
        if self.divergence is not None:
            outputs.append(self.divergence)
        if self.reads_rollout_kl:
            outputs.append("rollout_kl")
        read = batch
        if self.observation_coef and batch.observed is not None:  # they are scored, too
            read = batch.replace(loss_mask=batch.loss_mask | batch.observed)
        scored, more = forward(read, *outputs)
        logprobs, entropies = scored, more["entropy"]
        if read is not batch:
            logprobs = scored.masked_fill(batch.observed, 0)
        if not self.entropy_coef:
            entropies = entropies.detach()  # frees the activations that its gradient would need
        metrics: dict[str, Metric] = {}
        if self.correction is not None:
            weights, compared = weigh(batch, logprobs, self.correction)
            metrics |= {f"{COMPARED}{name}": metric for name, metric in compared.items()}
            batch = batch.replace(is_weights=weights)
        old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            rollout_logprobs=batch.rollout_logprobs,
            advantages=self._advantages(batch, old_logprobs),
            loss_mask=batch.loss_mask,
            turn_ids=batch.turn_ids,
            rewards=batch.rewards,
            selected=batch.selected,
            rollout_kl=more.get("rollout_kl"),
        )
        token_losses = policy_losses[self.loss_type].component(inputs, self.options)
        columns = token_losses.metrics | {"ppo_kl": old_logprobs - logprobs, "entropy": entropies}
        traced = {"logprobs": logprobs, "entropies": entropies}
        if "clip_fraction" in columns:
            traced["clipped"] = columns["clip_fraction"]
        per_token = token_losses.per_token
        if batch.is_weights is not None:
            per_token = per_token * batch.is_weights
            traced["weights"] = batch.is_weights
        metrics |= _traced(traced | {"losses": per_token}, batch)
        policy_loss = self._divided(per_token, batch, counts, batch.loss_weights)
        terms = {"policy_loss": (self.rl_coef, policy_loss)}
        if self.kl_estimator == "full":
            columns["kl"] = more["full_kl"]
        elif self.kl_estimator is not None:
            columns["kl"] = kl_estimate(logprobs, _needed(batch, "ref_logprobs"), self.kl_estimator)
        if self.kl_coef:
            kl = columns["kl"]
            if self.kl_by_ratio:  # https://arxiv.org/abs/2512.02556 section 3.1
                kl = kl * clamped_log_ratio(inputs).exp()
            kl_loss = self._divided(kl, batch, counts, batch.kl_weights)
            terms["kl_loss"] = (self.rl_coef * self.kl_coef, kl_loss)
        if self.teacher_mode is not None:
            distance = old_logprobs - _needed(batch, "teacher_logprobs")
            mask, weights = batch.loss_mask, batch.teacher_weights
            mask = mask if weights is None else mask & (weights != 0)[:, None]
            metrics |= masked_metrics({"teacher_kl": distance}, mask)
        if self.divergence is not None:
            taught = self._divided(more[self.divergence], batch, counts, batch.teacher_weights)
            terms["teacher_loss"] = (self.teacher_coef, taught)
        if self.observation_coef and batch.observed is not None:
            observed = observation_loss(scored, batch, counts)
            terms["observation_loss"] = (self.observation_coef, observed)
        if self.entropy_coef:
            terms["entropy_loss"] = (self.entropy_coef, self._divided(-entropies, batch, counts))
        if self.sft_coef:
            good = (batch.rewards > self.sft_threshold)[:, None]
            terms["sft_loss"] = (self.sft_coef, self._divided(-logprobs * good, batch, counts))
        total = torch.stack([coef * term for coef, term in terms.values()]).sum()
        metrics |= {name: _share(term, batch, counts) for name, (_, term) in terms.items()}
        metrics |= masked_metrics(columns, batch.loss_mask)
        return total, metrics | _largest_ratio(logprobs - old_logprobs, batch.loss_mask)

    def gradient_rows(self, batch: ExperienceBatch) -> Tensor:
        if self.entropy_coef or (self.rl_coef and self.kl_coef):
            return batch.valid
        found = torch.zeros_like(batch.valid)
        if self.rl_coef:
            found |= self._policy_rows(batch)
        if self.sft_coef:
            found |= batch.rewards > self.sft_threshold
        if self.teacher_mode is not None:
            weights = batch.teacher_weights
            found |= torch.ones_like(found) if weights is None else weights != 0
        if self.observation_coef and batch.observed is not None:
            found |= batch.observed.any(-1)
        return found & batch.valid

    @property
    def reads_rollout_kl(self) -> bool:
        """Whether the policy loss compares with the engine's distributions."""
        return "rollout_kl" in policy_losses[self.loss_type].needs

    @property
    def divergence(self) -> Divergence | None:
        """The divergence from the teacher that is a term of the loss; None without one."""
        return None if self.teacher_mode == "advantage" else self.teacher_mode

    def _advantages(self, batch: ExperienceBatch, old_logprobs: Tensor) -> Tensor:
        """Return the advantages, with the teacher's part if it has one. It is not in the batch,
        because nothing that normalises rewards may act on it."""
        advantages = _needed(batch, "advantages")
        if self.teacher_mode != "advantage":
            return advantages
        taught = self.teacher_coef * (_needed(batch, "teacher_logprobs") - old_logprobs)
        if batch.teacher_weights is not None:
            taught = taught * batch.teacher_weights[:, None]
        return advantages + taught.masked_fill(~batch.loss_mask, 0)

    def _policy_rows(self, batch: ExperienceBatch) -> Tensor:
        """Return the rows with a non-zero weight. If the loss is driven by advantages, they must
        also have a non-zero advantage or a token that the loss treats separately."""
        entry, found = policy_losses[self.loss_type], torch.ones_like(batch.valid)
        if "advantages" in entry.needs:
            found = _any(_needed(batch, "advantages") != 0, batch)
        if batch.selected is not None:
            found |= _any(batch.selected, batch)
        for weights in (batch.is_weights, batch.loss_weights):
            if weights is not None:
                found &= _any((weights if weights.dim() > 1 else weights[:, None]) != 0, batch)
        return found

    def _divided(
        self,
        per_token: Tensor,
        batch: ExperienceBatch,
        counts: StepCounts,
        weights: Tensor | None = None,
    ) -> Tensor:
        mode, tokens = self.agg_mode, batch.trajectory_tokens
        return step_loss(per_token, batch.loss_mask, counts, mode, self.norm_const, weights, tokens)


@dataclass(frozen=True)
class ValueUpdate:
    """The critic's loss: clipped regression on the returns. ``clip`` 0 means no clipping."""

    clip: float
    agg_mode: LossAggMode
    norm_const: float | None = None

    def __call__(self, forward: Forward, batch: ExperienceBatch, counts: StepCounts) -> Measured:
        values, _ = forward(batch)
        returns = _needed(batch, "returns")
        token_losses = clipped_value_loss(values, _needed(batch, "values"), returns, self.clip)
        loss = step_loss(
            token_losses.per_token,
            batch.loss_mask,
            counts,
            self.agg_mode,
            self.norm_const,
            trajectory_tokens=batch.trajectory_tokens,
        )
        columns = token_losses.metrics | {"values": values, "returns": returns}
        return loss, {"value_loss": _share(loss, batch, counts)} | masked_metrics(
            columns, batch.loss_mask
        )

    def gradient_rows(self, batch: ExperienceBatch) -> Tensor:
        return batch.valid


@dataclass(frozen=True)
class BalancedUpdate:
    """Another update, plus ``coef`` times the load-balancing loss of a mixture of experts.

    That loss is a product of two means over the real tokens, so it does not add up over
    micro-batches. Each micro-batch has its own, weighted by its share of the step's trained tokens.
    So experts are balanced within micro-batches, as in other systems, and the loss depends on how
    the step is cut into them."""

    update: LossOf
    coef: float

    def __call__(self, forward: Forward, batch: ExperienceBatch, counts: StepCounts) -> Measured:
        balances: list[Tensor] = []

        def and_balance(batch: TokenBatch, *outputs: Output) -> Outputs:
            output, more = forward(batch, *outputs, "balance")
            balances.append(more["balance"])
            return output, more

        loss, metrics = self.update(and_balance, batch, counts)
        tokens, (balance,) = int(batch.loss_mask.sum()), balances
        share = balance * (tokens / max(counts.tokens, 1)) * counts.dp_size
        return loss + self.coef * share, metrics | {
            "aux_loss": Mean(float(balance.detach()) * tokens, tokens)
        }

    def gradient_rows(self, batch: ExperienceBatch) -> Tensor:
        """Return all rows, since every computed token enters the balancing loss."""
        return torch.ones_like(batch.valid)


U = TypeVar("U", bound=LossOf)


def balanced(update: U, coef: float) -> U | BalancedUpdate:
    """Add the load-balancing loss to ``update``. Returns ``update`` itself if ``coef`` is 0."""
    return BalancedUpdate(update, coef) if coef else update


@dataclass(frozen=True)
class SupervisedUpdate:
    """``coef`` times the mean negative log-likelihood of the tokens in ``loss_mask``, and
    ``teacher_coef`` times the mean divergence from a teacher there, if there is one. The metrics
    ``name`` and ``teacher_loss`` are the means themselves."""

    coef: float = 1.0
    name: str = "loss"
    divergence: Divergence | None = None  # None: no teacher
    teacher_coef: float = 0.0

    def __call__(self, forward: Forward, batch: TokenBatch, counts: StepCounts) -> Measured:
        logprobs, more = forward(batch, *([self.divergence] if self.divergence else []))
        loss = self.coef * step_loss(-logprobs, batch.loss_mask, counts, "token-mean")
        columns = {self.name: -logprobs}
        if self.divergence is not None:
            taught = columns["teacher_loss"] = more[self.divergence]
            loss = loss + self.teacher_coef * step_loss(
                taught, batch.loss_mask, counts, "token-mean"
            )
        return loss, masked_metrics(columns, batch.loss_mask)


def _needed(batch: ExperienceBatch, column: str) -> Tensor:
    value = getattr(batch, column)
    if value is None:
        raise ValueError(f"this update needs the column {column!r}, which was not filled")
    return value


def _any(tokens: Tensor, batch: TokenBatch) -> Tensor:
    """Return the rows, (B,) bool, with a trained token among ``tokens``, (B, T) or (B, 1) bool."""
    return (tokens & batch.loss_mask).any(-1)


def _share(loss: Tensor, batch: TokenBatch, counts: StepCounts) -> Mean:
    """Return a divided loss as a metric: over all micro-batches and ranks the shares add up to the
    step's loss, and their weights to 1. Where no row is computed, each rank has a dummy."""
    computed = counts.tokens - counts.zero_gradient_tokens
    if computed:
        weight = int(batch.loss_mask.sum()) / computed
    else:
        weight = 1 / counts.dp_size if counts.zero_gradient_tokens else 0
    return Mean(float(loss.detach()) / counts.dp_size, weight)


@torch.no_grad()
def _traced(columns: dict[str, Tensor], batch: ExperienceBatch) -> dict[str, Metric]:
    """Return the columns, (b, T) each, of the rows to report on; empty if there are none."""
    if batch.traced is None:
        return {}
    rows = (batch.traced >= 0) & batch.valid
    if not bool(rows.any()):
        return {}
    numbers, lengths = batch.traced[rows].tolist(), batch.lengths[rows].tolist()
    kept = torch.stack([column[rows].float() for column in columns.values()])
    values = kept.masked_fill(~batch.loss_mask[rows], 0).cpu().numpy()
    of_rows = {
        number: dict(zip(columns, values[:, row, :length], strict=True))
        for row, (number, length) in enumerate(zip(numbers, lengths, strict=True))
    }
    return {TRACED: ByRow(of_rows)}


@torch.no_grad()
def _largest_ratio(log_ratio: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Return the largest probability ratio between new and old policy over trained tokens, in
    either direction. Empty if no token is trained."""
    inside = log_ratio[mask]
    return {"ratio_max": Max(float(inside.abs().max().exp()))} if inside.numel() else {}
