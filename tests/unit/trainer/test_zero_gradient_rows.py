"""Rows without a gradient: which they are, that nobody computes them, and that the step stays
theirs as well. ``tests/invariance/test_gradients.py`` holds the gradients."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from openrl.algorithms.batching import plan_steps
from openrl.algorithms.partition import RowCost
from openrl.algorithms.policy_losses import DROOptions, PPOOptions
from openrl.cluster.group import LocalGroup
from openrl.experience import StepCounts
from openrl.extension_points import policy_losses
from openrl.token_origins import VersionSpan
from openrl.trainer.launch import build_learner
from openrl.trainer.learning.rows import zero_gradient_metrics
from openrl.training_engine.updates import PolicyUpdate, ValueUpdate, balanced
from openrl.types import FinishReason, Prompt, PromptGroup, Score, Segment, Trajectory
from openrl.workers.roles import Roles
from tests.batches import loss_inputs, outcome_batch
from tests.flags import GRPO, ppo
from tests.loops import Updates, goes_on

FOLLOW = [name for name in policy_losses.names() if "advantages" in policy_losses[name].needs]


def gradient_without_advantages(name: str, spread: float, selected: bool) -> tuple:
    inputs = loss_inputs(3, spread=spread)
    logprobs = inputs.logprobs.clone().requires_grad_()
    inputs = replace(
        inputs,
        logprobs=logprobs,
        advantages=torch.zeros_like(inputs.advantages),
        selected=inputs.selected & selected,
    )
    entry = policy_losses[name]
    options = DROOptions(dro_beta=0.1) if name == "dro" else entry.options and entry.options()
    losses = entry.component(inputs, options).per_token.masked_fill(~inputs.loss_mask, 0)
    losses.sum().backward()
    return losses, logprobs.grad


@pytest.mark.parametrize("spread", [0.01, 0.5, 50.0])
@pytest.mark.parametrize("name", FOLLOW)
def test_without_an_advantage_loss_and_gradient_are_exactly_zero(name, spread):
    losses, gradient = gradient_without_advantages(name, spread, selected=False)
    assert not losses.any() and not gradient.any()


def test_the_others_pull_without_an_advantage():
    assert {*policy_losses.names()} - {*FOLLOW} == {"dro", "kimi15"}
    for name in ("dro", "kimi15"):
        assert gradient_without_advantages(name, 0.5, selected=False)[1].any()
    assert gradient_without_advantages("kl_cov", 0.5, selected=True)[1].any()


def rows_of(update, **columns) -> list[int]:
    """Of five rows of two sampled tokens: 0 without an advantage, 1 with one on its prompt alone,
    2 and 3 with one on a token, 4 with one and nothing to train."""
    advantages = torch.zeros(5, 3)
    advantages[1, 0], advantages[2, 2], advantages[3:, 1] = 1.0, -1.0, 1.0
    batch = outcome_batch([0.0, 1.0, 0.0, 0.0, 1.0], [0, 0, 1, 1, 1], advantages=advantages)
    mask = batch.loss_mask.clone()
    mask[4] = False
    return update.gradient_rows(batch.replace(loss_mask=mask, **columns)).nonzero()[:, 0].tolist()


def test_rows_by_hand():
    plain = PolicyUpdate("ppo", PPOOptions(), "token-mean", kl_estimator="k3")
    assert rows_of(plain) == [2, 3]
    assert rows_of(replace(plain, kl_coef=0.1)) == rows_of(replace(plain, entropy_coef=-0.1))
    assert rows_of(replace(plain, kl_coef=0.1)) == [0, 1, 2, 3]
    assert rows_of(replace(plain, kl_coef=0.1, rl_coef=0.0)) == []
    assert rows_of(replace(plain, sft_coef=0.1, sft_threshold=0.5)) == [1, 2, 3]
    assert rows_of(replace(plain, loss_type="dro", options=DROOptions(dro_beta=0.1))) == [
        0,
        1,
        2,
        3,
    ]
    assert rows_of(ValueUpdate(0.2, "token-mean")) == [0, 1, 2, 3]
    assert rows_of(balanced(plain, 0.1)) == [0, 1, 2, 3, 4]


def test_weights_leave_rows_out_and_marked_tokens_keep_them():
    plain = PolicyUpdate("ppo", PPOOptions(), "token-mean")
    assert rows_of(plain, loss_weights=torch.tensor([1.0, 1.0, 0.0, 0.5, 1.0])) == [3]
    tokens = torch.ones(5, 3)
    tokens[3, 1:] = 0
    assert rows_of(plain, is_weights=tokens) == [2]
    marked = torch.zeros(5, 3, dtype=torch.bool)
    marked[0, 1] = marked[1, 0] = True
    assert rows_of(plain, selected=marked) == [0, 2, 3]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_plan_keeps_counts_and_places(ranks):
    """Twelve rows in steps of four: the first step loses two rows, the second all."""
    batch = outcome_batch([0.0] * 12, [0] * 12)
    computed = torch.tensor([True, False, True, False] + [False] * 4 + [True] * 4)
    plans = [plan_steps(batch, ranks, 4, 2, computed=rows) for rows in (None, computed)]
    whole, cut = plans
    found = []
    for of_all, of_some in zip(whole.steps, cut.steps, strict=True):
        counts = [step.counts for step in of_some]
        assert {replace(count, zero_gradient_tokens=0) for count in counts} == {of_all[0].counts}
        assert len({len(step.micro_batches) for step in of_some}) == 1
        found.append(
            sorted(
                cut.shards[rank][row]
                for rank, step in enumerate(of_some)
                for rows in step.micro_batches
                for row in rows
                if row >= 0
            )
        )
    assert found == [[0, 2], [], [8, 9, 10, 11]]
    assert [step[0].counts.zero_gradient_tokens for step in cut.steps] == [4, 8, 0]
    assert all(step.micro_batches == [[-1]] for step in cut.steps[1])


def test_losses_of_a_step_count_the_rows_left_out():
    """Ranks that compute two of four rows, and then none: the step's loss is of all four."""
    update = PolicyUpdate("ppo", PPOOptions(), "token-mean")
    advantages = torch.tensor([1.0, 0.0, 3.0, 0.0])[:, None].expand(4, 3)
    batch = outcome_batch([0.0] * 4, [0] * 4, advantages=advantages)

    def forward(micro, *outputs):
        return torch.zeros(micro.loss_mask.shape), {"entropy": torch.ones(micro.loss_mask.shape)}

    def measured(rows, counts):
        return update(forward, batch.select(rows), counts)[1]

    counts = StepCounts(8, 4, 2, zero_gradient_tokens=4)
    ranks = [measured([row], counts) for row in (0, 2)]
    merged = ranks[0]["policy_loss"].merge(ranks[1]["policy_loss"])
    assert (merged.value, merged.weight) == (-1.0, 1.0)
    entropy = ranks[0]["entropy"].merge(ranks[1]["entropy"])
    assert (entropy.value, entropy.weight) == (1.0, 4)  # of the tokens that were computed
    flat = measured([-1], replace(counts, zero_gradient_tokens=8))
    assert flat["policy_loss"].value == 0 and flat["policy_loss"].weight == 0.5
    assert flat["entropy"].value is None
    shares = zero_gradient_metrics(batch, update.gradient_rows(batch))
    assert {name: metric.value for name, metric in shares.items()} == {
        "perf/rows_left_out": 0.5,
        "actor/measured_share": 0.5,
    }


# -- which rows are scored before the update -------------------------------------------------------


class Recorder(Updates):
    """A worker that takes down the first token of each row that it scores or trains."""

    def __init__(self, context):
        self.scored, self.trained = [], []

    def forward(self, batch, micro_batches, model, *outputs):
        self.scored += [
            int(batch.token_ids[r, 0]) for rows in micro_batches for r in rows if r >= 0
        ]
        return {"output": torch.full(batch.loss_mask.shape, -1.0)}

    def update(self, share):
        batch, plans, _ = share
        rows = [row for plan in plans for micro in plan.micro_batches for row in micro]
        self.trained += [int(batch.token_ids[row, 0]) for row in rows if row >= 0]
        return [{} for _ in plans]


def groups_of(*rewards: tuple[float, ...], old: tuple[int, ...] = ()) -> list[PromptGroup]:
    """Rows begin with their number, group by group. The weights of sync 3 sampled those in
    ``old``, those of sync 5 the others."""
    groups, number = [], 0
    for name, of_group in enumerate(rewards):
        prompt = Prompt(str(name), [1], str(name))
        trajectories = []
        for reward in of_group:
            versions = (VersionSpan(0, 2, 3 if number in old else 5),)
            row = Segment.answer([number], [7, 8], [-1.0, -1.0], versions)
            trajectories.append(Trajectory(prompt, [row], FinishReason.STOP, score=Score(reward)))
            number += 1
        groups.append(PromptGroup(prompt, trajectories))
    return groups


FLAT_FIRST = ((1.0, 1.0), (0.0, 1.0), (0.0, 0.0))
MIXED, ALL = [2, 3], [0, 1, 2, 3, 4, 5]


@contextmanager
def no_stage(name):
    yield lambda done, total: None


def learned(tmp_path, words: str, rewards=FLAT_FIRST, reference: bool = True, old=()):
    """(scored by the policy, by the reference, trained), and the metrics."""
    config = ppo(
        f"{GRPO} --n_samples_per_prompt 2 --rollout_batch_size 3 --train_batch_size 6"
        f" --max_steps 9 --save_path {tmp_path} {words}"
    )
    policy, other = (LocalGroup.create(role, 1, Recorder) for role in ("actor", "reference"))
    inputs = SimpleNamespace(
        tokenizer=SimpleNamespace(pad_token_id=0), ptx_rows=[], row_cost=RowCost()
    )
    assert config.kl.needs_reference == reference
    roles = Roles(policy=policy, engines=policy, reference=other if reference else None)
    learner = build_learner(config, inputs, roles)
    metrics = asyncio.run(learner.learn(groups_of(*rewards, old=old), 5, 1, no_stage, goes_on()))
    own, of_reference = policy._workers[0], other._workers[0]
    found = tuple(sorted(rows) for rows in (own.scored, of_reference.scored, own.trained))
    return found, {name: metric.value for name, metric in metrics.items()}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--init_kl_coef 0 --max_epochs 1", ([], [], MIXED)),
        ("--init_kl_coef 0 --max_epochs 2", (MIXED, [], sorted(MIXED * 2))),
        ("--init_kl_coef 0 --skip_old_logprob never", (ALL, [], MIXED)),
        ("--init_kl_coef 0 --enable_vllm_is_correction", ([], [], MIXED)),
        ("--init_kl_coef 0 --enable_vllm_is_correction --max_epochs 2",
         (MIXED, [], sorted(MIXED * 2))),
        ("--init_kl_coef 0 --enable_vllm_is_correction --vllm_is_batch_normalize",
         (ALL, [], MIXED)),
        ("--init_kl_coef 0 --rollout_rs token_k2 --rollout_rs_threshold 9", (ALL, [], MIXED)),
        ("--init_kl_coef 0 --policy_loss_type kimi15 --max_epochs 2", (ALL, [], sorted(ALL * 2))),
        ("--init_kl_coef 0 --log_ref_kl", ([], MIXED, MIXED)),
        ("--init_kl_coef 0.1 --use_kl_loss --kl_estimator k2", ([], ALL, ALL)),
    ],
)  # fmt: skip
def test_who_reads_what(tmp_path, words, expected):
    assert learned(tmp_path, words, reference="log_ref" in words or "0.1" in words)[0] == expected


def test_a_kl_in_the_reward_reads_every_row(tmp_path):
    (policy, reference, trained), metrics = learned(tmp_path, "--init_kl_coef 0.1")
    assert policy == reference == ALL and metrics["perf/rows_not_scored"] == 0
    assert trained == MIXED  # the KL is 0 here


def test_rows_that_are_too_old_are_neither_scored_nor_trained(tmp_path):
    found, metrics = learned(
        tmp_path,
        "--init_kl_coef 0 --max_epochs 2 --enable_vllm_is_correction --vllm_is_level sequence"
        " --async_train --staleness_policy mask",
        reference=False,
        old=(1, 2),
    )
    assert found == ([3], [], [3, 3])
    assert metrics["rollout/masked_share"] == 1 / 3 and metrics["rollout/age_max"] == 0
    assert metrics["mismatch/is_weight_mean"] == 1.0


def test_a_flat_step_runs_no_model(tmp_path):
    """Not even to wake one: a step of flat groups trains a dummy, for the optimizer's step."""
    found, metrics = learned(
        tmp_path, "--init_kl_coef 0 --log_ref_kl --max_epochs 2", ((1.0, 1.0), (0.0, 0.0))
    )
    assert found == ([], [], [])
    assert metrics["perf/rows_left_out"] == metrics["perf/rows_not_scored"] == 1
    assert metrics["actor/measured_share"] == 0
