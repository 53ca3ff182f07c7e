"""A reward model as a role of its own: what it says reaches greedy baselines and filtering, group
by group.

The command with all its parts, but every worker lives in this process.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from statistics import mean

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.contract.test_serve_rm import serving
from tests.e2e.bench import without_ray
from tests.e2e.runs import make_task, metrics, played, ppo_flags, run_here

pytestmark = pytest.mark.full


TOKENS = 6  # of a response at most
RANGE = (-0.4, 0.4)  # about half of the groups


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    task = make_task(tmp_path_factory.mktemp("task"))
    torch.manual_seed(0)
    judge = AutoModelForSequenceClassification.from_pretrained(task / "model", num_labels=1)
    judge.save_pretrained(task / "judge")
    AutoTokenizer.from_pretrained(task / "model").save_pretrained(task / "judge")
    return task


def one_step(task, out, **source):
    """(metrics, every sample) of one step with both: a baseline and a filter by the model's
    scores."""
    changes = source | {
        "advantage_estimator": "remax",
        "dynamic_filtering": True,
        "dynamic_filtering_reward_range": RANGE,
        "rollout_backend": "hf",
        "rollout_batch_size": 4,
        "train_batch_size": 8,
        "generate_max_len": TOKENS,
        "init_kl_coef": 0,
        "full_determinism": True,
        "max_steps": 1,
        "trace_sample_rate": 1,
    }
    assert run_here(ppo_flags(task, out, **changes), without_ray) == 0
    return metrics(out)[0], played(out)


@pytest.fixture(scope="module")
def ran(task, tmp_path_factory):
    return one_step(
        task, tmp_path_factory.mktemp("out"), remote_rm_url=None, reward_pretrain=task / "judge"
    )


@pytest.fixture(scope="module")
def score(task):
    """The reward model's score of a text, by transformers alone."""
    judge = AutoModelForSequenceClassification.from_pretrained(task / "judge", num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(task / "model")

    def score(text):
        with torch.no_grad():
            return float(
                judge(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits
            )

    return score


def kept(samples):
    """Prompts whose mean score is in the range."""
    rewards = defaultdict(list)
    for sample in samples:
        rewards[sample["prompt_id"]].append(sample["score"]["reward"])
    return {id for id, values in rewards.items() if RANGE[0] < mean(values) < RANGE[1]}


def test_every_generated_answer_has_the_models_score(ran, score):
    for sample in ran[1]:
        assert sample["score"]["reward"] == pytest.approx(
            score(sample["prompt"] + sample["text"]), abs=1e-4
        )


def test_a_server_of_the_same_model_gives_the_same_rewards_for_the_same_rows(ran, task, tmp_path):
    """The same step, but for the source of rewards: every row that was drawn, and what was made of
    it."""
    flags = ("--reward_pretrain", task / "judge", "--param_dtype", "fp32")
    with serving(*flags) as (url, _):
        step, samples = one_step(task, tmp_path, remote_rm_url=f"{url}/get_reward")

    def rewards(samples):
        return {(s["prompt_id"], s["text"]): s["score"]["reward"] for s in samples}

    expected = rewards(ran[1])
    assert len(expected) > 16 and rewards(samples) == pytest.approx(expected, abs=1e-5)
    for name in ("rollout/advantage_abs", "actor/policy_loss", "filter/generated_groups"):
        assert step[name] == pytest.approx(ran[0][name], rel=1e-3, abs=1e-5)


def test_groups_are_filtered_by_the_models_scores(ran):
    step, samples = ran
    # some were replaced
    assert step["filter/generated_groups"] == len({s["prompt_id"] for s in samples}) > 4
    assert step["filter/kept_groups"] == len(kept(samples)) == 4


def test_remax_compares_with_the_models_score_of_the_greedy_answer(ran, score, task):
    """Advantages are those of the answers' scores, less that of what transformers decodes
    greedily."""
    step, samples = ran
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    policy = AutoModelForCausalLM.from_pretrained(task / "model")
    trained = [s for s in samples if s["prompt_id"] in kept(samples)]
    baselines = {}
    for prompt in {s["prompt"] for s in trained}:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        baselines[prompt] = score(
            tokenizer.decode(policy.generate(ids, do_sample=False, max_new_tokens=TOKENS)[0])
        )
    lengths = [sum(s["segments"][0]["loss_mask"]) for s in trained]
    sizes = [abs(s["score"]["reward"] - baselines[s["prompt"]]) for s in trained]
    per_token = sum(map(operator.mul, sizes, lengths)) / sum(lengths)
    assert step["rollout/advantage_abs"] == pytest.approx(per_token, abs=1e-4)
