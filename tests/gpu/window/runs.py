"""A whole run of train_ppo_ray on one GPU, two steps of GRPO, with figures from its metrics:

python -m tests.gpu.window.runs "adapters, merged" """

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.e2e.runs import make_task, metrics, ppo_flags
from tests.gpu.test_runs import CASES, ONE_GPU
from tests.gpu.window.models import middle_model
from tests.gpu.window.results import record

MOST_GAP = 0.02  # nats, mean between engine and trainer in bf16
# vLLM measures nothing with a cache of a fixed size, so runs may share the GPU
FIXED = {
    "vllm_gpu_memory_utilization": 0.1,
    "vllm_engine_kwargs": '{"kv_cache_memory_bytes": 2147483648}',
    "enforce_eager": True,
}
SLEEPS = {
    "vllm_enable_sleep": True,
    "deepspeed_enable_sleep": True,
    "ref_reward_offload": True,
    "log_memory": True,
}
HF = {"rollout_backend": "hf", "vllm_gpu_memory_utilization": None}
ALL: dict[str, dict[str, object]] = {
    "hf engine": HF | {"zero_stage": 2, "packing_samples": True},
    "hf engine, critic, ZeRO 3": HF | {"advantage_estimator": "gae", "zero_stage": 3},
    "first": FIXED,
    "first, host memory": FIXED | {"vllm_sync_backend": "gloo"},
    "asleep": FIXED | SLEEPS,
    "asleep, level 2": FIXED | SLEEPS | {"vllm_sleep_level": 2, "save_steps": 1},
    "graphs": SLEEPS | {"vllm_gpu_memory_utilization": 0.3},
    "asynchronous": FIXED | {"async_train": True},
} | {name: FIXED | flags for name, flags in CASES.items()}
SHOWN = (
    "time/rollout",
    "time/train",
    "time/sync",
    "time/step",
    "perf/tokens_per_second",
    "perf/sync_seconds",
)


def flags_of(case: str, folder: Path, device: str) -> list[str]:
    """Return the command line of a case, whose files lie in ``folder``."""
    flags = {"pretrain": middle_model(device), "check_weight_sync": True} | ONE_GPU | ALL[case]
    if device == "cpu":
        flags |= {"device": "cpu", "vllm_engine_kwargs": None}
    return ppo_flags(make_task(folder), folder / "out", **flags)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=[*ALL])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="run"))
    words = flags_of(args.case, folder, args.device)
    started = time.perf_counter()
    code = subprocess.call([sys.executable, "-m", "openrl.cli.train_ppo_ray", *words])
    seconds, why = time.perf_counter() - started, f"exit code {code}"
    figures, good = {}, False
    if code == 0:
        steps = metrics(folder / "out")
        figures = {name: steps[-1][name] for name in SHOWN if name in steps[-1]}
        figures["gap of log-probs"] = [round(m["actor/logprob_gap"], 5) for m in steps]
        figures["largest"] = [round(m["actor/logprob_gap_max"], 4) for m in steps]
        good = all(
            m["actor/nonfinite_steps"] == 0 and m["actor/logprob_gap"] < MOST_GAP for m in steps
        )
        why = "" if good else "a step that is not finite, or a gap"
    record(f"run: {args.case}", "passed" if good else "failed", seconds, figures, why)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
