"""What vLLM is told of an engine, checked against the fields of the vLLM that is installed."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import Literal, get_origin

import pytest

from openrl.errors import UserError
from openrl.rollout_engines.vllm_fields import (
    check_engine_kwargs,
    engine_args,
    fits,
    has_fields,
    members,
)
from openrl.rollout_engines.vllm_start import block_size, engine_arguments
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


ASK_VLLM = """
import dataclasses, json, sys
from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError
from vllm import AsyncEngineArgs

def takes(kind, value):
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return False
    except PydanticSchemaGenerationError:
        return None
    return True

values = json.loads(sys.argv[1])
kinds = {f.name: f.type for f in dataclasses.fields(AsyncEngineArgs)}
asked = [name for name, kind in kinds.items() if not isinstance(kind, str)]
answer = {name: [takes(kinds[name], value) for value in values] for name in asked}
print(json.dumps([list(kinds), answer]))
"""
VALUES = [True, False, 0, 1, 7, 2.5, "x", "auto", ["x"], [1], {"nosuch": 1}, None]


def is_plain(kind):
    return kind in (bool, int, float, str, NoneType) or get_origin(kind) is Literal


def test_fields_and_their_values_are_those_that_vllm_knows_when_it_runs():
    """In a process of its own: importing vLLM changes the one it is in."""
    words = [sys.executable, "-c", ASK_VLLM, json.dumps(VALUES)]
    listed = subprocess.run(words, capture_output=True, text=True, check=True)
    names, verdicts = json.loads(listed.stdout.splitlines()[-1])
    fields = engine_args().fields
    assert set(names) == fields.keys() and len(verdicts) > 200
    for name, theirs in verdicts.items():
        kinds = members(fields[name])
        for value, taken in zip(VALUES, theirs, strict=True):
            ours = any(fits(value, kind) for kind in kinds)
            assert ours or not taken, (name, value)
            assert ours == taken or not all(map(is_plain, kinds)), (name, value)


def test_sections_are_of_fields_that_vllm_has():
    sections = {
        n: k for n, of in engine_args().fields.items() for k in members(of) if has_fields(k)
    }
    assert {"compilation_config", "kv_transfer_config", "profiler_config"} < sections.keys()
    assert {"mode", "cudagraph_mode", "pass_config"} < sections["compilation_config"].fields.keys()


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
    with pytest.raises(UserError) as caught:
        check_engine_kwargs(kwargs)
    assert message in caught.value.message and remedy in caught.value.remedy


def test_what_vllm_takes():
    compilation = {"cudagraph_mode": "FULL", "pass_config": {"fuse_norm_quant": False}}
    sizes = {"cudagraph_capture_sizes": [1, 2], "cpu_offload_gb": 2, "max_logprobs": 5.0}
    check_engine_kwargs({"compilation_config": compilation, "kv_cache_dtype": "fp8", **sizes})


@pytest.mark.parametrize("spec", [GPU(), FULL, replace(FULL, spans_nodes=True, deterministic=True)])
def test_every_argument_is_a_field_of_vllm(spec):
    assert set(engine_arguments(spec)) <= engine_args().fields.keys()


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
