"""Layers split over ranks by DeepSpeed: the gradients and trained weights of one rank that has them
whole.

Four gloo ranks are spawned once; the single rank runs in this process. Flags allow bf16 and fp16
alone; in fp32, where DeepSpeed measures the gradients of ZeRO 1 and 2 over all parts, the engine is
exact."""

import pytest
from safetensors.torch import load_file

from openrl.config.groups.deepspeed import ParallelFlags
from openrl.experience import StepPlan
from openrl.training_engine.build import build_engine
from openrl.training_engine.distributed import ParallelLayout, close_distributed, init_distributed
from tests.experience import counts_of, engine_spec, on_ranks
from tests.invariance.test_ranks import (
    OPTIM,
    UPDATE,
    assert_same_training,
    batch_with_old_logprobs,
    one_rank,
)
from tests.invariance.test_sequence_parallel import WORLD, train_two_steps
from tests.patience import PATIENCE
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.full

TENSOR = ParallelFlags(ds_tensor_parallel_size=2)
CASES = {  # name: (ZeRO stage, flags, packed, type)
    "1": (1, TENSOR, False, "fp32"),
    "2-ulysses": (2, ParallelFlags(ds_tensor_parallel_size=2, ulysses_size=2), True, "fp32"),
    "1-bf16": (1, TENSOR, False, "bf16"),
    "2-bf16": (2, TENSOR, False, "bf16"),
}


def rank_of_four(rank, port, checkpoint, root):
    init_distributed(rank, WORLD, "127.0.0.1", port, "cpu", timeout=PATIENCE)
    for name, (stage, flags, packing, dtype) in CASES.items():
        layout = ParallelLayout(rank, WORLD, flags.sequence_size, flags.ds_tensor_parallel_size)
        train_two_steps(checkpoint, root / name, layout, stage, flags, packing, dtype)
    close_distributed()


def test_split_layers_train_as_whole_ones(tmp_path):
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    checkpoint = tiny_model_dir(tmp_path, **shape)
    on_ranks(WORLD, rank_of_four, checkpoint, tmp_path)
    init_distributed(0, 1, "127.0.0.1", 0, "cpu", timeout=PATIENCE)
    (tmp_path / "whole").mkdir()
    whole = one_rank(checkpoint, tmp_path / "whole", 0, [[0, 1, 2, 3, 4, 5, 6, 7]])
    batch = batch_with_old_logprobs()
    engine = build_engine(engine_spec(checkpoint, optim=OPTIM, chunk_size=7))
    norm = engine.train_step(batch, StepPlan([list(range(8))], counts_of(batch)), UPDATE)[
        "grad_norm"
    ].value
    for name, (*_, dtype) in CASES.items():
        if dtype == "fp32":
            assert_same_training(tmp_path / name, whole, by_group=False, rel=1e-5, strays=4)
        else:  # bf16 has three digits
            found = load_file(tmp_path / name / "trained.safetensors")["grad_norm"]
            assert float(found) == pytest.approx(norm, rel=0.03)
