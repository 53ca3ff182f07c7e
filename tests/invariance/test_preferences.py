"""Losses on pairs and rated answers: any cut into micro-batches and ranks gives the same loss and
gradient, in fp64."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrl.algorithms.batching import plan_pairs, plan_steps
from openrl.algorithms.preference_losses import (
    DPOOptions,
    KTOOptions,
    ReferenceOptions,
    SimPOOptions,
)
from openrl.data.answers import SupervisedRow
from openrl.data.preference import PreferenceExample, collate_preferences
from openrl.models.causal_lm import CausalLM
from openrl.models.scalar_model import Head, RewardModel
from openrl.training_engine.preference_updates import PairRewardUpdate, PreferenceUpdate
from tests.tiny import PAD, tiny_model_dir

UPDATES = {
    "dpo": PreferenceUpdate("dpo", DPOOptions(label_smoothing=0.1), 0.3, nll_coef=0.2),
    "ipo": PreferenceUpdate("ipo", ReferenceOptions(), 0.3),
    "kto": PreferenceUpdate("kto", KTOOptions(desirable_loss_weight=1.5), 0.3),
    "orpo": PreferenceUpdate("orpo", None, 0.3),
    "simpo": PreferenceUpdate("simpo", SimPOOptions(), 2.0, nll_coef=0.1),
    "sigmoid": PairRewardUpdate("sigmoid", margin=True),
    "logexp": PairRewardUpdate("logexp"),
}
RANKS_AND_MICRO = [(1, 7), (1, 2), (2, 2), (3, 1), (4, 3)]


def batch_of_pairs(pairs=7):
    """Ragged answers of 2 to 9 tokens to prompts of three, with made-up columns."""
    g = torch.Generator().manual_seed(0)

    def row():
        length = 5 + int(torch.randint(0, 8, (1,), generator=g))
        return SupervisedRow(
            torch.randint(4, 60, (length,), generator=g).tolist(), [i >= 3 for i in range(length)]
        )

    noise = torch.randn(pairs, 3, generator=g).tolist()
    examples = [
        PreferenceExample((row(), row()), (1.0, 0.0), m, (-9 + a, -9 + b)) for m, a, b in noise
    ]
    batch = collate_preferences(examples, PAD)
    return batch.replace(margins=batch.margins.double(), ref_answers=batch.ref_answers.double())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tiny_model_dir(tmp_path_factory.mktemp("m"))
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    head = torch.randn(1, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rewards = RewardModel(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).model, Head("score", head)
    )
    return {
        "logprobs": CausalLM(hf, temperature=1.0, chunk_size=5).eval(),
        "rewards": rewards.eval(),
    }


@pytest.mark.parametrize("name", UPDATES)
def test_any_cut_gives_the_same_gradient(models, name):
    update, batch, plan_of = UPDATES[name], batch_of_pairs(), plan_pairs
    model = models["rewards" if isinstance(update, PairRewardUpdate) else "logprobs"]
    if name == "kto":
        batch = batch.replace(kl=torch.full((len(batch),), 0.4, dtype=torch.float64))
        plan_of = lambda b, ranks, micro: plan_steps(b, ranks, len(b), micro)  # noqa: E731

    def forward(micro):
        return model(micro.token_ids, micro.attention_mask)

    results = []
    for ranks, size in RANKS_AND_MICRO:
        plan = plan_of(batch, ranks, size)
        model.zero_grad()
        total = 0.0
        for shard, of_rank in zip(plan.shards, plan.steps[0], strict=True):
            rows = batch.select(shard)
            for micro in of_rank.micro_batches:
                loss, _ = update(forward, rows.select(micro), of_rank.counts)
                (loss / ranks).backward()  # the mean that data parallelism takes over ranks
                total += float(loss.detach()) / ranks
        results.append(
            (total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        )
    for loss, gradient in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-9)
        assert float((gradient - results[0][1]).norm() / results[0][1].norm()) < 1e-9
