"""A real ``vllm serve`` of a tiny model on the CPU."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.patience import PATIENCE

ARGUMENTS = (
    "--dtype float32 --enforce-eager --kv-cache-memory-bytes 67108864 --max-num-seqs 8"
    " --host 127.0.0.1 --disable-uvicorn-access-log"
)


@contextlib.contextmanager
def vllm_server(path: Path, log: Path, arguments: str = "") -> Iterator[str]:
    """Yield its address, once it answers; ``log`` gets what it prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = f"--model {path} --port {port} {ARGUMENTS} {arguments}".split()
    environment = os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, log)
            yield f"{url}/v1"
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        if process.poll() is not None:
            break
        time.sleep(0.2)
    raise AssertionError(f"vllm serve does not answer:\n{log.read_text(errors='replace')[-3000:]}")
