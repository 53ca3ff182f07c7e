"""What the supervised commands annotate before a step."""

import asyncio

import pytest
import torch

from openrl.data.answers import SupervisedRow
from openrl.data.preference import PreferenceExample, collate_preferences
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
