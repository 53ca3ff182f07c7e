"""The work of a training step done by the bare libraries: vLLM alone, and a plain PyTorch loop.

Each runs in a process of its own behind ``Bare``, and answers one call at a time.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from tempfile import gettempdir
from typing import Any

import torch
from torch import Tensor

from openrl.experience import ExperienceBatch, StepPlan
from openrl.rollout_engines.engine import EngineSpec
from openrl.training_engine.optimizers import OptimSpec

START_S, CALL_S = 180.0, 600.0  # patience, seconds


class Bare:
    """A process that runs ``serve(connection, *args)``; ``ask`` sends it one piece of work."""

    def __init__(self, serve: Callable[..., None], *args: Any) -> None:
        self.name = serve.__name__
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(serve, theirs, *args))
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        self._receive(START_S)

    def ask(self, work: Any) -> Any:
        self._connection.send(work)
        return self._receive(CALL_S)

    def close(self) -> None:
        with suppress(OSError):
            self._connection.send(None)
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()

    def _receive(self, timeout: float) -> Any:
        if not self._connection.poll(timeout):
            raise TimeoutError(f"{self.name}: no answer within {timeout:g} s")
        answer = self._connection.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"{self.name} failed:\n{answer}")
        return answer


def _main(serve: Callable[..., None], connection: Connection, *args: Any) -> None:
    try:
        serve(connection, *args)
    except (EOFError, ConnectionError):  # the benchmark itself has failed
        pass
    except Exception:
        connection.send(traceback.format_exc())


# -- vLLM ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generation:
    """What bare vLLM did: its seconds, and how many tokens it sampled."""

    seconds: float
    tokens: int


def serve_vllm(
    connection: Connection, spec: EngineSpec, samples: int, tokens: int, temperature: float
) -> None:
    """Takes lists of prompts (token ids); answers each with a Generation; None ends it. One request
    per prompt, of n samples."""
    asyncio.run(_serve_vllm(connection, spec, samples, tokens, temperature))


async def _serve_vllm(
    connection: Connection, spec: EngineSpec, samples: int, tokens: int, temperature: float
) -> None:
    from openrl.rollout_engines.vllm_start import start_llm

    llm = start_llm(spec, gettempdir())
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        n=samples,
        max_tokens=tokens,
        temperature=temperature,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )

    async def complete(prompt: list[int], name: str) -> int:
        sampled = 0
        async for output in llm.generate(TokensPrompt(prompt_token_ids=prompt), params, name):
            sampled += sum(len(completion.token_ids) for completion in output.outputs)
        return sampled

    try:
        connection.send(True)
        call = 0
        while (prompts := await asyncio.to_thread(connection.recv)) is not None:
            call += 1
            started = time.perf_counter()
            sampled = await asyncio.gather(
                *(complete(p, f"{call}-{i}") for i, p in enumerate(prompts))
            )
            connection.send(Generation(time.perf_counter() - started, sum(sampled)))
    finally:
        llm.shutdown()


# -- PyTorch ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainWork:
    """The tensors that a step of the pipeline handed to its workers."""

    forward: ExperienceBatch  # rows of the log-prob passes, and their cut
    micro_batches: list[list[int]]
    update: ExperienceBatch  # rows of the optimizer steps, with every column filled
    plans: list[StepPlan]
    kl_coef: float
    eps_clip: float


@dataclass(frozen=True)
class Training:
    """What the loop did: seconds by stage, and the figures that the pipeline reports too."""

    forward_seconds: float
    update_seconds: float
    values: dict[str, float]


class TorchLoop:
    """Policy, reference and AdamW as anyone would write them in a page: transformers, autograd,
    nothing else."""

    def __init__(self, path: str, optim: OptimSpec, device: str) -> None:
        from transformers import AutoModelForCausalLM

        self.device = device
        self.policy, self.reference = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
            for _ in range(2)
        )
        matrices = [p for p in self.policy.parameters() if p.dim() > 1]
        vectors = [p for p in self.policy.parameters() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": optim.flags.l2},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=optim.learning_rate, betas=optim.flags.adam_betas, fused=True
        )
        self.max_norm = optim.flags.max_norm

    def step(self, work: TrainWork) -> Training:
        start = time.perf_counter()
        old = self._all_logprobs(self.policy, work)
        ref = self._all_logprobs(self.reference, work)
        middle = time.perf_counter()
        loss, kl, norms = 0.0, 0.0, []
        for plan in work.plans:
            for rows in plan.micro_batches:
                policy_loss, kl_loss = self._losses(work.update.select(rows), plan, work)
                (policy_loss + work.kl_coef * kl_loss).backward()
                loss, kl = loss + float(policy_loss.detach()), kl + float(kl_loss.detach())
            norms.append(
                float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_norm))
            )
            self.optimizer.step()
            self.optimizer.zero_grad()
        end = time.perf_counter()
        mask, steps = work.forward.loss_mask, len(work.plans)
        values = {
            "old_logprob": float(old[mask].mean()),
            "ref_logprob": float(ref[mask].mean()),
            "policy_loss": loss / steps,
            "kl": kl / steps,
            "grad_norm": sum(norms) / steps,
        }
        return Training(middle - start, end - middle, values)

    @torch.no_grad()
    def _all_logprobs(self, model: Any, work: TrainWork) -> Tensor:
        column = torch.zeros(work.forward.token_ids.shape)
        for rows in work.micro_batches:
            ids = _ids(work.forward, rows).to(self.device)
            column[torch.tensor(rows), : ids.shape[1]] = _logprobs(model, ids).cpu()
        return column

    def _losses(
        self, batch: ExperienceBatch, plan: StepPlan, work: TrainWork
    ) -> tuple[Tensor, Tensor]:
        """PPO's clipped loss and the k3 estimate of the KL, both averaged over the tokens of the
        optimizer step."""
        logprobs = _logprobs(self.policy, batch.token_ids.to(self.device)).cpu()
        ratio = (logprobs - batch.old_logprobs).exp()
        clipped = ratio.clamp(1 - work.eps_clip, 1 + work.eps_clip)
        policy_loss = -torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
        away = batch.ref_logprobs - logprobs
        k3 = away.exp() - 1 - away
        mask, tokens = batch.loss_mask, plan.counts.tokens
        return (policy_loss * mask).sum() / tokens, (k3 * mask).sum() / tokens


def _ids(batch: ExperienceBatch, rows: list[int]) -> Tensor:
    width = int(batch.attention_mask[rows].sum(-1).max())
    return batch.token_ids[rows, :width]


def _logprobs(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(logprobs, (1, 0))


def serve_torch(connection: Connection, path: str, optim: OptimSpec, device: str) -> None:
    """Takes TrainWork, answers with Training; None ends it."""
    torch.set_num_threads(1)
    loop = TorchLoop(path, optim, device)
    connection.send(True)
    while (work := connection.recv()) is not None:
        connection.send(loop.step(work))
