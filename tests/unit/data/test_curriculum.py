"""Which prompts a curriculum draws, by what it was told."""

import json
import random
from collections import Counter
from itertools import pairwise
from statistics import mean

import pytest

from openrl.config.curriculum_mix import read_mix, weights_at
from openrl.config.groups.curriculum import CurriculumFlags
from openrl.data.curriculum import Curriculum, check_mix
from openrl.data.order import SeededStream
from openrl.errors import UserError
from openrl.types import FinishReason, Prompt, PromptGroup, Score, Segment, Trajectory


def prompts(count, source="default"):
    return [Prompt(f"{source}:{n}", [n], "", source=source) for n in range(count)]


def curriculum(items, mix=None, seed=0, **flags):
    band = flags.pop("band", None)
    given = {f"curriculum_{name}": value for name, value in flags.items()}
    return Curriculum(items, CurriculumFlags(curriculum_band=band, **given), mix, seed)


def group(prompt, *verdicts):
    played = [
        Trajectory(prompt, [Segment()], FinishReason.STOP, score=Score(0.0, verdict))
        for verdict in verdicts
    ]
    return PromptGroup(prompt, played)


def ids(drawn):
    return [prompt.id for prompt in drawn]


def test_a_single_source_has_the_plain_order():
    rows = prompts(5)
    assert curriculum(rows, {1: {"default": 2.0}}).take(12) == SeededStream(rows, 0).take(12)


def posterior_in_band(low, high, solved, failed, n=200_000):
    """P(low <= p <= high) of Beta(1 + solved, 1 + failed), by adding up the density."""
    xs = [(k + 0.5) / n for k in range(n)]
    density = [x**solved * (1 - x) ** failed for x in xs]
    return sum(d for x, d in zip(xs, density, strict=True) if low <= x <= high) / sum(density)


@pytest.mark.parametrize("verdicts", [(), (0,) * 8, (1, 0, 0, 0), (1,) * 4, (0.5, 0.5)])
def test_a_prompt_is_played_with_the_probability_that_its_rate_is_in_the_band(verdicts):
    """Many prompts with equal verdicts: the share that one pass plays, within four sigma."""
    rows = prompts(4000)
    drawn = curriculum(rows, band=(0.2, 0.8), half_life=0.0)
    drawn.learn([group(prompt, *verdicts) for prompt in rows if verdicts])
    order = drawn._orders[""]
    taken = 0
    while order.epoch == 0:
        drawn.take(1)
        taken += order.epoch == 0
    expected = posterior_in_band(0.2, 0.8, sum(verdicts), len(verdicts) - sum(verdicts))
    assert taken / 4000 == pytest.approx(expected, abs=4 * (0.25 / 4000) ** 0.5)
    assert drawn.counts()["curriculum/passed_over"] == pytest.approx(4000 - taken, abs=60)


def test_verdicts_fade_so_hopeless_prompts_return():
    """After three half-lives eight failures count as one: P(p >= 0.2) is then 0.8^2, not 0.8^9."""
    rows = prompts(2000)
    drawn = curriculum(rows, band=(0.2, 1.0), half_life=10.0)
    drawn.learn([group(prompt, *[0] * 8) for prompt in rows])

    def share():
        before = drawn.state()
        drawn.counts()
        drawn.take(200)
        share = 200 / (200 + drawn.counts()["curriculum/passed_over"])
        drawn.load_state(before)
        return share

    assert share() == pytest.approx(0.8**9, abs=0.03)
    for _ in range(30):
        drawn.learn([])
    assert share() == pytest.approx(0.8**2, abs=0.1)


def test_it_waits_before_a_prompt_is_played_again_unless_none_is_left():
    drawn = curriculum(prompts(6), wait=3)
    steps = []
    for _ in range(6):
        steps.append(ids(drawn.take(2)))
        drawn.learn([])
    for first, second in pairwise(steps):
        assert not {*first} & {*second}
    assert drawn.counts()["curriculum/forced"] == 0
    drawn = curriculum(prompts(3), wait=5)
    assert len({*ids(drawn.take(3))}) == 3 and len(drawn.take(2)) == 2
    assert drawn.counts()["curriculum/forced"] == 2


def test_weights_between_listed_steps_lie_on_a_line():
    mix = {10: {"a": 1.0}, 20: {"a": 0.5, "b": 0.5}, 30: {"b": 1.0}}
    assert weights_at(mix, 1) == weights_at(mix, 10) == {"a": 1, "b": 0}
    assert weights_at(mix, 15) == {"a": 0.75, "b": 0.25}
    assert weights_at(mix, 20) == {"a": 0.5, "b": 0.5}
    assert weights_at(mix, 28) == pytest.approx({"a": 0.1, "b": 0.9})
    assert weights_at(mix, 99) == {"a": 0, "b": 1}


def test_stages_and_mixtures():
    rows = [*prompts(50, "a"), *prompts(10, "b")]
    drawn = curriculum(rows, {2: {"a": 1.0}, 4: {"b": 1.0}})
    found = []
    for _ in range(5):
        found.append(Counter(prompt.source for prompt in drawn.take(400)))
        drawn.learn([])
    assert found[0] == found[1] == {"a": 400} and found[3] == found[4] == {"b": 400}
    assert found[2]["a"] == pytest.approx(200, abs=40)  # four sigma
    assert drawn.counts()["curriculum/b/drawn"] == 800 + found[2]["b"]


def play(drawn, rates, steps, seed=1):
    """Play steps of four prompts with answers that are right at the rates of their prompts."""
    seen = []
    for _ in range(steps):
        batch = drawn.take(4)
        seen += ids(batch)
        chance = random.Random(f"{seed}/{drawn.step}")
        drawn.learn(
            group(p, *[float(chance.random() < rates[p.id]) for _ in range(4)]) for p in batch
        )
        drawn.counts()
    return seen


def test_a_resumed_run_draws_the_prompts_of_the_uninterrupted_one():
    rows = [*prompts(30, "a"), *prompts(30, "b")]
    rates = {prompt.id: (n % 5) / 4 for n, prompt in enumerate(rows)}
    mix = {1: {"a": 1.0, "b": 0.5}, 20: {"b": 1.0}}
    flags = {"band": (0.2, 0.8), "half_life": 5.0, "wait": 2}
    whole = curriculum(rows, mix, **flags)
    expected = play(whole, rates, 30)
    first = curriculum(rows, mix, **flags)
    drawn = play(first, rates, 13)
    first.take(3)  # on their way when the checkpoint is written
    state = json.loads(json.dumps(first.state()))
    resumed = curriculum(rows, mix, **flags)
    resumed.load_state(state)
    assert resumed.take(5) == first.take(5)
    again = curriculum(rows, mix, **flags)
    play(again, rates, 13)
    resumed.load_state(json.loads(json.dumps(again.state())))
    assert drawn + play(resumed, rates, 17) == expected
    assert resumed.state() == whole.state()


def test_a_state_of_another_run_is_refused():
    plain, drawn = SeededStream(prompts(3), 0), curriculum(prompts(3), wait=1)
    with pytest.raises(UserError, match="in another way"):
        drawn.load_state(plain.state())
    with pytest.raises(UserError, match="in another way"):
        plain.load_state(drawn.state())
    mixed = curriculum(prompts(3), {1: {"default": 1.0}})
    with pytest.raises(UserError, match="other data sources"):
        drawn.load_state(mixed.state())
    with pytest.raises(UserError, match="size 3, this run 4"):
        curriculum(prompts(4), wait=1).load_state(drawn.state())


def test_rates_by_source_and_difficulty():
    rows = [*prompts(3, "a"), *prompts(2, "b")]
    drawn = curriculum(rows, band=(0.3, 0.7), half_life=0.0)
    a0, a1, _, b0, _ = rows
    drawn.learn([group(a0, 0, 0, 0, 0), group(a1, 1, 0), group(b0, 1, 1, 1, 1)])
    metrics = drawn.counts()
    assert metrics["curriculum/a/solve_rate"] == pytest.approx(mean([1 / 6, 1 / 2]))
    assert metrics["curriculum/b/solve_rate"] == pytest.approx(5 / 6)
    shares = {name: metrics[f"curriculum/{name}_share"] for name in ("hard", "easy", "in_band")}
    assert shares == {"hard": 0.2, "easy": 0.2, "in_band": 0.2}
    assert metrics["curriculum/unknown_share"] == 0.4


def test_a_band_without_verdicts_stops_the_run():
    rows = prompts(3)
    drawn = curriculum(rows, band=(0.2, 0.8))
    with pytest.raises(UserError, match="no answer so far has a verdict"):
        drawn.learn([group(rows[0], None, None)])
    drawn = curriculum(rows, band=(0.2, 0.8))
    drawn.learn([group(rows[0], None, 1.0)])
    drawn.learn([group(rows[1], None)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no steps"),
        ("0: {a: 1}", "0 is no step"),
        ("x: {a: 1}", "is no step"),
        ("1: a", "has no weights"),
        ("1: {a: -1}", "has no weights"),
        ("1: {a: .inf}", "has no weights"),
        ("1: {a: 0}", "all weights are 0"),
        ("1: {a: 1, c: 1}", "no row is of the data source c"),
        ("1: {a: 1}", "the data source b would never be played"),
        ("1: {a: [", "cannot read"),
    ],
)
def test_mixes_of_no_use(tmp_path, text, message):
    path = tmp_path / "mix.yaml"
    path.write_text(text)
    flags = CurriculumFlags(curriculum_mix=str(path))
    with pytest.raises(UserError, match=message):
        check_mix(flags, [*prompts(1, "a"), *prompts(1, "b")])


def test_a_mix_may_be_json(tmp_path):
    path = tmp_path / "mix.json"
    path.write_text('{"1": {"a": 1}, "20": {"b": 2}}')
    assert read_mix(str(path)) == {1: {"a": 1.0}, 20: {"b": 2.0}}
    check_mix(CurriculumFlags(curriculum_mix=str(path)), [*prompts(1, "a"), *prompts(1, "b")])
