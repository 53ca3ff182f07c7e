"""A system is one module or one package of openrl/compat: without it, everything else still works."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from openrl.registry import modules_of

PACKAGE = Path(__file__).parents[3] / "openrl"
SYSTEMS = sorted(path.parent.name for path in (PACKAGE / "compat").glob("*/entries.py"))
LOOK = """
import sys
from openrl import extension_points
from openrl.agents.interfaces import known_interfaces
from openrl.registry import Registry
from openrl.rewards.signatures import known_signatures

for registry in vars(extension_points).values():
    if isinstance(registry, Registry) and extension_points.COMPAT in registry.homes:
        print(registry.kind, registry.names())
print("shapes:", [known.shape for known in (*known_interfaces(), *known_signatures())])
print(sorted(name for name in sys.modules if name.startswith("openrl.compat.")))
"""
HELP = """
import runpy
sys.argv[1:] = ["--help"]
runpy.run_module("openrl.cli.train_ppo_ray", run_name="__main__")
"""


@pytest.fixture(params=SYSTEMS)
def without(request, tmp_path):
    """A copy of the package without one system."""
    for source, copy in ((PACKAGE, tmp_path / "openrl"), (PACKAGE / "compat", "openrl/compat")):
        (tmp_path / copy).mkdir()
        for path in source.iterdir():
            if path.name not in (request.param, "compat", "__pycache__"):
                (tmp_path / copy / path.name).symlink_to(path)
    return tmp_path, request.param


def python(root: Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_system_is_dropped_by_deleting_it(without):
    root, system = without
    module = f"openrl.compat.{system}"
    assert any(name.startswith(module) for name in modules_of("openrl.compat"))
    found = python(root, "-c", LOOK + HELP)
    assert module not in found and found.count("openrl.compat.") >= len(SYSTEMS) - 1
    (shapes,) = (line for line in found.splitlines() if line.startswith("shapes:"))
    assert "run(prompt, generate, sampling)" in shapes and "reward_func(queries" in shapes
    assert system not in shapes.lower(), "a refusal would name it"
    assert "--pretrain" in found


def test_systems_are_known_without_a_heavy_library():
    """Every process that looks a name up imports them all."""
    look = f"{LOOK}\nprint([name for name in ('torch', 'transformers', 'yaml') if name in sys.modules])"
    assert python(PACKAGE.parent, "-c", look).endswith("[]\n")
