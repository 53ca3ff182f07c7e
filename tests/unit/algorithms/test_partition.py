"""Parts of like sums, against every possible deal of a few things."""

import itertools
import random

import pytest
from transformers import PretrainedConfig

from openrl.algorithms.partition import RowCost, balanced_parts
from openrl.models.cost import cost_of

SEEDS = range(60)


def sums(parts, costs):
    return [sum(costs[i] for i in part) for part in parts]


def every_deal(costs, parts, equal_counts):
    """The smallest possible largest sum, by trying all."""
    n = len(costs)
    best = sum(costs)
    for places in itertools.product(range(parts), repeat=n):
        counts = [places.count(p) for p in range(parts)]
        if not equal_counts or max(counts) - min(counts) <= 1:
            best = min(
                best,
                max(
                    sum(c for c, q in zip(costs, places, strict=True) if q == p)
                    for p in range(parts)
                ),
            )
    return best


@pytest.mark.parametrize("equal_counts", [False, True])
def test_against_every_deal(equal_counts):
    ratios = []
    for seed in SEEDS:
        rng = random.Random(seed)
        costs, parts = [rng.randint(1, 30) for _ in range(rng.randint(3, 7))], rng.choice([2, 3])
        found = balanced_parts(costs, parts, equal_counts)
        ratios.append(max(sums(found, costs)) / every_deal(costs, parts, equal_counts))
    assert min(ratios) >= 1 and max(ratios) < 4 / 3
    assert sum(ratio == 1 for ratio in ratios) > 0.7 * len(ratios)


@pytest.mark.parametrize("equal_counts", [False, True])
def test_nothing_is_lost_and_the_spread_is_bounded(equal_counts):
    """Merging two deals leaves a spread no larger than that of the worse one, so the first deals
    bound the last: one thing each, or one thing in every part."""
    for seed in SEEDS:
        rng = random.Random(seed)
        costs, parts = (
            [rng.lognormvariate(6, 1) for _ in range(rng.randint(0, 60))],
            rng.randint(1, 9),
        )
        found = balanced_parts(costs, parts, equal_counts)
        assert len(found) == parts
        assert sorted(i for part in found for i in part) == list(range(len(costs)))
        totals, falling = sums(found, costs), sorted(costs, reverse=True)
        bound = max(costs, default=0.0)
        if equal_counts:
            counts = [len(part) for part in found]
            assert max(counts) - min(counts) <= 1
            strata = [falling[i : i + parts] for i in range(0, len(falling), parts)]
            bound = max((s[0] - (s[-1] if len(s) == parts else 0) for s in strata), default=0.0)
        assert max(totals) - min(totals) <= bound * (1 + 1e-9)


def test_a_thousand_rows_are_dealt_evenly():
    rng = random.Random(0)
    costs = [rng.lognormvariate(7, 0.75) for _ in range(1024)]
    for equal_counts, bound in ((False, 1.001), (True, 1.02)):
        totals = sums(balanced_parts(costs, 32, equal_counts), costs)
        assert max(totals) / (sum(totals) / 32) < bound


def test_each_part_gets_one_of_every_like_costs():
    parts = balanced_parts([8, 7, 6, 5, 4, 3, 2, 1], 2, equal_counts=True)
    assert [sorted(pair) for pair in zip(*map(sorted, parts), strict=True)] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]


# -- what a row costs ------------------------------------------------------------------------------


def test_attention_of_published_models():
    """Qwen3-8B has 8.19e9 parameters, 0.62e9 of them embeddings; Qwen3-30B-A3B activates 3.3e9,
    0.3e9 of them embeddings."""
    dense = {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    dense |= {"head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936}
    assert cost_of(PretrainedConfig(**dense)).attention == pytest.approx(
        36 * 4096 / (8.19e9 - 0.62e9), rel=0.01
    )
    mixture = {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    }
    mixture |= {
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
    }
    mixture |= {"vocab_size": 151936}
    assert cost_of(PretrainedConfig(**mixture)).attention == pytest.approx(
        48 * 4096 / (3.3e9 - 0.3e9), rel=0.03
    )


def test_models_of_other_shapes_have_a_cost():
    shape = {"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 10}
    assert cost_of(PretrainedConfig(**shape)) == RowCost()  # a state-space model
    one, by_layer = (
        cost_of(PretrainedConfig(**shape, num_attention_heads=2, intermediate_size=sizes))
        for sizes in (24, [16, 32])
    )
    assert one == by_layer == RowCost(2 * 8 / (2 * (4 * 8 * 8 + 3 * 8 * 24) + 80))


def test_a_long_row_costs_more_than_its_tokens():
    cost = RowCost(1 / 1000)
    assert [cost(n) for n in (0, 10, 1000, 2000)] == [0, 10.1, 2000, 6000]
    assert RowCost()(2000) == 2000
