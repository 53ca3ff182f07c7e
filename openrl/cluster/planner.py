"""From flags to the placement table. Every role gets bundles of its own, shares those of another
role, or lists them explicitly. The checks before a cluster is started or joined are here too."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from openrl.cluster.placement import Node, PlacementPlan
from openrl.config.groups.placement import ENGINES, PlacementFlags
from openrl.config.groups.rollout_engine import EngineFlags, ParallelSizes
from openrl.errors import UserError

CONNECT_S = 10.0  # timeout of one connection attempt
PROCESS = 256 * 2**20  # bytes of a rank's process before it loads a model


@dataclass(frozen=True)
class RoleRequest:
    """The bundles that one role wants: ``per_node`` on each of ``num_nodes``. A rank takes
    ``sizes.width`` neighbouring bundles; if that is more than one, a "node" is one rank."""

    name: str
    num_nodes: int | None  # None: as many as fill the bundles of ``shares_with``
    per_node: int | None  # None: every GPU of a node
    shares_with: str | None = None  # an earlier role whose bundles this one uses
    bundles: tuple[int, ...] | None = None  # explicit bundle numbers, counted across nodes
    sizes: ParallelSizes = ParallelSizes()


def role_requests(
    placement: PlacementFlags,
    engine: EngineFlags,
    roles: Iterable[str],
    leaders: Mapping[str, str],
) -> list[RoleRequest]:
    """Return the requests of the model roles ``roles``, then the engines', from flags. A flag left
    at None takes the actor's value. ``leaders`` has the role whose places another one shares."""
    roles, sizes = list(roles), engine.sizes
    if bundles := placement.explicit_places:
        of_models = [
            RoleRequest(role, 1, len(bundles[role]), bundles=bundles[role]) for role in roles
        ]
        own = bundles[ENGINES]
        return [*of_models, RoleRequest(ENGINES, 1, len(own), bundles=own, sizes=sizes)]
    requests = [RoleRequest(role, *placement.shape(role), leaders.get(role)) for role in roles]
    leader = leaders.get(ENGINES)
    engines = engine.vllm_num_engines or (None if leader else 1)
    return [*requests, RoleRequest(ENGINES, engines, sizes.width, leader, sizes=sizes)]


def plan_placement(
    requests: Iterable[RoleRequest], device: str, cluster: Sequence[Node]
) -> PlacementPlan:
    """Return the placement table. Roles that share a bundle take equal shares of it.

    A request without ``per_node`` takes as many GPUs as the largest node has, or one worker slot
    on a CPU. Busy GPUs count too: ``PlacementPlan.problems`` checks what is free. A rank wider than
    a node is cut into node groups of whole tensor-parallel groups. Explicit bundles are cut into
    node groups of the largest node's number of GPUs; on a CPU they all lie on one node.

    The flags behind the requests are checked: models that share bundles have as many ranks, and
    engines fill the bundles that --placement gives them. Raises UserError if engines do not fill
    the bundles that they share, or if an engine cannot run on those that it gets."""
    requests = list(requests)
    gpus = max((int(node.gpus) for node in cluster), default=0) if device == "cuda" else 0
    node_groups: list[int] = []
    bundles: dict[str, tuple[int, ...]] = {}
    for request in requests:
        if request.bundles is not None:
            bundles[request.name] = request.bundles
        elif request.shares_with is not None:
            bundles[request.name] = shared = bundles[request.shares_with]
            if request.name == ENGINES:  # how many places there are may be known only here
                request.sizes.check_fill(len(shared), request.num_nodes, "colocate_all_models")
        else:
            first = sum(node_groups)
            node_groups += _own(request, gpus)
            bundles[request.name] = tuple(range(first, sum(node_groups)))
    if not node_groups:
        count = 1 + max(chain.from_iterable(bundles.values()))
        width = gpus or count
        node_groups = [min(width, count - first) for first in range(0, count, width)]
    sizes = {r.name: r.sizes for r in requests if r.sizes.width > 1}
    plan = PlacementPlan(device, tuple(node_groups), bundles, sizes)
    for request in requests:
        _check_ranks(request, plan)
    return plan


def _own(request: RoleRequest, gpus: int) -> list[int]:
    """Return the sizes of the node groups of a role that gets its own bundles."""
    size = request.per_node if request.per_node is not None else max(gpus, 1)
    if request.sizes.width == 1 or not 0 < gpus < size:
        return [size] * (request.num_nodes or 1)
    tensor = request.sizes.tensor
    # as many GPUs of a node as whole tensor-parallel groups can use, if a group fits at all
    on_node = gpus - gpus % tensor if tensor <= gpus else gpus
    rest = [size % on_node] if size % on_node else []
    return ([on_node] * (size // on_node) + rest) * (request.num_nodes or 1)


def _check_ranks(request: RoleRequest, plan: PlacementPlan) -> None:
    """Raise UserError if vLLM cannot use the bundles of a rank."""
    role, sizes = request.name, request.sizes
    for rank in range(plan.size(role)):
        if not plan.spans_nodes(role, rank):
            continue
        where = plan.show_bundles(role, rank)
        spans = f"{role} {rank} would span several nodes ({where})"
        if plan.device == "cpu":
            raise UserError(f"{spans}, but on a CPU an engine needs all its places on one node")
        if sizes.data > 1:
            raise UserError(
                f"--vllm_data_parallel_size: {spans}, but the replicas of an engine must be on one"
                " node",
                "--vllm_data_parallel_size 1 and more engines",
            )
        if sizes.tensor <= max(plan.node_groups) and plan.splits_tensor_group(role, rank):
            raise UserError(
                f"--vllm_tensor_parallel_size: {role} {rank} has a tensor-parallel group on two"
                f" nodes ({where}), although {sizes.tensor} places fit on one",
                "a size that divides the GPUs of a node",
            )


def check_room(plan: PlacementPlan, memory: int) -> None:
    """Raise UserError if a plan's processes need more memory than this, whatever the models."""
    ranks = sum(map(plan.size, plan.bundles_by_role))
    if ranks * PROCESS > memory:
        need, has = f"{ranks * PROCESS / 2**30:.0f} GiB", f"{memory / 2**30:.0f}"
        problem = f"{ranks} ranks are as many processes, which take at least {need} of memory"
        raise UserError(f"{problem}, but this machine has {has}", "fewer ranks, or --ray_address")


def check_address(address: str | None) -> None:
    """Raise UserError if nothing listens at ``address``, host:port. Ray itself would keep trying
    for minutes. "auto" and None name no address, so there is nothing to check."""
    if address is None or address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        if "/" in host or not port.isdecimal():
            raise ValueError("not of the form host:port")
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise no_cluster(address, error) from error


def no_cluster(address: str, error: Exception) -> UserError:
    return UserError(
        f"--ray_address {address}: no Ray cluster answers there ({error})",
        "the host:port that `ray start --head` printed",
    )
