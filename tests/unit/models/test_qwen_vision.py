"""Models whose positions have three axes, padded and packed, against transformers' own forward of
each row alone. Their image processors run here; the processors around these want torchvision for
videos."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2VLImageProcessorPil

from openrl.models.causal_lm import CausalLM
from openrl.models.states import keep_states_apart
from openrl.models.towers import tower_weights
from openrl.models.vision import Vision
from tests.tiny_vision import TINY_TEXT, picture

PATCH = {"qwen2_5_vl": 14, "qwen3_vl": 16, "qwen3_5": 16}  # pixels; a token is two by two patches
START, END, IMAGE, VIDEO = range(90, 94)
SHOWN = ((), (1,), (2, 3), ())  # pictures of each row
STATE = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
SIZES = {1: (80, 60), 2: (40, 90), 3: (64, 64)}


def tiny_model(arch: str):
    tower = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2}
    tower |= {"patch_size": PATCH[arch], "out_hidden_size": 64}
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    text = TINY_TEXT | {"vocab_size": 100, "rope_parameters": rope}
    if arch == "qwen3_5":
        rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
        rope |= {"partial_rotary_factor": 0.25}
        tower |= {"num_position_embeddings": 64}
        text |= {"layer_types": ["linear_attention", "full_attention"], **STATE}
    elif arch == "qwen3_vl":
        rope |= {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
        tower |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    else:
        rope |= {"mrope_section": [4, 6, 6]}
        tower |= {"window_size": 112, "fullatt_block_indexes": [1]}
    config = AutoConfig.for_model(
        arch,
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=False,
        vision_start_token_id=START,
        vision_end_token_id=END,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()


def tensors(arch: str, shown: tuple[int, ...]) -> dict[str, torch.Tensor]:
    side = 2 * PATCH[arch]
    size = {"shortest_edge": side * side, "longest_edge": 16 * side * side}
    processor = Qwen2VLImageProcessorPil(patch_size=PATCH[arch], merge_size=2, size=size)
    pictures = [picture(n, SIZES[n]) for n in shown]
    return dict(processor(images=pictures, return_tensors="pt"))


def row(arch: str, number: int) -> list[int]:
    """Text, then each image between its marks, then text."""
    ids = [5 + number, 6, 7]
    for n in SHOWN[number]:
        tokens = int(tensors(arch, (n,))["image_grid_thw"].prod()) // 4
        ids += [START, *[IMAGE] * tokens, END, 8]
    return [*ids, *range(10, 15 + number)]


@torch.no_grad()
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("arch", PATCH)
def test_log_probs_are_those_of_each_row_alone(arch, packing):
    hf = tiny_model(arch)
    rows = [row(arch, number) for number in range(len(SHOWN))]
    expected = []
    for ids, shown in zip(rows, SHOWN, strict=True):
        tokens = torch.tensor([ids])
        media = tensors(arch, shown) if shown else {}
        logits = hf(input_ids=tokens, mm_token_type_ids=(tokens == IMAGE).int(), **media).logits
        chosen = logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])
        expected.append(chosen[:, 0])
    if packing:
        keep_states_apart(arch, hf)
    model = CausalLM(hf, 1.0, 16, packing)
    model.vision = Vision(hf, SimpleNamespace())
    width = max(map(len, rows))
    mask = torch.tensor([[i < len(ids) for i in range(width)] for ids in rows])
    tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids in rows])
    found = model(tokens, mask, media=tensors(arch, (1, 2, 3)))[0]
    for number, alone in enumerate(expected):
        end = len(rows[number])
        torch.testing.assert_close(found[number, 1:end], alone, rtol=0, atol=3e-5)
    # the text after an image is nearer to it than a count of tokens says
    axes = model.vision.axes(tokens, mask, tensors(arch, (1, 2, 3)))
    assert int(axes[:, 2].max()) < len(rows[2]) - 1
    assert int(axes[:, 0].max()) == len(rows[0]) - 1


@pytest.mark.parametrize("arch", PATCH)
def test_weights_go_under_the_names_of_a_checkpoint(arch, tmp_path):
    hf = tiny_model(arch)
    hf.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    model = CausalLM(hf, 1.0, 16)
    sent = model.to_checkpoint(dict(model.named_parameters()))
    assert sent.keys() == stored.keys()
    assert all(torch.equal(sent[name], stored[name]) for name in stored)
    tower = tower_weights(hf)
    assert tower and all("visual" in name for name in tower)
    assert tower.keys() == {name for name in stored if "visual" in name}
