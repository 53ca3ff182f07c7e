"""The first engine: vLLM without graphs and with a cache of a fixed size, so that others may use the GPU
meanwhile. Its log-probs beside a plain forward pass in fp32, before and after a sync through host memory;
then asleep and awake at level 1, with another sync in between."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import sys
import tempfile
import time
from pathlib import Path

from safetensors.torch import load_file

from openrl.rollout_engines.build import start_engine
from openrl.rollout_engines.engine import RolloutEngine
from openrl.types import Completion, Sampling
from tests.gpu.syncing import connected, send
from tests.gpu.test_engines import PROMPTS, gap
from tests.gpu.window.results import failed, measured
from tests.tiny import rollout_spec, tiny_model_dir

CLOSE, FAR = 0.3, 1.0  # nats: bf16 against fp32; other weights
HANG_S = 140
SHAPE = {"initializer_range": 0.1, "hidden_size": 128, "intermediate_size": 256, "head_dim": 64}


async def ask(engine: RolloutEngine) -> list[Completion]:
    sampling = Sampling(32, ignore_eos=True)
    return await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in PROMPTS))


async def look(engine: RolloutEngine, first: Path, second: Path, device: str) -> None:
    """Compare the engine with the model that it should have."""
    with measured("contact: it answers as a plain forward pass") as f:
        f["largest gap, nats"] = found = gap(first, await ask(engine), device)
        assert found < CLOSE
    with measured("contact: weights through host memory") as f:
        await send(await connected(engine), engine, load_file(second / "model.safetensors"), 1)
        after = await ask(engine)
        f["gap to the new"] = gap(second, after, device)
        f["gap to the old"] = gap(first, after, device)
        assert f["gap to the new"] < CLOSE and f["gap to the old"] > FAR
    if device == "cpu":  # where vLLM has no sleep
        return
    with measured("contact: asleep and awake") as f:
        awake = (await engine.memory()).free or 0
        await engine.sleep("weights", "cache")
        f["GiB freed"] = (((await engine.memory()).free or 0) - awake) / 2**30
        await engine.wake("weights")
        await send(await connected(engine), engine, load_file(first / "model.safetensors"), 2)
        await engine.wake("cache")
        f["gap to what was sent meanwhile"] = found = gap(first, await ask(engine), device)
        assert found < CLOSE


async def main(device: str) -> int:
    folder = Path(tempfile.mkdtemp(prefix="contact"))
    first, second = (tiny_model_dir(folder / str(n), seed=n, **SHAPE) for n in (0, 1))
    settings = {} if device == "cpu" else {"vllm_engine_kwargs": {"kv_cache_memory_bytes": 2**31}}
    spec = rollout_spec(
        first,
        device=device,
        longest=256,
        vllm_gpu_memory_utilization=0.1,
        enforce_eager=True,
        **settings,
    )
    engine: RolloutEngine | None = None
    with measured("contact: an engine starts") as f:
        started = time.perf_counter()
        engine = await start_engine("vllm", spec)
        f["seconds"] = time.perf_counter() - started
    if engine is not None:
        try:
            await look(engine, first, second, device)
        finally:
            await engine.close()
    return int(bool(failed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    faulthandler.dump_traceback_later(HANG_S)  # a hang shows where
    sys.exit(asyncio.run(main(parser.parse_args().device)))
