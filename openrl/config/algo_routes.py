"""How the rows of each data source are learned from: the file of --algo_routing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openrl.errors import UserError, listed, short
from openrl.extension_points import advantage_estimators
from openrl.flags.schema import flags_of
from openrl.flags.sources import read_table

ROUTES_SHAPE = (
    "lines of the form  datasource: {advantage_estimator: NAME, rl_weight: NUMBER, kl_weight:"
    " NUMBER}  and options of the estimator"
)
WEIGHTS = ("rl_weight", "kl_weight")


@dataclass(frozen=True)
class AlgoRoute:
    """How the rows of a data source are learned from. ``estimator`` None: by that of the flags."""

    estimator: str | None
    options: Any
    rl_weight: float  # factor on its rows' policy loss
    kl_weight: float  # factor on its rows' KL to the reference, in the reward or the loss


def read_algo_routes(path: str | None) -> dict[str, AlgoRoute]:
    """Read the file; empty without one. Raises UserError."""
    if path is None:
        return {}
    table = read_table(path, "algo_routing")
    if not isinstance(table, dict) or not table:
        raise UserError(f"--algo_routing: {path} names no data sources", ROUTES_SHAPE)
    routes = {}
    for source, row in table.items():
        where = f"--algo_routing: {path}: {short(source)}"
        if not isinstance(row, dict) or not row:
            raise UserError(f"{where} says nothing", ROUTES_SHAPE)
        routes[str(source)] = _route(row, where)
    return routes


def _route(row: Mapping[str, Any], where: str) -> AlgoRoute:
    given = dict(row)
    name = given.pop("advantage_estimator", None)
    weights = [given.pop(weight, 1.0) for weight in WEIGHTS]
    for weight, value in zip(WEIGHTS, weights, strict=True):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value < float("inf"):
            raise UserError(f"{where}: {weight} must be a number from 0 on, got {short(value)}")
    if name is not None and name not in advantage_estimators.names():
        known = ", ".join(sorted(advantage_estimators.names()))
        raise UserError(
            f"{where}: there is no advantage estimator {short(name)}", f"one of {known}"
        )
    cls = None if name is None else advantage_estimators[name].options
    specs = {spec.name: spec for spec in flags_of(cls)} if cls else {}
    if unknown := [key for key in given if key not in specs]:
        of = f"{name} has" if name else "without an advantage_estimator there are"
        there = f"the options {listed(sorted(specs), 9)}" if specs else "no options"
        raise UserError(f"{where}: {of} no {short(unknown[0])}, but {there}", ROUTES_SHAPE)
    try:
        options = (
            cls(**{key: specs[key].read(value) for key, value in given.items()}) if cls else None
        )
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    return AlgoRoute(name, options, *map(float, weights))
