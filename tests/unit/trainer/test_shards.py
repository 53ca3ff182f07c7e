"""Shards that an optimizer cannot step on are refused before anything starts."""

import pytest
from transformers import AutoConfig

from openrl.errors import UserError
from openrl.trainer.planning.prepare import check_shards
from tests.flags import ppo


@pytest.fixture(scope="module")
def eight_billion(tmp_path_factory):
    """The config of a model of 8.0e9 parameters, without its weights."""
    # 2 * (4 * 16384 ** 2 + 3 * 16384 * 32768) + 2 * 80_000 * 16384, and 3 norms
    shape = {"hidden_size": 16384, "intermediate_size": 32768, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 80_000}
    path = tmp_path_factory.mktemp("model")
    AutoConfig.for_model("llama", **shape, **heads).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("flags", "fits"),
    [
        ("--actor_num_gpus_per_node 2 --zero_stage 2", False),  # 4.0e9
        ("--actor_num_gpus_per_node 4 --zero_stage 1", True),  # 2.0e9
        ("--actor_num_gpus_per_node 2 --zero_stage 3", True),  # pieces
        ("--actor_num_gpus_per_node 1 --zero_stage 0", True),  # one parameter at a time
        ("--actor_num_gpus_per_node 2 --zero_stage 2 --lora_rank 8", True),  # adapters
        ("--zero_stage 2", True),  # only the cluster knows
    ],
)
def test_eight_bit_moments_of_a_shard(eight_billion, flags, fits):
    words = "--prompt_data d --remote_rm_url r.py --optimizer adamw_8bit"
    config = ppo(f"--pretrain {eight_billion} {words} {flags}")
    check_shards(config, "cpu")
    if fits:
        check_shards(config, "cuda")
    else:
        with pytest.raises(UserError, match="--optimizer adamw_8bit"):
            check_shards(config, "cuda")
