"""Where the ranks of a run live: the table of roles and bundles, and what a cluster lacks for it.

A rank occupies one *bundle*: a GPU with a CPU, or with ``--device cpu`` one CPU as a worker slot.
Messages to users call it a place.
Ranks of colocated roles share bundles. An engine that spans several GPUs is one rank on several
neighbouring bundles. The bundles of a *node group* lie on one node. This module is pure: nothing
here knows about Ray."""

from __future__ import annotations

import math
from bisect import bisect, bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import StringIO
from itertools import accumulate, chain

from rich.table import Table

from openrl.config.groups.rollout_engine import ParallelSizes
from openrl.tracking.console import PlainConsole

UNIT = {"cpu": "CPU", "cuda": "GPU"}
NAMED = 8  # the plan lists up to this many multi-bundle engines one by one


@dataclass(frozen=True)
class Node:
    """One machine of the cluster: the CPUs and GPUs it has, and how many of them are free."""

    name: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float

    def free(self, resource: str) -> float:
        return self.free_gpus if resource == "GPU" else self.free_cpus


@dataclass(frozen=True)
class PlacementPlan:
    """The table that maps each role to its bundles, in rank order."""

    device: str  # "cpu" or "cuda"
    # number of bundles in each node group; bundles are numbered consecutively across groups
    node_groups: tuple[int, ...]
    bundles_by_role: dict[str, tuple[int, ...]]
    # only for roles whose ranks have several bundles
    sizes: dict[str, ParallelSizes] = field(default_factory=dict)

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one bundle, the same for all."""
        return {"GPU": 1.0, "CPU": 1.0} if self.device == "cuda" else {"CPU": 1.0}

    @property
    def need(self) -> dict[str, float]:
        """Resources of the whole plan."""
        count = sum(self.node_groups)
        return {resource: amount * count for resource, amount in self.bundle.items()}

    @cached_property
    def _ends(self) -> list[int]:
        """The bundle after the last of each node group."""
        return list(accumulate(self.node_groups))

    @cached_property
    def _tenants(self) -> Counter[int]:
        """How many ranks each bundle has."""
        return Counter(chain.from_iterable(self.bundles_by_role.values()))

    @cached_property
    def _roles(self) -> list[list[str]]:
        """The roles with a rank in each node group."""
        roles: list[list[str]] = [[] for _ in self.node_groups]
        for role, row in self.bundles_by_role.items():
            for group in self.groups_of(row):
                roles[group].append(role)
        return roles

    def group_of(self, bundle: int) -> int:
        """Return the node group that a bundle lies in."""
        return bisect(self._ends, bundle)

    def width(self, role: str) -> int:
        """Return the number of bundles that each rank of a role has."""
        return self.sizes[role].width if role in self.sizes else 1

    def size(self, role: str) -> int:
        """Return the number of ranks of a role."""
        return len(self.bundles_by_role[role]) // self.width(role)

    def of_rank(self, role: str, rank: int) -> tuple[int, ...]:
        """Return the bundles of one rank."""
        width = self.width(role)
        return self.bundles_by_role[role][rank * width : (rank + 1) * width]

    def share(self, bundle: int) -> float:
        """Return the share of a bundle that each rank on it takes. Ray counts in ten-thousandths;
        we round down so that the shares never add up to more than the bundle."""
        return math.floor(1e4 / self._tenants[bundle]) / 1e4

    def groups_of(self, bundles: Iterable[int]) -> list[int]:
        """Return the node groups that the bundles lie in, in order of first appearance."""
        return list(dict.fromkeys(map(self.group_of, bundles)))

    def spans_nodes(self, role: str, rank: int) -> bool:
        return len(self.groups_of(self.of_rank(role, rank))) > 1

    def splits_tensor_group(self, role: str, rank: int) -> bool:
        """Return whether a tensor-parallel group, neighbouring bundles, crosses nodes."""
        own, size = self.of_rank(role, rank), self.sizes[role].tensor
        return any(len(self.groups_of(own[i : i + size])) > 1 for i in range(0, len(own), size))

    def joined_groups(self) -> list[tuple[int, ...]]:
        """Partition the node groups. Groups that one rank spans belong together, since Ray must
        grant them as one placement group."""
        parts = [{group} for group in range(len(self.node_groups))]  # the part of each group
        for role in self.sizes:
            for rank in range(self.size(role)):
                groups = self.groups_of(self.of_rank(role, rank))
                if len(groups) > 1:
                    joined = set().union(*(parts[group] for group in groups))
                    for group in joined:
                        parts[group] = joined
        return sorted(tuple(sorted(part)) for part in {id(part): part for part in parts}.values())

    def show_bundles(self, role: str, rank: int) -> str:
        """Return the bundles of a rank, node by node, e.g. "0-7 and 8-15"."""
        by_group: dict[int, list[int]] = {}
        for bundle in self.of_rank(role, rank):
            by_group.setdefault(self.group_of(bundle), []).append(bundle)
        return " and ".join(map(_ranges, by_group.values()))

    def roles_of(self, group: int) -> str:
        """Return the names of the roles with a rank in this node group, joined by "and"."""
        return " and ".join(self._roles[group])

    def bundles_of(self, role: str) -> frozenset[int]:
        """Return the bundles that a role's ranks occupy."""
        return frozenset(self.bundles_by_role[role])

    def shared(self, role: str) -> bool:
        """Return whether another role has a rank on one of this role's bundles."""
        return any(
            self.bundles_of(role) & self.bundles_of(other)
            for other in self.bundles_by_role
            if other != role
        )

    def local_ranks(self, role: str) -> list[int]:
        """Return each rank's index among the role's ranks of the same node group."""
        seen: dict[int, int] = {}
        ranks = []
        for rank in range(self.size(role)):
            group = self.groups_of(self.of_rank(role, rank))[0]
            ranks.append(seen.get(group, 0))
            seen[group] = ranks[-1] + 1
        return ranks

    def problems(self, cluster: Sequence[Node]) -> list[str]:
        """Describe what the cluster lacks for this plan; empty if the plan fits.

        The assignment is best-fit decreasing. It is exact for a single node and for node groups of
        equal size; otherwise it may reject a plan that a cleverer packing could fit."""
        found = []
        for resource, need in self.need.items():
            largest = max((node.free(resource) for node in cluster), default=0)
            widest: dict[str, int] = {}  # by the roles that a node group holds
            for group, size in enumerate(self.node_groups):
                if size * self.bundle[resource] > largest:
                    roles = self.roles_of(group)
                    widest[roles] = max(size, widest.get(roles, 0))
            found += [
                f"needs {_count(size, resource)} on one node for {roles}, but the largest free node"
                f" has {largest:g}"
                for roles, size in widest.items()
            ]
            free = sum(node.free(resource) for node in cluster)
            if need > free:
                has = f"the cluster has {free:g} free on {_count(len(cluster), 'node')}"
                found.append(f"needs {_count(need, resource)} in all, but {has}")
        return found or self._scattered(cluster)

    def _scattered(self, cluster: Sequence[Node]) -> list[str]:
        """Describe the first node group that finds no node, although there is enough in all."""
        # bundles that each node still has room for
        left = sorted(min(node.free(r) // a for r, a in self.bundle.items()) for node in cluster)
        for group, size in sorted(enumerate(self.node_groups), key=lambda g: -g[1]):
            best = bisect_left(left, size)
            if best == len(left):
                rest = ", ".join(f"{bundles:g}" for bundles in left)
                return [
                    f"needs {_count(size, UNIT[self.device])} on one node for"
                    f" {self.roles_of(group)}, after the other roles the nodes have {rest} free"
                ]
            insort(left, left.pop(best) - size)
        return []

    def notes(self, cores: int) -> list[str]:
        """Return remarks on the plan for one machine with ``cores`` processor cores."""
        slots = sum(self.node_groups)
        if self.device != "cpu" or slots <= cores:
            return []
        where = f"{slots} worker slots on {_count(cores, 'core')}"
        return [f"{where}: ranks share cores, so this is slower, not wrong"]

    def render(self) -> str:
        """Return the plan as a text table with one row per role."""
        unit = UNIT[self.device]
        rows = []
        for role, bundles in self.bundles_by_role.items():
            ranks, width = self.size(role), self.width(role)
            shown = _ranges(bundles) + (f", {width} each" if width > 1 else "")
            if width > 1 and ranks <= NAMED:
                shown = "; ".join(self.show_bundles(role, rank) for rank in range(ranks))
            share = ", ".join(f"{share:g}" for share in sorted({*map(self.share, bundles)}))
            share = share if width == 1 else f"{width} x {share}"
            rows.append((role, str(ranks), self._spread(role), shown, share))
        unit_name = "GPU" if self.device == "cuda" else "worker slot"
        need = ", ".join(_count(amount, resource) for resource, amount in self.need.items())
        header = ("role", "ranks", "nodes x ranks", f"{unit_name}s", f"{unit} per rank")
        return text_table(f"Placement on {self.device}: {need}", header, rows)

    def _spread(self, role: str) -> str:
        """Return the nodes and the ranks on each, "2 x 4". If each rank spans several nodes, the
        second factor is a fraction: "2 x 1/2"."""
        groups, ranks = self.groups_of(self.bundles_by_role[role]), self.size(role)
        if ranks >= len(groups):
            return f"{len(groups)} x {ranks // len(groups)}"
        return f"{len(groups)} x 1/{len(groups) // ranks}"


def match_bundles(sizes: Sequence[int], nodes: Sequence[object]) -> list[list[int]] | None:
    """Assign granted bundles to node groups of the given ``sizes``, by best-fit decreasing.

    ``nodes[i]`` is the node of bundle i. Returns the bundle indices of each group, or None if some
    group fits on no node."""
    left: dict[object, list[int]] = {}
    for index, node in enumerate(nodes):
        left.setdefault(node, []).append(index)
    found: dict[int, list[int]] = {}
    for group, size in sorted(enumerate(sizes), key=lambda g: -g[1]):
        fitting = [indices for indices in left.values() if len(indices) >= size]
        if not fitting:
            return None
        tightest = min(fitting, key=len)
        found[group], tightest[:] = tightest[:size], tightest[size:]
    return [found[group] for group in range(len(sizes))]


def text_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a plain-text table. The first column is left-aligned, the others right-aligned."""
    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False)
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    out = StringIO()
    PlainConsole(file=out, width=1000, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _count(amount: float, unit: str) -> str:
    return f"{amount:g} {unit}" if amount == 1 else f"{amount:g} {unit}s"


def _ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
