"""The book of a run: what is counted, what it makes of it, and that it survives a checkpoint."""

import io

from rich.console import Console

from openrl.tracking.summary import summary_table
from openrl.tracking.totals import Totals, throughput


def test_rates_of_a_step_and_of_the_run():
    totals = Totals()
    assert totals.add(8, 100, {"time/step": 4.0, "time/train": 1.0}) == {
        "time/step": 4.0,
        "time/train": 1.0,
        "perf/samples_per_second": 2.0,
        "perf/tokens_per_second": 25.0,
    }
    resumed = Totals(**vars(totals))
    resumed.add(8, 200, {"time/step": 12.0})
    summary = resumed.summary(2, {"train": 3.0})
    assert (summary.samples_per_second, summary.tokens_per_second) == (1.0, 300 / 16)
    assert (summary.steps, summary.seconds_by_stage, summary.eval_pass_before) == (
        2,
        {"train": 3.0},
        None,
    )


def test_a_run_without_steps_has_no_rate():
    summary = Totals().summary(0, {})
    assert (summary.samples_per_second, summary.tokens_per_second) == (None, None)
    console = Console(file=io.StringIO())
    console.print(summary_table(summary, {}))
    assert "steps" in console.file.getvalue() and "/s" not in console.file.getvalue()


def test_tokens_per_gpu_and_second():
    laps = {"time/step": 10.0, "time/rollout": 5.0}
    assert throughput(4000, 4, laps) == {
        "perf/tokens_per_gpu_per_s_e2e": 100.0,
        "perf/tokens_per_gpu_per_s_rollout": 200.0,
    }
