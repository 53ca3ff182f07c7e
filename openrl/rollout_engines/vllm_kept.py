"""Reads what vLLM returns beside tokens: the sets that they were sampled from or the likeliest
tokens, and experts.

Under ``logprobs_mode="processed_logprobs"`` vLLM's log-probs are those after top_p, top_k and
min_p: -inf for every token that was cut off. So the finite ones among the K likeliest are the whole
set, if fewer than K are finite."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from openrl.token_origins import KeptSets, Routes
from openrl.types import Sampling


def asked_ids(sampling: Sampling, vocabulary: int) -> int:
    """Return for how many of the likeliest tokens to ask beside the sampled one: for kept sets one
    more than may be kept, which tells a whole set from a part of it."""
    if not sampling.kept_ids:
        return min(sampling.likeliest, vocabulary - 1)
    most = sampling.kept_ids
    if sampling.top_k > 0:  # vLLM keeps all that equal the last, which is common in bf16
        most = min(most, 2 * sampling.top_k)
    return min(most + 1, vocabulary)


def read_logprobs(
    found: Any, sampling: Sampling, vocabulary: int
) -> tuple[list[int], list[float], KeptSets | None]:
    """Return the tokens that vLLM's ``FlatLogprobs`` describe, their log-probs and, if they were
    asked for, the sets that they were sampled from or the likeliest tokens."""
    if not found:
        return [], [], KeptSets() if sampling.lists else None
    if not sampling.lists:
        return list(found.token_ids), list(found.logprobs), None
    # each position has the sampled token, then the likeliest ones in falling order
    shape = (len(found), -1)
    ids = np.array(found.token_ids, dtype=np.int32).reshape(shape)
    logprobs = np.array(found.logprobs).reshape(shape)
    if not sampling.kept_ids:
        listed = KeptSets(
            array("i", [ids.shape[1] - 1]) * len(ids),
            array("i", ids[:, 1:].tobytes()),
            array("f", logprobs[:, 1:].astype(np.float32).tobytes()),
        )
        return ids[:, 0].tolist(), logprobs[:, 0].tolist(), listed
    inside = np.isfinite(logprobs[:, 1:])
    sizes = inside.sum(-1, dtype=np.int32)
    width = inside.shape[1]
    whole = (sizes <= sampling.kept_ids) & ((sizes < width) | (width == vocabulary))
    sets = KeptSets(
        array("i", np.where(whole, sizes, KeptSets.UNKNOWN).tobytes()),
        array("i", ids[:, 1:][inside & whole[:, None]].tobytes()),
    )
    return ids[:, 0].tolist(), logprobs[:, 0].tolist(), sets


def read_routes(
    found: np.ndarray[Any, Any] | None, layers: Sequence[int], top_k: int, length: int
) -> Routes:
    """Return the experts of a row of ``length`` tokens from those that vLLM returns, (tokens - 1,
    all layers, top_k): those of the ``layers`` with a router. LOST where it returns none, as of a
    request that was aborted."""
    routes = Routes(len(layers) * top_k)
    if found is None:
        routes.ids.extend(array("h", [Routes.LOST]) * (routes.width * (length - 1)))
    else:
        routes.ids.frombytes(found[:, list(layers)].astype(np.int16).tobytes())
    return routes.first(length)
