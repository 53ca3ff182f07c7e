import io

from openrl.report.finish import write_reports
from openrl.tracking.console import PlainConsole
from openrl.tracking.summary import RunSummary
from tests.made_runs import write_metrics

SUMMARY = RunSummary(steps=2, seconds_by_stage={}, samples_per_second=None, tokens_per_second=None)


def finish(directory):
    console = PlainConsole(file=io.StringIO(), width=200)
    write_reports(directory, SUMMARY, console)
    return console.file.getvalue()


def test_the_end_of_a_run_names_the_report_that_it_wrote(tmp_path):
    write_metrics(tmp_path, [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])
    assert str(tmp_path / "report.html") in finish(tmp_path)
    assert "ended after step 2" in (tmp_path / "report.html").read_text()


def test_a_report_that_cannot_be_written_costs_a_line(tmp_path):
    assert "report.html was not written" in finish(tmp_path)  # nothing says that it is a run
    assert (tmp_path / "summary.json").is_file()
