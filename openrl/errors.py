"""The exception whose message is meant for the user, and its helpers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence


class UserError(Exception):
    """A problem that the user can fix. The command line prints the message without a traceback.

    ``remedy`` is one line that says what to do; it may be empty. ``flags``, without dashes, are
    those that the message is about. With ``fatal`` False it is a warning, which nobody raises.
    """

    label = "warning"  # what is printed before one that is not fatal

    def __init__(
        self, message: str, remedy: str = "", flags: tuple[str, ...] = (), fatal: bool = True
    ) -> None:
        # pickle rebuilds an exception from args, and this one crosses process boundaries
        super().__init__(message, remedy)
        self.message, self.remedy = message, remedy
        self.flags, self.fatal = flags, fatal

    def text(self, indent: str = "  ") -> str:
        """Return what is printed; ``indent`` begins the line of the remedy."""
        where = ", ".join(f"--{flag}" for flag in self.flags)
        text = f"{where}: {self.message}" if where else self.message
        return f"{text}\n{indent}try: {self.remedy}" if self.remedy else text

    def __str__(self) -> str:
        return self.text()


def printable(text: str) -> str:
    """Return the text with control characters escaped, so that a terminal does not act on them;
    also marks that reverse text, and halves of surrogate pairs, which cannot be written."""
    acts = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(acts, lambda m: repr(m[0])[1:-1], text)


def short(value: object, most: int = 80) -> str:
    """Return ``repr`` of a value for a message, without its middle if it is long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def counted(number: int, noun: str) -> str:
    """Return "1 row" or "3 rows"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(items: Sequence[object], most: int = 10) -> str:
    """Return the first items for a message, and how many there are besides."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


class Note(UserError):
    """What a command says of its flags although nothing is wrong with them. Nobody raises it."""

    label = "note"

    def __init__(self, message: str, remedy: str = "", flags: tuple[str, ...] = ()) -> None:
        super().__init__(message, remedy, flags, fatal=False)


class BadRow(Exception):
    """A row of data cannot be used: its label is missing, for example. The message says why; where
    a larger limit would take the row, ``flag`` is its name and ``enough`` what the row needs."""

    def __init__(self, message: str, flag: str = "", enough: int = 0) -> None:
        super().__init__(message, flag, enough)  # which pickles all
        self.message, self.flag, self.enough = message, flag, enough

    def __str__(self) -> str:
        return self.message


class Interrupted(UserError):
    """A signal ended the run. The message says what was saved and how to continue."""

    def __init__(self, number: int, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy)
        self.number = number


def raise_together(errors: Iterable[UserError]) -> None:
    """Raise the only error, or one UserError that holds them all. Do nothing without errors."""
    different = {str(error): error for error in errors}  # several steps may hit the same cause
    if len(different) == 1:
        raise next(iter(different.values()))
    if different:
        raise UserError("\n".join(different))


class ErrorCollector:
    """Collects the UserErrors of independent steps: ``with collector: step()`` or
    ``collector.run(step)`` for each, then ``raise_all()``."""

    def __init__(self) -> None:
        self._errors: list[UserError] = []

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        if isinstance(error, UserError):
            self._errors.append(error)
        return isinstance(error, UserError)

    def run(self, step: Callable[..., object], *args: object) -> None:
        with self:
            step(*args)

    def raise_all(self) -> None:
        raise_together(self._errors)
