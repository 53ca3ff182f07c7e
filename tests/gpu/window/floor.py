"""The same step of GRPO by bare vLLM, by a bare loop of torch, and by openrl, each in a process of its own
so that one at a time has the GPU: 64 prompts of 120 tokens, 4 answers each of 512 tokens.

    python -m tests.gpu.window.floor engine
    python -m tests.gpu.window.floor loop
    python -m tests.gpu.window.floor run       and its ratio to the other two"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.gpu.window.models import HOME, PROMPT, qwen3, vocabulary
from tests.gpu.window.results import failed, measured

GRAPHS = {"cudagraph_capture_sizes": [1, 8, 32, 64, 128, 256]}
NOTES = HOME / "floor.json"
"""The seconds of the bare libraries, for ``run``."""


@dataclass(frozen=True)
class Work:
    """What a step does."""

    device: str
    size: str  # of the model, see models.SIZES
    prompts: int = 64
    samples: int = 4
    answer: int = 512
    micro: int = 16
    steps: int = 3

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    @property
    def compiled(self) -> dict[str, Any]:
        return GRAPHS if self.device == "cuda" else {}


def note(work: Work, **seconds: float) -> dict[str, float]:
    """Add seconds to the notes; return those of this size."""
    known = json.loads(NOTES.read_text()) if NOTES.exists() else {}
    known |= {f"{work.size} {name}": value for name, value in seconds.items()}
    NOTES.write_text(json.dumps(known))
    own = f"{work.size} "
    return {name.removeprefix(own): s for name, s in known.items() if name.startswith(own)}


def engine(work: Work) -> None:
    # as openrl sets for vLLM before 0.32
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    path = qwen3(work.size)
    from vllm import LLM, SamplingParams, TokensPrompt

    with measured(f"bare vLLM, {work.size}") as f:
        started = time.perf_counter()
        llm = LLM(
            str(path),
            dtype="bfloat16",
            max_model_len=PROMPT + work.answer,
            gpu_memory_utilization=0.5,
            max_num_seqs=work.rows,
            compilation_config=work.compiled,
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=False,
            disable_log_stats=True,
            seed=0,
        )
        f["seconds to start"] = time.perf_counter() - started
        lines = (path / "prompts.jsonl").read_text().splitlines()[: work.prompts]
        rows = [[int(word[1:]) for word in json.loads(line)["input"].split()] for line in lines]
        prompts = [TokensPrompt(prompt_token_ids=r) for r in rows for _ in range(work.samples)]
        params = SamplingParams(
            max_tokens=work.answer,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
        )
        llm.generate(prompts[:8], params, use_tqdm=False)
        seconds = []
        for _ in range(2):
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - started)
        f["seconds, each time"] = [round(s, 2) for s in seconds]
        f["sampled tokens/s"] = work.rows * work.answer / min(seconds)
        note(work, rollout=min(seconds))


class Loop:
    """A training step without a framework: bf16 weights, fp32 masters, recomputed activations."""

    def __init__(self, work: Work) -> None:
        from transformers import AutoModelForCausalLM

        self.work, self.device = work, work.device
        self.model = AutoModelForCausalLM.from_pretrained(
            qwen3(work.size), dtype=torch.bfloat16, attn_implementation="sdpa"
        ).to(self.device)
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train()
        parameters = self.model.parameters()
        self.pairs = [(p, p.detach().float().requires_grad_()) for p in parameters]
        masters = [master for _, master in self.pairs]
        self.optimizer = torch.optim.AdamW(masters, lr=1e-6, fused=True)
        shape = (work.rows, PROMPT + work.answer)
        self.ids = torch.randint(4, vocabulary(work.size), shape, device=self.device)

    def log_probs(self, rows: Tensor) -> Tensor:
        """Return those of the answers, (rows, answer). The logits of four rows exist at a time."""
        states = self.model.model(rows).last_hidden_state[:, PROMPT - 1 : -1]
        pieces = zip(states.split(4), rows[:, PROMPT:].split(4), strict=True)
        found = [checkpoint(self._of_states, s, t, use_reentrant=False) for s, t in pieces]
        return torch.cat(found)

    def _of_states(self, states: Tensor, targets: Tensor) -> Tensor:
        logits = self.model.lm_head(states).float().flatten(0, 1)
        losses = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="none")
        return -losses.view(targets.shape)

    def step(self) -> None:
        tokens = self.work.rows * self.work.answer
        for rows in self.ids.split(self.work.micro):
            (-self.log_probs(rows).sum() / tokens).backward()
        for p, master in self.pairs:
            master.grad, p.grad = p.grad.float(), None
        torch.nn.utils.clip_grad_norm_([master for _, master in self.pairs], 1.0)
        self.optimizer.step()
        with torch.no_grad():
            for p, master in self.pairs:
                p.copy_(master)
                master.grad = None

    @torch.no_grad()
    def forward(self) -> None:
        for rows in self.ids.split(self.work.micro):
            self.log_probs(rows)

    def seconds(self, work: Callable[[], None]) -> float:
        """Return the seconds of the second call."""
        for _ in range(2):
            started = time.perf_counter()
            work()
            if self.device == "cuda":
                torch.cuda.synchronize()
        return time.perf_counter() - started


def loop(work: Work) -> None:
    with measured(f"bare torch, {work.size}") as f:
        bare = Loop(work)
        for name, of in (("train", bare.step), ("forward", bare.forward)):
            seconds = bare.seconds(of)
            f[f"{name}, seconds"], f[f"{name}, tokens/s"] = seconds, bare.ids.numel() / seconds
            note(work, **{name: seconds})
        if work.device == "cuda":
            f["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30


def words_of(work: Work, out: Path) -> list[str]:
    """Return the command line of the same step by openrl."""
    path = qwen3(work.size)
    flags = {
        "pretrain": path,
        "prompt_data": path / "prompts.jsonl",
        "label_key": "label",
        "remote_rm_url": path / "reward.py",
        "device": work.device,
        "param_dtype": "bf16",
        "advantage_estimator": "group_norm",
        "init_kl_coef": 0,
        "n_samples_per_prompt": work.samples,
        "rollout_batch_size": work.prompts,
        "train_batch_size": work.rows,
        "micro_train_batch_size": work.micro,
        "micro_rollout_batch_size": work.micro,
        "prompt_max_len": PROMPT + 8,
        "generate_max_len": work.answer,
        "actor_learning_rate": 1e-6,
        "max_steps": work.steps,
        "zero_stage": 2,
        "actor_num_gpus_per_node": 1,
        "vllm_gpu_memory_utilization": 0.5,
        "vllm_max_num_seqs": work.rows,
        "vllm_engine_kwargs": json.dumps({"compilation_config": work.compiled}),
        "save_path": out,
        "ckpt_path": out / "checkpoints",
    }
    switches = (
        "ignore_eos",
        "gradient_checkpointing",
        "packing_samples",
        "colocate_all_models",
        "vllm_enable_sleep",
        "deepspeed_enable_sleep",
    )
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return words + [f"--{name}" for name in switches]


def run(work: Work) -> None:
    with measured(f"openrl, {work.size}") as f:
        out = Path(tempfile.mkdtemp(prefix="floor"))
        command = [sys.executable, "-m", "openrl.cli.train_ppo_ray", *words_of(work, out)]
        started = time.perf_counter()
        code = subprocess.call(command)
        f["exit code"], f["seconds in all"] = code, time.perf_counter() - started
        # the steps that ended count, also if a limit of time ended the run
        steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        last, bare = steps[-1], note(work)
        f |= {name: last[name] for name in last if name.startswith(("time/", "perf/"))}
        f["steps"], f["log-prob gap"] = len(steps), last.get("actor/logprob_gap")
        f["bare rollout and train, seconds"] = floor = bare["rollout"] + bare["train"]
        f["openrl's step over them"] = last["time/step"] / floor
        f["its rollout and train over them"] = (last["time/rollout"] + last["time/train"]) / floor


PARTS = {"engine": engine, "loop": loop, "run": run}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--size", default="0.6B", help="of the Qwen3 model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args(arguments)
    work = Work(args.device, args.size)
    if args.device == "cpu":
        work = Work("cpu", "tiny", prompts=4, samples=2, answer=16, micro=4, steps=2)
    HOME.mkdir(parents=True, exist_ok=True)
    PARTS[args.part](work)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
