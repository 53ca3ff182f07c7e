import pytest

from openrl.algorithms.filtering import group_mean, keep, signal_metrics
from openrl.metrics import to_floats
from openrl.trainer.rollout.evaluation import eval_metrics, metric_names
from openrl.trainer.rollout.metrics import rollout_metrics
from openrl.types import FinishReason, Prompt, PromptGroup, Score, Segment, Trajectory

PROMPT = Prompt("p", [1], "")


def group(*scores: Score | None) -> PromptGroup:
    return PromptGroup(
        PROMPT,
        [
            Trajectory(PROMPT, [Segment.answer([1], [2])], FinishReason.STOP, score=s)
            for s in scores
        ],
    )


def rewards(*values: float) -> PromptGroup:
    return group(*(Score(v) for v in values))


@pytest.mark.parametrize(
    ("kept", "values"),
    [(True, (0, 1)), (False, (0, 0)), (False, (1, 1)), (True, (0, 0, 0, 1)), (False, ())],
)
def test_bounds_are_strict(kept, values):
    assert keep(rewards(*values), 0, 1) is kept


def test_the_verdict_comes_before_the_reward():
    mixed = group(Score(5.0, passed=1.0), Score(-5.0, passed=0.0), Score(0.25))
    assert group_mean(mixed) == pytest.approx(1.25 / 3)
    assert group_mean(mixed, "reward") == pytest.approx(0.25 / 3)
    assert keep(mixed, 0, 1)
    assert not keep(mixed, 0.1, 1, "reward")


def test_a_named_part_can_be_the_key():
    parts = group(Score(0, parts={"format": 1.0}), Score(0, parts={"format": 0.0}))
    assert keep(parts, 0, 1, "format")
    assert not keep(parts, 0, 1)


def test_parts_may_differ_between_rows():
    some = group(
        Score(0, parts={"format": 1.0}),
        Score(0, parts={"length": 0.5}),
        Score(0, parts={"format": 0.0}),
    )
    assert group_mean(some, "format") == 0.5 and group_mean(some, "colour") is None
    assert not keep(some, 0, 1, "colour")


def test_failed_samples_neither_save_nor_sink_a_group():
    assert keep(group(None, Score(1.0), Score(0.0)), 0, 1)
    assert not keep(group(None, Score(1.0)), 0, 1)
    assert not keep(group(None, None), 0, 1)


def test_signal_metrics():
    groups = [
        group(Score(1, passed=1), Score(1, passed=1)),
        group(Score(0, passed=0), Score(0, passed=0)),
        group(Score(0, passed=0), Score(1, passed=1)),
        rewards(3),
    ]
    assert signal_metrics(groups) == {
        "zero_variance": 0.75,
        "single_sample": 0.25,
        "all_right": pytest.approx(1 / 3),
        "all_wrong": pytest.approx(1 / 3),
    }
    # no verdict: absent, not 0
    assert set(signal_metrics([rewards(1, 2)])) == {"zero_variance", "single_sample"}
    assert signal_metrics([]) == {}


def test_agents_that_share_episodes_are_compared_with_their_own_kind():
    """Two episodes: the solver was right twice, the critic never; a third one failed."""
    played = group(*(Score(1, passed=1), Score(0), Score(1, passed=1), Score(0)), None)
    failed = played.trajectories[-1]
    for trajectory, agent in zip(played.trajectories, ("solver", "critic") * 2, strict=False):
        trajectory.agent = agent
    failed.finish_reason = FinishReason.ENVIRONMENT_ERROR
    assert [g.rewards for g in played.of_agents] == [[1, 1], [0, 0]]
    assert signal_metrics([played]) == {
        "zero_variance": 1,
        "single_sample": 0,
        "all_right": 1,
        "all_wrong": 0,
    }
    assert not keep(played, 0, 1)
    alone = PromptGroup(PROMPT, played.trajectories[:2])
    assert signal_metrics([alone])["single_sample"] == 1
    measured = to_floats(eval_metrics([played]))
    assert measured["val-core/default/acc/mean@2"] == 1  # the critic has no verdicts
    assert measured["val-core/default/acc/best@2"] == 1 and measured["eval/reward"] == 0.5
    assert {*metric_names([PROMPT], 2)} >= {n for n in measured if n.startswith("val-core")}
    assert measured["eval/agent/solver/reward"] == 1 and measured["eval/agent/critic/reward"] == 0
    found = to_floats(rollout_metrics([played]))
    assert found["rollout/pass_rate"] == 1  # the critic has no verdicts
    assert found["agent/solver/reward"] == 1
