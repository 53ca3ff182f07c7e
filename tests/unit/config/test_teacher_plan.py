"""Which teacher teaches which rows, from the flags."""

import pytest

from openrl.config.commands import PPOConfig
from openrl.config.groups.teacher import TeacherFlags
from openrl.config.teacher_plan import EarlierPolicy, Teacher, read_teachers, teacher_plan
from openrl.errors import UserError
from tests.flags import said


def routed(tmp_path, text):
    path = tmp_path / "routes.yaml"
    path.write_text(text)
    return TeacherFlags(teacher_routing=str(path))


def test_names_say_what_teaches(tmp_path):
    text = (
        "math: {org/model: 1}\ncode: {'http://host:1/v1': 0.5}\nchat: {4: 2}\nother: {org/model: 3}"
    )
    plan = read_teachers(routed(tmp_path, text))
    assert plan.teachers == (
        Teacher("org/model", "model", "math"),
        Teacher("http://host:1/v1", "server", "code", 0.5),
        Teacher("4", "self", "chat", 2.0),
        Teacher("org/model", "model", "other", 3.0),
    )
    assert plan.of("model") == ["org/model"] and (plan.own, plan.every) == ("4", 4)


@pytest.mark.parametrize(
    "text, message",
    [
        ("math: {a: 1, b: 1}", "two teachers, a and b"),
        ("math: {a: 1}\nmath: {b: 1}", "'math' is there twice"),
        ("math: {a: 0}", "weight above 0"),
        ("math: a", "weight above 0"),
        ("[]", "names no data sources"),
        ("math: {start: 1}\ncode: {ema: 1}", "only one of its earlier selves"),
        ("math: {'http://host:x/v1': 1}", "no valid host and port"),
        ("math: {'http://me:secret@host/v1': 1}", "would be written to logs"),
        ("math: {'http://me:secret@host:99999/v1': 1}", "would be written to logs"),
        ("math: {0: 1}", "neither start nor ema nor a number of steps"),
    ],
)
def test_what_is_no_routing(tmp_path, text, message):
    flags = routed(tmp_path, text)
    with pytest.raises(UserError, match=message):
        read_teachers(flags)
    assert not teacher_plan(flags).teachers  # reported once, by the rule


@pytest.mark.parametrize(
    "own, every, earlier",
    [
        ("start", None, ("start", 1.0)),
        ("ema", None, ("ema", 0.99)),
        ("3", 3, ("steps", 1.0)),
        ("1", 1, None),
    ],
)
def test_which_weights_the_policy_keeps(own, every, earlier):
    flags = TeacherFlags(teacher_self=own)
    plan = read_teachers(flags)
    expected = earlier and EarlierPolicy(*earlier)
    assert (plan.every, plan.earlier(flags)) == (every, expected)


def test_a_weight_of_0_leaves_a_teachers_advantage_nothing_to_act_through(tmp_path):
    path = tmp_path / "algo.yaml"
    path.write_text("chat: {rl_weight: 0}\n")
    words = f"--pretrain m --prompt_data d --teacher_pretrain t --algo_routing {path}"
    message = "the teacher's advantage acts through the policy loss, which chat weighs 0"
    assert any(message in problem for problem in said(PPOConfig, words))
    as_loss = said(PPOConfig, f"{words} --teacher_mode reverse_kl")
    assert not any(message in problem for problem in as_loss)
