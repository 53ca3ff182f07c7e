"""Memory that processes share without a name in any directory."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from openrl.weights.shared_memory import Mapped, SharedSlots


def test_a_reader_sees_what_was_written() -> None:
    slots, mapped = SharedSlots(), Mapped()
    slots.allocate(5).copy_(torch.arange(5))
    first = slots.last(5)
    slots.allocate(3).fill_(9)
    assert mapped.open(first).tolist() == [0, 1, 2, 3, 4]
    assert mapped.open(slots.last(3)).tolist() == [9, 9, 9]
    assert not any(Path("/dev/shm").glob("openrl*"))


def test_the_next_sync_uses_the_same_pages() -> None:
    slots, mapped = SharedSlots(), Mapped()
    slots.allocate(100).fill_(1)
    before = slots.last(100)
    seen = mapped.open(before)
    slots.end()
    slots.allocate(60).fill_(2)
    assert slots.last(60) == before | {"size": 60}
    assert mapped.open(slots.last(60)).data_ptr() == seen.data_ptr()
    assert mapped.open(slots.last(60)).tolist() == [2] * 60
    slots.end()
    slots.allocate(200).fill_(3)  # grows: other memory, perhaps under the same path
    assert mapped.open(slots.last(200)).tolist() == [3] * 200


def test_what_is_too_much_to_keep_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Little:
        available = 1000

    monkeypatch.setattr("psutil.virtual_memory", lambda: Little)
    slots, mapped = SharedSlots(), Mapped()
    slots.allocate(200)
    kept = slots.last(200)
    slots.allocate(200)
    passing = slots.last(200)
    assert (kept["lasting"], passing["lasting"]) == (True, False)
    mapped.open(passing)
    slots.end()
    assert mapped.open(kept).numel() == 200
    with pytest.raises(FileNotFoundError):
        mapped.open(passing)


def _share(connection: Connection) -> None:
    slots = SharedSlots()
    slots.allocate(4).copy_(torch.tensor([1, 2, 3, 4]))
    connection.send(slots.last(4))
    connection.recv()


def test_it_ends_with_the_process_that_shares_it() -> None:
    """Killed, as workers of Ray are: what is mapped stays, and nothing else is left."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_share, args=(theirs,))
    process.start()
    try:
        assert ours.poll(60)
        shared = ours.recv()
        mapped = Mapped()
        data = mapped.open(shared)
    finally:
        process.kill()
        process.join()
    assert data.tolist() == [1, 2, 3, 4]
    assert not os.path.exists(shared["path"])
    with pytest.raises(FileNotFoundError):
        Mapped().open(shared)
