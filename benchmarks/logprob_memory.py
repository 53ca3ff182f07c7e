"""Peak memory of log-probs and entropies at the output head, forward and backward, with and without
chunks.

    python -m benchmarks.logprob_memory

Every measurement is a process of its own that holds random hidden states and an output head, and
reads from the kernel by how much its resident memory rises while log-probs, entropies and their
gradients are computed in fp32. The plain version is what a training loop writes down first: all
logits, log-softmax, gather. Prints the peaks, how they grow with the number of tokens, and the
largest differences between the two. The plain version takes about 10 GB at 4,096 x 151,936."""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.options import device_option, parser_of
from benchmarks.pairs import of_process
from openrl.models.logits import LogitTransform, Projection
from openrl.models.logprobs import token_logprobs

M_MMAP_THRESHOLD = -3  # of malloc.h
Figures = tuple[float, dict[str, Tensor]]  # bytes, results


def plain(
    states: Tensor, weight: Tensor, targets: Tensor, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """All logits at once. ``with_gradient``: of the entropies too."""
    logprobs = F.linear(states, weight).log_softmax(-1)
    with torch.set_grad_enabled(with_gradient):
        entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropies


def chunked(
    states: Tensor, weight: Tensor, targets: Tensor, with_gradient: bool, chunk_size: int
) -> tuple[Tensor, Tensor]:
    head = Projection(weight, None, LogitTransform())
    logprobs, entropies, _ = token_logprobs(states, head, targets, chunk_size, entropy=True)
    assert entropies is not None
    return logprobs, entropies if with_gradient else entropies.detach()


def measure(
    chunk_size: int,
    tokens: int,
    vocabulary: int,
    hidden_size: int,
    with_gradient: bool,
    device: str,
) -> Figures:
    """The rise of this process's memory on ``device`` in bytes, and the results. ``chunk_size`` 0:
    the plain version."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)  # what is freed goes back to the kernel
    g = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden_size, generator=g).to(device).requires_grad_()
    head = torch.randn(vocabulary, hidden_size, generator=g) / hidden_size**0.5
    weight = head.to(device).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=g).to(device)
    up = torch.randn(2, tokens, generator=g).to(device)
    # warm
    small = Projection(weight[:2], None, LogitTransform())
    token_logprobs(states[:2], small, targets[:2] % 2, 1)[0].sum().backward()
    states.grad = weight.grad = None
    before = peak_from_here(device)
    args = (states, weight, targets, with_gradient)
    logprobs, entropies = chunked(*args, chunk_size) if chunk_size else plain(*args)
    loss = (logprobs * up[0]).sum() + ((entropies * up[1]).sum() if with_gradient else 0)
    loss.backward()
    rise = (of_process("VmHWM") if device == "cpu" else torch.cuda.max_memory_allocated()) - before
    assert states.grad is not None and weight.grad is not None
    grads = {"gradient of states": states.grad, "gradient of head": weight.grad}
    found = {"log-probs": logprobs.detach(), "entropies": entropies.detach()} | grads
    return rise, {name: tensor.cpu() for name, tensor in found.items()}


def peak_from_here(device: str) -> int:
    """Bytes in use; the peak is counted anew."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return of_process("VmRSS")


def measure_into(path: str, *args: Any) -> None:
    torch.save(measure(*args), path)


def in_a_child(*args: int | bool | str) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/figures.pt"
        process = torch.multiprocessing.get_context("spawn").Process(
            target=measure_into, args=(path, *args)
        )
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(
                f"measuring {args} ended with {process.exitcode}: -9 is the kernel, out of memory"
            )
        return torch.load(path, weights_only=True)


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Largest absolute difference of values, relative difference of gradients."""
    result = {}
    for name, tensor in expected.items():
        gap = found[name] - tensor
        result[name] = float(
            gap.norm() / tensor.norm() if name.startswith("gradient") else gap.abs().max()
        )
    return result


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--chunk_sizes", type=int, nargs="+", default=[1024, 256])
    parser.add_argument(
        "--growth", type=int, nargs="*", default=[8192], help="further numbers of tokens, in chunks"
    )
    parser.add_argument("--entropy_gradient", action="store_true", help="of the entropies too")
    device_option(parser)
    args = parser.parse_args()

    sizes = (args.vocabulary, args.hidden_size, args.entropy_gradient, args.device)
    naive, expected = in_a_child(0, args.tokens, *sizes)
    table = Table("version", "tokens", "peak, GB", "of plain", *expected)
    table.add_row("plain", f"{args.tokens:,}", f"{naive / 1e9:.2f}", "")
    for size in args.chunk_sizes:
        for tokens in (args.tokens, *args.growth):
            rise, found = in_a_child(size, tokens, *sizes)
            same = tokens == args.tokens
            gaps = [f"{gap:.1e}" for gap in differences(found, expected).values()] if same else []
            share = f"{rise / naive:.1%}" if same else ""
            table.add_row(f"chunks of {size:,}", f"{tokens:,}", f"{rise / 1e9:.2f}", share, *gaps)
    Console(width=120).print(
        f"vocabulary {args.vocabulary:,}, hidden size {args.hidden_size}, fp32, entropies"
        f" with{'' if args.entropy_gradient else 'out'} gradient"
    )
    Console(width=120).print(
        table, "last columns: largest difference to plain, of gradients relative", sep="\n"
    )


if __name__ == "__main__":
    main()
