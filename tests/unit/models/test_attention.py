"""Which attention a model gets, and what packed rows get of it.

The kernel itself needs a GPU (tests/gpu/test_attention.py); here a plain version with the same
arguments stands for it."""

import itertools
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrl.config.groups.model import LoadFlags
from openrl.errors import UserError
from openrl.models import attention
from openrl.models.attention import (
    _by_kernel,
    _one_by_one,
    asked_attention,
    check_attention,
    use_varlen,
    varlen_attention,
)
from openrl.models.causal_lm import Loading, load_pretrained
from openrl.training_engine.build import build_engine
from openrl.training_engine.distributed import init_distributed
from tests.experience import column_of, engine_spec, ragged_batch
from tests.patience import PATIENCE
from tests.tiny import tiny_model_dir


@pytest.mark.parametrize(
    ("device", "dtype", "installed", "expected"),
    [
        ("cpu", "bf16", True, None),
        ("cuda", "fp32", True, None),
        ("cuda", "bf16", True, "flash_attention_2"),
        ("cuda", "fp16", False, None),
    ],
)
def test_what_a_model_is_loaded_with(monkeypatch, device, dtype, installed, expected):
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: installed)
    assert asked_attention(LoadFlags(param_dtype=dtype), device) == expected
    assert (
        asked_attention(LoadFlags(param_dtype=dtype, attn_implementation="eager"), device)
        == "eager"
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", [None, "eager", "sdpa", "varlen", "kernels-community/flash-attn2"])
def test_attention_that_there_is(name, device):
    check_attention(LoadFlags(attn_implementation=name), device)


@pytest.mark.parametrize("version", [2, 3, 4])
def test_flash_attention_has_to_be_installed(monkeypatch, tmp_path, version):
    flags = LoadFlags(attn_implementation=f"flash_attention_{version}")
    with pytest.raises(UserError, match="needs a GPU, and there is none here"):
        check_attention(flags, "cpu")
    with pytest.raises(UserError, match=r"(?s)flash_attn.* is not installed.*leave it out"):
        check_attention(flags, "cuda")
    for module in ("flash_attn/cute/__init__.py", "flash_attn_interface.py"):
        (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / module).write_text("raise ImportError('needs a GPU')")
    monkeypatch.syspath_prepend(tmp_path)
    check_attention(flags, "cuda")


def test_a_name_that_no_attention_has():
    with pytest.raises(
        UserError, match=r"no attention 'flash_atention_2', but eager(?!.*openrl)[^$]*_attention_2$"
    ):
        check_attention(LoadFlags(attn_implementation="flash_atention_2"))


@pytest.mark.parametrize(
    ("arch", "asked", "device", "dtype", "capability", "expected"),
    [
        ("qwen3", None, "cpu", "fp32", None, "varlen"),
        ("qwen3", "sdpa", "cpu", "fp32", None, "sdpa"),
        ("gemma2", None, "cpu", "fp32", None, "sdpa"),  # caps its logits
        ("qwen3", None, "cuda", "bf16", (9, 0), "varlen"),
        ("qwen3", None, "cuda", "fp16", (7, 5), "sdpa"),
        ("qwen3", None, "cuda", "fp32", (9, 0), "sdpa"),
    ],
)
def test_what_packed_rows_run(
    monkeypatch, tmp_path, arch, asked, device, dtype, capability, expected
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    flags = LoadFlags(param_dtype=dtype, attn_implementation=asked)
    hf = load_pretrained(
        AutoModelForCausalLM, str(tiny_model_dir(tmp_path, arch=arch)), Loading(flags, "cpu")
    )
    assert hf.config._attn_implementation == "sdpa"
    use_varlen(hf, flags, device)
    assert hf.config._attn_implementation == expected


def test_padded_rows_are_left_alone(tmp_path):
    spec = engine_spec(tiny_model_dir(tmp_path))
    assert build_engine(spec).model.hf.config._attn_implementation == "sdpa"
    assert (
        build_engine(replace(spec, packing=True)).model.hf.config._attn_implementation == "varlen"
    )


def token_by_token(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """``torch.nn.attention.varlen.varlen_attn`` by its documentation, one sequence, head and token
    at a time."""
    for ends, longest in ((cu_q, max_q), (cu_k, max_k)):
        assert longest == int(ends.diff().max()) and ends.dtype == torch.int32
    assert enable_gqa == (query.shape[1] != key.shape[1])
    left, right = window_size
    assert right == 0
    result = torch.zeros_like(query)
    bounds = (itertools.pairwise(ends.tolist()) for ends in (cu_q, cu_k))
    for (start, end), (k_start, k_end) in zip(*bounds, strict=True):
        for head, t in itertools.product(range(query.shape[1]), range(start, end)):
            shared = head * key.shape[1] // query.shape[1]
            last = k_end - (end - t) + 1  # the last query sees the last key
            first = k_start if left < 0 else max(k_start, last - 1 - left)
            scores = key[first:last, shared] @ query[t, head] * (scale or query.shape[-1] ** -0.5)
            result[t, head] = scores.softmax(-1) @ value[first:last, shared]
    return result


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    init_distributed(0, 1, "127.0.0.1", 0, "cpu", timeout=PATIENCE)


CUT = [[3, 0, -1, 6], [5, 1, 2], [7, 4]]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    ("arch", "fields"),
    [("qwen3", {}), ("llama", {"num_key_value_heads": 2}), ("mistral", {"sliding_window": 4})],
)
def test_models_get_what_sdpa_gives(tmp_path, arch, fields, packing):
    path, batch = tiny_model_dir(tmp_path, arch=arch, **fields), ragged_batch()
    expected, found = (
        column_of(build_engine(engine_spec(path, attention=name, packing=packed)), batch, CUT)
        for name, packed in (("sdpa", False), ("varlen", packing))
    )
    assert float(expected.abs().max()) > 1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    ("of_queries", "of_keys"),
    [([5, 1, 5], None), (None, None), ([5, 2, 4], [5, 6, 8])],
    ids=["packed", "padded", "shared"],
)
def test_the_kernel_is_called_as_documented(monkeypatch, window, of_queries, of_keys):
    """One token, head and sequence at a time in its place, against sample after sample."""
    monkeypatch.setattr(attention, "varlen_attn", token_by_token)
    g = torch.Generator().manual_seed(0)
    lengths = [of_queries or [11], of_keys or of_queries or [11]]
    rows = 1 if of_queries else 2
    query, key, value = (
        torch.randn(rows, n, sum(lengths[n < 4]), 8, generator=g) for n in (4, 2, 2)
    )
    starts = [torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32) for each in lengths]
    ends = (*starts, *map(max, lengths)) if of_queries else (None,) * 4
    found = _by_kernel(query, key, value, ends, 0.3, window)
    expected = _one_by_one(query, key, value, lengths, 0.3, window)
    assert found.shape == (rows, 11, 4, 8)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_what_is_not_known_is_refused():
    query = torch.zeros(1, 2, 3, 8)
    for more, what in (({"softcap": 30.0}, "capped logits"), ({"s_aux": query}, "attention sinks")):
        with pytest.raises(UserError, match=what):
            varlen_attention(torch.nn.Linear(1, 1), query, query, query, None, **more)
    both_ways = torch.nn.Linear(1, 1)
    both_ways.is_causal = False
    with pytest.raises(UserError, match="attention in both directions"):
        varlen_attention(both_ways, query, query, query, None)
    with pytest.raises(UserError, match="cached keys"):
        varlen_attention(torch.nn.Linear(1, 1), query[:, :, :1], query, query, None)


def test_a_kernel_without_groups_gets_every_head_its_keys(monkeypatch):
    """As torch 2.11 has it: queries of four heads, keys of two."""
    seen = {}

    def kernel(query, key, value, *ends, scale, window_size):
        seen.update(query=query, key=key, value=value)
        return query

    monkeypatch.setattr(attention, "GROUPS", False)
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    query, key = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    attention._by_kernel(query, key, key, (None, None, None, None), None, None)
    assert seen["key"].shape == seen["query"].shape == (6, 4, 8)
    assert torch.equal(seen["key"][:, 1], key[0, 0]) and torch.equal(seen["key"][:, 2], key[0, 1])
