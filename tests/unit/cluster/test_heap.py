"""What the processes of a role find in their environment: how models on a CPU manage their memory,
and how many threads they have."""

import json
import os
import subprocess
import sys

import pytest

from openrl.cluster.ray_group import JEMALLOC, worker_env

HELD = """
from pathlib import Path
import torch
from openrl.training_engine.sleep import empty_cache

def held():
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))

before = held()
tensors = [torch.ones(2**18) for _ in range(300)]
print(held() - before)
tensors[::2] = [None] * 150
tensors[::2] = [torch.ones(2**18) for _ in range(150)]
print(held() - before)
del tensors
print(held() - before)
empty_cache(torch.device("cpu"))
print(held() - before)
"""


@pytest.mark.full
@pytest.mark.skipif(not JEMALLOC.exists(), reason="Ray has no jemalloc here")
def test_models_put_tensors_into_the_holes_of_others_and_keep_all_until_asked(monkeypatch):
    """300 MiB in tensors of 1 MiB, half of them freed and taken again: glibc 2.36 takes 450."""
    for name in ("LD_PRELOAD", "MALLOC_CONF", "GLIBC_TUNABLES"):  # a user's own would be kept
        monkeypatch.delenv(name, raising=False)
    env = os.environ | worker_env("actor", "cpu", 1, local=True)
    words = [sys.executable, "-c", HELD]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=env)
    full, again, freed, asked = (json.loads(line) for line in done.stdout.split())
    assert full == pytest.approx(300, rel=0.1)
    assert again == pytest.approx(full, rel=0.05)
    assert freed == pytest.approx(full, rel=0.05)
    assert asked < 0.1 * full


def test_ranks_share_the_cores_on_a_gpu_too(monkeypatch):
    """Ray would give an actor one thread, and a host's optimizer has billions of numbers to step
    on."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    envs = [worker_env("actor", device, 8, local=True) for device in ("cuda", "cpu")]
    assert [env["OMP_NUM_THREADS"] for env in envs] == ["12", "12"]
    assert "LD_PRELOAD" not in envs[0] and "GLIBC_TUNABLES" not in envs[0]
    assert "OMP_NUM_THREADS" not in worker_env("vllm", "cuda", 8, local=True)  # vLLM sets its own
