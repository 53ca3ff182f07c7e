"""How often the bytes of an image go from process to process: once to an engine with its prompt, and
once to each rank that trains answers to it."""

import asyncio
import pickle

import pytest

from openrl.agents.single_turn import SingleTurn
from openrl.algorithms.collate import collate
from openrl.trainer.rollout_metrics import rollout_metrics
from openrl.trainer.saved_groups import group_from_json, group_to_json
from openrl.types import (
    Completion,
    End,
    Group,
    PlacedImage,
    Prompt,
    Sampling,
    VersionSpan,
)
from openrl.vision.pictures import png_image
from openrl.vision.travel import with_pixels, without_pixels
from tests.tiny_vision import picture

ANSWERS = 4


@pytest.fixture
def prompt():
    images = [png_image(picture(n)) for n in (1, 2)]
    placed = (PlacedImage(images[0], 1, 5, (4,)), PlacedImage(images[1], 6, 9, (4,)))
    return Prompt("p:0", [7, 4, 4, 4, 4, 8, 4, 4, 4, 9], "", images=placed)


@pytest.fixture
def group(prompt):
    async def generate(token_ids, sampling, images=()):
        assert images == prompt.images
        return Completion([5, 6], [-0.5, -0.5], End.STOP, (VersionSpan(0, 2, 1),))

    async def play():
        agent = SingleTurn(str)
        return [await agent.run(prompt, generate, Sampling(2)) for _ in range(ANSWERS)]

    played = asyncio.run(play())
    return Group(prompt, played, greedy=played[0])


def copies(sent: object, prompt: Prompt) -> list[int]:
    """Of each image, how often its bytes are sent."""
    data = pickle.dumps(sent, protocol=5)
    return [data.count(placed.image.data) for placed in prompt.images]


def test_once_on_each_way(prompt, group):
    assert copies(prompt, prompt) == [1, 1]
    answer = without_pixels(group)
    assert copies(answer, prompt) == [0, 0]
    back = with_pixels(pickle.loads(pickle.dumps(answer)), prompt)
    assert back == group and back.trajectories[0].segments[0].images[0].image.data
    batch = collate([back], 0)
    assert batch.images == [prompt.images] * ANSWERS
    assert copies(batch.select([0, 2, -1]), prompt) == [1, 1]
    assert batch.select([0, -1]).images == [prompt.images, ()]


def test_text_is_passed_on_as_it_is(group):
    plain = Group(Prompt("p", [1], ""), [])
    assert without_pixels(plain) is plain


def test_checkpoints_name_images_by_their_prompt(prompt, group):
    saved = group_to_json(group)
    assert "data" not in str(saved)
    assert group_from_json(saved, {"p:0": prompt}) == group


def test_a_step_says_what_it_showed(group):
    other = Group(Prompt("p:1", [1, 2], ""), group.trajectories[:1])
    found = rollout_metrics([group, other])
    assert found["rollout/images"].value == 2
    assert found["rollout/image_tokens"].value == (4 + 3) / 2  # of two prompts, one with images
    assert "rollout/images" not in rollout_metrics([other])
