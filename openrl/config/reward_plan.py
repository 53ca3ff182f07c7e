"""Which sources score which rows with which weight, according to the flags."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

from openrl.config.groups.reward import (
    TOKEN_VARIABLE,
    RewardFlags,
    RewardSourceFlags,
    files_and_urls,
    split,
)
from openrl.errors import UserError
from openrl.files import file_and_name
from openrl.flags.secrets import looks_secret
from openrl.flags.sources import read_table

ENGINES = "engines"
"""The URL of a judge that stands for the run's own engines."""
Kind = Literal["verifier", "file", "http", "model"]
FLAG = {
    "verifier": "reward_funcs",
    "file": "remote_rm_url",
    "http": "remote_rm_url",
    "model": "reward_pretrain",
}


@dataclass(frozen=True)
class RewardSource:
    """One source of rewards. Its ``name`` in metrics and flags is short and unique."""

    kind: Kind
    # name of a verifier, path.py[:function], URLs joined by commas, or a model's directory or Hub
    # name
    address: str
    name: str

    @property
    def file(self) -> tuple[Path, str | None]:
        """The path and the function of a source that is a file."""
        path, function = file_and_name(self.address)
        return Path(path).expanduser().absolute(), function

    @property
    def urls(self) -> list[str]:
        return self.address.split(",")


@dataclass(frozen=True)
class RewardPlan:
    """The sources of a run, in the order of --reward_weights, and their weights."""

    sources: tuple[RewardSource, ...]
    weights: Mapping[str, float]  # by name of the source
    # data source -> source -> weight; None: ``weights`` apply to all
    routes: Mapping[str, Mapping[str, float]] | None = None
    watched: tuple[RewardSource, ...] = ()  # judge all rows and are no part of the reward

    @property
    def all_sources(self) -> tuple[RewardSource, ...]:
        """All sources that judge answers, whether or not training reads what they say."""
        return (*self.sources, *self.watched)

    @property
    def flag(self) -> str | None:
        """The flag that gives the first source; None without any."""
        return FLAG[self.sources[0].kind] if self.sources else None

    @property
    def models(self) -> list[str]:
        """The directories or Hub names of the reward models."""
        return [source.address for source in self.sources if source.kind == "model"]

    def of(self, datasource: str) -> Mapping[str, float]:
        """Return the sources that score rows of a data source, with their weights."""
        return self.weights if self.routes is None else self.routes[datasource]

    def check_routes(self, datasources: Iterable[str]) -> None:
        """Raise UserError if rows of some data source would have no reward."""
        if self.routes is None:
            return
        if unknown := sorted(set(datasources) - self.routes.keys()):
            raise UserError(
                "--reward_routing: the file has no line for the data sources"
                f" {', '.join(unknown)}; it routes {', '.join(self.routes)}",
                "add a line for each data source; --datasource_key names their column",
            )


def reward_plan(
    flags: RewardFlags, models: str | None = None, watched: tuple[str, ...] = ()
) -> RewardPlan:
    """Return the plan of the flags, ``models`` (--reward_pretrain) and ``watched`` (--watch_funcs).
    Raises UserError."""
    all_sources = reward_sources(flags, models, watched)
    sources = all_sources[: len(all_sources) - len(watched)]
    routes = None if flags.reward_routing is None else read_routes(flags.reward_routing, sources)
    return RewardPlan(sources, source_weights(flags, sources), routes, all_sources[len(sources) :])


def reward_sources(
    flags: RewardSourceFlags, models: str | None = None, watched: tuple[str, ...] = ()
) -> tuple[RewardSource, ...]:
    """Return the sources of rewards, those that are only ``watched`` last. Raises UserError for an
    unusable or a repeated one."""
    files, urls = files_and_urls(flags.remote_rm_url)
    given: list[tuple[Kind, str]] = [("verifier", name) for name in flags.reward_funcs]
    given += [("file", item) for item in files]
    given += [("http", ",".join(urls))] if urls else []
    given += [("model", name) for name in split(models)]
    if both := [name for name in watched if name in {address for _, address in given}]:
        message = f"--watch_funcs: {both[0]} is trained on, so it cannot watch the training"
        raise UserError(message, "another verifier")
    given += [("file" if is_file(name) else "verifier", name) for name in watched]
    for kind, address in given:
        if kind == "file" and not file_and_name(address)[0].endswith(".py"):
            raise UserError(
                f"--remote_rm_url: {address} is neither a Python file nor a URL",
                "path.py:function or http://...",
            )
    if twice := [item for item, n in Counter(given).items() if n > 1]:
        kind, address = twice[0]
        raise UserError(
            f"--{'watch_funcs' if address in watched else FLAG[kind]}: {address} is given twice",
            "give it once and raise its weight with --reward_weights",
        )
    for url in urls:
        _check_url(url)
    return tuple(RewardSource(*item, name) for item, name in zip(given, _names(given), strict=True))


def is_file(name: str) -> bool:
    """Whether an item of --watch_funcs is a file; otherwise it names a verifier."""
    return file_and_name(name)[0].endswith(".py")


def _check_url(url: str) -> None:
    """Raise UserError for a URL that no request could be sent to or that holds a secret."""
    if "@" in url.split("/")[2]:
        message = "--remote_rm_url: a URL with a password would be written to logs"
        raise UserError(message, f"${TOKEN_VARIABLE}")
    try:
        parts = urlsplit(url)
        # a port that is not a number in range raises
        usable = bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        message = f"--remote_rm_url: {url} has no valid host and port"
        raise UserError(message, "http://HOST:PORT/get_reward")
    if any(looks_secret(name) for name, _ in parse_qsl(parts.query)):
        message = "--remote_rm_url: a URL with a key in its query would be written to logs"
        raise UserError(message, f"${TOKEN_VARIABLE}, which is sent as a header")


def _names(given: list[tuple[Kind, str]]) -> list[str]:
    """Return short names, or where two are equal longer ones, without the slashes that separate a
    source from its parts."""
    short = [_short_name(kind, address) for kind, address in given]
    long = [address.replace("/", ".").replace(".py:", ".").lstrip(".") for _, address in given]
    pairs = zip(short, long, strict=True)
    return [name if short.count(name) == 1 else longer for name, longer in pairs]


def _short_name(kind: Kind, address: str) -> str:
    if kind == "file":
        return Path(file_and_name(address)[0]).stem
    return {"http": "http", "verifier": address}.get(kind) or Path(address).absolute().name


def source_weights(flags: RewardSourceFlags, sources: tuple[RewardSource, ...]) -> dict[str, float]:
    weights = (1.0,) * len(sources) if flags.reward_weights is None else flags.reward_weights
    if len(weights) != len(sources):
        listed = ", ".join(s.name for s in sources)
        raise UserError(
            f"--reward_weights: got {len(weights)} weights for {len(sources)} sources ({listed})",
            "give one weight per source",
        )
    return {s.name: weight for s, weight in zip(sources, weights, strict=True)}


def read_routes(path: str, sources: tuple[RewardSource, ...]) -> dict[str, dict[str, float]]:
    """Read the file of --reward_routing, with sources by their short names. Raises UserError."""
    table = read_table(path, "reward_routing")
    names = {spelling: s.name for s in sources for spelling in (s.address, s.name)}
    shape = "lines of the form  datasource: {source: weight}"
    if not isinstance(table, dict) or not table:
        raise UserError(f"--reward_routing: {path} holds no routes", shape)
    routes: dict[str, dict[str, float]] = {}
    for datasource, row in table.items():
        where = f"--reward_routing: {path}: {datasource}"
        if not isinstance(row, dict) or not row:
            raise UserError(f"{where} has no {{source: weight}} table", shape)
        for name, weight in row.items():
            if name not in names:
                known = ", ".join(s.name for s in sources)
                raise UserError(f"{where}: there is no reward source {name!r}", f"one of {known}")
            number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
            if not number or not math.isfinite(weight):
                message = f"{where}: the weight {json.dumps(weight)} is not a finite number"
                raise UserError(message, shape)
        routes[str(datasource)] = {names[name]: float(weight) for name, weight in row.items()}
    if unused := [s.name for s in sources if not any(s.name in row for row in routes.values())]:
        message = f"--reward_routing: {path}: no data source is routed to {', '.join(unused)}"
        raise UserError(message, "leave it out")
    return routes


def source_kwargs(
    flags: RewardSourceFlags, sources: tuple[RewardSource, ...]
) -> dict[str, dict[str, Any]]:
    """Return the --reward_func_kwargs of each file and verifier, by name. Raises UserError."""
    takers = [s.name for s in sources if s.kind in ("file", "verifier")]
    given = flags.reward_func_kwargs
    if not any(name in given for name in takers) and not all(
        isinstance(v, dict) for v in given.values()
    ):
        return {name: dict(given) for name in takers}  # one set for all
    if unknown := [key for key in given if key not in takers]:
        raise UserError(
            f"--reward_func_kwargs: there is no reward function or verifier {unknown[0]!r}",
            f"one of {', '.join(takers) or 'none'}, or one object for all",
        )
    if bad := [name for name, kwargs in given.items() if not isinstance(kwargs, dict)]:
        raise UserError(
            f"--reward_func_kwargs: the value of {bad[0]} is not an object of keyword arguments",
            '{"name": {"key": value}}',
        )
    return {name: given.get(name, {}) for name in takers}


def engine_judges(flags: RewardSourceFlags) -> dict[str, dict[str, Any]]:
    """Return the keyword arguments of the sources that ask the run's own engines, by name."""
    given = flags.reward_func_kwargs
    if given.get("url") == ENGINES:
        given = dict.fromkeys(flags.reward_funcs or ("the reward",), given)
    found = {name: kwargs for name, kwargs in given.items() if isinstance(kwargs, dict)}
    return {name: kwargs for name, kwargs in found.items() if kwargs.get("url") == ENGINES}


def asking_engines_at(flags: RewardFlags, url: str) -> RewardFlags:
    """Return the flags with the URL of the endpoint beside an engine."""

    def told(kwargs: dict[str, Any]) -> dict[str, Any]:
        known = {name: told(v) if isinstance(v, dict) else v for name, v in kwargs.items()}
        return known | ({"url": url} if known.get("url") == ENGINES else {})

    return replace(flags, reward_func_kwargs=told(flags.reward_func_kwargs))
