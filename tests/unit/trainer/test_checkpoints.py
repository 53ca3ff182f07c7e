"""Checkpoints on disk: complete or absent, the newest found, old ones removed only afterwards."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from openrl.cluster.group import WorkerTimeout
from openrl.config.groups.checkpoint import CheckpointFlags
from openrl.errors import UserError
from openrl.trainer.saving import checkpoints as module
from openrl.trainer.saving.checkpoints import (
    READABLE_VERSIONS,
    SCHEMA_VERSION,
    Checkpoints,
    changed_flags,
    find_start,
    read_state,
    step_of,
)
from openrl.trainer.saving.disk import DiskFull, disk_is_full, first_line, model_has_room
from openrl.trainer.saving.integrity import add_checksum
from openrl.training_engine.state import StateParts
from tests.full_disk import files_of_at_most
from tests.patience import PATIENCE


def opened(directory: Path, **flags: object) -> Checkpoints:
    return Checkpoints(CheckpointFlags(ckpt_path=str(directory), **flags), {"seed": 1})


async def no_export(directory: Path) -> None:
    raise AssertionError("no flag asks for a copy")


def save(
    checkpoints: Checkpoints,
    step: int,
    content: str = "weights",
    error: Exception | None = None,
    metric: float | None = None,
) -> Path:
    async def write(directory: Path, parts: StateParts) -> None:
        (directory / "actor").mkdir()
        (directory / "actor" / "rank0").write_text(content)
        if error:
            raise error

    return asyncio.run(checkpoints.save(step, {"step": step}, write, no_export, metric))


def steps(directory: Path) -> list[int]:
    """Of the checkpoints that a new run would find."""
    return [step_of(path) for path in opened(directory).complete()]


def test_a_checkpoint_holds_what_was_written_and_the_drivers_state(tmp_path):
    path = save(opened(tmp_path / "new" / "place"), 4)
    assert path.name == "step_000004" and (path / "actor/rank0").read_text() == "weights"
    assert read_state(path) == ({"step": 4}, {"seed": 1})
    assert [p.name for p in path.parent.iterdir()] == ["step_000004"]


@pytest.mark.parametrize(
    ("flags", "held"),
    [
        ({}, ["manifest.json", "state", "state.json"]),
        ({"save_hf_ckpt": True}, ["hf", "manifest.json", "state", "state.json"]),
        ({"save_hf_ckpt": True, "disable_ds_ckpt": True}, ["hf", "manifest.json", "state.json"]),
    ],
)
def test_flags_say_what_a_checkpoint_holds(tmp_path, flags, held):
    async def write(directory: Path, parts: StateParts) -> None:
        (directory / "state").write_text(f"optimizer: {parts.optimizer}")

    async def export(directory: Path) -> None:
        directory.mkdir()

    checkpoints = opened(tmp_path, save_optim=False, **flags)
    path = asyncio.run(checkpoints.save(1, {}, write, export))
    assert sorted(file.name for file in path.iterdir()) == held
    assert "state" not in held or (path / "state").read_text() == "optimizer: False"


def test_a_failing_write_leaves_the_previous_one_and_nothing_that_looks_complete(tmp_path):
    checkpoints = opened(tmp_path)
    save(checkpoints, 2)
    with pytest.raises(OSError, match="disk full"):
        save(checkpoints, 4, error=OSError("disk full"))
    assert steps(tmp_path) == [2]
    assert opened(tmp_path, load_checkpoint=True).start_from == tmp_path / "step_000002"
    save(checkpoints, 6)
    # no remains either
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000002", "step_000006"]


def test_the_name_is_given_only_when_everything_is_on_disk(tmp_path, monkeypatch):
    """A crash after the writes and before the rename: the manifest is there, the name is not."""

    def crash(directory: Path) -> None:
        assert {p.name for p in directory.iterdir()} == {"actor", "state.json", "manifest.json"}
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "sync_tree", crash)
    with pytest.raises(KeyboardInterrupt):
        save(opened(tmp_path), 2)
    assert steps(tmp_path) == []
    assert opened(tmp_path, load_checkpoint=True).start_from is None


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [8]), (2, [6, 8]), (3, [4, 6, 8]), (0, [2, 4, 6, 8])]
)
def test_retention_keeps_the_newest(tmp_path, keep, left):
    checkpoints = opened(tmp_path, max_ckpt_num=keep)
    for step in (2, 4, 6, 8):
        save(checkpoints, step)
    assert steps(tmp_path) == left


def test_nothing_is_removed_before_the_new_one_is_complete(tmp_path):
    checkpoints = opened(tmp_path, max_ckpt_num=1)
    save(checkpoints, 2)

    async def write(directory: Path, parts: StateParts) -> None:
        assert steps(tmp_path) == [2]

    asyncio.run(checkpoints.save(4, {}, write, no_export))
    assert steps(tmp_path) == [4]


def test_overwrite_removes_the_earlier_runs_checkpoints_once_there_is_a_new_one(tmp_path):
    for step in (2, 4, 6):
        save(opened(tmp_path), step, "earlier")
    fresh = opened(tmp_path, overwrite_ckpt=True)
    assert fresh.start_from is None
    with pytest.raises(OSError):
        save(fresh, 1, error=OSError())
    assert steps(tmp_path) == [2, 4, 6]
    save(fresh, 4, "new")  # of the same name as an earlier one
    assert [p.name for p in tmp_path.iterdir()] == ["step_000004"]
    assert (tmp_path / "step_000004/actor/rank0").read_text() == "new"
    save(fresh, 5)
    assert steps(tmp_path) == [4, 5]


def test_the_newest_is_the_one_with_the_highest_step(tmp_path):
    checkpoints = opened(tmp_path)
    for step in (1_000_000, 999_999):  # as text, the other way round
        save(checkpoints, step)
    assert step_of(opened(tmp_path, load_checkpoint=True).start_from) == 1_000_000
    assert opened(tmp_path).start_from is None and step_of(None) == -1


@pytest.mark.parametrize("other", [READABLE_VERSIONS[0] - 1, SCHEMA_VERSION + 1])
def test_another_schema_is_refused(tmp_path, other):
    path = save(opened(tmp_path), 2)
    manifest = json.loads((path / "manifest.json").read_text())
    changed = add_checksum(manifest | {"schema_version": other})
    (path / "manifest.json").write_text(json.dumps(changed))
    message = rf"step_000002 has schema version {other}, this is {SCHEMA_VERSION}"
    with pytest.raises(UserError, match=message) as caught:
        read_state(path)
    assert "--overwrite_ckpt" in caught.value.remedy


def flip(path):
    """One bit, as a bad disk does it."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def unreadable(path):
    """As on a bad disk: a read fails, and it has the size that it should have."""
    manifest = json.loads((path.parents[1] / "manifest.json").read_text())
    manifest["files"]["actor/rank0"][0] = 0
    (path.parents[1] / "manifest.json").write_text(json.dumps(add_checksum(manifest)))
    path.unlink()
    path.symlink_to("/proc/self/mem")


def loop(path):
    path.unlink()
    path.symlink_to(path.name)


DAMAGE = {
    "unreadable": (unreadable, "actor/rank0", "actor/rank0 cannot be read (Input/output error)"),
    "a link to itself": (loop, "actor/rank0", "actor/rank0 cannot be read (Too many levels"),
    "empty": (lambda path: path.write_bytes(b""), "manifest.json", "manifest.json cannot be read"),
    "nested": (
        lambda path: path.write_text("[" * 100_000),
        "manifest.json",
        "manifest.json cannot be read (RecursionError",
    ),
    "flipped": (flip, "actor/rank0", "actor/rank0 is not what was written: its checksum differs"),
    "cut": (cut, "actor/rank0", "actor/rank0 has 4 bytes instead of 7"),
    "gone": (Path.unlink, "actor/rank0", "actor/rank0 is missing"),
    "state flipped": (flip, "state.json", "state.json is not what was written"),
    "manifest flipped": (flip, "manifest.json", "manifest.json "),
    "manifest cut": (cut, "manifest.json", "manifest.json cannot be read"),
    "manifest gone": (Path.unlink, "manifest.json", "manifest.json is missing"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_newest_whole_one_is_used(tmp_path, case):
    damages, name, words = DAMAGE[case]
    for step in (2, 4, 6):
        path = save(opened(tmp_path), step)
    damages(path / name)
    resumed = opened(tmp_path, load_checkpoint=True)
    assert resumed.start_from == tmp_path / "step_000004"
    assert len(resumed.notes) == 1 and f"{path}: {words}" in resumed.notes[0]
    with pytest.raises(UserError, match="the newest checkpoint is damaged"):
        opened(tmp_path, load_checkpoint="strict")
    with pytest.raises(UserError, match="step_000006: "):
        opened(tmp_path, resume_from_checkpoint=str(path))
    for other in (2, 4):
        damages(tmp_path / f"step_{other:06d}" / name)
    with pytest.raises(UserError, match="every checkpoint is damaged") as caught:
        opened(tmp_path, load_checkpoint=True)
    assert caught.value.message.count("\n") == 3 and "--overwrite_ckpt" in caught.value.remedy


def test_what_somebody_put_beside_the_checkpoints_is_none(tmp_path):
    """A copy under another name, and a file."""
    path = save(opened(tmp_path), 2)
    shutil.copytree(path, tmp_path / "step_000002.old")
    shutil.copytree(path, tmp_path / "step_best")
    (tmp_path / "step_000009").write_text("a file")
    resumed = opened(tmp_path, load_checkpoint=True, max_ckpt_num=1)
    assert resumed.start_from == path and len(resumed.notes) == 1
    save(resumed, 4)
    left = ["step_000002.old", "step_000004", "step_000009", "step_best"]
    assert sorted(p.name for p in tmp_path.iterdir()) == left


def test_a_checkpoint_that_is_a_link_goes_without_what_it_points_to(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    path = save(opened(tmp_path / "here"), 2)
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    resumed = opened(tmp_path / "here", load_checkpoint=True, max_ckpt_num=1)
    assert resumed.start_from == path
    save(resumed, 4)
    assert steps(tmp_path / "here") == [4] and (elsewhere / "manifest.json").exists()


def test_a_checkpoint_that_cannot_be_removed_stays_and_the_run_goes_on(
    tmp_path, monkeypatch, caplog
):
    checkpoints = opened(tmp_path, max_ckpt_num=1)
    save(checkpoints, 2)

    def busy(path):
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", busy)  # as NFS does with files that are open
        save(checkpoints, 4)
    assert "step_000002 could not be removed: [Errno 16]" in caplog.text
    save(checkpoints, 6)
    assert steps(tmp_path) == [6]


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before_and_nothing_else(tmp_path):
    checkpoints = opened(tmp_path)
    save(checkpoints, 2)
    with (
        files_of_at_most(10_000),
        pytest.raises(DiskFull, match=r"step_000004 could not be written: .*File too large"),
    ):
        save(checkpoints, 4, "w" * 20_000)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000002"]
    save(checkpoints, 6)
    assert steps(tmp_path) == [2, 6]


def test_room_is_looked_for_before_a_checkpoint_is_written(tmp_path, monkeypatch):
    checkpoints = opened(tmp_path)
    save(checkpoints, 2, "w" * 3_000_000)
    monkeypatch.setattr("openrl.trainer.saving.disk.free_bytes", lambda path: 2_500_000)
    words = f"a checkpoint needs about 2.9 MiB at {tmp_path}, where 2.4 MiB is free"
    with pytest.raises(DiskFull, match=words):
        save(checkpoints, 4)
    assert steps(tmp_path) == [2]


@pytest.mark.parametrize("write", [torch.save, lambda t, path: save_file({"t": t}, path)])
def test_full_disks_are_known_by_what_libraries_raise(tmp_path, write):
    with files_of_at_most(1_000_000), pytest.raises(Exception) as caught:
        write(torch.zeros(10**6), tmp_path / "file")
    assert disk_is_full(caught.value), repr(caught.value)
    assert not disk_is_full(RuntimeError("shapes differ"))
    assert not disk_is_full(WorkerTimeout("no answer"))  # an OSError too


def test_a_disk_that_takes_no_more_writes_costs_the_checkpoint_alone(tmp_path):
    """As when the kernel makes a file system read-only that has failed."""
    checkpoints = opened(tmp_path)
    error = OSError(errno.EROFS, "Read-only file system")
    with pytest.raises(
        DiskFull, match=r"step_000002 could not be written: .*Read-only file system"
    ):
        save(checkpoints, 2, error=error)
    assert steps(tmp_path) == []


def test_a_model_on_a_disk_that_is_gone_is_an_error_of_the_disk(tmp_path, monkeypatch):
    """It does not even say what is free."""

    def gone(path):
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected", str(path))

    monkeypatch.setattr(shutil, "disk_usage", gone)
    said = rf"not be written to {tmp_path}: .*not connected"
    with pytest.raises(DiskFull, match=said), model_has_room(tmp_path):
        gone(tmp_path)


def test_an_error_without_words_is_named():
    assert first_line(RuntimeError("\n no room\nat all")) == "no room"
    assert first_line(RuntimeError()) == "RuntimeError"


def test_before_the_start_contents_are_not_read(tmp_path):
    path = save(opened(tmp_path), 2)
    flags = CheckpointFlags(ckpt_path=str(tmp_path), load_checkpoint=True)
    flip(path / "actor/rank0")
    assert find_start(flags, deep=False)[0] == path
    cut(path / "actor/rank0")
    with pytest.raises(UserError, match="has 4 bytes instead of 7"):
        find_start(flags, deep=False)


def test_damaged_checkpoints_do_not_hinder_a_run_that_goes_on(tmp_path):
    for step in (2, 4, 6):
        path = save(opened(tmp_path), step)
    cut(path / "manifest.json")
    save(opened(tmp_path, load_checkpoint=True, max_ckpt_num=2), 5)
    assert steps(tmp_path) == [4, 5]


def test_a_resume_from_the_middle_forgets_what_came_after_once_it_has_gone_on(tmp_path):
    for step in (2, 4, 6):
        save(opened(tmp_path), step)
    resumed = opened(tmp_path, resume_from_checkpoint=str(tmp_path / "step_000002"))
    assert resumed.start_from == tmp_path / "step_000002"
    assert steps(tmp_path) == [2, 4, 6]
    save(resumed, 3)
    assert steps(tmp_path) == [2, 3]


def test_the_best_is_kept_besides_the_newest(tmp_path):
    checkpoints = opened(tmp_path, max_ckpt_num=2)
    for step, metric in enumerate((0.1, 0.9, None, 0.5, 0.3, None)):
        save(checkpoints, step, metric=metric)
    assert steps(tmp_path) == [1, 4, 5]


def test_checkpoints_take_no_more_than_they_may(tmp_path):
    """Ten kB each, and a few hundred bytes of the driver's state; the newest stays even if it is
    too large."""
    checkpoints = opened(tmp_path, max_ckpt_num=0, max_ckpt_mem=25e-6)
    for step in range(4):
        save(checkpoints, step, "x" * 10_000)
    assert steps(tmp_path) == [2, 3]
    save(checkpoints, 4, "x" * 100_000)
    assert steps(tmp_path) == [4]


def test_nothing_resumes_from_copies_alone(tmp_path):
    save(opened(tmp_path), 2)
    path = save(opened(tmp_path, disable_ds_ckpt=True), 4)
    assert opened(tmp_path, load_checkpoint=True).start_from == tmp_path / "step_000002"
    with pytest.raises(UserError, match="--disable_ds_ckpt"):
        read_state(path)


def test_flags_that_differ_are_named():
    assert (
        changed_flags({"seed": 1, "l2": 0.1}, {"seed": 2, "l2": 0.1, "zero_stage": 2})
        == "flags that differ: --seed 1 -> 2, --zero_stage None -> 2"
    )
    assert changed_flags({"seed": 1}, {"seed": 1}) == "same flags"


# -- copies elsewhere ------------------------------------------------------------------------------


async def saved_while_no_copy_succeeds(checkpoints: Checkpoints, there: Path, write) -> None:
    """The first of two copies to ``there`` fails."""
    there.write_text("no directory yet")
    await checkpoints.save(1, {"step": 1}, write, no_export)
    await checkpoints.uploads.idle()
    there.unlink()
    await checkpoints.save(2, {"step": 2}, write, no_export)
    await checkpoints.finish()


def test_complete_checkpoints_are_copied_and_a_failed_copy_is_tried_again(tmp_path, caplog):
    there = tmp_path / "there"
    checkpoints = opened(tmp_path / "here", ckpt_upload_dir=f"file://{there}", max_ckpt_num=2)

    async def write(directory: Path, parts: StateParts) -> None:
        (directory / "actor").mkdir()
        (directory / "actor/rank0").write_text("weights")

    asyncio.run(saved_while_no_copy_succeeds(checkpoints, there, write))
    assert "step_000001 was not copied to" in caplog.text
    assert sorted(path.name for path in there.iterdir()) == ["step_000001", "step_000002"]
    copied = opened(there, load_checkpoint=True)
    assert copied.start_from == there / "step_000002", "whole, checksums included"


def test_a_checkpoint_that_is_removed_before_its_copy_succeeds_is_told(tmp_path, caplog):
    there = tmp_path / "there"
    checkpoints = opened(tmp_path / "here", ckpt_upload_dir=f"file://{there}", max_ckpt_num=1)

    async def write(directory: Path, parts: StateParts) -> None:
        directory.joinpath("part").write_text("weights")

    asyncio.run(saved_while_no_copy_succeeds(checkpoints, there, write))
    assert sorted(path.name for path in there.iterdir()) == ["step_000002"]
    assert f"file://{there} has no copy of step_000001, removed here" in caplog.text


def test_a_copy_that_hangs_does_not_hold_the_run(tmp_path, monkeypatch, caplog):
    there, go_on = tmp_path / "there", threading.Event()
    monkeypatch.setattr("openrl.trainer.saving.uploads.COPY_TIMEOUT", 0.1)
    checkpoints = opened(tmp_path / "here", ckpt_upload_dir=f"file://{there}")
    monkeypatch.setattr(checkpoints.uploads, "_copy", lambda path: go_on.wait(PATIENCE))

    async def write(directory: Path, parts: StateParts) -> None:
        directory.joinpath("part").write_text("weights")

    async def scenario() -> None:
        await checkpoints.save(1, {"step": 1}, write, no_export)
        await checkpoints.save(2, {"step": 2}, write, no_export)
        await checkpoints.finish()

    try:
        asyncio.run(scenario())
    finally:
        go_on.set()
    assert "not copied within 0.1 s: step_000001" in caplog.text
    assert f"file://{there} has no copy of step_000001, step_000002" in caplog.text


def test_a_place_that_nothing_here_can_write_to(tmp_path):
    with pytest.raises(UserError, match="--ckpt_upload_dir nowhere://x: "):
        opened(tmp_path, ckpt_upload_dir="nowhere://x")
