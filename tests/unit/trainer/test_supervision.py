"""What surrounds a run says how it ended, whatever happens to its own log."""

import logging
import resource
from types import SimpleNamespace

import pytest

from openrl.trainer.saving.disk import DiskFull
from openrl.trainer.watching.supervision import driver_log


def test_a_log_on_a_full_disk_hides_no_error(tmp_path, capfd):
    config = SimpleNamespace(logging=SimpleNamespace(logging_dir=str(tmp_path)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(DiskFull), driver_log(config):
            logging.getLogger().warning("a line that fits")
            logging.getLogger().warning("one that does not " * 10)
            raise DiskFull("the model could not be written")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "a line that fits" in (tmp_path / "driver.log").read_text()
    assert "Logging error" not in capfd.readouterr().err
