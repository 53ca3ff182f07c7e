"""Builds reward sources from flags, and checks them before the start."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from transformers import PreTrainedTokenizerBase

from openrl.config.groups.reward import RewardFlags, RewardSourceFlags
from openrl.config.reward_plan import RewardPlan, RewardSource, source_kwargs
from openrl.errors import UserError
from openrl.extension_points import verifiers
from openrl.processes.child import CallFailed, ChildProcess, Limits
from openrl.processes.pool import ProcessPool
from openrl.processes.worker import Target
from openrl.rewards.combined import CombinedReward, RewardCombiner
from openrl.rewards.http import HttpSource
from openrl.rewards.http_client import CONNECT_TIMEOUT, JsonClient, ServiceUrls
from openrl.rewards.reward_rows import RewardRows
from openrl.rewards.sources import ProcessSource, Source
from openrl.rewards.verifiers.base import needs_label
from openrl.rewards.worker import FileTarget, VerifierTarget
from openrl.types import Prompt

LOOKED_AT = 500  # rows whose labels are checked before the start


@dataclass(frozen=True)
class RewardSetup:
    """What a process needs to know to build its rewards."""

    flags: RewardFlags
    plan: RewardPlan
    token: str | None = None  # the bearer token of reward servers
    optional: bool = False  # answers that nobody scores have the reward 0


def build_reward(
    setup: RewardSetup,
    tokenizer: PreTrainedTokenizerBase,
    *,
    engines: int = 1,
    plugins: tuple[str, ...] = (),
    models: Mapping[str, Source] | None = None,
) -> CombinedReward | None:
    """Return the reward that runs next to an engine, which is one of ``engines``. It combines all
    sources except reward models; those take part only if they are given as ``models``. Return None
    without any source. Nothing starts before the first call."""
    flags, plan, token = setup.flags, setup.plan, setup.token
    size = max(1, flags.reward_num_workers // engines)
    executor = ThreadPoolExecutor(size, thread_name_prefix="reward")
    sources: dict[str, Source] = {
        **process_sources(flags, plan.all_sources, plugins, executor, size),
        **(models or {}),
    }
    for s in plan.sources:
        if s.kind == "http":
            timeout, attempts = flags.reward_timeout, flags.reward_max_retries
            client = JsonClient(
                ServiceUrls(s.urls), timeout=timeout, attempts=attempts, token=token
            )
            sources[s.name] = HttpSource(client)
    if not sources:
        return None
    combiner = RewardCombiner(plan, flags.reward_failure_policy)
    skip = flags.reward_skip_special_tokens
    return CombinedReward(combiner, sources, tokenizer, skip_special_tokens=skip, executor=executor)


def process_sources(
    flags: RewardSourceFlags,
    sources: tuple[RewardSource, ...],
    plugins: tuple[str, ...],
    executor: Executor,
    size: int,
) -> dict[str, ProcessSource]:
    """Return the files and verifiers among ``sources``, by name. The number of threads in
    ``executor`` limits how many calls run at a time."""
    made: dict[str, ProcessSource] = {}
    for target, names in targets(flags, sources, plugins):
        pool = ProcessPool(target, size, limits(flags), "reward", executor)
        made |= {name: ProcessSource(name, pool) for name in names}
    return made


def limits(flags: RewardSourceFlags) -> Limits:
    memory = int(flags.reward_memory_gb * 2**30)
    return Limits(flags.reward_timeout, memory, "--reward_timeout", "--reward_memory_gb")


def targets(
    flags: RewardSourceFlags, sources: tuple[RewardSource, ...], plugins: tuple[str, ...]
) -> list[tuple[Target, list[str]]]:
    """Return the targets that processes run, each with the names of the sources it serves. There is
    one target per file, and one for all verifiers."""
    kwargs = source_kwargs(flags, sources)
    found: list[tuple[Target, list[str]]] = [
        (FileTarget(s.name, *s.file, kwargs[s.name], plugins), [s.name])
        for s in sources
        if s.kind == "file"
    ]
    options: Mapping[str, Any] = {s.name: kwargs[s.name] for s in sources if s.kind == "verifier"}
    return [*found, (VerifierTarget(options, plugins), list(options))] if options else found


def check_reward_sources(
    flags: RewardSourceFlags, sources: tuple[RewardSource, ...], plugins: tuple[str, ...]
) -> None:
    """Load each file, and the verifiers, once in a separate process, and connect to the servers.

    Raises UserError, listing all problems, if a source does not load, lacks its function or does
    not take its arguments, or if none of the URLs of a server can be reached."""
    problems = []
    for target, _ in targets(flags, sources, plugins):
        try:
            with ChildProcess(target, limits(flags), "reward") as process:
                process.start()
        except UserError as error:
            problems.append(str(error))
    for source in sources:
        if source.kind == "http":
            silent = [problem for url in source.urls if (problem := connection_problem(url))]
            if len(silent) == len(source.urls):
                problems.append(f"--remote_rm_url: no server answers: {'; '.join(silent)}")
    if problems:
        raise UserError("\n".join(problems))


def connection_problem(url: str) -> str | None:
    """Say why the host of ``url`` takes no connection; None if it does."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), CONNECT_TIMEOUT).close()
    except OSError as error:
        return f"{url}: {error}"
    return None


def check_labels(
    flags: RewardFlags, plan: RewardPlan, prompts: Sequence[Prompt], plugins: tuple[str, ...]
) -> None:
    """Raise UserError if a verifier cannot read the labels, or what else it needs, of more rows
    than may fail. It judges empty responses to the first ``LOOKED_AT`` rows."""
    watched, labelled = {s.name for s in plan.watched}, comparing(flags, plan)
    for name, options in reading_rows(flags, plan).items():
        tried = [p for p in prompts if name in watched or name in plan.of(p.source)][:LOOKED_AT]
        target = VerifierTarget({name: options}, plugins)
        try:
            with ChildProcess(target, limits(flags), "reward") as process:
                scores = process.call((name, rows_without_response(tried)))
        except CallFailed:
            continue  # a few slow rows are left to the run itself
        bad = [(p, s.failure) for p, s in zip(tried, scores, strict=True) if s.failure is not None]
        if len(bad) > flags.max_reward_failure_rate * len(tried):
            first, failure = bad[0]
            raise UserError(
                f"--{'watch' if name in watched else 'reward'}_funcs {name} cannot use"
                f"{' the label of' if name in labelled else ''} {len(bad)} of {len(tried)} rows,"
                f" e.g. of {first.id}: {failure}",
                "--label_key COLUMN, or another verifier",
            )


def reading_rows(flags: RewardFlags, plan: RewardPlan) -> dict[str, dict[str, Any]]:
    """Return the verifiers that need a label or another part of a row, each with its options."""
    options = source_kwargs(flags, plan.all_sources)
    reading = {
        s.name: options[s.name]
        for s in plan.all_sources
        if s.kind == "verifier" and "row" in verifiers[s.address].needs
    }
    return comparing(flags, plan) | reading


def comparing(flags: RewardFlags, plan: RewardPlan) -> dict[str, dict[str, Any]]:
    """Return the verifiers that need a label, each with its options."""
    options = source_kwargs(flags, plan.all_sources)
    return {
        s.name: options[s.name]
        for s in plan.all_sources
        if s.kind == "verifier" and needs_label(verifiers[s.address].component, options[s.name])
    }


def rows_without_response(prompts: Sequence[Prompt]) -> RewardRows:
    texts, nothing = [prompt.text for prompt in prompts], [""] * len(prompts)
    return RewardRows(
        queries=texts,
        prompts=texts,
        labels=[prompt.label for prompt in prompts],
        responses=nothing,
        texts=nothing,
        token_ids=[[] for _ in prompts],
        sources=[prompt.source for prompt in prompts],
        metas=[prompt.meta for prompt in prompts],
        images=[[placed.image.data for placed in prompt.images] for prompt in prompts],
    )


def check_prompts(flags: RewardFlags, plan: RewardPlan, prompts: Sequence[Prompt]) -> None:
    """Raise UserError for rows whose data source has no route, and for rows without the label that
    a verifier compares with: no answer to them could be judged."""
    plan.check_routes(prompt.source for prompt in prompts)
    wanted = comparing(flags, plan)
    idle = [
        p
        for p in prompts
        if p.label in (None, "") and not wanted.keys().isdisjoint(plan.of(p.source))
    ]
    if idle:
        names = ", ".join(s.name for s in plan.sources if s.name in wanted)
        raise UserError(
            f"--reward_funcs {names} needs labels, but {len(idle)} of {len(prompts)} rows have"
            f" none ({', '.join(p.id for p in idle[:5])}{' ...' if len(idle) > 5 else ''})",
            (
                "--label_key COLUMN"
                if len(idle) == len(prompts)
                else "fix these rows, or route them with --reward_routing"
            ),
        )
