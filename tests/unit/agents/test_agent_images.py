"""Pictures that environments and tools show: the rows of an episode are what the model's own
processor makes of the whole chat."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from openrl.agents.chat import ChatFormat
from openrl.agents.conversation import EpisodeConfig
from openrl.agents.environments.agent import EnvironmentAgent, EnvironmentFailure
from openrl.agents.environments.gym import GymEnvironment, make_environment
from openrl.agents.single_turn import SingleTurn
from openrl.agents.tools.agent import ToolAgent
from openrl.agents.tools.calls import ParsedReply, ToolCall
from openrl.agents.tools.functions import FunctionTools
from openrl.agents.tools.toolbox import Toolbox
from openrl.config.groups.vision import ImageFlags
from openrl.data.images import RowImages
from openrl.errors import UserError
from openrl.rewards.combined import read_rows
from openrl.trace.reader import Trace
from openrl.trace.writer import TraceWriter
from openrl.types import FinishReason, PlacedImage, Prompt, PromptGroup, Sampling
from openrl.vision.pictures import open_image, png_image
from openrl.vision.processor import VisionProcessor
from tests.scripted_policy import ScriptedPolicy
from tests.tiny_vision import picture, png, tiny_vision_dir
from tests.traces import WHOLE

PROMPT = Prompt("p:0", [], "", source="zoom", meta={"seed": 1}, render=True)
ROOM = Sampling(max_tokens=10_000)


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return VisionProcessor(str(tiny_vision_dir(tmp_path_factory.mktemp("m"))), {})


def chat_of(processor, most=3):
    images = RowImages(ImageFlags(max_images_per_prompt=most), processor)
    return ChatFormat(processor.processor.tokenizer, chat=True, kwargs={}, images=images)


class Zoom:
    """A picture of PIL, then one of numpy behind a text, then a file, then it is over."""

    def __init__(self, *shown):
        self.shown = list(shown) or [
            picture(1),
            ["nearer:", np.asarray(picture(2, (40, 90)))],
            [{"type": "image", "image": png(picture(3))}, "still"],
            "over",
        ]

    def reset(self, seed):
        return self.shown.pop(0), {}

    def step(self, action):
        return self.shown.pop(0), 1.0, not self.shown, False, {}


def play(chat, game, **kwargs):
    policy = ScriptedPolicy(chat, ["12<eos>", "a b<eos>", "7<eos>"])
    agent = EnvironmentAgent(lambda _: GymEnvironment(game), EpisodeConfig(chat, **kwargs))
    return asyncio.run(agent.run(PROMPT, policy, ROOM)), policy


def test_a_row_is_what_the_processor_makes_of_the_whole_chat(processor):
    trajectory, policy = play(chat_of(processor), Zoom())
    (row,) = trajectory.segments
    said = "u:<image><eos>a:12<eos>u:nearer:<image><eos>a:a b<eos>u:<image>still<eos>a:7<eos>"
    expected = [png_image(picture(n, size)) for n, size in ((1, (80, 60)), (2, (40, 90)))]
    images = [placed.image for placed in row.images]
    assert images[:2] == expected and len(images) == 3
    processor.check(said, row.token_ids, images)  # raises if they differ
    assert [len(shown) for shown in policy.shown] == [1, 2, 3]
    for asked, shown in zip(policy.asked, policy.shown, strict=True):
        assert all(placed in row.images for placed in shown) and shown[-1].end <= len(asked)
    assert row.sampled_ids == [token for ids in policy.given for token in ids]
    assert trajectory.text == said.partition("a:")[2]  # with one mark for each image
    assert trajectory.prompt.images == row.images[:1]
    assert trajectory.prompt.text == "u:<image><eos>a:"


def test_rewards_are_told_what_was_seen(processor):
    trajectory, _ = play(chat_of(processor), Zoom())
    tokenizer = processor.processor.tokenizer
    rows = read_rows(
        PromptGroup(trajectory.prompt, [trajectory]), tokenizer, skip_special_tokens=False
    )
    assert rows.prompts == ["u:<image><eos>a:"]  # one mark for each image
    assert rows.queries == [rows.prompts[0] + trajectory.text]
    assert rows.images == [[placed.image.data for placed in trajectory.segments[0].images]]


def test_rows_of_single_turns_have_the_images_of_the_turns_before(processor):
    trajectory, _ = play(chat_of(processor), Zoom(), row_per_turn=True)
    assert [len(row.images) for row in trajectory.segments] == [1, 2, 3]
    last = trajectory.segments[-1]
    assert sum(last.loss_mask) == 2 and last.images[:1] == trajectory.segments[0].images


def kept_turns(directory, trajectory):
    """Return the trace of an evaluation that played the trajectory, and its turns there."""
    writer = TraceWriter(directory, WHOLE)
    writer.evaluated(0, [PromptGroup(trajectory.prompt, [trajectory])])
    writer.close()
    trace = Trace(directory)
    return trace, trace.trajectory(0, 0)["rendered"]


def test_a_transcript_shows_what_the_policy_saw(processor, tmp_path):
    trajectory, _ = play(chat_of(processor), Zoom())
    trace, turns = kept_turns(tmp_path, trajectory)
    messages = [message for turn in turns for message in turn["messages"]]
    texts = [message["text"] for message in messages]
    assert texts == ["[image]", "nearer:\n[image]", "[image]\nstill", "over"]
    images = [name for message in messages for name in message["images"]]
    seen = [placed.image for placed in trajectory.segments[0].images]
    assert images == [image.sha256 for image in seen]
    assert [trace.image(name) for name in images] == [image.data for image in seen]


def test_more_images_than_the_engine_takes_are_named(processor):
    with pytest.raises(UserError, match="shows 3 images, more than --max_images_per_prompt 2"):
        play(chat_of(processor, most=2), Zoom())


def test_a_policy_that_reads_text_is_not_shown_an_environment_of_pictures(processor):
    blind = ChatFormat(processor.processor.tokenizer, chat=True, kwargs={})
    with pytest.raises(UserError, match="can only read text"):
        play(blind, Zoom())


def test_a_picture_that_cannot_be_read_is_the_environments_failure(processor):
    broken = [{"type": "image", "image": b"no picture"}]
    with pytest.raises(EnvironmentFailure, match="cannot be read"):
        play(chat_of(processor), Zoom(broken, "over"))


def test_text_that_looks_like_an_image_is_a_failure(processor):
    with pytest.raises(Exception, match="1 places for images in the text, and 0 images"):
        play(chat_of(processor), Zoom("see <image>", "over"))


def look(number: int):
    """A picture.

    Args:
        number: Which one.
    """
    return ["here:", picture(number)]


def parse(text, schemas):
    calls = (ToolCall("look", {"number": 5}),) if text == "look" else ()
    return ParsedReply("" if calls else text, calls)


def ask(chat, prompt):
    policy = ScriptedPolicy(chat, ["look<eos>", "ok<eos>"])
    agent = ToolAgent(lambda: Toolbox([FunctionTools([look])], 0.0), EpisodeConfig(chat, parse))
    return asyncio.run(agent.run(prompt, policy, ROOM))


@pytest.fixture
def question(processor):
    """A prompt with an image of its own, as rows of the data have it."""
    image, tokenizer = png_image(picture(9)), processor.processor.tokenizer
    ids = tokenizer("u:<image>?<eos>a:", add_special_tokens=False).input_ids
    tokens, placed = processor.place(ids, [image])
    content = [{"type": "image"}, {"type": "text", "text": "?"}]
    messages = ({"role": "user", "content": content},)
    return Prompt("p:1", tokens, "u:<image>?<eos>a:", messages=messages, images=placed)


def test_a_transcript_shows_what_a_single_answer_was_about(processor, question, tmp_path):
    agent = SingleTurn(processor.processor.tokenizer.decode)

    def play(prompt):
        policy = ScriptedPolicy(chat_of(processor), ["7<eos>"])
        return asyncio.run(agent.run(prompt, policy, ROOM))

    trajectory = play(replace(question, render=True))
    _, (turn,) = kept_turns(tmp_path, trajectory)
    (message,) = turn["messages"]
    assert message["text"] == "[image]\n?" and turn["action"] == "7<eos>"
    assert message["images"] == [question.images[0].image.sha256]
    assert not play(question).rendered


def test_tools_show_pictures(processor, question):
    trajectory = ask(chat_of(processor), question)
    assert trajectory.finish_reason is FinishReason.STOP
    (row,) = trajectory.segments
    assert row.token_ids[: len(question.token_ids)] == question.token_ids
    assert row.images[0] == question.images[0] and isinstance(row.images[1], PlacedImage)
    assert row.images[1].image == png_image(picture(5))
    processor.check(
        "u:<image>?<eos>a:look<eos>t:here:<image><eos>a:ok<eos>",
        row.token_ids,
        [placed.image for placed in row.images],
    )


def test_tools_name_pictures_to_a_policy_that_reads_text(processor):
    blind = ChatFormat(processor.processor.tokenizer, chat=True, kwargs={})
    trajectory = ask(blind, Prompt("p", [1], "?"))
    assert "here:\n<unk>image<unk>" in trajectory.text  # brackets are unknown to this tokenizer
    assert not trajectory.segments[-1].images


@pytest.mark.parametrize("tag", ["number_game", "frozen_lake", "sokoban"])
def test_games_are_shown_as_pictures(tag):
    game = make_environment(tag, {"pictures": True})
    (first,) = asyncio.run(game.reset(3, PROMPT))[-1]["content"]
    again = asyncio.run(make_environment(tag, {"pictures": True}).reset(3, PROMPT))
    other = asyncio.run(make_environment(tag, {"pictures": True}).reset(4, PROMPT))
    frame = np.asarray(open_image(asyncio.run(game.frame())))
    assert first["type"] == "image" and np.array_equal(first["image"], frame)
    assert np.array_equal(again[-1]["content"][0]["image"], frame)
    assert not np.array_equal(other[-1]["content"][0]["image"], frame)


def test_a_game_that_draws_nothing_says_so():
    with pytest.raises(UserError, match="Bandit cannot draw pictures"):
        asyncio.run(make_environment("bandit", {"pictures": True}).reset(1, PROMPT))
