"""Code of others in processes: calls, questions in the middle of a call, and everything that ends
them."""

import asyncio
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from openrl.errors import UserError
from openrl.processes.child import CallFailed, Limits
from openrl.processes.pool import ProcessPool
from openrl.processes.worker import Loaded, load_module
from tests.patience import PATIENCE, still_running

LIMITS = Limits(20.0, 2**31, "--step", "--memory")


@dataclass(frozen=True)
class File:
    """Calls the function ``answer(value, ask)`` of a file."""

    path: Path

    def load(self) -> Loaded:
        return Loaded(load_module(self.path, "theirs").answer, facts="loaded")


class Pool:
    """``async with Pool(path) as pool``."""

    def __init__(self, path, size=1, limits=LIMITS):
        self.threads = ThreadPoolExecutor(size)
        self.pool = ProcessPool(File(path), size, limits, "test", self.threads)

    async def __aenter__(self):
        return self.pool

    async def __aexit__(self, *_):
        await self.pool.close()
        await asyncio.to_thread(self.threads.shutdown)


@pytest.fixture
def write(tmp_path):
    def write(body, head=""):
        path = tmp_path / "theirs.py"
        path.write_text(
            f"import os, subprocess, sys, time\n{head}\ndef answer(value, ask):\n    {body}\n"
        )
        return path

    return write


async def call(pool, value, answerer=None):
    async with pool.lease() as lease:
        return await lease.call(value, answerer)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE))


def pid_in(path):
    """The id that a process writes into this file."""
    deadline = time.monotonic() + PATIENCE
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)  # polling a file of another process
    return int(path.read_text())


def test_state_lasts_from_call_to_call_and_a_lease_is_one_process(write):
    path = write("seen.append(value); return os.getpid(), list(seen)", head="seen = []")

    async def main():
        async with Pool(path, size=2) as pool, pool.lease() as one, pool.lease() as other:
            return [await one.call(1), await other.call(2), await one.call(3)], pool.facts

    (first, second, third), facts = run(main())
    assert first[0] == third[0] != second[0]
    assert (first[1], second[1], third[1]) == ([1], [2], [1, 3])
    assert facts == "loaded"


def test_texts_of_their_own_classes_arrive_as_texts(write):
    """The other end cannot import the class."""
    head = "class Text(str):\n    def __str__(self):\n        return 'other'"
    path = write("return {Text('a'): [Text('b'), 'c']}, type(value).__name__", head=head)

    async def main():
        async with Pool(path) as pool:
            return await call(pool, "x")

    found, kind = run(main())
    ((key, values),) = found.items()
    assert (key, values, kind) == ("a", ["b", "c"], "str")
    assert {type(text) for text in (key, *values)} == {str}


def test_a_file_that_imports_relatively(tmp_path, monkeypatch):
    """From its own directory and the ones above, whether or not these are packages."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    inner = tmp_path / "a.b" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "a.b" / "outer.py").write_text("X = 3")
    (inner / "near.py").write_text("from ..outer import X\nY = X + 1")
    (inner / "mine.py").write_text("from . import near\nfrom ..outer import X\nZ = X, near.Y")
    assert load_module(inner / "mine.py", "theirs_1").Z == (3, 4)
    (inner / "mine.py").write_text("from .near import Y")  # its neighbour needs a dot more
    with pytest.raises(ImportError):
        load_module(inner / "mine.py", "theirs_2")

    package = tmp_path / "their_package" / "agents"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("NAME = 'package'")
    (package / "__init__.py").touch()
    (package / "base.py").write_text("class Base: pass")
    (package / "mine.py").write_text(
        "from .. import NAME\nfrom .base import Base as B\nfrom their_package.agents.base import Base"
    )
    loaded = load_module(package / "mine.py", "theirs_3")
    assert loaded.NAME == "package" and loaded.B is loaded.Base
    assert loaded.__name__ == "their_package.agents.mine"


def test_questions_are_answered_side_by_side_and_count_for_nobodys_time(write):
    """Both are open before one is answered; the answers take longer than the call may."""
    path = write("a, b = ask(value), ask(value + 1); return b.result() - a.result()")

    async def main():
        both = asyncio.Barrier(2)

        async def answer(value):
            await both.wait()
            await asyncio.sleep(1.0)
            return 10 * value

        async with Pool(path, limits=Limits(0.5, 2**31, "--step", "--memory")) as pool:
            return await call(pool, 1, answer)

    assert run(main()) == 10


def test_a_question_may_fail(write):
    path = write(
        "\n    try: return ask(value).result()\n    except Exception as error: return str(error)"
    )

    async def answer(value):
        raise ValueError(f"no {value}")

    async def main():
        async with Pool(path) as pool:
            return await call(pool, 1, answer)

    assert run(main()) == "no 1"


def test_an_answer_that_is_not_read_holds_nobody_up(write):
    """The process stops itself after its question; the answer is larger than a pipe takes."""
    path = write("ask(1); os.kill(os.getpid(), 19)")

    async def answer(value):
        return "x" * 10**7

    async def main():
        async with Pool(path, limits=Limits(0.5, 2**31, "--step", "--memory")) as pool:
            with pytest.raises(CallFailed, match=r"nothing came back within 0.5 s \(--step\)"):
                await call(pool, 1, answer)

    run(main())


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("os._exit(3)", "the test process exited with status 3"),
        ("raise KeyError('x')", r"KeyError: 'x' \(theirs.py, line 5\)"),
        ("return lambda: 1", "cannot|Can't pickle"),
        ("time.sleep(1000)", r"nothing came back within 1 s \(--step\); the process was killed"),
        ("x = [0] * 10**8; time.sleep(1000)", r"0\.2 GiB allowed \(--memory\)"),
    ],
)
def test_what_fails_costs_its_call_only(write, body, problem):
    path = write(f"\n    if value: {body}\n    return 'fine'")

    async def main():
        async with Pool(path, limits=Limits(1.0, 2**28 * 4 // 5, "--step", "--memory")) as pool:
            with pytest.raises(CallFailed, match=problem):
                await call(pool, True)
            return await call(pool, False)

    assert run(main()) == "fine"


def test_what_does_not_load_is_the_users(write):
    async def main():
        async with Pool(write("pass", head="import not_there")) as pool:
            with pytest.raises(UserError, match="No module named 'not_there'"):
                await call(pool, 1)

    run(main())


def test_what_has_loaded_before_and_does_not_now_costs_a_call(write, tmp_path):
    """A machine out of memory or of processes, for example."""
    sign = tmp_path / "broken"
    path = write("os._exit(1) if value else None", f"assert not os.path.exists({str(sign)!r})")

    async def main():
        async with Pool(path) as pool:
            await call(pool, 0)
            sign.touch()
            with pytest.raises(CallFailed, match="exited with status 1"):
                await call(pool, 1)
            with pytest.raises(CallFailed, match="cannot use it: AssertionError"):
                await call(pool, 0)
            sign.unlink()
            await call(pool, 0)

    run(main())


def test_a_caller_that_is_cancelled_ends_its_process_and_the_next_gets_a_new_one(write, tmp_path):
    sign = tmp_path / "pid"
    path = write(
        f"\n    if value: open({str(sign)!r}, 'w').write(str(os.getpid())); time.sleep(1000)\n"
        "    return os.getpid()"
    )

    async def main():
        async with Pool(path) as pool:
            waiting = asyncio.create_task(call(pool, True))
            pid = await asyncio.to_thread(pid_in, sign)
            waiting.cancel()
            return pid, await call(pool, False)

    pid, other = run(main())
    assert not still_running([pid])
    assert other != pid


def test_nothing_is_left_of_what_left_its_family(write, tmp_path):
    """The grandchild has a session of its own, and its parent is dead when the process is ended."""
    sign = tmp_path / "pid"
    daemon = (
        "import os, time\nif os.fork():\n    os.wait(); os._exit(0)\nos.setsid()\n"
        f"if pid := os.fork():\n    open({str(sign)!r}, 'w').write(str(pid)); os._exit(0)\n"
        "time.sleep(1000)"
    )
    path = write(f"subprocess.run([sys.executable, '-c', {daemon!r}]); os._exit(0)")

    async def main():
        async with Pool(path) as pool:
            with pytest.raises(CallFailed, match="exited with status 0"):
                await call(pool, 1)
            return pid_in(sign)

    assert not still_running([run(main())])


def test_a_closed_pool_fails_calls_that_run_wait_and_come(write, tmp_path):
    sign = tmp_path / "pid"
    path = write(f"open({str(sign)!r}, 'w').write(str(os.getpid())); time.sleep(1000)")

    async def main():
        async with Pool(path) as pool:
            calls = [asyncio.create_task(call(pool, 1)) for _ in range(2)]
            pid = await asyncio.to_thread(pid_in, sign)
            await pool.close()
            calls.append(asyncio.create_task(call(pool, 1)))
            return pid, await asyncio.gather(*calls, return_exceptions=True)

    pid, failures = run(main())
    assert [str(f) for f in failures] == [
        "the test process was killed by SIGKILL",
        *["the test processes are closed"] * 2,
    ]
    assert not still_running([pid])
