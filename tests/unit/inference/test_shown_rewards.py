"""A reward server whose model sees: scores of texts with images are the model's own of each alone."""

import asyncio
import base64

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from openrl.config.groups.data import PromptDataFlags, TemplateFlags
from openrl.config.groups.inference import RewardModelFlags
from openrl.config.groups.model import LoadFlags
from openrl.config.groups.vision import ImageFlags, VisionFlags
from openrl.data.images import RowImages
from openrl.data.prompts import PromptBuilder
from openrl.data.tokenizer import load_tokenizer
from openrl.inference.batch import add_target_reward
from openrl.inference.scoring import ModelScorer, load_reward_model
from openrl.inference.server import build_app
from openrl.models.causal_lm import Loading
from openrl.types import Prompt
from openrl.vision.pictures import make_image
from openrl.vision.processor import VisionProcessor
from tests.tiny_vision import picture, png, tiny_vision_dir

FILES = [png(picture(1)), png(picture(2, (40, 90))), png(picture(3))]
TEXTS = ["u:<image><eos>a:no<eos>", "nothing", "<image> and <image>"]
SHOWN = [[0], [], [1, 2]]


def url(data):
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tiny_vision_dir(tmp_path_factory.mktemp("m"))
    state = load_file(path / "model.safetensors")
    weight = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    save_file(state | {"score.weight": weight}, path / "model.safetensors", {"format": "pt"})
    return str(path)


@pytest.fixture(scope="module")
def processor(checkpoint):
    return VisionProcessor(checkpoint, {})


def scorer_of(checkpoint, processor, *, sees=True, packing=False, max_len=256):
    vision = {"max_images_per_prompt": 2 * sees}
    images = RowImages(ImageFlags(**vision), processor) if sees else None
    loading = Loading(LoadFlags(param_dtype="fp32"), "cpu", packing, vision=VisionFlags(**vision))
    model = load_reward_model(checkpoint, RewardModelFlags(max_len=max_len), loading, images=images)
    return ModelScorer(model, batch_size=4, sees=sees)


def own_scores(checkpoint, processor):
    """Those of transformers' backbone and the head, each text alone."""
    backbone = AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
    head = load_file(f"{checkpoint}/model.safetensors")["score.weight"][0]
    found = []
    for text, shown in zip(TEXTS, SHOWN, strict=True):
        images = [make_image(FILES[n]) for n in shown]
        ids, _ = processor.place(
            processor.processor.tokenizer(text, add_special_tokens=False).input_ids, images
        )
        media = processor.batch(images)
        with torch.no_grad():
            states = backbone(input_ids=torch.tensor([ids]), **media).last_hidden_state
        found.append(float(states[0, -1] @ head))
    return found


def ask(scorer, *bodies):
    """The server's replies, one after the other, and its metrics."""

    async def main():
        transport = httpx.ASGITransport(build_app(scorer))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            found = [await client.post("/get_reward", json=body) for body in bodies]
            metrics = await client.get("/metrics")
        await scorer.close()
        return found, metrics.text

    return asyncio.run(main())


def request(shown=SHOWN):
    return {"query": TEXTS, "images": [[url(FILES[n]) for n in of_text] for of_text in shown]}


@pytest.mark.parametrize("packing", [False, True])
def test_scores_are_the_models_own_with_images(checkpoint, processor, packing):
    expected = own_scores(checkpoint, processor)
    scorer = scorer_of(checkpoint, processor, packing=packing)
    (right, swapped), _ = ask(scorer, request(), request([[1], [], [0, 2]]))
    assert right.json()["rewards"] == pytest.approx(expected, abs=1e-4)
    first, text, last = swapped.json()["rewards"]
    assert text == pytest.approx(expected[1], abs=1e-4)
    assert abs(first - expected[0]) > 1e-3 and abs(last - expected[2]) > 1e-3


def test_an_image_that_cannot_be_used_costs_its_own_text(checkpoint, processor):
    body = request()
    body["images"][0] = [url(b"none")]
    fewer = {"query": TEXTS, "images": [[], [], [url(FILES[1])]]}
    (broken, counted), _ = ask(scorer_of(checkpoint, processor), body, fewer)
    assert [reward is None for reward in broken.json()["rewards"]] == [True, False, False]
    assert [reward is None for reward in counted.json()["rewards"]] == [True, False, True]


def test_a_text_that_is_cut_loses_images_whole(checkpoint, processor):
    """Both have 23 tokens left of 34 + 23: what is cut goes through the image."""
    long = {"query": ["<image>" + "x" * 23, "x" * 23], "images": [[url(FILES[0])], []]}
    (reply,), metrics = ask(scorer_of(checkpoint, processor, max_len=40), long)
    cut, text = reply.json()["rewards"]
    assert cut == pytest.approx(text, abs=1e-4)
    assert "openrl_rm_cut_texts_total 1.0" in metrics


def test_images_for_a_model_that_reads_text_are_counted(checkpoint, processor):
    scorer = scorer_of(checkpoint, processor, sees=False)
    (allow_images, without), metrics = ask(scorer, request(), {"query": TEXTS})
    assert allow_images.json()["rewards"] == without.json()["rewards"]
    assert "openrl_rm_unseen_images_total 3.0" in metrics
    assert scorer.counts.notes() == ["3 images with the texts were not seen"]


@pytest.mark.parametrize(
    "images",
    [[[]], ["data:,"] * 3, [["/etc/passwd"], [], []], [["http://127.0.0.1/a.png"], [], []]],
)
def test_images_are_data_urls_for_each_text(checkpoint, processor, images):
    body = {"query": TEXTS, "images": images}
    (reply,), _ = ask(scorer_of(checkpoint, processor), body)
    assert reply.status_code == 400 and "'images' must hold" in reply.json()["error"]


def test_a_prompt_with_its_wanted_reward_keeps_its_images(checkpoint, processor):
    """Its tokens are those that the processor itself makes of the longer text."""
    images = RowImages(ImageFlags(max_images_per_prompt=1), processor)
    tokenizer = load_tokenizer(checkpoint, LoadFlags())
    data, chat = PromptDataFlags(prompt_data="d"), TemplateFlags(apply_chat_template=True)
    builder = PromptBuilder(data, chat, tokenizer, 256, images=images)
    text, image = "u:<image><eos>a:", make_image(FILES[0])
    ids, placed = images.place(tokenizer(text, add_special_tokens=False).input_ids, [image])
    asked = add_target_reward(Prompt("0", ids, text, images=placed), "<rm>: 5", builder)
    assert asked.text == f"{text}<rm>: 5 " and asked.images == placed
    processor.check(asked.text, asked.token_ids, [image])
