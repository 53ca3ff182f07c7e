"""Which groups of earlier steps are trained on again, worked out by hand."""

import asyncio
import dataclasses
import json

import pytest
import torch

from openrl.algorithms.collate import collate
from openrl.algorithms.off_policy import ages
from openrl.cluster.group import LocalGroup
from openrl.config.groups.replay import ReplayFlags
from openrl.config.groups.rollout_correction import DynamicFilteringFlags
from openrl.metrics import to_floats
from openrl.token_origins import VersionSpan
from openrl.trainer.rollout.engine_pool import EnginePool
from openrl.trainer.rollout.filtering import DynamicFilter
from openrl.trainer.rollout.replay_buffer import ReplayBuffer
from openrl.types import (
    FinishReason,
    Prompt,
    PromptGroup,
    RenderedTurn,
    Score,
    Segment,
    Trajectory,
)
from tests.loops import Trackers
from tests.unit.trainer.test_sync_interval import Learner, Run, trainer_of

PROMPTS = {str(n): Prompt(str(n), [1, 2], "") for n in range(10)}


def group(name: int, *rewards: float, version: int = 0, agents=("",)) -> PromptGroup:
    """Answers of two tokens, of which the second was sampled one sync after the first."""
    spans = (VersionSpan(0, 1, version), VersionSpan(1, 2, version + 1))
    of = PROMPTS[str(name)]
    played = [
        Trajectory(
            of,
            [Segment.answer([1, 2], [3, 4 + n], [-0.5, -0.125 * (n + 1)], spans)],
            FinishReason.STOP,
            score=Score(reward, reward),
            agent=agents[n % len(agents)],
        )
        for n, reward in enumerate(rewards)
    ]
    return PromptGroup(of, played)


def buffer(**flags: int) -> ReplayBuffer:
    return ReplayBuffer(dataclasses.replace(ReplayFlags(replay_groups=2), **flags))


def names(groups: list[PromptGroup]) -> str:
    return "".join(group.prompt.id for group in groups)


def step(of: ReplayBuffer, version: int, *new: PromptGroup) -> tuple[str, dict[str, float]]:
    """The prompts that a step replays, and its metrics."""
    replayed = of.choose(version)
    assert of.choose(version) == replayed  # asking changes nothing
    return names(replayed), to_floats(of.trained(list(new), replayed, version))


def test_groups_with_a_signal_wait_and_the_strongest_come_first():
    replays = buffer()
    # standard deviations: 0 (stays out), 0.433, 0.5, 0.433 of younger weights
    new = [group(0, 1, 1, 1, 1), group(1, 1, 0, 0, 0), group(2, 1, 1, 0, 0)]
    assert step(replays, 1, *new, group(3, 1, 1, 1, 0, version=1))[0] == ""
    told, metrics = step(replays, 2)
    assert told == "23"  # 3 before 1: equally strong, and younger
    assert metrics == {
        "replay/groups": 2,
        "replay/share": 1.0,  # the step had no new groups
        "replay/age_mean": 1.5,  # 2 is 2 syncs old, 3 is 1
        "replay/uses_mean": 1,
        "replay/used_up": 2,
        "replay/evicted_by_age": 0,
        "replay/evicted_by_size": 0,
        "replay/waiting": 1,
    }


def test_a_group_used_less_often_goes_first_until_all_are_used_up():
    replays = buffer(replay_groups=1, replay_max_uses=2)
    step(replays, 0, group(1, 1, 0, 0, 0), group(2, 1, 1, 0, 0))
    found = [step(replays, 0) for _ in range(5)]
    assert [told for told, _ in found] == ["2", "1", "2", "1", ""]
    assert [m.get("replay/uses_mean") for _, m in found] == [1, 1, 2, 2, None]
    assert [m["replay/used_up"] for _, m in found] == [0, 0, 1, 1, 0]


def test_what_is_too_old_is_not_replayed_and_leaves_counted():
    replays = buffer(replay_max_age=3)
    step(replays, 1, group(1, 1, 0), group(2, 1, 0, version=2))
    assert names(replays.choose(3)) == "21"
    assert names(replays.choose(4)) == "2"  # 1 was sampled 4 syncs before
    told, metrics = step(replays, 4)
    assert told == "2" and metrics["replay/evicted_by_age"] == 1
    assert metrics["replay/waiting"] == 0


def test_the_oldest_leave_where_there_is_no_room():
    replays = buffer(replay_buffer_size=2)
    new = [group(n, 1, 0, version=v) for n, v in ((1, 5), (2, 4), (3, 5), (4, 4))]
    _, metrics = step(replays, 5, *new)
    assert metrics["replay/evicted_by_size"] == 2 and metrics["replay/waiting"] == 2
    assert names([one.group for one in replays.waiting]) == "13"


def test_by_default_it_holds_what_can_join_before_it_is_too_old():
    """Two groups in each of three steps."""
    assert buffer(replay_max_age=3).flags.buffer_size == 6
    assert buffer(replay_max_age=3, replay_buffer_size=9).flags.buffer_size == 9


def test_what_training_does_not_read_is_not_kept():
    replays, seen = buffer(), group(1, 1, 0)
    turn = RenderedTurn((), "png", "action")
    seen.trajectories = [dataclasses.replace(t, rendered=(turn,)) for t in seen.trajectories]
    seen.failed_attempts = group(1, 1).trajectories
    step(replays, 1, seen)
    assert [one.group for one in replays.waiting] == [group(1, 1, 0)]
    assert all(t.rendered for t in seen.trajectories) and seen.failed_attempts  # for the trace


@pytest.mark.parametrize("shortfall", ["skip", "train"])
def test_a_step_without_groups_that_teach_replays_none(shortfall):
    """The second of three prompts has equal rewards, and no other may be tried instead."""
    rewards = iter([(1, 0), (1, 1), (1, 0)])
    flags = DynamicFilteringFlags(dynamic_filtering=True, dynamic_filtering_shortfall=shortfall)
    replayed, learned = [], []

    class Engine:
        def __init__(self, context): ...

        async def play(self, prompt, request):
            return dataclasses.replace(group(1, *next(rewards)), prompt=prompt)

    class OneLearner(Learner):
        async def learn(self, groups, version, step, stage, point):
            learned.append((step, len(groups)))
            return {}

    async def scenario():
        trackers = Trackers()
        trackers.log_played = lambda step, *played: replayed.append(len(played[-1]))
        trainer = trainer_of(Run(), trackers, count=3, learner=OneLearner)
        trainer.rollouts.pool = EnginePool(LocalGroup.create("vllm", 1, Engine))
        trainer.rollouts.buffer.filter = DynamicFilter(flags, 1, 1)
        trainer.rollouts.replay = buffer(replay_max_uses=9)
        await trainer.run_steps()
        return [metrics.get("replay/groups") for _, metrics in trackers.logged]

    assert asyncio.run(scenario()) == [0, None, 1]
    assert replayed == [0, 0, 1] and learned == [(1, 1), (3, 2)]


def test_agents_who_share_an_episode_are_compared_with_their_own_kind():
    replays = buffer()
    apart = group(1, 1, 0, 1, 0, agents=("a", "b"))  # each agent always gets the same
    differing = group(2, 1, 1, 0, 1, agents=("a", "b"))
    step(replays, 0, apart, differing)
    assert names(replays.choose(0)) == "2"


def test_versions_that_nobody_knows_count_from_the_step_that_trained():
    unknown = group(1, 1, 0)
    for trajectory in unknown.trajectories:
        trajectory.segments[0].versions = ()
    replays = buffer(replay_max_age=2)
    step(replays, 7, unknown)
    assert names(replays.choose(9)) == "1" and not replays.choose(10)


def test_a_resumed_buffer_chooses_and_counts_as_the_one_that_went_on():
    flags = {"replay_max_uses": 2, "replay_groups": 2, "replay_max_age": 4}
    replays, resumed = buffer(**flags), buffer(**flags)
    step(replays, 1, *(group(n, 1, *[0] * n, version=n % 2) for n in range(1, 6)))
    step(replays, 2, group(6, 1, 1, 0, version=2))
    resumed.load_state(json.loads(json.dumps(replays.state())), PROMPTS)
    for version in range(3, 7):
        new = group(version + 3, 1, 0, version=version)
        assert step(replays, version, new) == step(resumed, version, new)
        assert replays.waiting == resumed.waiting


def test_a_replayed_group_gives_the_batch_of_fresh_rows_of_its_age():
    """Equal batches have equal gradients; what tells old rows from new ones is their versions."""
    replays = buffer()
    step(replays, 0, group(1, 1, 0, 1))
    resumed = buffer()
    resumed.load_state(json.loads(json.dumps(replays.state())), PROMPTS)
    fresh = group(2, 0, 1, 1, version=3)
    mixed = collate([fresh, *resumed.choose(3)], 0)
    expected = collate([fresh, group(1, 1, 0, 1)], 0)
    for column in dataclasses.fields(mixed):
        found, wanted = getattr(mixed, column.name), getattr(expected, column.name)
        if isinstance(found, torch.Tensor):
            assert torch.equal(found, wanted) or found.isnan().all(), column.name
        else:
            assert found == wanted, column.name
    assert ages(mixed, 3).tolist() == [[-1, -1, 0, -1]] * 3 + [[-1, -1, 3, 2]] * 3
