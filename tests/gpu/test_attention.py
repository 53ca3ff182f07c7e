"""Packed rows under the attention kernels of a GPU, and the memory of logits there."""

from dataclasses import replace

import pytest
import torch
from transformers.utils import is_flash_attn_2_available

from openrl.experience import StepPlan
from openrl.models.logits import LogitTransform, Projection
from openrl.models.logprobs import token_logprobs
from openrl.training_engine.build import build_engine
from openrl.training_engine.distributed import init_distributed
from openrl.training_engine.updates import SupervisedUpdate
from tests.experience import alike, column_of, counts_of, engine_spec, optim_spec, ragged_batch
from tests.tiny import tiny_model_dir

LENGTHS = (120, 70, 9, 5, 333, 40, 64, 100)
# tokens that the rows of a group begin with
GROUPS, BEGINNINGS = (
    (0, 1, 1, 0, 2, 1, 0, 2),
    (
        3,
        7,
        50,
    ),
)
WITH_SIBLINGS = [[3, 0, 6], [-1], [5, 1, 2], [7, 4]]
KERNELS = {
    "flash_attention_2": pytest.mark.skipif(
        not is_flash_attn_2_available(), reason="flash-attn is not installed"
    ),
    "varlen": (),
}
WAYS = [
    *(
        pytest.param({"attention": name, "packing": True}, marks=marks, id=name)
        for name, marks in KERNELS.items()
    ),
    pytest.param({"shares": True}, id="shared"),
]


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    init_distributed(0, 1, "127.0.0.1", 0, "cuda", timeout=60)


@pytest.fixture(scope="module", params=["qwen3", "mistral"])
def checkpoint(request, tmp_path_factory):
    """Grouped heads; mistral also looks at 64 tokens only."""
    fields = {"sliding_window": 64} if request.param == "mistral" else {}
    return tiny_model_dir(tmp_path_factory.mktemp("m"), arch=request.param, head_dim=64, **fields)


def build(checkpoint, **fields):
    return build_engine(replace(engine_spec(checkpoint, **fields), device="cuda"))


@pytest.mark.parametrize("way", WAYS)
def test_packed_rows_are_those_of_padded_sdpa(checkpoint, way):
    """bf16 against fp32, of the same weights: as near as sdpa in bf16 itself, which rounds
    alike."""
    batch = alike(ragged_batch(LENGTHS), GROUPS, BEGINNINGS)
    sdpa = {"attention": "sdpa"}
    exact, padded, packed = (
        column_of(build(checkpoint, dtype=dtype, **how), batch, WITH_SIBLINGS)
        for dtype, how in (("fp32", sdpa), ("bf16", sdpa), ("bf16", way))
    )
    gaps = [(found - exact)[batch.loss_mask].abs() for found in (padded, packed)]
    assert float(gaps[1].mean()) < 1.5 * float(gaps[0].mean()) + 1e-3
    assert float(gaps[1].max()) < 2 * float(gaps[0].max()) + 0.01


@pytest.mark.parametrize("way", WAYS)
def test_a_packed_step_has_the_gradient_of_a_padded_one(checkpoint, way):
    batch = alike(ragged_batch(LENGTHS), GROUPS, BEGINNINGS)
    norms = []
    for how in ({"attention": "sdpa"}, way):
        engine = build(checkpoint, dtype="bf16", optim=optim_spec(), **how)
        report = engine.train_step(
            batch, StepPlan(WITH_SIBLINGS, counts_of(batch)), SupervisedUpdate()
        )
        norms.append([report[name].value for name in ("loss", "grad_norm")])
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


def test_chunks_bound_the_memory_of_logits(record_property):
    """At 4,096 x 151,936 in bf16, forward and backward: at most 30 % of all at once, and twice the
    tokens take no more than their own states."""
    peaks = {}
    for tokens, chunk in ((4096, 0), (4096, 1024), (8192, 1024)):
        torch.cuda.empty_cache()
        states = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(151_936, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(0, 151_936, (tokens,), device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        logprobs, entropies, _ = token_logprobs(
            states, Projection(weight, None, LogitTransform()), targets, chunk, entropy=True
        )
        (logprobs + 0.1 * entropies).sum().backward()
        peaks[tokens, chunk] = torch.cuda.max_memory_allocated() - before
        record_property(
            f"peak of logits, {tokens} tokens, chunks of {chunk}",
            f"{peaks[tokens, chunk] / 2**30:.2f} GiB",
        )
    assert peaks[4096, 1024] < 0.3 * peaks[4096, 0]
    assert peaks[8192, 1024] < peaks[4096, 1024] + 64 * 2**20
