"""Which parts of the reward are known before a start, and that estimators find theirs."""

import pytest

from openrl.config.groups.reward import RewardFlags
from openrl.config.reward_plan import reward_plan
from openrl.errors import UserError
from openrl.extension_points import verifiers
from openrl.rewards.known_parts import check_parts, known_parts
from openrl.types import Score


def plan(*names, file=None, models=None):
    return reward_plan(RewardFlags(reward_funcs=names, remote_rm_url=file), models)


def test_one_source_has_its_own_parts_and_several_are_parts():
    assert known_parts(plan("countdown")) == ["well_formed", "numbers_right"]
    assert known_parts(plan("format")) == []
    several = ["gsm8k", "format", "gsm8k/marked"]
    assert known_parts(plan("gsm8k", "format")) == several
    assert known_parts(plan("format", file="r.py")) == ["format", "r", "r/*"]
    assert known_parts(plan(file="r.py:f")) == ["*"]
    assert known_parts(plan(models="a/b")) == []


@pytest.mark.parametrize(
    ("sources", "wanted"),
    [
        (plan("countdown"), ()),
        (plan("countdown"), ("well_formed",)),
        (plan("gsm8k", "format"), ("gsm8k", "gsm8k/marked", "format")),
        (plan(file="r.py"), ("anything",)),
        (plan("format", file="r.py"), ("format", "r/anything")),
        (plan("judge"), ("judge/calls",)),
    ],
)
def test_parts_that_there_may_be(sources, wanted):
    check_parts(sources, "gdpo", wanted)


@pytest.mark.parametrize("sources", [plan("format"), plan(models="a/b"), plan("number")])
def test_a_reward_without_parts_is_refused(sources):
    with pytest.raises(UserError, match="and no source of this run gives any"):
        check_parts(sources, "gdpo", ())


def test_a_part_that_nobody_gives_is_refused_with_those_that_there_are():
    with pytest.raises(UserError, match="no reward source of this run gives right, r2/x") as error:
        check_parts(plan("format", file="r.py"), "gdpo", ("format", "right", "r2/x"))
    assert error.value.remedy == "--gdpo_parts with some of: format, r, r/*"
    with pytest.raises(UserError, match="gives found"):
        check_parts(plan("countdown"), "gdpo", ("found",))


def test_what_a_plugin_gives_is_not_known():
    @verifiers.register("own_parts")
    def own(answer, options):
        """Always right.

        Label: none
        Reward: 0 or 1
        """
        return Score(1.0, parts={"mine": 1.0})

    try:
        check_parts(plan("own_parts"), "gdpo", ("mine",))
    finally:
        del verifiers._entries["own_parts"]
