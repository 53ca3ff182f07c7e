"""The placement simulator against closed forms, a slow decoder, brute force, measured steps and
published ratios."""

import asyncio
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from benchmarks.placement_cases import cases
from benchmarks.placement_model import (
    Costs,
    Fleet,
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

COSTS = Costs(0.01, 0.2e-3, 0.3e-3, 0.1e-3, sync=3.0, switch=5.0)
EQUAL = Workload(COSTS, Lengths(500, prompt=100), samples=256)  # every answer has 500 tokens

MEASURED = Path(__file__).parents[2] / "benchmarks/measured/in_process.jsonl"

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


def test_asynchronous_is_the_slower_side():
    """Training's: the rollout is hidden. Rollouts': two of them share the engines, which do not
    decode in a sync."""
    by_training = simulate(EQUAL, Placement(8, rollout_gpus=4, max_lag=1))
    assert decoding(4) < training(4) and by_training.step_seconds == pytest.approx(training(4) + 3)
    assert (by_training.age_mean, by_training.age_max) == (1, 1)
    slow = replace(EQUAL, costs=replace(COSTS, decode_base=0.0, decode_per_sequence=2e-3))
    by_rollouts = simulate(slow, Placement(8, rollout_gpus=1, max_lag=3), steps=40)
    assert by_rollouts.step_seconds == pytest.approx(256 * 500 * 2e-3 + 3, rel=2e-3)
    assert by_rollouts.rollout_idle == pytest.approx(3 / by_rollouts.step_seconds, abs=3e-3)


def test_engines_of_several_gpus():
    found = simulate(replace(EQUAL, engine_gpus=4), Placement(8))
    assert found.step_seconds == pytest.approx(decoding(2) + training(8) + 8)


def test_more_gpus_than_the_tail_can_use():
    """From 16 to 1,024 GPUs the longest answer sets the time of a rollout."""
    work = Workload(COSTS, Lengths(500, 1.0, 4000), samples=64)
    seconds = [simulate(work, Placement(gpus)).step_seconds for gpus in (16, 64, 1024)]
    longest = np.mean([work.lengths.draw(64, step).max() for step in range(5, 17)])
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

    async def scenario():
        fleet = Fleet(1, replace(COSTS, decode_base=0.01, decode_per_sequence=0.002))
        ends = {}

        async def call(start, number, lengths):
            await asyncio.sleep(start)
            await fleet.generate(np.array(lengths, dtype=float))
            ends[number] = asyncio.get_running_loop().time()

        await asyncio.gather(*(call(*arrival) for arrival in arrivals))
        return ends

    expected = slow_ends(arrivals, 0.01, 0.002)
    found = run_virtually(scenario())
    assert found.keys() == expected.keys()
    for number, end in expected.items():
        assert found[number] == pytest.approx(end, abs=1e-6)


# -- ages, splits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_lag", [0, 1, 2, 4])
def test_no_answer_is_older_than_the_lag(max_lag):
    work = Workload(COSTS, Lengths(500, 1.2, 8000), samples=64)
    found = simulate(work, Placement(8, 4, max_lag), steps=20)
    assert found.age_max == max_lag and found.age_mean <= max_lag
    if max_lag == 0:
        assert found.step_seconds == simulate(work, Placement(8, 4), steps=20).step_seconds


@pytest.mark.parametrize("seed", range(25))
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
    work = Workload(costs, lengths, samples=draw.choice([64, 256]), engine_gpus=draw.choice([1, 2]))
    gpus, lag = draw.choice([4, 16, 24]), draw.choice([None, 1, 2])
    steps = 6
    brute = min(
        simulate(work, Placement(gpus, split, lag), steps).step_seconds
        for split in splits(work, gpus)
    )
    assert brute <= best_split(work, gpus, lag, steps).step_seconds <= 1.05 * brute


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
@pytest.mark.parametrize("shape", ["16x48", "32x32", "64x16", "64x40"])
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


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_published_ratios(case):
    together, apart = case.run()
    assert together.step_seconds / apart.step_seconds == pytest.approx(
        case.published, rel=case.tolerance
    )


def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys):
    words = [
        "--gpus",
        "1",
        "4",
        "--samples",
        "64",
        "--mean_length",
        "100",
        "--cap",
        "500",
        "--lag",
        "1",
        "--best_split",
    ]
    assert main([*words, "--train_per_token", "1e-3", "--json", str(tmp_path / "out.json")]) == 0
    assert "asynchronous, lag 1" in capsys.readouterr().out
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [(r["placement"]["gpus"], r["name"]) for r in rows] == [
        (1, "colocated"), (4, "colocated"), (4, "separate"), (4, "asynchronous, lag 1")
    ]  # fmt: skip
    assert all(math.isfinite(r["step_seconds"]) and 0 <= r["rollout_idle"] < 1 for r in rows)
