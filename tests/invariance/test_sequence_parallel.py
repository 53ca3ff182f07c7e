"""Sequences split over ranks, by Ulysses and by a ring: the log-probs, values, rewards, gradients
and trained weights of one rank that has them whole.

Four gloo ranks are spawned once and run every case, as two by two and as four; the single rank runs
in this process. In fp64 ranks average their gradients by a plain all-reduce, in fp32 DeepSpeed
does."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from openrl.algorithms.batching import plan_pairs, plan_steps
from openrl.config.groups.deepspeed import ParallelFlags
from openrl.errors import UserError
from openrl.models.sequence_parallel import split_sequences
from openrl.training_engine.build import build_engine
from openrl.training_engine.distributed import (
    ParallelLayout,
    close_distributed,
    init_distributed,
    own_group,
)
from tests.experience import engine_spec, on_ranks
from tests.invariance.test_gradients import CASES, batch_of, build_models, run, whole_batch
from tests.invariance.test_ranks import (
    OPTIM,
    UPDATE,
    assert_same_training,
    batch_with_old_logprobs,
    one_rank,
    write,
)
from tests.patience import PATIENCE
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.full

WORLD = 4
SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
# The norms of most other architectures compute in fp32; dropout acts where activations are
# checkpointed.
EXACT = {"arch": "starcoder2", "residual_dropout": 0.0, "embedding_dropout": 0.0, **SHAPE}
SLIDING = EXACT | {"sliding_window": 4}
TERMS = ("every_term-seq-mean-token-mean", "kl_full", "cut", "values-token-mean", "pair_sigmoid")
SPLITS = {  # name: (flags, packed, rows of a micro-batch, whether activations are checkpointed)
    "ulysses_2": (ParallelFlags(ulysses_size=2), False, 4, False),
    "ulysses_2_packed": (ParallelFlags(ulysses_size=2), True, 2, True),
    "ulysses_4": (ParallelFlags(ulysses_size=4), False, 3, True),  # more ranks than key-value heads
    "ulysses_4_packed": (ParallelFlags(ulysses_size=4), True, 7, False),
    "ring_2": (ParallelFlags(ring_attn_size=2), True, 3, False),
    "ring_4": (ParallelFlags(ring_attn_size=4, ring_head_stride=2), True, 7, True),
}
WINDOWS = ("ulysses_2", "ulysses_2_packed")  # a ring knows none, and says so
WHOLE = (ParallelFlags(), False, 7, False)
STAGES = (0, 1, 2, 3)
ENGINES = {
    **{
        f"ulysses-{stage}": (stage, ParallelFlags(ulysses_size=2), stage % 2 == 0)
        for stage in STAGES
    },
    "ring-3": (3, ParallelFlags(ring_attn_size=4), True),
}


def gradients(case, model, batch, layout, split):
    """(parameters + 1,) gradient and loss of a step, averaged over ranks; then the columns of all
    rows that this rank has."""
    _, model.packing, size, checkpointing = split
    if checkpointing:
        model.hf.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    model.train(checkpointing)
    batch = batch_of(case, batch)
    plan = plan_pairs if case.pairs else partial(plan_steps, train_batch_size=len(batch))
    plan = plan(batch, dp_size=layout.dp_size, micro_batch_size=size)
    dp_rank = layout.rank // layout.ranks_per_shard
    shard, own = batch.select(plan.shards[dp_rank]), plan.steps[0][dp_rank]
    model.zero_grad()
    total = torch.zeros(1, dtype=torch.float64)
    for rows in own.micro_batches:
        loss, _ = case.update(partial(run, model), shard.select(rows), own.counts)
        loss.backward()
        total += loss.detach()
    model.hf.gradient_checkpointing_disable()
    result = torch.cat([*(p.grad.flatten() for p in model.parameters()), total])
    if layout.world_size > 1:
        dist.all_reduce(result)
    return result / layout.world_size


@torch.no_grad()
def column(model, batch):
    return model(batch.token_ids, batch.attention_mask)[0]


def all_cases(checkpoint, batch, layout, split):
    """{name: gradients}, and under the kinds of models their columns."""
    models = build_models(checkpoint)
    if layout.sp_size > 1:
        group = own_group(layout.sequence_groups(), 60)
        splits = {
            hf: split_sequences(hf, "m", split[0], group)
            for hf in {model.hf for model in models.values()}
        }
        for model in models.values():  # two of them have one backbone
            model.split = splits[model.hf]
    found = {
        name: gradients(CASES[name], models[CASES[name].model], batch, layout, split)
        for name in TERMS
    }
    return found | {kind: column(model.eval(), batch) for kind, model in models.items()}


def rank_of_four(rank, port, batches, engine_checkpoint, root):
    init_distributed(rank, WORLD, "127.0.0.1", port, "cpu", timeout=PATIENCE)
    for arch, (checkpoint, batch) in batches.items():
        for name, split in SPLITS.items():
            if arch == "sliding" and name not in WINDOWS:
                continue
            layout = ParallelLayout(rank, WORLD, split[0].sequence_size)
            found = all_cases(checkpoint, batch, layout, split)
            if rank == layout.world_size - 1:
                torch.save(found, root / f"{arch}-{name}.pt")
    refused(engine_checkpoint, batches["sliding"][0], root)
    for name, (stage, flags, packing) in ENGINES.items():
        layout = ParallelLayout(rank, WORLD, flags.sequence_size)
        train_two_steps(engine_checkpoint, root / name, layout, stage, flags, packing)
    close_distributed()


def train_two_steps(checkpoint, directory, layout, stage, flags, packing, dtype="fp32"):
    """Under DeepSpeed, with a save and a resume after the first step."""
    batch = batch_with_old_logprobs()
    plan = plan_steps(batch, layout.dp_size, len(batch), 3)
    dp_rank = layout.rank // layout.ranks_per_shard
    shard, own = batch.select(plan.shards[dp_rank]), plan.steps[0][dp_rank]
    more = {"zero_stage": stage, "dtype": dtype, "packing": packing, "parallel": flags}
    spec = engine_spec(checkpoint, optim=OPTIM, chunk_size=7, **more)
    engine = build_engine(spec)
    norm = engine.train_step(shard, own, UPDATE)["grad_norm"].value
    engine.save(directory)
    resumed = build_engine(spec)
    resumed.load(directory)
    for one in (engine, resumed):
        one.train_step(shard, own, UPDATE)
    for (name, a), (_, b) in zip(engine.named_weights(), resumed.named_weights(), strict=True):
        assert torch.equal(a, b), (stage, name)
    write(directory, engine, norm)


def refused(checkpoint, sliding, root):
    """Models of which a part is not what it is in the whole."""
    ring, ulysses = ParallelFlags(ring_attn_size=2), ParallelFlags(ulysses_size=2)
    with pytest.raises(UserError, match=r"--ring_attn_size: .* has a sliding window"):
        build_engine(engine_spec(sliding, packing=True, parallel=ring))
    with pytest.raises(UserError, match="its attention is eager"):
        build_engine(engine_spec(checkpoint, attention="eager", parallel=ulysses))
    mamba = root / "falcon_h1-tied-0"
    with pytest.raises(UserError, match=r"--ulysses_size: sequences of .* cannot be split"):
        build_engine(engine_spec(mamba, parallel=ulysses))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{arch: (checkpoint, batch)}"""
    folder = tmp_path_factory.mktemp("m")
    found = {}
    for arch, shape in {"plain": EXACT, "sliding": SLIDING}.items():
        checkpoint = tiny_model_dir(folder / arch, **shape)
        found[arch] = checkpoint, whole_batch(build_models(checkpoint), checkpoint)
    return found


@pytest.fixture(scope="module")
def engine_checkpoint(tmp_path_factory):
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return tiny_model_dir(tmp_path_factory.mktemp("e"), **shape)


@pytest.fixture(scope="module")
def expected(models):
    return {arch: all_cases(*of_arch, ParallelLayout(), WHOLE) for arch, of_arch in models.items()}


@pytest.fixture(scope="module")
def four_ranks(models, engine_checkpoint, tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks")
    tiny_model_dir(root, arch="falcon_h1", mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16)
    on_ranks(WORLD, rank_of_four, models, engine_checkpoint, root)
    return root


@pytest.mark.parametrize(
    ("arch", "name"),
    [*(("plain", name) for name in SPLITS), *(("sliding", name) for name in WINDOWS)],
)
def test_parts_add_up_to_the_whole(four_ranks, expected, arch, name):
    found = torch.load(four_ranks / f"{arch}-{name}.pt", weights_only=True)
    assert found.keys() == expected[arch].keys()
    for case, tensor in expected[arch].items():
        assert tensor.norm() > 1e-6
        assert float((found[case] - tensor).norm() / tensor.norm()) < 1e-9, case


def test_training_under_deepspeed(four_ranks, engine_checkpoint, tmp_path):
    init_distributed(0, 1, "127.0.0.1", 0, "cpu", timeout=PATIENCE)
    whole = one_rank(engine_checkpoint, tmp_path, 0, [[0, 1, 2, 3, 4, 5, 6, 7]])
    for name, (stage, _, _) in ENGINES.items():
        assert_same_training(four_ranks / name, whole, by_group=stage in (1, 2), rel=1e-5, strays=4)
