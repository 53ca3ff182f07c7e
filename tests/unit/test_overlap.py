"""What runs side by side in a step, shown by what waits for what: with a wrong order these tests
would never end."""

import asyncio
from contextlib import contextmanager
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from benchmarks.virtual_clock import run_virtually
from openrl.cluster.group import LocalGroup, WorkerContext, WorkerTimeout
from openrl.cluster.rollout_worker import CollectRequest, RolloutWorker, Unscored
from openrl.config.model import ModelFlags
from openrl.config.placement import ENGINES
from openrl.config.reward import RewardFlags
from openrl.config.reward_plan import reward_plan
from openrl.errors import UserError
from openrl.rollout.engine import EngineSpec
from openrl.tracking.metrics import Sum
from openrl.trainer.launch import build_pipeline
from openrl.trainer.prepare import Inputs
from openrl.trainer.residency import Residency, ResidencyTable
from openrl.trainer.roles import Roles, roles_of
from openrl.types import Completion, End, Prompt, Sampling, Score
from tests.batches import outcome_batch
from tests.tiny import tiny_model_dir
from tests.unit.test_config_checks import GRPO, ppo

ONE_STEP = (
    "--rollout_batch_size 5 --n_samples_per_prompt 2 --train_batch_size 10"
    " --micro_train_batch_size 2"
)
INPUTS = Inputs("cpu", SimpleNamespace(pad_token_id=0), [], [], [])
PROMPTS = [Prompt(f"p{i}", [5 + i], "x") for i in range(5)]


class Engine:
    """Answers with tokens that follow from the prompt; the last prompt's answers come only when
    ``late`` is set."""

    def __init__(self, late):
        self.late = late

    async def generate(self, token_ids, sampling):
        if token_ids == PROMPTS[-1].token_ids:
            await self.late.wait()
        return Completion(
            [token_ids[0] + i for i in range(1 + token_ids[0] % 3)],
            [-1.0] * (1 + token_ids[0] % 3),
            End.STOP,
        )


class Reward:
    """Scores by position among the siblings once ``open`` is set; the second answer to p1 gets
    none."""

    def __init__(self, open):
        self.open, self.calls = open, 0

    async def score(self, group):
        self.calls += 1
        await self.open.wait()
        if group.prompt.id == "p1":
            return [Score(1.0), Score(float("nan"), failure="no answer")][: len(group.trajectories)]
        return [Score(float(i)) for i, _ in enumerate(group.trajectories)]


class Model:
    """A column that follows from the tokens; tells when it has been asked for one, and keeps what
    it trains on."""

    def __init__(self, context, forward_done, batches):
        self.forward_done, self.batches = forward_done, batches

    async def columns(self, batch, micro_batches, model=0, *want):
        self.forward_done.set()
        return {"column": -batch.token_ids.float() / 64}

    async def update(self, batch, plans, loss_of, also=None):
        self.batches.append(batch)
        return [{"nonfinite_steps": Sum(0.0)} for _ in plans]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("model")))


def worker(model_dir, engine, reward, rank=0):
    flags = (RewardFlags(), reward_plan(RewardFlags()))
    spec = EngineSpec(model_dir, "cpu", "fp32", 64)
    made = RolloutWorker(
        WorkerContext("vllm", rank, 2), "hf", spec, ModelFlags(pretrain=model_dir), *flags
    )
    made.engine, made.reward = engine, reward
    return made


def event(is_set):
    made = asyncio.Event()
    if is_set:
        made.set()
    return made


# -- rewards beside log-prob passes ----------------------------------------------------------------


def test_groups_come_without_scores_once_nothing_is_left_to_generate(model_dir):
    async def scenario():
        late, open = event(False), event(False)
        reward = Reward(open)
        stream = worker(model_dir, Engine(late), reward).collect(
            list(enumerate(PROMPTS)), CollectRequest(2, Sampling(8), greedy=True)
        )
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(1)
        assert (
            not first.done() and reward.calls == 2 * 4
        )  # rewards of what has ended are out; one prompt still plays
        late.set()
        unscored = dict(await first)
        assert sorted(unscored) == [0, 1, 2, 3, 4]
        assert all(isinstance(item, Unscored) for item in unscored.values())
        assert all(t.score is None for item in unscored.values() for t in item.group.answers)
        open.set()
        scores = dict([item async for items in stream for item in items])
        return [[None if s.failure else s.reward for s in scores[i]] for i in range(5)]

    assert run_virtually(scenario()) == [[0, 1, 0], [1, None, 1], [0, 1, 0], [0, 1, 0], [0, 1, 0]]


def test_scored_groups_come_whole(model_dir):
    async def scenario():
        stream = worker(model_dir, Engine(event(True)), Reward(event(True))).collect(
            list(enumerate(PROMPTS)), CollectRequest(2, Sampling(8))
        )
        return dict([item async for items in stream for item in items])

    groups = run_virtually(scenario())
    assert [groups[i].prompt.id for i in range(5)] == ["p0", "p1", "p2", "p3", "p4"]
    assert all(t.score is not None for group in groups.values() for t in group.trajectories)


class Step:
    """One step of the real pipeline over two engines; ``early``: rewards come when a log-prob pass
    has been made."""

    def __init__(self, model_dir, tmp_path, early, words=""):
        self.model_dir, self.early, self.batches, self.stages = model_dir, early, [], []
        self.config = ppo(
            f"{GRPO} {ONE_STEP} --save_path {tmp_path} --max_reward_failure_rate 0.5 {words}"
        )

    def pipeline(self, reward):
        engines = [worker(self.model_dir, Engine(event(True)), reward, rank) for rank in range(2)]
        models = LocalGroup.create("actor", 1, Model, self.forward_done, self.batches)
        reference = LocalGroup.create("reference", 1, Model, self.forward_done, [])
        roles = Roles(policy=models, rollout=LocalGroup("vllm", engines), reference=reference)
        return build_pipeline(self.config, INPUTS, roles)

    @contextmanager
    def stage(self, name):
        self.stages.append(name)
        yield lambda done, total: None

    async def run(self, reward=Reward):
        self.forward_done = event(False)
        pipeline = self.pipeline(reward(self.forward_done if self.early else event(True)))
        answers = await pipeline.generate(PROMPTS, pipeline.request(1), lambda done, total: None)
        if not self.early:
            await answers.scoring
        return await pipeline.learn(answers, 1, self.stage)


@pytest.mark.parametrize("words", ["", "--rollout_scheduler batch"])
def test_passes_run_while_rewards_are_out_and_change_nothing(model_dir, tmp_path, words):
    """The rewards wait for a pass: only a step that overlaps ends. It trains on the same bits as
    one that need not."""
    early, late = (Step(model_dir, tmp_path, early, words) for early in (True, False))
    metrics = [run_virtually(step.run()) for step in (early, late)]
    assert metrics[0] == metrics[1]
    assert early.stages == ["annotate", "reward", "train"] and late.stages == ["annotate", "train"]
    (one,), (other,) = early.batches, late.batches
    for f in fields(one):
        mine, theirs = getattr(one, f.name), getattr(other, f.name)
        if isinstance(mine, torch.Tensor):
            assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7)), f.name
        elif f.name == "reward_parts":
            assert mine.keys() == theirs.keys()
        else:
            assert mine == theirs, f.name
    assert one.loss_mask.any(-1).tolist().count(False) == 1  # the row without a reward
    assert one.old_logprobs is not None and one.ref_logprobs is not None


def test_an_error_of_a_reward_ends_the_passes(model_dir, tmp_path):
    class Broken(Reward):
        async def score(self, group):
            await asyncio.sleep(5)
            raise UserError("row 3 has no label")

    class Endless(Model):
        async def columns(self, *args):
            await asyncio.sleep(3000)

    async def scenario():
        step = Step(model_dir, tmp_path, True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.unit.test_overlap.Model", Endless)
            with pytest.raises(UserError, match="row 3 has no label"):
                await step.run(Broken)
        left = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        return asyncio.get_running_loop().time(), left

    seconds, left = run_virtually(scenario())
    assert seconds < 10 and not left


# -- passes that nobody needs ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "passes"),
    [
        ("--init_kl_coef 0", {"actor": 0, "reference": 0}),
        ("--init_kl_coef 0 --max_epochs 2", {"actor": 1, "reference": 0}),
        ("--init_kl_coef 0 --max_epochs 2 --skip_old_logprob always", {"actor": 0, "reference": 0}),
        ("--init_kl_coef 0 --skip_old_logprob never", {"actor": 1, "reference": 0}),
        ("--init_kl_coef 0.1", {"actor": 1, "reference": 1}),  # in the reward
        ("--init_kl_coef 0.1 --use_kl_loss --kl_estimator k3", {"actor": 0, "reference": 1}),
        (
            "--init_kl_coef 0.1 --use_kl_loss --kl_estimator k3 --skip_old_logprob always",
            {"actor": 0, "reference": 1},
        ),
    ],
)
def test_forward_passes_of_a_step_are_counted(tmp_path, words, passes):
    """One optimizer step a rollout, unless --max_epochs says otherwise. No pass whose column nobody
    reads."""
    config = ppo(f"{GRPO} {ONE_STEP} --save_path {tmp_path} {words}")
    made = dict.fromkeys(("actor", "reference"), 0)

    class Counting(Model):
        def __init__(self, context):
            super().__init__(context, asyncio.Event(), [])
            self.role = context.role

        async def columns(self, batch, micro_batches, model=0, *want):
            made[self.role] += 1
            return await super().columns(batch, micro_batches)

    async def scenario():
        groups = {role: LocalGroup.create(role, 1, Counting) for role in made}
        roles = roles_of(config, groups | {ENGINES: groups["actor"]})
        batch = outcome_batch([1.0] * 10, [i // 2 for i in range(10)])
        await build_pipeline(config, INPUTS, roles).annotate(batch)

    run_virtually(scenario())
    assert made == passes


# -- critic beside actor ---------------------------------------------------------------------------


class Meeting:
    """Works once the other role has begun; takes down who began and ended."""

    def __init__(self, context, log, meet):
        self.role, self.log, self.meet = context.role, log, meet

    async def work(self):
        self.log.append(f"{self.role} begins")
        self.meet[self.role].set()
        if self.meet["together"]:
            await asyncio.gather(self.meet["actor"].wait(), self.meet["critic"].wait())
        self.log.append(f"{self.role} ends")

    async def update(self, batch, plans, loss_of, also=None):
        await self.work()
        return [{"nonfinite_steps": Sum(0.0)} for _ in plans]

    async def columns(self, batch, micro_batches, model=0, *want):
        await self.work()
        return {"column": torch.zeros(batch.token_ids.shape)}


TRAIN, ANNOTATE = (
    (lambda pipeline, batch: pipeline.update(batch, 1)),
    (lambda pipeline, batch: pipeline.annotate(batch)),
)


def both(tmp_path, work, places, together):
    """Who began and ended when actor and critic work, each waiting for the other to begin if
    ``together``."""
    log = []

    async def scenario():
        meet = {"actor": asyncio.Event(), "critic": asyncio.Event(), "together": together}
        actor, critic = (
            LocalGroup.create(role, 1, Meeting, log, meet, timeout=60)
            for role in ("actor", "critic")
        )
        flags = (
            "--rollout_batch_size 8 --train_batch_size 8 --max_steps 9 --init_kl_coef 0"
            " --skip_old_logprob never"
        )
        config = ppo(
            f"--pretrain m --prompt_data d --remote_rm_url r.py {flags} --save_path {tmp_path}"
        )
        residency = Residency(ResidencyTable({role: frozenset(p) for role, p in places.items()}))
        roles = Roles(policy=actor, rollout=actor, critic=critic, residency=residency)
        await work(build_pipeline(config, INPUTS, roles), outcome_batch([1.0] * 8, list(range(8))))

    run_virtually(scenario())
    return log


@pytest.mark.parametrize("work", [TRAIN, ANNOTATE], ids=["train", "annotate"])
def test_roles_with_places_of_their_own_work_side_by_side(tmp_path, work):
    log = both(tmp_path, work, {"actor": [0, 1], "critic": [2]}, together=True)
    assert {line.split()[1] for line in log[:2]} == {"begins"}


@pytest.mark.parametrize("work", [TRAIN, ANNOTATE], ids=["train", "annotate"])
def test_roles_that_share_a_place_take_turns(tmp_path, work):
    places = {"actor": [0, 1], "critic": [1, 2]}
    log = both(tmp_path, work, places, together=False)
    assert [line.split()[1] for line in log] == ["begins", "ends"] * 2
    assert {line.split()[0] for line in log[:2]} != {line.split()[0] for line in log[2:]}
    with pytest.raises(WorkerTimeout):
        both(tmp_path, work, places, together=True)


def test_rounds_of_roles():
    table = ResidencyTable(
        {"a": frozenset({0}), "b": frozenset({0, 1}), "c": frozenset({1}), "d": frozenset({2})}
    )
    assert table.rounds("abcd") == [["a", "c", "d"], ["b"]]
    assert ResidencyTable().rounds("ab") == [["a", "b"]]
