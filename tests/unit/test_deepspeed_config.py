"""What flags turn on in DeepSpeed, as data."""

from openrl.config.learning import DeepSpeedFlags
from openrl.training.deepspeed_config import EngineFacts, deepspeed_config


def config(dtype="bf16", low_masters=False, max_norm=0.0, parameters=1000, **flags):
    facts = EngineFacts(parameters, 64, dtype, max_norm, low_masters)
    return deepspeed_config(DeepSpeedFlags(**flags), facts)


def test_gradients_add_up_in_fp32_wherever_deepspeed_can():
    for stage in (1, 2, 3):
        for dtype in ("bf16", "fp16"):
            assert config(dtype, zero_stage=stage)["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "data_types" not in config("bf16", zero_stage=0)
    assert {"fp16", "bf16", "data_types"}.isdisjoint(config("fp32", zero_stage=3))


def test_bf16_masters_keep_everything_in_bf16_and_are_unknown_to_stage_0():
    settings = config(low_masters=True, zero_stage=2)
    assert settings["bf16"]["bf16_master_weights_and_grads"] and settings["bf16"]["bf16_optimizer_states"]
    assert settings["data_types"] == {"grad_accum_dtype": "bf16"}
    assert "bf16" not in config(low_masters=True, zero_stage=0)


def test_buckets_are_no_larger_than_the_model():
    assert config(parameters=1000)["zero_optimization"]["reduce_bucket_size"] == 1000
    assert config(parameters=10**12)["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    assert config()["zero_optimization"]["stage3_param_persistence_threshold"] == 640


def test_micro_batches_are_counted_by_the_engine():
    settings = config(max_norm=0.5)
    assert settings["gradient_clipping"] == 0.5
    assert (settings["train_micro_batch_size_per_gpu"], settings["gradient_accumulation_steps"]) == (1, 1)
