"""Episodes of environments: rows, rewards and metrics of scripted policies, and what becomes of
environments that misbehave."""

import asyncio
import math
import re
from dataclasses import replace

import pytest

from openrl.agents.base import REDUCTIONS, Step
from openrl.agents.chat import ChatFormat
from openrl.agents.conversation import EpisodeConfig
from openrl.agents.environments.agent import EnvironmentAgent, EnvironmentFailure, reduce_metrics
from openrl.agents.environments.gym import GymEnvironment, make_environment
from openrl.config.groups.agent import TurnFlags
from openrl.errors import UserError
from openrl.seeds import seed_of
from openrl.types import FinishReason, Prompt, Sampling, Score
from tests.chat_templates import family_tokenizer
from tests.scripted_policy import ScriptedPolicy, sampled

CHAT = ChatFormat(family_tokenizer("qwen2.5"), chat=True, kwargs={})
END = "<|im_end|>"
PROMPT = Prompt("train:walk:0", [], "", source="walk", meta={"seed": 5})
ROOM = Sampling(max_tokens=10_000)


class Walk:
    """To the right end of a line of four cells; "jump" is no action."""

    reductions = {"at": "max", "moves": "sum", "started": "first"}

    def __init__(self):
        self.at, self.seeds, self.closed, self.actions = 0, [], 0, []

    def reset(self, seed):
        self.seeds.append(seed)
        self.at = 0
        return self.line(), {"env_instruction": "Go right."}

    def line(self):
        return "".join("P" if i == self.at else "_" for i in range(4))

    def step(self, action):
        self.actions.append(action)
        if action == "jump":
            return f"No.\n{self.line()}", 0.0, False, False, self.info(False, {})
        before = self.at
        self.at = min(max(self.at + {"right": 1, "left": -1}[action], 0), 3)
        done = self.at == 3
        reward = 10.0 if done else -0.5
        metrics = {"at": self.at, "moves": 1, "started": before, "moved": self.at != before}
        return self.line(), reward, done, len(self.actions) > 5, self.info(True, metrics)

    def info(self, valid, metrics):
        state = {"state": str(self.at), "metrics": metrics}
        return {"action_is_valid": valid, "success": self.at == 3, **state}

    def close(self):
        self.closed += 1


def play(game, *replies, limits=None, sampling=ROOM, prompt=PROMPT, generate=None, **kwargs):
    """The trajectory and the policy. ``game`` is a gym class's object, or an environment."""
    environment = game if hasattr(game, "frame") else GymEnvironment(game)
    policy = ScriptedPolicy(CHAT, [reply + END for reply in replies])
    agent = EnvironmentAgent(
        lambda _: environment, EpisodeConfig(CHAT, limits=limits or TurnFlags(), **kwargs)
    )
    return asyncio.run(agent.run(prompt, generate or policy, sampling)), policy


def test_a_row_without_a_seed_still_has_one_for_all_of_its_samples():
    game = Walk()
    for _ in range(2):
        play(game, "right", "right", "right", prompt=replace(PROMPT, meta={}))
    assert game.seeds == [seed_of(PROMPT.id)] * 2


def test_an_episode_to_the_end():
    trajectory, policy = play(game := Walk(), "right", "left", "jump", "right", "right", "right")
    assert game.seeds == [5] and game.closed == 1
    assert game.actions == ["right", "left", "jump", "right", "right", "right"]
    assert (trajectory.finish_reason, trajectory.turns) == (FinishReason.STOP, 6)
    assert trajectory.score.reward == 10 - 4 * 0.5 and trajectory.score.passed == 1
    assert sampled(trajectory) == policy.given  # and nothing that the environment said
    (row,) = trajectory.segments
    credited = {i: r for i, r in enumerate(trajectory.score.token_rewards) if r}
    ends = [i for i, mine in enumerate(row.loss_mask) if mine and not (*row.loss_mask, 0)[i + 1]]
    assert credited == {
        at: r for at, r in zip(ends, [-0.5, -0.5, 0, -0.5, -0.5, 10], strict=True) if r
    }
    assert CHAT.decode_after([], row.token_ids[: row.context_length]) == (
        "<|im_start|>system\nGo right.<|im_end|>\n<|im_start|>user\nP___<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert trajectory.text.startswith(
        "right<|im_end|>\n<|im_start|>user\n_P__<|im_end|>\n<|im_start|>assistant\nleft<|im_end|>"
    )
    assert trajectory.metrics == {
        "turns": 6, "forked_segments": 0, "invalid_actions": 1,
        "env/walk/at": 3, "env/walk/moves": 5, "env/walk/started": 0, "env/walk/moved": 1,
        "env/walk/action_is_valid": 5 / 6, "env/walk/success": 1,
    }  # fmt: skip


def test_a_row_for_each_turn_knows_the_state_that_it_answers():
    trajectory, policy = play(Walk(), "right", "jump", "right", "right", row_per_turn=True)
    assert [row.state for row in trajectory.segments] == ["P___", "1", "1", "2"]
    assert sampled(trajectory) == policy.given
    assert [len(row.token_ids) for row in trajectory.segments] == [
        len(asked) + len(given) for asked, given in zip(policy.asked, policy.given, strict=True)
    ]


@pytest.mark.parametrize(
    "replies, limits, end",
    [
        (["left"] * 3, TurnFlags(max_turns=3), FinishReason.MAX_TURNS),
        (["left"] * 6, TurnFlags(), FinishReason.MAX_TURNS),  # the environment gave up
        (["right"] * 3, TurnFlags(max_turns=3), FinishReason.STOP),
    ],
)
def test_the_last_turn(replies, limits, end):
    trajectory, _ = play(Walk(), *replies, limits=limits)
    assert (trajectory.finish_reason, trajectory.turns) == (end, len(replies))
    assert trajectory.score.passed == (end is FinishReason.STOP)


def test_an_action_that_was_cut_is_not_taken_unless_there_is_room_for_another():
    trajectory, _ = play(game := Walk(), "right", sampling=Sampling(max_tokens=3))
    assert (
        trajectory.finish_reason is FinishReason.LENGTH and game.actions == [] and game.closed == 1
    )
    assert (trajectory.score.reward, trajectory.score.passed) == (0, 0)
    limits = TurnFlags(max_tokens_per_turn=4)
    with pytest.raises(EnvironmentFailure, match=re.escape("KeyError: 'righ'; actions: ['righ']")):
        play(Walk(), "right", limits=limits)  # the game knows no such word


def test_an_action_that_ends_with_the_last_token_is_taken():
    tokens = len(CHAT.encode_after([0], "right" + END))
    game = Walk()
    trajectory, _ = play(game, "right", "right", sampling=Sampling(max_tokens=tokens))
    assert trajectory.finish_reason is FinishReason.LENGTH and game.actions == ["right"]
    assert (trajectory.score.reward, trajectory.score.passed) == (-0.5, 0)


# -- environments that misbehave -------------------------------------------------------------------


class Async:
    """An environment that was written against the protocol."""

    reductions = {}

    def __init__(self, step=None):
        self.answer, self.closed = step, 0

    async def reset(self, seed, prompt):
        return [{"role": "user", "content": "Go."}]

    async def step(self, action):
        return await self.answer()

    async def frame(self):
        return None

    async def close(self):
        self.closed += 1


def answers(step):
    async def answer():
        return step

    return answer


async def hangs():
    await asyncio.Event().wait()


async def times_out():
    raise TimeoutError("its own server")


async def breaks():
    raise ConnectionError("gone")


@pytest.mark.parametrize(
    "answer, words, kind",
    [
        (answers(Step("ok", reward=math.nan)), "the reward is nan, not a finite number", "value"),
        (
            answers(Step("ok", metrics={"speed": math.inf})),
            "speed is inf, not a finite number",
            "value",
        ),
        (answers(Step("ok", passed=5.0)), "success must be in [0, 1], but it is 5.0", "value"),
        (answers(Step("ok", passed=math.nan)), "success must be in [0, 1], but it is nan", "value"),
        (answers(Step("x" * 1_000_001)), "an observation has 1000001 characters", "length"),
        (breaks, "ConnectionError: gone", "error"),
        (times_out, "TimeoutError: its own server", "error"),
        (hangs, "no answer within 0.05 s", "timeout"),
    ],
)
def test_a_failure_says_which_episode_it_was(answer, words, kind):
    environment = Async(answer)
    limits = TurnFlags(env_step_timeout=0.05)
    with pytest.raises(EnvironmentFailure) as error:
        play(environment, "go", limits=limits)
    assert str(error.value) == f"environment walk, seed 5: {words}; actions: ['go']"
    assert error.value.kind == kind
    assert environment.closed == 1


class Stuck(Walk):
    def close(self):
        raise RuntimeError("it cannot be closed")


def test_a_close_that_fails_hides_neither_a_failure_nor_that_the_episode_was_given_up():
    async def given_up():
        asked = asyncio.Event()

        async def silent(ids, sampling, images=()):
            asked.set()
            await asyncio.Event().wait()

        agent = EnvironmentAgent(lambda _: GymEnvironment(Stuck()), EpisodeConfig(CHAT))
        episode = asyncio.create_task(agent.run(PROMPT, silent, ROOM))
        await asked.wait()
        episode.cancel()
        await asyncio.wait([episode])
        return episode.cancelled()

    assert asyncio.run(given_up())
    with pytest.raises(EnvironmentFailure, match="KeyError: 'up'"):
        play(Stuck(), "up")
    with pytest.raises(EnvironmentFailure, match="it cannot be closed"):
        play(Stuck(), "right", "right", "right")


def test_a_long_list_of_actions_is_cut():
    environment = Async()
    turns = iter([Step("ok")] * 9 + [Step("ok", reward=-math.inf)])
    environment.answer = lambda: answers(next(turns))()
    with pytest.raises(EnvironmentFailure) as error:
        play(environment, *["a" * 300] * 10)
    assert (
        "the reward is -inf, not a finite number; actions: ... " in str(error.value)
        and len(str(error.value)) < 1200
    )


@pytest.mark.parametrize("limit", ["turn_timeout", "episode_timeout"])
def test_what_takes_too_long_ends_the_episode(limit):
    environment = Async(hangs)
    trajectory, policy = play(environment, "go", limits=TurnFlags(**{limit: 0.05}))
    assert trajectory.finish_reason is FinishReason.TIMEOUT and environment.closed == 1
    assert sampled(trajectory) == policy.given and trajectory.score == Score(0, 0)

    async def never(token_ids, sampling, images=()):
        await asyncio.Event().wait()

    trajectory, _ = play(Async(), limits=TurnFlags(**{limit: 0.05}), generate=never)
    assert trajectory.finish_reason is FinishReason.TIMEOUT and trajectory.response_length == 0


def test_a_broken_engine_is_not_the_environments_fault():
    async def broken(token_ids, sampling, images=()):
        raise TimeoutError("engine")

    game = Walk()
    with pytest.raises(TimeoutError, match="engine"):
        play(game, limits=TurnFlags(turn_timeout=60), generate=broken)
    assert game.closed == 1


@pytest.mark.parametrize(("most", "seen"), [(0, 6), (2, 2)])
def test_steps_wait_for_a_place(most, seen):
    """Six episodes step at a time unless a flag says how many may; the time of a step that waits
    has not begun."""
    running, peak = 0, 0

    async def step():
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.1)
        running -= 1
        return Step("ok", done=True)

    limits = TurnFlags(env_max_concurrency=most, env_step_timeout=0.25)
    agent = EnvironmentAgent(lambda _: Async(step), EpisodeConfig(CHAT, limits=limits))

    async def episodes():
        policies = [ScriptedPolicy(CHAT, ["go" + END]) for _ in range(6)]
        return await asyncio.gather(*(agent.run(PROMPT, policy, ROOM) for policy in policies))

    assert [trajectory.finish_reason for trajectory in asyncio.run(episodes())] == [
        FinishReason.STOP
    ] * 6
    assert peak == seen


# -- gym -------------------------------------------------------------------------------------------


def test_old_and_asynchronous_classes():
    class Old:
        def reset(self, seed=None):
            return f"seed {seed}"

        def step(self, action):
            return "over", 2, True, {}

    trajectory, _ = play(Old(), "x")
    assert (trajectory.finish_reason, trajectory.score) == (FinishReason.STOP, Score(2, None))
    assert "seed 5" in trajectory.prompt.text
    assert trajectory.metrics["invalid_actions"] == 0

    class Later(Old):
        async def reset(self, seed):
            return "later", {}

        async def step(self, action):
            return "over", 3.0, False, True, {}

    trajectory, _ = play(Later(), "x")
    assert (trajectory.finish_reason, trajectory.score) == (FinishReason.MAX_TURNS, Score(3, 0))


def test_classes_that_are_no_environment_are_refused():
    class NoSeed(Walk):
        def reset(self):
            return ""

    class NoAction(Walk):
        def step(self):
            return ""

    class Averages(Walk):
        reductions = {"at": "median"}

    with pytest.raises(UserError, match=r"NoSeed has no method reset\(seed\)"):
        GymEnvironment(NoSeed())
    with pytest.raises(UserError, match=r"NoAction has no method step\(action\)"):
        GymEnvironment(NoAction())
    with pytest.raises(UserError, match="Averages has unknown reductions: median"):
        GymEnvironment(Averages())
    with pytest.raises(UserError, match="did you mean 'sokoban'"):
        make_environment("sokban", {})


def test_an_observation_that_is_no_text_is_a_failure():
    class Numbers(Walk):
        def line(self):
            return 3

    with pytest.raises(EnvironmentFailure, match="a list of both, not int"):
        play(Numbers(), "x")


def test_reductions():
    steps = [{"a": 3.0, "b": 1.0}, {"a": 1.0}, {"a": 2.0, "b": 2.0}]
    expected = {"mean": 2, "sum": 6, "min": 1, "max": 3, "first": 3, "last": 2}
    assert set(expected) == set(REDUCTIONS)
    for how, value in expected.items():
        assert reduce_metrics(steps, {"a": how}) == {"a": value, "b": 1.5}


def test_a_built_in_game_from_its_name():
    environment = make_environment("frozen_lake", {"size": 2, "frozen": 1.0})
    prompt = Prompt("eval:frozen_lake:0", [], "", source="frozen_lake", meta={"seed": 1})
    shown = asyncio.run(environment.reset(1, prompt))[1]["content"]
    rows = shown.split("\n")
    (row, goal_row), (column, goal_column) = (
        [next(r for r in (0, 1) if mark in rows[r]) for mark in "PG"],
        [next(c for c in (0, 1) if mark in (rows[0][c], rows[1][c])) for mark in "PG"],
    )
    ways = [("Up", "Down")[goal_row > row]] * (row != goal_row)
    ways += [("Left", "Right")[goal_column > column]] * (column != goal_column)
    trajectory, _ = play(environment, *[f"<answer>{way}</answer>" for way in ways], prompt=prompt)
    assert trajectory.score.reward == 1 and trajectory.metrics["env/frozen_lake/success"] == 1
