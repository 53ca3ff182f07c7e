"""evaluate: mean@k, pass@k and maj@k over any prompts and any reward."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from openrl.config.commands import EvaluateConfig
from openrl.errors import UserError
from openrl.files import write_atomically
from openrl.flags.dump import effective_flags
from openrl.inference.answering import (
    AnsweringInputs,
    make_units,
    open_answering,
    output_settings,
    read_inputs,
    run_units,
)
from openrl.inference.episodes import open_episodes, prompts_in
from openrl.inference.output import Output, Row
from openrl.rewards.at_k import metrics_at_k, powers_of_two, vote
from openrl.tracking.console import PlainConsole

ALL = "all"  # the name for all data sources together
# flags that only change how existing answers are counted
COUNTING = frozenset({"k", "pass_threshold"})


def prepare(config: EvaluateConfig) -> AnsweringInputs:
    """Read and check all inputs, and find out what is already done. Raises UserError."""
    read = read_inputs(config, config.rm.reward_pretrain, config.sampling.prompt_max_len)
    units = make_units([prompt] for prompt in read.prompts)
    output = None
    if config.task.output_path is not None:
        figures = Path(config.task.output_path)
        ids, settings = [unit.id for unit in units], output_settings(config, COUNTING)
        count = config.task.n_samples_per_prompt
        output = Output(figures.with_suffix(".jsonl"), ids, count, settings, figures)
    if (kept := trace_dir(config)) and (held := prompts_in(kept)) is not None:
        if output and output.done:
            output.forget(held)  # it was killed before the trace had all of them
        elif held:
            message = f"--rollout_dump_dir: {kept} holds the trace of an earlier run"
            raise UserError(message, "another directory")
    return replace(read, units=units, output=output)


def trace_dir(config: EvaluateConfig) -> Path | None:
    given = config.task.rollout_dump_dir
    return None if given is None else Path(given).expanduser()


async def run(config: EvaluateConfig, inputs: AnsweringInputs) -> None:
    """Answer, score and count; print the table and write the figures."""
    console = PlainConsole()
    for line in inputs.reports:
        console.print(line)
    rows = await answer_all(config, inputs, console)
    figures = summarise(rows, ks(config), config.task.pass_threshold, config.data.output_key)
    console.print(table(figures, config.model.pretrain))
    failed = sum("failure" in row for row in rows)
    if failed:
        first = next(row for row in rows if "failure" in row)
        console.print(
            f"{failed} of {len(rows)} answers have no reward, first {first['id']}:"
            f" {first['failure']}"
        )
    if config.task.pass_threshold is None and not any("passed" in row for row in rows):
        console.print("no answer has a verdict: --pass_threshold says which rewards are right")
    if config.task.output_path is not None:
        path = Path(config.task.output_path)
        document = {
            "figures": figures,
            "failed_answers": failed,
            "answers": len(rows),
            "flags": effective_flags(config),
        }
        write_atomically(path, json.dumps(document, indent=1) + "\n")
        console.print(f"{path}, answers in {path.with_suffix('.jsonl')}")
    if rows and failed / len(rows) > config.reward.max_reward_failure_rate:
        raise UserError(
            f"{failed} of {len(rows)} answers have no reward: too many to trust the figures",
            "fix the reward",
        )


async def answer_all(
    config: EvaluateConfig, inputs: AnsweringInputs, console: Console
) -> list[Row]:
    """Return the rows of all answers, including those of an earlier run."""
    output = inputs.output
    rows = list(output.kept) if output else []
    if output and output.done == len(inputs.units):
        return rows
    backend = config.engine.rollout_backend
    done = output.done if output else 0
    with open_episodes(trace_dir(config), inputs.tokenizer, done) as episodes:
        async with open_answering(config, inputs, backend) as work:
            async for unit in run_units(inputs.units, work, output, console):
                if output:
                    output.write(unit.rows)
                if episodes:  # after the output, which says what a later run plays
                    episodes.add(unit.group)
                rows += unit.rows
    return rows


def ks(config: EvaluateConfig) -> list[int]:
    """Return the values of k in ascending order."""
    n = config.task.n_samples_per_prompt
    return sorted({*config.task.k}) or powers_of_two(n)


def summarise(
    rows: Sequence[Row], ks: Sequence[int], threshold: float | None, response: str
) -> dict[str, dict[str, Any]]:
    """Return the figures of each data source and of all together, {source: {"prompts": 3, "mean@4":
    0.5, "pass@1": ..., "maj@1": ...}}.

    The mean is of each answer's verdict ``passed``, or else of its reward. An answer is right from
    ``threshold`` on; without one it is right from the verdict 1, and answers that have only a
    reward are left out of pass@k and maj@k. Answers whose reward failed are left out. Prompts with
    fewer than k other answers are left out of the figures of k (``prompts@k`` says how many
    remain). If no answer votes there is no maj@k. If several agents share an episode, each counts
    as answering a prompt of its own.
    """
    voted = any(vote(row[response]) is not None for row in rows)
    shared = {row["id"] for row in rows if "agent" in row}
    by_prompt: dict[tuple[str, str | None], list[Row]] = {}
    for row in rows:
        if "agent" in row or row["id"] not in shared:  # an episode that failed is of no agent
            by_prompt.setdefault((row["id"], row.get("agent")), []).append(row)
    figures: dict[str, dict[str, list[float]]] = {ALL: {}}  # present even if no answer has a reward
    counts: dict[str, int] = {ALL: 0}
    for answers in by_prompt.values():
        for source in dict.fromkeys((ALL, answers[0]["source"])):
            counts[source] = counts.get(source, 0) + 1
            for name, value in prompt_figures(answers, ks, threshold, response).items():
                if name.startswith("maj@") and not voted:
                    continue
                figures.setdefault(source, {}).setdefault(name, []).append(value)
    return {
        source: (
            {"prompts": counts[source]}
            | {name: fmean(values) for name, values in of_source.items()}
            | {
                f"prompts@{k}": len(of_source[f"pass@{k}"])
                for k in ks
                if 0 < len(of_source.get(f"pass@{k}", ())) < counts[source]
            }
        )
        for source, of_source in figures.items()
    }


def prompt_figures(
    answers: Sequence[Row], ks: Sequence[int], threshold: float | None, response: str
) -> dict[str, float]:
    """Return the figures of one prompt."""

    def verdict(row: Row) -> float:
        return float(row["passed"] if "passed" in row else row["reward"])

    judged = [row for row in answers if row.get("reward") is not None]
    if not judged:
        return {}
    mean = {f"mean@{max(ks)}": fmean(map(verdict, judged))}
    counted = [row for row in judged if threshold is not None or "passed" in row]
    votes, verdicts = [vote(row[response]) for row in counted], [verdict(row) for row in counted]
    return mean | metrics_at_k(ks, votes, verdicts, 1.0 if threshold is None else threshold)


def table(figures: dict[str, dict[str, Any]], title: str) -> Table:
    """Return a table of figures and data sources. The longer list runs downwards, so that the table
    fits the terminal; a single source appears only as "all"."""
    sources = [name for name in figures if len(figures) > 2 or name == ALL]
    names = list(figures[ALL])
    cells = [[_cell(figures[source].get(name)) for source in sources] for name in names]
    downwards, across, head = names, sources, "figure"
    if len(sources) > len(names):
        downwards, across, head = sources, names, "data source"
        cells = [list(column) for column in zip(*cells, strict=True)]
    result = Table(head, *across, title=title, padding=(0, 0))
    for name, row in zip(downwards, cells, strict=True):
        result.add_row(name, *row)
    return result


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else str(value)
