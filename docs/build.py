"""Write docs/flags.md, docs/metrics.md, docs/coming_from_*.md and the tables of docs/algorithms.md, docs/verifiers.md and
docs/environments.md and the drawings from the code, check references, and build the site.

python docs/build.py            write, check, then build site/
python docs/build.py --check    only check; a stale page is a problem too
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# of the checkout, whatever is installed
from docs.draw import DRAWINGS  # noqa: E402
from openrl.config.commands import COMMANDS, PPOConfig  # noqa: E402
from openrl.config.groups.health import HealthFlags  # noqa: E402
from openrl.config.importing.tables import VERDICTS, keys_of  # noqa: E402
from openrl.config.presets import PRESETS  # noqa: E402
from openrl.config.unknown_flags import known_names  # noqa: E402
from openrl.extension_points import (  # noqa: E402
    advantage_estimators,
    config_tables,
    environments,
    policy_losses,
    verifiers,
)
from openrl.flags.help import default_text, summary  # noqa: E402
from openrl.flags.schema import REQUIRED, FlagSpec, collect_flags, flags_of  # noqa: E402
from openrl.flags.values import placeholder, show  # noqa: E402
from openrl.registry import Registry  # noqa: E402
from openrl.rewards.verifiers.base import describe  # noqa: E402
from openrl.tracking.health import CHECKS  # noqa: E402
from openrl.tracking.metric_rows import elsewhere, metric_rows  # noqa: E402

FLAGS_PAGE = ROOT / "docs" / "flags.md"
METRICS_PAGE = ROOT / "docs" / "metrics.md"
ALGORITHMS_PAGE = ROOT / "docs" / "algorithms.md"
VERIFIERS_PAGE = ROOT / "docs" / "verifiers.md"
ENVIRONMENTS_PAGE = ROOT / "docs" / "environments.md"
MARK = "<!-- from here on made by `make docs` -->\n"
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
PATH_IN_CODE = re.compile(
    r"`((?:openrl|tests|examples|benchmarks|docs|dockerfile|requirements|\.ci)/[\w./-]*)`"
)


def flags_page() -> str:
    lines = [
        "# Flags",
        "",
        "Made from the flags by `make docs`. Each flag is also a key of a `--config` file: `--seed 1`",
        "is the line `seed: 1`. A switch is on with `--flag` and off with `--no_flag`. A flag wins over",
        "the files, a later file over an earlier one, a file over `--algo_preset`, a preset over the",
        "default. Of a flag given twice, a list too, the last one counts; a list with nothing behind it",
        "is empty. None usually means that something else decides; the meaning says what.",
        "",
        '"Acts with ..." says when a flag has an effect. Given without it, the flag does nothing, and a',
        "warning says so. Options of a component act only while it is chosen.",
        "",
        "Every command also takes `--help`, `--config FILE ...` and `--dump_config FILE`, which writes",
        "all values to a file that `--config` reads, and ends.",
    ]
    for command, config in COMMANDS.items():
        lines += ["", f"## {command}"]
        known = {spec.name for spec in collect_flags(config)}
        for section, specs in groupby(collect_flags(config), key=lambda s: s.section):
            lines += ["", f"### {section}", "", "| flag | default | meaning |", "|---|---|---|"]
            lines += [_row(spec, known) for spec in specs]
    return "\n".join([*lines, *flags_elsewhere()]) + "\n"


def flags_elsewhere() -> list[str]:
    """What becomes of flags that other systems have and these commands do not."""
    lines = [
        "",
        "## Flags of other systems",
        "",
        "The commands know these: they ignore them with a warning, or say what to give instead.",
        "",
        "| flag | commands | why there is none | |",
        "|---|---|---|---|",
    ]
    for flag, missing in sorted(known_names().missing.items()):
        act = f"refused: {missing.fix}" if missing.fix else "ignored"
        lines.append(_cells(f"`--{flag}`", ", ".join(missing.commands) or "all", missing.why, act))
    lines += [
        "",
        "## Names in other systems",
        "",
        "A file or a command line of another system is read as it is ([importing](importing.md)). One",
        "page for each system says what becomes of its keys:",
        "",
    ]
    lines += [
        f"- [{entry.name}]({coming_from(entry.name).name})" for entry in config_tables.entries()
    ]
    lines += [
        "",
        "A command that gets one of these names on its own command line, and has no such flag, refuses",
        "it and names its own.",
    ]
    return lines


def coming_from(system: str) -> Path:
    return ROOT / "docs" / f"coming_from_{re.sub(r'[^a-z0-9]+', '_', system.lower())}.md"


def system_page(system: str) -> str:
    """What becomes of every key of a system."""
    keys = keys_of(system)
    lines = [
        f"# Coming from {system}",
        "",
        "Made by `make docs` from the table that the importer reads ([importing](importing.md)). Keys that",
        f"most of {system}'s own examples have come first; the number says how many have it. `*` stands for",
        "one part of a key, `**` for any rest.",
    ]
    for verdict, title in VERDICTS.items():
        rows = [row for row in keys.rows if row.verdict == verdict]
        if rows:
            lines += [
                "",
                f"## {title[0].upper()}{title[1:]}",
                "",
                "| key | examples | here | |",
                "|---|---|---|---|",
            ]
        for row in sorted(rows, key=lambda row: -row.files):
            flags = ", ".join(f"`--{flag}`" for choice in row.flags for flag in choice.split("|"))
            values = f" `{row.how}`" if "=" in row.how else ""
            notes = [
                _shown(row.note),
                f"there `{row.default}` if left out" if row.default else "",
                row.changed,
            ]
            lines.append(
                _cells(
                    f"`{row.key}`",
                    str(row.files or ""),
                    flags + values,
                    "; ".join(filter(None, notes)),
                )
            )
    return "\n".join(lines) + "\n"


def _row(spec: FlagSpec, known: set[str]) -> str:
    """``known`` are the flags of the command: conditions on others always hold in it."""
    default = default_text(spec)
    within = "in " if spec.bounds.startswith(("(", "[")) else ""
    notes = [f"Must be {within}{spec.bounds}."] if spec.bounds else []
    notes += [f"One of {', '.join(spec.registry.names())}."] if spec.registry else []
    others = known - {spec.name}
    words = [condition.words_in(known) for condition in spec.only_if if not spec.components]
    words = [w for w in dict.fromkeys(words) if {*re.findall(r"--(\w+)", w)} <= others]
    notes += [f"Acts {' and '.join(words)}."] if words else []
    cells = [
        f"`{f'--{spec.name} {placeholder(spec.type)}'.strip()}`",
        default if spec.default is REQUIRED else f"`{default}`",
        _shown(" ".join([spec.help, *notes])),
    ]
    return _cells(*cells)


def metrics_page() -> str:
    """The table of metrics, a section per theme, with the names that other systems have for them."""
    lines = [
        "# Metrics",
        "",
        "Made from the table of metrics by `make docs`. A run writes them to `metrics.jsonl` in its",
        "directory, one object per step, and to the trackers of `--track_with`. A metric that was not",
        "measured in a step is absent, not 0. `python -m openrl.cli.metrics NAME` prints a row of this",
        "page.",
        "",
        "A word in capitals stands for whatever a run puts in its place: ROLE is actor or critic, the",
        "others are names of users' data and code. Names of other systems stand beside ours in",
        "`metrics.jsonl`, so that their dashboards still work.",
    ]
    for theme, rows in groupby(metric_rows(), key=lambda row: row.theme):
        lines += ["", f"## {theme[0].upper()}{theme[1:]}", ""]
        lines += ["| metric | what | unit | healthy | when | elsewhere |", "|" + "---|" * 6]
        for row in rows:
            others = [
                f"{name.system} `{name.there}`"
                + (f" ({name.here})" if name.here != row.name else "")
                for name in elsewhere(row)
            ]
            cells = (
                f"`{row.name}`",
                row.formula,
                row.unit,
                row.healthy,
                row.when,
                ", ".join(others),
            )
            lines.append(_cells(*cells))
    return "\n".join([*lines, *warnings_table()]) + "\n"


def warnings_table() -> list[str]:
    lines = [
        "",
        "## Warnings",
        "",
        "`train_ppo_ray` looks at these metrics after every step and says once what is wrong: on the",
        "terminal, in `summary.json` under `alarms`, and in trackers that show warnings. `--on_alarm`",
        "makes it save a checkpoint or stop too. None turns a limit off.",
        "",
        "| warning | limit | | what to try |",
        "|---|---|---|---|",
    ]
    limits = {spec.name: spec for spec in flags_of(HealthFlags)}
    for check in CHECKS:
        limit = limits[check.flag]
        flag = f"`--{check.flag} {default_text(limit)}`"
        lines.append(_cells(f"`{check.name}`", flag, limit.help, check.remedy))
    return lines


def algorithms_page() -> str:
    """The page as it is written by hand up to the mark, then one table per registry and the
    presets."""
    lines = [ALGORITHMS_PAGE.read_text("utf-8").partition(MARK)[0] + MARK]
    specs = collect_flags(PPOConfig)
    for chooser in [s for s in specs if s.registry]:
        lines += [
            f"## --{chooser.name}",
            "",
            "| name | what | source | needs | suggests | its flags |",
            "|" + "---|" * 6,
        ]
        for entry in chooser.registry.entries():
            own = [
                s.name for s in specs if s.path[0] == chooser.name and entry.name in s.components
            ]
            cells = [
                f"`{entry.name}`",
                summary(entry.component),
                " ".join(sources(entry.component)),
            ]
            cells.append(", ".join(sorted(entry.needs)))
            cells += [" ".join(f"`--{k} {plain(v)}`" for k, v in entry.suggests.items())]
            cells += [" ".join(f"`--{name}`" for name in own)]
            lines.append(_cells(*cells))
        lines.append("")
    lines += ["## --algo_preset", "", "| name | flags |", "|---|---|"]
    for name, preset in PRESETS.items():
        lines.append(f"| `{name}` | `{' '.join(f'--{k} {plain(v)}' for k, v in preset.items())}` |")
    return "\n".join(lines) + "\n"


def verifiers_page() -> str:
    """The page as it is written by hand up to the mark, then the verifiers and their options."""
    lines = [VERIFIERS_PAGE.read_text("utf-8").partition(MARK)[0] + MARK, "## All of them", ""]
    lines += ["| name | checks | label | reward with the default options | parts |"]
    lines += ["|---|---|---|---|---|"]
    for entry in verifiers.entries():
        said = describe(entry.component)
        lines.append(
            _cells(
                f"`{entry.name}`",
                *map(_shown, (said.checks, said.label.rstrip("."), said.reward)),
                ", ".join(f"`{part}`" for part in said.parts),
            )
        )
    return "\n".join([*lines, *options_table(verifiers, "verifier")]) + "\n"


def environments_page() -> str:
    """The page as it is written by hand up to the mark, then the environments and their options."""
    lines = [ENVIRONMENTS_PAGE.read_text("utf-8").partition(MARK)[0] + MARK, "## All of them", ""]
    lines += ["| name | rules | rewards |", "|---|---|---|"]
    for entry in environments.entries():
        rewards = " ".join((entry.component.__doc__ or "").split())
        lines.append(_cells(f"`{entry.name}`", _shown(entry.component.rules), _shown(rewards)))
    return "\n".join([*lines, *options_table(environments, "environment")]) + "\n"


def options_table(registry: Registry[Any], kind: str) -> list[str]:
    lines = ["", "## Options", "", f"| {kind} | option | default | meaning |", "|---|---|---|---|"]
    for entry in registry.entries():
        for spec in flags_of(entry.options) if entry.options else ():
            shown = f"`{spec.name} {placeholder(spec.type)}`".replace(" `", "`")
            bounds = f" Must be {spec.bounds}." if spec.bounds else ""
            meaning = _shown(spec.help + bounds)
            default = "required" if spec.default is REQUIRED else f"`{show(spec.default)}`"
            lines.append(_cells(f"`{entry.name}`", shown, default, meaning))
    return lines


def _shown(text: str) -> str:
    """Tags as text, not as HTML."""
    return re.sub(r"<(?=[\w/|])", "&lt;", text)


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def plain(value: object) -> str:
    return value if isinstance(value, str) else show(value)


def sources(component: object) -> list[str]:
    """Links to the papers that a component's functions name."""
    functions = (
        [component]
        if callable(component) and inspect.isroutine(component)
        else vars(component).values()
    )
    text = " ".join(f.__doc__ or "" for f in functions if inspect.isroutine(f))
    return [
        f"[{u.rpartition('/')[2]}]({u})"
        for u in dict.fromkeys(re.findall(r"https?://[^\s,;:)]+[^\s,;:).]", text))
    ]


def undescribed() -> Iterator[str]:
    """Components without a row in the tables written by hand: their formula, when to use them, what
    differs elsewhere."""
    rows = re.findall(
        r"^\| (`.*?`) \|", ALGORITHMS_PAGE.read_text("utf-8").partition(MARK)[0], re.MULTILINE
    )
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    for chooser in [
        s for s in collect_flags(PPOConfig) if s.registry in (advantage_estimators, policy_losses)
    ]:
        yield from (
            f"docs/algorithms.md: no row on {n}" for n in chooser.registry.names() if n not in told
        )


def broken_references() -> Iterator[str]:
    """Links and paths in code marks that lead nowhere, in every page under version control."""
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in tracked.stdout.decode().split():
        page = ROOT / name
        for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
            links = [
                t for t in LINK.findall(line) if "://" not in t and not t.startswith("mailto:")
            ]
            targets = [page.parent / t for t in links] + [
                ROOT / t for t in PATH_IN_CODE.findall(line)
            ]
            yield from (
                f"{name}:{number}: no such file: {t.relative_to(ROOT)}"
                for t in targets
                if not t.exists()
            )


def build_site(folder: Path) -> bool:
    """Return whether mkdocs built the site without a complaint."""
    words = ["build", "--strict", "--quiet", "--config-file", ROOT / "mkdocs.yml"]
    # the theme's makers advertise in every build otherwise
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    line = [sys.executable, "-m", "mkdocs", *words, "--site-dir", folder]
    return subprocess.run(line, cwd=ROOT, check=False, env=env).returncode == 0


def main(check_only: bool) -> int:
    problems: list[str] = []
    pages = (
        (FLAGS_PAGE, flags_page()),
        (METRICS_PAGE, metrics_page()),
        (ALGORITHMS_PAGE, algorithms_page()),
        (VERIFIERS_PAGE, verifiers_page()),
        (ENVIRONMENTS_PAGE, environments_page()),
        *((coming_from(entry.name), system_page(entry.name)) for entry in config_tables.entries()),
        *((ROOT / "docs" / "drawings" / f"{name}.svg", draw()) for name, draw in DRAWINGS.items()),
    )
    for page, text in pages:
        if not check_only:
            page.parent.mkdir(exist_ok=True)
            page.write_text(text, "utf-8")
        elif not page.exists() or page.read_text("utf-8") != text:
            problems.append(
                f"{page.relative_to(ROOT)} does not show the present flags; run `make docs`"
            )
    problems += [*broken_references(), *undescribed()]
    print("\n".join(problems) or "docs: all references lead somewhere")
    return bool(problems) or not (check_only or build_site(ROOT / "site"))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
