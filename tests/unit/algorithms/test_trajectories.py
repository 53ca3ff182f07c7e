"""Trajectories of 1, 2 and 5 rows: what counts trajectories gives the same whatever their rows."""

import pytest
import torch

from openrl.algorithms.batching import plan_steps
from openrl.algorithms.collate import collate
from openrl.algorithms.filtering import group_mean, keep, signal_metrics
from openrl.algorithms.masked import step_loss
from openrl.algorithms.off_policy import correct_rollouts
from openrl.algorithms.trajectories import SampledTokens, Trajectories, TrajectoryRewards
from openrl.config.groups.rollout_correction import REJECTION_TESTS, RolloutCorrectionFlags
from openrl.experience import StepCounts
from openrl.types import FinishReason, Prompt, PromptGroup, Score, Segment, Trajectory
from tests.batches import in_segments, joined, measured_credit, outcome_batch, random_batch
from tests.unit.algorithms.test_advantages import NAMES, OPTIONS
from tests.unit.algorithms.test_masked import EXPECTED

ROWS = [1, 2, 5]


def two(count):
    """Trajectories with 5 and 3 sampled tokens, siblings, in that many rows each."""
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 0, 0, 0]]).bool()
    return in_segments(outcome_batch([1, 4], [0, 0], tokens=6, loss_mask=mask), count)[0]


def test_sampled_tokens_of_a_trajectory_come_together():
    """Two trajectories, of rows 0 and 2, and 1 and 3; row 3 samples nothing."""
    mask = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]]).bool()
    batch = outcome_batch(
        [1, 2, 1, 2], [0] * 4, tokens=3, loss_mask=mask, trajectory_ids=torch.tensor([7, 9, 7, 9])
    )
    trajectories, column = Trajectories.of(batch), torch.arange(16).view(4, 4)
    together = trajectories.gather(column, -1)
    assert together.tolist() == [[1, 3, 9, 10], [-1, -1, 6, 7]]
    assert torch.equal(trajectories.scatter(together), column.masked_fill(~mask, 0))
    assert trajectories.last.nonzero().tolist() == [[1, 3], [2, 2]]
    assert trajectories.total(torch.tensor([1, 2, 3, 4])).tolist() == [4, 6]
    assert trajectories.spread(torch.tensor([5, 6])).tolist() == [5, 6, 5, 6]
    tokens = SampledTokens(batch.replace(token_rewards=column.double()), trajectories)
    assert tokens.rewards.tolist() == [[1, 3, 9, 10], [0, 0, 6, 7]]
    assert tokens.segment_ids.tolist() == [[0, 0, 2, 2], [-1, -1, 1, 1]]
    first, second = tokens.turn_ids.tolist()
    assert first[0] < first[1] < first[2] == first[3] and second[2] == second[3] >= 0


@pytest.mark.parametrize("rows", ROWS)
def test_outcomes_by_hand(rows):
    outcomes = TrajectoryRewards.of(two(rows))
    assert outcomes.rewards.tolist() == [1, 4] and outcomes.lengths.tolist() == [5, 3]
    assert outcomes.valid.tolist() == [True, True]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("group_norm", {}, [-(0.5**0.5), 0.5**0.5]),
        ("dr_grpo", {}, [-1.5, 1.5]),
        ("rloo", {}, [-3, 3]),
        ("opo", {}, [1 - 17 / 8, 4 - 17 / 8]),  # (1 * 5 + 4 * 3) / 8
        ("dr_grpo", {"reward_norm_mean": "running"}, [-1.5, 1.5]),
        ("dr_grpo", {"reward_norm_std": "batch"}, [-(0.5**0.5), 0.5**0.5]),
        # 1 + 2 * (1 - 5 / 8) and 4 + 2 * (1 - 3 / 8), minus their mean 3.5
        ("dr_grpo", {"len_reward_coef": 2.0, "len_reward_range": (0, 8)}, [-1.75, 1.75]),
        # of at most 16 tokens the last 12 cost: 5 tokens 1 / 12, 3 tokens nothing
        ("dr_grpo", {"overlong_buffer_len": 12}, [-1.5 - 1 / 24, 1.5 + 1 / 24]),
    ],
)
def test_scores_by_hand(name, flags, expected, rows):
    done, metrics = measured_credit(two(rows), name, **flags)
    first = Trajectories.of(done).first
    assert done.scores[first].tolist() == pytest.approx(expected, abs=1e-5)
    assert done.advantages[done.loss_mask].tolist() == pytest.approx(
        [s for s, n in zip(expected, (5, 3), strict=True) for _ in range(n)], abs=1e-5
    )
    assert metrics["singleton_groups"] == 0


SHAPING = [
    {},
    {"format_penalty": -0.5, "len_reward_coef": 2.0, "overlong_buffer_len": 12},
    {"mask_truncated": True, "length_loss_weight": True, "difficulty_loss_weight": True},
    {"stop_properly_penalty_coef": 0.5, "difficulty_loss_weight": True, "difficulty_key": "auto"},
    {"whiten_rewards": True, "token_reward_clip": 0.7, "advantage_clip": 0.6},
]


@pytest.mark.parametrize("flags", SHAPING)
@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("turn_reinforce", "gigpo")])
def test_rows_change_no_advantage_no_weight_and_no_figure(name, flags):
    """Steps with a discount apart: these are rows. Rewards and the KL are on the same tokens."""
    batch = random_batch(3)
    g = torch.Generator().manual_seed(0)
    batch = batch.replace(
        invalid_actions=torch.randint(0, 3, (len(batch),), generator=g).double(),
        difficulty=torch.rand(len(batch), generator=g, dtype=torch.float64),
        process_rewards=torch.randn(batch.loss_mask.shape, generator=g, dtype=torch.float64),
    )
    options = None if name == "step_reinforce" else OPTIONS.get(name)
    if name in ("reinforce", "gae"):
        flags = flags | {"reward_norm_mean": "running", "reward_norm_std": "datasource"}
    whole, figures = measured_credit(batch, name, options, 0.2, **flags)
    for count in ROWS:
        parts, source = in_segments(batch, count)
        done, measured = measured_credit(parts, name, options, 0.2, **flags)
        assert measured == pytest.approx(figures)
        for column in ("advantages", "returns", "token_rewards"):
            found = joined(getattr(done, column).masked_fill(~parts.loss_mask, 0), source)
            expected = getattr(whole, column)[:, : found.shape[1]]
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        assert torch.equal(joined(done.loss_mask.long(), source), whole.loss_mask.long())
        if whole.loss_weights is not None:
            torch.testing.assert_close(done.loss_weights, whole.loss_weights[source])


def test_gae_looks_past_the_end_of_a_row():
    """Rewards 0, 0, 2; values 1, 3, 5; gamma 0.5, lambda 1: 0.5^2 * 2 - 1, 0.5 * 2 - 3, 2 - 5."""
    mask, values = torch.tensor([[0, 1, 1, 1]]).bool(), torch.tensor([[9.0, 1, 3, 5]]).double()
    options = type(OPTIONS["gae"])(gamma=0.5, lambd=1.0)
    batch = outcome_batch([2], [0], tokens=3, loss_mask=mask, values=values)
    for count in ROWS:
        parts, source = in_segments(batch, count)
        done, _ = measured_credit(parts, "gae", options, whiten_advantages=False)
        assert joined(done.advantages, source).tolist() == [[0, -0.5, -2, -3]]
        assert joined(done.returns, source).tolist() == [[0, 0.5, 1, 2]]


# -- corrections -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tis", "icepop", "seq-mask-tis"])
@pytest.mark.parametrize("level", ["token", "geometric", "sequence"])
def test_rows_change_no_weight_of_a_correction(level, kind):
    flags = RolloutCorrectionFlags(
        enable_vllm_is_correction=True,
        vllm_is_level=level,
        vllm_is_correction_type=kind,
        vllm_is_batch_normalize=True,
        vllm_is_truncated_threshold=(0.6, 1.5),
    )
    batch = random_batch(1)
    whole, figures = correct_rollouts(batch, flags)
    for count in ROWS:
        parts, source = in_segments(batch, count)
        done, measured = correct_rollouts(parts, flags)
        found = joined(done.is_weights, source)
        torch.testing.assert_close(found, whole.is_weights[:, : found.shape[1]])
        for name in ("is_weight_mean", "is_weight_min", "is_weight_max", "is_weight_ess"):
            assert measured[name] == pytest.approx(figures[name])


LIMITS = {
    "seq_mean_opsm": "0.1",
    "seq_sum_k1": "0.05_1.3",
    "seq_mean_k2": "0.3",
}  # where the usual ones split nothing


@pytest.mark.parametrize("test", REJECTION_TESTS)
def test_rows_change_no_rejection(test):
    batch = random_batch(1)
    batch = batch.replace(advantages=batch.values)
    threshold = (LIMITS.get(test, "0.8_1.3" if test.endswith("k1") else "0.6"),)
    flags = RolloutCorrectionFlags(rollout_rs=(test,), rollout_rs_threshold=threshold)
    whole, figures = correct_rollouts(batch, flags)
    assert 0 < whole.loss_mask.sum() < batch.loss_mask.sum()
    for count in ROWS:
        parts, source = in_segments(batch, count)
        done, measured = correct_rollouts(parts, flags)
        assert torch.equal(joined(done.loss_mask.long(), source), whole.loss_mask.long())
        for name in ("rejected_tokens", "rejected_sequences"):
            assert measured[name] == pytest.approx(figures[name])


def test_weight_of_a_sequence_in_rows_by_hand():
    """Ratios 2 and 3 in two rows: a sequence's weight is 6, its geometric one the root of that."""
    gaps = torch.tensor([[0, 2.0, 1], [0, 3, 1]]).double().log().clamp(min=0)
    mask = torch.tensor([[0, 1, 0], [0, 1, 0]]).bool()
    columns = {"old_logprobs": gaps, "loss_mask": mask, "trajectory_ids": torch.zeros(2).long()}
    batch = outcome_batch([1, 1], [0, 0], **columns)
    for level, weight in (("sequence", 6.0), ("geometric", 6**0.5), ("token", None)):
        flags = RolloutCorrectionFlags(
            enable_vllm_is_correction=True,
            vllm_is_level=level,
            vllm_is_truncated_threshold=(0.1, 9.0),
        )
        weights = correct_rollouts(batch, flags)[0].is_weights[:, 1].tolist()
        assert weights == pytest.approx([2, 3] if weight is None else [weight, weight])


# -- steps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("mode", "expected"), EXPECTED.items())
def test_loss_by_hand(mode, expected, rows):
    """Losses 1, 2, 3 of one trajectory and 4 of another, as in test_masked."""
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()
    losses = torch.tensor([[9.0, 1, 2, 3], [9, 4, 9, 9], [9, 9, 9, 9]])
    batch, source = in_segments(outcome_batch([0] * 3, [0] * 3, tokens=3, loss_mask=mask), rows)
    plan = plan_steps(batch, dp_size=1, train_batch_size=3, micro_batch_size=2)
    (step,) = plan.steps
    assert step[0].counts == StepCounts(tokens=4, trajectories=2, dp_size=1)
    shard, total = batch.select(plan.shards[0]), 0.0
    place = source[torch.tensor(plan.shards[0])]
    for numbers in step[0].micro_batches:
        micro = shard.select(numbers)
        values = losses[place[torch.tensor(numbers)]][:, : micro.token_ids.shape[1]]
        total += float(
            step_loss(
                values, micro.loss_mask, step[0].counts, mode, 4,
                trajectory_tokens=micro.trajectory_tokens,
            )
        )  # fmt: skip
    assert total == pytest.approx(expected)


def trained_by_step(plan, source):
    """Of each optimizer step: the rows of the batch that was cut into segments."""
    return [
        [int(source[shard[i]]) for shard, rank in zip(plan.shards, step, strict=True)
         for micro in rank.micro_batches for i in micro if i >= 0]
        for step in plan.steps
    ]  # fmt: skip


@pytest.mark.parametrize("dp_size", [1, 2])
@pytest.mark.parametrize("train_batch_size", [4, 5, 13])
def test_steps_follow_from_trajectories(train_batch_size, dp_size):
    batch = random_batch(0)

    def plan_of(rows):
        generator = torch.Generator().manual_seed(1)
        return plan_steps(rows, dp_size, train_batch_size, 2, 2, generator)

    whole = plan_of(batch)
    expected = [sorted(step) for step in trained_by_step(whole, torch.arange(len(batch)))]
    for count in (2, 5):
        parts, source = in_segments(batch, count)
        plan = plan_of(parts)
        steps = trained_by_step(plan, source)
        assert [sorted(set(step)) for step in steps] == expected
        for step in steps:  # all rows of each
            assert all(step.count(row) == int((source == row).sum()) for row in step)
        assert [s[0].counts for s in plan.steps] == [s[0].counts for s in whole.steps]


# -- statistics of groups --------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
def test_filters_and_figures_count_trajectories(rows):
    """Rewards 1, 0 and 0 in that many rows for the first, one for the others."""
    prompt, played = Prompt("p", [1], ""), []
    for number, reward in enumerate((1.0, 0.0, 0.0)):
        segments = [Segment.answer([1], [2, 3]) for _ in range(1 if number else rows)]
        played.append(Trajectory(prompt, segments, FinishReason.STOP, score=Score(reward, reward)))
    group = PromptGroup(prompt, played)
    assert group_mean(group) == pytest.approx(1 / 3)
    assert keep(group, 0.3, 0.4) and not keep(group, 0.4, 1.0)
    assert signal_metrics([group])["single_sample"] == 0
    batch = collate([group], pad_id=0)
    assert len(batch) == rows + 2
    outcomes = TrajectoryRewards.of(batch)
    assert outcomes.rewards.tolist() == [1, 0, 0]
    assert outcomes.lengths.tolist() == [2 * rows, 2, 2]
