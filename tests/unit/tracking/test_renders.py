"""Episodes on disk: what people see of them."""

import asyncio
import io
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
from PIL import Image

from openrl.agents.chat import ChatFormat
from openrl.agents.conversation import EpisodeConfig
from openrl.agents.environments.agent import EnvironmentAgent
from openrl.agents.environments.gym import GymEnvironment
from openrl.tracking.renders import gif, save_episodes
from openrl.types import Prompt, PromptGroup, Sampling
from tests.chat_templates import family_tokenizer
from tests.scripted_policy import ScriptedPolicy

CHAT = ChatFormat(family_tokenizer("qwen2.5"), chat=True, kwargs={})
PROMPT = Prompt("eval:lamp:0/../x", [], "", source="lamp", meta={"seed": 1}, render=True)


class Lamp:
    """It gets brighter with every action, and breaks at the third."""

    def reset(self, seed):
        self.light = 0
        return "It is <b>dark</b>.", {"env_instruction": "Light & shade."}

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


class Text(HTMLParser):
    def __init__(self):
        super().__init__()
        self.said, self.tags, self.sources = [], set(), []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.sources += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        self.said.append(data)


def test_an_episode_is_a_transcript_a_page_and_a_gif(tmp_path):
    save_episodes(tmp_path / "step_4", [PromptGroup(PROMPT, [played()])])
    name = "eval_lamp_0_.._x_0_reward_0.75"
    files = {path.suffix: path for path in (tmp_path / "step_4").iterdir()}
    assert {path.stem for path in files.values()} == {name}
    assert files[".txt"].read_text() == (
        "eval:lamp:0/../x: reward 0.75, passed 1, 3 turns, stop\n"
        "--- system\nLight & shade.\n"
        "--- user\nIt is <b>dark</b>.\n--- assistant, reward 0.25\n<script>on</script>\n"
        "--- user\n100 lux\n--- assistant, reward 0.25\n<script>on</script>\n"
        "--- user\n200 lux\n--- assistant, reward 0.25\n<script>on</script>\n"
        "--- user\n300 lux\n"
    )  # fmt: skip
    page = Text()
    page.feed(files[".html"].read_text())
    assert page.said.count("<script>on</script>") == 3 and "It is <b>dark</b>." in page.said
    assert not {"script", "b", "link"} & page.tags
    assert len(page.sources) == 4 and all(s.startswith("data:image/png") for s in page.sources)
    film = Image.open(files[".gif"])
    assert (film.n_frames, film.size) == (4, (6, 4))
    shown = []
    for frame in range(4):
        film.seek(frame)
        shown.append((film.convert("RGB").getpixel((0, 0)), film.info["duration"]))
    assert shown == [((v, v, v), 500) for v in (0, 100, 200)] + [((255, 255, 255), 1500)]


def test_an_action_that_was_cut_is_shown_without_what_came_of_it(tmp_path):
    trajectory = played(tokens=2)
    assert [turn.action for turn in trajectory.rendered] == [trajectory.text]
    save_episodes(tmp_path, [PromptGroup(PROMPT, [trajectory])])
    assert "reward 0, passed 0, 1 turns, length" in next(tmp_path.glob("*.txt")).read_text()


def test_what_is_no_picture_is_left_out():
    class Ansi(Lamp):
        def render(self):
            return "a lamp"

    assert asyncio.run(GymEnvironment(Ansi()).frame()) is None


def test_nothing_is_kept_unless_it_is_asked_for(tmp_path):
    trajectory = played(replace(PROMPT, render=False))
    assert trajectory.rendered == ()
    save_episodes(tmp_path / "none", [PromptGroup(PROMPT, [trajectory])])
    assert not (tmp_path / "none").exists()


def test_equal_frames_stay_frames():
    still = [np.zeros((2, 2, 3), dtype=np.uint8)] * 3
    film = Image.open(io.BytesIO(gif(still)))
    lasts = 0
    for frame in range(film.n_frames):
        film.seek(frame)
        lasts += film.info["duration"]
    assert lasts == 500 + 500 + 1500  # Pillow joins equal frames and keeps their time


def test_half_a_surrogate_pair_is_a_question_mark(tmp_path):
    class Broken(Lamp):
        def reset(self, seed):
            return f"half \ud800 a pair, {super().reset(seed)[0]}", {}

    trajectory = played(game=Broken)
    save_episodes(tmp_path, [PromptGroup(PROMPT, [trajectory])])
    assert "half ? a pair" in trajectory.prompt.text
    texts = [path.read_text() for path in tmp_path.glob("*.*t*") if path.suffix != ".gif"]
    assert len(texts) == 2 and all("half ? a pair" in text for text in texts)
