"""The signatures of reward functions, recognised by the names of their parameters.

This module uses the standard library only, because it runs in the process of the reward function.
Whatever the signature, values are returned in the form that ``openrl/rewards/protocol.py`` reads.

Ours is ``reward_func(queries, prompts, labels, **kwargs)``: lists in, a dict of lists out."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from openrl.extension_points import reward_signatures
from openrl.processes.interfaces import (
    detect_interface,
    parameters,
    required,
    takes_any_keyword,
)
from openrl.rewards.reward_rows import RewardRows
from openrl.waiting import maybe_await

Function = Callable[..., Any]
Column = Callable[[RewardRows], list[Any]]
"""Returns what a parameter takes: a value for each row."""


def as_it_is(values: Any) -> Any:
    """Return values that have the protocol's form already."""
    return values


@dataclass(frozen=True)
class RewardSignature:
    """One way to call a reward function, recognised by the first of ``parameters``."""

    shape: str  # shown to people; empty for a variant that is not worth a word
    parameters: Mapping[str, str | Column]  # a text is the name of a column of ``RewardRows``
    always: tuple[str, ...] = ()  # parameters that a function with **kwargs gets
    read: Callable[[Any], Any] = as_it_is  # brings the values for rows into the protocol's form
    by_row: bool = False  # the function takes one answer, not lists
    row_type: str = ""  # REWARD_TYPE of a file whose function does so too
    takes_data: bool = False  # the function also takes the columns of the data by name

    def fits(self, made: Function) -> bool:
        return next(iter(self.parameters)) in parameters(made)

    @property
    def function_name(self) -> str:
        """The name that functions have unless the user gives another."""
        return self.shape.partition("(")[0]

    def arguments(self, rows: RewardRows) -> dict[str, Any]:
        """Return all arguments that the function may take, by name."""
        given = {
            name: getattr(rows, column) if isinstance(column, str) else column(rows)
            for name, column in self.parameters.items()
        }
        if self.by_row:
            return {name: column[0] for name, column in given.items()}
        if self.takes_data:
            keys = {key for meta in rows.metas for key in meta}
            free = [key for key in keys if self.parameters.get(key, "labels") == "labels"]
            given |= {key: [meta.get(key) for meta in rows.metas] for key in free}
        return given


reward_signatures.add(
    "openrl",
    [
        RewardSignature(
            "reward_func(queries, prompts, labels, **kwargs)",
            {field.name: field.name for field in fields(RewardRows)},
            always=("queries", "prompts", "labels"),
        )
    ],
)


def known_signatures() -> list[RewardSignature]:
    """Return ours, then those of other systems."""
    entries = sorted(reward_signatures.entries(), key=lambda entry: entry.name != "openrl")
    return [signature for entry in entries for signature in entry.component]


@dataclass(frozen=True)
class Scorer:
    """A reward function, its signature, and the user's keyword arguments for it."""

    function: Function
    signature: RewardSignature
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
            asyncio.run(maybe_await(values)) if inspect.isawaitable(values) else values
        )
        return self.signature.read([values] if self.signature.by_row else values)


def make_scorer(function: Function, kwargs: Mapping[str, Any], reward_type: str | None) -> Scorer:
    """Return the scorer that calls ``function``. ``reward_type`` is the constant REWARD_TYPE of the
    function's file.

    Raises TypeError if the function has none of the known signatures, or does not fit ``kwargs``.
    """
    signature = detect_interface(function, known_signatures())
    taken = parameters(function)
    if signature is None:
        *others, last = [known.shape for known in known_signatures() if known.shape]
        shapes = f"{', '.join(others)} or {last}" if others else last
        raise TypeError(f"its parameters are ({', '.join(taken)}), but must be those of {shapes}")
    if reward_type and reward_type == signature.row_type:
        signature = replace(signature, by_row=True)
    offered = set(signature.arguments(_ONE_ROW))
    if unknown := [
        name
        for name in kwargs
        if name in offered or (name not in taken and not takes_any_keyword(function))
    ]:
        raise TypeError(f"it takes no keyword argument {', '.join(unknown)} (--reward_func_kwargs)")
    missing = required(function, {*offered, *kwargs})
    if missing and not signature.takes_data:
        raise TypeError(f"it needs {', '.join(missing)}: give them with --reward_func_kwargs")
    return Scorer(function, signature, kwargs, together=reward_type == "group")


_ONE_ROW = RewardRows([""], [""], [None], [""], [""], [[]], [""], [{}], [[]])


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
