"""What surrounds a run says how it ended, whatever happens to its own log."""

import logging
import resource
from types import SimpleNamespace

import pytest

from openrl.config.groups.checkpoint import CheckpointFlags
from openrl.trainer.saving.disk import DiskFull
from openrl.trainer.watching.supervision import driver_log, how_to_resume


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


def test_checkpoints_that_nothing_can_resume_from_are_not_called_missing(tmp_path):
    flags = CheckpointFlags(ckpt_path=str(tmp_path), save_steps=3)
    assert how_to_resume(flags) == "the same command; no checkpoint was written (--save_steps 3)"
    (tmp_path / "step_000003").mkdir()
    said = how_to_resume(flags)
    assert "--overwrite_ckpt to start fresh: --load_checkpoint: every checkpoint is damaged" in said
    assert "step_000003: manifest.json is missing" in said
