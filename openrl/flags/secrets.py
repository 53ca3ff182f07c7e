"""Secrets in flags: what looks like one, and how it stays out of what a run writes and shows."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

SECRET_WORDS = {
    *("TOKEN", "KEY", "APIKEY", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL"),
    *("CREDENTIALS", "AUTH", "AUTHORIZATION", "BEARER", "SIG", "SIGNATURE"),
}

LEFT_OUT = "***"  # is written in place of a secret


def looks_secret(name: str) -> bool:
    """Return whether a name looks like a secret's: HF_TOKEN and api-key do, max_tokens does not."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).upper()
    return not SECRET_WORDS.isdisjoint(re.split(r"[^A-Z0-9]+", words))


def _is_secret(key: str, value: Any) -> bool:
    return looks_secret(key) and bool(value) and not isinstance(value, (bool, int, float))


def secrets_in(value: Any) -> Iterator[str]:
    """Yield what looks like a secret in a flag's value: names of keys, and parts of URLs."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from (key,) if _is_secret(key, inner) else secrets_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from secrets_in(inner)
    elif isinstance(value, str) and "://" in value:
        yield from filter(looks_secret, re.findall(r"[?&]([^=&\s]+)=", value))
        if re.search(r"://[^/\s@]+@", value):  # a token may stand alone, as GitHub's do
            yield "a URL's password"


def without_secrets(value: Any) -> Any:
    """Return the value of a flag with LEFT_OUT in place of what looks like a secret."""
    if isinstance(value, dict):
        return {
            key: LEFT_OUT if _is_secret(key, inner) else without_secrets(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [without_secrets(inner) for inner in value]
    return LEFT_OUT if isinstance(value, str) and any(secrets_in(value)) else value


def hide_secrets(value: Any, typed: str) -> None:
    """Leave the secrets of a JSON object or of a URL out of this process's command line."""
    hidden = without_secrets(value)
    if hidden == value:
        return
    if isinstance(value, str):
        hide(typed, hidden)
    elif typed.lstrip().startswith("{"):  # and is not the name of a file
        hide(typed, json.dumps(hidden))


def hide(typed: str, shown: str = LEFT_OUT) -> None:
    """Replace a value on this process's command line, which is shown where a run says how to resume
    it, and which some trackers record."""
    for i, word in enumerate(sys.argv[1:], start=1):
        if typed and typed in (word, word.partition("=")[2]):
            sys.argv[i] = word.removesuffix(typed) + shown


def move_to_environment(secret: str, variable: str) -> None:
    """Move a secret from this process's command line to its environment, where nothing shows it."""
    os.environ[variable] = secret
    hide(secret)
