"""Where ranks live changes no number of a run, on the real Ray and DeepSpeed.

Each start has its own processes; in them runs of two steps with ZeRO 2 and 3, LoRA on and off, rows
padded, packed, with shared prompts and cut by tokens leave what the same flags leave where nothing
is shared, bit for bit. Places that are named one by one overlap in part, and what shares them
sleeps. In the suite transformers generates, pairs and named places start once, with two actor
ranks, and see both ZeRO stages, with and without LoRA; ``test_train_ppo.py`` has all models on one
place, and vLLM. With OPENRL_FULL_MATRIX=1 vLLM generates here too, every mode starts with one and
with two ranks, and each start sees all sixteen combinations."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.e2e.bench import started
from tests.e2e.runs import SMALL_STEPS, make_task, untimed

pytestmark = pytest.mark.full


FULL = bool(os.environ.get("OPENRL_FULL_MATRIX"))
BACKENDS = ("hf", "vllm") if FULL else ("hf",)
PLACEMENTS = ("pairs", "all_models", "explicit")
RANKS = (1, 2)
STARTS = tuple(itertools.product(RANKS, PLACEMENTS)) if FULL else ((2, "pairs"), (2, "explicit"))
COLOCATED = {
    "apart": (),
    "pairs": ("colocate_actor_ref", "colocate_critic_reward"),
    "all_models": ("colocate_all_models",),
}
EXPLICIT = {
    1: "actor=0;critic=0;ref=1;reward=1;vllm=0",
    2: "actor=0-1;critic=1-2;ref=1-2;reward=2-3;vllm=3",
}


ROWS: dict[str, dict[str, object]] = {
    "padded": {},
    "packed": {"packing_samples": True},
    "shared": {"prefix_grouper": True},
    "dynamic": {
        "use_dynamic_batch": True,
        "train_max_tokens_per_gpu": 40,  # the longest sample has 24
        "micro_train_batch_size": None,
        "micro_rollout_batch_size": None,
    },
}


class Case(NamedTuple):
    """What a run varies besides its placement."""

    zero_stage: int
    lora_rank: int
    rows: str

    @property
    def flags(self) -> dict[str, object]:
        return {
            "zero_stage": self.zero_stage,
            "lora_rank": self.lora_rank or None,
            **ROWS[self.rows],
        }


VALUES = ((2, 3), (0, 4), tuple(ROWS))
CASES = tuple(itertools.starmap(Case, itertools.product(*VALUES)))


def cases_of(ranks: int, placement: str) -> tuple[Case, ...]:
    """All, or two that differ in everything; others in each start."""
    if FULL:
        return CASES
    number, rows = STARTS.index((ranks, placement)), tuple(ROWS)
    first, second = ((0, 4), (4, 0))[number]
    return Case(2, first, rows[2 * number]), Case(3, second, rows[2 * number + 1])


def test_the_starts_together_see_all_rows_and_all_pairs_of_stage_and_rank():
    cases = [case for start in STARTS for case in cases_of(*start)]
    assert {case.rows for case in cases} == ROWS.keys()
    seen = {(case.zero_stage, case.lora_rank) for case in cases}
    assert seen == {*itertools.product((2, 3), (0, 4))}


def places(placement: str, ranks: int) -> dict[str, object]:
    if placement == "explicit":
        return {
            "placement": EXPLICIT[ranks],
            "vllm_enable_sleep": True,
            "deepspeed_enable_sleep": True,
        }
    return dict.fromkeys(COLOCATED[placement], True) | {
        "actor_num_gpus_per_node": ranks,
        "vllm_num_engines": ranks if placement == "all_models" else 1,
    }


# -- runs ------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a run leaves."""

    steps: list[dict[str, float]]
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    task = make_task(tmp_path_factory.mktemp("task"))
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(
        task / "model", num_labels=1
    ).save_pretrained(task / "judge")
    AutoTokenizer.from_pretrained(task / "model").save_pretrained(task / "judge")
    return task


@pytest.fixture(scope="module", params=BACKENDS)
def outcomes(request, ray_address, task, tmp_path_factory):
    """(placement, ranks, cases) -> what each case leaves there."""
    every_role = {
        "ray_address": ray_address,
        "rollout_backend": request.param,
        "advantage_estimator": "gae",
        "remote_rm_url": None,
        "reward_pretrain": task / "judge",
        "ref_pretrain": task / "model",  # a model of its own also where adapters are trained
        "use_kl_loss": True,
        "kl_estimator": "k3",
        "init_kl_coef": 0.1,
        **SMALL_STEPS,
        "generate_max_len": 8,
        "lr_warmup_ratio": 0,
    }

    @cache
    def outcomes(placement: str, ranks: int, cases: tuple[Case, ...]) -> dict[Case, Outcome]:
        out = tmp_path_factory.mktemp(f"{placement}-{ranks}")
        flags = every_role | places(placement, ranks)
        left = {}
        with started(task, out, **flags) as bench:
            for i, case in enumerate(cases):
                steps = bench(out / str(i), **(flags | case.flags))
                left[case] = Outcome(untimed(steps), load_file(out / str(i) / "model.safetensors"))
        return left

    return outcomes


def all_cases(ranks: int) -> tuple[Case, ...]:
    """Those of any placement with so many ranks."""
    seen = {case for r, placement in STARTS if r == ranks for case in cases_of(r, placement)}
    return tuple(sorted(seen))


@pytest.mark.parametrize(("ranks", "placement"), STARTS)
def test_a_placement_changes_nothing(outcomes, ranks, placement):
    apart, cases = outcomes("apart", ranks, all_cases(ranks)), cases_of(ranks, placement)
    for case, here in outcomes(placement, ranks, cases).items():
        assert here.steps == apart[case].steps, case
        assert differing(here, apart[case]) == [], case
    print(
        f"{placement}, {ranks} ranks: {len(cases)} runs of {len(CASES)} as where nothing is shared"
    )


def test_the_runs_train_and_agree(outcomes, task):
    """Two steps each; ranks, ZeRO stages and packing change little in the first, adapters leave the
    rest of the model."""
    start = load_file(task / "model/model.safetensors")
    runs = list(everywhere(outcomes))
    for case, outcome in runs:
        assert [m["step"] for m in outcome.steps] == [1, 2]
        assert all(
            m["actor/logprob_gap_max"] < 1e-4 and m["actor/nonfinite_steps"] == 0
            for m in outcome.steps
        ), case
        moved = {name for name in start if not torch.equal(start[name], outcome.weights[name])}
        assert (
            moved
            and (moved == set(start) or all("_proj" in name for name in moved))
            and bool(case.lora_rank) == (moved != set(start))
        ), case
    for lora_rank in (0, 4):
        first = [m.steps[0] for case, m in runs if case.lora_rank == lora_rank]
        for name in ("rollout/reward", "actor/policy_loss", "actor/grad_norm", "critic/value_loss"):
            assert [m[name] for m in first] == pytest.approx(
                [first[0][name]] * len(first), rel=1e-2, abs=1e-4
            ), name


def everywhere(outcomes) -> Iterator[tuple[Case, Outcome]]:
    for ranks in sorted({ranks for ranks, _ in STARTS}):
        yield from outcomes("apart", ranks, all_cases(ranks)).items()


def differing(one: Outcome, other: Outcome) -> list[str]:
    """Names of the weights that are not the same bits."""
    assert one.weights.keys() == other.weights.keys()
    return [
        name for name, tensor in one.weights.items() if not torch.equal(tensor, other.weights[name])
    ]
