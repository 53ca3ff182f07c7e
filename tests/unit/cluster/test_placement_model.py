"""The placement simulator against closed forms, a slow decoder, brute force, measured steps and
published ratios."""

import asyncio
import json
import math
import os
import random
import re
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.placement_cases import cases
from benchmarks.placement_model import (
    Costs,
    Engine,
    Lengths,
    Placement,
    Workload,
    best_split,
    fit_costs,
    simulate,
    splits,
)
from benchmarks.simulate_placement import main
from benchmarks.virtual_clock import run_virtually
from openrl.types import Prompt
from tests.marks import full_after

pytestmark = pytest.mark.full

COSTS = Costs(0.01, 0.2e-3, 0.3e-3, 0.1e-3, sync=3.0, switch=5.0)
EQUAL = Workload(COSTS, Lengths(500, prompt=100), 256, per_prompt=8)  # all answers: 500 tokens

MEASURED = Path(__file__).parents[3] / "benchmarks/measured/in_process.jsonl"

# -- closed forms ----------------------------------------------------------------------------------


def decoding(engines, samples=256, tokens=500):
    """Seconds in which each engine decodes its share, all answers of one length."""
    return tokens * (0.01 + 0.2e-3 * samples / engines)


def training(gpus, samples=256, tokens=600):
    return samples * tokens * 0.4e-3 / gpus


def test_colocated_is_the_sum_of_its_stages():
    found = simulate(EQUAL, Placement(8))
    assert found.step_seconds == pytest.approx(decoding(8) + training(8) + 3 + 5)
    assert found.rollout_idle == found.train_idle == pytest.approx(8 / found.step_seconds)
    assert (found.age_mean, found.age_max) == (0, 0)


def test_separate_is_the_sum_and_each_side_waits_for_the_other():
    found = simulate(EQUAL, Placement(8, rollout_gpus=2))
    assert found.step_seconds == pytest.approx(decoding(2) + training(6) + 3)
    assert found.rollout_idle == pytest.approx(1 - decoding(2) / found.step_seconds)
    assert found.train_idle == pytest.approx(1 - training(6) / found.step_seconds)


def test_a_trainer_beside_the_engines_waits_while_it_collects():
    """32 prompts at 0.25 s. Beside the engines a rollout that is hidden stays hidden; on the same
    GPUs nothing is collected."""
    work = replace(EQUAL, costs=replace(COSTS, collect=0.25))
    apart, ahead = Placement(8, rollout_gpus=2), Placement(8, rollout_gpus=4, steps_ahead=1)
    assert simulate(work, apart).step_seconds == pytest.approx(decoding(2) + 8 + training(6) + 3)
    assert simulate(work, ahead).step_seconds == pytest.approx(8 + training(4) + 3)
    assert simulate(work, Placement(8)) == simulate(EQUAL, Placement(8))


def test_asynchronous_is_the_slower_side():
    """Training's: the rollout is hidden. Rollouts': two of them share the engines, which do not
    decode in a sync."""
    by_training = simulate(EQUAL, Placement(8, rollout_gpus=4, steps_ahead=1))
    assert decoding(4) < training(4) and by_training.step_seconds == pytest.approx(training(4) + 3)
    assert (by_training.age_mean, by_training.age_max) == (1, 1)
    slow = replace(EQUAL, costs=replace(COSTS, decode_base=0.0, decode_per_sequence=2e-3))
    ahead = Placement(8, rollout_gpus=1, steps_ahead=3, partial=True)
    by_rollouts = simulate(slow, ahead, steps=20)
    assert by_rollouts.step_seconds == pytest.approx(256 * 500 * 2e-3 + 3, rel=2e-3)
    assert by_rollouts.rollout_idle == pytest.approx(3 / by_rollouts.step_seconds, abs=3e-3)


def test_engines_of_several_gpus():
    found = simulate(replace(EQUAL, engine_gpus=4), Placement(8))
    assert found.step_seconds == pytest.approx(decoding(2) + training(8) + 8)


def test_more_gpus_than_the_tail_can_use():
    """From 16 to 1,024 GPUs the longest answer sets the time of a rollout."""
    work = Workload(COSTS, Lengths(500, 1.0, 4000), samples=64)
    seconds = [simulate(work, Placement(gpus)).step_seconds for gpus in (16, 64, 1024)]
    drawn = [work.lengths.draw(1, seed=n)[0] for n in range(1, 16 * 64 + 1)]
    longest = np.reshape(drawn, (16, 64))[4:].max(axis=1).mean()
    assert seconds[2] == pytest.approx(longest * (0.01 + 0.2e-3) + 8, rel=0.01)
    assert seconds[0] > seconds[1] > seconds[2] > 0.6 * seconds[0]


# -- decoding, the slow and obvious way ------------------------------------------------------------


def slow_ends(arrivals, base, per_sequence):
    """When each call's last sequence ends on one engine: from the end of one sequence to that of
    the next."""
    time, live, ends, waiting = 0.0, [], {}, sorted(arrivals)
    while live or waiting:
        if not live:
            time = max(time, waiting[0][0])
        while waiting and waiting[0][0] <= time + 1e-12:
            _, call, lengths = waiting.pop(0)
            live += [[float(length), call] for length in lengths]
        pace = base + per_sequence * len(live)
        until_end = min(tokens for tokens, _ in live) * pace
        until = min(until_end, waiting[0][0] - time) if waiting else until_end
        time += until
        for sequence in live:
            sequence[0] -= until / pace
        for _, call in [s for s in live if s[0] < 1e-9]:
            ends[call] = time
        live = [s for s in live if s[0] >= 1e-9]
    return ends


@pytest.mark.parametrize("seed", range(6))
def test_decoding_agrees_with_one_event_after_the_other(seed):
    draw = random.Random(seed)
    arrivals, time = [], 0.0
    for call in range(6):
        time += draw.expovariate(0.2)
        arrivals.append((time, call, [draw.randint(1, 400) for _ in range(draw.randint(1, 12))]))

    class Drawn:
        def draw(self, count, seed):
            return np.array(arrivals[seed][2], dtype=float)

    async def scenario():
        costs = replace(COSTS, decode_base=0.01, decode_per_sequence=0.002)
        run = SimpleNamespace(work=Workload(costs, Drawn(), 1), engines=[], sampled={})
        engine, ends = Engine(None, run), {}

        async def call(start, number, lengths):
            await asyncio.sleep(start)
            await engine.play(Prompt(str(number), [], ""), None)
            ends[number] = asyncio.get_running_loop().time()

        await asyncio.gather(*(call(*arrival) for arrival in arrivals))
        return ends

    expected = slow_ends(arrivals, 0.01, 0.002)
    found = run_virtually(scenario())
    assert found.keys() == expected.keys()
    for number, end in expected.items():
        assert found[number] == pytest.approx(end, abs=1e-6)


# -- ages, splits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_no_token_is_older_than_the_steps_ahead(ahead, partial):
    work = Workload(COSTS, Lengths(500, 1.2, 8000), samples=64, per_prompt=4)
    found = simulate(work, Placement(8, 4, ahead, partial=partial))
    assert found.age_max == ahead and found.age_mean <= ahead


def test_ahead_by_no_sync_takes_as_long_as_separate():
    work = Workload(COSTS, Lengths(500, 1.2, 8000), samples=64)
    in_step = simulate(work, Placement(8, 4, steps_ahead=1, max_staleness=0))
    assert in_step.step_seconds == pytest.approx(
        simulate(work, Placement(8, 4)).step_seconds, rel=0.05
    )
    assert in_step.age_max == 0


def test_an_interrupted_answer_pays_a_prefill_and_has_tokens_of_both_weights():
    """Two steps of one answer each on one GPU: 400 tokens are decoded in 4 s; a sync after 2 of the
    4 s of another takes 3 s, and its 200 tokens are computed again in 1 s."""

    async def scenario():
        costs = Costs(0.01, 0.0, 0.0, prefill_per_token=0.005)
        run = SimpleNamespace(work=Workload(costs, Lengths(400), 1), engines=[], sampled={})
        engine = Engine(None, run)
        playing = asyncio.create_task(engine.play(Prompt("1", [], ""), None))
        await asyncio.sleep(2)
        await engine.pause(finish_running=False)
        engine.synced()
        await asyncio.sleep(3)
        await engine.resume(finish_running=False)
        await playing
        first, tokens = run.sampled["1"]
        return asyncio.get_running_loop().time(), engine.busy, first, list(tokens)

    seconds, busy, first, tokens = run_virtually(scenario())
    assert (seconds, busy, first) == (pytest.approx(8), pytest.approx(5), 0)
    assert tokens == [pytest.approx(200), pytest.approx(200)]


def test_what_is_unfinished_goes_on_while_others_are_trained():
    """Colocated, half as many prompts more than a step needs: the longest answers are decoded
    beside those of the next steps, not alone."""
    work = Workload(COSTS, Lengths(500, 1.2, 8000), samples=64)
    on_policy, partial = (
        simulate(work, p, steps=20)
        for p in (Placement(8), Placement(8, partial=True, oversample=1.5, max_staleness=2))
    )
    assert partial.step_seconds < 0.8 * on_policy.step_seconds
    assert partial.age_max == 2 and 0 < partial.age_mean < 1


@pytest.mark.full
@pytest.mark.parametrize("seed", [3, 5, 6, 7, 8, 9, 11, 15])  # the quick ones
def test_the_best_split_is_within_5_percent_of_trying_all(seed):
    draw = random.Random(seed)
    costs = Costs(
        draw.uniform(0.003, 0.03),
        10 ** draw.uniform(-4.5, -3),
        10 ** draw.uniform(-4.5, -3),
        0.0,
        draw.uniform(0, 10),
    )
    lengths = Lengths(draw.uniform(100, 3000), draw.uniform(0, 1.2), 16000)
    work = Workload(costs, lengths, samples=draw.choice([64, 128]), engine_gpus=draw.choice([1, 2]))
    gpus, ahead, steps = draw.choice([4, 16]), draw.choice([0, 1, 2]), 6
    placement = Placement(gpus, steps_ahead=ahead, partial=ahead > 0)
    brute = min(
        simulate(work, replace(placement, rollout_gpus=split), steps).step_seconds
        for split in splits(work, gpus)
    )
    assert brute <= best_split(work, placement, steps).step_seconds <= 1.05 * brute


# -- measurements ----------------------------------------------------------------------------------


def test_costs_are_found_again_in_steps_that_they_explain():
    steps = []
    for samples, longest, mean in [(64, 100, 60), (512, 90, 40), (256, 400, 120), (128, 30, 25)]:
        tokens, trained = samples * mean, samples * (mean + 20)
        times = {
            "rollout": 0.02 * longest + 0.3e-3 * tokens / 2,
            "annotate": 0.05e-3 * trained / 4 + 0.1,
        }
        times |= {"train": 0.2e-3 * trained / 4}
        step = {f"time/{name}": seconds for name, seconds in times.items()} | {
            "time/step": sum(times.values()) + 0.4
        }
        step |= {"rollout/tokens": tokens, "rollout/response_length_max": longest}
        steps.append(step | {"rollout/samples": samples, "rollout/prompt_length": 20})
    found = fit_costs(steps, engines=2, train_gpus=4)
    assert found.decode_base == pytest.approx(0.02) and found.decode_per_sequence == pytest.approx(
        0.3e-3
    )
    assert found.train_per_token == pytest.approx(
        0.2e-3
    ) and found.logprobs_per_token == pytest.approx(0.05e-3)
    assert found.sync == pytest.approx(0.5)


@pytest.mark.parametrize(
    "placement", [Placement(1), Placement(2, rollout_gpus=1)], ids=lambda p: p.name
)
@pytest.mark.parametrize("shape", full_after(1, ["16x48", "32x32", "64x16", "64x40"]))
def test_a_measured_step_is_predicted_from_steps_of_other_shapes(shape, placement):
    """Steps of a real run on one core (``benchmarks/measure_stages.py --in_process --rounds 3``),
    where stages take turns as in either placement. Costs are fitted without the shape that is
    predicted; the largest lies far outside the rest."""
    steps = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    costs = fit_costs([step for step in steps if step["shape"] != shape])
    left_out = [step for step in steps if step["shape"] == shape]
    prompts, tokens = map(int, shape.split("x"))
    work = Workload(
        costs, Lengths(tokens, prompt=left_out[0]["rollout/prompt_length"]), samples=8 * prompts
    )
    measured = median(step["time/step"] for step in left_out)
    assert simulate(work, placement).step_seconds == pytest.approx(measured, rel=0.15)


# those of more GPUs take the longest, and are on demand
FULL = bool(os.environ.get("OPENRL_FULL_MATRIX"))
PUBLISHED = [case for case in cases() if FULL or not re.search(", (64|128) GPUs", case.name)]


@pytest.mark.full
@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: case.name)
def test_published_ratios(case):
    together, apart = case.run()
    assert together.step_seconds / apart.step_seconds == pytest.approx(
        case.published, rel=case.tolerance
    )


def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys):
    words = "--gpus 1 4 --samples 64 --mean_length 100 --cap 500 --steps_ahead 1 --oversample 1.5"
    out = str(tmp_path / "out.json")
    assert main([*words.split(), "--best_split", "--train_per_token", "1e-3", "--json", out]) == 0
    assert "asynchronous, 1 ahead, partial" in capsys.readouterr().out
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [(r["placement"]["gpus"], r["name"]) for r in rows] == [
        (1, "colocated"),
        (1, "colocated, partial, oversample 1.5"),
        (4, "colocated"),
        (4, "colocated, partial, oversample 1.5"),
        (4, "separate"),
        (4, "asynchronous, 1 ahead"),
        (4, "asynchronous, 1 ahead, partial"),
    ]
    assert all(math.isfinite(r["step_seconds"]) and 0 <= r["rollout_idle"] < 1 for r in rows)
