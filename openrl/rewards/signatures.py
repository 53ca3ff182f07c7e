"""The signatures of reward functions that other systems document, recognised by the names of their
parameters.

This module uses the standard library only, because it runs in the process of the reward function.
Whatever the signature, values are returned in the form that ``openrl/rewards/protocol.py`` reads.

OpenRLHF  ``reward_func(queries, prompts, labels, **kwargs)``: lists in, a dict of lists out.
EasyR1    ``compute_score(reward_inputs)``, a list of dicts in and out, or with REWARD_TYPE =
          "sequential" one dict at a time.
verl      ``compute_score(data_source, solution_str, ground_truth, extra_info)``, one answer at a
          time, coroutine or not.
TRL       ``reward_func(completions, **kwargs)``: lists in, a list of numbers out. None says that
          the function does not apply to a row, and adds nothing to the sum of its rewards.

EasyR1, verl and TRL pass answers without special tokens; so does this module for their signatures.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from openrl.rewards.reward_rows import RewardRows

Function = Callable[..., Any]
VERDICTS = ("acc", "accuracy_normalized", "accuracy")
"""Keys of a row's dict that may hold the verdict: the first with a value in [0, 1] counts."""


@dataclass(frozen=True)
class Signature:
    """One way to call a reward function, recognised by the first of ``parameters``."""

    system: str
    parameters: Mapping[str, str]  # name -> the key of ``columns`` whose values it takes
    always: tuple[str, ...] = ()  # parameters that a function with **kwargs gets
    # key of the reward in a row's dict; empty: the values already have the protocol's form
    reward: str = ""
    by_row: bool = False  # the function takes one answer, not lists
    takes_data: bool = False  # the function also takes the columns of the data by name

    @property
    def mark(self) -> str:
        return next(iter(self.parameters))

    def arguments(self, rows: RewardRows) -> dict[str, Any]:
        """Return all arguments that the function may take, by name."""
        found = columns(rows)
        given = {name: found[column] for name, column in self.parameters.items()}
        if self.by_row:
            return {name: column[0] for name, column in given.items()}
        if self.takes_data:
            keys = {key for meta in rows.metas for key in meta}
            free = [key for key in keys if self.parameters.get(key, "labels") == "labels"]
            given |= {key: [meta.get(key) for meta in rows.metas] for key in free}
        return given


def columns(rows: RewardRows) -> dict[str, list[Any]]:
    """Return the columns of the rows, plus ``inputs`` (EasyR1's dicts: its three keys, the prompt
    and the other columns of the data) and ``infos`` (verl's extra_info: the data's column of that
    name, or else all other columns)."""
    inputs = [
        meta
        | {"prompt": prompt, "response": text, "response_length": len(ids), "ground_truth": label}
        for meta, prompt, text, ids, label in zip(
            rows.metas, rows.prompts, rows.texts, rows.token_ids, rows.labels, strict=True
        )
    ]
    infos = [meta.get("extra_info", meta) for meta in rows.metas]
    return vars(rows) | {"inputs": inputs, "infos": infos}


_OPENRLHF = {field.name: field.name for field in fields(RewardRows)}
_VERL_MANY = {
    "solution_strs": "texts",
    "ground_truths": "labels",
    "data_sources": "sources",
    "extra_infos": "infos",
}
_VERL = {name[:-1]: column for name, column in _VERL_MANY.items()}
_TRL = {"completions": "texts", "prompts": "prompts", "completion_ids": "token_ids"}
_TRL |= {"ground_truth": "labels", "answer": "labels", "solution": "labels"}
_LABEL = {"ground_truth": "labels"}
SIGNATURES = (
    Signature("OpenRLHF", _OPENRLHF, always=("queries", "prompts", "labels")),
    Signature("EasyR1", {"reward_inputs": "inputs"}, reward="overall"),
    Signature("EasyR1", {"reward_input": "inputs"}, reward="overall", by_row=True),
    Signature("EasyR1", {"predicts": "texts", "ground_truths": "labels"}, reward="overall"),
    Signature("EasyR1", {"predict": "texts"} | _LABEL, reward="overall", by_row=True),
    Signature("verl", _VERL_MANY, tuple(_VERL_MANY), "score"),
    Signature("verl", _VERL, tuple(_VERL), "score", by_row=True),
    Signature("verl", {"predict_str": "texts"} | _LABEL, reward="score", by_row=True),
    Signature("verl", {"model_output": "texts"} | _LABEL, reward="score", by_row=True),
    Signature("TRL", _TRL, tuple(_TRL), takes_data=True),
)
KNOWN = (
    "reward_func(queries, prompts, labels, **kwargs), compute_score(reward_inputs), "
    "compute_score(data_source, solution_str, ground_truth, extra_info) or "
    "reward_func(completions, **kwargs)"
)


@dataclass(frozen=True)
class Scorer:
    """A reward function, its signature, and the user's keyword arguments for it."""

    function: Function
    signature: Signature
    kwargs: Mapping[str, Any]
    together: bool = False  # the function compares siblings, so they are never scored one by one

    def __call__(self, rows: RewardRows) -> Any:
        """Return the function's values for the rows, which are a single row if it takes one at a
        time. Raises whatever the function raises."""
        offered, names = self.signature.arguments(rows), set(parameters(self.function))
        if takes_any_keyword(self.function):
            names |= set(offered) if self.signature.takes_data else set(self.signature.always)
        arguments = {name: value for name, value in offered.items() if name in names}
        values = self.function(**arguments, **self.kwargs)
        values = to_plain_values(
            asyncio.run(_finish(values)) if inspect.isawaitable(values) else values
        )
        if self.signature.takes_data:
            return without_nulls(values)
        if not self.signature.reward:
            return values
        return to_protocol([values] if self.signature.by_row else values, self.signature.reward)


async def _finish(values: Any) -> Any:
    return await values


def recognise(function: Function, kwargs: Mapping[str, Any], reward_type: str | None) -> Scorer:
    """Return the scorer that calls ``function``. ``reward_type`` is the constant REWARD_TYPE of the
    function's file.

    Raises TypeError if the function has none of the known signatures, or does not fit ``kwargs``.
    """
    taken = parameters(function)
    signature = next((s for s in SIGNATURES if s.mark in taken), None)
    if signature is None:
        raise TypeError(f"its parameters are ({', '.join(taken)}), but must be those of {KNOWN}")
    if reward_type == "sequential" and signature.mark == "reward_inputs":
        signature = replace(signature, by_row=True)
    offered = set(signature.arguments(_ONE_ROW))
    if unknown := [
        name
        for name in kwargs
        if name in offered or (name not in taken and not takes_any_keyword(function))
    ]:
        raise TypeError(f"it takes no keyword argument {', '.join(unknown)} (--reward_func_kwargs)")
    if not signature.takes_data and (
        missing := [
            n
            for n, p in taken.items()
            if p.default is p.empty and n not in offered and n not in kwargs
        ]
    ):
        raise TypeError(f"it needs {', '.join(missing)}: give them with --reward_func_kwargs")
    return Scorer(function, signature, kwargs, together=reward_type == "group")


_ONE_ROW = RewardRows([""], [""], [None], [""], [""], [[]], [""], [{}], [[]])


def parameters(function: Function) -> dict[str, inspect.Parameter]:
    """Return the named parameters of a function, by name: without *args, **kwargs and the ``self``
    of a bound method."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {n: p for n, p in inspect.signature(function).parameters.items() if p.kind not in kinds}


def takes_any_keyword(function: Function) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def without_nulls(values: Any) -> Any:
    """Return TRL's rewards with 0 for None, and a part that counts these rows."""
    if not isinstance(values, list):
        return values
    left_out = [value is None for value in values]
    rewards = [0.0 if out else value for value, out in zip(values, left_out, strict=True)]
    return {"rewards": rewards, "extra_logs": {"not_applicable": list(map(float, left_out))}}


def to_protocol(values: Any, reward: str) -> dict[str, Any]:
    """Convert the values, one number or dict per row, to the protocol's form. In a dict, the key
    ``reward`` holds the reward and one of VERDICTS the verdict. All other numbers become parts;
    what is not a number is left out, as in those systems."""
    rewards, verdicts, logs = [], [], []
    for value in values if isinstance(values, Sequence) else [values]:
        row = (
            value
            if isinstance(value, dict)
            else {reward: value[0] if isinstance(value, list) and value else value}
        )
        if reward not in row:
            raise KeyError(f"a row has no {reward!r}, but {', '.join(map(repr, row)) or 'nothing'}")
        known = [row[key] for key in VERDICTS if _is_number(row.get(key)) and 0 <= row[key] <= 1]
        rewards.append(row[reward])
        verdicts.append(float(known[0]) if known else None)
        logs.append({key: float(v) for key, v in row.items() if key != reward and _is_number(v)})
    return {"rewards": rewards, "scores": verdicts, "extra_logs": logs}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def to_plain_values(value: Any) -> Any:
    """Convert tensors and arrays to lists or numbers, so that the other side does not need their
    libraries.

    Raises TypeError for values other than numbers, texts, lists, dicts and arrays.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [to_plain_values(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_plain_values(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return to_plain_values(value.tolist())
    raise TypeError(
        f"it returned a {type(value).__name__}; numbers, lists, tensors and dicts are understood"
    )
