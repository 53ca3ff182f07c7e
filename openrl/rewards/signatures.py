"""The signatures of reward functions that other systems document, told by the names of their
parameters.

Standard library only: it runs in the process of the reward function. Whatever the signature, the
values come out in the shape that ``openrl/rewards/protocol.py`` reads.

OpenRLHF    ``reward_func(queries, prompts, labels, **kwargs)``: lists in, a dict of lists out. One that names
            ``responses``, ``texts``, ``sources``, ``metas`` or ``token_ids`` gets them too.
EasyR1      ``compute_score(reward_inputs)``, a list of dicts in and out, or with REWARD_TYPE = "sequential" (or the
            parameter ``reward_input``) one dict at a time. Earlier: ``predicts, ground_truths``;
            ``predict, ground_truth``.
verl        ``compute_score(data_source, solution_str, ground_truth, extra_info)``, one answer at a time, coroutine or
            not; batched ``data_sources, solution_strs, ground_truths, extra_infos``.

EasyR1 and verl hand over answers without special tokens, and so does this module for theirs.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrl.rewards.reward_rows import RewardRows

Function = Callable[..., Any]
VERDICTS = ("acc", "accuracy_normalized", "accuracy")
"""Keys of a row's dict that say whether the answer is right, if in [0, 1]; the first one counts."""
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
VERL_BATCHED = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


@dataclass(frozen=True)
class Signature:
    """One way to call a reward function. ``mark`` is the parameter it is known by."""

    system: str
    mark: str
    arguments: Callable[
        [RewardRows], dict[str, Any]
    ]  # everything that the function may take, by name
    always: tuple[str, ...]  # what it gets if it takes **kwargs
    reward: str = (
        ""  # key of the reward in a row's dict; empty: the values are the protocol's already
    )
    by_row: bool = False  # takes one answer, and arguments are those of the first


def _openrlhf(rows: RewardRows) -> dict[str, Any]:
    return {f: getattr(rows, f) for f in RewardRows.__dataclass_fields__}


def _easyr1_inputs(rows: RewardRows) -> list[dict[str, Any]]:
    """Their three keys, the prompt, and the other columns of the data."""
    return [
        meta
        | {
            "prompt": prompt,
            "response": text,
            "response_length": len(ids),
            "ground_truth": label,
        }
        for meta, prompt, text, ids, label in zip(
            rows.metas, rows.prompts, rows.texts, rows.token_ids, rows.labels, strict=True
        )
    ]


def _verl(rows: RewardRows) -> dict[str, Any]:
    """``extra_info`` is the column of that name if the data has one, else all its other columns."""
    infos = [meta.get("extra_info", meta) for meta in rows.metas]
    return dict(zip(VERL_BATCHED, (rows.sources, rows.texts, rows.labels, infos), strict=True))


def _verl_one(rows: RewardRows) -> dict[str, Any]:
    return {one: _verl(rows)[many][0] for one, many in zip(VERL, VERL_BATCHED, strict=True)}


SIGNATURES = (
    Signature("OpenRLHF", "queries", _openrlhf, ("queries", "prompts", "labels")),
    Signature(
        "EasyR1",
        "reward_inputs",
        lambda rows: {"reward_inputs": _easyr1_inputs(rows)},
        (),
        "overall",
    ),
    Signature(
        "EasyR1",
        "reward_input",
        lambda rows: {"reward_input": _easyr1_inputs(rows)[0]},
        (),
        "overall",
        True,
    ),
    Signature(
        "EasyR1",
        "predicts",
        lambda r: {"predicts": r.texts, "ground_truths": r.labels},
        (),
        "overall",
    ),
    Signature(
        "EasyR1",
        "predict",
        lambda r: {"predict": r.texts[0], "ground_truth": r.labels[0]},
        (),
        "overall",
        True,
    ),
    Signature("verl", "solution_strs", _verl, VERL_BATCHED, "score"),
    Signature("verl", "solution_str", _verl_one, VERL, "score", True),
)
KNOWN = (
    "reward_func(queries, prompts, labels, **kwargs), compute_score(reward_inputs) or "
    "compute_score(data_source, solution_str, ground_truth, extra_info)"
)


@dataclass(frozen=True)
class Scorer:
    """A function, how it is called, and the keyword arguments that the user gives it."""

    function: Function
    signature: Signature
    kwargs: Mapping[str, Any]
    together: bool = False  # the function compares siblings: they are never scored one by one

    @property
    def by_row(self) -> bool:
        return self.signature.by_row

    def __call__(self, rows: RewardRows) -> Any:
        """Values for the rows, one row if ``by_row``; whatever the function raises."""
        offered, taken = self.signature.arguments(rows), parameters(self.function)
        names = set(taken) | (set(self.signature.always) if takes_any(self.function) else set())
        arguments = {name: value for name, value in offered.items() if name in names}
        values = self.function(**arguments, **self.kwargs)
        values = plain(asyncio.run(_finish(values)) if inspect.isawaitable(values) else values)
        if not self.signature.reward:
            return values
        return keyed([values] if self.by_row else values, self.signature.reward)


async def _finish(values: Any) -> Any:
    return await values


def recognise(function: Function, kwargs: Mapping[str, Any], reward_type: str | None) -> Scorer:
    """How to call ``function``; ``reward_type`` is the constant REWARD_TYPE of its file.

    Raises TypeError if its parameters are none of the known ones, or do not fit ``kwargs``.
    """
    taken = parameters(function)
    signature = next((s for s in SIGNATURES if s.mark in taken), None)
    if signature is None:
        raise TypeError(f"its parameters are ({', '.join(taken)}); known are {KNOWN}")
    if reward_type == "sequential" and signature.mark == "reward_inputs":
        one = next(s for s in SIGNATURES if s.mark == "reward_input")
        signature = Signature(
            one.system,
            "reward_inputs",
            lambda r: {"reward_inputs": _easyr1_inputs(r)[0]},
            (),
            one.reward,
            True,
        )
    offered = set(signature.arguments(_ONE_ROW))
    if unknown := [
        name
        for name in kwargs
        if name in offered or (name not in taken and not takes_any(function))
    ]:
        raise TypeError(f"it takes no keyword argument {', '.join(unknown)} (--reward_func_kwargs)")
    if missing := [
        n for n, p in taken.items() if p.default is p.empty and n not in offered and n not in kwargs
    ]:
        raise TypeError(f"it needs {', '.join(missing)}: give them by --reward_func_kwargs")
    return Scorer(function, signature, kwargs, together=reward_type == "group")


_ONE_ROW = RewardRows([""], [""], [None], [""], [""], [[]], [""], [{}])


def parameters(function: Function) -> dict[str, inspect.Parameter]:
    """The parameters that have a name, by it; ``self`` of a class's method is none."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {n: p for n, p in inspect.signature(function).parameters.items() if p.kind not in kinds}


def takes_any(function: Function) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def keyed(values: Any, reward: str) -> dict[str, Any]:
    """One number or dict for each row, in the protocol's shape: the key ``reward`` is the reward,
    one of VERDICTS the verdict; the other numbers are parts, and what is no number is left out, as
    in those systems."""
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


def plain(value: Any) -> Any:
    """Tensors and arrays become lists or numbers, so that the other side needs none of their
    libraries.

    Raises TypeError for what is no number, text, list or dict.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    raise TypeError(
        f"it returned a {type(value).__name__}; numbers, lists, tensors and dicts are understood"
    )
