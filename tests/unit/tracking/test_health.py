"""Each check on made series of metrics: one that it is for, and one like it that is well."""

from itertools import cycle, islice

import pytest

from openrl.config.groups.health import HealthFlags
from openrl.flags.schema import flags_of
from openrl.tracking.health import CHECKS, HealthMonitor, find_alarms

FLAGS = HealthFlags(alarm_window=4, watch_funcs=("numeric",))


def steps(**columns):
    """Records of steps 1, 2, ... from columns of equal length; ``__`` stands for the slash."""
    named = {name.replace("__", "/"): values for name, values in columns.items()}
    return [
        {"step": step, **dict(zip(named, row, strict=True))}
        for step, row in enumerate(zip(*named.values(), strict=True), 1)
    ]


def line(first, last, count=12):
    return [first + (last - first) * n / (count - 1) for n in range(count)]


def rewards(values, low=0.0, high=1.0):
    n = len(values)
    return dict(
        zip(
            ("rollout__reward", "rollout__reward_min", "rollout__reward_max"),
            (values, [low] * n, [high] * n),
            strict=True,
        )
    )


NORMS = [1.0, 1.2, 0.9, 1.1, 1.0, 0.8, 1.3, 1.0]

SICK = {
    "entropy_collapse": steps(actor__entropy=[2.0] * 4 + [0.01] * 8),
    "kl_explosion": steps(actor__kl=line(0.0, 4.0)),
    "flat_groups": steps(rollout__zero_variance_groups=line(0.5, 1.0, 30)),
    "reward_saturated": steps(**rewards([0.5] * 4 + [1.0] * 8)),
    "length_explosion": steps(rollout__response_length=line(100, 900)),
    "truncated": steps(rollout__truncated_share=line(0.0, 1.0)),
    "gap_grows": steps(actor__logprob_gap=line(0.004, 0.1)),
    "gradient_spike": steps(actor__grad_norm=[*NORMS, 14.0]),
    "clipping": steps(actor__clip_fraction=line(0.0, 0.8)),
    "length_decides": steps(rollout__reward_length_correlation=line(0.0, -1.0, 60)),
    "reward_exploited": steps(**rewards(line(0.23, 0.9)), watch__numeric=line(0.2, 0.05)),
    "dead_engine": steps(rollout__engines_replaced=[0.0, 1.0]),
    "data_exhausted": steps(rollout__data_passes=line(1, 60)),
}

WELL = {
    "entropy_collapse": steps(actor__entropy=line(2.0, 0.1)),
    "kl_explosion": steps(actor__kl=[0.1, 0.1, 2.5, 0.1] * 4),  # one step is not the window
    "flat_groups": steps(rollout__zero_variance_groups=line(0.2, 0.8)),
    "reward_saturated": steps(**rewards(line(0.2, 0.9))),
    "length_explosion": steps(rollout__response_length=line(100, 250)),
    "truncated": steps(rollout__truncated_share=[0.4] * 12),
    # it grows a hundredfold and is still rounding
    "gap_grows": steps(actor__logprob_gap=line(1e-6, 1e-4)),
    "gradient_spike": steps(actor__grad_norm=line(1.0, 15.0, 40)),
    "clipping": steps(actor__clip_fraction=[0.2] * 12),
    "length_decides": steps(rollout__reward_length_correlation=[0.95, -0.2] * 6),
    # it rises with the reward, or is at the top already
    "reward_exploited": steps(
        **rewards(line(0.2, 0.9)), watch__numeric=line(0.1, 0.8), watch__layout=[1.0] * 12
    ),
    "dead_engine": steps(rollout__engines_replaced=[0.0] * 4),
    "data_exhausted": steps(rollout__data_passes=line(1, 30)),
}


def names(records, flags=FLAGS):
    return [alarm.name for alarm in find_alarms(records, flags)]


def test_every_check_has_a_limit_among_the_flags_and_a_series_here():
    limits = [spec.name for spec in flags_of(HealthFlags) if spec.name.startswith("alarm_")]
    assert sorted(limits) == sorted(["alarm_window", *(check.flag for check in CHECKS)])
    assert [check.name for check in CHECKS] == list(SICK) == list(WELL)
    assert all(check.remedy for check in CHECKS)


@pytest.mark.parametrize("name", SICK)
def test_a_sick_run_is_named_and_a_healthy_one_is_not(name):
    assert names(SICK[name]) == [name]
    assert names(WELL[name]) == []


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_limit_of_none_turns_a_check_off(check):
    flags = HealthFlags(alarm_window=4, watch_funcs=("numeric",), **{check.flag: None})
    assert names(SICK[check.name], flags) == []


def test_an_alarm_says_when_what_and_what_to_do():
    (alarm,) = find_alarms(SICK["clipping"], FLAGS)
    # the mean of the last four of 0, 0.0727, ... is 0.0727 * (n - 2.5): first above 0.3 at n = 7
    assert alarm.step == 7 and alarm.found == "the policy loss clips 33% of the tokens"
    assert str(alarm).startswith(
        "clipping at step 7: the policy loss clips 33% of the tokens. Try:"
    )


def test_an_exploited_reward_is_told_with_both_courses():
    alarm, *_ = find_alarms(
        steps(**rewards([0.2] * 4 + [1.0] * 4), watch__numeric=[0.25] * 4 + [0.0] * 4), FLAGS
    )
    assert alarm.step == 6  # two of the four steps: 0.6 - 0.125 and 0.4 + 0.125
    assert "the reward went from 0.20 to 0.60 while watch/numeric" in alarm.found
    assert "from 0.25 to 0.12: answers exploit the reward" in alarm.found


def test_the_scale_of_a_reward_is_that_of_the_run():
    """-3 to 5 instead of 0 to 1."""
    scaled = [8 * value - 3 for value in line(0.23, 0.9)]
    records = steps(**rewards(scaled, -3, 5), watch__numeric=line(0.2, 0.05))
    assert names(records) == ["reward_exploited"]


def test_each_name_is_raised_once_also_after_a_resume():
    collapse = list(islice(cycle([{"actor/entropy": 0.0}]), 10))
    monitor = HealthMonitor(FLAGS)
    raised = [len(monitor.look(step, record)) for step, record in enumerate(collapse, 1)]
    assert raised == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    past = [{"step": step, **record} for step, record in enumerate(collapse[:6], 1)]
    resumed = HealthMonitor(FLAGS, past)
    assert resumed.raised == monitor.raised
    assert not resumed.look(7, collapse[6])


def test_a_step_that_did_not_measure_and_one_that_is_not_finite_do_not_count():
    entropies = [{"actor/entropy": 0.0}, {}, {"actor/entropy": "nan"}, {"actor/kl": 0.1}] * 4
    monitor = HealthMonitor(FLAGS)
    raised = [step for step, record in enumerate(entropies, 1) if monitor.look(step, record)]
    assert raised == [13]  # the fourth that was measured


def test_ten_thousand_steps_take_no_longer_each_than_the_first():
    """What the monitor keeps does not grow with the run."""
    monitor = HealthMonitor(FLAGS)
    for step in range(1, 200):
        monitor.look(step, {"actor/entropy": 1.0, "rollout/reward": 0.5})
    kept = [len(values) for values in monitor.history._last.values()]
    assert kept == [FLAGS.alarm_window + 1] * 2
