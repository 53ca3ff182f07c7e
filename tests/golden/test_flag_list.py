"""The flags of each command, pinned; and none that nothing reads.

After a wanted change:  python -m tests.golden.test_flag_list
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TypeGuard

import pytest

from openrl.config.commands import COMMANDS
from openrl.config.unknown_flags import candidates, known_names
from openrl.flags.schema import REQUIRED, FlagSpec, collect_flags
from openrl.flags.values import placeholder, show
from openrl.tracking.health import CHECKS

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "openrl"
READ_BY_PARSER = {"plugin"}  # by name, before there is a config


def line(spec: FlagSpec) -> str:
    default = "required" if spec.default is REQUIRED else show(spec.default)
    only = f"  only {spec.path[0]} {' | '.join(spec.components)}" if spec.components else ""
    choices = f"  one of {', '.join(spec.registry.names())}" if spec.registry else ""
    alias = "".join(f"  also --{name}" for name in spec.alias)
    alias += "".join(f"  --{name} for {value}" for name, value in spec.shorthands.items())
    bounds = f"  {spec.bounds}" if spec.bounds else ""
    return (
        f"--{spec.name} {placeholder(spec.type) or 'SWITCH'} ="
        f" {default}{bounds}{choices}{alias}{only}"
    )


def flag_list(command: type) -> str:
    return "".join(sorted(f"{line(spec)}\n" for spec in collect_flags(command)))


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_are_the_pinned_ones(command):
    pinned = (HERE / f"flags_{command}.txt").read_text(encoding="utf-8")
    assert flag_list(COMMANDS[command]).splitlines() == pinned.splitlines(), __doc__


def test_every_flag_is_read():
    """A flag that is declared and read nowhere would be accepted and do nothing."""
    read = names_read() | READ_BY_PARSER
    unread = sorted(name for field, name in declared().items() if field not in read)
    assert not unread, f"declared, but no code reads them: {', '.join(unread)}"


def test_flags_that_users_of_other_systems_know_are_there_or_explained():
    """flags_of_others.txt: a flag of OpenRLHF, MindSpeed-RL, ROLL or verl, then the commands that
    are expected to take it."""
    known = {command: own_and_known_flags(command) for command in COMMANDS}
    lines = (HERE / "flags_of_others.txt").read_text(encoding="utf-8").splitlines()
    wanted = [(command, name) for name, *commands in map(str.split, lines) for command in commands]
    assert [f"{command} --{name}" for command, name in wanted if name not in known[command]] == []


def test_names_in_other_systems_lead_to_flags_of_ours():
    flags = {spec.name for command in COMMANDS.values() for spec in collect_flags(command)}
    assert {flag for there in known_names().meaning for flag in candidates(there)} <= flags


def own_and_known_flags(command: str) -> set[str]:
    specs = collect_flags(COMMANDS[command])
    own = {word for spec in specs for word in (spec.name, *spec.alias, *spec.shorthands)}
    return own | {
        name
        for name, missing in known_names().missing.items()
        if not missing.commands or command in missing.commands
    }


def declared() -> dict[str, str]:
    """{field: flag} of every command: actor_learning_rate and critic_learning_rate are one
    field."""
    return {
        spec.path[1]: spec.name for command in COMMANDS.values() for spec in collect_flags(command)
    }


def names_read() -> set[str]:
    """Fields read as ``x.name`` or ``getattr(x, f"{...}_name")`` in the package.

    Of config/ only what derives values counts: a rule or a condition of other flags that asks for a
    flag does not make it act."""
    config = PACKAGE / "config"
    derives = {
        config / name
        for name in (
            "commands.py",
            "derived.py",
            "reward_plan.py",
            "teacher_plan.py",
            "groups/placement.py",
            "groups/rollout_correction.py",
        )
    }
    trees = {f: ast.parse(f.read_text(encoding="utf-8")) for f in PACKAGE.rglob("*.py")}
    acts = [f for f in trees if config not in f.parents or f in derives]
    nodes = [node for f in acts for node in ast.walk(trees[f])]
    plain = {node.attr for node in nodes if is_read(node)}
    for tree in trees.values():  # properties of a group of flags
        plain |= {n.attr for n in ast.walk(tree) if is_read(n) and ast.unparse(n.value) == "self"}
    plain |= {check.flag for check in CHECKS}  # each reads its limit by name
    endings = tuple(filter(None, map(computed_ending, nodes)))
    return plain | {name for name in declared() if endings and name.endswith(endings)}


def is_read(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)


def computed_ending(node: ast.AST) -> str:
    """ "_num_nodes" of ``getattr(flags, f"{role}_num_nodes")``, else empty."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
        name = node.args[1]
        if isinstance(name, ast.JoinedStr) and isinstance(name.values[-1], ast.Constant):
            return str(name.values[-1].value)
    return ""


if __name__ == "__main__":
    for name, config in COMMANDS.items():
        (HERE / f"flags_{name}.txt").write_text(flag_list(config), encoding="utf-8")
