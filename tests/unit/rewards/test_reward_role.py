"""Reward models as a role: several in one group of workers, normalised, against transformers' own
classifier."""

import asyncio
import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from openrl.algorithms.collate import collate
from openrl.cluster.group import LocalGroup
from openrl.config.groups.reward import RewardFlags
from openrl.config.reward_plan import reward_plan
from openrl.errors import UserError
from openrl.models.scalar_model import stored_moments
from openrl.rewards.combined import RewardCombiner
from openrl.trainer.learning.rows import BatchingSpec, forward_rows
from openrl.trainer.planning.other_models import check_same_tokens
from openrl.trainer.rollout.reward_models import RewardModels
from openrl.workers.model_worker import ModelWorker
from tests.experience import engine_spec
from tests.tiny import PAD, tiny_reward_model_dir, tiny_tokenizer
from tests.unit.rewards.test_reward_function import group


def classify(path, row):
    """The score of one row alone."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(model(torch.tensor([row.segments[0].token_ids])).logits[0, 0])


def test_several_models_in_one_role(tmp_path):
    first = tiny_reward_model_dir(tmp_path, seed=1, mean=0.5, std=2.0)
    second = tiny_reward_model_dir(tmp_path, seed=2, mean=-1.0, std=0.25)
    specs = [engine_spec(path, "rewards", normalise=True) for path in (first, second)]
    plan = reward_plan(RewardFlags(reward_weights=(1.0, 3.0)), f"{first},{second}")
    groups = [group("12", "3", prompt="4+5="), group("678", prompt="1=")]

    async def scenario():
        workers = LocalGroup.create("reward", 1, ModelWorker, *specs)
        await workers.call("start")

        async def forward(asked, model):
            return await forward_rows(workers, collate(asked, PAD), BatchingSpec(2, 2), model)

        try:
            await RewardModels(RewardCombiner(plan, "drop"), forward).score(groups)
        finally:
            await workers.close()

    asyncio.run(scenario())
    for row in (row for made in groups for row in made.trajectories):
        one, two = (classify(first, row) - 0.5) / 2, (classify(second, row) + 1) / 0.25
        assert row.score.reward == pytest.approx(one + 3 * two, abs=1e-4)
        assert list(row.score.parts.values()) == pytest.approx([one, two], abs=1e-4)


def test_a_reward_model_must_read_the_policys_tokens(tmp_path):
    path = tiny_reward_model_dir(tmp_path)
    policy = tiny_tokenizer()
    check_same_tokens(str(path), policy)
    policy.add_tokens(["more"])  # of its own: none of the others moves
    check_same_tokens(str(path), policy)
    other = tiny_tokenizer()
    other.add_tokens(["else"])
    other.save_pretrained(tmp_path / "other")
    message = r"token 66 is 'else' there and 'more' here \(1 tokens differ\)"
    with pytest.raises(UserError, match=message):
        check_same_tokens(str(tmp_path / "other"), policy)
    policy.pad_token = "more"  # which no text holds
    check_same_tokens(str(tmp_path / "other"), policy)
    policy = tiny_tokenizer()  # as in families whose larger models have more tokens
    check_same_tokens(str(tmp_path / "other"), policy)
    shifted = json.loads((path / "tokenizer.json").read_text())
    vocabulary = shifted["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (path / "tokenizer.json").write_text(json.dumps(shifted))
    with pytest.raises(
        UserError,
        match=r"different tokenizers: 'a' is token 16 there and 15 here \(2 tokens differ\)",
    ):
        check_same_tokens(str(path), policy)
    (path / "tokenizer.json").write_text("{torn")
    with pytest.warns(UserWarning, match="no tokenizer that loads, so nobody compares"):
        check_same_tokens(str(path), policy)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "has no mean and std"),
        ({"mean": 0.0}, "has no mean"),
        ({"mean": 0.0, "std": 0.0}, "std 0"),
    ],
)
def test_moments_that_are_not_stored_are_an_error(tmp_path, fields, said):
    with pytest.raises(UserError, match=said):
        stored_moments(str(tiny_reward_model_dir(tmp_path, **fields)))
