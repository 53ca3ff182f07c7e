"""The flag layer, over a small command of its own: it knows nothing of reinforcement learning."""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from openrl.errors import UserError
from openrl.flags.checks import Given, check, problem, warning
from openrl.flags.dump import dump_yaml, effective_flags
from openrl.flags.help import help_text, summary
from openrl.flags.parser import GENERAL, import_plugins, load, read_words, resolve
from openrl.flags.schema import (
    REQUIRED,
    Condition,
    absent,
    collect_flags,
    flag,
    given,
    group,
    part,
)
from openrl.flags.secrets import secrets_in, without_secrets
from openrl.flags.sources import read_file
from openrl.flags.values import convert, within
from openrl.registry import Registry

losses = Registry("loss", "openrl.registry")


@dataclass(frozen=True)
class ClipOptions:
    eps: float = flag(0.2, "Range.", bounds="> 0")
    dual: float | Literal["auto"] | None = flag(None, "Second clip.")


@dataclass(frozen=True)
class StrictOptions:
    strict_beta: float = flag(REQUIRED, "No good default exists.")


@losses.register("clip", options=ClipOptions)
def clip() -> None:
    """Clipped objective, https://example.org/paper eq. 7; and more.

    And still more.
    """


@losses.register("soft")
def soft() -> None:
    """Soft objective."""


@losses.register("strict", options=StrictOptions)
def strict() -> None:
    """Wants an option."""


@group("Model")
class ModelGroup:
    pretrain: str = flag(REQUIRED, "The model.")
    template: str | None = flag(None, "Text with {} in it; 100% optional.")
    dtype: Literal["bf16", "fp32"] = flag("bf16", "Type.")
    stage: Literal[0, 1, 2] = flag(2, "Stage.")


@group("Training")
class TrainGroup:
    batch: int = flag(8, "Batch.", bounds="> 0", alias=("batch_size",))
    micro: int = flag(4, "Micro batch.", bounds="> 0")
    steps: int = flag(-1, "Steps.", bounds="-1 or > 0")
    betas: tuple[float, float] = flag((0.9, 0.95), "Betas.", bounds="[0, 1)")
    span: tuple[float, float] = flag((-10.0, 10.0), "Low and high.", bounds="increasing")
    stop: tuple[str, ...] = flag((), "Stop texts.")
    extra: dict[str, Any] = flag({}, "More settings.")
    guarded: dict[str, Any] = flag({}, "Settings with keys.", may_hold_secrets=True)
    track: bool = flag(False, "Send figures.", secret="TOY_KEY")
    plugin: tuple[str, ...] = flag((), "Modules.")
    shuffle: bool = flag(True, "Shuffle.")
    whiten: bool | None = flag(None, "Whiten.")
    no_std: bool = flag(False, "Leave the division out.")
    loss: str = flag("clip", "Objective.", registry=losses)
    warm: float = flag(0.1, "Warm-up.", only_if=absent("loss", "soft", "strict"))
    margin: int = flag(1, "Margin.", only_if=(given("whiten"), given("stop") | given("extra")))


@group("Evaluation")
class EvalGroup:
    rows: str | None = flag(None, "Rows.", only_if=given("rows"))
    every: int = flag(-1, "Every N steps.", only_if=given("rows"))


@group("Optimizer")
class OptimGroup:
    rate: float = flag(1e-6, "Rate.", bounds="> 0")


@dataclass(frozen=True, kw_only=True)
class Command:
    model: ModelGroup
    train: TrainGroup
    actor: OptimGroup = part(prefix="actor_")
    critic: OptimGroup = part(prefix="critic_", rate=9e-6)
    evaluation: EvalGroup = part(only_if=Condition(lambda c: c.train.batch > 4, "at 5"))
    options: dict[str, Any]


@check
def micro_divides(config: Command, given: Given):
    if config.train.batch % config.train.micro:
        yield problem(
            ("batch", "micro"), f"{config.train.batch} is no multiple of {config.train.micro}"
        )


@check
def fast_critic(config: Command, given: Given):
    if "critic_rate" in given and config.train.loss != "clip":
        yield problem(("critic_rate",), "was given")


@check
def long_template(config: Command, given: Given):
    if config.model.template == "odd":
        yield warning(("template",), "is odd", "leave it out, or --template even")


SPECS = collect_flags(Command)


def settle(*argv: str) -> tuple[Any, list[UserError]]:
    settings, _, problems = read_words(argv)
    problems += import_plugins(settings)
    config, found = resolve(Command, collect_flags(Command), settings)
    return config, problems + found


def good(*argv: str) -> Any:
    config, problems = settle(*argv)
    assert not problems, problems
    return config


def said(*argv: str) -> str:
    _, problems = settle(*argv)
    assert problems
    return "\n".join(map(str, problems))


def test_defaults_and_prefixes():
    config = good("--pretrain", "m")
    assert config.train == TrainGroup() and config.options == {"loss": ClipOptions()}
    assert (config.actor.rate, config.critic.rate) == (1e-6, 9e-6)
    assert good("--pretrain", "m", "--critic_rate", "1").actor.rate == 1e-6


def test_what_a_file_gives_is_taken_out_of_the_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("pretrain: m\ntemplate: odd")
    assert f"try: take template out of {file}, or --template even" in said("--config", str(file))
    assert "try: leave it out, or" in said("--pretrain", "m", "--template", "odd")


def test_precedence_is_defaults_then_files_then_command_line(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("pretrain: a\nbatch: 16\nmicro: 2\n")
    second.write_text("batch: 32\n")
    config = good("--config", str(first), "--config", str(second), "--micro", "1")
    assert (config.model.pretrain, config.train.batch, config.train.micro) == ("a", 32, 1)
    assert good("--config", str(second), str(first)).train.batch == 16


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--batch=16", "batch", 16),
        ("--batch 1.6e1", "batch", 16),
        ("--batch_size 16", "batch", 16),
        ("--batch 4 --batch 12", "batch", 12),
        ("--span -1e-3 2", "span", (-1e-3, 2.0)),
        ("--no_shuffle", "shuffle", False),
        ("--shuffle false", "shuffle", False),
        ("--no_shuffle --shuffle", "shuffle", True),
        ("--whiten", "whiten", True),
        ("--no_whiten", "whiten", False),
        ("--whiten None", "whiten", None),
        ("--no_std", "no_std", True),
        ("--no_no_std", "no_std", False),
        ("--stop a b --stop c", "stop", ("c",)),
        ("--stop a b --stop", "stop", ()),
        ("--stop", "stop", ()),
        ("--stop=--x", "stop", ("--x",)),
    ],
)
def test_spellings_of_values(words, field, value):
    assert getattr(good("--pretrain", "m", *words.split()).train, field) == value


def test_a_list_on_the_command_line_replaces_the_one_of_a_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("pretrain: m\nstop: [a, b]\n")
    assert good("--config", str(file)).train.stop == ("a", "b")
    assert good("--config", str(file), "--stop", "c").train.stop == ("c",)
    file.write_text("pretrain: m\nstop: a\n")
    assert good("--config", str(file)).train.stop == ("a",)


def test_every_problem_at_once(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("temprature: 1\npretrian: m\nbatch: [1, 2]\nstage: 7\n")
    text = said(
        "stray", "--config", str(file), "--actor-rate", "3", "--betas", "0.9", "--loss", "slip", "--steps", "0",
        "--no_micro", "--shuffle", "maybe", "--unknown", "1", "2",
    )  # fmt: skip
    for part_of_text in [
        "'stray' stands before any flag",
        f"--temprature: no such flag ({file}, line 1)",
        f"--pretrian: no such flag ({file}, line 2)\n  try: pretrain\n",
        f"--batch: expected a whole number, got '1' '2' ({file}, line 3)",
        f"--stage: expected one of 0, 1, 2, got '7' ({file}, line 4)",
        "--actor-rate: no such flag\n  try: --actor_rate",
        "--betas: expected 2 values, got 1: '0.9'",
        "--loss: unknown loss 'slip'; did you mean 'clip'? Known: clip, soft, strict",
        "--steps: must be -1 or > 0, got 0",
        "--no_micro: no such flag\n  try: --micro",
        "--shuffle: expected true or false, got 'maybe'",
        "--unknown: no such flag",
        "--pretrain: is required\n  try: --pretrain TEXT",
    ]:
        assert part_of_text in text
    assert len(settle("--config", str(file))[1]) == 5


def test_rules_wait_for_values_that_can_be_read_but_not_for_the_spelling_of_flags():
    words = ["--pretrain", "m", "--loss", "soft", "--critic_rate", "1", "--micro", "3"]
    assert "is no multiple" in (text := said(*words)) and "was given" in text
    assert "is no multiple" in said(*words, "--mirco", "3")
    for unreadable in ("--actor_rate fast", "--batch many", "--stage 7", "--loss slip"):
        (problem,) = settle(*words, *unreadable.split())[1]
        assert problem.flags == (unreadable.split()[0].removeprefix("--"),)
    assert settle(*words[2:])[1][0].message == "is required" and len(settle(*words[2:])[1]) == 1


def test_options_belong_to_components():
    assert good("--pretrain", "m", "--eps", "0.3").options["loss"] == ClipOptions(eps=0.3)
    assert good("--pretrain", "m", "--dual", "auto").options["loss"].dual == "auto"
    assert good("--pretrain", "m", "--dual", "3").options["loss"].dual == 3.0
    assert good("--pretrain", "m", "--loss", "soft").options == {"loss": None}
    assert "--eps: must be > 0, got 0" in said("--pretrain", "m", "--eps", "0")
    assert "--strict_beta: is required with --loss strict" in said(
        "--pretrain", "m", "--loss", "strict"
    )
    assert (
        good("--pretrain", "m", "--loss", "strict", "--strict_beta", "1")
        .options["loss"]
        .strict_beta
        == 1.0
    )


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ("--loss soft --eps 0.2", ["--eps acts with --loss clip"]),
        ("--loss soft --warm 0.1", ["--warm acts without --loss soft | strict"]),
        ("--warm 0.2 --every 5 --rows r", []),
        ("--margin 2", ["--margin acts with --whiten"]),
        ("--whiten --margin 2", ["--margin acts with --stop, or with --extra"]),
        ("--whiten --stop x --margin 2", []),
        ("--every -1 --loss soft --dual 3", ["--every acts with --rows", "--dual acts with --loss clip"]),
        ("--batch 4 --rows r", ["--rows acts at 5"]),
        ("--whiten None --no_whiten", []),
    ],
)  # fmt: skip
def test_flags_without_effect_are_named_in_one_warning(words, lines):
    config, problems = settle("--pretrain", "m", *words.split())
    assert config is not None and len(problems) == bool(lines)
    for found in problems:
        assert not found.fatal and not found.flags
        assert str(found).splitlines()[1:] == [f"  {line}" for line in lines]


def test_one_dash_is_one_too_few():
    (problem,) = settle("--pretrain", "m", "-micro", "2")[1]
    assert problem.fatal and str(problem) == (
        "'-micro': a flag begins with two dashes\n  try: --micro, or --flag=-micro if it is a value"
    )
    assert good("--pretrain=-m", "--span", "-inf", "2").train.span == (float("-inf"), 2.0)


def test_both_spellings_of_a_flag():
    assert "--batch, --batch_size: are two spellings" in said(
        "--pretrain", "m", "--batch", "8", "--batch_size", "8"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: b: c", "is not YAML"),
        ("- 1\n- 2", "holds no  flag: value  lines"),
        ("batch: 8\nmicro: 4\nbatch: 16", "given twice in {}, lines 1 and 3"),
        ("dump_config: x", "--dump_config: works only on the command line ({}, line 1)"),
        ("batch: {a: 1}", 'expected a whole number, got {{"a": "1"}} ({}, line 1)'),
        ("batch:", "expected a whole number, got None"),
        ("no_shuffle: true", "--no_shuffle: no such flag ({}, line 1)\n  try: shuffle"),
    ],
)
def test_bad_files(tmp_path, text, problem):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert problem.format(file) in said("--config", str(file), "--pretrain", "m")


@pytest.mark.parametrize(
    ("name", "text", "remedy"),
    [
        ("run.sh", "python -m x --a 1", "openrl.cli.import_config {} -o config.yaml"),
        ("run.py", "x = 1", "openrl.cli.import_config {} -o config.yaml"),
        ("run.ipynb", "{}", "openrl.cli.import_config {} -o config.yaml"),
        ("c.yaml", "a: b: c", ""),
    ],
)
def test_beside_a_file_that_is_not_read_nothing_is_missing(tmp_path, capsys, name, text, remedy):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        load(Command, ["--config", str(file)], "prog")
    told = capsys.readouterr().err
    assert remedy.format(file) in told and "1 problem," in told


def test_missing_file_and_bytes_that_are_no_text(tmp_path):
    assert "cannot read nowhere.yaml: No such file" in said(
        "--config", "nowhere.yaml", "--pretrain", "m"
    )
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 text" in said("--config", str(tmp_path / "c.yaml"), "--pretrain", "m")


def test_files_are_read_as_text_not_as_yaml_guesses(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("pretrain: no\ntemplate: 0123\nactor_rate: 1e-6\nshuffle: no\nwhiten: ~\n")
    config = good("--config", str(file))
    assert (config.model.pretrain, config.model.template, config.actor.rate) == ("no", "0123", 1e-6)
    assert (config.train.shuffle, config.train.whiten) == (False, None)
    file.write_text("pretrain: m\ntemplate: 'None'\n")
    assert good("--config", str(file)).model.template == "None"
    file.write_text("# nothing but words\n")
    settings, (problem,) = read_file(str(file))
    assert not settings and not problem.fatal and "holds no flags" in problem.message


def test_a_file_may_be_a_pipe_that_the_shell_has_opened(tmp_path, monkeypatch):
    reading, writing = os.pipe()
    os.write(writing, b"pretrain: piped\nstage: 1\n")
    os.close(writing)
    assert good("--config", f"/dev/fd/{reading}").model == ModelGroup(pretrain="piped", stage=1)
    os.close(reading)
    os.mkfifo(tmp_path / "pipe")  # nobody would ever write to it
    for path, reason in {tmp_path / "pipe": "not a regular", tmp_path: "not a regular"}.items():
        assert f"cannot read {path}: {reason}" in said("--config", str(path), "--pretrain", "m")
    assert "no file is named" in said("--config", "", "--pretrain", "m")


def test_the_standard_input_is_a_file_called_dash():
    words = [sys.executable, "-c", READ_DASH]
    told = subprocess.run(words, input="seed: 3\n", capture_output=True, text=True, check=True)
    assert told.stdout == "[('seed', '3')] []\n"


READ_DASH = """
from openrl.flags.sources import read_file
settings, problems = read_file("-")
print([(s.name, s.raw) for s in settings], problems)
"""


SECRET = {"wandb": {"settings": [{"api_key": "s3cr3t"}, "https://me:s3cr3t@host"], "tags": ["a"]}}
HIDDEN = {"wandb": {"settings": [{"api_key": "***"}, "***"], "tags": ["a"]}}


def test_an_empty_text_is_no_value_where_a_flag_may_have_none(tmp_path):
    (tmp_path / "run.yaml").write_text("pretrain: m\ntemplate: ''\nstop: ''\n")
    config = good("--pretrain", "m", "--template", "", "--stop", "")
    assert config == good("--config", str(tmp_path / "run.yaml")) == good("--pretrain", "m")
    assert good("--pretrain", "m", "--stop", "", "END").train.stop == ("", "END")


def test_secrets_are_left_out_of_what_is_written(tmp_path, monkeypatch):
    typed = json.dumps(SECRET)
    monkeypatch.setattr(sys, "argv", ["p", f"--guarded={typed}", "--seed", "1"])
    config = good("--pretrain", "m", "--guarded", typed)
    assert config.train.guarded == SECRET  # the run itself has them
    assert sys.argv == ["p", f"--guarded={json.dumps(HIDDEN)}", "--seed", "1"]
    (tmp_path / "run.yaml").write_text(text := dump_yaml(config))
    assert "s3cr3t" not in text and effective_flags(config)["guarded"] == HIDDEN
    dumped = ["--config", str(tmp_path / "run.yaml")]
    assert "--guarded: *** stands for a secret that was left out" in said(*dumped)
    assert good(*dumped, "--guarded", typed) == config


def test_secrets_that_a_later_word_overrides_are_left_out_too(monkeypatch):
    first, torn = json.dumps(SECRET), '{"api_key": "s3cr3t"'
    words = ["--guarded", first, "--guarded=", "--guarded={}", "--guarded", torn]
    words += ["--guarded", '{"tags": ["a"]}']
    monkeypatch.setattr(sys, "argv", ["p", *words, "--pretrain", "m{}"])
    assert good("--pretrain", "m", *words).train.guarded == {"tags": ["a"]}
    shown = ["--guarded", json.dumps(HIDDEN), "--guarded=", "--guarded={}", "--guarded", "***"]
    assert sys.argv == ["p", *shown, *words[-2:], "--pretrain", "m{}"]


def test_of_two_keys_the_last_counts_and_neither_stays(monkeypatch):
    """Only whole words are keys: the first one is a part of many."""
    monkeypatch.setenv("TOY_KEY", "")
    words = ["--track", "a", "--track=s3cr3t"]
    monkeypatch.setattr(sys, "argv", ["p", *words, "--pretrain", "a_model"])
    config, problems = settle("--pretrain", "a_model", *words)
    assert config.train.track is True and os.environ["TOY_KEY"] == "s3cr3t"
    assert sys.argv == ["p", "--track", "***", "--track=***", "--pretrain", "a_model"]
    assert ["export TOY_KEY" in str(problem) for problem in problems] == [True]
    assert "--track: expected true or false, got ''" in said("--pretrain", "m", "--track", "")


def test_secrets_in_names_and_urls_of_several_forms():
    held = {"HFToken": "a", "APIKey": "b", "url": "https://s3cr3t@host/v1"}
    assert without_secrets(held) == dict.fromkeys(held, "***")


def test_numbers_and_switches_are_no_secrets():
    kept = {"eos_token": 5, "use_auth": True, "token": None, "password": ""}
    assert without_secrets(kept) == kept and list(secrets_in(kept)) == []


def test_json_objects_are_typed_read_from_a_file_or_from_yaml(tmp_path):
    def extra(*argv: str) -> Any:
        return good("--pretrain", "m", *argv).train.extra

    (tmp_path / "x.json").write_text('{"a": [1, "1"]}')
    (tmp_path / "c.yaml").write_text("extra: {a: [1, '1'], b: {c: false, d: ~, e: no, f: 1e-6}}")
    assert extra() == {}
    assert extra("--extra", '{"a": {"b": null}}') == {"a": {"b": None}}
    assert extra("--extra", str(tmp_path / "x.json")) == {"a": [1, "1"]}
    yaml_values = {"a": [1, "1"], "b": {"c": False, "d": None, "e": "no", "f": 1e-6}}
    assert extra("--config", str(tmp_path / "c.yaml")) == yaml_values
    assert "expected a JSON object, got '{a: 1}': Expecting" in said(
        "--pretrain", "m", "--extra", "{a: 1}"
    )
    (tmp_path / "x.json").write_text("[1]")
    assert "expected a JSON object, got 1 in" in said(
        "--pretrain", "m", "--extra", str(tmp_path / "x.json")
    )


def test_given_tells_asked_flags_from_dumped_defaults(tmp_path):
    assert "--critic_rate: was given" in said(
        "--pretrain", "m", "--loss", "soft", "--critic_rate", "9e-6"
    )
    file = tmp_path / "c.yaml"
    file.write_text("pretrain: m\nloss: soft\ncritic_rate: 9e-6\n")
    assert good("--config", str(file)).critic.rate == 9e-6
    file.write_text("pretrain: m\nloss: soft\ncritic_rate: 8e-6\n")
    assert "--critic_rate: was given" in said("--config", str(file))


NASTY = [
    "plain", "", " ", "None", "none", "null", "~", "true", "no", "1e-6", "007", "a: b", "- x", "#c", "a #b", "{}", "[a",
    "User: {}\nAssistant: ", "\ttab\n\n", "quote ' and \"", "back\\slash", "\x07\x7f", "é 你好 🎉", "%d 100%", "a" * 300,
    " lead", "trail ", "key:", "? q", "!tag", "&anchor", "*alias", "|", ">", "@at", "`tick`", "---", "...", "\u2028", "\ufeff",
]  # fmt: skip


def random_config(rng: random.Random) -> Command:
    def text() -> str:
        return rng.choice(NASTY)

    def number() -> float:
        return rng.choice([1e-6, 0.1, 3.0, 1e300, 5e-324, rng.random(), rng.uniform(1, 1e9)])

    def value() -> Any:
        return rng.choice(
            [
                None,
                True,
                3,
                number(),
                text(),
                [text(), 1],
                {text(): number(), "deep": {"a": text()}},
            ]
        )

    loss, options = rng.choice(
        [
            ("clip", ClipOptions(eps=number(), dual=rng.choice([None, "auto", number()]))),
            ("soft", None),
        ]
    )
    return Command(
        model=ModelGroup(
            pretrain=text(),
            template=text() or None,
            dtype="fp32",
            stage=rng.choice([0, 1]),
        ),
        train=TrainGroup(
            batch=4 * rng.randrange(1, 10**9),
            steps=rng.choice([-1, 5]),
            betas=(rng.random(), rng.random()),
            span=(-number(), rng.choice([number(), float("inf")])),
            stop=tuple(text() for _ in range(rng.randrange(4))),
            extra={text(): value() for _ in range(rng.randrange(4))},
            shuffle=rng.random() < 0.5,
            whiten=rng.choice([None, True, False]),
            loss=loss,
        ),
        actor=OptimGroup(rate=number()),
        critic=OptimGroup(rate=9e-6),
        evaluation=EvalGroup(),
        options={"loss": options},
    )


def test_a_dumped_config_loads_back_equal(tmp_path):
    rng = random.Random(0)
    file = tmp_path / "run.yaml"
    for _ in range(300):
        config = random_config(rng)
        file.write_text(dump_yaml(config), encoding="utf-8")
        assert good("--config", str(file)) == config


def test_dump_names_sections_and_help(tmp_path, capsys):
    argv = ["--pretrain", "m", "--batch", "16", "--no_shuffle"]
    want = load(Command, argv, prog="p")
    with pytest.raises(SystemExit) as end:
        load(Command, [*argv, "--dump_config", "-"], prog="p")
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "# --- Optimizer ---\n# Rate.\nactor_rate: 1.0e-06\n" in text
    file = tmp_path / "run.yaml"
    with pytest.raises(SystemExit):
        load(Command, [*argv, "--dump_config", str(file)], prog="p")
    assert file.read_text() == text
    assert load(Command, ["--config", str(file)], prog="p") == want


def test_a_dump_that_cannot_be_written(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        load(
            Command,
            ["--pretrain", "m", "--dump_config", str(tmp_path / "a" / "b")],
            prog="p",
        )
    assert end.value.code == 2
    assert "--dump_config: cannot write" in capsys.readouterr().err


def test_problems_go_to_stderr_with_code_2(capsys):
    with pytest.raises(SystemExit) as end:
        load(Command, ["--steps", "0"], prog="python -m toy")
    out, err = capsys.readouterr()
    assert end.value.code == 2 and not out
    assert err.startswith("python -m toy: 2 problems, nothing was started\n   1. --steps: must be")


def test_warnings_do_not_stop(capsys):
    config = load(Command, ["--pretrain", "m", "--template", "odd"], prog="p")
    assert config.model.template == "odd"
    told = "p: warning: --template: is odd\n       try: leave it out, or --template even\n"
    assert capsys.readouterr().err == told


TOY_POINTS = """
from dataclasses import dataclass
from typing import Any
from openrl.flags.schema import flag, group
from openrl.registry import Registry

points = Registry("point", "toy_points")
points.register("own")(lambda: None)

@group("Toy")
class ToyGroup:
    plugin: tuple[str, ...] = flag((), "Modules.")
    point: str = flag("own", "Point.", registry=points)

@dataclass(frozen=True, kw_only=True)
class Toy:
    toy: ToyGroup
    options: dict[str, Any]
"""
TOY_PLUGIN = """
from dataclasses import dataclass
from openrl.flags.schema import flag
from toy_points import points

@dataclass(frozen=True)
class Options:
    mine_beta: float = flag(0.5, "Strength.")

@points.register("mine", options=Options)
def mine():
    pass
"""


def test_plugins_bring_components_and_flags(tmp_path, monkeypatch):
    (tmp_path / "toy_points.py").write_text(TOY_POINTS)
    (tmp_path / "toy_plugin.py").write_text(TOY_PLUGIN)
    (tmp_path / "c.yaml").write_text("plugin: [toy_plugin]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    toy = importlib.import_module("toy_points").Toy
    argv = ["--config", str(tmp_path / "c.yaml"), "--point", "mine", "--mine_beta", "0.25"]
    config = load(toy, argv, prog="p")
    assert config.toy.plugin == ("toy_plugin",) and config.options["point"].mine_beta == 0.25


def test_plugins_that_do_not_import(tmp_path, monkeypatch):
    (tmp_path / "broken_plugin.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    text = said("--pretrain", "m", "--plugin", "broken_plugin", "absent_plugin")
    assert "--plugin: cannot import broken_plugin: ZeroDivisionError" in text
    assert "--plugin: cannot import absent_plugin: ModuleNotFoundError" in text


def test_help_has_sections_choices_and_defaults(monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    text = help_text("python -m toy", "Trains a toy.", [*SPECS, *GENERAL])
    assert max(map(len, text.splitlines())) < 90
    for line in [
        "Optimizer:",
        "  --stage {0,1,2}",
        "  --betas FLOAT FLOAT",
        "  --stop TEXT ...",
        "Text with {} in it; 100% optional. (default: None)",
        "Batch. (> 0; default: 8; also --batch_size)",
        "The model. (required)",
        "  --shuffle, --no_shuffle",
        "Shuffle. (default: on)",
        "Choices of --loss:",
        "  clip    Clipped objective\n",
        "Options of --loss clip:",
        "  --dump_config TEXT",
    ]:
        assert line in text


def test_components_that_are_objects_describe_themselves_by_their_own_functions():
    def own() -> None:
        """Says this. And that."""

    @dataclass
    class Holder:
        """Says nothing of its instances."""

        rule: Callable[[], None] = soft

    assert summary(Holder(own)) == "Says this"
    assert summary(Holder()) == ""


@pytest.mark.parametrize(
    ("value", "bounds", "ok"),
    [
        (0, "> 0", False), (1, "> 0", True), (0, ">= 0", True), (1.0, "< 1", False), (1, "<= 1", True),
        (-1, "-1 or > 0", True), (0, "-1 or > 0", False), (0.0, "(0, 1]", False), (1.0, "(0, 1]", True),
        (1.0, "[0, 1)", False), (0.0, "[0, 1)", True), ((0.9, 1.0), "[0, 1)", False), ((1, 1), "increasing", False),
        ((-1, 2), "increasing", True), ((-1, 2), ">= 0 and increasing", False), (None, "> 0", True),
        ("auto", "> 1", True), (5, "", True),
    ],
)  # fmt: skip
def test_bounds(value, bounds, ok):
    assert within(value, bounds) is ok


@pytest.mark.parametrize(
    ("raw", "type_", "value"),
    [
        ("3", int, 3), ("-3", int, -3), ("1e8", int, 10**8), (str(2**63), int, 2**63), (".inf", float, float("inf")),
        ("-inf", float, float("-inf")), ("Yes", bool, True), ("None", str, "None"), ("None", str | None, None),
        ("~/m", str | None, str(Path("~/m").expanduser())), ("~root/m", str, str(Path("~root/m").expanduser())),
        ("~", str, "~"), ("~nobody of that name/ //m", str, "~nobody of that name/ //m"),
        ("none", Literal["none", "batch"] | None, "none"), ("None", Literal["none", "batch"] | None, None),
        (["None"], tuple[float, ...] | None, None), ([""], tuple[float, ...] | None, None),
        ("2", Literal[0, 2], 2), (["1", "2"], tuple[int, ...], (1, 2)), ("auto", float | Literal["auto"], "auto"),
    ],
)  # fmt: skip
def test_convert(raw, type_, value):
    got = convert(raw, type_)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("raw", "type_"),
    [("1.5", int), ("nan", float), ("", int), ("maybe", bool), (None, int), ("a\0b", str)],
)
def test_convert_refuses(raw, type_):
    with pytest.raises(ValueError, match="expected"):
        convert(raw, type_)
