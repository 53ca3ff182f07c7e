"""The one exception whose message is meant for the person at the keyboard."""

from __future__ import annotations

import re


class UserError(Exception):
    """Something the user can mend. The command line prints the message alone, without a traceback.

    ``remedy`` is one line that says what to do; it may be empty.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        # both in args: the error crosses process borders by pickle
        super().__init__(message, remedy)
        self.message, self.remedy = message, remedy

    def __str__(self) -> str:
        return self.message + (f"\n  try: {self.remedy}" if self.remedy else "")


def printable(text: str) -> str:
    """The text with control characters written out: on a terminal they would act."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda m: repr(m[0])[1:-1], text)


class Interrupted(UserError):
    """A signal ended the run; what it saved, and how to go on."""

    def __init__(self, number: int, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy)
        self.number = number


class Gathered:
    """Gathers the errors of steps that do not need each other: ``with gathered: step()``, then
    ``raise_all()``."""

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

    def raise_all(self) -> None:
        """Raises the one error, or one UserError that holds them all; nothing without errors."""
        different = dict.fromkeys(map(str, self._errors))  # one cause may show in several steps
        if len(different) == 1:
            raise self._errors[0]
        if different:
            raise UserError("\n".join(different))
