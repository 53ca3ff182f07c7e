"""First contact: does each library compute on this GPU what a plain formula says?

python -m tests.gpu.window.smoke torch
python -m tests.gpu.window.smoke vllm      in a process of its own, since an error of CUDA spoils one"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from openrl.models.attention import GROUPS, varlen_attention
from openrl.rollout_engines.vllm_start import missing_features
from openrl.weights.cuda_ipc import export, rebuild
from tests.gpu.window.results import failed, measured

DEVICE = torch.device("cuda", 0)
BF16 = 0.02  # relative error that bf16's rounding explains
NEEDED = {
    "machine",
    "ceilings",
    "Triton",
    "vLLM's libraries load",
    "vLLM's norms",
    "vLLM's attention",
}
"""Without these nothing that follows is worth its time."""
LENGTHS = [120, 70, 9, 333]  # of packed sequences
HANG_S = 50


def check(found: Tensor, exact: Tensor, most: float = BF16) -> float:
    """Return the relative error, which must be below ``most``."""
    gap = float((found.double() - exact.double()).norm() / exact.double().norm())
    assert gap < most, f"relative error {gap}"
    return gap


def timed(work: Callable[[], Any], times: int = 10) -> float:
    """Return the seconds of one call."""
    work()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / times / 1000


def packed(heads: int, width: int = 64) -> Tensor:
    """Return queries or keys of all sequences in one row, (tokens, heads, width)."""
    return torch.randn(sum(LENGTHS), heads, width, device=DEVICE, dtype=torch.bfloat16)


def ends() -> Tensor:
    return torch.tensor([0, *LENGTHS], device=DEVICE).cumsum(0, dtype=torch.int32)


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention within each sequence, in fp32."""
    found: list[Tensor] = []
    pieces = zip(*(x.split(LENGTHS) for x in (query, key, value)), strict=True)
    for parts in pieces:
        row = (part.transpose(0, 1)[None].float() for part in parts)
        out = F.scaled_dot_product_attention(*row, is_causal=True, enable_gqa=True)
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)


# -- torch and what else trains --------------------------------------------------------------------


def machine() -> None:
    with measured("machine") as f:
        about = torch.cuda.get_device_properties(DEVICE)
        free, total = torch.cuda.mem_get_info()
        f |= {"GPU": about.name, "free GiB": free / 2**30, "GiB": total / 2**30}
        f |= {"torch": torch.__version__, "CUDA": torch.version.cuda, "cores": os.cpu_count()}
        query = "--query-gpu=driver_version,compute_mode,mig.mode.current,memory.used"
        words = ["nvidia-smi", query, "--format=csv,noheader"]
        asked = subprocess.run(words, capture_output=True, text=True, check=False)
        f["driver, mode, MIG, used"] = asked.stdout.strip()
    with measured("pinned memory") as f:
        host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
        on_gpu = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
        f["to the GPU GB/s"] = 2**28 / timed(lambda: on_gpu.copy_(host)) / 1e9
        f["from the GPU GB/s"] = 2**28 / timed(lambda: host.copy_(on_gpu)) / 1e9


def ceilings() -> None:
    with measured("ceilings") as f:
        a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        f["bf16 TFLOP/s"] = 2 * 8192**3 / timed(lambda: a @ b) / 1e12
        big = torch.randn(2**29, device=DEVICE)
        other = torch.empty_like(big)
        f["copy GB/s, read and written"] = 2 * 2**31 / timed(lambda: other.copy_(big)) / 1e9
    torch.cuda.empty_cache()


def kernels() -> None:
    with measured("torch's varlen attention, grouped heads") as f:
        query, key, value = packed(8), packed(4), packed(4)
        module = SimpleNamespace(is_causal=True, config=SimpleNamespace(dtype=torch.bfloat16))
        rows = (x.transpose(0, 1)[None] for x in (query, key, value))
        bounds = {"cu_seq_lens_q": ends(), "cu_seq_lens_k": ends()}
        longest = {"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
        found, _ = varlen_attention(module, *rows, None, **bounds, **longest)
        f["enable_gqa"] = GROUPS
        f["relative error"] = check(found[0], plain_attention(query, key, value))
    with measured("Triton") as f:
        import triton
        import triton.language as tl

        @triton.jit
        def twice(x: Any, y: Any, n: tl.constexpr) -> None:
            at = tl.arange(0, n)
            tl.store(y + at, 2 * tl.load(x + at))

        x = torch.randn(1024, device=DEVICE)
        y = torch.empty_like(x)
        twice[(1,)](x, y, 1024)
        f["relative error"] = check(y, 2 * x, 1e-6)
    with measured("bitsandbytes") as f:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit
        from bitsandbytes.optim import AdamW8bit

        w = torch.randn(1024, 1024, device=DEVICE, dtype=torch.bfloat16)
        quantised, state = quantize_4bit(w, quant_type="nf4")
        f["4 bits, relative error"] = check(dequantize_4bit(quantised, state), w, 0.2)
        p = torch.nn.Parameter(torch.randn(2**20, device=DEVICE))
        p.grad, before = torch.randn_like(p), p.detach().clone()
        AdamW8bit([p], lr=1e-2).step()
        f["8-bit Adam, mean step of 0.01"] = float((p - before).abs().mean())


def between_processes() -> None:
    with measured("CUDA IPC to another process") as f:
        data = torch.randint(0, 255, (50_000_000,), device=DEVICE, dtype=torch.uint8)
        torch.cuda.synchronize()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=read_ipc, args=(theirs, export(data)))
        process.start()
        assert ours.poll(HANG_S), "no answer"
        answer = ours.recv()
        process.join(20)
        torch.cuda.ipc_collect()
        f["equal"] = answer == int(data.long().sum())
        assert f["equal"], answer


def read_ipc(connection: Connection, fields: list[Any]) -> None:
    try:
        connection.send(int(rebuild(fields, DEVICE).long().sum()))
    except Exception as error:  # the other process reports it
        connection.send(repr(error))


# -- vLLM ------------------------------------------------------------------------------------------


def libraries() -> None:
    with measured("vLLM's libraries load") as f:
        started = time.perf_counter()
        import vllm
        from vllm.platforms import current_platform

        f |= {"version": vllm.__version__, "platform": type(current_platform).__name__}
        f["norms"] = hasattr(torch.ops._C, "rms_norm")
        f["experts"] = hasattr(torch.ops._moe_C, "topk_softmax")
        f["seconds to import"] = time.perf_counter() - started
        assert f["norms"] and f["experts"]
    with measured("what openrl asks of vLLM") as f:
        f["missing"] = missing_features()
        assert not f["missing"]


def operators() -> None:
    from vllm import _custom_ops as ops

    with measured("vLLM's norms") as f:
        x = torch.randn(64, 1024, device=DEVICE, dtype=torch.bfloat16)
        w = torch.rand(1024, device=DEVICE).bfloat16()
        out = torch.full_like(x, torch.nan)
        ops.rms_norm(out, x, w, 1e-6)
        f["relative error"] = check(out, F.rms_norm(x.float(), (1024,), w.float(), 1e-6))
    with measured("vLLM's fp8 products") as f:
        a, b = (torch.randn(64, 256, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        (qa, sa), (qb, sb) = (ops.scaled_fp8_quant(x) for x in (a, b))
        found = ops.cutlass_scaled_mm(qa, qb.t(), sa, sb, torch.bfloat16)
        f["relative error"] = check(found, a.float() @ b.float().t(), 0.1)
    with measured("vLLM's attention") as f:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        most = max(LENGTHS)
        for width in (64, 128):
            query, key, value = (packed(heads, width) for heads in (8, 4, 4))
            found = flash_attn_varlen_func(
                query, key, value, most, ends(), most, ends(), causal=True, fa_version=3
            )
            f[f"relative error, width {width}"] = check(found, plain_attention(query, key, value))
    with measured("vLLM's choice of experts") as f:
        gates = torch.randn(32, 16, device=DEVICE)
        weights = torch.empty(32, 2, device=DEVICE)
        ids = torch.empty(32, 2, device=DEVICE, dtype=torch.int32)
        ops.topk_softmax(weights, ids, torch.empty_like(ids), gates)
        f["relative error"] = check(weights, gates.softmax(-1).topk(2).values, 1e-4)


def sleeping_memory() -> None:
    with measured("vLLM's sleeping memory") as f:
        from vllm.device_allocator.cumem import CuMemAllocator

        memory = CuMemAllocator.get_instance()
        with memory.use_memory_pool(tag="weights"):
            x = torch.full((2**28,), 3, dtype=torch.uint8, device=DEVICE)
        free = torch.cuda.mem_get_info()[0]
        memory.sleep(offload_tags=("weights",))
        f["GiB freed of 0.25"] = (torch.cuda.mem_get_info()[0] - free) / 2**30
        memory.wake_up()
        assert int((x == 3).sum()) == 2**28


CHECKS: dict[str, Sequence[Callable[[], None]]] = {
    "torch": (machine, ceilings, kernels, between_processes),
    "vllm": (libraries, operators, sleeping_memory),
}


if __name__ == "__main__":
    faulthandler.dump_traceback_later(HANG_S)  # a hang shows where
    for check_of in CHECKS[sys.argv[1]]:
        check_of()
    sys.exit(bool(failed & NEEDED))
