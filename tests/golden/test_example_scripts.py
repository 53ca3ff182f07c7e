"""Every command of the example scripts and the pages parses, and asks for nothing that has no
effect."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import openrl.config.rules.all  # noqa: F401
from openrl.config.commands import COMMANDS
from openrl.flags.parser import read_words, resolve
from openrl.flags.schema import collect_flags

ROOT = Path(__file__).parents[2]
SOURCES = [
    *sorted(ROOT.glob("examples/scripts/*.sh")),
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/*.md")),
]


def calls_of(path: Path) -> list[tuple[str, list[str]]]:
    """(command, words) of each ``python -m openrl.cli...`` in a file, without what the shell does
    with its output. A call with ... in it is a fragment, and one with --config has further
    flags."""
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    found = re.findall(r"python -m openrl\.cli\.(\w+) +(--[^\n]*)", text)
    calls = [
        (name, shlex.split(re.split(r" [12]?>+ | & *$", words)[0], comments=True))
        for name, words in found
    ]
    fragments = {"...", "--config"}
    return [
        (name, words) for name, words in calls if fragments.isdisjoint(words) and name in COMMANDS
    ]


CASES = [(path.name, *call) for path in SOURCES for call in calls_of(path)]
SUMS = {"$ENGINES": "2", "$SAMPLES": "320", "$UPDATED": "1152", "$SCORED": "2304"}  # of defaults


def defaults(path: Path) -> dict[str, str]:
    """The variables that a script takes from the environment, by their defaults, and its texts."""
    found = re.findall(r"^(\w+)=\$\{\w+:-(.*)\}$", path.read_text(), flags=re.M)
    found += re.findall(r"^(\w+)='([^']*)'$", path.read_text(), flags=re.M)
    return {f"${name}": value for name, value in found}


def arrays(path: Path) -> dict[str, list[str]]:
    """The arrays of words that a script defines at once, by the word that stands for them."""
    found = re.findall(r"^(\w+)=\(([^()]+)\)$", path.read_text(), flags=re.M)
    return {f"${{{name}[@]}}": shlex.split(words) for name, words in found}


def test_the_scripts_were_found():
    pages = {
        "quickstart.sh",
        "train_dpo.sh",
        "rlhf_cpu.sh",
        "README.md",
        "data.md",
        "serving.md",
        "supervised.md",
    }
    assert pages <= {name for name, _, _ in CASES}


def filled_in(source: str, words: list[str]) -> list[str]:
    """The words of a call in a script or page, with the script's arrays and the defaults of its
    variables."""
    variables = {"$OUT": "/nowhere", "$SEED": "0", "$URL": "http://127.0.0.1:1"} | SUMS
    if source.endswith(".sh"):
        path = ROOT / "examples/scripts" / source
        variables |= defaults(path)
        known = arrays(path)
        words = [one for word in words for one in known.get(word, [word])]
    absent = ("$@", "${SMALL[@]}", "${SMALL_EVALUATION[@]}")
    kept = [word for word in words if word not in absent]
    return [
        re.sub(r"\$[A-Z]+", lambda found: variables.get(found[0], found[0]), word) for word in kept
    ]


@pytest.mark.parametrize(("source", "name", "words"), CASES)
def test_example_parses(source, name, words):
    command = COMMANDS[name]
    settings, _, problems = read_words(filled_in(source, words))
    _, found = resolve(command, collect_flags(command), settings, environment=False)
    assert [str(p) for p in [*problems, *found]] == []
