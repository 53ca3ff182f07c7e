"""A broadcast of weights whose receiver dies: nobody hangs. Three processes over gloo; NCCL stands
on the same groups, with the same timeout."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection

import pytest
import torch

from openrl.weights.buckets import Bucket, pack
from openrl.weights.transport import Rendezvous, Route, SentBucket, make_receiver, make_sender
from tests.patience import PATIENCE

LIMIT = 15  # seconds that a rank waits for the others
CPU = torch.device("cpu")


def bucket_of() -> Bucket:
    return pack([("a", torch.arange(1000.0))], 1, lambda n: torch.zeros(n, dtype=torch.uint8))


def receive(connection: Connection, route: Route, rank: int, dies: bool) -> None:
    """Takes a bucket, and more of them unless it dies before."""
    connection.send("up")
    receiver, bucket = make_receiver(route, rank, CPU), bucket_of()
    sent = SentBucket(bucket.manifest, {"size": bucket.data.numel()})
    connection.send(bool(torch.equal(receiver.open(sent), bucket.data)))
    connection.recv()
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            receiver.open(sent)
    except RuntimeError as error:
        connection.send(str(error))


def test_a_receiver_that_dies_ends_the_wait_of_the_others(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    rendezvous = Rendezvous("127.0.0.1")
    meeting = {"address": rendezvous.address, "port": rendezvous.port, "timeout": LIMIT}
    route = Route("nccl", world_size=3, **meeting)
    context = multiprocessing.get_context("spawn")
    ends, receivers = [], []
    for rank, dies in ((1, False), (2, True)):
        ours, theirs = context.Pipe()
        process = context.Process(target=receive, args=(theirs, route, rank, dies), daemon=True)
        process.start()
        ends.append(ours)
        receivers.append(process)
    # a process may take longer to start than the ranks wait for each other
    assert all(end.poll(PATIENCE) and end.recv() == "up" for end in ends)
    sender, bucket = make_sender(route, 0, CPU, rendezvous), bucket_of()
    sender.deliver(bucket)
    assert all(end.poll(PATIENCE) and end.recv() is True for end in ends)

    ends[1].send("die")
    receivers[1].join(PATIENCE)
    assert receivers[1].exitcode == -signal.SIGKILL
    ends[0].send("the next bucket")
    with pytest.raises(RuntimeError):
        while True:  # the first of them may still lie in a buffer of the dead
            sender.deliver(bucket)
    assert ends[0].poll(PATIENCE)  # the living one waits no longer either
    receivers[0].join(PATIENCE)
