"""The wire formats of environment servers of the verifiers package: msgpack in ZMQ frames.

A request is ``[id, *frames]``. Its reply is ``[id, data]``, or from 0.4 on ``[id, b"reply", data]``
after any number of ``[id, b"delta", data]``. A server answers only pings in its own format."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import msgpack

from openrl.agents.endpoint.records import MODEL, Json
from openrl.types import Prompt, Sampling

KEY_VARIABLE = "OPENRL_API_KEY"  # servers want the name of a variable; the key is in the path


@dataclass(frozen=True)
class Outcome:
    """The result of an episode."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    timed_out: bool = False


@dataclass(frozen=True)
class Wire:
    """The frames that follow the id of a request, and how to read its reply."""

    health: list[bytes]
    run: Callable[[Prompt, str, Sampling], list[bytes]]  # row, base URL, sampling
    cancel: Callable[[bytes], list[bytes]]  # id of a run -> a whole message
    read: Callable[[Json, list[Json]], Outcome]  # reply, deltas


def pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True, default=str)
    return packed


def unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, raw=False, strict_map_key=False)


def _sampling(sampling: Sampling) -> Json:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
    }


def _run_environment(prompt: Prompt, base_url: str, sampling: Sampling) -> list[bytes]:
    number = re.search(r"\d+$", prompt.id)
    row = {
        "prompt": prompt.chat,
        "example_id": prompt.meta.get("example_id", int(number[0]) if number else 0),
        "answer": "" if prompt.label is None else str(prompt.label),
        "info": prompt.meta.get("info", prompt.meta),
    }
    client = {
        "client_type": "openai_chat_completions",
        "api_base_url": base_url,
        "api_key_var": KEY_VARIABLE,
    }
    request = {
        "request_type": "run_rollout",
        "input": row,
        "client_config": client,
        "model": MODEL,
        "sampling_args": _sampling(sampling),
        "max_retries": 0,
        "state_columns": None,
    }
    return [pack(request)]


def _read_output(reply: Json, deltas: list[Json]) -> Outcome:
    output = reply["output"]
    error = output.get("error")
    return Outcome(
        float(output["reward"]), _numbers(output.get("metrics")), str(error) if error else None
    )


def _run_task(prompt: Prompt, base_url: str, sampling: Sampling) -> list[bytes]:
    task = {"prompt": prompt.chat, "idx": prompt.meta.get("idx")}
    label = {} if prompt.label is None else {"answer": prompt.label}
    request = {
        "task_data": {**task, **label, **prompt.meta},
        "client": {"type": "eval", "base_url": base_url, "api_key_var": KEY_VARIABLE},
        "model": MODEL,
        "sampling": _sampling(sampling),
    }
    return [b"run", pack(request)]


def _cancel_task(id_: bytes) -> list[bytes]:
    return [uuid4().hex.encode(), b"cancel", pack({"request_id": id_.decode()})]


def _read_episode(reply: Json, deltas: list[Json]) -> Outcome:
    """Sum over the traces of all agents. Version 0.3 sends them in the reply, 0.4 as deltas."""
    head = reply.get("head") or reply.get("episode") or {}
    traces: dict[str, Json] = {str(i): trace for i, trace in enumerate(head.get("traces", []))}
    for delta in deltas:
        if delta.get("discard"):
            traces.pop(delta["trace"], None)
        else:
            trace = traces.setdefault(delta["trace"], {"errors": []})
            trace["errors"] += delta.get("errors", [])
            trace.update(delta.get("set") or {})
    rewards = [r for trace in traces.values() for r in (trace.get("rewards") or {}).values() if r]
    metrics = [_numbers(trace.get("metrics")) for trace in traces.values()]
    errors = [error.get("message") for one in (head, *traces.values()) for error in one["errors"]]
    failed = "; ".join(map(str, errors)) or "it is not ok"
    return Outcome(
        sum(reward["score"] * reward.get("weight", 1.0) for reward in rewards),
        {name: value for one in metrics for name, value in one.items()},
        error=None if head.get("ok") else failed,
        timed_out=any(one.get("is_timeout") for one in (head, *traces.values())),
    )


def _numbers(metrics: Any) -> dict[str, float]:
    given = metrics or {}
    return {name: float(n) for name, n in given.items() if isinstance(n, int | float)}


WIRES = (
    # 0.1, and what 0.3 calls legacy
    Wire([b"ping"], _run_environment, lambda id_: [id_, b""], _read_output),
    # 0.3 and 0.4
    Wire([b"health", pack({})], _run_task, _cancel_task, _read_episode),
)
