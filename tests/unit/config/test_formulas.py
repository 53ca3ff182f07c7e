"""Formulas of tables over keys of other systems, worked out by hand."""

import ast

import pytest

import openrl.config.rules.all  # noqa: F401
from openrl.config.commands import COMMANDS
from openrl.config.importing.formulas import Formulas, GivenKeys, rows_of
from openrl.config.importing.tables import VERDICTS, KeyRow, Keys, keys_of
from openrl.config.importing.values import Written
from openrl.extension_points import config_tables
from openrl.flags.schema import collect_flags

GIVEN = {"a.n": "3", "a.on": "True", "off": "no", "files": "[x@train, y@train]", "many": "lots"}
GIVEN |= {"deep.one": "1", "deep.two.three": "3", "name": "Zero3.json", "empty": None}
DEFAULTS = Keys([KeyRow("size", "same", (), "", "4", (), 0, (), "")])


def computed(*rows, values=GIVEN):
    keys = GivenKeys({key: Written(raw) for key, raw in values.items()}, DEFAULTS)
    names = ("flag", "value", "when", "how", "commands", "verdict", "note")
    table = [dict.fromkeys(names, "") | dict(zip(names, row, strict=False)) for row in rows]
    return list(Formulas(keys).computed(table, "train_sft")), keys.problems


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a.n * size", 12.0),
        ("max(1, a.n // 2) + 0.5", 1.5),
        ("size / nothing", 0.0),  # which no file should get a traceback for
        ("[a.n, 0.2]", ["3.0", "0.2"]),
        ("a.n", "3"),
        ("nothing or a.n", "3"),
        ("nothing or 0", 0),
        ("first(empty, size)", "4"),
        ("least(nothing, a.n)", 3.0),
        ('1 if a.on and off == "false" else 2', 1),
        ('f"{name}/{a.n}"', "Zero3.json/3"),
        ('before(files, "@")', "x,y"),
        ('after(files, "@")', "train"),
        ("joined(files)", "x@train,y@train"),
        ('below(deep, "one")', {"two": {"three": "3"}}),
        ('found(name, "zero([0-3])")', "3"),
    ],
)
def test_values(value, expected):
    ((found,), problems) = computed(("flag", value))
    assert (found.value, problems) == (expected, {})


def test_the_first_row_with_a_value_counts():
    rows = [("=is_it", "a.n > 2"), ("x", "nothing"), ("x", "1", "is_it and not off")]
    rows += [("x", "2"), ("y", "3", "", "", "train_rm"), ("z", "", "a.on", "", "", "none", "why")]
    found, _ = computed(*rows)
    assert [(c.flag, c.value, c.keys) for c in found] == [
        ("x", 1, ("a.n", "off")),
        ("z", None, ("a.on",)),
    ]


def test_texts_are_chosen_and_notes_filled_in():
    row = ("x", "items(files)", "", "x@train=here; *=-", "", "", "{a.n * size} of {a.n}")
    ((found,), _) = computed(row)
    assert (found.value, found.note, found.verdict) == (["here"], "12 of 3", "converted")


def test_what_is_no_number_is_a_problem():
    _, problems = computed(("x", "many * 2"), ("y", "(nothing or many) * 2"))
    assert [str(p) for p in problems.values()] == ["many: expected a number, got 'lots'"]
    found, problems = computed(("x", "ceil(size)"), values={"size": "inf"})
    assert [c.value for c in found] == [4]
    assert [str(p) for p in problems.values()] == ["size: expected a number, got 'inf'"]


def test_null_within_a_text_is_a_part_of_it():
    ((found,), _) = computed(("x", 'f"{path}"'), values={"path": "data/null_set", "size": None})
    assert found.value == "data/null_set"


SYSTEMS = [entry.name for entry in config_tables.entries()]


@pytest.mark.parametrize("system", SYSTEMS)
def test_rows_name_flags_and_keys_that_exist(system):
    flags = {
        name for c in COMMANDS.values() for s in collect_flags(c) for name in (s.name, *s.alias)
    }
    named: set[str] = set()
    for row in rows_of(system):
        assert set(row["commands"].split()) <= set(COMMANDS) and row["verdict"] in ("", *VERDICTS)
        if row["flag"].startswith("="):
            named.add(row["flag"][1:])
        else:
            assert set(row["flag"].split("|")) <= flags, row["flag"]
        for cell in filter(None, (row["value"], row["when"])):
            called = {n.func.id for n in ast.walk(ast.parse(cell)) if isinstance(n, ast.Call)}
            parts = {n.value for n in ast.walk(ast.parse(cell)) if isinstance(n, ast.Attribute)}
            for node in ast.walk(ast.parse(cell)):
                if isinstance(node, (ast.Name, ast.Attribute)) and node not in parts:
                    name = ast.unparse(node)
                    known = name in {*named, *called, *flags} or keys_of(system).row(name)
                    prefix = any(r.key.startswith(f"{name}.") for r in keys_of(system).rows)
                    assert known or prefix, f"{row['flag']}: {name}"
