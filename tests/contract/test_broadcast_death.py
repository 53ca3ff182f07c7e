"""A broadcast of weights that lacks a member: nobody hangs. Processes over gloo; on GPUs the same
code runs over NCCL, which would let them wait forever."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from openrl.errors import UserError
from openrl.weights.broadcast import end_group
from tests.receivers import announced, bucket_on, receivers

LIMIT = 60  # seconds; gloo may hold on to a group for as long if a peer dies while it sends
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def test_a_receiver_that_dies_ends_the_wait_of_the_others():
    """gloo notices it, on one side or the other; all hear of it."""
    with receivers([CPU] * 3, LIMIT) as (_, sender, (lives, dies)):
        bucket = bucket_on(CPU)
        sent = announced(sender, bucket)
        lives.ask("load", sent)
        dies.ask("load", sent)
        sender.deliver(bucket)
        assert lives.answer() is None and dies.answer() is None
        lives.ask("load", sent)
        dies.kill()
        sender.deliver(bucket)
        while (got := lives.answer()) is None:  # it may have its bucket before the sender hears
            lives.ask("load", sent)
            sender.deliver(bucket)
        assert isinstance(got, UserError)
        lives.ask("load", sent)  # for good
        sender.deliver(bucket)
        assert str(lives.answer()) == str(got)


def test_a_receiver_whose_sender_never_sends_is_told():
    """As on a GPU, where only the driver learns of a death."""
    with receivers([CPU] * 2, LIMIT) as (route, sender, (receiver,)):
        receiver.ask("load", announced(sender, bucket_on(CPU)))
        end_group(route, "vllm rank 1 died")
        assert "a bucket is gone: vllm rank 1 died" in str(receiver.answer())


def test_a_sender_whose_receiver_never_opens_ends():
    with receivers([CPU] * 2, LIMIT) as (route, sender, _):
        end_group(route, "vllm rank 1 died")
        sender.deliver(bucket_on(CPU))


def test_receivers_notice_that_the_sender_is_gone():
    with receivers([CPU] * 2, LIMIT) as (route, sender, (receiver,)):
        receiver.ask("load", announced(sender, bucket_on(CPU)))
        del sender
        assert isinstance(receiver.answer(), UserError)
        end_group(replace(route, timeout=1), "nobody hears it")
