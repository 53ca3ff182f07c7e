import io

import pytest

from openrl.report.finish import closing_table, write_reports
from openrl.tracking.console import PlainConsole
from openrl.tracking.summary import RunSummary
from tests.full_disk import files_of_at_most
from tests.made_runs import write_metrics

SUMMARY = RunSummary(steps=2, seconds_by_stage={}, samples_per_second=None, tokens_per_second=None)


def test_the_end_of_a_run_names_the_report_that_it_wrote(tmp_path):
    write_metrics(tmp_path, [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])
    report = write_reports(tmp_path, SUMMARY, pytest.fail)
    assert "ended after step 2" in report.read_text()
    console = PlainConsole(file=io.StringIO(), width=200)
    console.print(closing_table(tmp_path, SUMMARY))
    assert str(report) in console.file.getvalue()


def test_a_report_that_cannot_be_written_costs_a_line(tmp_path):
    notes = []
    assert write_reports(tmp_path, SUMMARY, notes.append) is None  # nothing says that it is a run
    assert [note for note in notes if "report.html was not written" in note] == notes != []
    assert (tmp_path / "summary.json").is_file()


def test_a_summary_that_cannot_be_written_costs_a_line(tmp_path):
    write_metrics(tmp_path, [{"step": 1, "loss": 2.0}])
    notes = []
    with files_of_at_most(20):
        assert write_reports(tmp_path, SUMMARY, notes.append) is None
    (note,) = notes
    assert "summary.json was not written" in note and "File too large" in note
