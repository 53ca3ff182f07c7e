"""The way of weights through host memory against the two copies that it cannot do without.

    python -m benchmarks.weight_sync

A receiver in a process of its own stands for an engine: it maps each bucket and copies every tensor
into parameters of its own, as vLLM's loaders do. The sender cuts, packs and announces buckets as
the trainer's rank 0 does. Beside each sync the same bytes are copied twice, tensor by tensor,
between ordinary memory. Prints the ratio and the number of calls that the receiver was sent. One
thread each, pairs interleaved; refuses to print on a machine with other work."""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.pairs import QuietPairs, busy_seconds, device_option, spread
from openrl.weights.buckets import Bucket, pack, split_into_buckets
from openrl.weights.transport import Route, make_receiver, make_sender, read_message

CPU = torch.device("cpu")
PATIENCE_S = 60.0
MIB = 2**20


def model_weights(total: int, hidden: int, device: str) -> dict[str, Tensor]:
    """About ``total`` bytes in the shapes of a decoder in bf16: square and wide matrices, and
    vectors between them."""
    shapes = {
        "q": (hidden, hidden),
        "k": (hidden // 4, hidden),
        "up": (4 * hidden, hidden),
        "norm": (hidden,),
    }
    weights: dict[str, Tensor] = {"embed": torch.randn(16 * hidden, hidden).bfloat16()}
    layer = 0
    while sum(weight.nbytes for weight in weights.values()) < total:
        weights |= {
            f"{layer}.{name}": torch.randn(shape).bfloat16() for name, shape in shapes.items()
        }
        layer += 1
    return {name: weight.to(device) for name, weight in weights.items()}


def receive(connection: Connection, hidden: int, total: int, device: str) -> None:
    """Answers each announcement once its tensors are copied."""
    torch.set_num_threads(1)
    receiver = make_receiver(Route(), 1, CPU)
    parameters = {
        name: torch.empty_like(weight)
        for name, weight in model_weights(total, hidden, device).items()
    }
    connection.send("ready")
    while (message := connection.recv()) is not None:
        sent = read_message(message)
        for name, tensor in Bucket(sent.manifest, receiver.open(sent)).tensors():
            parameters[name].copy_(tensor)
        busy_seconds(device)  # waits for a GPU
        connection.send(sent.manifest.version)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=128, help="MiB of weights")
    parser.add_argument("--bucket_mb", type=int, default=32)
    parser.add_argument("--hidden_size", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=11)
    device_option(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)

    weights = model_weights(args.megabytes * MIB, args.hidden_size, args.device)
    size = sum(weight.nbytes for weight in weights.values())
    copies = [
        {name: torch.zeros_like(weight, device="cpu") for name, weight in weights.items()}
        for _ in range(2)
    ]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    engine = context.Process(
        target=receive,
        args=(theirs, args.hidden_size, args.megabytes * MIB, args.device),
        daemon=True,
    )
    engine.start()
    sender = make_sender(Route(), 0, CPU)

    def answer() -> object:
        if not ours.poll(PATIENCE_S):
            raise TimeoutError(f"the receiver has not answered within {PATIENCE_S:g} s")
        return ours.recv()

    def sync(version: int) -> tuple[float, int]:
        """(seconds, calls)"""
        started, calls = time.perf_counter(), 0
        sender.begin()
        for named in split_into_buckets(weights.items(), args.bucket_mb * MIB):
            ours.send(sender.announce(pack(named, version, sender.allocate)).message())
            calls += 1
            answer()
        sender.end()
        return time.perf_counter() - started, calls

    def copy_twice() -> float:
        started = time.perf_counter()
        for source, target in ((weights, copies[0]), (copies[0], copies[1])):
            for name, weight in source.items():
                target[name].copy_(weight)
        busy_seconds(args.device)
        return time.perf_counter() - started

    answer()
    first, calls = sync(0)  # takes the pages
    copy_twice()
    quiet: QuietPairs[tuple[float, float]] = QuietPairs(args.pairs)
    for version, _ in enumerate(quiet, 1):
        quiet.add((sync(version)[0], copy_twice()))
    ours.send(None)
    engine.join(PATIENCE_S)

    console = Console()
    if reason := quiet.verdict():
        console.print(reason)
        raise SystemExit(1)
    pairs = quiet.kept
    console.print(
        f"{size / MIB:.0f} MiB of {len(weights)} tensors in {calls} calls (bytes / bucket ="
        f" {math.ceil(size / MIB / args.bucket_mb)})",
        f"sync {1000 * median(a for a, _ in pairs):.0f} ms, two copies"
        f" {1000 * median(b for _, b in pairs):.0f} ms, ratio"
        f" {spread([a / b for a, b in pairs], 2)} over {args.pairs} pairs; the first sync, which"
        f" takes the pages: {1000 * first:.0f} ms",
        str(quiet),
        sep="\n",
    )


if __name__ == "__main__":
    main()
