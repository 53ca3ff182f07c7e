"""What runs before the heavy libraries, and what a forked process sees. The contract suite of the
engines starts the real engine this way."""

import os
import subprocess
import sys

import pytest

from openrl.rollout_engines import vllm_process
from openrl.rollout_engines.vllm_process import ForkContext, preload_engine
from tests.patience import PATIENCE, still_running
from tests.tiny import rollout_spec


def test_a_worker_begins_without_the_heavy_libraries():
    """Or the engine's imports would wait for those of its owner."""
    use = (
        "import sys, openrl.cluster.hosts, openrl.rollout_engines.vllm_process; print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", use], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "vllm"} & {*loaded.stdout.split()}


def send_variable(pipe):
    pipe.send(os.environ.get("OPENRL_TEST_LATE"))


def seen_by_child():
    ours, theirs = ForkContext().Pipe()
    child = ForkContext().Process(target=send_variable, args=(theirs,))
    child.start()
    try:
        assert ours.poll(60)
        return ours.recv()
    finally:
        child.join(60)


def test_a_forked_process_has_the_environment_of_its_start(monkeypatch):
    assert seen_by_child() is None  # the process that forks runs from here on
    monkeypatch.setenv("OPENRL_TEST_LATE", "set")
    assert seen_by_child() == "set"


FORKS = """if True:
    import os, psutil, sys, types
    from multiprocessing import forkserver, resource_tracker
    from openrl.rollout_engines import vllm_process
    from openrl.config.groups.model import ModelFlags
    from openrl.rollout_engines.engine import EngineSpec
    if sys.argv[1] == "imported":
        sys.modules[vllm_process.IMPORTS] = types.ModuleType("imports")
    else:
        vllm_process.IMPORTS = "colorsys"
    vllm_process.preload_engine(EngineSpec(ModelFlags(pretrain="model")))
    server = psutil.Process(forkserver._forkserver._forkserver_pid)
    tracker = psutil.Process(resource_tracker._resource_tracker._pid)
    assert "resource_tracker" in str(tracker.cmdline())  # by which it is told apart
    print(server.cmdline() == psutil.Process().cmdline(), flush=True)
    os.nice(3)
    os.dup2(os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT), 1)
    child = vllm_process.ForkContext().Process(target=os.system, args=("nice",))
    child.start()
    child.join()
    forkserver._forkserver._stop()  # waits until it has ended, which it does when told
    sys.exit(child.exitcode)"""


@pytest.mark.parametrize("imported", [True, False])
def test_a_process_that_has_imported_the_engine_forks_it(tmp_path, imported):
    """With the output and the priority that the process has when the engine starts."""
    words = [sys.executable, "-c", FORKS, "imported" if imported else "", str(tmp_path / "log")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, f"{imported}\n"), done.stderr
    assert (tmp_path / "log").read_text() == f"{os.getpriority(os.PRIO_PROCESS, 0) + 3}\n"


OWNER = """if True:
    import sys, time
    from openrl.rollout_engines import vllm_process

    if __name__ == "__main__":
        child = getattr(vllm_process, sys.argv[1])().Process(target=time.sleep, args=(600,))
        child.start()
        print(child.pid, flush=True)
        time.sleep(600)"""


@pytest.mark.parametrize("way", ["ForkContext", "NewContext", "CopyContext"])
def test_an_engine_ends_with_its_owner_that_is_killed(way):
    words = [sys.executable, "-c", OWNER, way]
    owner = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    engine = int(owner.stdout.readline())
    owner.kill()
    owner.communicate()
    assert not still_running([engine])


@pytest.mark.parametrize(
    ("installed", "dtype", "expected"),
    [
        ("0.32.0", "bf16", {}),
        ("0.32.0", "fp32", {"TRITON_F32_DEFAULT": "ieee"}),
        ("0.26.1", "bf16", {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
        ("0.28.0", "fp32", {"TRITON_F32_DEFAULT": "ieee", "VLLM_USE_V2_MODEL_RUNNER": "0"}),
    ],
)
def test_the_environment_of_an_engine_on_a_gpu(monkeypatch, installed, dtype, expected):
    monkeypatch.setattr(vllm_process, "version", lambda package: installed)
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "3", "VLLM_LOGGING_LEVEL": "INFO"})
    preload_engine(rollout_spec("model", device="cuda", param_dtype=dtype))
    assert os.environ == expected | {
        "CUDA_VISIBLE_DEVICES": "3",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
    }


def test_an_engine_over_nodes_sees_what_its_node_has(monkeypatch):
    """Ray gives its process no GPU, and its workers theirs."""
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": ""})
    preload_engine(rollout_spec("model", device="cuda", spans_nodes=True))
    assert not {"CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "VLLM_HOST_IP"} & os.environ.keys()
