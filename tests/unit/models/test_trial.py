"""What a model is tried on: which tokens, and how far apart two results may be."""

from types import SimpleNamespace

import pytest
import torch

from openrl.models.trial import Trial


def config(vocab_size):
    return SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=vocab_size))


def test_tokens_are_from_the_middle_and_differ():
    tokens = Trial.of(config(49152), torch.float32).tokens
    assert tokens[0] == 12288 and tokens[-1] == 36864
    for size in (49152, 66):
        assert len(set(Trial.of(config(size), torch.float32).tokens.tolist())) == 12


@pytest.mark.parametrize(
    ("gap", "reach", "dtype", "said"),
    [
        (0.09, 1.0, torch.float32, None),  # a tenth of what another input does
        (0.11, 1.0, torch.float32, "0.11 of 1"),
        (0.11, 1.0, torch.bfloat16, None),  # 16 nats round by 0.125
        (0.15, 1.0, torch.bfloat16, "0.15 of 1"),
        (float("nan"), 1.0, torch.bfloat16, "nan of 1"),
    ],
)
def test_a_gap_is_held_against_reach_and_rounding(gap, reach, dtype, said):
    expected = torch.tensor([-16.0, -16.0])
    away = torch.tensor([1.0, -1.0])
    found = Trial(torch.arange(12), dtype).discrepancy(
        expected + gap * away, expected, expected + reach * away
    )
    assert found == said
