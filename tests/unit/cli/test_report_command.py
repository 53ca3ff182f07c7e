import pytest

from openrl.cli.report import main
from tests.made_runs import write_run


def test_a_report_is_written_beside_the_run_or_elsewhere(tmp_path, capsys):
    run, other = write_run(tmp_path / "run"), write_run(tmp_path / "other")
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert main([str(run), str(other), "--output_path", str(tmp_path / "both.html")]) == 0
    assert 'id="table-1"' in (tmp_path / "both.html").read_text()


@pytest.mark.parametrize("more", [[], ["--serve"]])
def test_a_directory_that_is_no_run_is_refused(tmp_path, capsys, more):
    assert main([str(tmp_path), *more]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err
