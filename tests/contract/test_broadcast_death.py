"""A broadcast of weights that lacks a member: nobody hangs. Three processes over gloo; on GPUs the
same code runs over NCCL, which would let them wait forever."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from openrl.weights.broadcast import end_group
from tests.receivers import bucket_on, receivers

LIMIT = 60  # seconds; gloo may hold on to a group for as long if a peer dies while it sends
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def test_a_receiver_that_dies_ends_the_wait_of_the_others():
    """gloo notices it, on one side or the other; all hear of it."""
    with receivers([CPU] * 3, LIMIT) as (_, sender, (lives, dies)):
        bucket = bucket_on(CPU)
        lives.open()
        dies.open()
        sender.deliver(bucket)
        assert lives.answer() is True and dies.answer() is True
        lives.open()
        dies.open()
        dies.kill()
        sender.deliver(bucket)
        while (got := lives.answer()) is True:  # the first may still lie in a buffer of the dead
            lives.open()
            sender.deliver(bucket)
        assert isinstance(got, str) and got
        lives.open()  # for good
        sender.deliver(bucket)
        assert lives.answer() == got


def test_a_receiver_whose_sender_never_sends_is_told():
    """As on a GPU, where only the driver learns of a death."""
    with receivers([CPU] * 2, LIMIT) as (route, _, (receiver,)):
        receiver.open()
        end_group(route, "vllm rank 1 died")
        assert receiver.answer() == "vllm rank 1 died"


def test_a_sender_whose_receiver_never_opens_ends():
    with receivers([CPU] * 2, LIMIT) as (route, sender, _):
        end_group(route, "vllm rank 1 died")
        sender.deliver(bucket_on(CPU))


def test_receivers_notice_that_the_sender_is_gone():
    with receivers([CPU] * 2, LIMIT) as (route, sender, (receiver,)):
        receiver.open()
        sender.deliver(bucket_on(CPU))
        assert receiver.answer() is True
        receiver.open()
        del sender
        assert isinstance(receiver.answer(), str)
        end_group(replace(route, timeout=1), "nobody hears it")
