"""Several sources as one reward: names, weights, routes, parts, verdicts; what failed rows do to a
step."""

import asyncio
import json
import math
import socket
from pathlib import Path

import pytest
import torch

from openrl.algorithms.collate import collate
from openrl.algorithms.filtering import group_mean, keep
from openrl.config.groups.reward import RewardFlags
from openrl.config.reward_plan import RewardPlan, reward_plan, source_kwargs
from openrl.errors import UserError
from openrl.metrics import to_floats
from openrl.rewards.build import RewardSetup, build_reward, check_prompts, check_reward_sources
from openrl.rewards.combined import CombinedReward, RewardCombiner, read_rows
from openrl.trainer.rollout.evaluation import eval_metrics
from openrl.trainer.rollout.metrics import (
    FailureMonitor,
    UnplayedMonitor,
    failure_notes,
    rollout_metrics,
)
from openrl.trainer.rollout.reward_models import RewardModels
from openrl.types import FinishReason, Prompt, PromptGroup, Score
from tests.tiny import tiny_tokenizer
from tests.unit.rewards.test_reward_function import group, score, values

# -- names, weights, routes ------------------------------------------------------------------------


def plan_of(models=None, **flags) -> RewardPlan:
    return reward_plan(RewardFlags(**flags), models)


def test_sources_in_the_order_of_their_weights():
    plan = plan_of(
        remote_rm_url="http://a/x, lib/math.py:grade,style.py,http://b/y",
        reward_funcs=("exact", "format"),
        reward_weights=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0),
        models="me/rm, ./other",
    )
    assert [(s.kind, s.name) for s in plan.sources] == [
        ("verifier", "exact"), ("verifier", "format"), ("file", "math"), ("file", "style"), ("http", "http"),
        ("model", "rm"), ("model", "other"),
    ]  # fmt: skip
    assert plan.of("anything") == dict(
        zip([s.name for s in plan.sources], (1, 2, 3, 4, 5, 6, 7), strict=True)
    )
    math_file, http = plan.sources[2], plan.sources[4]
    assert math_file.file[0].name == "math.py" and math_file.file[1] == "grade"
    assert plan.sources[3].file[1] is None
    assert http.urls == ["http://a/x", "http://b/y"]


def test_watched_sources_are_no_part_of_the_reward():
    flags = RewardFlags(reward_funcs=("exact",), reward_weights=(2.0,))
    plan = reward_plan(flags, watched=("numeric", "lib/mine.py:judge"))
    assert [(s.kind, s.name) for s in plan.watched] == [("verifier", "numeric"), ("file", "mine")]
    assert [s.name for s in plan.sources] == ["exact"] and plan.of("any") == {"exact": 2.0}
    assert [s.name for s in plan.all_sources] == ["exact", "numeric", "mine"]
    with pytest.raises(UserError, match="--watch_funcs: exact is trained on"):
        reward_plan(flags, watched=("exact",))
    with pytest.raises(UserError, match="numeric is given twice"):
        reward_plan(flags, watched=("numeric", "numeric"))


def test_what_watched_sources_say_becomes_metrics():
    """Their verdict, also where the source that is trained on says something else, and a failure."""

    class Watched:
        async def score(self, rows):
            return [Score(5.0, 0.25), Score(0.5), Score.failed("no label")]

    plan = reward_plan(RewardFlags(reward_funcs=("exact",)), watched=("numeric",))
    reward = CombinedReward(
        RewardCombiner(plan, "drop"),
        {"numeric": Watched()},
        tiny_tokenizer(),
        skip_special_tokens=False,
        executor=None,
    )
    assert asyncio.run(reward.watch(group("1", "2", "3"))) == [
        {"watch/numeric/failed": 0.0, "watch/numeric": 0.25},
        {"watch/numeric/failed": 0.0, "watch/numeric": 0.5},
        {"watch/numeric/failed": 1.0},
    ]


def test_a_folder_of_a_reward_file_may_hold_the_ending_in_its_name():
    (source,) = plan_of(remote_rm_url="/me/.pyenv/my.pyproject/math.py:grade").sources
    assert source.file == (Path("/me/.pyenv/my.pyproject/math.py"), "grade")
    assert source.name == "math"


def test_rows_without_the_label_that_a_verifier_compares_with(tmp_path):
    def rows(**labels):
        return [
            Prompt(f"train:{id}", [5], "1", label, source=id[0]) for id, label in labels.items()
        ]

    def check(reward_funcs, prompts, **flags):
        given = RewardFlags(reward_funcs=reward_funcs, **flags)
        check_prompts(given, reward_plan(given), prompts)

    check(("format", "judge"), rows(a0="", a1=None))  # they can do without
    pattern = {"regex": {"pattern": "[0-9]"}, "format": {}}
    check(("format", "regex"), rows(a0="", a1=None), reward_func_kwargs=pattern)
    with pytest.raises(UserError, match="--reward_funcs regex needs labels"):
        check(("format", "regex"), rows(a0="", a1=None))
    check(("number",), rows(a0=0, a1="1", a2=False))
    with pytest.raises(
        UserError,
        match=r"--reward_funcs number needs labels.* 2 of 2 rows have none \(train:a0, train:a1\)",
    ) as e:
        check(("format", "number"), rows(a0="", a1=None))
    assert "--label_key COLUMN" in str(e.value)
    with pytest.raises(UserError, match=r"1 of 2 rows have none \(train:a1\)"):
        check(("exact",), rows(a0="x", a1=""))
    (tmp_path / "routes.yaml").write_text("a: {number: 1}\nb: {format: 1}\n")
    routes = {"reward_routing": str(tmp_path / "routes.yaml")}
    check(("number", "format"), rows(a0="1", b0=""), **routes)
    with pytest.raises(UserError, match="1 of 2 rows have none"):
        check(("number", "format"), rows(a0="", b0=""), **routes)


def test_equal_names_become_longer():
    plan = plan_of(remote_rm_url="a/r.py:f,a/r.py:g,b/r.py", models="x/m,y/m")
    assert [s.name for s in plan.sources] == ["a.r.f", "a.r.g", "b.r.py", "x.m", "y.m"]


def test_routes(tmp_path):
    file = tmp_path / "routes.yaml"
    file.write_text("gsm8k: {exact: 1, format: 0.1}\ncode: {lib/run.py: 2}\n")
    plan = plan_of(
        reward_funcs=("exact", "format"), remote_rm_url="lib/run.py", reward_routing=str(file)
    )
    assert plan.of("gsm8k") == {"exact": 1.0, "format": 0.1}
    assert plan.of("code") == {"run": 2.0}
    plan.check_routes(["code", "gsm8k", "code"])
    with pytest.raises(
        UserError, match="no line for the data sources chess, poetry; it routes gsm8k, code"
    ):
        plan.check_routes(["code", "poetry", "chess"])
    plan_of(reward_funcs=("exact",)).check_routes(["whatever"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1, 2]", "holds no routes"),
        ("a: exact", "a has no {source: weight} table"),
        ("a: {}", "a has no {source: weight} table"),
        ("a: {exat: 1}", "a: there is no reward source 'exat'"),
        ("a: {exact: much}", 'the weight "much" is not a finite number'),
        ("a: {exact: .inf}", "the weight Infinity is not a finite number"),
        ("a: {exact: .nan}", "the weight NaN is not a finite number"),
        ("a: {exact: true}", "the weight true is not a finite number"),
        ("a: {exact: 1}", "no data source is routed to format"),
        ("a: {", "cannot read"),
    ],
)
def test_routes_with_something_unknown(tmp_path, text, problem):
    (tmp_path / "routes.json").write_text(text)
    with pytest.raises(UserError) as error:
        plan_of(reward_funcs=("exact", "format"), reward_routing=str(tmp_path / "routes.json"))
    assert problem in error.value.message


def test_keyword_arguments_by_source_or_for_all():
    def kwargs(given, **flags):
        made = RewardFlags(reward_func_kwargs=given, **flags)
        return source_kwargs(made, reward_plan(made).sources)

    assert kwargs({"a": 1}, remote_rm_url="r.py,s.py") == {"r": {"a": 1}, "s": {"a": 1}}
    assert kwargs({"r": {"a": 1}}, remote_rm_url="r.py,s.py") == {"r": {"a": 1}, "s": {}}
    assert kwargs({}, remote_rm_url="r.py,http://x/y") == {"r": {}}
    for wrong in ({"r": {}, "x": {}}, {"r": 1}):
        with pytest.raises(UserError, match="--reward_func_kwargs"):
            kwargs(wrong, remote_rm_url="r.py")


# -- the weighted sum ------------------------------------------------------------------------------


def weigh(results, policy="drop", **weights):
    plan = plan_of(reward_funcs=tuple(weights), reward_weights=tuple(weights.values()))
    combiner, row = RewardCombiner(plan, policy), group("2").trajectories[0]
    return combiner.apply_policy(row, combiner.weighted_sum(row.prompt.source, results))


def test_the_weighted_sum_its_parts_and_its_verdict():
    results = {"a": Score(2.0, 1.0, {"x": 5.0}), "b": Score(1.0, 0.0), "c": Score(-1.0, attempts=2)}
    assert weigh(results, a=0.5, b=-1.5, c=3.0) == Score(
        0.5 * 2 - 1.5 - 3,
        passed=(0.5 * 1 + 1.5 * 0) / 2,  # of those that judge, by the size of their weights
        parts={"a": 2.0, "a/x": 5.0, "b": 1.0, "c": -1.0},
        attempts=2,
    )


def test_a_sum_beyond_all_numbers_fails_its_row():
    assert "not finite" in weigh({"a": Score(1e308)}, a=10.0).failure


def test_one_source_keeps_its_parts():
    assert weigh({"a": Score(2.0, 1.0, {"x": 5.0})}, a=0.5) == Score(1.0, 1.0, {"x": 5.0})


@pytest.mark.parametrize(
    ("policy", "reward", "passed"), [("zero", 0.0, 0.0), ("drop", math.nan, None)]
)
def test_one_source_that_fails_fails_the_row(policy, reward, passed):
    result = weigh({"a": Score(2.0), "b": Score.failed("it hung", 2)}, policy, a=1.0, b=1.0)
    assert (result.failure, result.attempts, result.passed, result.parts) == (
        "b: it hung",
        2,
        passed,
        {"a": 2.0},  # what the other source said is still measured
    )
    assert result.reward == pytest.approx(reward, nan_ok=True)


def test_files_verifiers_and_routes_together(tmp_path):
    """Two files and a verifier in real processes; each data source has its own mixture."""
    (tmp_path / "length.py").write_text(
        "def reward_func(queries, responses):\n    return [len(r) for r in responses]\n"
    )
    (tmp_path / "digit.py").write_text(
        "def compute_score(solution_str, ground_truth, bonus=0):\n"
        "    return {'score': solution_str.isdigit() + bonus, 'acc': solution_str.isdigit()}\n"
    )
    (tmp_path / "routes.json").write_text(
        json.dumps({"mixed": {"length": 0.5, "digit": 1, "exact": 10}, "plain": {"length": 1}})
    )
    mixed, plain = score(
        f"{tmp_path}/length.py,{tmp_path}/digit.py",
        group("3*8", "24", label="3*8", source="mixed"),
        group("3*8", source="plain"),
        reward_funcs=("exact",),
        reward_func_kwargs={"digit": {"bonus": 0.25}},
        reward_routing=str(tmp_path / "routes.json"),
    )
    assert values(mixed) == [0.5 * 3 + 0.25 + 10, 0.5 * 2 + 1.25]
    assert mixed[0].parts["exact"] == 1.0 and mixed[0].parts["digit/acc"] == 0.0
    assert mixed[0].passed == (1 * 0 + 10 * 1) / 11
    assert plain == [Score(3.0, None, {"length": 3.0})]


def test_a_verifier_that_cannot_judge_a_row_fails_that_row():
    flags = RewardFlags(reward_funcs=("countdown",), reward_num_workers=1)

    async def run():
        reward = build_reward(RewardSetup(flags, reward_plan(flags)), tiny_tokenizer())
        try:
            return await reward.score(group("3*8", label="no numbers"))
        finally:
            await reward.close()

    (result,) = asyncio.run(run())
    assert result.dropped and result.failure.startswith("countdown: BadRow: the label ")


def test_a_server_that_is_not_there_is_said_before_anything_starts():
    """One of several is enough; the others may come later."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        here, gone = (f"http://127.0.0.1:{s.getsockname()[1]}/x" for s in (listener, closed))
        for urls in (here, f"{gone},{here}"):
            flags = RewardFlags(remote_rm_url=urls)
            check_reward_sources(flags, reward_plan(flags).sources, ())
        flags = RewardFlags(remote_rm_url=gone)
        with pytest.raises(UserError, match=f"no server answers: {gone}: .*refused"):
            check_reward_sources(flags, reward_plan(flags).sources, ())


def test_verifiers_are_checked_before_anything_starts():
    flags = RewardFlags(
        reward_funcs=("countdown",), reward_func_kwargs={"countdown": {"colour": 1}}
    )
    with pytest.raises(
        UserError, match=r"--reward_funcs: countdown: .*there is no option 'colour'"
    ):
        check_reward_sources(flags, reward_plan(flags).sources, ())


# -- reward models complete the scores -------------------------------------------------------------


def test_models_are_added_to_what_the_engines_side_gave(tmp_path):
    """Two models, one for one data source only; a failed row stays failed, a greedy answer is
    scored too."""
    (tmp_path / "routes.yaml").write_text("a: {exact: 1, one: 2}\nb: {one: 1, two: 10}\n")
    plan = plan_of(
        reward_funcs=("exact",), reward_routing=str(tmp_path / "routes.yaml"), models="m/one,m/two"
    )
    first, second = group("1", "2", source="a"), group("3", source="b")
    first.greedy = group("4", source="a").trajectories[0]
    scores = [
        Score(0.5, 1.0, {"exact": 0.5}),
        Score(math.nan, failure="exact: it hung"),
        Score(0.25),
    ]
    for row, given in zip([*first.trajectories, first.greedy], scores, strict=True):
        row.score = given
    asked = []

    async def forward(groups, model):
        responses = [t.text for g in groups for t in g.trajectories]
        asked.append((model, responses))
        return torch.tensor([float(text) + 100 * model for text in responses])

    asyncio.run(RewardModels(RewardCombiner(plan, "drop"), forward).score([first, second]))
    assert asked == [(0, ["1", "4", "3"]), (1, ["3"])]
    assert first.trajectories[0].score == Score(0.5 + 2 * 1, 1.0, {"exact": 0.5, "one": 1.0})
    assert first.trajectories[1].score.failure == "exact: it hung"
    assert first.greedy_reward == 0.25 + 2 * 4
    assert second.trajectories[0].score == Score(3 + 10 * 103, None, {"one": 3.0, "two": 103.0})


def test_a_model_whose_output_is_not_finite_fails_the_row():
    rows = group("1", "2")

    async def forward(groups, model):
        return torch.tensor([1.0, math.inf])

    asyncio.run(RewardModels(RewardCombiner(plan_of(models="rm"), "zero"), forward).score([rows]))
    assert [t.score for t in rows.trajectories] == [
        Score(1.0),
        Score(0.0, 0.0, failure="rm: the model's output is inf"),
    ]


# -- what failed rows do to a step -----------------------------------------------------------------


def scored(*scores, greedy=None) -> PromptGroup:
    made = group(*["1"] * len(scores))
    for row, given in zip(made.trajectories, scores, strict=True):
        row.score = given
    if greedy:
        made.greedy = group("1").trajectories[0]
        made.greedy.score = greedy
    return made


DROPPED = Score(math.nan, failure="judge: it hung", attempts=2)
ZERO = Score(0.0, 0.0, failure="judge: it hung", attempts=2)


def test_a_dropped_row_leaves_the_loss_and_the_statistics_of_its_group():
    made = scored(Score(1.0, 1.0), DROPPED, Score(0.0, 0.0))
    batch = collate([made], pad_id=0)
    assert batch.valid.tolist() == [True, False, True]
    assert batch.rewards.tolist() == [1.0, 0.0, 0.0]
    assert made.rewards == [1.0, 0.0] and made.mean_pass == 0.5 and not made.is_flat
    assert group_mean(made) == 0.5 and keep(made, 0.0, 1.0)


def test_a_row_of_zero_stays():
    made = scored(Score(1.0, 1.0, {"format": 1.0}), ZERO)
    assert collate([made], pad_id=0).valid.tolist() == [True, True]
    assert made.rewards == [1.0, 0.0] and made.mean_pass == 0.5
    assert group_mean(made, "format") == 0.5  # it has no parts, and counts as 0


def test_filtering_looks_at_each_agent_of_an_episode():
    """Solvers that are all right and critics that are all wrong have nothing to learn."""
    made = scored(*[Score(1.0), Score(0.0)] * 2)
    for row, agent in zip(made.trajectories, ["solver", "critic"] * 2, strict=True):
        row.agent = agent
    assert not keep(made, 0.0, 1.0)
    made.trajectories[0].score = Score(0.0)
    assert keep(made, 0.0, 1.0)


def test_filtering_rejects_a_group_without_rewards():
    assert not keep(scored(DROPPED, DROPPED), -math.inf, math.inf)
    assert keep(scored(Score(0.5, 0.5), DROPPED), 0.0, 1.0)
    assert not keep(scored(Score(1.0, 1.0), DROPPED), 0.0, 1.0)


def test_a_group_whose_greedy_answer_failed_is_not_trained():
    made = scored(Score(1.0), Score(0.0), greedy=DROPPED)
    assert made.greedy_reward is None
    assert collate([made], pad_id=0).valid.tolist() == [False, False]
    assert to_floats(rollout_metrics([made]))["reward/failures"] == 2


def test_failures_are_counted():
    groups = [scored(Score(1.0, attempts=2), DROPPED), scored(Score(3.0), ZERO)]
    measured = to_floats(rollout_metrics(groups))
    assert measured["reward/failures"] == 2 and measured["reward/failure_rate"] == 0.5
    assert measured["reward/retried"] == 3
    assert measured["rollout/reward"] == pytest.approx(4 / 3)
    evaluated = to_floats(eval_metrics(groups))
    assert evaluated["eval/reward_failures"] == 2
    assert evaluated["eval/reward"] == pytest.approx(4 / 3)
    fine = to_floats(rollout_metrics([scored(Score(1.0))]))
    assert fine["reward/failures"] == 0 and fine["reward/failure_rate"] == 0


def test_the_first_failures_are_shown_with_their_rows():
    notes = failure_notes([scored(*[DROPPED] * 5), scored(Score(1.0))])
    assert len(notes) == 4 and notes[3] == "2 more rows without a reward"
    assert notes[0].splitlines()[:2] == ["no reward: judge: it hung", "  row       train:7"]


def test_too_many_failures_stop_the_run_as_soon_as_they_are_known():
    monitor = FailureMonitor(rows=10, most=0.2)
    monitor(scored(DROPPED, ZERO))
    monitor(scored(Score(1.0), Score(1.0)))
    with pytest.raises(UserError) as error:
        monitor(scored(DROPPED))
    assert (
        "3 of 10 rows have no reward, more than --max_reward_failure_rate 0.2 allows"
        in error.value.message
    )
    assert "judge: it hung" in error.value.message
    FailureMonitor(rows=1, most=1.0)(scored(DROPPED))


def test_prompts_that_cannot_be_played_stop_the_run_once_they_fill_a_batch():
    """A sound sample among them shows that some can be."""
    broken = scored(None)
    broken.trajectories[0].finish_reason = FinishReason.ENVIRONMENT_ERROR
    broken.trajectories[0].failure = "environment g, seed 5: no answer within 4 s"
    monitor = UnplayedMonitor(9)
    for played in (broken, broken, scored(Score(1.0)), *[broken] * 8):
        monitor(played)
    with pytest.raises(UserError) as error:
        monitor(broken)
    assert "no sample of 9 prompts in a row could be played to its end" in error.value.message
    assert "train:7 failed: environment g, seed 5: no answer" in error.value.message


def test_a_source_that_raises_ends_the_calls_of_the_others():
    """Nobody would read their scores."""
    ended = []

    class Broken:
        async def score(self, rows):
            await asyncio.sleep(0)
            raise UserError("the file does not load")

    class Slow:
        async def score(self, rows):
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("slow")

    async def ask():
        rows = read_rows(group("2"), tiny_tokenizer(), skip_special_tokens=False)
        combiner = RewardCombiner(plan_of(reward_funcs=("exact", "format")), "drop")
        with pytest.raises(UserError, match="the file does not load"):
            await combiner.ask({"exact": Broken(), "format": Slow()}, rows)
        return list(ended)

    assert asyncio.run(ask()) == ["slow"]
