"""Which teacher teaches which rows, from the flags."""

import pytest

from openrl.config.groups.teacher import TeacherFlags
from openrl.config.teacher_plan import Teacher, read_teachers, teacher_plan
from openrl.errors import UserError


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
        ("math: {0: 1}", "neither start nor ema nor a number of steps"),
    ],
)
def test_what_is_no_routing(tmp_path, text, message):
    flags = routed(tmp_path, text)
    with pytest.raises(UserError, match=message):
        read_teachers(flags)
    assert not teacher_plan(flags).teachers  # reported once, by the rule


@pytest.mark.parametrize(
    "own, every, beta", [("start", None, 1.0), ("ema", None, 0.99), ("3", 3, 1.0), ("1", 1, None)]
)
def test_which_weights_the_policy_keeps(own, every, beta):
    flags = TeacherFlags(teacher_self=own)
    plan = read_teachers(flags)
    assert (plan.every, plan.earlier_beta(flags)) == (every, beta)
