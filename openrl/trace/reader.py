"""Reads the trace of a run: what was played, and what training found out about it.

    trace = Trace("runs/quickstart/grpo")
    rows = trace.index()                       a list for each column, one entry per trajectory
    worst = min(range(len(rows["reward"])), key=lambda row: rows["reward"][row])
    whole = trace.trajectory(rows["step"][worst], rows["number"][worst])
    siblings = trace.group(rows["step"][worst], rows["number"][worst])

A trace can be read while its run goes on, and after the run was killed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from openrl.errors import UserError
from openrl.trace.index import NAME, Columns, fold, read_lines
from openrl.trace.places import eval_path, images_dir, learned_path, played_path, read_pieces
from openrl.trace.rows import groups_of, prompt_of
from openrl.types import Image, Prompt, PromptGroup

HOW_TO_GET_ONE = (
    "train_ppo_ray writes one under --save_path, unless --trace_sample_rate is 0;"
    " --rollout_dump_dir writes a whole one elsewhere"
)
_OF_TOKENS = (
    "trained",
    "ages",
    "advantages",
    "returns",
    "values",
    "old_logprobs",
    "ref_logprobs",
    "weights",
    "updates",
)
_OF_ROWS = ("shaped", "estimate", "loss_weight")


def find_trace(run: Path) -> Path:
    """Return the directory of a run's trace. ``run`` is the run's directory or the trace's own.
    Raises UserError if it is no run, or one without a trace."""
    for directory in chain((run / "trace", run), _dump_dir(run)):
        if (directory / NAME).is_file():
            return directory
    if not run.is_dir():
        raise UserError(f"no such directory: {run}", "the --save_path of a run")
    if not (run / "config.yaml").is_file() and not (run / "metrics.jsonl").is_file():
        raise UserError(f"{run} is not the directory of a run", "the --save_path of a run")
    raise UserError(f"{run} has no trace", HOW_TO_GET_ONE)


@dataclass(frozen=True)
class PlayedStep:
    """The groups of a training step as they were played."""

    groups: list[PromptGroup]
    trained: list[int]  # places of the groups that --dynamic_filtering let through
    version: int  # of the weights that the step trained
    counts: dict[str, float]  # the buffer's metrics


@dataclass(frozen=True)
class KeptGroup:
    """A group of a training step, as the trace keeps it."""

    step: int
    place: int  # in the step
    numbers: list[int]  # of its trajectories
    group: PromptGroup


def _dump_dir(run: Path) -> Iterator[Path]:
    """Yield the directory of --rollout_dump_dir, if the run had one. Raises UserError if its flags
    cannot be read."""
    config = run / "config.yaml"
    if config.is_file():
        import yaml

        try:
            flags = yaml.safe_load(config.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            remedy = "the directory that the run had as --rollout_dump_dir, if it had one"
            message = f"{run} has no folder trace, and {config.name} cannot be read"
            raise UserError(message, remedy) from error
        if isinstance(flags, dict) and (directory := flags.get("rollout_dump_dir")):
            yield Path(directory).expanduser()


class Images(dict[str, Image]):
    """The images of a trace by hash, each read when it is first asked for."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __missing__(self, sha256: str) -> Image:
        try:
            image = self[sha256] = Image(self.trace.image(sha256), sha256)
        except OSError as error:
            message = f"the trace lacks an image: {error}"
            raise UserError(message, "another step, or a copy of the file") from error
        return image


class Trace:
    """The trace of a run. ``problems`` says, in a sentence each, what could not be read."""

    def __init__(self, run_dir: Path | str) -> None:
        """Raises UserError if there is no trace, or one of another format."""
        self.directory = find_trace(Path(run_dir).expanduser())
        lines = read_lines(self.directory)
        self.problems, self._records = lines.problems, lines.records

    def index(self) -> Columns:
        """Return one entry per kept trajectory in every list: "step", "number" and the others of
        ``openrl.trace.index.COLUMNS``. None stands for what was not measured.

        step              the training step; evaluations have that of the step before them
        number            identifies the trajectory within its step, evaluations included
        tag               train, filtered (turned down by --dynamic_filtering), replayed (played in
                          an earlier step, see --replay_groups) or evaluation
        version           of the weights that the step trained or evaluated
        group, member     place of its prompt in the step, and its own among its siblings
        role              answer; greedy, a baseline; failed, an attempt that was played again
        prompt_id, source, agent
        reward, parts, passed     None, {} and None if nothing judged it; a reward that failed is
                                  None too
        end               why it ended, a value of FinishReason
        failure           why the infrastructure or the reward failed, or None
        tokens, prompt_tokens, turns, segments    sampled tokens; tokens before the first of them
        replays           how often it was played again after a failure of the infrastructure
        engine, seconds   rank of the engine, and how long the episode took; None if unknown
        tool_calls        how often it called a tool
        policy_versions   oldest and newest weights that sampled it; [] if unknown
        flat              all rewards of its group are equal
        prompt            the last HEAD characters of the prompt
        text              the first HEAD characters of the response, which has "chars" of them

        and, once the step has trained, of the tokens that it trained:
        trained_tokens, advantage (mean), age (largest, in syncs), gap_mean and gap_max
        (abs(trainer's log-prob - engine's)), entropy (mean), weight (mean importance weight),
        clipped (share), loss (sum over tokens before the division), optimizer_step (of the first
        update on it; 1 is the step's first)"""
        return self._columns

    @cached_property
    def _columns(self) -> Columns:
        return fold(self._records)

    def trajectory(self, step: int, number: int) -> dict[str, Any]:
        """Return everything about one trajectory. Raises UserError if the trace does not have it.

        The keys are those of the columns "number" to "source" above, "step", and:

        prompt, text      whole texts; "label" and "meta": the columns of its row
        end, turns, replays, failure, fault, agent, seed, metrics, engine, sampling_seed, seconds,
        tool_uses         as in ``types.Trajectory``
        score             None, or a dict: reward, passed, parts, attempts, failure, token_rewards,
                          seconds
        rendered          one dict per turn, for people: messages (dicts of role, text and the
                          hashes of its images), frame (hash of the picture that the environment
                          drew, or None), action and reward; [] if it was not recorded
        shaped            the reward after shaping; "estimate": what the estimator made of it,
                          before token rewards and whitening; "loss_weight": factor on its loss
        segments          one dict per token row, whose lists all have L entries:
            token_ids, pieces            ids, and the text of each token
            loss_mask                    True where the policy sampled
            rollout_logprobs             of the engine, 0 elsewhere
            turns                        number of the turn, -1 outside of loss_mask
            versions                     of the weights that sampled the token, -1 if unknown
            state, images, kept          as in ``types.Segment``; images as dicts with sha256, kept
                                         as a dict of sizes and ids, or None
            privileged                   what a teacher read in place of the beginning: a dict of
                                         length, token_ids and images, or None
            trained                      True where the loss counted the token
            ages                         in syncs, -1 if unknown
            advantages, returns, values, old_logprobs, ref_logprobs, weights
            updates                      one dict per optimizer step on it: optimizer_step, and the
                                         lists logprobs, entropies, losses, weights, clipped (1 or
                                         0)

        "trained" and what follows, as well as "shaped", "estimate" and "loss_weight", are None as
        long as the step has not trained on it, and where nothing of the kind was computed."""
        return self._whole(step, self._row(step, number), self._learned(step, number))

    def trajectories(self, step: int) -> Iterator[dict[str, Any]]:
        """Yield what ``trajectory`` returns on each trajectory of a step, evaluations included, as
        far as the trace still holds them and their files can be read."""
        learned: dict[int, dict[int, Mapping[str, Any]]] = {}
        for row in self._table(learned_path(self.directory, step)):
            learned.setdefault(row["number"], {})[row["segment"]] = row
        for of in (played_path, eval_path):
            for row in self._table(of(self.directory, step)):
                yield self._whole(step, row, learned.get(row["number"], {}))

    def group(self, step: int, number: int) -> list[dict[str, Any]]:
        """Return the index's entries, as dicts, of all trajectories of the same prompt in the same
        step: the trajectory itself and its siblings, in the order in which they were played."""
        columns = self.index()
        chosen = [n for n, s in enumerate(columns["step"]) if s == step]
        mine = next((n for n in chosen if columns["number"][n] == number), None)
        if mine is None:
            raise self._missing(step, number)
        group, evaluated = columns["group"][mine], columns["tag"][mine] == "evaluation"
        return [
            {name: column[n] for name, column in columns.items()}
            for n in chosen
            if columns["group"][n] == group and (columns["tag"][n] == "evaluation") == evaluated
        ]

    def texts(self, step: int) -> list[tuple[int, str]]:
        """Return the number of each trajectory of a step with its prompt and response, as far as
        the trace still holds them and their files can be read."""
        return [
            (row["number"], f"{row['prompt']}\n{row['text']}")
            for of in (played_path, eval_path)
            for row in self._table(of(self.directory, step), ["number", "prompt", "text"])
        ]

    def image(self, sha256: str) -> bytes:
        """Return the file of an image that a trajectory holds."""
        return (images_dir(self.directory) / sha256).read_bytes()

    # -- replay ------------------------------------------------------------------------------------

    @cached_property
    def _played(self) -> dict[int, dict[str, Any]]:
        return {r["step"]: r for r in self._records if r["event"] == "played"}

    def is_whole(self, step: int) -> bool | None:
        """Return whether the trace has every trajectory of a training step; None if it has none."""
        record = self._played.get(step)
        if record is None or not played_path(self.directory, step).is_file():
            return None
        return len(record["kept"]) == record["groups"]

    def replay(self, step: int, prompts: Iterable[Prompt]) -> PlayedStep:
        """Return the groups that a step generated, equal to those that it trained on. Raises
        KeyError if ``prompts`` lack one."""
        record, known = self._played[step], {prompt.id: prompt for prompt in prompts}
        groups = groups_of(self._new_rows(step), known, self._images)
        return PlayedStep(groups, record["trained"], record["version"], record["counts"])

    def steps(self) -> list[int]:
        """Return the training steps whose trajectories the trace holds."""
        return [step for step in self._played if played_path(self.directory, step).is_file()]

    def kept(self, step: int) -> list[KeptGroup]:
        """Return the groups of a training step that the trace keeps. Their prompts lack what only
        the data has, such as messages."""
        rows, images = self._new_rows(step), self._images
        prompts = {row["prompt_id"]: prompt_of(row, images) for row in reversed(rows)}
        numbers: dict[int, list[int]] = {row["group"]: [] for row in rows}
        for row in rows:
            if row["role"] == "answer":
                numbers[row["group"]].append(row["number"])
        groups = groups_of([row | {"made": None} for row in rows], prompts, images)
        both = zip(sorted(numbers), groups, strict=True)
        return [KeptGroup(step, place, numbers[place], group) for place, group in both]

    def _new_rows(self, step: int) -> list[dict[str, Any]]:
        """Return the rows of what was played for a training step, without replays of earlier
        ones."""
        from openrl.trace.tables import read_table

        rows = read_table(played_path(self.directory, step))
        return [row for row in rows if row["tag"] != "replayed"]

    @cached_property
    def _images(self) -> Images:
        return Images(self)

    # -- reading -----------------------------------------------------------------------------------

    def _table(self, path: Path, columns: list[str] | None = None) -> list[dict[str, Any]]:
        """Return the rows of a file; none if there is none, or with an entry in ``problems`` if it
        is damaged."""
        from openrl.trace.tables import read_table

        try:
            return read_table(path, columns) if path.is_file() else []
        except UserError as error:
            if error.message not in self.problems:
                self.problems.append(error.message)
            return []

    def _row(self, step: int, number: int) -> dict[str, Any]:
        """Return the row as it was played."""
        from openrl.trace.tables import read_where

        for record in self._records:
            if record["step"] != step or record["event"] == "learned":
                continue
            if number in record["rows"]["number"]:
                of = eval_path if record["event"] == "evaluated" else played_path
                if (path := of(self.directory, step)).is_file():
                    return read_where(path, number)[0]
                message = f"the trace no longer holds the trajectories of step {step}"
                raise UserError(message, "another step, or a higher --trace_keep_steps")
        raise self._missing(step, number)

    def _whole(
        self, step: int, row: dict[str, Any], learned: Mapping[int, Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return what ``trajectory`` returns. ``learned`` are the rows on its segments."""
        found = {"rendered": [], **row, "step": step, "label": json.loads(row["label"])}
        found["meta"] = json.loads(row["meta"])
        del found["made"]
        found |= {name: learned.get(0, {}).get(name) for name in _OF_ROWS}
        found["segments"] = [
            self._segment(segment, learned.get(place, {}))
            for place, segment in enumerate(row["segments"])
        ]
        return found

    def _missing(self, step: int, number: int) -> UserError:
        """Return the error of a trajectory that nothing tells of."""
        steps = sorted({record["step"] for record in self._records})
        fix = f"a step from {steps[0]} to {steps[-1]}" if steps else "a run with a finished step"
        if step in steps:
            fix = f"one of the numbers that --step {step} --limit 0 lists"
        return UserError(f"the trace has no trajectory {number} of step {step}", fix)

    def _learned(self, step: int, number: int) -> dict[int, Mapping[str, Any]]:
        """Return what was learned about a trajectory, by segment."""
        from openrl.trace.tables import read_where

        path = learned_path(self.directory, step)
        rows = read_where(path, number) if path.is_file() else []
        return {row["segment"]: row for row in rows}

    def _segment(self, segment: dict[str, Any], learned: Mapping[str, Any]) -> dict[str, Any]:
        versions = [-1] * len(segment["token_ids"])
        for span in segment["versions"]:
            width = span["end"] - span["start"]
            versions[span["start"] : span["end"]] = [span["version"]] * width
        return segment | {
            "pieces": [self._pieces.get(token, f"<{token}>") for token in segment["token_ids"]],
            "turns": _turns(segment["loss_mask"]),
            "versions": versions,
            **{name: learned.get(name) for name in _OF_TOKENS},
        }

    @cached_property
    def _pieces(self) -> dict[int, str]:
        return read_pieces(self.directory)


def _turns(loss_mask: list[bool]) -> list[int]:
    """Return the number of each token's run of sampled tokens, -1 outside of them."""
    turns, turn, before = [], -1, False
    for sampled in loss_mask:
        turn += sampled and not before
        turns.append(turn if sampled else -1)
        before = sampled
    return turns
