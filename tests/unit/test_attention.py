"""Which attention a model gets, and torch's kernel for packed rows as transformers calls it.

The kernel itself needs a GPU (tests/gpu/test_attention.py); here a plain version with the same arguments stands for it.
"""

import pytest
import torch

from openrl.config.commands import PPOConfig
from openrl.config.model import LoadFlags
from openrl.errors import UserError
from openrl.models import attention
from openrl.models.attention import chosen_attention, varlen_attention
from openrl.training.build import build_engine
from openrl.training.distributed import init_distributed
from tests.experience import engine_spec, ragged_batch
from tests.tiny import tiny_model_dir
from tests.unit.test_config_checks import PPO, said


@pytest.mark.parametrize(
    ("device", "dtype", "installed", "capability", "packing", "expected"),
    [
        ("cpu", "bf16", True, (9, 0), True, None),
        ("cuda", "fp32", True, (9, 0), True, None),
        ("cuda", "bf16", True, (9, 0), True, "flash_attention_2"),
        ("cuda", "fp16", True, (9, 0), False, "flash_attention_2"),
        ("cuda", "bf16", False, (9, 0), True, "varlen"),
        ("cuda", "bf16", False, (9, 0), False, None),  # nothing to gain: padded rows have no boundaries
        ("cuda", "fp16", False, (7, 5), True, None),
    ],
)
def test_the_choice(monkeypatch, device, dtype, installed, capability, packing, expected):
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert chosen_attention(LoadFlags(param_dtype=dtype), device, packing) == expected
    assert chosen_attention(LoadFlags(param_dtype=dtype, attn_implementation="eager"), device, packing) == "eager"


@pytest.mark.parametrize(
    "words", ["--attn_implementation varlen --param_dtype fp32", "--attn_implementation varlen --device cpu"]
)
def test_the_kernel_needs_a_gpu_and_a_half_type(words):
    (problem,) = said(PPOConfig, f"{PPO} {words}")
    assert problem.startswith("--attn_implementation, --") and "--attn_implementation sdpa" in problem


def one_by_one(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """``torch.nn.attention.varlen.varlen_attn`` by its documentation, one sequence, head and token at a time."""
    assert cu_q is cu_k and max_q == max_k == int(cu_q.diff().max()) and cu_q.dtype == torch.int32
    assert enable_gqa == (query.shape[1] != key.shape[1])
    left, right = window_size
    assert right == 0
    result = torch.zeros_like(query)
    for start, end in zip(cu_q.tolist(), cu_q.tolist()[1:], strict=False):
        for head in range(query.shape[1]):
            shared = head * key.shape[1] // query.shape[1]
            for t in range(start, end):
                first = start if left < 0 else max(start, t - left)
                scores = key[first : t + 1, shared] @ query[t, head] * (scale or query.shape[-1] ** -0.5)
                result[t, head] = scores.softmax(-1) @ value[first : t + 1, shared]
    return result


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    init_distributed(0, 1, "127.0.0.1", 0, "cpu", timeout=60)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    ("arch", "fields"), [("qwen3", {}), ("llama", {"num_key_value_heads": 2}), ("mistral", {"sliding_window": 4})]
)
def test_models_get_what_sdpa_gives(monkeypatch, tmp_path, arch, fields, packing):
    monkeypatch.setattr(attention, "varlen_attn", one_by_one)
    path, batch = tiny_model_dir(tmp_path, arch=arch, **fields), ragged_batch()
    cut = [[3, 0, -1, 6], [5, 1, 2], [7, 4]]
    expected, found = (
        build_engine(engine_spec(path, attention=name, packing=packing)).forward(batch, cut)
        for name in ("sdpa", "varlen")
    )
    assert float(expected.abs().max()) > 1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_what_the_kernel_does_not_know_is_refused():
    query = torch.zeros(1, 2, 3, 8)
    for more, what in (({"softcap": 30.0}, "capped logits"), ({"s_aux": query}, "attention sinks")):
        with pytest.raises(UserError, match=what):
            varlen_attention(torch.nn.Linear(1, 1), query, query, query, None, **more)
    with pytest.raises(UserError, match="cached keys"):
        varlen_attention(torch.nn.Linear(1, 1), query[:, :, :1], query, query, None)
