"""Weights between GPUs: CUDA IPC on one, an NCCL broadcast to another, each against a plain forward
of what was sent."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrl.cluster.group import WorkerContext
from openrl.rollout_engines.build import start_engine
from openrl.rollout_engines.engine import RolloutEngine
from openrl.training_engine.distributed import close_distributed, init_distributed
from openrl.types import Completion, Sampling
from openrl.weights.transport import Route, choose_transport
from openrl.workers.model_worker import ModelWorker
from tests.experience import engine_spec, optim_spec
from tests.tiny import rollout_spec, tiny_model_dir

GPUS = torch.cuda.device_count()
TOKENS = [5, 9, 14, 7, 33, 21, 8, 60, 41, 12]
GREEDY = Sampling(8, temperature=0.0, ignore_eos=True)
BUCKET = 40_000  # several for the tiny model


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ModelWorker]]:
    """One rank on GPU 0, its weights moved away from those that engines start with."""
    path = tiny_model_dir(tmp_path_factory.mktemp("model"))
    init_distributed(0, 1, "127.0.0.1", 0, "cuda", timeout=120)
    spec = replace(engine_spec(path, optim=optim_spec()), device="cuda")
    worker = ModelWorker(WorkerContext("actor"), spec)
    worker.start()
    with torch.no_grad():
        for parameter in worker.engine.model.parameters():  # type: ignore[attr-defined]
            parameter.mul_(1.5)
    yield path, worker
    close_distributed()


async def synchronise(worker: ModelWorker, engine: RolloutEngine, backend: str | None) -> str:
    """As the driver does it, with the sender in a thread: in a broadcast both ends wait for each
    other."""
    ours, theirs = worker.sync_endpoint(), await engine.sync_endpoint()
    transport = choose_transport(backend, ours.gpus, theirs.gpus)  # type: ignore[arg-type]
    address, port = worker.open_rendezvous() if transport == "nccl" else ("", 0)
    size = 1 + len(theirs.gpus)
    meeting = {"address": address, "port": port, "world_size": size, "timeout": 120}
    route = Route(transport, check=True, gpus=theirs.gpus, **meeting)  # type: ignore[arg-type]
    await asyncio.gather(asyncio.to_thread(worker.connect, route), engine.connect(route, 1))
    for version in (1, 2):
        worker.begin_sync(version, BUCKET)
        sent = worker.next_bucket()
        while sent is not None:
            loading, packing = engine.load_bucket(sent), asyncio.to_thread(worker.next_bucket)
            _, sent = await asyncio.gather(loading, packing)
        assert await engine.finish_sync(version) == version
        worker.end_sync()
    return transport


def gap(
    policy: tuple[Path, ModelWorker], out: Path, backend: str | None, device: int
) -> tuple[str, float]:
    """(transport, largest difference between the engine's log-probs and a plain forward of the
    policy), fp32."""
    path, worker = policy

    async def scenario() -> tuple[str, Completion]:
        spec = rollout_spec(
            path, param_dtype="fp32", device="cuda", longest=64, vllm_gpu_memory_utilization=0.3
        )
        engine = await start_engine("vllm", spec)
        try:
            transport = await synchronise(worker, engine, backend)
            return transport, await engine.generate(TOKENS, GREEDY)
        finally:
            await engine.close()

    with pytest.MonkeyPatch.context() as patch:
        # read by vLLM's processes; this one has its GPUs already
        patch.setenv("CUDA_VISIBLE_DEVICES", str(device))
        transport, reply = asyncio.run(scenario())
    worker.export(str(out))
    ids = torch.tensor([TOKENS + reply.token_ids], device="cuda")
    with torch.no_grad():
        logits = (
            AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
            .cuda()(ids)
            .logits[0, :-1]
        )
    expected = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[len(TOKENS) - 1 :, 0].cpu()
    return transport, float((torch.tensor(reply.logprobs) - expected).abs().max())


@pytest.mark.parametrize(("backend", "transport"), [(None, "ipc"), ("gloo", "host")])
def test_an_engine_on_the_trainers_gpu(policy, tmp_path, record_property, backend, transport):
    found, difference = gap(policy, tmp_path / "out", backend, device=0)
    record_property(f"log-prob gap after a sync by {found}", f"{difference:.1e}")
    assert found == transport and difference < 1e-3


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_an_engine_on_a_gpu_of_its_own(policy, tmp_path, record_property):
    found, difference = gap(policy, tmp_path / "out", None, device=1)
    record_property(f"log-prob gap after a sync by {found}", f"{difference:.1e}")
    assert found == "nccl" and difference < 1e-3


def test_this_vllm_has_what_is_asked_of_it():
    """Other versions than the one that the CPU tests run on come with GPUs."""
    code = (
        "from openrl.rollout_engines.vllm_start import missing_features; print(missing_features())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert found.stdout.splitlines()[-1] == "[]"
