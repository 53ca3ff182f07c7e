"""The way of weights through host memory against the two copies that it cannot do without.

    python -m benchmarks.weight_sync

A receiver in a process of its own stands for an engine: once all buckets are announced, it maps them
and copies every tensor into parameters of its own, as vLLM's loaders do. Until then it keeps its old
weights, so the two copies of a sync come one after the other. The sender cuts, packs and announces
buckets as the trainer's rank 0 does. Beside each sync the same bytes are copied twice, tensor by
tensor, between ordinary memory. Prints the ratio, of both processes' processor seconds and, on a
machine without other work, of the wall. One thread each, pairs interleaved."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.options import device_option, parser_of
from benchmarks.pairs import QuietPairs, busy_seconds, spread
from openrl.weights.buckets import Bucket, pack, split_into_buckets
from openrl.weights.transport import Route, make_receiver, make_sender, read_message

CPU = torch.device("cpu")
PATIENCE_S = 60.0
MIB = 2**20
END = "end of a sync"


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
    """Loads the buckets announced when told the end of a sync, and answers with the processor
    seconds since the last answer."""
    torch.set_num_threads(1)
    receiver = make_receiver(Route(), 1, CPU)
    parameters = {
        name: torch.zeros_like(weight)
        for name, weight in model_weights(total, hidden, device).items()
    }
    connection.send("ready")
    started, received = time.process_time(), []
    while (message := connection.recv()) is not None:
        if message != END:
            received.append(read_message(message))
            continue
        for sent in received:
            for name, tensor in Bucket(sent.manifest, receiver.open(sent)).tensors():
                parameters[name].copy_(tensor)
        busy_seconds(device)  # waits for a GPU
        connection.send(time.process_time() - started)
        started, received = time.process_time(), []


@dataclass(frozen=True)
class Seconds:
    wall: float
    processor: float  # of both processes


def main() -> None:
    parser = parser_of(__doc__)
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

    def answer() -> Any:
        if not ours.poll(PATIENCE_S):
            raise TimeoutError(f"the receiver has not answered within {PATIENCE_S:g} s")
        return ours.recv()

    def sync(version: int) -> tuple[Seconds, int]:
        """(seconds, buckets)"""
        wall, processor, buckets = time.perf_counter(), time.process_time(), 0
        for named in split_into_buckets(weights.items(), args.bucket_mb * MIB):
            ours.send(sender.announce(pack(named, version, sender.allocate)).message())
            buckets += 1
        processor -= time.process_time()  # waiting is no work
        ours.send(END)
        theirs = answer()
        sender.end()
        return Seconds(time.perf_counter() - wall, theirs - processor), buckets

    def copy_twice() -> Seconds:
        wall, processor = time.perf_counter(), time.process_time()
        for source, target in ((weights, copies[0]), (copies[0], copies[1])):
            for name, weight in source.items():
                target[name].copy_(weight)
        busy_seconds(args.device)
        return Seconds(time.perf_counter() - wall, time.process_time() - processor)

    answer()
    first, buckets = sync(0)  # takes the pages
    copy_twice()
    pairs: list[tuple[Seconds, Seconds]] = []
    quiet: QuietPairs[tuple[Seconds, Seconds]] = QuietPairs(args.pairs)
    for version, _ in enumerate(quiet, 1):
        pairs.append((sync(version)[0], copy_twice()))
        quiet.add(pairs[-1])
    ours.send(None)
    engine.join(PATIENCE_S)

    def figures(kind: str, kept: list[tuple[Seconds, Seconds]]) -> str:
        syncs, twice = (
            [getattr(seconds, kind) for seconds in side] for side in zip(*kept, strict=True)
        )
        return (
            f"{kind}: sync {1000 * median(syncs):.0f} ms, two copies {1000 * median(twice):.0f} ms,"
            f" ratio {spread([a / b for a, b in zip(syncs, twice, strict=True)], 2)} over"
            f" {len(kept)} pairs; first sync {1000 * getattr(first, kind):.0f} ms"
        )

    Console().print(
        f"{size / MIB:.0f} MiB of {len(weights)} tensors in {buckets} buckets (bytes / bucket ="
        f" {math.ceil(size / MIB / args.bucket_mb)})",
        figures("processor", pairs),
        quiet.verdict() or figures("wall", quiet.kept),
        sep="\n",
    )


if __name__ == "__main__":
    main()
