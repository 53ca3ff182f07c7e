from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrl.cluster.placement import Node
from openrl.cluster.planner import RoleRequest, plan_placement, role_requests
from openrl.config.derived import leaders
from openrl.config.groups.batch import RolloutBatchFlags
from openrl.config.groups.deepspeed import DeepSpeedFlags
from openrl.config.groups.lora import LoRAFlags
from openrl.config.groups.model import ModelFlags
from openrl.config.groups.optimizer import OptimizerFlags
from openrl.config.groups.placement import DeviceFlags
from openrl.errors import UserError
from openrl.models.causal_lm import DTYPES
from openrl.models.device import resolve_device
from openrl.trainer.planning.dry_run import (
    batch_rows,
    micro_batches,
    planned_node,
    transport_of,
)
from openrl.trainer.planning.memory_estimate import (
    KERNELS,
    Memory,
    ModelShape,
    engine_memory,
    gpu_memory,
    in_size_classes,
    model_memory,
    model_shape,
    most_tokens,
    saved_bytes,
)
from openrl.trainer.saving.disk import format_bytes
from openrl.training_engine.build import ModelSpec
from openrl.training_engine.optimizers import OptimSpec
from tests.flags import GRPO, PPO, ppo
from tests.tiny import rollout_spec, tiny_model_dir

SHAPE = ModelShape(
    parameters=1000,
    linear=50,
    backbone=800,
    hidden=10,
    layers=2,
    vocabulary=20,
)
OPTIM = OptimSpec(1e-6, OptimizerFlags(), 1)
POLICY = ModelSpec("logprobs", "", ModelFlags(pretrain=""), DeepSpeedFlags(), OPTIM, "cpu", 0)
REFERENCE = replace(POLICY, optim=None)
CRITIC = replace(POLICY, kind="values")


def memory(
    model: ModelSpec,
    dtype: str,
    stage: int,
    ranks: int,
    chunk: int = 8,
    shape: ModelShape = SHAPE,
    **flags: Any,
) -> Memory:
    deepspeed = DeepSpeedFlags(zero_stage=stage, logits_chunk_size=chunk, **flags)
    loaded = ModelFlags(pretrain="", param_dtype=dtype)
    return model_memory(replace(model, model=loaded, deepspeed=deepspeed), shape, ranks, 64)


@pytest.mark.parametrize(
    ("dtype", "stage", "ranks", "weights", "gradients", "masters", "moments"),
    [
        ("fp32", 0, 2, 4000, 4000, 0, 8000),  # the weights are their own masters
        ("bf16", 0, 2, 2000, 4000, 4000, 8000),
        ("bf16", 1, 2, 2000, 4000, 2000, 4000),
        ("bf16", 2, 2, 2000, 2000, 2000, 4000),
        ("bf16", 3, 2, 1000, 2000, 2000, 4000),
        ("fp32", 3, 4, 1000, 1000, 1000, 2000),
        ("bf16", 3, 1, 2000, 4000, 4000, 8000),
    ],
)
def test_each_zero_stage_shards_one_thing_more(
    dtype, stage, ranks, weights, gradients, masters, moments
):
    # logits: 8 tokens * 20 words * 4 bytes, and the product of the head or the gradient in bf16
    logits = 640 if dtype == "fp32" else 960
    expected = Memory(weights, gradients, masters, moments, logits=logits)
    found = memory(POLICY, dtype, stage, ranks)
    assert replace(found, bucket=0, activations=0) == expected
    # gradients in their own type on the way to their sums, and copies of the sums: in stage 1 of
    # bf16 all of them, in fp32 and bf16, otherwise the shard
    copied = 1000 * (4 + 2) if dtype == "bf16" and stage == 1 else gradients
    assert found.bucket == (1000 * DTYPES[dtype].itemsize + copied if stage else 0)
    assert found.activations == 0


def test_ranks_that_split_layers_hold_embeddings_and_head_each():
    """800 of the backbone, 20 * 10 of them embeddings; the head has another 200."""
    half = SHAPE.of_rank(2)
    assert (half.backbone, half.parameters) == (500, 700)
    assert SHAPE.of_rank(1) == SHAPE


def test_what_is_offloaded_or_averaged_is_in_host_memory():
    """fp32: sums of gradients 2000, masters 2000, moments 4000; weights 1000 in bf16; an average of
    2000."""
    on_device = {"logits": 960, "bucket": 2000}
    offloaded = memory(POLICY, "bf16", 3, 2, adam_offload=True)
    assert offloaded == Memory(1000, host=8000, **on_device) and offloaded.total == 3960
    everything = memory(POLICY, "bf16", 3, 2, adam_offload=True, param_offload=True)
    assert everything == Memory(0, host=9000, **on_device)
    averaged = memory(replace(POLICY, optim=replace(OPTIM, average=0.99)), "bf16", 2, 2)
    assert averaged == replace(memory(POLICY, "bf16", 2, 2), host=2000)


def test_sums_of_gradients_take_what_their_type_takes():
    found = memory(POLICY, "bf16", 1, 2, grad_accum_dtype="bf16")
    assert (found.gradients, found.bucket) == (2000, 2000 + 1000)  # and the copy of a shard


def test_layers_alone_are_in_4_bits():
    """600 weights of layers at half a byte and a scale for each 64; 200 of embeddings and 200 of the
    head in bf16."""
    lora = LoRAFlags(lora_rank=2, load_in_4bit=True)
    found = memory(replace(POLICY, lora=lora), "bf16", 1, 1)
    assert found.weights == 800 + 600 * 65 // 128
    assert (found.gradients, found.bucket) == (400, 200 + 600)  # of adapters of rank 2


def test_offloading_moves_nothing_of_models_that_are_only_evaluated():
    assert memory(REFERENCE, "bf16", 3, 2, adam_offload=True, param_offload=True) == Memory(
        1000, logits=640
    )


def test_models_that_are_only_evaluated_hold_weights_alone():
    assert memory(REFERENCE, "bf16", 2, 2) == Memory(2000, logits=640)
    assert memory(REFERENCE, "bf16", 3, 2) == Memory(1000, logits=640)


def test_scalar_models_have_a_head_of_one_row_and_no_logits():
    assert memory(CRITIC, "bf16", 0, 1) == Memory(1620, 3240, 3240, 6480)


def test_without_chunks_all_tokens_of_a_micro_batch_have_logits_at_once():
    assert memory(REFERENCE, "bf16", 0, 1, chunk=0).logits == 64 * 20 * 4
    # in training also the head's product and their gradient
    assert memory(POLICY, "bf16", 0, 1, chunk=0).logits == 3 * 64 * 20 * 4
    # never more than there are
    assert memory(REFERENCE, "bf16", 0, 1, chunk=1000).logits == 64 * 20 * 4


def test_an_engine_on_a_cpu_holds_weights_cache_logits_a_sync_and_kernels():
    """fp32: 1000 weights and again in a sync, or 2 x 50 of adapters; logits of 3 sequences of 20
    words, four times. Where head and embeddings are one, vLLM has 200 weights more."""
    spec = rollout_spec("m", param_dtype="fp32", vllm_max_num_seqs=3)
    expected = Memory(4000 + KERNELS, cache=2**30, logits=960, bucket=4000)
    assert engine_memory(SHAPE, spec, "vllm", None) == expected
    tied = replace(SHAPE, parameters=800)
    assert engine_memory(tied, spec, "vllm", None) == replace(expected, bucket=3200)
    adapters = replace(spec, adapter_rank=2)
    assert engine_memory(SHAPE, adapters, "vllm", None) == replace(expected, bucket=400)
    assert engine_memory(SHAPE, spec, "hf", None) == Memory(4000)


def test_gradients_of_a_layer_count_beside_its_activations_where_logits_were_fewer():
    """64 tokens in fp32: a layer saves 30 numbers and has 40 gradients on the way, 64 x 40 x 4 =
    10,240 bytes; logits of 8 tokens take 640 of them."""
    shape = replace(SHAPE, saved=30, passing=40)
    found = memory(POLICY, "fp32", 0, 1, shape=shape)
    assert found.logits == 640
    assert found.activations == 2 * 64 * 30 * 4 + 10240 - 640
    few = memory(POLICY, "fp32", 0, 1, shape=replace(shape, passing=2))
    assert few.activations == 2 * 64 * 30 * 4


def test_tensors_take_the_next_size_of_jemalloc_in_the_mean():
    sizes = [2 ** ((i + 0.5) / 10_000) for i in range(10_000)]
    taken = sum(min(c for c in (1.25, 1.5, 1.75, 2) if c >= size) / size for size in sizes)
    assert taken / len(sizes) == pytest.approx(1.0958, abs=1e-4)
    found = in_size_classes(Memory(10_000, logits=1000, host=100))
    assert found == Memory(10_958, logits=1096, host=110)


def test_gpus_of_a_cluster_are_taken_at_their_word(monkeypatch):
    """From a node without a GPU: --device cuda holds if a cluster is joined, and what a cache takes
    stays open."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert resolve_device(DeviceFlags(device="cuda"), joined=True) == "cuda"
    assert resolve_device(DeviceFlags(), joined=True) == "cpu"
    with pytest.raises(UserError, match=r"finds no GPU here[\s\S]*--ray_address"):
        resolve_device(DeviceFlags(device="cuda"), joined=False)
    spec = rollout_spec("", device="cuda", vllm_gpu_memory_utilization=0.5)
    assert engine_memory(SHAPE, spec, "vllm", None) == Memory(2000)
    capacity = gpu_memory(ppo(f"{PPO} --dry_run --gpu_memory_gb 1").debug)
    assert engine_memory(SHAPE, spec, "vllm", capacity) == Memory(2000, cache=2**29 - 2000)


def test_micro_batches_round_up_per_rank():
    batch = RolloutBatchFlags(
        rollout_batch_size=10, n_samples_per_prompt=3, train_batch_size=12, micro_train_batch_size=4,
        micro_rollout_batch_size=8,
    )  # fmt: skip
    assert micro_batches(batch, ranks=1, samples=30) == (3, 4)  # 12 / 4, 30 / 8
    assert micro_batches(batch, ranks=2, samples=30) == (2, 2)  # 6 / 4, 15 / 8
    assert micro_batches(batch, ranks=1, samples=48) == (4, 6)  # 48 in three steps: 16 / 4; 48 / 8


def test_batch_arithmetic_from_prompts_to_optimizer_steps():
    config = ppo(
        f"{PPO} --rollout_batch_size 8 --n_samples_per_prompt 4 --train_batch_size 16"
        " --micro_train_batch_size 4 --micro_rollout_batch_size 8 --num_episodes 2 --max_epochs 3"
    )
    plan = plan_placement([RoleRequest("actor", 1, 2)], "cpu", [])
    assert [(what, count) for what, count, _ in batch_rows(config, 41, plan)] == [
        ("prompts per step", "8"),
        ("samples per step", "32"),
        ("optimizer steps per step", "6"),  # 32 / 16, three times over
        ("micro-batches per rank and optimizer step", "2"),  # 16 / 2 / 4
        ("micro-batches per rank and forward-only pass", "2"),  # 32 / 2 / 8
        ("steps", "11"),  # 82 prompts in eights
        ("optimizer steps in all", "66"),
        ("samples in all", "352"),
    ]


def test_a_plan_counts_groups_that_are_replayed():
    config = ppo(
        f"{GRPO} --rollout_batch_size 8 --train_batch_size 32 --micro_train_batch_size 4"
        " --micro_rollout_batch_size 8 --replay_groups 6 --enable_vllm_is_correction"
    )
    plan = plan_placement([RoleRequest("actor", 1, 2)], "cpu", [])
    rows = {what: rest for what, *rest in batch_rows(config, 41, plan)}
    assert rows["samples per step"] == ["64", "8 of each prompt"]
    assert rows["replayed samples per step"] == ["at most 48", "of 6 groups"]
    assert rows["optimizer steps per step"] == ["2", "of 56 samples, 1 times over"]  # 112 / 2
    assert rows["micro-batches per rank and optimizer step"][0] == "7"  # 56 / 2 / 4
    assert rows["micro-batches per rank and forward-only pass"][0] == "7"  # 112 / 2 / 8
    assert rows["samples in all"][0] == str(6 * 64)  # that are played


def test_a_plan_says_how_many_prompts_are_under_way():
    words = "--async_train --async_queue_size 2 --rollout_batch_size 8 --train_batch_size 8"
    words += " --enable_vllm_is_correction"
    plan = plan_placement([RoleRequest("actor", 1, 2)], "cpu", [])
    rows = {what: rest for what, *rest in batch_rows(ppo(f"{PPO} {words}"), 41, plan)}
    said = ["at most 24", "tokens at most 2 weight syncs old (wait)"]
    assert rows["prompts under way or waiting"] == said


def test_token_caps_stand_in_the_plan():
    config = ppo(f"{PPO} --use_dynamic_batch --rollout_max_tokens_per_gpu 32768")
    plan = plan_placement([RoleRequest("actor", 1, 2)], "cpu", [])
    cut = [
        (count, how)
        for what, count, how in batch_rows(config, 10_000, plan)
        if what.startswith("micro-batches")
    ]
    assert cut == [
        ("by length", "of at most 16,384 tokens on 2 ranks"),
        ("by length", "of at most 32,768 tokens on 2 ranks"),
    ]


SIXTEEN = f"{PPO} --prompt_max_len 100 --generate_max_len 10 --n_samples_per_prompt 8"


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        ("--rollout_batch_size 4 --train_batch_size 32", 16 * 110),
        # two prompts
        ("--rollout_batch_size 4 --train_batch_size 32 --prefix_grouper", 2 * 100 + 16 * 10),
        # its samples are shuffled
        ("--rollout_batch_size 8 --train_batch_size 32 --prefix_grouper", 16 * 110),
    ],
)
def test_a_shared_prompt_counts_once(words, tokens):
    config = ppo(f"{SIXTEEN} {words} --advantage_estimator group_norm")
    assert most_tokens(config, 16) == tokens


@pytest.mark.parametrize("tied", [True, False])
def test_shapes_come_from_the_config_and_equal_the_model(tmp_path, tied):
    path = str(tiny_model_dir(tmp_path, tied=tied))
    model = AutoModelForCausalLM.from_pretrained(path)
    shape = model_shape(path, trust_remote_code=False)
    assert shape.parameters == model.num_parameters()
    assert shape.backbone == model.model.num_parameters()
    assert (shape.parameters == shape.backbone) is tied
    assert shape.vocabulary == model.get_output_embeddings().weight.shape[0]
    cache = model(torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values.layers
    assert len(cache) == shape.layers


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="no-such-model: its config does not load"):
        model_shape(str(tmp_path / "no-such-model"), trust_remote_code=False)


def test_sizes_for_people():
    assert [format_bytes(n) for n in (0, 1000, 1536, 3 * 2**20, 5 * 2**40)] == [
        "0 B",
        "1000 B",
        "1.5 KiB",
        "3.0 MiB",
        "5120.0 GiB",
    ]


@pytest.mark.parametrize(
    ("words", "device", "transport"),
    [
        ("--placement actor=0-3;vllm=0-3", "cuda", "ipc"),
        ("--placement actor=0-3;vllm=4-7", "cuda", "nccl"),
        ("--placement actor=0-3;vllm=4-7 --vllm_sync_backend gloo", "cuda", "host"),
        # no broadcast to the GPU that it comes from
        ("--placement actor=0-3;vllm=0-7", "cuda", "host"),
        ("--placement actor=0-3;vllm=4-7 --lora_rank 8 --lora_sync adapter", "cuda", "host"),
        ("--placement actor=0-3;vllm=4-7 --rollout_backend hf", "cuda", "host"),
        ("--placement actor=0-3;vllm=0-3", "cpu", "host"),
    ],
)
def test_the_way_of_weights_stands_in_the_plan(words, device, transport):
    config = ppo(
        f"{PPO} --advantage_estimator group_norm --n_samples_per_prompt 4 --init_kl_coef 0 {words}"
    )
    requests = role_requests(config.placement, config.engine, ["actor"], leaders(config))
    assert (
        transport_of(config, plan_placement(requests, device, [Node("a", 64, 8, 64, 8)]))
        == transport
    )


def test_a_plan_for_gpus_where_there_is_none():
    assert planned_node("cpu").gpus == torch.cuda.device_count()
    assert planned_node("cuda").gpus == (torch.cuda.device_count() or 8)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_activations_are_what_the_backward_pass_waits_for(tmp_path, arch, dtype):
    """Of layers four and two: bytes that autograd keeps, parameters left out."""
    kept, estimated = [], []
    for layers in (2, 4):
        path = tiny_model_dir(tmp_path / f"{layers}", arch=arch, num_hidden_layers=layers)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype]).base_model
        kept.append(bytes_kept(model, torch.ones(2, 16, dtype=torch.long)))
        shape = model_shape(str(path), False)
        estimated.append(saved_bytes(shape, dtype, DeepSpeedFlags(), 32))
    assert estimated[1] - estimated[0] == pytest.approx(kept[1] - kept[0], rel=0.05)


def bytes_kept(model: torch.nn.Module, ids: torch.Tensor) -> int:
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=ids, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
