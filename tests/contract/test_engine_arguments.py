"""What vLLM is told of an engine, checked against the fields of the vLLM that is installed."""

import subprocess
import sys
from dataclasses import replace

import pytest

from openrl.config.groups.rollout_engine import ParallelSizes
from openrl.rollout.engine import EngineSpec
from openrl.rollout.vllm_start import block_size, engine_arguments, engine_fields

GPU = EngineSpec("model", device="cuda", dtype="bf16", max_model_len=4096, seed=7)
FULL = replace(
    GPU,
    tokenizer="tokenizer",
    dtype="fp16",
    max_num_seqs=64,
    max_num_batched_tokens=8192,
    block_size=32,
    quantization="fp8",
    load_format="dummy",
    engine_kwargs={"enable_chunked_prefill": True},
    gpu_memory_utilization=0.6,
    sizes=ParallelSizes(2, 2, 2),
    expert_parallel=True,
    enforce_eager=True,
    enable_prefix_caching=True,
)


def test_the_fields_are_those_that_vllm_has_when_it_runs():
    """In a process of its own: importing vLLM changes the one it is in."""
    use = "import dataclasses as d, vllm; print(*(f.name for f in d.fields(vllm.AsyncEngineArgs)))"
    listed = subprocess.run([sys.executable, "-c", use], capture_output=True, text=True, check=True)
    assert engine_fields() == {*listed.stdout.split("\n")[-2].split()}


@pytest.mark.parametrize("spec", [GPU, FULL, replace(FULL, spans_nodes=True, deterministic=True)])
def test_every_argument_is_a_field_of_vllm(spec):
    assert set(engine_arguments(spec)) <= engine_fields()


def test_what_is_not_asked_for_keeps_the_default_of_vllm():
    told = engine_arguments(GPU)
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
        ({"device": "cpu", "enable_prefix_caching": True, "block_size": 64}, 64),
        ({"device": "cpu"}, None),
        ({"enable_prefix_caching": True}, None),
    ],
)
def test_short_prefixes_are_reused_on_a_cpu(changes, tokens):
    assert block_size(replace(GPU, **changes)) == tokens


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
