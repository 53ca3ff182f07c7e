"""The small parts of the trainer: what is measured, when things are due, waiting, collecting.
Computed by hand."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from openrl.algorithms.advantages import DiscountOptions
from openrl.algorithms.credit import CreditSettings
from openrl.cluster.group import LocalGroup, WorkerContext
from openrl.config.groups.algorithm import KLFlags
from openrl.config.groups.reward_shaping import RewardShapingFlags
from openrl.errors import UserError
from openrl.extension_points import advantage_estimators
from openrl.metrics import Mean, Sum, to_floats
from openrl.token_origins import VersionSpan
from openrl.trainer.learning.credit import CreditAssignment, clip_note
from openrl.trainer.rl_trainer import is_due
from openrl.trainer.rollout.buffer import BufferLimits, RolloutBuffer
from openrl.trainer.rollout.engine_pool import EnginePool
from openrl.trainer.rollout.evaluation import best_metric, eval_metrics, metric_names
from openrl.trainer.rollout.metrics import rollout_metrics
from openrl.trainer.rollout.rollouts import Rollouts
from openrl.types import FinishReason, Prompt, PromptGroup, Sampling, Score, Segment, Trajectory
from openrl.waiting import all_or_first_error, in_daemon
from openrl.workers.residency import Residency
from openrl.workers.rollout_worker import RolloutRequest, request_seed
from tests.batches import outcome_batch

NORMS = {
    "dr_grpo": ("group", "none"),
    "group_norm": ("group", "group"),
    "reinforce": ("none", "none"),
}


def trajectory(
    prompt: Prompt,
    length: int,
    score: Score | None,
    end: FinishReason = FinishReason.STOP,
    version: int = 1,
):
    spans = (VersionSpan(0, length, version),)
    row = Segment.answer(prompt.token_ids, list(range(length)), versions=spans)
    return Trajectory(prompt, [row], end, score=score)


def group(name: str, prompt_length: int, *rows: tuple, source: str = "default") -> PromptGroup:
    prompt = Prompt(name, [1] * prompt_length, name, source=source)
    return PromptGroup(prompt, [trajectory(prompt, *row) for row in rows])


# -- what is measured ------------------------------------------------------------------------------


def test_rollout_metrics():
    groups = [
        group(
            "a", 2, (3, Score(1.0, 1.0, {"format": 1.0})), (5, Score(0.0, 0.0), FinishReason.LENGTH)
        ),
        group(
            "b",
            4,
            (2, Score(-1.0, 0.0, {"format": 0.5})),
            (6, Score(-1.0, 0.0), FinishReason.LENGTH, 3),
        ),
    ]
    metrics = rollout_metrics(groups)
    expected = {
        "rollout/samples": 4,
        "rollout/untrained_samples": 0,
        "rollout/tokens": 16,
        "rollout/prompt_length": 3,
        "rollout/response_length": 4,
        "rollout/response_length_max": 6,
        "rollout/truncated_share": 0.5,
        "rollout/policy_version_min": 1,
        "rollout/reward": -0.25,
        "rollout/reward_max": 1,
        "rollout/reward_min": -1,
        "rollout/pass_rate": 0.25,  # of group a 0.5, of group b 0
        "rollout/zero_variance_groups": 0.5,
        "rollout/all_right_groups": 0,
        "rollout/all_wrong_groups": 0.5,
        "reward/format": 0.75,  # over the two that have this part
    }
    assert expected.items() <= to_floats(metrics).items()
    assert isinstance(metrics["rollout/tokens"], Sum) and metrics["reward/format"] == Mean(1.5, 2)


def test_reward_that_length_predicts():
    """Spearman: any rising function of the length gives 1; equal values share their rank."""
    found = lambda *rows: to_floats(rollout_metrics([group("a", 1, *rows)])).get(  # noqa: E731
        "rollout/reward_length_correlation"
    )
    assert found((1, Score(0.0)), (2, Score(1.0)), (3, Score(9.0))) == pytest.approx(1)
    assert found((1, Score(9.0)), (2, Score(1.0)), (9, Score(0.0))) == pytest.approx(-1)
    # ranks of lengths 0 1 2 3 and of rewards 0.5 0.5 2.5 2.5 around 1.5: 4 / sqrt(5 * 4)
    four = [(1, Score(0.0)), (2, Score(0.0)), (3, Score(1.0)), (4, Score(1.0))]
    assert found(*four) == pytest.approx(4 / 20**0.5)
    assert found((1, Score(1.0)), (2, Score(1.0))) is None  # all rewards are equal
    assert found((2, Score(0.0)), (2, Score(1.0))) is None  # all lengths are
    assert found((2, Score(1.0))) is None
    assert found((1, Score(0.0)), (2, Score(1.0)), (3, Score.failed("lost"))) == pytest.approx(1)


def test_failed_samples_shorten_no_mean():
    """They hold no token, neither of a reply nor of what an environment shows first."""
    lost = group("", 0, (0, None, FinishReason.ENVIRONMENT_ERROR))
    groups = [group("a", 2, (4, Score(1.0, 1.0), FinishReason.LENGTH)), lost]
    metrics = to_floats(rollout_metrics(groups))
    assert metrics["rollout/samples"] == 2 and metrics["rollout/tokens"] == 4
    assert metrics["rollout/prompt_length"] == 2 and metrics["rollout/truncated_share"] == 1
    assert metrics["rollout/response_length"] == metrics["rollout/response_length_max"] == 4
    assert to_floats(eval_metrics(groups))["eval/response_length"] == 4
    assert "rollout/response_length" not in to_floats(rollout_metrics([lost]))


def test_samples_that_cannot_be_trained_are_counted():
    """One failed, two have a greedy answer beside them that got no reward, one has no token."""
    unrated = group("b", 1, (2, Score(1.0)), (2, Score(0.0)))
    unrated.greedy = trajectory(unrated.prompt, 2, None)
    groups = [
        group("a", 1, (2, Score(1.0)), (2, None, FinishReason.ENGINE_ERROR), (0, Score(0.0))),
        unrated,
    ]
    assert rollout_metrics(groups)["rollout/untrained_samples"] == Sum(4)


@pytest.mark.parametrize(
    ("rewards", "estimator", "told"),
    [
        ([80, 20, 60, 15], "dr_grpo", True),  # minus their mean: 36, -24, 16, -29
        ([80, 20, 60, 15], "reinforce", True),
        ([80, 20, 60, 15], "group_norm", False),
        ([80, 20, 60, 5], "reinforce", False),
    ],
)
def test_a_step_in_which_every_reward_is_clipped_is_told(rewards, estimator, told):
    settings = CreditSettings(
        advantage_estimators[estimator], DiscountOptions(), RewardShapingFlags(), NORMS[estimator],
        whiten_advantages=False, max_new_tokens=9,
    )  # fmt: skip
    _, metrics = CreditAssignment(settings, KLFlags(init_kl_coef=0.0))(
        outcome_batch(rewards, [0, 0, 0, 0])
    )
    note = clip_note(3, metrics)
    assert bool(note) == told
    assert not told or note.startswith("WARNING: --reward_clip_range clips every reward of step 3")


def test_what_nobody_measured_is_absent():
    unscored = rollout_metrics([group("a", 1, (2, None), (2, None))])
    assert not [name for name in unscored if "reward" in name or "groups" in name or "pass" in name]
    without_verdict = rollout_metrics([group("a", 1, (2, Score(1.0)), (2, Score(0.0, 1.0)))])
    assert without_verdict["rollout/reward"].value == 0.5
    assert not {"rollout/pass_rate", "rollout/all_right_groups"} & without_verdict.keys()


def test_eval_metrics():
    """By source and over all answers. Rewards stand under their own name, never as a pass rate."""
    groups = [
        group("a", 1, (2, Score(9.0, 1.0)), (4, Score(9.0, 0.0)), source="easy"),
        group("b", 1, (6, Score(0.0, 1.0)), (8, Score(0.0, 1.0)), source="easy"),
        group("c", 1, (5, Score(7.5)), (5, None), source="hard"),
    ]
    measured = to_floats(eval_metrics(groups))
    names = {*metric_names([g.prompt for g in groups], 2)}
    assert names - measured.keys() == {
        "val-core/easy/acc/maj@2",  # nothing votes
        *(f"val-core/hard/acc/{figure}@2" for figure in ("mean", "best", "pass", "maj")),
        "val-core/hard/acc/pass@1",
        *(f"val-core/easy/reward/{figure}@2" for figure in ("mean", "best")),
    }
    assert measured.keys() - names == {"eval/reward_failures"}
    assert measured == {
        "val-core/easy/acc/mean@2": 0.75,
        "val-core/hard/reward/mean@2": 7.5,
        "val-core/easy/acc/best@2": 1.0,  # each prompt's best: 1 and 1
        "val-core/hard/reward/best@2": 7.5,  # the other answer failed
        "val-core/easy/acc/pass@1": 0.75,  # 1/2 and 1
        "val-core/easy/acc/pass@2": 1.0,
        "eval/pass_rate": 0.75,
        "eval/reward": (9 + 9 + 0 + 0 + 7.5) / 5,
        "eval/response_length": 5,
        "eval/reward_failures": 0,
    }


def test_without_verdicts_no_pass_rate():
    """The best checkpoint is then that of the highest reward."""
    rated = group("a", 1, (2, Score(-3.0)), (2, Score(5.0)))
    measured = to_floats(eval_metrics([rated]))
    assert measured["eval/reward"] == 1 and "eval/pass_rate" not in measured
    assert not [name for name in measured if "/acc/" in name]
    assert best_metric(measured, "auto") == 1 and best_metric(measured, "eval/pass_rate") is None
    judged = to_floats(eval_metrics([rated, group("b", 1, (2, Score(9.0, 0.5)))]))
    assert best_metric(judged, "auto") == judged["eval/pass_rate"] == 0.5


def test_majorities_are_counted_where_answers_can_be_compared():
    """Two of four say 7, which is right; of the other prompt nobody gives an answer."""
    votes = group("a", 1, *[(1, Score(0.0, verdict)) for verdict in (1.0, 1.0, 0.0, 0.0)])
    for row, text in zip(votes.trajectories, ("7", "it is 7", "8", "9"), strict=True):
        row.text = text
    silent = group("b", 1, *[(1, Score(0.0, 0.0))] * 4)
    measured = to_floats(eval_metrics([votes, silent]))
    assert measured["val-core/default/acc/maj@4"] == 0.5
    assert measured["val-core/default/acc/pass@2"] == pytest.approx(5 / 6 / 2)
    assert "val-core/default/acc/maj@2" not in measured


# -- credit and the KL controller ------------------------------------------------------------------


def plan() -> CreditSettings:
    """Rewards are taken as they are."""
    return CreditSettings(
        estimator=advantage_estimators["group_norm"],
        options=None,
        shaping=RewardShapingFlags(),
        norm_scopes=("none", "none"),
        whiten_advantages=False,
        max_new_tokens=8,
    )


def scored_batch():
    """Two answers of two tokens, whose log-probs exceed the reference's by 0.1, 0.3, 0.2 and 0.2: a
    mean k1 of 0.2."""
    old = torch.tensor([[0.0, -1.0, -2.0], [0.0, -3.0, -4.0]], dtype=torch.float64)
    above = torch.tensor([[0.0, 0.1, 0.3], [0.0, 0.2, 0.2]], dtype=torch.float64)
    return outcome_batch([1.0, 0.0], [0, 0], old_logprobs=old, ref_logprobs=old - above)


def test_kl_counts_in_the_reward_and_is_measured():
    credit = CreditAssignment(plan(), KLFlags(init_kl_coef=0.5))
    batch, metrics = credit(scored_batch())
    expected = torch.tensor([[0.0, -0.05, 1 - 0.15], [0.0, -0.1, -0.1]], dtype=torch.float64)
    torch.testing.assert_close(batch.token_rewards, expected)
    assert metrics["kl_coef"].value == 0.5
    measured = [
        credit.measure_kl(batch, torch.tensor(rows))["actor/kl"]
        for rows in ([True, True], [True, False])
    ]
    assert [m.weight for m in measured] == [4, 2]
    assert [m.value for m in measured] == pytest.approx([0.2, 0.2])


def test_kl_in_the_loss_leaves_the_reward_alone():
    batch, metrics = CreditAssignment(
        plan(), KLFlags(init_kl_coef=0.5, use_kl_loss=True, kl_estimator="k2")
    )(scored_batch())
    assert batch.token_rewards.tolist() == [[0, 0, 1], [0, 0, 0]]
    assert metrics["kl_coef"].value == 0.5


def test_the_controller_steers_with_each_steps_samples():
    """KL 0.2 at a target of 0.19: the error of 1/19 is inside the clip of 0.2; at 0.1 it would be 1
    and is clipped."""
    credit = CreditAssignment(plan(), KLFlags(init_kl_coef=0.5, kl_target=0.19, kl_horizon=10))
    _, metrics = credit(scored_batch())
    credit.adapt(metrics | {"actor/kl": Mean(0.8, 4)}, 2)
    assert credit.kl.coef == pytest.approx(0.5 * (1 + 1 / 19 * 2 / 10))
    batch, metrics = credit(scored_batch())
    assert metrics["kl_coef"].value == credit.kl.coef  # in force from the next step
    assert batch.token_rewards[1, 1] == pytest.approx(-0.2 * credit.kl.coef)

    steep = CreditAssignment(plan(), KLFlags(init_kl_coef=0.5, kl_target=0.1, kl_horizon=10))
    steep.adapt({"actor/kl": Mean(0.8, 4)}, 2)
    assert steep.kl.coef == pytest.approx(0.5 * (1 + 0.2 * 2 / 10))


def test_a_fixed_coefficient_stays_and_nothing_measured_moves_nothing():
    fixed = CreditAssignment(plan(), KLFlags(init_kl_coef=0.5))
    fixed.adapt({"actor/kl": Mean(9.0, 1)}, 2)
    adaptive = CreditAssignment(plan(), KLFlags(init_kl_coef=0.5, kl_target=0.1))
    adaptive.adapt({}, 2)
    adaptive.adapt({"actor/kl": Mean(0.0, 0)}, 2)
    assert fixed.kl.coef == adaptive.kl.coef == 0.5


# -- when, and with which seed ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "expected"),
    [(-1, []), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (7, [7]), (10, [7])],
)
def test_due_every_n_steps_and_after_the_last(every, expected):
    assert [step for step in range(1, 8) if is_due(step, every, last=7)] == expected


def test_every_sampled_sequence_has_a_seed_of_its_own():
    seeds = [
        request_seed(run, step, p, i)
        for run in (0, 1)
        for step in range(5)
        for p in range(20)
        for i in range(5)
    ]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**31 for seed in seeds)
    # no two ways to write one key, and the same figure in every process and version: resumed runs
    # depend on it
    assert request_seed(1, 11, 1, 1) != request_seed(11, 1, 1, 1)
    assert request_seed(42, 3, 17, 2) == PINNED


PINNED = 48094078


# -- waiting and collecting ------------------------------------------------------------------------


def test_all_results_in_order_of_the_work():
    async def scenario():
        first_done = asyncio.Event()

        async def late():
            await first_done.wait()
            return "late"

        async def early():
            first_done.set()
            return "early"

        return await all_or_first_error([late(), early()]), await all_or_first_error([])

    assert asyncio.run(scenario()) == (["late", "early"], [])


def test_the_first_error_ends_the_others_before_it_is_raised():
    ended = []

    async def scenario():
        async def forever(name):
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(name)

        async def failing():
            await asyncio.sleep(0)
            raise UserError("row 7")

        await all_or_first_error([forever("a"), failing(), forever("b")])

    with pytest.raises(UserError, match="row 7"):
        asyncio.run(scenario())
    assert ended == ["a", "b"]


class Player:
    """Refuses what is called "bad", hangs on what is called "hang"."""

    def __init__(self, context: WorkerContext, log: list[str]) -> None:
        self.rank, self.log = context.rank, log

    async def play(self, prompt, request):
        self.log.append(f"{self.rank}: {prompt.id}")
        try:
            if prompt.id == "bad":
                raise UserError("row bad has no answer")
            if prompt.id == "hang":
                await asyncio.Event().wait()
            return PromptGroup(
                prompt, [trajectory(prompt, 1, None) for _ in range(request.n_samples)]
            )
        finally:
            self.log.append(f"{prompt.id} ended")


def play(names: str, engines: int) -> tuple[list[PromptGroup], list[tuple[int, int]], list[str]]:
    log: list[str] = []
    told: list[tuple[int, int]] = []

    async def scenario():
        players = LocalGroup.create("vllm", engines, Player, log)
        prompts = [Prompt(name, [1], name) for name in names.split()]
        request = RolloutRequest(2, Sampling(max_tokens=1))
        buffer = RolloutBuffer(None, BufferLimits(1))
        pool = EnginePool(players)
        rollouts = Rollouts(pool, buffer, Residency(), request)
        try:
            tell = lambda done, total: told.append((done, total))  # noqa: E731
            return await rollouts.play_all(prompts, request, tell)
        except UserError as error:
            log.append(str(error))
            return []

    return asyncio.run(scenario()), told, log


def test_groups_come_in_the_order_of_the_prompts():
    groups, told, log = play("a b c d e", engines=2)
    assert [g.prompt.id for g in groups] == ["a", "b", "c", "d", "e"]
    assert all(len(g.trajectories) == 2 for g in groups)
    assert told == [(n, 5) for n in range(1, 6)]
    assert [line for line in log if ":" in line] == ["0: a", "1: b", "0: c", "1: d", "0: e"]


def test_the_first_error_of_an_engine_ends_the_rest():
    groups, told, log = play("hang bad c d", engines=2)
    assert groups == [] and len(told) < 4
    assert "row bad has no answer" in log[-1]
    assert "hang ended" in log  # before the error is raised: nobody generates on


def test_a_thread_that_never_returns_holds_up_nothing():
    """Who waits for it can be cancelled, and the event loop ends."""

    async def scenario():
        assert await in_daemon(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await in_daemon(divmod, 7, 0)
        forever = asyncio.ensure_future(in_daemon(threading.Event().wait))
        await asyncio.sleep(0)
        forever.cancel()
        with pytest.raises(asyncio.CancelledError):
            await forever

    asyncio.run(scenario())
