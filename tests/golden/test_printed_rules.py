"""What each command prints about its flags. printed_rules.txt holds command lines, each with the
problems and warnings that follow, or "accepted":

    NAME=words                   the words that $NAME stands for
    $ VARIABLE=x evaluate ...    a command line, in a directory with the files made below;
                                 LACKS=ray,wandb names packages that are not installed

After a wanted change, this prints the difference and writes it:

    python -m tests.golden.test_printed_rules
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import openrl.config.rules.all  # noqa: F401
from openrl.config.commands import COMMANDS
from openrl.errors import UserError
from openrl.flags.checks import CHECKS
from openrl.flags.parser import load

FILE = Path(__file__).parent / "printed_rules.txt"
UNSET = (
    *("OPENRL_RM_TOKEN", "WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"),
    *("RAY_ADDRESS", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
"""What rules read in the environment."""
FILES = (
    *("m/config.json", "m/model.safetensors", "m/tokenizer.json"),
    *("run/config.json", "run/model.safetensors", "run/tokenizer.json"),
    *("weights/config.json", "weights/model.safetensors"),
    *("tokens/tokenizer.json", "adapter/adapter_config.json", "adapter/adapter_model.bin"),
    *("r.py", "a.py", "d.jsonl", "e.jsonl", "routes.yaml", "t.jinja"),
    *("ended/step_000002/manifest.json", "torn/.writing_step_000002/x"),
    *("rollouts/index.jsonl", "logged_in/.netrc"),
)
"""What command lines name: models, data, rewards, an earlier run, checkpoints, rollouts."""
CONTENTS = {
    "adapter/adapter_config.json": '{"r": 8}',
    "taught.yaml": "math: {./absent: 1}\ncode: {org/teacher: 1}\nchat: {~/run: 1}\n",
    "twice.yaml": "math: {org/one: 1, org/other: 1}\n",
    "tags.yaml": "chess: {size: 8}\n",
    "algo.yaml": "a: {advantage_estimator: gae, kl_weight: 2}\nb: {advantage_estimator: rloo}\n",
}


@contextlib.contextmanager
def among_the_files() -> Iterator[None]:
    """Work in a directory that holds the files, and without the variables in UNSET."""
    with tempfile.TemporaryDirectory() as directory, mock.patch.dict(os.environ):
        for name in (*FILES, *CONTENTS):
            path = Path(directory, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(CONTENTS.get(name, ""))
        for variable in UNSET:
            os.environ.pop(variable, None)
        os.environ["HOME"] = directory
        with contextlib.chdir(directory):
            yield


def printed(line: str, names: dict[str, str]) -> list[str]:
    """Return the lines that a command prints about its flags."""
    for name, words in reversed(names.items()):
        line = re.sub(rf"\${name}\b", lambda _, words=words: words, line)
    words = shlex.split(line.removeprefix("$ "))
    variables = {}
    while re.match("[A-Z_]+=", words[0]):
        variable, _, value = words.pop(0).partition("=")
        variables[variable] = value
    command, *words = words
    lacks = variables.pop("LACKS", "").split(",")
    find_spec = "openrl.config.rules.machine.find_spec"
    with (
        mock.patch(find_spec, lambda package: None if package in lacks else package),
        mock.patch.dict(os.environ, variables),
        contextlib.redirect_stderr(io.StringIO()) as output,
        contextlib.suppress(SystemExit),
    ):
        load(COMMANDS[command], words, command)
    return output.getvalue().replace(str(Path.cwd()), "HERE").splitlines() or ["accepted"]


def text_of_now() -> str:
    """Return the file with what is printed now."""
    names: dict[str, str] = {}
    lines: list[str] = []
    in_block = False
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if definition := re.fullmatch("([A-Z]+)=(.*)", line):
            names[definition[1]] = definition[2]
        if line.startswith("$ "):
            lines += [line, *printed(line, names)]
            in_block = True
        elif not in_block or not line or line.startswith("#"):
            lines.append(line)
            in_block = False
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def run() -> tuple[str, set[str], set[str]]:
    """The text of now, and the rules that found something, and that found nothing, at least
    once."""
    found: set[str] = set()
    passed: set[str] = set()

    def watched(rule: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(rule)
        def watch(*arguments: Any) -> list[Any]:
            try:
                problems = list(rule(*arguments) or ())
            except UserError:
                found.add(rule.__name__)
                raise
            (found if problems else passed).add(rule.__name__)
            return problems

        return watch

    rules = {watched(rule): kind for rule, kind in CHECKS.items()}
    with mock.patch.dict(CHECKS, rules, clear=True), among_the_files():
        return text_of_now(), found, passed


def test_what_is_printed_is_the_pinned_text(run):
    pinned = FILE.read_text(encoding="utf-8").splitlines()
    difference = difflib.unified_diff(pinned, run[0].splitlines(), lineterm="")
    assert "\n".join(difference) == "", __doc__


def test_every_rule_refuses_one_command_line_and_lets_another_pass(run):
    _, found, passed = run
    # what it says changes with every run: tests/unit/config/test_config_checks.py
    found |= {"no_other_run_writes_there"}
    names = {rule.__name__ for rule in CHECKS if rule.__module__.startswith("openrl.")}
    assert (names - found, names - passed) == (set(), set())


def test_no_command_line_stands_there_twice():
    lines = FILE.read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line.startswith("$ ")]
    assert len(commands) == len(set(commands))


if __name__ == "__main__":
    pinned = FILE.read_text(encoding="utf-8")
    with among_the_files():
        new = text_of_now()
    print(*difflib.unified_diff(pinned.splitlines(), new.splitlines(), lineterm=""), sep="\n")
    FILE.write_text(new, encoding="utf-8")
