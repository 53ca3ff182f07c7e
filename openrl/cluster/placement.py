"""Where the ranks of a run live: the table of roles and places, and what a cluster lacks for it.

One rank holds one *bundle*: a GPU with a CPU, or with ``--device cpu`` one CPU as a worker slot. The
bundles of one *node group* lie on one node; ranks of colocated roles share one. Pure: nothing here knows of Ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO

from rich.console import Console
from rich.table import Table

UNIT = {"cpu": "CPU", "cuda": "GPU"}


@dataclass(frozen=True)
class Node:
    """One machine of the cluster: what it has of the resources that ranks use, and what of it is free."""

    name: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float

    def free(self, resource: str) -> float:
        return self.free_gpus if resource == "GPU" else self.free_cpus


@dataclass(frozen=True)
class Slot:
    """One rank's place: a bundle, and the share of it that the rank takes."""

    bundle: int
    fraction: float = 1.0


@dataclass(frozen=True)
class PlacementPlan:
    """The table role -> slots, in rank order, over the bundles of the node groups."""

    device: str  # "cpu" or "cuda"
    node_groups: tuple[int, ...]  # bundles of each node group; bundles are numbered through all of them
    rows: dict[str, tuple[Slot, ...]]

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one bundle; all are alike."""
        return {"GPU": 1.0, "CPU": 1.0} if self.device == "cuda" else {"CPU": 1.0}

    @property
    def need(self) -> dict[str, float]:
        """Resources of the whole plan."""
        return {resource: amount * sum(self.node_groups) for resource, amount in self.bundle.items()}

    def locate(self, bundle: int) -> tuple[int, int]:
        """(node group, index within it) of a bundle."""
        for group, size in enumerate(self.node_groups):
            if bundle < size:
                return group, bundle
            bundle -= size
        raise IndexError(f"the plan has {sum(self.node_groups)} bundles")

    def roles_of(self, group: int) -> str:
        """Names of the roles with a rank in this node group."""
        return " and ".join(
            role for role, slots in self.rows.items() if any(self.locate(s.bundle)[0] == group for s in slots)
        )

    def places(self, role: str) -> frozenset[int]:
        """The bundles that a role has ranks on."""
        return frozenset(slot.bundle for slot in self.rows[role])

    def shared(self, role: str) -> bool:
        """Whether a rank of another role lies on a bundle of this one."""
        return any(self.places(role) & self.places(other) for other in self.rows if other != role)

    def local_ranks(self, role: str) -> list[int]:
        """The index of each rank of a role among its ranks of the same node group."""
        seen: dict[int, int] = {}
        ranks = []
        for slot in self.rows[role]:
            group, _ = self.locate(slot.bundle)
            ranks.append(seen.get(group, 0))
            seen[group] = ranks[-1] + 1
        return ranks

    def problems(self, cluster: Sequence[Node]) -> list[str]:
        """What the cluster lacks for this plan, in words; empty if it fits.

        The assignment is best-fit decreasing: exact for one node and for node groups of one size, otherwise
        it may call a plan scattered that a cleverer packing could hold.
        """
        found = []
        for resource, need in self.need.items():
            largest = max((node.free(resource) for node in cluster), default=0)
            wide = [g for g, size in enumerate(self.node_groups) if size * self.bundle[resource] > largest]
            for roles in dict.fromkeys(self.roles_of(g) for g in wide):
                size = max(self.node_groups[g] for g in wide if self.roles_of(g) == roles)
                found.append(
                    f"needs {_count(size, resource)} on one node for {roles}, the largest free node has {largest:g}"
                )
            free = sum(node.free(resource) for node in cluster)
            if need > free:
                nodes = "1 node" if len(cluster) == 1 else f"{len(cluster)} nodes"
                found.append(f"needs {_count(need, resource)} in all, the cluster has {free:g} free on {nodes}")
        return found or self._scattered(cluster)

    def _scattered(self, cluster: Sequence[Node]) -> list[str]:
        left = [{resource: node.free(resource) for resource in self.bundle} for node in cluster]
        main = UNIT[self.device]
        for group, size in sorted(enumerate(self.node_groups), key=lambda g: -g[1]):
            fitting = [n for n in left if all(n[r] >= size * amount for r, amount in self.bundle.items())]
            if not fitting:
                rest = ", ".join(f"{n[main]:g}" for n in left)
                return [
                    f"needs {_count(size, main)} on one node for {self.roles_of(group)}, "
                    f"after the other roles the nodes have {rest} free"
                ]
            best = min(fitting, key=lambda n: n[main])
            for resource, amount in self.bundle.items():
                best[resource] -= size * amount
        return []

    def notes(self, cores: int) -> list[str]:
        """Remarks for one machine with ``cores`` processor cores."""
        slots = sum(self.node_groups)
        if self.device != "cpu" or slots <= cores:
            return []
        return [f"{slots} worker slots on {_count(cores, 'core')}: ranks share cores, so this is slower, not wrong"]

    def render(self) -> str:
        """The plan as a table, one row per role."""
        unit = UNIT[self.device]
        rows = []
        for role, slots in self.rows.items():
            groups = list(dict.fromkeys(self.locate(s.bundle)[0] for s in slots))
            shares = sorted({s.fraction for s in slots})
            rows.append(
                (
                    role,
                    str(len(slots)),
                    f"{len(groups)} x {len(slots) // len(groups)}",
                    _ranges([s.bundle for s in slots]),
                    ", ".join(f"{share:g}" for share in shares),
                )
            )
        unit_name = "GPU" if self.device == "cuda" else "worker slot"
        need = ", ".join(_count(amount, resource) for resource, amount in self.need.items())
        header = ("role", "ranks", "nodes x ranks", f"{unit_name}s", f"{unit} per rank")
        return text_table(f"Placement on {self.device}: {need}", header, rows)


def text_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A plain-text table; the first column is aligned left, the others right."""
    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False)
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    out = StringIO()
    Console(file=out, width=120, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _count(amount: float, unit: str) -> str:
    return f"{amount:g} {unit}" if amount == 1 else f"{amount:g} {unit}s"


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
