"""Dynamic filtering of a step over engines that answer in any order, and what correction leaves of
a batch."""

import asyncio
import random

import pytest
import torch

from openrl.algorithms.credit import CreditPlan
from openrl.cluster.group import LocalGroup
from openrl.cluster.rollout_worker import CollectRequest
from openrl.config.correction import DynamicFilteringFlags, RolloutCorrectionFlags
from openrl.config.learning import KLFlags
from openrl.config.shaping import RewardShapingFlags
from openrl.data.prompts import PromptStream
from openrl.errors import UserError
from openrl.extension_points import advantage_estimators
from openrl.trainer.collector import Collector
from openrl.trainer.credit import Credit
from openrl.trainer.filtering import DynamicFilter
from openrl.trainer.mismatch import Mismatch
from openrl.types import End, Group, Prompt, Sampling, Score, Segment, Trajectory
from tests.batches import outcome_batch

REQUEST = CollectRequest(2, Sampling(4))


class Engine:
    """Answers its prompts in a random order; the label is the mean reward of the group."""

    def __init__(self, context, seed):
        self.random = random.Random(seed + context.rank)

    async def collect(self, prompts, request):
        for position, prompt in self.random.sample(prompts, len(prompts)):
            for _ in range(self.random.randrange(4)):
                await asyncio.sleep(0)  # let the other engines go first, or not
            rows = [
                Trajectory(prompt, [Segment.answer([1], [2], [-1.0])], End.STOP) for _ in range(2)
            ]
            for row in rows:
                row.score = Score(prompt.label)
            yield [(position, Group(prompt, rows))]


def run(labels, wanted, seed=0, **flags):
    """(generated, kept or the error, prompts taken from the stream)"""
    stream = PromptStream(
        [Prompt(str(i), [1], "", label=label) for i, label in enumerate(labels)], seed=7
    )
    chosen = DynamicFilter(DynamicFilteringFlags(dynamic_filtering=True, **flags), stream, wanted)
    collector = Collector(LocalGroup.create("rollout", 3, Engine, seed))
    told = []
    prompts = stream.take(wanted)
    tell = lambda done, total: told.append((done, total))  # noqa: E731
    groups = asyncio.run(collector.collect(prompts, REQUEST, tell, chosen.replace))
    assert told == [(i + 1, wanted) for i in range(wanted)]
    return groups, chosen, stream


@pytest.mark.parametrize("seed", range(5))
def test_the_accepted_among_the_first_prompts_whatever_the_order_of_arrival(seed):
    labels = [0.5 if i % 3 == 0 else float(i % 2) for i in range(60)]
    order = [
        p.id for p in PromptStream([Prompt(str(i), [1], "") for i in range(60)], seed=7).take(60)
    ]
    accepted = [id for id in order if int(id) % 3 == 0][:8]
    tried = order[: order.index(accepted[-1]) + 1]
    groups, chosen, stream = run(labels, wanted=8, seed=seed)
    kept, metrics = chosen.select(groups)
    assert [g.prompt.id for g in kept] == accepted
    assert [g.prompt.id for g in groups] == tried
    assert stream.state()["position"] == len(tried)  # a resume goes on behind them
    assert metrics["filter/kept_share"].value == 8 / len(tried)


def test_shortfall():
    labels = [0.5, 0.5] + [1.0] * 38
    groups, chosen, stream = run(labels, wanted=8, dynamic_filtering_max_batches=3)
    assert len(groups) == 24 == stream.state()["position"]
    groups, chosen, _ = run(labels, wanted=8, dynamic_filtering_max_batches=0)
    assert len(groups) == 40  # one pass
    assert len(chosen.select(groups)[0]) == 2  # none of the accepted is lost
    groups, chosen, _ = run(
        labels, wanted=8, dynamic_filtering_max_batches=0, dynamic_filtering_shortfall="skip"
    )
    assert chosen.select(groups)[0] == []
    groups, chosen, _ = run(
        labels, wanted=8, dynamic_filtering_max_batches=0, dynamic_filtering_shortfall="fail"
    )
    with pytest.raises(UserError, match="only 2 of 8 groups"):
        chosen.select(groups)


def test_no_group_accepted_is_an_empty_step():
    groups, chosen, _ = run([1.0] * 10, wanted=4)
    assert chosen.select(groups)[0] == []


def test_a_part_that_a_whole_batch_lacks_is_misspelt():
    with pytest.raises(
        UserError, match="--dynamic_filtering_key format: no reward of 4 groups"
    ) as caught:
        run([1.0] * 10, wanted=4, dynamic_filtering_key="format")
    assert caught.value.remedy == "one of score, reward"


def test_rejected_rows_leave_the_loss_and_count_in_their_group():
    gaps = torch.tensor([[0.0, 0.0, 0.0], [0.0, 100.0, 100.0]])
    columns = {"rollout_logprobs": torch.full((2, 3), -1.0), "old_logprobs": -1.0 + gaps}
    batch = outcome_batch([1.0, 0.0], [0, 0], tokens=2, **columns)
    flags = RolloutCorrectionFlags(
        enable_vllm_is_correction=True, rollout_rs=("seq_mean_k1",), rollout_rs_threshold=("2",)
    )
    mismatch = Mismatch(flags)
    corrected, metrics = mismatch.measure(batch)
    plan = CreditPlan(
        advantage_estimators["rloo"], None, RewardShapingFlags(), ("none", "none"), False, 10
    )
    credited, _ = Credit(plan, KLFlags(init_kl_coef=0.0))(batch)
    result = mismatch.apply(credited, corrected)
    assert result.loss_mask.tolist() == [[False, True, True], [False, False, False]]
    assert result.advantages[0].tolist() == [0, 1, 1]  # against its rejected sibling
    assert result.is_weights[0].tolist() == [0, 1, 1]
    assert metrics["mismatch/rejected_sequences"].value == 0.5
    assert (
        metrics["actor/logprob_gap"].value == 50 and metrics["actor/logprob_gap_max"].value == 100
    )
