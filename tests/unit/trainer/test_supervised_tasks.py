"""What the supervised commands compute before a step, and how an evaluation ends early."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from openrl.data.answers import SupervisedRow
from openrl.data.preference import PreferenceExample, collate_preferences
from openrl.trainer.supervised import model as module
from openrl.trainer.supervised.model import CHUNK, SupervisedModel
from openrl.trainer.supervised.tasks import add_kl_estimate
from tests.tiny import PAD


@pytest.mark.parametrize(("reference", "kl"), [((-7.0, -9.0), 2.0), ((-2.0, -4.0), 0.0)])
def test_ktos_kl_is_the_mean_log_ratio_of_answers_to_other_prompts_and_at_least_0(reference, kl):
    """The policy gives each of two answer tokens -3, so -6 an answer: against -7 and -9 the ratios
    are 1 and 3, against -2 and -4 they are -4 and -2."""
    row = SupervisedRow([5, 6, 7], [False, True, True])
    examples = [PreferenceExample((row, row), (1.0, 0.0), 0.0, (100.0, of)) for of in reference]

    async def policy(rows):
        return torch.full(rows.token_ids.shape, -3.0)

    answers = asyncio.run(add_kl_estimate(collate_preferences(examples, PAD), policy))
    assert answers.kl.tolist() == [kl, kl]
    assert answers.ref_answers.tolist() == [100.0, 100.0]


@pytest.mark.parametrize(("stops_after", "batches"), [(9, 3), (2, 2), (0, 0)])
def test_an_evaluation_ends_when_the_run_is_asked_to_stop(monkeypatch, stops_after, batches):
    """It may take longer than the time in which a checkpoint has to be written."""
    evaluated = []

    class Model(SupervisedModel):
        async def _planned(self, batch):
            return batch, None

    async def evaluate_rows(group, batch, plan, update):
        evaluated.append(len(batch))
        return {}

    async def stops():
        return len(evaluated) >= stops_after

    monkeypatch.setattr(module, "evaluate_rows", evaluate_rows)
    task = SimpleNamespace(
        collate=lambda rows, pad: rows, update=None, from_evaluation=lambda values: {"loss": 1.0}
    )
    model = Model(None, task, PAD, None, None)
    found = asyncio.run(model.evaluate(range(2 * CHUNK + 1), lambda done, total: None, stops))
    assert found == ({"eval/loss": 1.0} if batches == 3 else None)
    assert evaluated == [CHUNK, CHUNK, 1][:batches]
