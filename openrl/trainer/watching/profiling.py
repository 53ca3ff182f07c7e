"""--profile_steps: writes profiles of the training ranks in some steps to files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from openrl.cluster.group import RankGroup
from openrl.config.groups.logging import DebugFlags
from openrl.training.profiler import ProfileTool
from openrl.waiting import all_or_first_error


@dataclass(frozen=True)
class Profiling:
    """Profiles steps: ``async with profiling.step(3, groups): ...`` writes one file per rank of the
    groups if step 3 is one of ``steps``."""

    directory: Path = Path()  # absolute
    tool: ProfileTool | None = None
    steps: tuple[int, ...] = ()

    @classmethod
    def of(cls, flags: DebugFlags, run_dir: str) -> Profiling:
        directory = Path(run_dir).expanduser().absolute() / "profile"
        return cls(directory, flags.profile_tool, flags.profile_steps)

    @asynccontextmanager
    async def step(self, step: int, groups: Iterable[RankGroup]) -> AsyncIterator[None]:
        if self.tool is None or step not in self.steps:
            yield
            return
        groups = dict.fromkeys(groups)  # a policy may be its own reference
        await all_or_first_error(group.call("start_profile", self.tool) for group in groups)
        yield
        where = str(self.directory / f"step_{step}")
        await all_or_first_error(group.call("end_profile", where) for group in groups)
