"""Prompts that are seeds of environments."""

from __future__ import annotations

from collections import Counter

import pytest

from openrl.data.environments import MOST_SEEDS, environment_prompts
from openrl.trainer.planning.prepare import training_prompts
from tests.flags import ppo

GAMES = (
    "--pretrain m --advantage_estimator group_norm --n_samples_per_prompt 8 --rollout_batch_size 30 --train_batch_size 120"
    " --env_tags sokoban bandit --env_groups_per_tag 20 10"
)


@pytest.mark.parametrize(
    ("steps", "count"),
    [
        ("--max_steps 3", 90),
        ("--max_steps 3 --max_samples 50", 50),
        ("--max_steps 99999", MOST_SEEDS),
    ],
)
def test_a_run_has_the_seeds_that_it_consumes(steps, count):
    prompts, _ = training_prompts(ppo(f"{GAMES} {steps}"), builder=None)
    assert len(prompts) == len({prompt.id for prompt in prompts}) == count


def test_tags_have_their_share_and_evaluation_seeds_of_its_own():
    train, evaluated = (
        environment_prompts({"a": 2, "b": 1}, 30, run_seed=7, kind=kind)
        for kind in ("train", "eval")
    )
    assert Counter(prompt.source for prompt in train) == {"a": 20, "b": 10}
    seeds = [{prompt.meta["seed"] for prompt in prompts} for prompts in (train, evaluated)]
    assert len(seeds[0]) == 30 and not seeds[0] & seeds[1]
    again = environment_prompts({"a": 2, "b": 1}, 30, run_seed=7, kind="train")
    assert again == train
