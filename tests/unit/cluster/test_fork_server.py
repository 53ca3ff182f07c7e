"""Workers that are forked, beside the same workers started anew; and what is left of them. What a
dead worker leaves behind is in e2e/test_faults.py."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from openrl.cluster import worker_start
from openrl.cluster.fork_server import ForkServer, Preload
from openrl.cluster.worker_start import FORK_SERVER
from tests.patience import PATIENCE, still_running

WORKER = """
import json, os, sys, tempfile
report = {
    "words": sys.argv,
    "path": sys.path,
    "main": __name__,
    "directory": os.getcwd(),
    "leads": os.getpgid(0) == os.getpid(),
    "scratch": tempfile.gettempdir(),
    "input": sys.stdin.read(),
    "variables": {name: os.environ[name] for name in os.environ if name.startswith("SHOWN_")},
    "early": os.environ.get("EARLY"),
    "imported": "colorsys" in sys.modules,
    "ray": "ray" in sys.modules,
}
print(json.dumps(report), flush=True)
print("an error", file=sys.stderr, flush=True)
"""
PARENT = """
import os, subprocess, sys, time
from multiprocessing import resource_tracker, shared_memory
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
shared = shared_memory.SharedMemory(create=True, size=1000)
print(os.getpid(), child.pid, resource_tracker._resource_tracker._pid, shared.name, flush=True)
time.sleep(1000)
"""


def imports():
    import colorsys  # noqa: F401  (nothing else imports it)

    tempfile.gettempdir()  # which depends on the environment of this process


def fails():
    raise ImportError("a library is broken")


def import_numpy():
    import numpy  # noqa: F401


def never_ends():
    time.sleep(1000)


def early():
    os.environ["EARLY"] = "called"


def start(script: Path, server: str = "", **variables: str) -> subprocess.Popen[str]:
    """Start a worker as Ray does; ``server`` is the socket of the process to fork it from."""
    context = {"env_vars": variables | ({FORK_SERVER: server} if server else {})}
    words = [str(script), "--one=it's", f"--serialized-runtime-env-context={json.dumps(context)}"]
    command = [sys.executable, worker_start.__file__, *words, "--language=PYTHON"]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **pipes)


def result(process: subprocess.Popen[str]) -> tuple[dict, str]:
    said, errors = process.communicate(timeout=PATIENCE)
    return json.loads(said), errors


@pytest.fixture
def serve(tmp_path):
    """Starts servers with what they import and call early."""
    servers = []

    def started(imported, called) -> str:
        path = str(tmp_path / f"forks-{len(servers)}")
        preload = Preload(imported, called)
        servers.append(ForkServer(path, preload, {}, tmp_path / "forks.log"))
        return path

    yield started
    for server in servers:
        server.close()


@pytest.fixture
def worker(tmp_path):
    script = tmp_path / "scripts" / "a worker.py"
    script.parent.mkdir()
    script.write_text(WORKER)
    return script


def test_a_forked_worker_is_what_a_new_process_would_be(serve, worker, tmp_path):
    server = serve(imports, early)
    variables = {"SHOWN_ONE": "1", "TMPDIR": str(tmp_path)}
    (new, errors), (forked, forked_errors) = (
        result(start(worker, server, **variables)) for server in ("", server)
    )
    assert (new.pop("early"), new.pop("imported")) == (None, False)
    assert (forked.pop("early"), forked.pop("imported")) == ("called", True)
    assert forked.pop("leads") and not new.pop("leads")  # Ray ends the group of a dead worker
    assert forked == new and not forked["ray"]
    assert forked["variables"] == {"SHOWN_ONE": "1"} and forked["scratch"] == str(tmp_path)
    assert forked_errors == errors == "an error\n"


def test_what_one_worker_changes_no_other_sees(serve, worker):
    server = serve(imports, early)
    first, second = (
        result(start(worker, server, **{f"SHOWN_{n}": "1"}))[0]["variables"] for n in "AB"
    )
    assert (first, second) == ({"SHOWN_A": "1"}, {"SHOWN_B": "1"})


def test_a_worker_starts_anew_if_the_imports_fail(worker, tmp_path, caplog):
    path, log_path = str(tmp_path / "forks"), tmp_path / "forks.log"
    server = ForkServer(path, Preload(fails, early), {}, log_path)
    report, errors = result(start(worker, path))
    assert report["early"] is None  # it will say itself what is broken
    assert "not forked, so it starts later" in errors
    assert result(start(worker, str(tmp_path / "nobody")))[0]["words"] == report["words"]
    server.close()
    assert caplog.messages == [
        "the process that forks workers had ended, exit code 1: ImportError: a library is broken"
    ]


def test_a_worker_with_too_large_an_environment_starts_anew(serve, worker, monkeypatch):
    for name in ("SHOWN_LARGE", "SHOWN_TOO"):  # no single one may be larger than a request
        monkeypatch.setenv(name, "x" * 100_000)
    report, _ = result(start(worker, serve(imports, early)))
    assert len(report["variables"]["SHOWN_TOO"]) == 100_000 and report["early"] is None


def test_a_worker_whose_early_call_fails_runs(serve, worker):
    """It makes the call once more, and then its error reaches the driver."""
    report, errors = result(start(worker, serve(imports, fails)))
    assert report["imported"] and errors == "an error\n"


def test_random_numbers_of_numpy_differ(serve, tmp_path):
    script, server = tmp_path / "draw.py", serve(import_numpy, early)
    script.write_text("import json, numpy; print(json.dumps(numpy.random.random()))")
    assert len({result(start(script, server))[0] for _ in range(3)}) == 3


def test_closing_waits_for_no_import(tmp_path):
    server = ForkServer(str(tmp_path / "forks"), Preload(never_ends), {}, tmp_path / "forks.log")
    server.close()
    assert server._process.poll() is not None


def test_nothing_outlives_the_driver(tmp_path, worker):
    """Not even if the driver is killed, and a fork ignores that its server has gone."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    path = tmp_path / "forks"
    code = f"""if True:
        import time
        from pathlib import Path
        from openrl.cluster.fork_server import ForkServer, Preload
        server = ForkServer({str(path)!r}, Preload(int), {{}}, Path({os.devnull!r}))
        print(server._process.pid, flush=True)
        time.sleep(1000)"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as driver:
        server = psutil.Process(int(driver.stdout.readline()))
        begun = start(script, str(path))
        *pids, shared = begun.stdout.readline().split()
        forks = [psutil.Process(int(pid)) for pid in pids]
        driver.kill()
        assert not still_running([server, *forks])
    assert not Path("/dev/shm", shared).exists()
