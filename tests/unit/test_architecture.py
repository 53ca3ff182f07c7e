"""The diagrams of the architecture name what is there, and the way of a prompt is as short as they
say."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
LOOP = ast.get_docstring(ast.parse((ROOT / "openrl/trainer/rl_trainer.py").read_text()))
HOP = re.compile(r"^\| \d \| `([\w.]+)` \| `([\w/.]+)` \| (.*)\|$", re.M)
CALLED = re.compile(r"`([\w.]+)` in `([\w/.]+)`")


def defined(path: Path) -> set[str]:
    """Functions, classes and ``Class.method`` of a module."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (
                n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
            )
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


EVERYTHING = set().union(*(defined(path) for path in (ROOT / "openrl").rglob("*.py")))


def diagram() -> str:
    """The picture of one step."""
    start = PAGE.index("   driver  ")
    return PAGE[start : PAGE.index("```", start)]


@pytest.mark.parametrize("text", [diagram(), LOOP], ids=["the page", "the loop"])
def test_what_a_diagram_names_exists(text):
    methods = set(re.findall(r"\b([A-Z]\w+\.\w+)\b", text))
    functions = set(re.findall(r"(?<![.\w])([a-z_]+)\(", text))
    records = set(re.findall(r"-> \[?([A-Z]\w+)\b(?!\.)", text))
    assert len(methods) > 5
    assert methods | functions | records <= EVERYTHING


def test_the_way_of_a_prompt_to_its_gradient():
    hops = HOP.findall(PAGE)
    assert len(hops) == 7
    named = [(name, file) for name, file, _ in hops]
    named += [(n, f"openrl/{f}") for *_, calls in hops for n, f in CALLED.findall(calls)]
    assert len(named) == 15
    for name, file in named:
        assert name in defined(ROOT / file), f"{file} has no {name}"


LONG = {  # signatures that others have set, and what a flag may say about itself
    ("openrl/models/attention.py", "varlen_attention"),
    ("openrl/models/logprobs.py", "forward"),
    ("openrl/flags/schema.py", "flag"),
}


def test_no_function_takes_more_than_eight():
    for path in (ROOT / "openrl").rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                names = {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
                short = len(names - {"self", "cls"}) <= 8
                assert short or (name, node.name) in LONG, f"{name}:{node.lineno}"


def test_lines_of_a_hundred_columns():
    wide = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in (ROOT / "openrl").rglob("*.py")
        for number, line in enumerate(path.read_text().split("\n"), 1)
        if len(line) > 100
    ]
    assert not wide


def test_no_class_has_the_name_of_another():
    homes = defaultdict(list)
    for path in (ROOT / "openrl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}
