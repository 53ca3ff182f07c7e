"""What vLLM is told of an engine, checked against the fields of the vLLM that is installed."""

from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest

from openrl.errors import UserError
from openrl.rollout_engines.vllm_fields import check_engine_kwargs, wrong_fields
from openrl.rollout_engines.vllm_kept import read_routes
from openrl.rollout_engines.vllm_start import (
    ROUTING,
    block_size,
    caches_prefixes,
    engine_arguments,
    missing_features,
)
from tests.tiny import rollout_spec

GPU = partial(rollout_spec, "model", device="cuda", longest=4096, seed=7)
FULL = GPU(
    tokenizer_path="tokenizer",
    vllm_dtype="fp16",
    vllm_max_num_seqs=64,
    vllm_max_num_batched_tokens=8192,
    vllm_block_size=32,
    vllm_quantization="fp8",
    load_format="dummy",
    vllm_engine_kwargs={"enable_chunked_prefill": True},
    shared=True,
    vllm_tensor_parallel_size=2,
    vllm_pipeline_parallel_size=2,
    vllm_data_parallel_size=2,
    expert_parallel=True,
    enforce_eager=True,
    enable_prefix_caching=True,
)


VALUES = [True, False, 0, 1, 7, 2.5, "x", "auto", ["x"], [1], {"nosuch": 1}, None]


def test_fields_and_their_values_are_those_that_vllm_knows_when_it_runs():
    """What vLLM's own checks say of a few fields, by hand."""
    from vllm import AsyncEngineArgs

    def taken(name):
        return [value for value in VALUES if not list(wrong_fields({name: value}, AsyncEngineArgs))]

    assert taken("enable_chunked_prefill") == [True, False, 0, 1, None]
    assert [v for v in taken("cpu_offload_gb") if not isinstance(v, bool)] == [0, 1, 7, 2.5]
    assert taken("kv_cache_dtype") == ["auto"]
    assert taken("cudagraph_capture_sizes") == [[1], None]
    assert taken("compilation_config") == []
    assert taken("quantization_config") == VALUES  # of a type that only vLLM can resolve
    assert {"nosuch": 1} in taken("hf_overrides")


@pytest.mark.parametrize(
    ("kwargs", "message", "remedy"),
    [
        ({"enable_chunked_prefil": True}, "no field 'enable_chunked_prefil'", "enable_chunked_pre"),
        ({"enable_chunked_prefill": "x"}, "does not take 'x'", "true or false"),
        ({"cpu_offload_gb": "x"}, "cpu_offload_gb: vLLM does not take 'x'", "a number"),
        ({"kv_cache_dtype": "nosuch"}, "does not take 'nosuch'", "one of auto, float16, bfloat16"),
        ({"compilation_config": {"mod": 3}}, "CompilationConfig has no field", "'mode'"),
        ({"compilation_config": 3}, "compilation_config: vLLM does not take 3", "a JSON object"),
        ({"cudagraph_capture_sizes": ["x"]}, "vLLM does not take 'x'", "a list"),
    ],
)
def test_what_vllm_would_refuse_once_it_runs_is_refused_before(kwargs, message, remedy):
    from vllm import AsyncEngineArgs

    ((problem, fix),) = wrong_fields(kwargs, AsyncEngineArgs)
    assert message in problem and remedy in fix


def test_what_vllm_takes():
    from vllm import AsyncEngineArgs

    compilation = {"cudagraph_mode": "FULL", "pass_config": {"fuse_norm_quant": False}}
    sizes = {"cudagraph_capture_sizes": [1, 2], "cpu_offload_gb": 2, "max_logprobs": 5.0}
    kwargs = {"compilation_config": compilation, "kv_cache_dtype": "fp8", **sizes}
    assert list(wrong_fields(kwargs, AsyncEngineArgs)) == []


@pytest.mark.full
def test_a_process_of_its_own_looks():
    """Importing vLLM changes the process that it is in."""
    with pytest.raises(UserError) as caught:
        check_engine_kwargs({"compilation_config": {"mod": 3}})
    assert caught.value.message.startswith("--vllm_engine_kwargs: vLLM's CompilationConfig has no")


@pytest.mark.parametrize("spec", [GPU(), FULL, replace(FULL, spans_nodes=True, deterministic=True)])
def test_every_argument_is_a_field_of_vllm(spec):
    from vllm import AsyncEngineArgs

    assert set(engine_arguments(spec)) <= {field.name for field in fields(AsyncEngineArgs)}


def test_what_is_not_asked_for_keeps_the_default_of_vllm():
    told = engine_arguments(GPU())
    assert (told["dtype"], told["max_model_len"], told["seed"], told["load_format"]) == (
        "bfloat16",
        4096,
        7,
        "auto",
    )
    assert not told["enforce_eager"] and not told["enable_prefix_caching"]
    assert not told.keys() & {"max_num_seqs", "block_size", "quantization", "tensor_parallel_size"}
    assert "distributed_executor_backend" not in told  # one GPU: in the process that schedules


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({"device": "cpu", "enable_prefix_caching": True}, 32),
        ({"device": "cpu", "enable_prefix_caching": True, "vllm_block_size": 64}, 64),
        ({"device": "cpu"}, None),
        ({"enable_prefix_caching": True}, None),
    ],
)
def test_short_prefixes_are_reused_on_a_cpu(changes, tokens):
    assert block_size(GPU(**changes)) == tokens


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"enable_prefix_caching": True}, True),
        ({"enable_prefix_caching": True, "deterministic": True}, False),
        ({"routes": True}, True),
        ({"vllm_engine_kwargs": {"enable_prefix_caching": True}}, True),
        ({"vllm_engine_kwargs": {"enable_prefix_caching": None}}, True),
        ({"vllm_engine_kwargs": {"enable_prefix_caching": False}, "routes": True}, False),
    ],
)
def test_prefixes_are_cached_where_vllm_is_told_so(changes, expected):
    spec = GPU(**changes)
    assert caches_prefixes(spec) is expected
    assert engine_arguments(spec)["enable_prefix_caching"] in (expected, None)


def test_all_that_is_asked_for():
    told = engine_arguments(FULL)
    expected = {
        "dtype": "float16", "tokenizer": "tokenizer", "max_num_seqs": 64, "max_num_batched_tokens": 8192,
        "block_size": 32, "quantization": "fp8", "load_format": "dummy", "enable_chunked_prefill": True,
        "gpu_memory_utilization": 0.6, "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2,
        "enable_expert_parallel": True, "distributed_executor_backend": "mp", "enforce_eager": True,
        "enable_prefix_caching": True, "logprobs_mode": "processed_logprobs",
    }  # fmt: skip
    assert {name: told[name] for name in expected} == expected


def test_workers_on_several_nodes_are_of_ray():
    assert (
        engine_arguments(replace(FULL, spans_nodes=True))["distributed_executor_backend"] == "ray"
    )


def test_deterministic_engines_take_one_request_at_a_time():
    told = engine_arguments(replace(FULL, deterministic=True))
    assert told["max_num_seqs"] == 1 and not told["enable_prefix_caching"]


def test_it_returns_experts_only_on_request():
    """vLLM keeps them beside the blocks of cached prefixes."""
    from vllm import AsyncEngineArgs

    asked = engine_arguments(GPU(routes=True))
    assert asked["enable_return_routed_experts"] and asked["enable_prefix_caching"]
    assert asked.keys() <= {f.name for f in fields(AsyncEngineArgs)}
    assert "enable_return_routed_experts" not in engine_arguments(GPU())
    assert not missing_features(ROUTING)


def test_experts_of_layers_without_a_router_are_left_out():
    """vLLM returns (tokens - 1, all layers, experts); the first layer here has no router."""
    found = np.arange(2 * 3 * 2, dtype=np.uint8).reshape(2, 3, 2)
    routes = read_routes(found, [1, 2], 2, 3)
    assert routes.width == 4 and [*routes.ids] == [2, 3, 4, 5, 8, 9, 10, 11, -1, -1, -1, -1]
    aborted = read_routes(None, [1, 2], 2, 3)
    assert [*aborted.ids] == [-2] * 8 + [-1] * 4
