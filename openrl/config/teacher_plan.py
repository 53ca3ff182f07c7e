"""Who teaches which rows: the teachers that flags name, by data source with --teacher_routing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from openrl.config.groups.teacher import TOKEN_VARIABLE, TeacherFlags
from openrl.errors import UserError, short
from openrl.files import expanded
from openrl.flags.sources import read_table

ROUTES_SHAPE = "lines of the form  datasource: {teacher: weight}"
SELVES = ("start", "ema")
Kind = Literal["model", "server", "self"]
KIND: dict[str, Kind] = {
    "teacher_pretrain": "model",
    "teacher_url": "server",
    "teacher_self": "self",
}


@dataclass(frozen=True)
class Teacher:
    """A teacher, the rows that it teaches and the weight of what they learn from it."""

    name: str  # a model, a URL, or start, ema or a number of steps for the policy itself
    kind: Kind
    source: str | None = None  # data source of its rows; None: all rows
    weight: float = 1.0


@dataclass(frozen=True)
class EarlierPolicy:
    """Weights of the policy that are kept for its teacher."""

    kind: str  # start or ema, as in --teacher_self; steps: those of every N-th step
    beta: float  # of their moving average; 1: they do not move by themselves


@dataclass(frozen=True)
class TeacherPlan:
    """The teachers of a run. One name may teach several data sources."""

    teachers: tuple[Teacher, ...] = ()

    def of(self, kind: Kind) -> list[str]:
        """Return the names of this kind of teachers, each once."""
        return list(dict.fromkeys(t.name for t in self.teachers if t.kind == kind))

    @property
    def own(self) -> str | None:
        """Which of its selves the policy learns from."""
        return next(iter(self.of("self")), None)

    @property
    def every(self) -> int | None:
        """The number of training steps after which the teacher is the policy again, if it is an
        older one; 1: it always is."""
        return int(self.own) if self.own not in (None, *SELVES) else None

    def earlier(self, flags: TeacherFlags) -> EarlierPolicy | None:
        """Return what to keep for a teacher that is an earlier policy; None: nothing."""
        if self.own is None or self.every == 1:
            return None
        beta = flags.teacher_ema_beta if self.own == "ema" else 1.0
        return EarlierPolicy(self.own if self.every is None else "steps", beta)


def read_teachers(flags: TeacherFlags) -> TeacherPlan:
    """Return the plan of the flags. Raises UserError for what is no teacher, and for two teachers
    of one row."""
    named = {
        "teacher_pretrain": flags.teacher_pretrain,
        "teacher_url": flags.teacher_url,
        "teacher_self": flags.teacher_self,
        "teacher_routing": flags.teacher_routing,
    }
    given = {flag: name for flag, name in named.items() if name is not None}
    if len(given) > 1:
        both = " and ".join(f"--{flag}" for flag in given)
        fix = "one of them, or --teacher_routing FILE with all teachers by data source"
        raise UserError(f"{both}: two teachers for every row", fix)
    if flags.teacher_routing is not None:
        return TeacherPlan(tuple(_routed(flags.teacher_routing)))
    for flag, name in given.items():
        _check(name, f"--{flag}", KIND[flag])
    return TeacherPlan(tuple(Teacher(name, KIND[flag]) for flag, name in given.items()))


def teacher_plan(flags: TeacherFlags) -> TeacherPlan:
    """Return the plan of flags whose errors are reported elsewhere: empty if there are any."""
    try:
        return read_teachers(flags)
    except UserError:
        return TeacherPlan()


def routed_models(config: Any) -> list[str]:
    """Return the models that the file of --teacher_routing names, for any command's config."""
    flags = getattr(config, "teacher", None)
    if not isinstance(flags, TeacherFlags) or flags.teacher_routing is None:
        return []
    return teacher_plan(flags).of("model")


def _routed(path: str) -> list[Teacher]:
    table = read_table(path, "teacher_routing")
    if not isinstance(table, dict) or not table:
        raise UserError(f"--teacher_routing: {path} names no data sources", ROUTES_SHAPE)
    found = []
    for source, row in table.items():
        where = f"--teacher_routing: {path}: {short(source)}"
        if not isinstance(row, dict) or not row or not all(map(_is_weight, row.values())):
            raise UserError(f"{where} has no teacher with a weight above 0", ROUTES_SHAPE)
        if len(row) > 1:
            raise UserError(
                f"{where} has two teachers, {' and '.join(map(str, row))}: a policy cannot follow"
                " both",
                "one of them, or two data sources",
            )
        ((given, weight),) = row.items()
        name = str(expanded(given)) if str(given).startswith("~") else str(given)
        kind = _kind_of(name)
        _check(name, where, kind)
        found.append(Teacher(name, kind, str(source), float(weight)))
    if len(own := TeacherPlan(tuple(found)).of("self")) > 1:
        raise UserError(
            f"--teacher_routing: {path} asks for {' and '.join(own)}, but the policy keeps only one"
            " of its earlier selves",
            "the same for all",
        )
    return found


def _kind_of(name: str) -> Kind:
    if name in SELVES or name.isdecimal():
        return "self"
    return "server" if name.startswith(("http://", "https://")) else "model"


def _check(name: str, where: str, kind: Kind) -> None:
    """Raise UserError if a name is not of this kind, or if a URL cannot be asked."""
    if kind == "self" and not (name in SELVES or (name.isdecimal() and int(name))):
        message = f"{where}: {name!r} is neither start nor ema nor a number of steps"
        raise UserError(message, "start, ema or a number from 1")
    if kind != "server":
        return
    if "@" in name or "?" in name:  # checked first, so that no message holds it
        message = f"{where}: what a URL holds beside host and path would be written to logs"
        raise UserError(message, f"${TOKEN_VARIABLE} for a token")
    try:
        parts = urlsplit(name)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number in range
        usable = False
    if not usable:
        raise UserError(f"{where}: {name} has no valid host and port", "http://HOST:PORT/v1")


def _is_weight(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value < float("inf")
