"""The engine's experts, replayed by the trainer: nothing is left of their gap where routers
disagree, and each token keeps the experts that led to the next one."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from openrl.algorithms.collate import collate
from openrl.algorithms.routes import with_shared_routes
from openrl.config.groups.deepspeed import ParallelFlags
from openrl.config.groups.model import LoadFlags
from openrl.models.attention import VARLEN
from openrl.models.causal_lm import CausalLM, Loading, load_causal_lm
from openrl.models.headed import Origins
from openrl.models.routers import Routers
from openrl.models.sequence_parallel import split_sequences
from openrl.token_origins import Routes
from openrl.trace.record import trajectory_from_json, trajectory_to_json
from openrl.training_engine.distributed import (
    ParallelLayout,
    close_distributed,
    init_distributed,
    own_group,
)
from openrl.types import (
    Completion,
    FinishReason,
    Prompt,
    PromptGroup,
    Sampling,
    Segment,
    Trajectory,
)
from tests.contract.test_interruption import LONG, interrupted, started
from tests.contract.test_rollout_engines import Bench, checkpoint
from tests.experience import on_ranks
from tests.patience import PATIENCE
from tests.tiny import rollout_spec, tiny_model_dir

MODEL = {"arch": "qwen3_moe", "tied": False, "num_experts": 8, "num_experts_per_tok": 3}
LAYERS, TOP_K = 2, 3
LEAN = 1e-4  # of the routers' matrices, of size 1: more than rounding
PROMPTS = [[7, 8, 9, 10], [11, 5], [30, 31, 32, 33, 34]]
SAMPLED = Sampling(40, seed=3, ignore_eos=True, routes=True)


def leaning(directory: Path, seed: int) -> Path:
    """Experts in pairs that are equally good but for LEAN: which one of a pair is better depends on
    ``seed``, and what they compute differs."""
    weights = load_file(directory / "model.safetensors")
    random = torch.Generator().manual_seed(seed)
    for name, matrix in weights.items():
        if name.endswith("mlp.gate.weight"):
            matrix[1::2] = matrix[::2]
            matrix += LEAN * torch.randn(matrix.shape, generator=random)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def trainer_of(path: Path) -> CausalLM:
    model = load_causal_lm(str(path), Loading(LoadFlags(param_dtype="fp32"), "cpu"), 1.0, 0)
    model.routers = Routers(model.hf)
    return model


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        path = leaning(tiny_model_dir(tmp_path_factory.mktemp("engine"), **MODEL), 1)
        spec = rollout_spec(path, param_dtype="fp32", longest=512)
        engine = runner.run(started("hf", spec))
        oracle = trainer_of(path).hf
        yield Bench(engine, runner, path, spec, oracle)
        runner.run(engine.close())


def tokens_of(prompt: list[int], reply: Completion) -> list[int]:
    return prompt + reply.token_ids


def own_routes(model, row: list[int]) -> torch.Tensor:
    """(L, layers, k): what a model chooses, from the logits that transformers returns."""
    with torch.no_grad():
        found = model.base_model(torch.tensor([row]), output_router_logits=True).router_logits
    return torch.stack([x.topk(TOP_K, -1).indices for x in found], 1)


def table(routes: Routes) -> torch.Tensor:
    return torch.frombuffer(routes.ids, dtype=torch.int16).view(-1, LAYERS, TOP_K).long()


def test_every_computed_token_brings_its_experts(bench):
    """Prompt and reply, in a batch with padding; the last token is never computed."""
    replies = bench.generate(PROMPTS, [SAMPLED] * 3)
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        row = tokens_of(prompt, reply)
        found = table(reply.routes)
        assert len(found) == len(row) and (found[-1] == Routes.UNKNOWN).all()
        assert torch.equal(found[:-1], own_routes(bench.oracle, row)[:-1])
    assert bench.generate(PROMPTS, [LONG] * 3)[0].routes is None


def gaps(model: CausalLM, batch) -> torch.Tensor:
    mask = batch.loss_mask
    routes = batch.routes and model.routers.rows(batch.routes, mask.shape[1], mask.device)
    with torch.no_grad():
        found, _ = model(batch.token_ids, batch.attention_mask, origins=Origins(routes=routes))
    return (found - batch.rollout_logprobs)[mask].abs()


def test_replay_removes_the_gap_of_routers_that_disagree(bench, tmp_path):
    """The trainer's routers lean the other way by LEAN: it takes other experts for a third of the
    tokens and more, unless it replays the engine's."""
    replies = bench.generate(PROMPTS, [SAMPLED] * 3)
    groups = [group_of(*pair) for pair in zip(PROMPTS, replies, strict=True)]
    batch, metrics = with_shared_routes(collate(groups, 0))
    assert metrics["routes_unknown"].value == 0
    model = trainer_of(leaning(tiny_model_dir(tmp_path, **MODEL), 2))
    row = tokens_of(PROMPTS[0], replies[0])
    assert (own_routes(model.hf, row) != own_routes(bench.oracle, row)).any(-1).any(-1).sum() > 10
    assert gaps(model, batch.replace(routes=None)).max() > 0.1
    assert gaps(model, batch).max() < 1e-2
    same = trainer_of(bench.directory)
    assert gaps(same, batch).max() < 1e-5


def group_of(prompt: list[int], reply: Completion) -> PromptGroup:
    row = Segment.answer(
        prompt, reply.token_ids, reply.logprobs, reply.versions, (), None, reply.routes
    )
    asked = Prompt(str(prompt), prompt, "")
    return PromptGroup(asked, [Trajectory(asked, [row], FinishReason.LENGTH)])


def test_new_weights_choose_only_for_what_they_compute(bench, tmp_path):
    """An answer that a sync interrupts: before it the experts are those of the old weights, behind
    it those of the new ones, for a row that the new weights read again from its beginning."""
    other = tiny_model_dir(tmp_path, **MODEL, seed=5)
    sampling = Sampling(200, seed=4, ignore_eos=True, routes=True)
    version = bench.engine.policy_version + 1

    async def sync() -> None:
        for sent in bench.buckets(checkpoint(other), version):
            await bench.engine.load_bucket(sent)
        await bench.engine.finish_sync(version)

    (reply,) = interrupted(bench, PROMPTS[:1], sampling, sync)
    old, new = reply.versions
    assert new.version == version
    row, cut = tokens_of(PROMPTS[0], reply), len(PROMPTS[0]) + old.end
    found = table(reply.routes)
    # the last token of the first stretch is first computed by the new weights
    assert torch.equal(found[: cut - 1], own_routes(bench.oracle, row)[: cut - 1])
    anew = own_routes(trainer_of(other).hf, row)
    assert torch.equal(found[cut - 1 : -1], anew[cut - 1 : -1])
    assert not torch.equal(found[: cut - 1], anew[: cut - 1])


def test_a_row_of_several_turns_keeps_the_experts_of_each():
    """Two requests with an observation between them; the second computes everything again."""
    row = Segment()
    row.observe([5, 6])
    row.sample([7, 8], [-1.0, -1.0], (), None, Routes(1, array("h", [0, 1, 2, -1])))
    row.observe([9])
    assert [*row.routes.ids] == [0, 1, 2, -1, -1]
    row.sample([4], [-1.0], (), None, Routes(1, array("h", [10, 11, 12, 13, 14, -1])))
    assert [*row.routes.ids] == [0, 1, 2, 13, 14, -1]
    row.cut(4)
    assert [*row.routes.ids] == [0, 1, 2, 13] and len(row.routes) == len(row.token_ids)
    row.sample([3], [-1.0], ())  # of an engine that tells nothing
    assert [*row.routes.ids] == [0, 1, 2, 13, -1]
    row = Segment.answer([5], [6, 7], [-1.0] * 2, (), (), None, Routes(1, array("h", [-2, -2, -1])))
    row.sample([8], [-1.0], (), None, Routes(1, array("h", [20, 21, 22, -1])))
    assert [*row.routes.ids] == [-2, -2, 22, -1]  # what is lost is not computed again


def test_a_checkpoint_keeps_them():
    prompt = Prompt("p", [5], "")
    row = Segment.answer([5], [6], [-1.0], (), (), None, Routes(2, array("h", [3, 300, -1, -1])))
    saved = trajectory_to_json(Trajectory(prompt, [row], FinishReason.STOP))
    (read,) = trajectory_from_json(json.loads(json.dumps(saved)), prompt, {}).segments
    assert read == row and read.routes == row.routes


SPLITS = {
    "ulysses": (ParallelFlags(ulysses_size=2), False),
    "ring": (ParallelFlags(ring_attn_size=2), True),
}
ROWS = torch.randint(4, 60, (3, 12), generator=torch.Generator().manual_seed(0))
SEEN = torch.arange(12) < torch.tensor([[12], [9], [5]])
CHOSEN = torch.randint(8, (3, 12, LAYERS, 1), generator=torch.Generator().manual_seed(1))
CHOSEN = ((CHOSEN + torch.arange(TOP_K)) % 8).flatten(2).to(torch.int16)


def replayed(path: Path, packing: bool, split=None, routes: torch.Tensor | None = CHOSEN):
    """Log-probs (3, 12) of rows with given experts, and the gradient of their sum, averaged over
    ranks."""
    model = trainer_of(path)
    model.packing = packing
    model.hf.set_attn_implementation(VARLEN)
    if split is not None:
        model.split = split(model.hf)
    found, _ = model(ROWS, SEEN, origins=Origins(routes=routes))
    found[SEEN].sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    if split is not None:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return found.detach(), gradient


def one_of_two(rank: int, port: int, path: Path, root: Path) -> None:
    init_distributed(rank, 2, "127.0.0.1", port, "cpu", timeout=PATIENCE)
    group = own_group(ParallelLayout(rank, 2, 2).sequence_groups(), 60)
    for name, (flags, packing) in SPLITS.items():
        split = partial(split_sequences, path="m", flags=flags, group=group)
        torch.save(replayed(path, packing, split), root / f"{name}-{rank}.pt")
    close_distributed()


def test_each_part_of_a_split_sequence_takes_its_own_experts(tmp_path):
    path = tiny_model_dir(tmp_path, **MODEL)
    on_ranks(2, one_of_two, path, tmp_path)
    for name, (_, packing) in SPLITS.items():
        logprobs, gradient = replayed(path, packing)
        assert (logprobs - replayed(path, packing, routes=None)[0]).abs().max() > 0.1
        for rank in range(2):
            found, of_ranks = torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True)
            assert torch.allclose(found, logprobs, atol=1e-5)
            assert (of_ranks - gradient).norm() < 1e-5 * gradient.norm()
