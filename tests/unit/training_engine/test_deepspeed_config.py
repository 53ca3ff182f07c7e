"""What flags turn on in DeepSpeed, as data."""

import pytest
import torch

from openrl.config.groups.deepspeed import DeepSpeedFlags
from openrl.errors import UserError
from openrl.training_engine.deepspeed_config import EngineFacts, check_device, deepspeed_config


def config(
    dtype="bf16", low_masters=False, max_norm=0.0, trainable=1000, trained=True, ranks=1, device="cpu", streamed=False,
    **flags,
):  # fmt: skip
    facts = EngineFacts(
        trainable, 64, dtype, device, ranks, trained, max_norm, low_masters, streamed=streamed
    )
    return deepspeed_config(DeepSpeedFlags(**flags), facts)


def test_no_flag_changes_nothing_that_deepspeed_decides():
    zero = config(zero_stage=2)["zero_optimization"]
    assert {"overlap_comm", "offload_optimizer", "offload_param"}.isdisjoint(zero)
    assert zero["zero_hpz_partition_size"] == 1


def test_flags_of_training_leave_models_that_are_only_evaluated_alone():
    flags = {"zero_stage": 3, "adam_offload": True, "param_offload": True, "zpg": 4}
    zero = config(ranks=8, **flags)["zero_optimization"]
    assert (
        zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu", "pin_memory": False}
    )
    assert zero["zero_hpz_partition_size"] == 4
    zero = config(ranks=6, trained=False, **flags)["zero_optimization"]
    assert {"offload_optimizer", "offload_param"}.isdisjoint(zero) and zero[
        "zero_hpz_partition_size"
    ] == 1


def test_a_reference_may_be_streamed_whatever_the_trained_models_do():
    zero = config(zero_stage=3, trained=False, streamed=True)["zero_optimization"]
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": False}


def test_host_memory_is_pinned_where_a_gpu_reads_it():
    assert config(device="cuda", adam_offload=True)["zero_optimization"]["offload_optimizer"][
        "pin_memory"
    ]


def test_groups_must_divide_the_ranks():
    with pytest.raises(UserError, match="--zpg 4: 6 ranks"):
        config(ranks=6, zero_stage=3, zpg=4)


def test_the_type_of_sums_is_that_of_the_flag():
    assert config(zero_stage=2, grad_accum_dtype="bf16")["data_types"] == {
        "grad_accum_dtype": "bf16"
    }
    assert config(zero_stage=2, low_masters=True)["data_types"] == {"grad_accum_dtype": "bf16"}


def test_overrides_come_last_and_leave_their_neighbours():
    settings = config(
        zero_stage=2,
        ds_config_overrides={"zero_optimization": {"reduce_bucket_size": 7}, "a": {"b": 1}},
    )
    assert settings["zero_optimization"]["reduce_bucket_size"] == 7
    assert settings["zero_optimization"]["stage"] == 2 and settings["a"] == {"b": 1}


def test_gradients_add_up_in_fp32_wherever_deepspeed_can():
    for stage in (1, 2, 3):
        for dtype in ("bf16", "fp16"):
            assert config(dtype, zero_stage=stage)["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "data_types" not in config("bf16", zero_stage=0)
    assert {"fp16", "bf16", "data_types"}.isdisjoint(config("fp32", zero_stage=3))


def test_bf16_masters_keep_everything_in_bf16_and_are_unknown_to_stage_0():
    settings = config(low_masters=True, zero_stage=2)
    assert (
        settings["bf16"]["bf16_master_weights_and_grads"]
        and settings["bf16"]["bf16_optimizer_states"]
    )
    assert settings["data_types"] == {"grad_accum_dtype": "bf16"}
    assert "bf16" not in config(low_masters=True, zero_stage=0)


def test_buckets_are_no_larger_than_all_gradients():
    assert config(trainable=1000)["zero_optimization"]["reduce_bucket_size"] == 1000
    assert config(trainable=10**12)["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    assert config()["zero_optimization"]["stage3_param_persistence_threshold"] == 640


def test_micro_batches_are_counted_by_the_engine():
    settings = config(max_norm=0.5)
    assert settings["gradient_clipping"] == 0.5
    assert (
        settings["train_micro_batch_size_per_gpu"],
        settings["gradient_accumulation_steps"],
    ) == (1, 1)


def test_a_cpu_without_fp16_is_told_of_before_the_start(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)
    with pytest.raises(
        UserError,
        match=r"--param_dtype fp16: this CPU cannot compute in it\n.*--param_dtype bf16",
    ):
        check_device("fp16", "cpu")
    check_device("bf16", "cpu")
    check_device("fp16", "cuda")
