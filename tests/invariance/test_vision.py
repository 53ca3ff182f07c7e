"""The gradient of a batch of rows with no, one and two images is that of the batch however it is cut:
into ranks, micro-batches, padded rows or packed ones; in fp64. Ranks average their gradients here by
a plain all-reduce."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModel, AutoModelForImageTextToText, AutoTokenizer

from openrl.algorithms.batching import TokenCap, plan_steps
from openrl.algorithms.collate import collate
from openrl.algorithms.policy_losses import PPOOptions
from openrl.experience import ExperienceBatch
from openrl.models.causal_lm import CausalLM, logit_transform
from openrl.models.scalar_model import Head, ValueModel
from openrl.models.vision import Vision
from openrl.training_engine.distributed import close_distributed, init_distributed
from openrl.training_engine.updates import PolicyUpdate, ValueUpdate
from openrl.types import FinishReason, Prompt, PromptGroup, Score, Segment, Trajectory
from openrl.vision.pictures import png_image
from openrl.vision.processor import VisionProcessor
from tests.experience import assert_same_gradient, on_ranks
from tests.patience import PATIENCE
from tests.tiny_vision import MARKS, picture, tiny_vision_dir

pytestmark = pytest.mark.full

SHOWN = ((), (1,), (2, 3), (), (4,))  # pictures of each prompt; two answers to each
CUTS = {1: (10, 5, 3, 1, TokenCap(150)), 2: (5, 2, TokenCap(150))}
UPDATES = {
    "logprobs": PolicyUpdate(
        "ppo", PPOOptions(), "token-mean", kl_coef=0.3, kl_estimator="k3+", entropy_coef=0.1
    ),
    "values": ValueUpdate(0.2, "token-mean"),
}


def models_of(checkpoint: str) -> dict[str, CausalLM | ValueModel]:
    processor = VisionProcessor(checkpoint, {})
    policy = CausalLM(
        AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float64), 0.8, 16
    )
    policy.vision = Vision(policy.hf, processor)
    head = policy.hf.get_output_embeddings()
    head.transform = logit_transform(policy.hf.config, 0.8, policy.vision.media_tokens)
    backbone = AutoModel.from_pretrained(checkpoint, dtype=torch.float64)
    weight = torch.randn(1, 64, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    critic = ValueModel(backbone, Head("score", weight))
    critic.vision = Vision(backbone, processor)
    return {"logprobs": policy.eval(), "values": critic.eval()}


def whole_batch(checkpoint: str) -> ExperienceBatch:
    mark = next(mark for arch, mark in MARKS.items() if Path(checkpoint).name == f"{arch}-0")
    processor, tokenizer = (
        VisionProcessor(checkpoint, {}),
        AutoTokenizer.from_pretrained(checkpoint),
    )
    groups = []
    for number, shown in enumerate(SHOWN):
        ids = tokenizer(mark * len(shown) + f"how {number}", add_special_tokens=False).input_ids
        tokens, placed = processor.place(ids, [png_image(picture(n)) for n in shown])
        prompt = Prompt(f"p:{number}", tokens, "", images=placed)
        answers = [[7 + number] * (3 + i + number % 2) for i in range(2)]
        rows = [Segment.answer(tokens, answer, images=placed) for answer in answers]
        played = [Trajectory(prompt, [row], FinishReason.STOP, score=Score(1.0)) for row in rows]
        groups.append(PromptGroup(prompt, played))
    batch = collate(groups, 0)
    g = torch.Generator().manual_seed(3)
    noise = {
        name: torch.randn(batch.token_ids.shape, generator=g, dtype=torch.float64)
        for name in ("advantages", "returns", "values")
    }
    return replace(batch, **noise, ref_logprobs=-noise["returns"].abs())


def gradients(model, update, batch: ExperienceBatch, ranks: int, rank: int) -> Tensor:
    """(cuts, parameters + 1): gradient and loss of each cut, averaged over ranks."""
    found = []
    for size, model.packing in product(CUTS[ranks], (False, True)):
        if isinstance(size, TokenCap) and not model.packing:
            continue
        plan = plan_steps(batch, ranks, len(batch), size)
        shard, own = batch.select(plan.shards[rank]), plan.steps[0][rank]
        model.zero_grad()
        total = torch.zeros(1, dtype=torch.float64)
        for rows in own.micro_batches:
            loss, _ = update(partial(run, model), shard.select(rows), own.counts)
            loss.backward()
            total += loss.detach()
        zeros = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
        found.append(torch.cat([*(g.flatten() for g in zeros), total]))
    result = torch.stack(found)
    if ranks > 1:
        dist.all_reduce(result)
    return result / ranks


def run(model, micro: ExperienceBatch, *outputs: str) -> tuple[Tensor, dict[str, Tensor]]:
    tokens = (micro.token_ids, micro.attention_mask)
    wanted = {"outputs": outputs} if outputs else {}
    media = model.vision.read(micro.images)
    return model(*tokens, scored=micro.loss_mask, media=media, **wanted)


def rank_of_two(rank: int, port: int, checkpoint: str, path: Path) -> None:
    init_distributed(rank, 2, "127.0.0.1", port, "cpu", timeout=PATIENCE)
    models, batch = models_of(checkpoint), whole_batch(checkpoint)
    found = {n: gradients(models[n], update, batch, 2, rank) for n, update in UPDATES.items()}
    if rank == 0:
        torch.save(found, path)
    close_distributed()


@pytest.fixture(scope="module", params=["idefics3", "qwen2_5_vl", "qwen3_vl"])
def checkpoint(request, tmp_path_factory):
    """Those of Qwen count positions on three axes."""
    return str(tiny_vision_dir(tmp_path_factory.mktemp("m"), arch=request.param))


@pytest.fixture(scope="module")
def one_rank(checkpoint):
    models, batch = models_of(checkpoint), whole_batch(checkpoint)
    return {n: gradients(models[n], update, batch, 1, 0) for n, update in UPDATES.items()}


@pytest.fixture(scope="module")
def two_ranks(checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "gradients.pt"
    on_ranks(2, rank_of_two, checkpoint, path)
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("model", UPDATES)
def test_one_rank(one_rank, model):
    assert_same_gradient(one_rank[model][1:], one_rank[model][0])


@pytest.mark.parametrize("model", UPDATES)
def test_two_ranks(one_rank, two_ranks, model):
    assert_same_gradient(two_ranks[model], one_rank[model][0])
