"""Faults injected for real. A tenth of them in every run of the suite; all, and the table of
docs/results.md, with OPENRL_FULL_MATRIX=1."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.faults import begun, ended
from tests.e2e.runs import make_task, metrics, ppo_flags, run
from tests.patience import PATIENCE

FULL = bool(os.environ.get("OPENRL_FULL_MATRIX"))
LINES = 15  # that a death may take
RAYS_LINES = 25  # that Ray adds of its own where its raylet is killed


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"))


def tell(name, end):
    """A row of the table, for whoever looks."""
    print(f"| {name} | {end.code} | {end.seconds:.1f} | {end.lost} | {len(end.left)} |")
    print(end.said, *end.left, sep="\n    ")


def send(*numbers):
    """A signal that comes before the last one was taken is lost, so the run has to answer it
    first."""

    def inject(run):
        for sent, number in enumerate(numbers):
            deadline = time.monotonic() + PATIENCE
            while sent and f"{numbers[0].name}: " not in run.said.read_text():
                assert time.monotonic() < deadline, "the run says nothing of the signal"
                time.sleep(0.02)  # polling a file of another process
            run.process.send_signal(number)

    return inject


def send_group(number):
    """As `timeout` does."""
    return lambda run: os.killpg(run.process.pid, number)


def kill(role):
    return lambda run: run.kill(role)


def workers_of(run, role):
    """Processes that a worker started; multiprocessing's own cleaner is left to clean."""
    children = [c for c in run.children_of(role) if "resource_tracker" not in str(c.cmdline())]
    assert children
    return children


def kill_children(role):
    def inject(run):
        for child in workers_of(run, role):
            child.kill()

    return inject


def kill_named(name):
    return lambda run: run.named(name).kill()


DEATHS = {
    "policy": (kill("actor"), "actor rank 0 died"),
    "reference": (kill("reference"), "reference rank 0 died"),
    "Ray's raylet": (kill_named("raylet"), "died"),
    "Ray's gcs": (kill_named("gcs_server"), "Ray's gcs_server"),
}
WITH_REFERENCE = {"use_kl_loss": True, "kl_estimator": "k3"}


@pytest.mark.parametrize("case", DEATHS if FULL else ["policy"])
def test_a_death_is_told_in_a_few_lines(task, tmp_path, case):
    inject, words = DEATHS[case]
    end = ended(begun(task, tmp_path / "out", **WITH_REFERENCE), inject)
    tell(case, end)
    assert end.code == 1 and words in end.said
    most = LINES + RAYS_LINES * ("raylet" in case)
    assert len(end.said.splitlines()) <= most and "Traceback" not in end.said
    assert "step_" in end.said and "--load_checkpoint" in end.said
    assert "Traceback" in (tmp_path / "out/logs/driver.log").read_text()
    assert not end.left


SIGNALS = {
    "SIGTERM": (send(signal.SIGTERM), 143, "SIGTERM: stopped after step"),
    "SIGTERM to the group": (send_group(signal.SIGTERM), 143, "SIGTERM: stopped after step"),
    "SIGINT": (send(signal.SIGINT), 130, "SIGINT: stopped after step"),
    "SIGTERM twice": (send(signal.SIGTERM, signal.SIGTERM), 143, "ended at once"),
}


@pytest.mark.skipif(not FULL, reason="on demand; test_async.py has SIGTERM")
@pytest.mark.parametrize("way", ["on policy", "async"])
@pytest.mark.parametrize("case", SIGNALS)
def test_a_signal_leaves_a_checkpoint(task, tmp_path, case, way):
    inject, code, words = SIGNALS[case]
    end = ended(begun(task, tmp_path / "out", async_train=way == "async"), inject)
    tell(f"{case}, {way}", end)
    assert end.code == code and words in end.said
    assert len(end.said.splitlines()) <= LINES and "Traceback" not in end.output
    if "twice" not in case:
        assert not end.left and end.lost == 0


@pytest.mark.skipif(not FULL, reason="on demand")
@pytest.mark.parametrize("after", ["ray/session_*/logs/gcs_server.out", "logs/actor-0.log"])
def test_a_signal_during_the_start_ends_it(task, tmp_path, after):
    """While Ray starts, and while its workers do."""
    end = ended(begun(task, tmp_path / "out", after=after), send(signal.SIGTERM))
    tell(f"SIGTERM during the start, once there is {after}", end)
    assert end.code == 143 and "the run had not begun to train" in end.said and not end.left


@pytest.mark.skipif(not FULL, reason="on demand")
def test_a_killed_driver_leaves_nothing(task, tmp_path):
    end = ended(begun(task, tmp_path / "out"), send(signal.SIGKILL))
    tell("driver killed", end)
    assert end.code == -signal.SIGKILL and not end.left
    flags = ppo_flags(task, tmp_path / "out", rollout_backend="hf", load_checkpoint=True)
    assert "resumed from" in run("train_ppo_ray", flags)


@pytest.mark.skipif(not FULL, reason="on demand")
@pytest.mark.parametrize("case", ["actor", "vllm", "vllm's children", "gcs_server", "raylet"])
def test_a_hang_is_named(task, tmp_path, case):
    """Whoever waits for a stopped child, such as a worker of rewards, counts as hanging."""
    role = case.partition("'")[0]
    rays = case in ("gcs_server", "raylet")

    def stop(run):
        if rays:
            processes = [run.named(case)]
        elif case == role:
            processes = [psutil.Process(run.pid(role))]
        else:
            processes = workers_of(run, role)
        for process in processes:
            process.suspend()

    end = ended(begun(task, tmp_path / "out", stall_timeout=15), stop)
    tell(f"SIGSTOP of {case}", end)
    who = rf"Ray's {case} \(process \d+\)" if rays else f"{role} rank 0"
    assert end.code == 1 and re.search(rf"{who} has not moved for", end.said)
    assert "(--stall_timeout 15)" in end.said and "during " in end.said
    most = LINES + RAYS_LINES * (case == "raylet")
    assert len(end.said.splitlines()) <= most and not end.left


@pytest.mark.skipif(not FULL, reason="on demand")
def test_a_run_restarts_itself(task, tmp_path):
    changes = {"max_restarts": 1, "max_steps": 8, "save_steps": 2}
    end = ended(begun(task, tmp_path / "out", **changes), kill("actor"))
    tell("policy, --max_restarts 1", end)
    assert end.code == 0 and "restarting; 0 of --max_restarts left" in end.output
    assert [m["step"] for m in metrics(tmp_path / "out")] == list(range(1, 9)) and not end.left


@pytest.mark.skipif(not FULL, reason="on demand")
def test_a_restart_does_not_take_up_the_run_that_is_overwritten(task, tmp_path):
    """The policy dies before the first checkpoint of its own run."""
    changes = {"max_steps": 8, "save_steps": 6, "max_restarts": 1, "overwrite_ckpt": True}
    out = tmp_path / "out"
    run("train_ppo_ray", ppo_flags(task, out, rollout_backend="hf", max_steps=4, save_steps=2))
    (out / "metrics.jsonl").unlink()
    end = ended(begun(task, out, after="metrics.jsonl", **changes), kill("actor"))
    tell("policy, --overwrite_ckpt --max_restarts 1", end)
    assert end.code == 0 and "resumed from" not in end.output and not end.left
    assert [m["step"] for m in metrics(out)] == list(range(1, 9))


@pytest.mark.skipif(not FULL, reason="on demand")
def test_a_worker_of_rewards_is_replaced(task, tmp_path):
    end = ended(begun(task, tmp_path / "out", max_steps=12), kill_children("vllm"))
    tell("reward worker", end)
    assert end.code == 0 and not end.left


def kill_two(run):
    for rank in range(2):
        run.kill("vllm", rank)


ENGINES = {
    "one of two": (kill("vllm"), {"vllm_num_engines": 2}),
    "both of two": (kill_two, {"vllm_num_engines": 2}),
    "the only one": (kill("vllm"), {}),
    "the only one, async": (kill("vllm"), {"async_train": True}),
    "one of two, async": (kill("vllm"), {"async_train": True, "vllm_num_engines": 2}),
    "vLLM's own process": (kill_children("vllm"), {"rollout_backend": "vllm"}),
}


@pytest.mark.full
@pytest.mark.parametrize("case", ENGINES if FULL else ["one of two"])
def test_an_engine_is_replaced(task, tmp_path, case):
    """The run goes on to its end; nothing is generated by other weights than those in force."""
    inject, flags = ENGINES[case]
    end = ended(begun(task, tmp_path / "out", max_steps=12, **flags), inject)
    tell(f"engine, {case}", end)
    assert end.code == 0 and not end.left
    assert "vllm rank 0 died" in end.output and "another engine takes its place" in end.output
    steps = metrics(tmp_path / "out")
    assert [m["step"] for m in steps] == list(range(1, 13))
    died = {*re.findall(r"vllm rank \d died", end.output)}
    assert sum(m["rollout/engines_replaced"] for m in steps) == len(died) == 1 + ("both" in case)
    alarms = json.loads((tmp_path / "out/summary.json").read_text())["alarms"]
    assert "dead_engine" in [alarm["name"] for alarm in alarms]
    assert end.output.count("WARNING: dead_engine at step") == 1
    if "async" not in case:
        assert all(m["rollout/policy_version_min"] == m["step"] for m in steps)


@pytest.mark.skipif(not FULL, reason="on demand")
def test_an_engine_that_dies_in_its_start_is_replaced_too(task, tmp_path):
    def kill_two_in_a_row(run):
        first = run.pid("vllm")
        run.kill("vllm")
        deadline = time.monotonic() + PATIENCE
        while run.pid("vllm") == first:
            assert time.monotonic() < deadline, "no new engine starts"
            time.sleep(0.005)  # polling a file of another process
        run.kill("vllm")

    end = ended(begun(task, tmp_path / "out", max_steps=12), kill_two_in_a_row)
    tell("an engine, and the next one in its start", end)
    assert end.code == 0 and not end.left
    steps = metrics(tmp_path / "out")
    assert sum(m["rollout/engines_replaced"] for m in steps) == 2


DIES_IN_A_SYNC = """
import os, pathlib, signal
import psutil
from openrl.workers.rollout_worker import RolloutWorker

now = pathlib.Path(__file__).with_name("now")
finish = RolloutWorker.finish_sync

async def die_and_finish(self, version):
    if self.context.rank == 0 and now.exists():
        now.unlink()
        vllm = [p for p in psutil.Process().children(recursive=True) if "EngineCore" in p.name()]
        for process in vllm or [psutil.Process()]:
            process.kill()
    return await finish(self, version)

RolloutWorker.finish_sync = die_and_finish
"""


@pytest.mark.skipif(not FULL, reason="on demand")
@pytest.mark.parametrize(
    ("backend", "engines", "way"),
    [("hf", 2, "on policy"), ("hf", 1, "async"), ("hf", 2, "async"), ("vllm", 1, "on policy")],
)
def test_an_engine_that_dies_in_a_sync_is_replaced(
    task, tmp_path, monkeypatch, backend, engines, way
):
    (tmp_path / "deadly.py").write_text(DIES_IN_A_SYNC)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    flags = {"rollout_backend": backend, "vllm_num_engines": engines, "plugin": "deadly"}
    flags |= {"max_steps": 12, "async_train": way == "async"}
    end = ended(
        begun(task, tmp_path / "out", **flags), lambda run: (tmp_path / "now").write_text("")
    )
    tell(f"one of {engines} {backend} engines in a sync, {way}", end)
    assert end.code == 0 and not end.left and not (tmp_path / "now").exists()
    assert "vllm rank 0 died in finish_sync" in end.output
    steps = metrics(tmp_path / "out")
    assert [m["step"] for m in steps] == list(range(1, 13))
    assert sum(m["rollout/engines_replaced"] for m in steps) == 1
    if way == "on policy":
        assert all(m["actor/logprob_gap"] < 1e-4 for m in steps)


@pytest.mark.skipif(not FULL, reason="on demand")
def test_one_death_of_an_engine_too_many(task, tmp_path):
    end = ended(begun(task, tmp_path / "out", max_engine_restarts=0), kill("vllm"))
    tell("engine, --max_engine_restarts 0", end)
    assert end.code == 1 and "vllm rank 0 died" in end.said and "--load_checkpoint" in end.said
    assert len(end.said.splitlines()) <= LINES and not end.left


@pytest.mark.skipif(not FULL, reason="on demand")
def test_a_second_start_is_refused(task, tmp_path):
    first = begun(task, tmp_path / "out")
    flags = ppo_flags(task, tmp_path / "out", rollout_backend="hf", load_checkpoint=True)
    started = time.monotonic()
    said = run("train_ppo_ray", flags, code=2)
    print(f"| second of two starts | 2 | {time.monotonic() - started:.1f} |")
    assert f"is in use by another run: process {first.process.pid} on" in said
    end = ended(first, send(signal.SIGTERM))
    tell("first of two starts, then SIGTERM", end)
    assert end.code == 143 and not end.left


@contextmanager
def small_disk(place, size):
    place.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.mark.skipif(not FULL, reason="on demand")
@pytest.mark.parametrize(
    ("size", "words"), [("600k", "No space left on device"), ("1500k", "needs about")]
)
def test_a_full_disk_costs_checkpoints_and_not_the_run(task, tmp_path, size, words):
    """A checkpoint takes 0.95 MB: on the first disk not one fits, on the second not two."""
    out = tmp_path / "out"
    with small_disk(tmp_path / "disk", size) as disk:
        flags = {"max_steps": 12, "save_steps": 1, "ckpt_path": disk / "checkpoints"}
        end = ended(begun(task, out, after="metrics.jsonl", **flags), lambda run: None)
    tell(f"disk of {size}", end)
    assert end.code == 0 and words in end.output and "could not be written" in end.output
    assert "training goes on" in end.output and "Traceback" not in end.output
    assert (out / "model.safetensors").exists() and not end.left


@pytest.mark.skipif(not FULL, reason="on demand")
def test_a_full_disk_costs_log_lines_and_is_told_at_the_export(task, tmp_path):
    """The checkpoints lie on another one, and a run goes on from them."""

    def fill(run):
        with suppress(OSError), open(run.out / "filler", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    checkpoints = tmp_path / "checkpoints"
    flags = {"max_steps": 40, "ckpt_path": checkpoints}
    with small_disk(tmp_path / "out", "3m") as out:
        end = ended(begun(task, out, after="../checkpoints/step_000002", **flags), fill)
        tell("disk of logs and model full", end)
        assert end.code == 1 and f"the model could not be written to {out}" in end.said
        assert "jsonl failed: [Errno 28] No space left on device" in end.output
        assert len(end.said.splitlines()) <= LINES and "Traceback" not in end.output
        assert not end.left
        (out / "filler").unlink()
        flags |= {"num_episodes": 400, "rollout_backend": "hf", "load_checkpoint": True}
        assert "resumed from" in run("train_ppo_ray", ppo_flags(task, out, **flags))
        assert (out / "model.safetensors").exists()
