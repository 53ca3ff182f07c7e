"""The arrows between the parts of openrl, read from one table, and a few lines that nobody may
write."""

import ast
import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# a part may import itself and everything further down; parts of one row do not see each other
LAYERS = (
    ("cli",),
    ("trainer", "inference"),
    ("workers",),
    ("cluster",),
    ("rollout_engines", "training_engine"),
    ("weights",),
    ("compat",),
    ("agents", "games", "report"),
    ("data", "models", "rewards", "tracking"),
    ("trace",),
    ("algorithms", "vision"),
    ("experience",),
    ("types",),
    ("token_origins",),
    ("config",),
    ("extension_points",),
    ("flags",),
    ("registry",),
    ("processes",),
    ("locks", "http_server"),
    ("errors", "files", "lazy", "metrics", "seeds", "waiting"),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}

# the same of the parts of trainer/: its files and its folders
TRAINER_LAYERS = (
    ("launch",),
    ("rl_trainer", "supervised"),
    ("sync_check", "planning"),
    ("rollout", "learning"),
    ("watching",),
    ("saving",),
)
TRAINER_LEVEL = {part: level for level, parts in enumerate(TRAINER_LAYERS) for part in parts}

HOMES = {  # heavy library -> the parts that may import it
    "ray": {"cluster"},
    "deepspeed": {"training_engine"},
    "vllm": {"rollout_engines"},
    "math_verify": {"rewards"},
    "reasoning_gym": {"rewards"},
    "sympy": {"rewards", "lazy"},
    "wandb": {"tracking"},
    "swanlab": {"tracking"},
    "mlflow": {"tracking"},
    "trackio": {"tracking"},
    "modelscope_hub": {"cli"},
    "tensorboard": {"tracking"},
    "torch.utils.tensorboard": {"tracking"},
    "fastapi": {"inference"},
    "starlette": {"http_server", "agents"},
    "uvicorn": {"inference", "agents"},
    "prometheus_client": {"inference", "tracking"},
    "peft": {"models", "lazy"},
    "mcp": {"agents"},
    "websockets": {"compat"},
    "pyarrow": {"trace"},
}

OPTIONAL = {
    "swanlab",
    "mlflow",
    "trackio",
    "pandas",  # comes with trackio
    "modelscope_hub",
}  # asked for by flag: whoever wants one installs it

ONLY = {  # part -> the libraries it may import beside the standard library
    "algorithms": {"torch"},
    "experience": {"torch"},
    "types": set(),
    "token_origins": set(),
    "lazy": {"datasets", "peft", "sympy", "torch"},
    "config": {"yaml"},
    "flags": {"yaml", "rich"},
    "extension_points": set(),
    "registry": set(),
    "errors": set(),
    "metrics": set(),
    "waiting": set(),
    "files": set(),
}

PIECES = {  # (part, part below) -> all that the first one imports of the other
    ("algorithms", "config"): "openrl.config.groups",  # settings: frozen records of plain values
}


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "." * node.level + (node.module or "")
            elif node.module in ("openrl", "openrl.trainer", "torch.utils"):
                yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module or ""


def wrong_imports_in_the_trainer(part: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    for line, name in imports(tree):
        target = name.removeprefix("openrl.trainer.").split(".")[0]
        if not name.startswith("openrl.trainer") or target == part:
            continue
        if target not in TRAINER_LEVEL:
            yield line, f"{name} has no place in the table of the trainer's layers"
        elif TRAINER_LEVEL[target] <= TRAINER_LEVEL[part]:
            yield line, f"trainer/{part} may not import trainer/{target}"


def wrong_imports(part: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    for line, name in imports(tree):
        top = name.split(".")[0]
        if name.startswith("."):
            yield line, f"relative import {name!r}: write it in full"
        elif name.startswith("openrl."):  # the bare package is empty
            target = name.split(".")[1]
            if target not in LEVEL:
                yield line, f"openrl.{target} has no place in the table of layers"
            elif target == "compat" != part:
                yield line, "openrl.compat is found by its registries: nothing may import it"
            elif target != part and LEVEL[target] <= LEVEL[part]:
                yield line, f"{part} may not import {target}"
            elif (part, target) in PIECES and not name.startswith(PIECES[part, target]):
                yield line, f"{part} may import {PIECES[part, target]} of {target} only"
        elif (
            part in ONLY
            and top != "openrl"
            and top not in sys.stdlib_module_names
            and top not in ONLY[part]
        ):
            yield line, f"{part} may not import {top}"
        for library, homes in HOMES.items():
            if (name == library or name.startswith(library + ".")) and part not in homes:
                yield line, f"{library} is imported in {', '.join(sorted(homes))} only"


def unsafe_calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            literal = {
                k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)
            }
            if ast.unparse(node.func) == "torch.load" and literal.get("weights_only") is not True:
                yield node.lineno, "torch.load without weights_only=True runs code from the file"
            if literal.get("trust_remote_code") is True:
                yield node.lineno, "trust_remote_code=True is for the user to say, by flag"
            if literal.get("shell") is True:
                yield node.lineno, "shell=True"


SYSTEMS = {path.parent.name for path in (ROOT / "openrl/compat").glob("*/entries.py")}
SYSTEM = re.compile(
    "(?<![a-z])(" + "|".join(name.partition("_")[0] for name in SYSTEMS) + ")(?![a-z])", re.I
)
OWN_WORDS = {("openrl/models/logprobs.py", "roll")}  # of tensors


def names_of_systems(path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where code outside of compat has the name of another system. Docstrings may cite one."""
    citations = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):  # docstrings, also of attributes
            citations.add(id(node.value))
    for node in ast.walk(tree):
        for word in words_of(node) if id(node) not in citations else ():
            if SYSTEM.search(word) and (path.as_posix(), word) not in OWN_WORDS:
                line = getattr(node, "lineno", 1)
                yield line, f"{word[:60]!r} knows another system, which is for openrl/compat"


def words_of(node: ast.AST) -> list[str]:
    """The names in a node, and its text."""
    names = [getattr(node, key, None) for key in ("id", "attr", "name", "arg", "module", "value")]
    return [name for name in names if isinstance(name, str)]


def definitions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The functions, classes, methods and fields that a file defines; without those that a
    decorator registers, and those that Python calls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list:
            if not node.name.startswith("__"):
                yield node.lineno, node.name
        elif isinstance(node, ast.ClassDef):
            yield node.lineno, node.name
            for field in node.body:
                if isinstance(field, ast.AnnAssign):
                    yield field.lineno, ast.unparse(field.target)


def names_read(tree: ast.AST) -> set[str]:
    """The names that a file reads, also those in texts of the form "module:name"."""
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    loads = [n for n in ast.walk(tree) if isinstance(getattr(n, "ctx", None), ast.Load)]
    return {
        *(getattr(node, "id", None) or getattr(node, "attr", "") for node in loads),
        *(text.partition(":")[2] for text in texts if isinstance(text, str)),
    }


def problems(path: Path, source: str) -> list[str]:
    """Every offence in one file, as ``path:line: what``. ``path`` is relative to the repository."""
    tree = ast.parse(source)
    found = list(unsafe_calls(tree))
    if path.parts[0] == "openrl" and path.name != "__init__.py":
        part = path.parts[1].removesuffix(".py")
        found += (
            wrong_imports(part, tree)
            if part in LEVEL
            else [(1, f"{part} has no place in the table of layers")]
        )
        found += names_of_systems(path, tree) if part != "compat" else []
        if part == "trainer":
            inner = path.parts[2].removesuffix(".py")
            found += (
                wrong_imports_in_the_trainer(inner, tree)
                if inner in TRAINER_LEVEL
                else [(1, f"{inner} has no place in the table of the trainer's layers")]
            )
    if path.parts[0] == "openrl" and path.name == "__init__.py" and source:
        found.append((1, "__init__ files stay empty: importing a part must not load another"))
    return [f"{path}:{line}: {what}" for line, what in found]


@pytest.mark.parametrize(
    ("page", "start", "end", "table"),
    [
        ("docs/architecture.md", "## Who may import whom\n\n```", "```", LAYERS),
        ("docs/architecture.md", "Within `trainer/`:\n\n```", "```", TRAINER_LAYERS),
        ("AGENTS.md", "Imports go down only:", ". The table", LAYERS),
    ],
)
def test_pages_show_the_tables(page, start, end, table):
    shown = (ROOT / page).read_text().partition(start)[2].partition(end)[0]
    rows = re.findall(r"{[^}]+}|\w+", shown)
    assert tuple(tuple(re.findall(r"\w+", row)) for row in rows) == table


def test_the_package_keeps_to_its_layers():
    files = [
        p
        for top in ("openrl", "examples", "benchmarks", "tests")
        for p in sorted((ROOT / top).rglob("*.py"))
    ]
    assert len(files) > 20
    offences = [
        o
        for p in files
        if p != Path(__file__)
        for o in problems(p.relative_to(ROOT), p.read_text("utf-8"))
    ]
    assert not offences, "\n" + "\n".join(offences)


def test_what_only_compat_reads_is_in_compat():
    """The shape of another system, though not its name, in the rest of the package."""
    trees = {p: ast.parse(p.read_text("utf-8")) for p in (ROOT / "openrl").rglob("*.py")}
    compat = {p for p in trees if p.is_relative_to(ROOT / "openrl/compat")}
    inside = set().union(*(names_read(trees[p]) for p in compat))
    outside = set().union(*(names_read(tree) for p, tree in trees.items() if p not in compat))
    offences = [
        f"{p.relative_to(ROOT)}:{line}: {name}"
        for p, tree in sorted(trees.items())
        if p not in compat
        for line, name in definitions(tree)
        if name in inside - outside
    ]
    assert not offences, "\n" + "\n".join(offences)


def test_no_two_classes_have_one_name():
    homes: dict[str, list[str]] = {}
    for path in sorted((ROOT / "openrl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: places for name, places in homes.items() if len(places) > 1}


def test_every_library_that_is_imported_is_pinned():
    pins = [
        line
        for page in ("base", "cpu")
        for line in (ROOT / f"requirements/{page}.txt").read_text().splitlines()
    ]
    pinned = {
        re.split(r"[\[=]", line)[0].lower().replace("_", "-")
        for line in pins
        if re.match(r"\w", line)
    }
    homes = packages_distributions()
    missing = {}
    for file in (ROOT / "openrl").rglob("*.py"):
        for line, name in imports(ast.parse(file.read_text("utf-8"))):
            top = name.split(".")[0]
            owners = {d.lower().replace("_", "-") for d in homes.get(top, [top])}
            ours = top in sys.stdlib_module_names or top in {"openrl", *OPTIONAL}
            if not ours and not owners & pinned:
                missing[top] = f"{file.relative_to(ROOT)}:{line}"
    assert not missing, f"imported, but not in requirements/: {missing}"


@pytest.mark.parametrize(
    "path, source, offence",
    [
        ("openrl/rollout_engines/x.py", "import os\nfrom openrl.training_engine.updates import A", "x.py:2: rollout_engines may not import training_engine"),
        ("openrl/types.py", "def f():\n    from openrl import config, trainer", "types.py:2: types may not import trainer"),
        ("openrl/algorithms/x.py", "import numpy as np", "x.py:1: algorithms may not import numpy"),
        ("openrl/algorithms/x.py", "from openrl.config.derived import f", "may import openrl.config.groups of config only"),
        ("openrl/config/x.py", "import torch", "x.py:1: config may not import torch"),
        ("openrl/trainer/launch.py", "import ray.util", "launch.py:1: ray is imported in cluster only"),
        ("openrl/trainer/x.py", "", "x has no place in the table of the trainer's layers"),
        ("openrl/trainer/saving/x.py", "from openrl.trainer.watching.supervision import f", "trainer/saving may not import trainer/watching"),
        ("openrl/trainer/rollout/x.py", "from openrl.trainer.learning.rows import f", "trainer/rollout may not import trainer/learning"),
        ("openrl/trainer/planning/x.py", "from openrl.trainer import launch", "trainer/planning may not import trainer/launch"),
        ("openrl/models/x.py", "from torch.utils.tensorboard import S", "torch.utils.tensorboard is imported in tracking"),
        ("openrl/models/x.py", "from torch.utils import tensorboard", "torch.utils.tensorboard is imported in tracking"),
        ("openrl/models/x.py", "from . import y", "x.py:1: relative import"),
        ("openrl/agents/x.py", "def play_openrlhf(): pass", "x.py:1: 'play_openrlhf' knows another system"),
        ("openrl/agents/x.py", "def f(kind):\n    return kind == 'trl'", "x.py:2: 'trl' knows another system"),
        ("openrl/agents/x.py", "raise E('not one of verl files')", "x.py:1: 'not one of verl files' knows"),
        ("openrl/config/x.py", "x = flag('as in verl')", "x.py:1: 'as in verl' knows another system"),
        ("openrl/surprise.py", "", "surprise has no place"),
        ("openrl/trainer/launch.py", "from openrl.compat.verl import tools", "launch.py:1: openrl.compat is found by its registries"),
        ("openrl/models/__init__.py", "from openrl.models.y import z", "__init__ files stay empty"),
        ("openrl/models/x.py", "import torch\ntorch.load(p)", "x.py:2: torch.load without weights_only=True"),
        ("openrl/models/x.py", "torch.load(p, weights_only=False)", "torch.load without weights_only=True"),
        ("examples/x.py", "f(trust_remote_code=True)", "x.py:1: trust_remote_code=True"),
        ("tests/x.py", "run('ls', shell=True)", "x.py:1: shell=True"),
    ],
)  # fmt: skip
def test_an_offence_is_named_with_its_line(path, source, offence):
    assert any(offence in p for p in problems(Path(path), source)), problems(Path(path), source)


@pytest.mark.parametrize(
    "path, source",
    [
        (
            "openrl/rollout_engines/x.py",
            (
                "import vllm\nfrom openrl.weights.buckets import Bucket\nfrom openrl.types import"
                " Prompt"
            ),
        ),
        (
            "openrl/algorithms/x.py",
            "import math\nimport torch\nfrom openrl.extension_points import policy_losses",
        ),
        (
            "openrl/models/x.py",
            "torch.load(p, weights_only=True)\nf(trust_remote_code=flags.trust_remote_code)",
        ),
        ("openrl/cluster/x.py", "import openrl\nimport ray"),
        ("openrl/agents/x.py", '"""As TRL has it."""\nx = 1  # and in verl'),
    ],
)
def test_what_is_allowed_passes(path, source):
    assert problems(Path(path), source) == []
