"""Ranks that share rows: which flags cannot mean anything, and what the plan makes of them."""

import re
from dataclasses import replace

import pytest
from transformers import AutoConfig

from openrl.algorithms.batching import PER_TOKEN, TokenCap
from openrl.algorithms.partition import RowCost
from openrl.cluster.planner import RoleRequest, plan_placement
from openrl.config import derived
from openrl.config.commands import DPOConfig, PPOConfig, RMConfig, SFTConfig
from openrl.config.derived import ranks_share_a_step
from openrl.config.groups.deepspeed import DeepSpeedFlags, ParallelFlags
from openrl.errors import UserError
from openrl.models.sequence_parallel import check_shape
from openrl.trainer.learning.rows import rollout_batching, supervised_batching
from openrl.trainer.planning.dry_run import batch_rows
from openrl.trainer.planning.start_lines import split_lines
from openrl.trainer.supervised import launch as launch_supervised
from openrl.trainer.supervised.tasks import task_of
from openrl.training_engine.deepspeed_config import EngineFacts, deepspeed_config
from openrl.training_engine.whole_weights import check_layers
from openrl.workers.roles import check_ranks, model_specs
from tests.flags import GRPO, SFT, ppo, said, settle
from tests.tiny import tiny_model_dir, tiny_tokenizer

FOUR = " --actor_num_gpus_per_node 4"


def test_batches_are_dealt_to_blocks_of_ranks():
    config = ppo(GRPO + FOUR + " --ulysses_size 2 --train_batch_size 8 --micro_train_batch_size 4")
    assert not list(ranks_share_a_step(config, 4))  # 8 rows for two blocks, four at a time
    assert "8 samples are not a multiple of 4 * 4" in str(list(ranks_share_a_step(config, 8)))
    plan = plan_placement([RoleRequest("actor", 1, 4)], "cpu", [])
    rows = {name: (count, note) for name, count, note in batch_rows(config, 1024, plan)}
    assert rows["actor ranks"] == ("4", "2 data parallel x 2 on the same rows")
    assert rows["micro-batches per rank and optimizer step"] == ("1", "of 4 samples on 2 x 2 ranks")
    assert "actor ranks" not in {name for name, *_ in batch_rows(ppo(GRPO + FOUR), 1024, plan)}
    words = " --use_dynamic_batch --train_max_tokens_per_gpu"
    assert rollout_batching(
        ppo(GRPO + FOUR + " --ulysses_size 2" + words + " 1024"), PER_TOKEN
    ).train == TokenCap(2048)
    refused = said(PPOConfig, GRPO + FOUR + " --ulysses_size 2" + words + " 1023")
    assert any(
        "2046 tokens" in line and "--train_max_tokens_per_gpu 1024" in line for line in refused
    )


def test_ranks_that_only_the_cluster_counts_are_asked_again():
    config = ppo(GRPO + " --ulysses_size 2")
    check_ranks(config, {"actor": 4, "reference": 2})
    with pytest.raises(UserError, match="3 ranks of the reference do not divide"):
        check_ranks(config, {"actor": 4, "reference": 3})
    with pytest.raises(UserError, match="3 ranks of the actor do not divide"):
        check_ranks(config, {"actor": 3, "reference": 2})


def test_a_ring_packs_and_says_so():
    config = ppo(GRPO + FOUR + " --ring_attn_size 2")
    assert derived.packs(config) and not derived.packs(ppo(GRPO + FOUR + " --ulysses_size 2"))
    assert split_lines(config) == [
        "each sequence is split over 2 ranks by ring attention",
        (
            "--ring_attn_size turns --packing_samples on: a micro-batch runs as one row without"
            " padding"
        ),
    ]
    (spec,) = model_specs(config, "cpu", 10)["reference"]
    assert spec.packing and spec.parallel.ring_attn_size == 2
    config, _ = settle(SFTConfig, SFT + " --output_key o --num_gpus_per_node 2 --ring_attn_size 2")
    spec = launch_supervised.trained_spec(config, task_of(config, tiny_tokenizer()), "cpu", 10)
    assert spec.packing and spec.parallel.ring_attn_size == 2


def test_shared_beginnings_pack_and_choose_the_attention():
    config = ppo(GRPO + " --prefix_grouper")
    assert split_lines(config) == [
        "--prefix_grouper turns --packing_samples on: a micro-batch runs as one row without padding"
    ]
    for (spec,) in model_specs(config, "cpu", 10).values():
        assert spec.packing and spec.shares and spec.model.attn_implementation == "varlen"
    assert rollout_batching(config, RowCost(0.1)).cost == RowCost(0.1, shared=True)
    plain = ppo(GRPO + " --packing_samples")
    assert not model_specs(plain, "cpu", 10)["actor"][0].shares
    assert rollout_batching(plain, RowCost(0.1)).cost == RowCost(0.1)
    for command, more in ((DPOConfig, ""), (RMConfig, "")):
        config, _ = settle(command, "--pretrain m --dataset d --prefix_grouper" + more)
        spec = launch_supervised.trained_spec(config, task_of(config, tiny_tokenizer()), "cpu", 10)
        assert spec.packing and spec.shares and spec.model.attn_implementation == "varlen"
        assert supervised_batching(config, RowCost()).cost.shared


@pytest.mark.parametrize(
    ("arch", "flags", "expected"),
    [
        (
            "qwen3",
            {"ulysses_size": 4},
            "6 attention heads do not divide among 4 ranks\n.*--ulysses_size 3",
        ),
        (
            "qwen3",
            {"ring_attn_size": 2, "ring_head_stride": 3},
            "--ring_head_stride 3 does not divide the 2 key-value",
        ),
        (
            "qwen3_next",
            {"ulysses_size": 2},
            "layers of type linear_attention need all tokens before a token",
        ),
    ],
)
def test_models_that_cannot_be_split(tmp_path, arch, flags, expected):
    AutoConfig.for_model(arch, num_attention_heads=6, num_key_value_heads=2).save_pretrained(
        tmp_path
    )
    with pytest.raises(UserError) as caught:
        check_shape(str(tmp_path), False, ParallelFlags(**flags))
    assert re.search(expected, str(caught.value))
    check_shape(str(tmp_path), False, ParallelFlags())


def test_a_model_that_can(tmp_path):
    path = str(tiny_model_dir(tmp_path, num_key_value_heads=2))
    check_shape(path, False, ParallelFlags(ulysses_size=2))
    check_layers(path, False, 2)


@pytest.mark.parametrize(
    ("arch", "size", "expected"),
    [
        (
            "qwen3",
            4,
            "6 attention heads of .* do not divide among 4 ranks\n.*--ds_tensor_parallel_size 2",
        ),
        (
            "qwen3",
            3,
            "2 key-value heads of .* do not divide among 3 ranks\n.*--ds_tensor_parallel_size 2",
        ),
        ("bloom", 2, "transformers has no plan"),
        ("qwen3_moe", 2, "its plan for tensor parallelism has"),
    ],
)
def test_layers_that_cannot_be_split(tmp_path, arch, size, expected):
    AutoConfig.for_model(arch, num_attention_heads=6, num_key_value_heads=2).save_pretrained(
        tmp_path
    )
    with pytest.raises(UserError) as caught:
        check_layers(str(tmp_path), False, size)
    assert re.search(expected, str(caught.value)), caught.value


def test_deepspeed_is_told_of_split_layers():
    facts = EngineFacts(1000, 64, "bf16", "cpu", 2, True, tp_size=2)
    assert deepspeed_config(DeepSpeedFlags(), facts)["tensor_parallel"] == {"autotp_size": 2}
    assert "tensor_parallel" not in deepspeed_config(DeepSpeedFlags(), replace(facts, tp_size=1))
