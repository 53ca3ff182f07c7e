"""Judges that compare, asked over a real HTTP server whose preferences are known."""

import asyncio
import json
import math
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations
from statistics import mean

import pytest

from openrl.config.groups.reward import RewardFlags
from openrl.config.reward_plan import reward_plan
from openrl.errors import BadRow, UserError
from openrl.extension_points import verifiers
from openrl.metrics import to_floats
from openrl.rewards.build import RewardSetup, build_reward, check_labels
from openrl.rewards.verifiers.base import Answer, Unavailable, describe, read_options
from openrl.rewards.verifiers.comparisons import bradley_terry, pairs_of, win_rates
from openrl.rewards.verifiers.judge_rubric import read_rubric
from openrl.trainer.rollout.metrics import rollout_metrics
from openrl.types import Prompt
from tests.judge_server import judge_server, send
from tests.tiny import tiny_tokenizer
from tests.unit.rewards.test_reward_function import group

# -- strengths from comparisons --------------------------------------------------------------------


def table_of(count, **shares):
    """The table with these shares, by "i_j"."""
    table = [[None] * count for _ in range(count)]
    for pair, share in shares.items():
        i, j = map(int, pair[1:].split("_"))
        table[i][j], table[j][i] = share, 1 - share
    return table


def test_win_rates_by_hand():
    assert win_rates(table_of(4, p0_1=1.0, p0_2=0.5, p1_2=0.0)) == [0.75, 0.0, 0.75, None]


def test_bradley_terry_by_hand():
    """Of two players one has won. By symmetry s1 = 1 / s0, and the likelihood of a win and of half
    a win and half a loss against strength 1, s / (s + 1/s) * sqrt(s) / (s + 1), has its maximum
    where 2 / (s^2 + 1) + (1 - s) / (2 * (s + 1)) = 0 of both players together."""
    first, second = bradley_terry(table_of(2, p0_1=1.0))
    s = first / (1 - first)
    assert first + second == pytest.approx(1)
    # d/dx of log p with s = e^x: 1 - sigma(2x) = sigma(x) - 1/2
    assert 1 / (s * s + 1) == pytest.approx(s / (s + 1) - 0.5, abs=1e-9)
    assert s == pytest.approx(2.0, abs=0.3) and bradley_terry(table_of(2, p0_1=0.5)) == [0.5, 0.5]
    assert bradley_terry(table_of(3, p0_1=1.0))[2] is None


def slow_bradley_terry(table):
    """Gradient ascent on the log-likelihood of log-strengths."""
    x = [0.0] * len(table)

    def sigma(v):
        return 1 / (1 + math.exp(-v))

    for _ in range(20_000):
        slope = [
            0.5
            - sigma(x[i])
            + sum(w - sigma(x[i] - x[j]) for j, w in enumerate(row) if w is not None)
            for i, row in enumerate(table)
        ]
        x = [a + 0.1 * b for a, b in zip(x, slope, strict=True)]
    return [sigma(a) for a in x]


def test_bradley_terry_against_a_slow_version():
    table = table_of(5, p0_1=1.0, p0_2=0.5, p1_2=0.75, p2_3=1.0, p3_4=0.0, p1_4=0.5)
    fast = bradley_terry(table)
    assert fast == pytest.approx(slow_bradley_terry(table), abs=1e-6)


def test_bradley_terry_weighs_a_win_by_whom_it_was_against():
    """0 beats the strong 1, 3 beats the weak 2; 1 beats 2. Win rates cannot tell 0 from 3."""
    table = table_of(4, p0_1=1.0, p2_3=0.0, p1_2=1.0)
    rates, strengths = win_rates(table), bradley_terry(table)
    assert rates[0] == rates[3] == 1 and strengths[0] > strengths[3] + 0.05


@pytest.mark.parametrize(("count", "opponents"), [(2, 1), (5, 2), (6, 3), (8, 4), (9, 3), (4, 9)])
def test_everyone_meets_enough_opponents(count, opponents):
    pairs = pairs_of(count, opponents)
    assert len({frozenset(pair) for pair in pairs}) == len(pairs)
    met = Counter(player for pair in pairs for player in pair)
    assert min(met.values()) >= min(opponents, count - 1) and len(met) == count
    assert pairs_of(count, 0) == list(combinations(range(count), 2))


# -- a server with preferences ---------------------------------------------------------------------


@dataclass
class Service:
    """A judge that replies what ``reply`` makes of the last message of a user."""

    url: str
    reply: object = None
    texts: list = field(default_factory=list)
    usage: dict = field(default_factory=lambda: {"total_tokens": 100})
    busy: int = 0
    most: int = 0  # requests at a time


@pytest.fixture
def service():
    lock = threading.Lock()

    def answer(request, body):
        messages = [m["content"] for m in body["messages"]]
        with lock:
            state.busy += 1
            state.most = max(state.most, state.busy)
            state.texts.append(messages)
        made = {"choices": [{"message": {"content": state.reply(messages)}}], "usage": state.usage}
        with lock:
            state.busy -= 1
        send(request, 200, json.dumps(made))

    with judge_server(answer) as url:
        state = Service(url)
        yield state


def quality(text):
    return float(re.search(r"quality (\d+)", text)[1])


def biased(bias):
    """Compare by quality, after ``bias`` was added to that of the answer shown first."""

    def reply(messages):
        first, second = re.findall(r"\[Answer [AB]\]\n(.*)", messages[-1])
        lead = quality(first) + bias - quality(second)
        return f"I read both.\n**Verdict:** {'tie' if lead == 0 else 'A' if lead > 0 else 'B'}"

    return reply


def biased_ranking(bias):
    """Rank by quality, after ``bias`` was taken off for each place further down the list."""

    def reply(messages):
        listed = re.findall(r"\[Answer (\d+)\]\n(.*)", messages[-1])
        scores = {n: quality(text) - bias * int(n) for n, text in listed}
        best_first = sorted(set(scores.values()), reverse=True)
        equals = [[n for n in scores if scores[n] == score] for score in best_first]
        return f"Ranking: {' > '.join(' = '.join(numbers) for numbers in equals)}"

    return reply


def answers(*qualities, label=None):
    """Different answers of these qualities."""
    return [Answer("Which?", f"answer {n} of quality {q}", label) for n, q in enumerate(qualities)]


def compare(service, rows, name="judge_pairs", **options):
    settings = {"url": service.url, "model": "m", "pause": 0} | options
    return verifiers[name].component(rows, read_options(name, settings))


def rewards(scores):
    return [score.reward for score in scores]


def parts(scores, name):
    return mean(score.parts[f"judge/{name}"] for score in scores)


def test_pairs_are_judged_in_both_orders(service):
    service.reply = biased(0)
    scores = compare(service, answers(1, 5, 3, 3))
    assert rewards(scores) == [0, 1, 0.5, 0.5] and {s.passed for s in scores} == {None}
    assert len(service.texts) == 12 and parts(scores, "calls") * 4 == 12
    assert parts(scores, "tokens") * 4 == 1200
    assert parts(scores, "order_disagreement") == 0 and parts(scores, "first_wins") == 0.5
    assert parts(scores, "ties") == pytest.approx(1 / 6)
    assert "Which?" in service.texts[0][0] and "[Reference]\nnone" in service.texts[0][0]


TRUE = (4, 1, 6, 3, 5, 2)
"""Qualities; an answer of quality q wins (q - 1) / 5 of its comparisons."""


@pytest.mark.parametrize(
    ("name", "judge", "bias", "of_places", "errors"),
    [
        ("judge_pairs", biased, 1.5, [0.4, 0.6, 0.4, 0.6, 0.4, 0.6], (0.8 / 6, 0.2 / 6)),
        ("judge_ranking", biased_ranking, 0.35, [1, 0.8, 0.6, 0.4, 0.2, 0], (0.8 / 6, 0.4 / 6)),
    ],
)
def test_what_the_swap_removes(service, name, judge, bias, of_places, errors):
    """A judge that always prefers what comes first gives the rewards of places; in both orders
    nothing remains of it, and the disagreement shows it. Of a weaker preference, the mean error of
    a reward shrinks from 0.13 to 0.03 in pairs and to 0.07 in rankings, by hand."""

    def error(scores):
        return mean(abs(r - (q - 1) / 5) for r, q in zip(rewards(scores), TRUE, strict=True))

    service.reply = judge(100)
    assert rewards(compare(service, answers(*TRUE), name, swap=False)) == pytest.approx(of_places)
    both = compare(service, answers(*TRUE), name)
    assert rewards(both) == [0.5] * 6
    assert parts(both, "order_disagreement") == 1 and parts(both, "first_wins") == 1
    service.reply = judge(bias)
    one, both = (compare(service, answers(*TRUE), name, swap=swap) for swap in (False, True))
    assert (error(one), error(both)) == pytest.approx(errors)
    order = sorted(range(6), key=lambda i: rewards(both)[i])
    assert [TRUE[i] for i in order] == [1, 2, 3, 4, 5, 6]
    assert 0 < parts(both, "order_disagreement") < 1


def test_a_ranking_needs_two_requests(service):
    service.reply = biased_ranking(0)
    scores = compare(service, answers(1, 5, 3, 3), "judge_ranking")
    assert rewards(scores) == [0, 1, 0.5, 0.5] and len(service.texts) == 2
    strengths = compare(service, answers(1, 5, 3, 3), "judge_ranking", scoring="bradley_terry")
    low, high, *equal = rewards(strengths)
    assert low < 0.5 < high and equal == pytest.approx([0.5, 0.5])


def test_equal_answers_tie_unasked(service):
    service.reply = biased(0)
    rows = [Answer("Which?", text) for text in ("quality 1", "quality 2", "quality 1", "quality 1")]
    assert rewards(compare(service, rows)) == pytest.approx([1 / 3, 1, 1 / 3, 1 / 3])
    assert len(service.texts) == 2
    assert rewards(compare(service, rows[:1] * 3, "judge_ranking")) == [0.5] * 3
    assert len(service.texts) == 2


def test_fewer_opponents_and_few_requests_at_a_time(service):
    service.reply = biased(0)
    scores = compare(service, answers(*range(8)), opponents=2, parallel=3, scoring="bradley_terry")
    assert len(service.texts) == 16 and service.most <= 3
    assert rewards(scores)[7] > 0.5 > rewards(scores)[0]


def test_an_answer_of_reference_takes_part(service):
    service.reply = biased(0)
    rows = answers(2, 6, 4, label="the reference, of quality 4")
    scores = compare(service, rows, reference=True)
    assert rewards(scores) == [0, 1, 0.5] and [s.passed for s in scores] == [0, 1, 0.5]
    assert [s.passed for s in compare(service, rows[:1], reference=True)] == [0]
    with pytest.raises(BadRow, match="the label must be text"):
        compare(service, answers(1, 2), reference=True)
    with pytest.raises(Unavailable, match="no sibling to compare with"):
        compare(service, answers(1))


def test_nonsense_is_asked_again_then_counts_for_nobody(service):
    """The judge says nothing about the answer of quality 9, and only the second time something
    about that of quality 3."""

    def reply(messages):
        if "quality 9" in messages[0] or ("quality 3" in messages[0] and len(messages) == 1):
            return "Both have their merits."
        return biased(0)(messages[:1])

    service.reply = reply
    scores = compare(service, answers(1, 9, 3, 2), repeats=1)
    assert rewards(scores)[0] == 0 and rewards(scores)[2:] == [1, 0.5]
    assert scores[1].failure and "no comparison has a verdict" in scores[1].failure
    assert math.isnan(scores[1].reward) and scores[1].passed is None
    assert parts(scores, "lost") * 4 == 6  # three pairs in two orders
    assert parts(scores, "unreadable") * 4 == 6 * 2 + 4
    assert parts(scores, "calls") * 4 == 6 * 2 + 4 * 2 + 2
    asked = next(texts for texts in service.texts if len(texts) == 3)
    assert asked[1] == "Both have their merits." and 'no line "Verdict: A"' in asked[2]


def test_equal_answers_of_which_nothing_was_said_have_no_reward(service):
    service.reply = lambda messages: "Hm."
    rows = [Answer("Which?", text, "b") for text in ("a", "a", "b")]
    for options in ({}, {"reference": True}):
        assert all(math.isnan(r) for r in rewards(compare(service, rows, repeats=0, **options)))


def test_the_reference_meets_everyone_also_where_an_answer_equals_it(service):
    service.reply = biased(0)
    texts = [f"quality {n}" for n in (5, 1, 2, 3, 4, 6, 7)]
    rows = [Answer("?", text, texts[0]) for text in texts]
    scores = compare(service, rows, reference=True, opponents=2)
    assert [score.passed for score in scores] == [0.5, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    "reply", ["Ranking: 1 > 2", "Ranking: 1 > 2 > 2", "Ranking: 2 > 3 > 4", ""]
)
def test_rankings_that_miss_an_answer_are_none(service, reply):
    service.reply = lambda messages: reply
    scores = compare(service, answers(1, 2, 3), "judge_ranking")
    assert all(math.isnan(reward) for reward in rewards(scores))
    assert parts(scores, "unreadable") * 3 == len(service.texts) == 6


def test_verdicts_are_kept(service, tmp_path):
    service.reply = biased(0)
    first = compare(service, answers(1, 2, 3), cache_dir=str(tmp_path))
    service.reply = lambda messages: "nothing"
    again = compare(service, answers(1, 2, 3), cache_dir=str(tmp_path))
    assert rewards(again) == rewards(first) and len(service.texts) == 6
    assert parts(again, "cached") * 3 == 6 and parts(again, "calls") == 0
    for file in tmp_path.rglob("*.json"):
        file.write_text("{")
    assert compare(service, answers(1, 2), cache_dir=str(tmp_path))[0].failure


def test_own_prompt_files(service, tmp_path):
    file = tmp_path / "pair.txt"
    file.write_text("{prompt}|[Answer A]\n{first}\n[Answer B]\n{second}\n{label}{other}")
    service.reply = biased(0)
    rows = answers(1, 2, label={"a": "{first}"})
    assert rewards(compare(service, rows, prompt_file=str(file))) == [0, 1]
    assert service.texts[0][0].startswith("Which?|[Answer A]\nanswer")
    assert service.texts[0][0].endswith('{"a": "{first}"}{other}')
    file = tmp_path / "incomplete.txt"
    file.write_text("{prompt} {first}")
    with pytest.raises(UserError, match=r"there is no \{second\}"):
        compare(service, rows, prompt_file=str(file))


# -- rubrics ---------------------------------------------------------------------------------------

RUBRIC = [
    {"criterion": "It says why.", "weight": 3},
    {"criterion": "It gives an example.", "weight": 1},
    {"criterion": "It is rude.", "weight": -2},
]


def by_rubric(service, answer, **options):
    return compare(service, answer, "judge_rubric", **options)


@pytest.mark.parametrize(
    ("said", "reward"),
    [("1: yes\n2: no\n3: no", 0.75), ("1: yes\n2: yes\n3: yes", 0.5), ("3. Yes\n2. no\n1. No", 0)],
)
def test_a_rubric_by_hand(service, said, reward):
    service.reply = lambda messages: f"1. It does: fine.\n\n{said}"
    score = by_rubric(service, Answer("Why?", "Because.", RUBRIC), pass_at=0.7)
    assert (score.reward, score.passed) == (reward, float(reward >= 0.7))
    assert "1. It says why.\n2. It gives an example.\n3. It is rude." in service.texts[0][0]
    assert score.parts["judge/calls"] == 1


@pytest.mark.parametrize(("usage", "tokens"), [({"total_tokens": 7}, 7), ({}, None), (None, None)])
def test_tokens_that_the_service_does_not_count_are_no_metric(service, usage, tokens):
    service.usage, service.reply = usage, lambda messages: "1: yes\n2: no\n3: no"
    score = by_rubric(service, Answer("Why?", "Because.", RUBRIC), pass_at=0.7)
    assert score.parts.get("judge/tokens") == tokens


def test_a_rubric_in_a_column_and_a_reference(service):
    service.reply = lambda messages: "1: yes"
    row = Answer("Why?", "Because.", "So.", meta={"rubric": json.dumps({"Is it clear?": 2})})
    assert by_rubric(service, row, rubric_key="rubric").reward == 1
    assert "[Reference]\nSo." in service.texts[0][0]
    with pytest.raises(BadRow, match="list of criteria, it is None"):
        by_rubric(service, Answer("Why?", "x", "So."), rubric_key="rubric")


def test_a_criterion_left_out_is_asked_for_again_then_no_verdict(service):
    service.reply = lambda messages: "1: yes\n3: no"
    with pytest.raises(Unavailable, match='no line "2: yes"') as caught:
        by_rubric(service, Answer("Why?", "Because.", RUBRIC))
    assert caught.value.parts["judge/unreadable"] == len(service.texts) == 3
    assert by_rubric(service, Answer("Why?", " ", RUBRIC)).reward == 0 and len(service.texts) == 3


@pytest.mark.parametrize(
    "rubric",
    [None, [], "x", [{"weight": 1}], ["", "b"], {"a": "b"}, {"a": -1}, [["a"]], {"a": math.nan}],
)
def test_rubrics_of_no_use(rubric):
    with pytest.raises(BadRow):
        read_rubric(rubric)


# -- in a run --------------------------------------------------------------------------------------


def test_a_group_in_the_processes_of_a_run(service):
    """One call scores all siblings. What was asked is counted also where the judge gave nothing."""
    service.reply = lambda messages: (
        "?" if "7" in messages[0].split("[Answer A]")[1] else biased_by_number(messages)
    )
    kwargs = {"judge_pairs": {"url": service.url, "model": "m", "pause": 0, "repeats": 0}}
    flags = RewardFlags(
        reward_funcs=("judge_pairs", "format"),
        reward_func_kwargs=kwargs,
        reward_weights=(2.0, 0.0),
    )
    plan = reward_plan(flags)
    reward = build_reward(RewardSetup(flags, plan), tiny_tokenizer())
    made = group("5", "7", "3", "5")

    async def run():
        try:
            return await reward.score(made)
        finally:
            await reward.close()

    scores = asyncio.run(run())
    assert [s.reward for s in scores if not s.dropped] == [1.5, 0.0, 1.5]
    assert scores[1].dropped and "judge_pairs: Unavailable" in scores[1].failure
    for trajectory, score in zip(made.trajectories, scores, strict=True):
        trajectory.score = score
    metrics = to_floats(rollout_metrics([made]))
    assert metrics["reward/failures"] == 1 and metrics["reward/judge_pairs"] == 0.5
    # three texts: 6 requests, of which the 4 with a 7 are lost; asked again for the failed one
    assert metrics["reward/judge_pairs/judge/lost"] == 1
    assert metrics["reward/judge_pairs/judge/calls"] == 1.5


def biased_by_number(messages):
    first, second = re.findall(r"\[Answer [AB]\]\n(\d)", messages[-1])
    return f"Verdict: {'A' if first > second else 'B'}"


def test_rubrics_are_checked_before_the_start():
    kwargs = {"url": "http://127.0.0.1:9", "model": "m", "rubric_key": "rubric"}
    flags = RewardFlags(reward_funcs=("judge_rubric",), reward_func_kwargs={"judge_rubric": kwargs})
    rows = [Prompt(f"train:{n}", [5], "1", meta={"rubric": {"a": 1}}) for n in range(3)]
    check_labels(flags, reward_plan(flags), rows, ())
    rows += [Prompt(f"train:{n}", [5], "1") for n in range(3, 6)]
    with pytest.raises(UserError, match=r"judge_rubric cannot use 3 of 6 rows, e\.g\. of train:3"):
        check_labels(flags, reward_plan(flags), rows, ())


@pytest.mark.parametrize("name", ["judge_pairs", "judge_ranking", "judge_rubric"])
def test_the_docstrings_say_what_the_page_shows(name):
    assert describe(verifiers[name].component).reward == "[0, 1]"
