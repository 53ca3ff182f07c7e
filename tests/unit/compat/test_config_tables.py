"""Every row of the tables of other systems' keys: what it says to give exists and takes the values
that people write."""

from functools import cache

import pytest

import openrl.config.rules.all  # noqa: F401
from openrl.config.commands import COMMANDS
from openrl.config.importing.convert import Conversion
from openrl.config.importing.tables import REFUSE, TOGETHER, VERDICTS, keys_of
from openrl.config.importing.values import Written, unresolved
from openrl.extension_points import config_tables
from openrl.flags.schema import collect_flags
from openrl.flags.sources import from_yaml

SYSTEMS = [entry.name for entry in config_tables.entries()]
ORDER = ("train_ppo_ray", "train_sft", "train_rm", "train_dpo", "batch_inference")


@cache
def specs_of(command):
    return collect_flags(COMMANDS[command])


@cache
def names_of(command):
    return {name for spec in specs_of(command) for name in (spec.name, *spec.alias)}


def command_for(row):
    """The first command that the row is for and that has its flags."""
    wanted = row.commands or ORDER
    fits = (c for c in wanted if any(f in names_of(c) for x in row.flags for f in x.split("|")))
    return next(fits, wanted[0])


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_row_leads_to_flags_that_take_its_values(system):
    for row in keys_of(system).rows:  # together: as two thousand tests they take a minute more
        try:
            check(system, row)
        except AssertionError as error:
            raise AssertionError(f"{row.key}: {error}") from error


def check(system, row):
    assert row.verdict in VERDICTS and set(row.commands) <= set(COMMANDS)
    flags = [flag for choice in row.flags for flag in choice.split("|")]
    assert all(any(flag in names_of(command) for command in COMMANDS) for flag in flags)
    assert row.flags or row.note, "somebody who writes it learns nothing"
    assert row.how in ("", TOGETHER, REFUSE) or all("=" in part for part in row.how.split(";"))
    assert not row.default or row.flags, "a default of what is given nowhere"
    command = command_for(row)
    for text in (*row.seen, *([row.default] if row.default else [])):
        value = from_yaml(text) if text[:1] in "[{'\"" else text
        if "*" in row.key or unresolved(value):
            continue
        conversion = Conversion(system, command, specs_of(command), {row.key: Written(value)})
        lines, problems = conversion.run(defaults=False)
        if row.how == REFUSE:
            continue
        assert [str(p) for p in problems] == [], text
        assert any(row.key in line.keys for line in lines), text


@pytest.mark.parametrize("system", SYSTEMS)
def test_defaults_of_a_system_are_values_here(system):
    """An empty file of a system is what its defaults say."""
    lines, problems = Conversion(system, "train_ppo_ray", specs_of("train_ppo_ray"), {}).run()
    assert {p.label for p in problems} <= {"note"} and all(line.is_default for line in lines)
    given = [line.flag for line in lines]
    assert sorted(given) == sorted({*given}), "a flag has one default"
