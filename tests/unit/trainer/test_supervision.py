"""What surrounds a run says how it ended, whatever happens to its own log."""

import asyncio
import logging
import os
import resource
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from openrl.cluster.group import WorkerDied
from openrl.config.commands import SFTConfig
from openrl.config.groups.checkpoint import CheckpointFlags
from openrl.config.groups.placement import LAUNCHER_VARIABLES
from openrl.errors import Interrupted
from openrl.trainer.saving.checkpoints import Checkpoints
from openrl.trainer.saving.disk import DiskFull
from openrl.trainer.watching.supervision import (
    StopRequest,
    WorkerLost,
    driver_log,
    explain_end,
    how_to_resume,
    with_restarts,
)
from tests.flags import settle
from tests.loops import silent_progress
from tests.unit.trainer.test_checkpoints import save


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


# -- how to go on ----------------------------------------------------------------------------------


def opened(directory: Path, **flags) -> Checkpoints:
    flags = {"ckpt_path": str(directory / "ckpt"), "save_path": str(directory)} | flags
    return Checkpoints(CheckpointFlags(**flags), {})


def test_checkpoints_that_nothing_can_resume_from_are_not_called_missing(tmp_path):
    checkpoints = opened(tmp_path, save_steps=3)
    none = "no checkpoint was written (--save_steps 3)"
    assert how_to_resume(checkpoints) == f"the same command; {none}"
    (tmp_path / "metrics.jsonl").touch()  # a second start would be refused
    assert how_to_resume(checkpoints) == f"the same command with --overwrite_ckpt; {none}"
    (save(checkpoints, 3) / "manifest.json").unlink()
    said = how_to_resume(checkpoints)
    assert "--overwrite_ckpt to start fresh: --load_checkpoint: every checkpoint is damaged" in said
    assert "step_000003: manifest.json is missing" in said


@pytest.mark.parametrize(
    ("typed", "flags", "before", "after"),
    [
        ("--seed 1", {}, "no checkpoint was written", "--seed 1 --load_checkpoint"),
        (
            "--overwrite --seed 1",
            {"overwrite_ckpt": True},
            "no checkpoint was written",
            "--seed 1 --load_checkpoint",
        ),
        (
            "--config a.yaml",
            {"overwrite_ckpt": True},
            "no checkpoint was written",
            "--config a.yaml --no_overwrite_ckpt --load_checkpoint",
        ),
        (
            "--resume_from_checkpoint {old}/step_000004 --seed 1",
            {"resume_from_checkpoint": "{old}/step_000004"},
            "the same command, which continues from {old}/step_000004",
            "--seed 1 --load_checkpoint",
        ),
        (
            "--load_checkpoint=strict",
            {"load_checkpoint": "strict"},
            "--load_checkpoint=strict\n       which continues from {old}/step_000006",
            "--load_checkpoint=strict",
        ),
    ],
)
def test_a_run_goes_on_from_where_it_began_until_it_has_written_a_checkpoint(
    tmp_path, monkeypatch, typed, flags, before, after
):
    """Checkpoints of an earlier run lie there. None of them is this run's until it says so."""
    old = tmp_path / "ckpt"
    for step in (2, 4, 6):
        save(opened(tmp_path), step)
    flags = {k: v.format(old=old) if isinstance(v, str) else v for k, v in flags.items()}
    monkeypatch.setattr(sys, "argv", ["train", *typed.format(old=old).split()])
    monkeypatch.setattr(sys, "orig_argv", ["python", *sys.argv])
    checkpoints = opened(tmp_path, **flags)
    assert before.format(old=old) in how_to_resume(checkpoints)
    assert checkpoints.resume_flags() == checkpoints.flags
    save(checkpoints, 7)
    expected = f"python train {after}\n       which continues from {old}/step_000007"
    assert how_to_resume(checkpoints) == expected
    restarted = Checkpoints(checkpoints.resume_flags(), {})
    assert restarted.start_from == old / "step_000007"


@pytest.mark.parametrize(
    ("left_in_the_environment", "said"),
    [(("RANK", "WORLD_SIZE"), "python train"), (LAUNCHER_VARIABLES, "with the same launcher: ")],
)
def test_a_launcher_is_named_if_there_is_one(tmp_path, monkeypatch, left_in_the_environment, said):
    """A process group of one process, which needs no launcher, sets some of its variables."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in left_in_the_environment:
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(sys, "argv", ["train"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "train"])
    checkpoints = opened(tmp_path)
    save(checkpoints, 7)
    assert how_to_resume(checkpoints).startswith(said)


@pytest.mark.parametrize(("by_ray", "runs"), [(True, 3), (False, 1)])
def test_a_run_restarts_itself_unless_a_launcher_started_its_ranks(tmp_path, by_ray, runs):
    """The other ranks have ended, so rank 0 would wait for them in vain."""
    words = f"--pretrain m --dataset d --save_path {tmp_path} --max_restarts 2"
    config, _ = settle(SFTConfig, words + " --num_gpus_per_node 2" * by_ray)
    tried = []

    async def once(config, stop):
        tried.append(config.checkpoint.load_checkpoint)
        raise WorkerLost("rank 1 died", "", replace(config.checkpoint, load_checkpoint=True))

    with pytest.raises(WorkerLost):
        asyncio.run(with_restarts(config, StopRequest(), once))
    assert tried == [False, True, True][:runs]


def test_a_lost_worker_brings_along_how_the_run_goes_on(tmp_path):
    checkpoints = opened(tmp_path, overwrite_ckpt=True)
    with pytest.raises(WorkerLost) as lost, explain_end(silent_progress(3), checkpoints, None):
        raise WorkerDied("actor rank 0 died")
    assert lost.value.resume == checkpoints.flags
    assert lost.value.message.startswith("actor rank 0 died\n  noticed ")


# -- signals ---------------------------------------------------------------------------------------


async def interrupted_at(tmp_path, stop: StopRequest, then) -> None:
    """Get SIGTERM, and then do what ``then()`` does."""
    with explain_end(silent_progress(3), opened(tmp_path), stop), stop.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        await then()


def forever() -> asyncio.Future:
    return asyncio.get_running_loop().create_future()


def test_a_signal_before_there_is_anything_to_save_ends_the_run(tmp_path):
    """On every rank of a launcher, not only on the one that owns the directories."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM: the run had not begun to train") as ended:
        asyncio.run(interrupted_at(tmp_path, StopRequest(), forever))
    assert ended.value.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_does_not_end_in_time_is_ended(tmp_path):
    stop = StopRequest(grace=0.05)
    stop.saves = True
    with pytest.raises(Interrupted, match=r"saved within --grace_period 0\.05"):
        asyncio.run(interrupted_at(tmp_path, stop, forever))


def test_what_comes_after_everything_is_saved_has_no_deadline(tmp_path):
    stop = StopRequest()
    stop.saves = True

    async def saved() -> None:
        await asyncio.sleep(0)
        assert stop._deadline and not stop._deadline.cancelled()
        stop.lift_deadline()
        assert stop._deadline.cancelled()

    asyncio.run(interrupted_at(tmp_path, stop, saved))


def test_a_signal_during_the_clean_up_does_not_cut_it_short(tmp_path):
    """The run would be said to have lost what it has saved."""

    async def cleaned_up() -> bool:
        stop = StopRequest(grace=0)
        stop.saves = True
        with explain_end(silent_progress(3), opened(tmp_path), stop), stop.listening():
            stop.lift_deadline()
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(5):  # turns of the event loop
                await asyncio.sleep(0)
            return bool(stop.signal)

    assert asyncio.run(cleaned_up())


def test_a_second_signal_ends_a_process_that_is_busy():
    """The first waits for the event loop, which a long step in this process keeps from running."""

    async def busy() -> None:
        stop = StopRequest()
        stop.saves = True
        with stop.listening():
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.signal
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    child = os.fork()
    if not child:
        try:
            asyncio.run(busy())
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 143
