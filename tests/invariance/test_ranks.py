"""One or two ranks, ZeRO 0 to 3, any cut into micro-batches, padded or packed: the same gradient,
the same trained weights.

Two gloo ranks are spawned once and run every case; the single rank runs in this process.
"""

from shutil import copy

import pytest
import torch
from safetensors.torch import load_file, save_file

from openrl.algorithms.policy_losses import PPOOptions
from openrl.experience import StepPlan
from openrl.training_engine.build import build_engine
from openrl.training_engine.distributed import close_distributed, init_distributed
from openrl.training_engine.updates import PolicyUpdate
from tests.experience import (
    column_of,
    counts_of,
    engine_spec,
    on_ranks,
    optim_spec,
    poison,
    ragged_batch,
)
from tests.patience import PATIENCE
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.full

STAGES = (0, 1, 2, 3)
ONE_RANK = {
    "whole": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "halves": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "ragged": [[7], [5, 2, -1], [0, 1, 3, 4], [6]],
}
# Rows of the batch for each rank, then micro-batches within them; -1 keeps the ranks in step.
TWO_RANKS = {
    "even": [([0, 2, 4, 6], [[0, 1], [2, 3]]), ([1, 3, 5, 7], [[0, 1], [2, 3]])],
    "uneven": [([0, 3, 5], [[0, 1], [2, -1], [-1]]), ([1, 2, 4, 6, 7], [[0, 1], [2, 3], [4]])],
}
PACKED = {"uneven"}  # the rest is padded, as is what all are held against
UPDATE = PolicyUpdate("ppo", PPOOptions(), "seq-mean-token-mean", kl_coef=0.3, kl_estimator="k3")
OPTIM = optim_spec(learning_rate=1e-3)


def batch_with_old_logprobs():
    batch = ragged_batch()
    return batch.replace(old_logprobs=-2.0 + 0.5 * batch.returns)


def two_steps(spec, rows, micro_batches, dp_size, directory):
    """Train two steps, with a save after the first; the gradient norm of the first."""
    batch = batch_with_old_logprobs()
    plan = StepPlan(micro_batches, counts_of(batch, dp_size))
    engine = build_engine(spec)
    first = engine.train_step(batch.select(rows), plan, UPDATE)
    engine.save(directory)
    engine.train_step(batch.select(rows), plan, UPDATE)
    return engine, plan, first["grad_norm"].value


def write(directory, engine, norm):
    weights = {name: tensor.clone() for name, tensor in engine.named_weights()}
    if engine.layout.rank == 0:
        save_file(
            weights | {"grad_norm": torch.tensor(norm, dtype=torch.float64)},
            directory / "trained.safetensors",
        )


def rank_of_two(rank, port, checkpoint, root, saved_by_one):
    init_distributed(rank, 2, "127.0.0.1", port, "cpu", timeout=PATIENCE)
    for stage in STAGES:
        for name, shards in TWO_RANKS.items():
            packing = name in PACKED
            spec = engine_spec(
                checkpoint, zero_stage=stage, optim=OPTIM, chunk_size=7, packing=packing
            )
            directory = root / f"{stage}-{name}"
            engine, plan, norm = two_steps(spec, *shards[rank], 2, directory)
            write(directory, engine, norm)
        own = root / f"{stage}, rank {rank} alone"  # what a node has of its own ranks is enough
        own.mkdir()
        for file in directory.glob(f"rank_{rank:05d}.*"):
            copy(file, own)
        resumed = goes_on(spec, own, engine, shards[rank][0], plan)  # the last cut again
    for stage in STAGES:
        rows, micro_batches = TWO_RANKS["even"][rank]
        plan = StepPlan(micro_batches, counts_of(batch_with_old_logprobs(), 2))
        for saved in (saved_by_one, root / f"{another(stage)}-even"):
            after = root / f"{stage} after {saved.name}"
            after.mkdir(exist_ok=True)
            write(after, takes_up(checkpoint, stage, saved, rows, plan), norm=0.0)
    for case in OTHERS:
        learns_and_resumes(checkpoint, root / "-".join(map(str, case)), rank, *case)
    trained, norm = towards_a_reference(checkpoint, 3, *TWO_RANKS["uneven"][rank], 2)
    write(root / "kl", trained, norm)
    for name, flags in MEMORY.items():
        spec, cut = (
            engine_spec(checkpoint, optim=OPTIM, chunk_size=7, **flags),
            TWO_RANKS["uneven"][rank],
        )
        engine, plan, norm = two_steps(spec, *cut, 2, root / name)
        write(root / name, engine, norm)
        resumed = goes_on(spec, root / name, engine, cut[0], plan)
    if rank == 1:  # its shard alone
        poison(resumed, "hf.model.layers.0.mlp.up_proj.weight")
    assert resumed.nonfinite_weights() == ["model.layers.0.mlp.up_proj.weight"]
    padding_is_no_weight(checkpoint.with_name("qwen3-tied-4"), rank)
    close_distributed()


def padding_is_no_weight(checkpoint, rank):
    """A vector of 31 numbers makes two parts of 16, and nobody writes the last of them."""
    engine = build_engine(engine_spec(checkpoint, zero_stage=3))
    norm = dict(engine.model.named_parameters())["hf.model.norm.weight"]
    assert (norm.ds_numel, norm.ds_tensor.numel()) == (31, 16)
    if rank == 1:
        norm.ds_tensor.data[-1] = torch.nan
    assert engine.nonfinite_weights() == []


def goes_on(spec, directory, engine, rows, plan):
    """An engine that takes up the save after the first step and is where ``engine`` is after the
    second."""
    resumed = build_engine(spec)
    # of weights that the save replaces
    column_of(resumed, batch_with_old_logprobs().select(rows), [[0]] * 2)
    resumed.load(directory)
    resumed.train_step(batch_with_old_logprobs().select(rows), plan, UPDATE)
    for (name, a), (_, b) in zip(engine.named_weights(), resumed.named_weights(), strict=True):
        assert torch.equal(a, b), (directory.name, name)
    return resumed


def another(stage):
    return (stage + 1) % len(STAGES)


def takes_up(checkpoint, stage, saved, rows, plan):
    """An engine that takes up a save after the first step, of any ranks and stage, and trains the
    second."""
    engine = build_engine(engine_spec(checkpoint, zero_stage=stage, optim=OPTIM, chunk_size=7))
    engine.load(saved)
    engine.train_step(batch_with_old_logprobs().select(rows), plan, UPDATE)
    return engine


def towards_a_reference(checkpoint, stage, rows, micro_batches, dp_size):
    """One step on the KL of whole distributions to another model, whose columns its own engine
    gives."""
    batch = ragged_batch()
    shard, plan = batch.select(rows), StepPlan(micro_batches, counts_of(batch, dp_size))
    outputs = build_engine(
        engine_spec(checkpoint.with_name("qwen3-tied-3"), zero_stage=stage, top_k={"reference": 4})
    ).forward(shard, micro_batches, "reference")
    engine = build_engine(engine_spec(checkpoint, zero_stage=stage, optim=OPTIM, chunk_size=7))
    update = PolicyUpdate("ppo", PPOOptions(), "token-mean", kl_coef=1.0, kl_estimator="full")
    report = engine.train_step(
        shard.replace(ref_logprobs=outputs.pop("output"), **outputs), plan, update
    )
    return engine, report["grad_norm"].value


MEMORY = {
    "optimizer on the host": {"zero_stage": 2, "adam_offload": True},
    "all on the host": {"zero_stage": 3, "adam_offload": True, "param_offload": True},
    "reduced meanwhile": {"zero_stage": 2, "overlap_comm": True},
    # last: DeepSpeed's group of them outlives its engine
    "a copy among two": {"zero_stage": 3, "zpg": 2},
}
"""Flags that change where things are and when they move, and no number."""

OTHERS = [
    *(("adamw", stage, "bf16") for stage in STAGES),
    *(("adamw_bf16", stage, "bf16") for stage in STAGES),
    *(("adamw_8bit", stage, "fp32") for stage in (1, 3)),
    ("muon", 0, "bf16"),
]


def learns_and_resumes(checkpoint, directory, rank, optimizer, stage, dtype):
    """The loss of the same batch falls, and a resumed engine goes on bit for bit."""
    rows, micro_batches = TWO_RANKS["uneven"][rank]
    batch = batch_with_old_logprobs()
    plan, shard = StepPlan(micro_batches, counts_of(batch, 2)), batch.select(rows)
    optim = optim_spec(optimizer=optimizer, learning_rate=3e-3)
    spec = engine_spec(checkpoint, zero_stage=stage, dtype=dtype, optim=optim)
    engine = build_engine(spec)
    reports = [engine.train_step(shard, plan, UPDATE) for _ in range(6)]
    both = torch.tensor(
        [m["policy_loss"].total + UPDATE.kl_coef * m["kl_loss"].total for m in reports]
    )
    torch.distributed.all_reduce(both)
    assert both[-1] < both[0], (optimizer, stage, both)
    engine.save(directory)
    expected = engine.train_step(shard, plan, UPDATE)
    resumed = build_engine(spec)
    resumed.load(directory)
    assert resumed.train_step(shard, plan, UPDATE) == expected, (optimizer, stage)
    for (name, a), (_, b) in zip(engine.named_weights(), resumed.named_weights(), strict=True):
        assert torch.equal(a, b), (optimizer, stage, name)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny_model_dir(folder, seed=3)
    tiny_model_dir(folder, seed=4, hidden_size=31)
    return tiny_model_dir(folder)


@pytest.fixture(scope="module")
def expected(checkpoint, tmp_path_factory):
    """One rank, ZeRO 0, one micro-batch."""
    init_distributed(0, 1, "127.0.0.1", 0, "cpu", timeout=PATIENCE)
    return one_rank(checkpoint, tmp_path_factory.mktemp("expected"), 0, ONE_RANK["whole"])


def one_rank(checkpoint, directory, stage, micro_batches):
    spec = engine_spec(checkpoint, zero_stage=stage, optim=OPTIM, chunk_size=7)
    engine, _, norm = two_steps(spec, list(range(8)), micro_batches, 1, directory)
    write(directory, engine, norm)
    return directory


def gradient(directory):
    """The clipped gradient of the first step, from Adam's first moment: (1 - beta1) * g. Each
    optimizer group is flat over ranks in stages 1 and 2, padded at its end."""
    ranks = [load_file(path) for path in sorted(directory.glob("rank_*.safetensors"))]
    names = sorted(
        (n for n in ranks[0] if n.startswith("exp_avg.")), key=lambda n: int(n.split(".")[1])
    )
    return [torch.cat([r[n].flatten() for r in ranks]) for n in names]


def assert_same_weights(found, expected, strays=0):
    """``strays`` elements of each tensor may have a gradient so near zero that Adam, which divides
    by its size, turns a rounding error into a visible one; a step is never longer than the learning
    rate."""
    names = expected.keys() - {"grad_norm"}
    assert found.keys() - {"grad_norm"} == names
    for name in names:
        gap = (found[name] - expected[name]).abs()
        assert gap.max() <= 2 * OPTIM.learning_rate, name
        assert (gap > 2e-5 + 1e-5 * expected[name].abs()).sum() <= strays, name


def assert_same_training(found, expected, *, by_group, rel=1e-6, strays=0):
    a, b = (load_file(d / "trained.safetensors") for d in (found, expected))
    assert float(a["grad_norm"]) == pytest.approx(float(b["grad_norm"]), rel=rel)
    assert_same_weights(a, b, strays)
    if by_group:
        parts = gradient(expected)
        for flat in gradient(found):
            part = []
            while sum(map(len, part)) + (len(parts[0]) if parts else len(flat) + 1) <= len(flat):
                part.append(parts.pop(0))
            whole = torch.cat(part)
            assert float((flat[: len(whole)] - whole).norm() / whole.norm()) < 2e-6
        assert not parts


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("cut", ONE_RANK)
def test_one_rank(tmp_path, checkpoint, expected, stage, cut):
    found = one_rank(checkpoint, tmp_path, stage, ONE_RANK[cut])
    assert_same_training(found, expected, by_group=stage in (1, 2))


def test_two_ranks(tmp_path, checkpoint, expected):
    (tmp_path / "kl").mkdir()
    on_ranks(2, rank_of_two, checkpoint, tmp_path, expected)
    (tmp_path / "one").mkdir()
    write(
        tmp_path / "one", *towards_a_reference(checkpoint, 0, list(range(8)), ONE_RANK["whole"], 1)
    )
    assert_same_training(tmp_path / "kl", tmp_path / "one", by_group=False, strays=1)
    for stage in STAGES:
        for cut in TWO_RANKS:
            assert_same_training(tmp_path / f"{stage}-{cut}", expected, by_group=stage in (1, 2))
    for name, flags in MEMORY.items():
        assert_same_training(tmp_path / name, expected, by_group=flags["zero_stage"] == 2)
    plan = StepPlan(ONE_RANK["halves"], counts_of(batch_with_old_logprobs()))
    wanted = load_file(expected / "trained.safetensors")
    for stage in STAGES:
        for saved in (expected.name, f"{another(stage)}-even"):
            found = load_file(tmp_path / f"{stage} after {saved}/trained.safetensors")
            assert_same_weights(found, wanted)
        one = takes_up(checkpoint, another(stage), tmp_path / f"{stage}-even", range(8), plan)
        assert_same_weights(dict(one.named_weights()), wanted)
