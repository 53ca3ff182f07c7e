"""Flags of the rollout engine that contradict each other, the model or vLLM."""

import re
from importlib.util import find_spec
from pathlib import Path

from openrl.config import derived
from openrl.config.rules import rollouts
from openrl.rollout_engines.vllm_adapters import RANKS, room_for_rank
from openrl.rollout_engines.vllm_start import engine_arguments
from openrl.workers.roles import run_engine_spec
from tests.flags import PPO, ppo


def test_what_the_engine_is_told():
    words = (
        "--param_dtype fp32 --vllm_dtype bf16 --enable_vllm_is_correction"
        " --vllm_max_num_batched_tokens 4096"
    )
    config = ppo(f"{PPO} {words} --vllm_block_size 32 --vllm_max_model_len 4000")
    spec = run_engine_spec(config, "cpu")
    assert (
        spec.dtype,
        spec.engine.vllm_max_num_batched_tokens,
        spec.engine.vllm_block_size,
        spec.max_model_len,
    ) == (
        "bf16",
        4096,
        32,
        4000,
    )
    assert derived.compared_dtype(config) == "bf16"
    assert derived.compared_dtype(ppo(f"{PPO} --param_dtype fp32")) == "fp32"
    assert (
        derived.compared_dtype(
            ppo(f"{PPO} --param_dtype bf16 --vllm_dtype fp32 --enable_vllm_is_correction")
        )
        == "bf16"
    )


def test_an_engine_beside_models_takes_less_of_the_memory():
    def share(words, shared):
        return run_engine_spec(ppo(f"{PPO} {words}"), "cuda", 1, shared).gpu_memory_utilization

    assert [share("", False), share("", True)] == [0.9, 0.6]
    assert (
        share("--vllm_gpu_memory_utilization 0.5", True)
        == share("--vllm_gpu_memory_utilization 0.5", False)
        == 0.5
    )


def test_a_run_divides_its_engines_and_leaves_room_for_evaluation():
    words = "--vllm_tensor_parallel_size 2 --vllm_pipeline_parallel_size 3 --vllm_load_format dummy"
    spec = run_engine_spec(
        ppo(f"{PPO} {words} --eval_dataset e --eval_steps 1 --eval_generate_max_len 3000"), "cuda"
    )
    assert (*vars(spec.engine.sizes).values(), spec.load_format) == (
        2,
        3,
        1,
        "dummy",
    )
    assert spec.max_model_len == 1024 + 3000


def test_room_for_adapters_is_what_vllm_has():
    """Its allowed values, from its own sources; --lora_rank takes the next."""
    sources = Path(find_spec("vllm").origin).parent / "config" / "lora.py"
    allowed = re.search(r"MaxLoRARanks = Literal\[([0-9, ]+)\]", sources.read_text())[1]
    assert [*RANKS] == [rank for rank in map(int, allowed.split(",")) if rank >= 8]
    assert [room_for_rank(rank) for rank in (1, 8, 9, 300, 512)] == [8, 8, 16, 320, 512]
    assert RANKS[-1] == rollouts.MOST_SERVED_RANK


def test_adapters_beside_the_base_are_told_to_vllm():
    config = ppo(f"{PPO} --lora_rank 12 --lora_sync adapter")
    arguments = engine_arguments(run_engine_spec(config, "cuda", 1))
    assert (arguments["enable_lora"], arguments["max_lora_rank"]) == (True, 16)
    assert "enable_lora" not in engine_arguments(
        run_engine_spec(ppo(f"{PPO} --lora_rank 12"), "cuda", 1)
    )
