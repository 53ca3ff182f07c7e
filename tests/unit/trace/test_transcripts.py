"""Transcripts of episodes in the trace: who said what, and what the environment drew."""

import asyncio
import io
import math
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from openrl.agents.chat import ChatFormat
from openrl.agents.conversation import EpisodeConfig
from openrl.agents.environments.agent import EnvironmentAgent
from openrl.agents.environments.gym import GymEnvironment
from openrl.config.groups.logging import TraceFlags
from openrl.trace.places import images_dir
from openrl.trace.reader import Trace
from openrl.trace.show import NO_TRANSCRIPT, transcript
from openrl.trace.writer import FEWEST, TraceWriter, with_transcript
from openrl.types import Prompt, PromptGroup, Sampling
from tests.chat_templates import family_tokenizer
from tests.scripted_policy import ScriptedPolicy
from tests.traces import WHOLE

CHAT = ChatFormat(family_tokenizer("qwen2.5"), chat=True, kwargs={})
PROMPT = Prompt("eval:lamp:0/../x", [], "", source="lamp", meta={"seed": 1}, render=True)


class Lamp:
    """It gets brighter with every action, and breaks at the third."""

    def reset(self, seed):
        self.light = 0
        return "It is dark.", {"env_instruction": "Light & shade."}

    def step(self, action):
        self.light += 100
        return f"{self.light} lux", 0.25, self.light > 200, False, {"success": True}

    def render(self):
        return np.full((4, 6, 3), min(self.light, 255), dtype=np.uint8)


def played(prompt=PROMPT, tokens=1000, game=Lamp):
    replies = ["<script>on</script><|im_end|>"] * 3
    agent = EnvironmentAgent(lambda _: GymEnvironment(game()), EpisodeConfig(CHAT))
    policy = ScriptedPolicy(CHAT, replies)
    return asyncio.run(agent.run(prompt, policy, Sampling(max_tokens=tokens)))


def kept(directory, *trajectories):
    """Return the trace of an evaluation that played these."""
    writer = TraceWriter(directory / "trace", WHOLE)
    writer.evaluated(0, [PromptGroup(t.prompt, [t]) for t in trajectories])
    writer.close()
    (directory / "metrics.jsonl").touch()
    return Trace(directory)


def lines(found):
    return [line.plain for line in transcript(found)]


def test_an_episode_has_a_transcript_and_a_frame_for_each_state(tmp_path):
    trace = kept(tmp_path, played())
    found = trace.trajectory(0, 0)
    policy = ["--- policy, reward 0.25", "<script>on</script>"]
    assert lines(found) == [
        *("--- system", "Light & shade.", "--- user", "It is dark.", *policy),
        *("--- user", "100 lux", *policy),
        *("--- user", "200 lux", *policy),
        *("--- user", "300 lux"),
    ]
    shades = []
    for turn in found["rendered"]:
        frame = Image.open(io.BytesIO(trace.image(turn["frame"])))
        assert (frame.format, frame.size) == ("PNG", (6, 4))
        shades.append(frame.getpixel((0, 0)))
    assert shades == [(n, n, n) for n in (0, 100, 200, 255)]


def test_equal_frames_are_kept_once(tmp_path):
    trace = kept(tmp_path, played(), played())
    assert len([*images_dir(trace.directory).iterdir()]) == 4
    first, second = (trace.trajectory(0, n)["rendered"] for n in (0, 1))
    assert first == second


def test_an_action_that_was_cut_is_shown_without_what_came_of_it(tmp_path):
    trajectory = played(tokens=2)
    found = kept(tmp_path, trajectory).trajectory(0, 0)
    assert [turn["action"] for turn in found["rendered"]] == [trajectory.text]
    assert lines(found)[-2:] == ["--- policy, reward 0", trajectory.text]


def test_an_episode_that_is_not_for_people_has_no_transcript(tmp_path):
    found = kept(tmp_path, played(replace(PROMPT, render=False))).trajectory(0, 0)
    assert found["rendered"] == []
    assert lines(found) == [NO_TRANSCRIPT]


@pytest.mark.parametrize("share", [0.1, 0.25, 1.0])
def test_a_training_step_keeps_the_episodes_that_have_transcripts(tmp_path, share):
    """Of 40 prompts a step, and of a step in which some that were started early did not come."""
    shown = with_transcript(40, share)
    games = [played(replace(PROMPT, render=show)) for show in (False, True)]
    writer = TraceWriter(tmp_path / "trace", TraceFlags(trace_sample_rate=share))
    for step, indices in ((1, range(40)), (2, range(40, 80)), (3, [*range(85, 120), 200])):
        episodes = [games[shown(n)] for n in indices]
        groups = [PromptGroup(t.prompt, [replace(t)]) for t in episodes]
        writer.played(step, groups, [*range(len(groups))], 0, {})
    writer.close()
    trace = Trace(tmp_path)
    kept = max(FEWEST, round(40 * share))
    for step in (1, 2):
        rows = [*trace.trajectories(step)]
        assert len(rows) == kept and all(len(row["rendered"]) == 4 for row in rows)
    third = sum(map(shown, [*range(85, 120), 200]))
    rows = [*trace.trajectories(3)]
    assert len(rows) == max(FEWEST, math.ceil(36 * share))
    assert sum(bool(row["rendered"]) for row in rows) == min(third, len(rows))
    assert len([*images_dir(trace.directory).iterdir()]) == 4


def test_an_environment_that_does_not_draw_itself_has_no_frames(caplog):
    class Ansi(Lamp):
        def render(self):
            return "a lamp"

    class Broken(Lamp):
        def render(self):
            raise RuntimeError("no display")

    class Window(Broken):
        render_mode = "human"

    for game in (Ansi, Window, Broken, Broken):
        trajectory = played(game=game)
        assert [turn.frame for turn in trajectory.rendered] == [None] * 4
        assert trajectory.score.reward == 0.75
    (said,) = caplog.messages
    assert said.startswith("render() of Broken failed") and "no display" in said


def test_half_a_surrogate_pair_is_a_question_mark(tmp_path):
    class Broken(Lamp):
        def reset(self, seed):
            return f"half \ud800 a pair, {super().reset(seed)[0]}", {}

    found = kept(tmp_path, played(game=Broken)).trajectory(0, 0)
    assert lines(found)[1] == "half ? a pair, It is dark."


def test_pictures_leave_with_the_last_step_that_needs_them(tmp_path):
    class Bright(Lamp):
        def render(self):
            return np.full((4, 6, 3), 250, dtype=np.uint8)

    newest = TraceFlags(trace_sample_rate=1.0, trace_keep_steps=1)
    dark, bright = played(), played(game=Bright)
    for at, keep_until in ((1, -1), (3, 2)):  # the second part of the run continues the first
        writer = TraceWriter(tmp_path / "trace", newest, keep_until=keep_until)
        for step, trajectory in ((at, dark if at == 1 else bright), (at + 1, bright)):
            writer.evaluated(step, [PromptGroup(PROMPT, [trajectory])])
        writer.close()
        (left,) = images_dir(tmp_path / "trace").iterdir()
        assert Image.open(left).getpixel((0, 0)) == (250, 250, 250)
