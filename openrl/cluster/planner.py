"""From flags to the table of places: every role gets bundles of its own, shares those of another, or is told them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from openrl.cluster.placement import Node, PlacementPlan, Slot
from openrl.config.placement import ENGINES, FLAG_NAMES, explicit_places, leaders
from openrl.config.rollout import EngineFlags, HybridFlags, PlacementFlags
from openrl.errors import UserError


@dataclass(frozen=True)
class RoleRequest:
    """Ranks that one role wants: ``per_node`` on each of ``num_nodes``; None is every GPU of a node."""

    name: str
    num_nodes: int
    per_node: int | None
    shares_with: str | None = None  # an earlier role, whose bundles it takes
    places: tuple[int, ...] | None = None  # explicit numbers, counted through the nodes


def role_requests(
    placement: PlacementFlags, hybrid: HybridFlags, engine: EngineFlags, roles: Iterable[str]
) -> list[RoleRequest]:
    """Requests of the named model roles by their flags, None meaning "as the actor"; then the engines."""
    roles = list(roles)
    if places := explicit_places(placement):
        return [RoleRequest(role, 1, len(places[role]), places=places[role]) for role in [*roles, ENGINES]]
    follows = leaders(hybrid, roles)
    requests = []
    for role in roles:
        nodes = getattr(placement, f"{FLAG_NAMES[role]}_num_nodes")
        per_node = getattr(placement, f"{FLAG_NAMES[role]}_num_gpus_per_node")
        requests.append(
            RoleRequest(
                role,
                placement.actor_num_nodes if nodes is None else nodes,
                placement.actor_num_gpus_per_node if per_node is None else per_node,
                follows.get(role),
            )
        )
    return [*requests, RoleRequest(ENGINES, engine.vllm_num_engines, 1, follows.get(ENGINES))]


def plan_placement(requests: Iterable[RoleRequest], device: str, cluster: Sequence[Node]) -> PlacementPlan:
    """The table of places. Roles that meet on a bundle take equal shares of it.

    A request without ``per_node`` takes as many GPUs as the largest node has (busy ones too: whether they are free is
    for ``problems``), and one worker slot on a CPU. Explicit places are cut into node groups by that same number of
    GPUs; on a CPU they all lie on one node. Raises UserError if a role cannot share the places of another.
    """
    gpus = max((int(node.gpus) for node in cluster), default=0)
    whole_node = max(gpus, 1) if device == "cuda" else 1
    node_groups: list[int] = []
    bundles: dict[str, tuple[int, ...]] = {}
    for request in requests:
        if request.places is not None:
            bundles[request.name] = request.places
        elif request.shares_with is not None:
            size = request.num_nodes * (whole_node if request.per_node is None else request.per_node)
            bundles[request.name] = _shared(request, size, bundles[request.shares_with])
        else:
            first, size = sum(node_groups), whole_node if request.per_node is None else request.per_node
            node_groups += [size] * request.num_nodes
            bundles[request.name] = tuple(range(first, sum(node_groups)))
    if not node_groups:
        count = 1 + max(place for places in bundles.values() for place in places)
        width = gpus if device == "cuda" and gpus else count
        node_groups = [min(width, count - first) for first in range(0, count, width)]
    tenants = Counter(bundle for places in bundles.values() for bundle in places)
    rows = {role: tuple(Slot(b, _share(tenants[b])) for b in places) for role, places in bundles.items()}
    return PlacementPlan(device, tuple(node_groups), rows)


def _shared(request: RoleRequest, size: int, places: tuple[int, ...]) -> tuple[int, ...]:
    if size != len(places):
        number = "vllm_num_engines" if request.name == ENGINES else f"{FLAG_NAMES[request.name]}_num_gpus_per_node"
        raise UserError(
            f"--{number}: {request.name} has {size} ranks and shares the {len(places)} places of {request.shares_with}",
            f"as many ranks as {request.shares_with}",
        )
    return places


def _share(tenants: int) -> float:
    """Ray counts in ten-thousandths; rounded down, so that the shares of a bundle never exceed it."""
    return math.floor(1e4 / tenants) / 1e4
