"""What vLLM cannot divide is refused by the model's config alone."""

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig

from openrl.config.groups.rollout_engine import EngineFlags, ParallelSizes
from openrl.errors import UserError
from openrl.rollout_engines.parallel import check_engine, shape_problems
from tests.tiny import tiny_model_dir

DENSE = Qwen3Config(
    num_attention_heads=12, num_key_value_heads=4, intermediate_size=96, num_hidden_layers=3
)
EXPERTS = Qwen3MoeConfig(
    num_attention_heads=8,
    num_key_value_heads=2,
    moe_intermediate_size=36,
    num_experts=6,
    num_hidden_layers=3,
)


@pytest.mark.parametrize(
    ("config", "sizes", "expert", "expected"),
    [
        (DENSE, (1, 3), False, []),
        (DENSE, (2,), False, []),
        (DENSE, (4,), False, []),
        (DENSE, (12,), False, []),  # each key-value head on three ranks
        (EXPERTS, (8,), True, []),  # whole experts are not cut
        (DENSE, (8,), False, ["does not divide the 12 attention heads"]),
        (DENSE, (3,), False, ["and the 4 key-value heads: neither divides the other"]),
        (EXPERTS, (8,), False, ["does not divide the 36 columns"]),
        (DENSE, (5, 4), True, ["12 attention heads", "the model has 3 layers", "has no experts"]),
    ],
)
def test_shapes(config, sizes, expert, expected):
    found = [message for message, _ in shape_problems(config, ParallelSizes(*sizes), expert)]
    assert len(found) == len(expected)
    assert all(part in message for part, message in zip(expected, found, strict=True))
    if "attention heads" in "".join(expected) and sizes == (8,):
        ((_, remedy),) = shape_problems(config, ParallelSizes(*sizes), expert)
        assert remedy == "--vllm_tensor_parallel_size 1 or 2 or 4 or 12"


def test_all_problems_of_a_model_at_once(tmp_path):
    path = str(tiny_model_dir(tmp_path))  # two heads
    check_engine(path, EngineFlags(vllm_tensor_parallel_size=2), "cpu", False)
    check_engine(path, EngineFlags(vllm_block_size=16, vllm_quantization="fp8"), "cuda", False)
    flags = EngineFlags(
        vllm_tensor_parallel_size=4,
        vllm_pipeline_parallel_size=2,
        vllm_data_parallel_size=2,
        vllm_enable_expert_parallel=True,
        vllm_quantization="fp8",
        vllm_block_size=16,
    )
    with pytest.raises(UserError) as caught:
        check_engine(path, flags, "cpu", False)
    text = str(caught.value)
    sizes = ("pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel")
    for flag in (*sizes, "quantization"):
        assert f"--vllm_{flag} needs GPUs" in text
    assert "try: --vllm_block_size 32" in text
    assert "does not divide the 2 attention heads" in text and "has no experts" in text
