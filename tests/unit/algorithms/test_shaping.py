"""Reward shaping by hand, and the order of operations."""

import pytest
import torch

from openrl.algorithms.shaping import (
    RunningMoments,
    length_reward,
    loss_weights,
    normalise,
    overlong_penalty,
    place_scores,
    stop_properly,
    token_rewards,
    whiten,
)
from openrl.algorithms.trajectories import TrajectoryRewards
from openrl.config.groups.reward_shaping import RewardShapingFlags
from openrl.errors import UserError
from tests.batches import credit, measured_credit, outcome_batch, random_batch

REWARDS, GROUPS = [1, 0, 0, 1, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1, 1]
NORMS = {
    ("group", "group"): [
        0.866024,
        -0.866024,
        -0.866024,
        0.866024,
        0.499999,
        0.499999,
        0.499999,
        -1.499997,
    ],
    ("group", "none"): [0.5, -0.5, -0.5, 0.5, 0.25, 0.25, 0.25, -0.75],
    ("none", "group"): [1.732048, 0, 0, 1.732048, 1.999996, 1.999996, 1.999996, 0],
    ("batch", "batch"): [
        0.724567,
        -1.207612,
        -1.207612,
        0.724567,
        0.724567,
        0.724567,
        0.724567,
        -1.207612,
    ],
    ("group", "batch"): [
        0.96609,
        -0.96609,
        -0.96609,
        0.96609,
        0.483045,
        0.483045,
        0.483045,
        -1.449135,
    ],
    ("none", "none"): REWARDS,
}


def of(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(("scopes", "expected"), NORMS.items())
def test_scopes_of_mean_and_std(scopes, expected):
    batch = outcome_batch(REWARDS, GROUPS)
    assert normalise(
        TrajectoryRewards.of(batch), *scopes, RunningMoments()
    ).tolist() == pytest.approx(expected, abs=1e-5)


def test_datasource_is_a_scope_across_groups():
    batch = outcome_batch([1, 3, 10, 30], [0, 1, 0, 1], sources=["a", "a", "b", "b"])
    assert normalise(
        TrajectoryRewards.of(batch), "datasource", "none", RunningMoments()
    ).tolist() == [
        -1,
        1,
        -10,
        10,
    ]


def test_running_moments_are_those_of_every_reward_so_far():
    running = RunningMoments()
    running.update(of(1, 0, 0, 1))
    assert (running.mean, running.std) == pytest.approx((0.5, 0.577350), abs=1e-6)
    resumed = RunningMoments()
    resumed.load_state(running.state())
    resumed.update(of(1, 1, 1, 0))
    assert (resumed.mean, resumed.std) == pytest.approx((0.625, 0.517549), abs=1e-6)
    batch = outcome_batch([1, 0], [0, 0])
    scaled = normalise(TrajectoryRewards.of(batch), "running", "running", resumed)
    assert scaled.tolist() == pytest.approx([0.375 / 0.51755, -0.625 / 0.51755], abs=1e-5)


def test_a_format_penalty_that_nothing_can_cause_is_an_error():
    with pytest.raises(UserError, match="--format_penalty: nothing says"):
        credit(outcome_batch([1, 0], [0, 0]), "dr_grpo", format_penalty=-1.0)


def test_asymmetric_clip():
    batch = outcome_batch([0.0] * 11 + [10.0], [0] * 12)
    scores = credit(
        batch,
        "reinforce",
        reward_norm_mean="batch",
        reward_norm_std="batch",
        reward_norm_clip=(-1, 3),
    ).scores
    assert scores.tolist() == pytest.approx([-0.288675] * 11 + [3.0], abs=1e-5)


def test_overlong_penalty_counts_sampled_tokens():
    lengths = torch.tensor([90, 100, 110, 120, 130])
    assert overlong_penalty(lengths, 120, 20).tolist() == [0, 0, 0.5, 1, 1]


@pytest.mark.parametrize(("shape", "middle"), [("linear", 0.75), ("cosine", 0.853553)])
def test_length_reward(shape, middle):
    lengths = torch.tensor([0, 10, 20, 50, 60])
    assert length_reward(lengths, 10, 50, shape).tolist() == pytest.approx(
        [1, 1, middle, 0, 0], abs=1e-6
    )


@pytest.mark.parametrize(
    ("coef", "expected"),
    [(0.5, [0.5, -1, 1]), (0.0, [0, -1, 1]), (1.0, [1, -1, 1]), (-0.5, [-0.5, -1, 1])],
)
def test_truncation_never_raises_a_reward(coef, expected):
    assert stop_properly(of(1, -1, 1), torch.tensor([True, True, False]), coef).tolist() == expected


def test_scores_go_to_the_last_sampled_token():
    batch = random_batch(0)
    placed = place_scores(batch, batch.rewards)
    for row in range(len(batch)):
        sampled = batch.loss_mask[row].nonzero().flatten().tolist()
        expected = {sampled[-1]: float(batch.rewards[row])} if sampled else {}
        assert {
            t: float(placed[row, t]) for t in placed[row].nonzero().flatten().tolist()
        } == expected


def test_process_rewards_stay_where_they_were_earned():
    process = of(0, 0.25, 0, 0.5)[None]
    batch = outcome_batch([2], [0], tokens=3, process_rewards=process)
    assert place_scores(batch, of(2.0)).tolist() == [[0, 0.25, 0, 1.75]]


def test_a_process_reward_on_an_environment_token_moves_to_the_end():
    mask = torch.tensor([[0, 1, 0, 1]]).bool()
    batch = outcome_batch(
        [2], [0], tokens=3, loss_mask=mask, process_rewards=of(0, 0.25, 0.5, 0)[None]
    )
    assert place_scores(batch, of(2.0)).tolist() == [[0, 0.25, 0, 1.75]]


def test_kl_lowers_the_reward_of_each_token():
    logprobs = {"old_logprobs": of(9, -1, -2)[None], "ref_logprobs": of(0, -1.5, -1)[None]}
    batch = outcome_batch([3], [0], scores=of(3.0), **logprobs)
    assert token_rewards(batch, 0.1, "k1").tolist() == [
        [0, pytest.approx(-0.05), pytest.approx(3.1)]
    ]
    assert token_rewards(batch, 0.0, "k1").tolist() == [[0, 0, 3]]


def test_kl_reaches_group_estimators_as_returns_to_go():
    logprobs = {
        "old_logprobs": of(0, -1, -2).expand(2, 3),
        "ref_logprobs": of(0, -1.5, -1).expand(2, 3),
    }
    batch = outcome_batch([1, 3], [0, 0], **logprobs)
    advantages = credit(batch, "dr_grpo", kl_coef=0.1).advantages
    assert advantages.tolist() == [
        [0, pytest.approx(-0.95), pytest.approx(-0.9)],
        [0, pytest.approx(1.05), pytest.approx(1.1)],
    ]


def test_whitening():
    mask = torch.tensor([[False, True, True], [False, True, False]])
    values = of(9, 1, 3, 9, 5, 9).view(2, 3)
    expected = [[0, -(1.5**0.5), 0], [0, 1.5**0.5, 0]]
    assert whiten(values, mask).tolist() == [pytest.approx(row) for row in expected]
    assert whiten(values, mask, std_norm=False).tolist() == [[0, -2, 0], [0, 2, 0]]
    lonely = torch.tensor([[False, True, False], [False, False, False]])
    kept = values.masked_fill(~lonely, 0)
    assert torch.equal(whiten(kept, lonely), kept)
    assert float(whiten(torch.ones(2, 3), mask).abs().max()) == 0


def weights_of(batch, **flags):
    return loss_weights(TrajectoryRewards.of(batch), RewardShapingFlags(**flags)).tolist()


def test_loss_weights_have_mean_one_over_the_batch():
    batch = outcome_batch([0] * 3, [0, 1, 2], difficulty=of(0, 0.5, 1))
    assert weights_of(batch, difficulty_loss_weight=True) == pytest.approx([0.4, 1, 1.6])
    lengths = torch.arange(41) <= torch.tensor([[10], [20], [40]])
    mask = lengths & (torch.arange(41) > 0)
    batch = outcome_batch([0] * 3, [0, 1, 2], tokens=40, loss_mask=mask)
    assert weights_of(batch, length_loss_weight=True) == pytest.approx(
        [1.4211, 1.1053, 0.4737], abs=1e-4
    )
    assert loss_weights(TrajectoryRewards.of(batch), RewardShapingFlags()) is None


def test_difficulty_from_pass_rates():
    batch = outcome_batch([0] * 4, [0, 0, 1, 1], passed=of(1, 1, 1, 0))
    assert weights_of(batch, difficulty_loss_weight=True, difficulty_key="auto") == pytest.approx(
        [4 / 7] * 2 + [10 / 7] * 2
    )
    unknown = batch.replace(passed=of(1, torch.nan, 1, 0))
    with pytest.raises(UserError, match="no verdict"):
        weights_of(unknown, difficulty_loss_weight=True, difficulty_key="auto")
    with pytest.raises(ValueError, match="no difficulty"):
        weights_of(batch, difficulty_loss_weight=True)


# -- the order -------------------------------------------------------------------------------------


def test_the_order_of_operations_by_hand():
    """Lengths 2 and 4 of at most 16; row 1 is truncated and had one bad action; both would move if
    steps swapped."""
    mask = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 1, 1, 1]]).bool()
    batch = outcome_batch(
        [8.0, 20.0],
        [0, 0],
        tokens=4,
        loss_mask=mask,
        truncated=torch.tensor([False, True]),
        invalid_actions=of(0, 1),
        old_logprobs=torch.zeros(2, 5).double(),
        ref_logprobs=torch.full((2, 5), -0.5).double(),
    )
    done = credit(
        batch,
        "dr_grpo",
        kl_coef=1.0,
        format_penalty=-2.0,
        len_reward_coef=4.0,
        len_reward_range=(0, 8),
        overlong_buffer_len=14,  # from 2 tokens on
        overlong_penalty_factor=7.0,
        stop_properly_penalty_coef=0.5,
        reward_clip_range=(-0.5, 9),
        token_reward_clip=1.25,
    )
    # 1-4: 8 + 4 * 0.75 - 0 = 11;  (20 - 2 + 4 * 0.5 - 7 / 7) / 2 = 9.5
    # 5: minus their mean 10.25;  7: of 0.75 and -0.75 the second is clipped
    assert done.scores.tolist() == [0.75, -0.5]
    # 8: each token pays 0.5 nats; 9: nothing to clip
    assert done.token_rewards.tolist() == [[0, -0.5, 0.25, 0, 0], [0, -0.5, -0.5, -0.5, -1]]
    assert done.rewards.tolist() == [8, 20]
    wide = credit(
        batch,
        "reinforce",
        kl_coef=1.0,
        reward_clip_range=(-10, 10),
        token_reward_clip=1.25,
        whiten_advantages=False,
    )
    assert wide.token_rewards[0].tolist() == [0, -0.5, 1.25, 0, 0]  # 8 - 0.5, clipped after the KL


def test_truncated_rows_count_in_their_group_before_they_leave_the_loss():
    batch = outcome_batch([1, 3], [0, 0], truncated=torch.tensor([False, True]))
    done = credit(batch, "dr_grpo", mask_truncated=True)
    assert done.advantages.tolist() == [[0, -1, -1], [0, 0, 0]]
    assert done.loss_mask.any(-1).tolist() == [True, False]


def test_advantages_are_clipped_after_whitening():
    batch = outcome_batch([0, 0, 0, 10], [0, 0, 0, 0])
    advantages = credit(batch, "reinforce_baseline", advantage_clip=1.0).advantages
    assert advantages[:, 1].tolist() == pytest.approx([-0.57735] * 3 + [1.0], abs=1e-4)


def test_rewards_that_are_no_numbers_stop_the_step():
    batch = outcome_batch([1, torch.nan], [0, 0])
    with pytest.raises(ValueError, match=r"trajectories \[1\] have no finite reward"):
        credit(batch, "dr_grpo")
    unsampled = torch.tensor([[0, 1, 1], [0, 0, 0]]).bool()
    assert credit(batch.replace(loss_mask=unsampled), "dr_grpo").advantages.tolist() == [
        [0, 0, 0],
        [0, 0, 0],
    ]


def test_what_shaping_did_is_measured():
    batch = outcome_batch(
        [30, 1, 2, 3], [0, 1, 1, 1], truncated=torch.tensor([False, False, False, True])
    )
    flags = {"token_reward_clip": 0.5, "advantage_clip": 0.4, "mask_truncated": True}
    metrics = measured_credit(batch, "group_norm", **flags)[1]
    assert metrics == {
        "reward_clip_fraction": 0.0,  # 30 is alone in its group
        "singleton_groups": 1.0,
        "token_reward_clip_fraction": 0.25,  # -1 and 1 on the last of two tokens each, of 8
        "masked_truncated": 1.0,
        # the row at -0.5; the one at 0.5 is masked
        "advantage_clip_fraction": pytest.approx(2 / 6),
    }
    lonely = torch.zeros(4, 3, dtype=torch.bool).index_fill(0, torch.tensor([1]), True)
    lonely[:, :2] = False
    assert (
        measured_credit(batch.replace(loss_mask=lonely), "reinforce")[1]["whitening_skipped"] == 1
    )
    nothing = batch.replace(loss_mask=torch.zeros_like(lonely))
    flags = {"token_reward_clip": 0.5, "advantage_clip": 0.4}
    assert not [n for n in measured_credit(nothing, "reinforce", **flags)[1] if "fraction" in n]
    running = measured_credit(batch, "reinforce", reward_norm_mean="running")[1]
    assert running["reward_running_mean"] == 9
    assert running["reward_running_std"] == pytest.approx((590 / 3) ** 0.5)  # of 30, 1, 2, 3


def test_the_range_clips_what_a_baseline_leaves():
    """As OpenRLHF does; before the baseline all of these rewards would be 10."""
    batch = outcome_batch([80, 20, 60, 15], [0, 0, 0, 0])  # their mean is 43.75
    done, metrics = measured_credit(batch, "dr_grpo")
    assert done.scores.tolist() == [10, -10, 10, -10]
    assert metrics["reward_clip_fraction"] == 1
    normed, metrics = measured_credit(batch, "group_norm")
    std = ((36.25**2 + 23.75**2 + 16.25**2 + 28.75**2) / 3) ** 0.5
    assert normed.scores.tolist() == pytest.approx(
        [x / std for x in (36.25, -23.75, 16.25, -28.75)]
    )
    assert metrics["reward_clip_fraction"] == 0
    plain, metrics = measured_credit(batch, "reinforce")
    assert plain.scores.tolist() == [10] * 4 and metrics["reward_clip_fraction"] == 1
    greedy = batch.replace(greedy_rewards=of(70, 70, 70, 70))
    assert credit(greedy, "remax").scores.tolist() == [10, -10, -10, -10]
    parts = batch.replace(reward_parts={"a": of(1, 2, 3, 4)})
    assert len(set(credit(parts, "gdpo", reward_clip_range=(0, 1)).scores.tolist())) == 4
