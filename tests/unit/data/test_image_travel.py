"""How often the bytes of an image go from process to process: once to an engine with its prompt, and
once to each rank that trains answers to it."""

import asyncio
import json
import pickle
from dataclasses import replace

import pytest

from openrl.agents.single_turn import SingleTurn
from openrl.algorithms.collate import collate
from openrl.token_origins import VersionSpan
from openrl.trace.record import group_from_json, group_to_json
from openrl.trainer.rollout.metrics import rollout_metrics
from openrl.types import (
    Completion,
    FinishReason,
    Image,
    PlacedImage,
    Prompt,
    PromptGroup,
    Sampling,
    Segment,
)
from openrl.vision.pictures import png_image
from openrl.vision.travel import with_pixels, without_pixels
from tests.tiny_vision import picture

ANSWERS = 4
TEXT = Segment.answer([1, 2], [3], [-0.5])


@pytest.fixture
def prompt():
    images = [png_image(picture(n)) for n in (1, 2)]
    placed = (PlacedImage(images[0], 1, 5, (4,)), PlacedImage(images[1], 6, 9, (4,)))
    return Prompt("p:0", [7, 4, 4, 4, 4, 8, 4, 4, 4, 9], "", images=placed)


@pytest.fixture
def group(prompt):
    async def generate(token_ids, sampling, images=()):
        assert images == prompt.images
        return Completion([5, 6], [-0.5, -0.5], FinishReason.STOP, (VersionSpan(0, 2, 1),))

    async def play():
        agent = SingleTurn(str)
        return [await agent.run(prompt, generate, Sampling(2)) for _ in range(ANSWERS)]

    played = asyncio.run(play())
    return PromptGroup(prompt, played, greedy=played[0])


def copies(sent: object, prompt: Prompt) -> list[int]:
    """Of each image, how often its bytes are sent."""
    data = pickle.dumps(sent, protocol=5)
    return [data.count(placed.image.data) for placed in prompt.images]


def test_once_on_each_way(prompt, group):
    assert copies(prompt, prompt) == [1, 1]
    answer = without_pixels(group, prompt)
    assert copies(answer, prompt) == [0, 0]
    back = with_pixels(pickle.loads(pickle.dumps(answer)), prompt)
    assert back == group and back.trajectories[0].segments[0].images[0].image.data
    batch = collate([back], 0)
    assert batch.images == [prompt.images] * ANSWERS
    assert copies(batch.select([0, 2, -1]), prompt) == [1, 1]
    assert batch.select([0, -1]).images == [prompt.images, ()]


def test_text_is_passed_on_as_it_is(group):
    plain = PromptGroup(Prompt("p", [1], ""), [])
    assert without_pixels(plain, plain.prompt) == plain


def test_what_an_environment_shows_is_sent_once(prompt, group):
    """Siblings that saw equal pictures of their own."""
    seed = replace(prompt, images=(), meta={"seed": 3})
    for trajectory in group.trajectories:
        own = [
            replace(p, image=Image(bytes(bytearray(p.image.data)), p.image.sha256))
            for p in prompt.images
        ]
        trajectory.segments[0].images = tuple(own)
    assert copies(group, prompt) != [1, 1]
    sent = without_pixels(replace(group, prompt=seed), seed)
    assert copies(sent, prompt) == [1, 1]
    back = with_pixels(pickle.loads(pickle.dumps(sent)), seed)
    assert [p.image.data for p in back.trajectories[3].segments[0].images] == [
        p.image.data for p in prompt.images
    ]


def test_checkpoints_hold_what_an_environment_showed(prompt, group):
    seed = Prompt("p:0", [], "", meta={"seed": 3})
    made = replace(prompt, meta=seed.meta)
    played = [replace(t, prompt=made) for t in group.trajectories]
    saved = json.loads(json.dumps(group_to_json(PromptGroup(made, played))))
    back = group_from_json(saved, {"p:0": seed})
    assert back == PromptGroup(made, played)
    shown = back.trajectories[1].segments[0].images
    assert [p.image.data for p in shown] == [p.image.data for p in prompt.images]


def test_checkpoints_hold_what_failed_attempts_saw(prompt, group):
    seed = Prompt("p:0", [], "", meta={"seed": 3})
    made = replace(prompt, meta=seed.meta)
    lost = PromptGroup(
        made, [], failed_attempts=[replace(t, prompt=made) for t in group.trajectories]
    )
    assert group_from_json(json.loads(json.dumps(group_to_json(lost))), {"p:0": seed}) == lost


def test_groups_saved_without_failed_attempts_are_read(prompt, group):
    saved = group_to_json(group)
    del saved["lost"]
    assert group_from_json(saved, {"p:0": prompt}) == group


def test_checkpoints_name_images_by_their_prompt(prompt, group):
    saved = group_to_json(group)
    assert saved["images"] == {}
    assert group_from_json(saved, {"p:0": prompt}) == group


def test_a_step_says_what_it_showed(group):
    other = PromptGroup(Prompt("p:1", [1, 2], ""), group.trajectories[:1])
    found = rollout_metrics([group, other])
    assert found["rollout/images"].value == 2 + 2  # of two groups
    assert found["rollout/image_pixels"].value == 4 * 80 * 60
    assert found["rollout/image_tokens"].value == 4 + 3
    text = PromptGroup(other.prompt, [replace(t, segments=[TEXT]) for t in other.trajectories])
    assert rollout_metrics([group, text])["rollout/image_tokens"].value == (4 + 3) * 4 / 5
    assert "rollout/images" not in rollout_metrics([text])
