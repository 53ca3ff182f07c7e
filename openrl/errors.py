"""The one exception whose message is meant for the person at the keyboard."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend. The command line prints the message alone, without a traceback.

    ``remedy`` is one line that says what to do; it may be empty.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy)  # both in args: the error crosses process borders by pickle
        self.message, self.remedy = message, remedy

    def __str__(self) -> str:
        return self.message + (f"\n  try: {self.remedy}" if self.remedy else "")
