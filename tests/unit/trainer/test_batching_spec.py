"""Micro-batches of a run: from flags to plans, and what a plan costs."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from benchmarks.padding import LONGEST, QWEN3_8B, figures, lognormal_lengths
from openrl.algorithms.batching import PER_TOKEN, TokenCap, TrainingPlan, plan_pairs, plan_steps
from openrl.algorithms.partition import RowCost
from openrl.algorithms.row_sizes import RowSizes
from openrl.cluster.group import LocalGroup
from openrl.config.commands import DPOConfig, PPOConfig, RMConfig, SFTConfig
from openrl.config.groups.batch import RolloutBatchFlags
from openrl.errors import UserError
from openrl.experience import StepCounts, StepPlan
from openrl.models.cost import cost_of, row_cost
from openrl.trainer.launch import build_learner
from openrl.trainer.learning.rows import (
    BatchingSpec,
    forward_rows,
    rollout_batching,
    step_size,
    supervised_batching,
    work_metrics,
)
from openrl.trainer.planning.start_lines import start_lines
from openrl.workers.roles import Roles, model_specs
from tests.batches import random_batch
from tests.flags import GRPO, PPO, SFT, ppo, said, settle
from tests.loops import Updates, goes_on

DYNAMIC = "--use_dynamic_batch"


def test_flags_become_sizes():
    cost = RowCost(0.5)
    assert rollout_batching(ppo(PPO), cost) == BatchingSpec(4, 8, cost, packed=False)
    assert rollout_batching(ppo(f"{PPO} --packing_samples"), cost) == BatchingSpec(
        4, 8, cost, packed=True
    )
    assert rollout_batching(ppo(f"{PPO} {DYNAMIC}"), cost) == BatchingSpec(
        TokenCap(16384), TokenCap(16384), cost, packed=True
    )
    words = f"{PPO} {DYNAMIC} --train_max_tokens_per_gpu 4096 --rollout_max_tokens_per_gpu 9000"
    assert rollout_batching(ppo(words), cost) == BatchingSpec(
        TokenCap(4096), TokenCap(9000), cost, packed=True
    )
    config, _ = settle(SFTConfig, f"{SFT} {DYNAMIC} --train_max_tokens_per_gpu 2048")
    assert supervised_batching(config, cost) == BatchingSpec(
        TokenCap(2048), TokenCap(2048), cost, packed=True
    )


def test_every_role_packs_and_a_run_says_so():
    config = ppo(f"{PPO} {DYNAMIC}")
    assert all(spec.packing for (spec,) in model_specs(config, "cpu", 10).values())
    assert [line for line in start_lines(config, "cuda") if "turns --packing_samples on" in line]
    for words in (PPO, f"{PPO} {DYNAMIC} --packing_samples"):
        assert not [line for line in start_lines(ppo(words), "cuda") if "packing" in line]


@pytest.mark.parametrize(
    ("has", "words", "said"),
    [
        ({}, "--param_dtype fp32 --vllm_dtype bf16", "--vllm_dtype bf16: this processor"),
        ({}, "--vllm_dtype bf16", "--param_dtype bf16 and --vllm_dtype bf16: "),
        ({}, "--param_dtype fp32", ""),
        ({"amx_bf16": True}, "--vllm_dtype bf16", ""),
        ({"avx512_bf16": True}, "--vllm_dtype bf16", ""),
        ({"architecture": "aarch64"}, "--vllm_dtype bf16", ""),
    ],
)
def test_bf16_on_a_processor_without_it_is_said_to_be_slow(monkeypatch, has, words, said):
    processor = {"architecture": "x86_64", "amx_bf16": False, "avx512_bf16": False} | has
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor)
    config = ppo(f"{PPO} {words} --enable_vllm_is_correction")
    lines = [line for line in start_lines(config, "cpu") if "bf16" in line]
    assert [line.startswith(said) for line in lines] == [True] * bool(said)
    assert not [line for line in start_lines(config, "cuda") if "bf16" in line]


@pytest.mark.parametrize(
    ("command", "words", "flags", "message", "fix"),
    [
        (PPOConfig, f"{PPO} {DYNAMIC} --train_max_tokens_per_gpu 2047", "train_max_tokens_per_gpu",
         "too small for a row of 2048 tokens", "--train_max_tokens_per_gpu 2048"),
        (PPOConfig, f"{PPO} {DYNAMIC} --rollout_max_tokens_per_gpu 100", "rollout_max_tokens_per_gpu",
         "too small for a row of 2048 tokens", "--rollout_max_tokens_per_gpu 2048"),
        (PPOConfig, f"{PPO} {DYNAMIC} --train_batch_size 4 --actor_num_gpus_per_node 8",
         "train_batch_size, --actor_num_nodes, --actor_num_gpus_per_node", "would have no work", "--train_batch_size 8"),
        (SFTConfig, f"{SFT} {DYNAMIC} --train_max_tokens_per_gpu 2000", "train_max_tokens_per_gpu, --max_len",
         "too small for a row of --max_len 2048", "--train_max_tokens_per_gpu 2048"),
        (RMConfig, f"{SFT} {DYNAMIC} --train_max_tokens_per_gpu 1000", "train_max_tokens_per_gpu, --max_len",
         "too small for a pair of rows of --max_len 512", "--train_max_tokens_per_gpu 1024"),
        (DPOConfig, f"{SFT} {DYNAMIC} --train_max_tokens_per_gpu 1000", "train_max_tokens_per_gpu, --max_len",
         "too small for a pair of rows", ""),
        (DPOConfig, f"{SFT} {DYNAMIC} --loss kto --prompt_key p --train_max_tokens_per_gpu 500",
         "train_max_tokens_per_gpu, --max_len", "too small for a row of --max_len 512", ""),
    ],
)  # fmt: skip
def test_rules(command, words, flags, message, fix):
    (problem,) = said(command, words)
    assert problem.startswith(f"--{flags}: ")
    assert message in problem and fix in problem


def test_samples_need_not_divide_among_ranks():
    """Nor into micro-batches: ranks may get any number of rows."""
    assert not said(PPOConfig, f"{PPO} {DYNAMIC} --actor_num_gpus_per_node 3")
    assert said(PPOConfig, f"{PPO} --actor_num_gpus_per_node 3")
    assert not said(SFTConfig, f"{SFT} {DYNAMIC} --train_batch_size 33")


class Recorder(Updates):
    """A worker that checks what it is shipped: (lengths of each micro-batch, rows) of training and
    of forward passes."""

    def __init__(self, context):
        self.trained, self.scored = [], []

    def update(self, share):
        batch, plans, _ = share
        self.trained += [
            [self.lengths(batch, rows) for rows in plan.micro_batches] for plan in plans
        ]
        return [{} for _ in plans]

    def forward(self, batch, micro_batches, model):
        self.scored += [self.lengths(batch, rows) for rows in micro_batches]
        return {"output": batch.rewards}

    def lengths(self, batch, rows):
        if max(rows) >= 0:
            return batch.select([row for row in rows if row >= 0]).lengths.tolist()
        return []


def test_caps_hold_in_every_worker():
    """Two ranks, 13 rows in steps of four, twice: all rows arrive but the one without a sampled
    token, which is scored alone, no micro-batch is over its cap, ranks run alike."""
    sizes = (
        "--rollout_batch_size 16 --train_batch_size 4 --max_epochs 2 --prompt_max_len 8"
        " --generate_max_len 8"
    )
    caps = "--train_max_tokens_per_gpu 20 --rollout_max_tokens_per_gpu 30"
    config = ppo(f"{GRPO} {sizes} {DYNAMIC} {caps} --init_kl_coef 0 --max_steps 9")
    actor = LocalGroup.create("actor", 2, Recorder)
    inputs = SimpleNamespace(
        tokenizer=SimpleNamespace(pad_token_id=0), ptx_rows=[], row_cost=RowCost(0.01)
    )
    learner = build_learner(config, inputs, Roles(policy=actor, engines=actor))
    batch = random_batch(7)
    batch = batch.replace(advantages=torch.ones_like(batch.rollout_logprobs))
    lengths = sorted(batch.lengths[batch.valid].tolist())
    metrics = asyncio.run(learner.update(batch, 1, goes_on()))
    scores = asyncio.run(forward_rows(actor, batch, learner.settings.batching))
    assert scores.tolist() == batch.rewards.tolist()
    first, second = actor._workers
    assert len(first.trained) == len(second.trained) == 8
    assert [len(step) for step in first.trained] == [len(step) for step in second.trained]
    assert len(first.scored) == len(second.scored)
    trained = [rows for worker in (first, second) for step in worker.trained for rows in step]
    assert sorted(n for rows in trained for n in rows) == sorted(lengths * 2)
    assert max(map(sum, trained)) <= 20
    scored = first.scored + second.scored
    assert sorted(n for rows in scored for n in rows) == sorted(batch.lengths.tolist())
    assert 20 < max(map(sum, scored)) <= 30
    assert metrics["perf/micro_batches"].value == sum(map(len, first.trained)) / 8


# -- what a plan costs -----------------------------------------------------------------------------


def test_figures_by_hand():
    """Two ranks: (5, 3 | 2) and (4, dummy | dummy)."""
    counts = StepCounts(14, 4, 2)
    ranks = [StepPlan([[0, 1], [2]], counts), StepPlan([[0], [-1]], counts)]
    plan = TrainingPlan([[0, 1, 2], [3]], [ranks])
    lengths = [5, 3, 2, 4]
    found = work_metrics(RowSizes(lengths), plan, BatchingSpec(2, 2))
    # 2 x 5 + 2 and 4 + 1, of which 14 are real
    assert found["perf/padding_waste"].value == pytest.approx(3 / 17)
    assert found["perf/rank_imbalance"].value == pytest.approx(10 / 7)
    assert found["perf/micro_batches"].value == 2
    packed = work_metrics(RowSizes(lengths, RowCost(0.1)), plan, BatchingSpec(2, 2, packed=True))
    assert packed["perf/padding_waste"].value == pytest.approx(1 / 15)
    busy, idle = 7.5 + 3.9 + 2.4, 5.6
    assert packed["perf/rank_imbalance"].value == pytest.approx(2 * busy / (busy + idle))


def test_figures_of_shared_beginnings_by_hand():
    """Siblings of 7 and 9 tokens with five in common compute 5 + 3 + 5 of their 16, beside another
    row and a dummy."""
    plan = TrainingPlan([[0, 1, 2]], [[StepPlan([[0, 1], [2, -1]], StepCounts(20, 3, 1))]])
    sizes = RowSizes([7, 9, 4], RowCost(shared=True), [0, 0, 1], [5, 5, 3])
    found = work_metrics(sizes, plan, BatchingSpec(2, 2, packed=True))
    assert found["perf/shared_tokens"].value == pytest.approx(3 / 20)
    assert found["perf/padding_waste"].value == pytest.approx(1 / 18)
    assert "perf/shared_tokens" not in work_metrics(
        RowSizes([7, 9, 4]), plan, BatchingSpec(2, 2, packed=True)
    )


def test_figures_are_means_over_steps():
    batch = random_batch(3)
    for plan in (
        plan_steps(batch, 2, 4, 2, epochs=2),
        plan_pairs(batch.select(list(range(12))), 2, 2),
    ):
        metrics = work_metrics(RowSizes.of(batch, RowCost()), plan, BatchingSpec(2, 2))
        assert metrics["perf/rank_imbalance"].weight == len(plan.steps)
        assert metrics["perf/rank_imbalance"].value >= 1
        assert 0 <= metrics["perf/padding_waste"].value < 0.5


@pytest.mark.parametrize("spread", [0.5, 0.75, 1.2])
def test_the_aims_of_the_benchmark_hold(spread):
    """32 ranks, 32 rows each, up to 64k tokens: hardly any padding, and no rank waits for
    another."""
    lengths, cost = lognormal_lengths(1024, spread), cost_of(QWEN3_8B)
    found = figures(lengths, 32, TokenCap(LONGEST), cost, cost, packed=True)
    assert found.padding < 0.0001 and 1 <= found.imbalance < 1.001
    by_tokens = figures(lengths, 32, TokenCap(LONGEST), PER_TOKEN, cost, packed=True)
    assert by_tokens.imbalance > 1.01
    padded = figures(lengths, 32, 8, cost, cost, packed=False)
    assert padded.padding > 0.2


def test_a_model_that_is_not_there_has_no_cost(tmp_path):
    with pytest.raises(UserError, match="its config does not load"):
        row_cost(str(tmp_path), False)


@pytest.mark.parametrize(
    ("prompts", "samples", "size", "trajectories", "expected"),
    [
        (8, 4, 16, 32, 16),  # two steps
        (8, 4, 16, 20, 16),  # groups were filtered
        (8, 4, 16, 64, 32),  # two agents play each episode: two steps still
        (5, 3, 4, 30, 8),  # 15 samples are 4 steps, the last one smaller
    ],
)
def test_several_agents_of_an_episode_make_no_more_optimizer_steps(
    prompts, samples, size, trajectories, expected
):
    flags = RolloutBatchFlags(
        rollout_batch_size=prompts, n_samples_per_prompt=samples, train_batch_size=size
    )
    assert step_size(flags, trajectories) == expected
