"""A vision-language model as policy and critic: what it computes of rows with and without images,
padded and packed, held against transformers' own forward of each row alone."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from openrl.config.groups.lora import LoRAFlags
from openrl.config.groups.model import LoadFlags
from openrl.config.groups.vision import VisionFlags
from openrl.models.causal_lm import Loading, load_causal_lm
from openrl.models.lora import add_adapters, check_targets
from openrl.models.scalar_model import ValueModel, load_scalar_model
from openrl.models.towers import tower_parameters
from openrl.vision.pictures import open_image, png_image
from openrl.vision.processor import VisionProcessor, media_tokens
from tests.tiny_vision import ARCHITECTURES, picture, tiny_vision_dir

pytestmark = pytest.mark.full

FP32 = LoadFlags(param_dtype="fp32")
SEEING = Loading(FP32, "cpu", vision=VisionFlags(max_images_per_prompt=2))
TEXTS = ("no image", "<image>one", "two <image> and<image>:", "7")
SHOWN = ((), (1,), (2, 3), ())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(tiny_vision_dir(tmp_path_factory.mktemp("m")))


@pytest.fixture(scope="module")
def rows(checkpoint):
    return rows_of(checkpoint, VisionProcessor(checkpoint, {}))


def texts_of(processor):
    return [text.replace("<image>", processor.placeholder) for text in TEXTS]


def rows_of(checkpoint, processor):
    """Token ids and images of each row."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    sizes = {1: (80, 60), 2: (30, 90), 3: (56, 56)}
    return [
        processor.place(
            tokenizer(text, add_special_tokens=False).input_ids,
            [png_image(picture(n, sizes[n])) for n in shown],
        )
        for text, shown in zip(texts_of(processor), SHOWN, strict=True)
    ]


def padded(rows):
    width = max(len(ids) for ids, _ in rows)
    mask = torch.tensor([[i < len(ids) for i in range(width)] for ids, _ in rows])
    return torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows]), mask


def plain_logprobs(checkpoint, processor, rows):
    """Each row alone, through the whole model of transformers and the processor's own tensors;
    image tokens have no probability."""
    hf = AutoModelForImageTextToText.from_pretrained(checkpoint).eval()
    banned = list(media_tokens(hf.config))
    found = []
    for text, (ids, placed) in zip(texts_of(processor), rows, strict=True):
        shown = [open_image(p.image) for p in placed]
        given = processor.processor(
            text=[text], images=shown or None, return_tensors="pt", add_special_tokens=False
        )
        assert given["input_ids"][0].tolist() == ids
        logits = hf(**given).logits[0].double()
        logits[:, banned] = -torch.inf
        chosen = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
        found.append(chosen)
    return found


@torch.no_grad()
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_log_probs_are_those_of_each_row_alone(tmp_path, arch, packing):
    checkpoint = str(tiny_vision_dir(tmp_path, arch=arch))
    processor = VisionProcessor(checkpoint, {})
    rows = rows_of(checkpoint, processor)
    model = load_causal_lm(checkpoint, replace(SEEING, packing=packing), 1.0, 16)
    assert model.vision is not None
    media = model.vision.read([placed for _, placed in rows])
    found = model(*padded(rows), media=media)[0]
    expected = plain_logprobs(checkpoint, processor, rows)
    for row, ((ids, _), alone) in enumerate(zip(rows, expected, strict=True)):
        said = alone.isfinite()
        assert int(said.sum()) >= min(2, len(ids) - 1)
        torch.testing.assert_close(
            found[row, 1 : len(ids)][said].double(), alone[said], rtol=0, atol=2e-5
        )
        assert (found[row, 1 : len(ids)][~said] < -1e3).all()


@torch.no_grad()
def test_values_see_the_images(checkpoint, rows):
    critic = load_scalar_model(ValueModel, checkpoint, SEEING, "score", fresh_head_seed=0)
    ids, mask = padded(rows)
    images = [placed for _, placed in rows]
    swapped = [tuple(reversed(placed)) for placed in images]
    found = critic(ids, mask, media=critic.vision.read(images))[0]
    critic.packing = True
    packed = critic(ids, mask, media=critic.vision.read(images))[0]
    torch.testing.assert_close(packed, found, rtol=0, atol=1e-5)
    other = critic(ids, mask, media=critic.vision.read(swapped))[0]
    changed = (other - found).abs().amax(-1) > 1e-3
    assert changed.tolist() == [False, False, True, False]


def gradients(model, rows, shown):
    model.zero_grad()
    ids, mask = padded(rows)
    logprobs, more = model(ids, mask, outputs=("entropy",), media=model.vision.read(shown))
    (logprobs[:, -3:].sum() + more["entropy"][:, -3:].sum()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_rows_without_images_give_the_tower_a_gradient_of_zero(checkpoint, rows):
    """Ranks reduce gradients together: the same parameters have one, whatever a rank's rows
    show."""
    model = load_causal_lm(checkpoint, SEEING, 1.0, 16)
    tower = {f"hf.{name}" for name in tower_parameters(model.hf)}
    assert tower and all("vision_model" in name or "connector" in name for name in tower)
    seen = gradients(model, rows, [placed for _, placed in rows])
    unseen = gradients(model, [rows[0], rows[3]], None)
    with_gradient = [{n for n, g in found.items() if g is not None} for found in (seen, unseen)]
    assert with_gradient[0] == with_gradient[1]
    assert all(seen[name] is not None for name in tower if "post_layernorm" not in name)
    assert all(float(unseen[name].abs().max()) == 0 for name in tower & with_gradient[1])
    assert all(bool(g.isfinite().all()) for g in seen.values() if g is not None)


@pytest.mark.parametrize("flags", [VisionFlags(), VisionFlags(freeze_visual_encoder=True)])
def test_a_tower_that_is_not_asked_to_learn_is_frozen(checkpoint, flags):
    model = load_causal_lm(checkpoint, replace(SEEING, vision=flags), 1.0, 16)
    frozen = {n.removeprefix("hf.") for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {*tower_parameters(model.hf)}


@pytest.mark.parametrize("exclude", [None, r".*\.text_model\..*"])
def test_adapters_leave_the_tower_out_unless_asked(checkpoint, exclude):
    model = load_causal_lm(checkpoint, SEEING, 1.0, 16)
    flags = LoRAFlags(lora_rank=2, lora_exclude_modules=exclude)
    check_targets(flags, checkpoint, trust_remote_code=False)
    adapters = add_adapters(model.hf, flags, checkpoint, 0)
    in_tower = {"vision_model" in name or "connector" in name for name in adapters.layers}
    assert in_tower == {exclude is not None}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in name for name in trained)


def test_a_model_in_four_bits_sees_and_trains_its_adapters(checkpoint, rows):
    ids, mask = padded(rows)
    shown = [placed for _, placed in rows]
    whole = load_causal_lm(checkpoint, SEEING, 1.0, 16)
    four_bits = replace(SEEING, flags=LoadFlags(param_dtype="bf16"), load_in_4bit=True)
    small = load_causal_lm(checkpoint, four_bits, 1.0, 16)
    add_adapters(small.hf, LoRAFlags(lora_rank=2, load_in_4bit=True), checkpoint, 0)
    found = small(ids, mask, media=small.vision.read(shown))[0]
    expected = whole(ids, mask, media=whole.vision.read(shown))[0]
    said = mask[:, 1:] & (expected[:, 1:] > -1e3)  # image tokens have no probability
    pair = torch.stack([found[:, 1:][said], expected[:, 1:][said]])
    assert float(torch.corrcoef(pair.detach())[0, 1]) > 0.8
    pair.sum().backward()
    learns = {name for name, p in small.named_parameters() if p.grad is not None}
    assert learns and all(".lora_" in name for name in learns)
