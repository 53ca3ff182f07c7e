"""The Ray cluster of a run, started on this machine or joined, and what is reserved on it."""

from __future__ import annotations

import asyncio
import getpass
import hashlib
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import psutil
import ray
from ray._private import auto_init_hook, utils
from ray._private.authentication.authentication_token_setup import (
    maybe_enable_token_auth_if_token_available,
)
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
)

from openrl.cluster import watchdog
from openrl.cluster.fork_server import ForkServer, Preload
from openrl.cluster.placement import Node, PlacementPlan, match_bundles
from openrl.cluster.planner import (
    RoleRequest,
    check_address,
    check_room,
    no_cluster,
    plan_placement,
)
from openrl.cluster.ray_processes import fewest_processes
from openrl.cluster.reservation import Reservation
from openrl.cluster.worker_start import FORK_SERVER, PATIENCE_S, expanded
from openrl.config.groups.placement import ClusterFlags
from openrl.errors import UserError
from openrl.lazy import torch
from openrl.locks import lock

log = logging.getLogger(__name__)

# A Unix socket's path has at most 107 characters, and vLLM's sockets add a directory and a UUID.
LONGEST_SCRATCH = 107 - len("/v12345678/") - 36
# forked workers wait for the imports of the process that forks
PATIENT = {"worker_register_timeout_seconds": int(2 * PATIENCE_S)}
CARE_S = 2 * watchdog.PATIENCE_S  # seconds that the watchdog may take to clean up
MARK = "openrl.lock"  # file in the session directory of a cluster of our own, which it locks
RAYS_OWN = ("gcs_server", "raylet")  # the run cannot go on without either


@dataclass
class RayCluster:
    """A connection to Ray. If ``local``, the cluster was started for this run and ends with it."""

    local: bool
    session_dir: Path
    own: dict[str, psutil.Process] = field(default_factory=dict)
    """Ray's own processes, if they were started for this run."""
    watchdog: subprocess.Popen[bytes] | None = None
    """Cleans up if this process is killed."""
    fork_servers: dict[bytes, ForkServer] = field(default_factory=dict)
    """By what makes their workers differ."""
    stopped_since: dict[str, float] = field(default_factory=dict)
    """When each of Ray's own processes that is stopped now was first seen so."""
    mark: IO[bytes] | None = None  # open for as long as the session is in use
    ended: str = ""  # which of them was killed because it was stopped for too long

    def nodes(self) -> list[Node]:
        """Return the living nodes with their currently free resources."""
        free = ray._private.state.available_resources_per_node()
        return [
            Node(
                node["NodeManagerAddress"],
                node["Resources"].get("CPU", 0),
                node["Resources"].get("GPU", 0),
                free.get(node["NodeID"], {}).get("CPU", 0),
                free.get(node["NodeID"], {}).get("GPU", 0),
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    def scratch(self) -> dict[str, str]:
        """Return the environment that puts the workers' temporary files, including vLLM's sockets,
        into the session directory, so that they vanish with it. Compiled kernels stay outside for
        the next run. Empty for a joined cluster, or if the paths would be too long for sockets."""
        place = self.session_dir / "tmp"
        if not self.local or len(str(place)) > LONGEST_SCRATCH:
            return {}
        place.mkdir(mode=0o700, exist_ok=True)
        compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled))
        return {"TMPDIR": str(place), "TORCHINDUCTOR_CACHE_DIR": cache}

    def forked(self, environ: Mapping[str, str], preload: Preload) -> dict[str, str]:
        """Return the variables with which workers of this environment are forked from one process,
        instead of importing everything one by one. Empty for a joined cluster."""
        if not self.local:
            return {}
        kind = repr(sorted(environ.items())).encode() + pickle.dumps(preload)
        path = self.session_dir / f"forks-{hashlib.sha256(kind).hexdigest()[:8]}"
        if kind not in self.fork_servers:
            log = self.session_dir / "logs" / f"{path.name}.log"
            added = {
                "PYTHONPATH": os.pathsep.join(import_path()),
                "RAY_RAYLET_PID": str(self.own["raylet"].pid),  # the watchdog's mark
            }
            own = {name: expanded(value) for name, value in environ.items()}
            self.fork_servers[kind] = ForkServer(str(path), preload, added | own, log)
        return {FORK_SERVER: str(path)}

    async def reserve(self, plan: PlacementPlan, timeout: float | None) -> Reservation:
        """Wait until the cluster grants every bundle of the plan. ``timeout`` is in seconds; None
        or 0 means no limit.

        Raises UserError that lists what is missing: after ``timeout``, since a joined cluster may
        grow, but at once if a cluster of our own is too small even when empty."""
        whole = [replace(node, free_cpus=node.cpus, free_gpus=node.gpus) for node in self.nodes()]
        if self.local and (lacks := plan.problems(whole)):
            raise self._refusal(lacks)
        # reserve the widest groups first; the narrow ones fill the gaps
        parts = sorted(
            plan.joined_groups(), key=lambda part: -sum(plan.node_groups[g] for g in part)
        )
        granted = {
            part: placement_group(
                [plan.bundle] * sum(plan.node_groups[g] for g in part),
                strategy="STRICT_PACK" if len(part) == 1 else "PACK",
            )
            for part in parts
        }
        reservation = Reservation(plan, list(granted.values()), {})
        try:
            granted_all = await _granted(reservation.groups, timeout)
            if granted_all:
                for part, group in granted.items():
                    reservation.bundles |= self._bundles(plan, part, group)
        except BaseException:
            reservation.release()
            raise
        if not granted_all:
            reservation.release()
            raise self._refusal(await self._lacking(plan), timeout)
        return reservation

    def _bundles(
        self, plan: PlacementPlan, part: Sequence[int], group: PlacementGroup
    ) -> dict[int, tuple[PlacementGroup, int]]:
        """Map the plan's bundles of the node groups in ``part`` to the bundles of ``group``, by the
        nodes that Ray chose. Raises UserError if Ray split a node group."""
        sizes = [plan.node_groups[g] for g in part]
        on_node = placement_group_table(group)["bundles_to_node_id"]
        indices = match_bundles(sizes, [on_node[index] for index in range(sum(sizes))])
        if indices is None:
            counts = ", ".join(map(str, sorted(Counter(on_node.values()).values(), reverse=True)))
            where = ", ".join(map(str, sizes))
            wanted = f"nodes with {where} places for {plan.roles_of(part[0])}"
            raise self._refusal([f"needs {wanted}, and was given {counts}"])
        bundles: dict[int, tuple[PlacementGroup, int]] = {}
        for node_group, of_group in zip(part, indices, strict=True):
            first = sum(plan.node_groups[:node_group])
            bundles |= {first + i: (group, index) for i, index in enumerate(of_group)}
        return bundles

    async def _lacking(self, plan: PlacementPlan) -> list[str]:
        """Describe what is missing, once our own bundles have been given back."""
        await asyncio.sleep(1.0)  # Ray updates its view of free resources twice a second
        return plan.problems(self.nodes()) or [
            "it would fit now: another job held the resources in the meantime"
        ]

    def _refusal(self, lacks: Sequence[str], timeout: float | None = None) -> UserError:
        has = "; ".join(
            f"{n.name}: {n.free_gpus:g} of {n.gpus:g} GPUs, {n.free_cpus:g} of {n.cpus:g} CPUs free"
            for n in self.nodes()
        )
        when = f" within {timeout:g} s (--placement_timeout)" if timeout else ""
        listing = "".join(f"\n  - {lack}" for lack in lacks)
        return UserError(
            f"the cluster cannot hold the placement{when}:{listing}\n  it has {has}",
            "lower --*_num_nodes, --*_num_gpus_per_node or --vllm_num_engines, or add nodes;"
            " --dry_run shows the plan",
        )

    def dead(self) -> str | None:
        """Describe one of Ray's own processes that has died; None if all are alive."""
        if self.ended:
            return self.ended
        for name, process in self.own.items():
            with suppress(psutil.NoSuchProcess):  # it may end between the two questions
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    continue
            return f"Ray's {name} (process {process.pid}) died"
        return None

    def end_stopped(self, most: float) -> None:
        """Kill one of Ray's own processes that has been stopped (SIGSTOP) for ``most`` seconds, as
        far as it was looked at: Ray would wait for it even in order to end."""
        now = time.monotonic()
        for name, process in self.own.items():
            with suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_STOPPED:
                    self.stopped_since.pop(name, None)
                elif (since := now - self.stopped_since.setdefault(name, now)) > most:
                    what = f"Ray's {name} (process {process.pid}) has not moved for {since:.0f} s"
                    self.ended = f"{what} (--stall_timeout {most:g})"
                    process.kill()

    def close(self) -> None:
        """Disconnect. A cluster of our own ends, with all its processes and files."""
        ray.shutdown()
        for server in self.fork_servers.values():
            server.close()
        if self.local:
            shutil.rmtree(self.session_dir, ignore_errors=True)
        if self.mark is not None:
            self.mark.close()
        if self.watchdog is not None:
            try:
                self.watchdog.communicate(timeout=CARE_S)  # closes its stdin: it cleans up again
            except subprocess.TimeoutExpired:  # it was stopped, or /proc does not answer
                log.warning("what Ray left was not removed within %.0f s", CARE_S)
                self.watchdog.kill()
                self.watchdog.wait()


async def _granted(groups: Sequence[PlacementGroup], timeout: float | None) -> bool:
    """Wait for all groups; return False on timeout. We wait in a thread because Ray's awaitable
    starts a process per group."""
    deadline = time.monotonic() + (timeout or float("inf"))
    for group in groups:
        while not await asyncio.to_thread(group.wait, 1):
            if time.monotonic() >= deadline:
                return False
    return True


def this_machine() -> Node:
    """Return this machine as the only node of a local cluster, with everything free."""
    cpus, gpus = os.cpu_count() or 1, torch.cuda.device_count()
    return Node("127.0.0.1", cpus, gpus, cpus, gpus)


def open_cluster(
    flags: ClusterFlags, requests: Sequence[RoleRequest], device: str
) -> tuple[RayCluster, PlacementPlan]:
    """Join the cluster that the flags name, or start one on this machine, and place the roles on
    it. Returns the cluster and the plan."""
    address = flags.address
    if address:
        cluster = join_cluster(address)
        return cluster, plan_placement(requests, device, cluster.nodes())
    machine = this_machine()
    plan = plan_placement(requests, device, [machine])
    check_room(plan, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    # Ray's CPUs are only bookkeeping: there may be more worker slots than cores
    cpus = max(int(plan.need["CPU"]), int(machine.cpus))
    return start_cluster(cpus, int(machine.gpus) if device == "cuda" else 0), plan


def start_cluster(num_cpus: int, num_gpus: int) -> RayCluster:
    """Start a one-node Ray cluster that listens on 127.0.0.1 only and ends with this process."""
    on_child_end = signal.getsignal(signal.SIGCHLD)
    with fewest_processes():
        context = _init(
            address="local",
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            include_dashboard=False,
            _system_config={
                "prestart_worker_first_driver": False,  # or Ray starts an idle process per CPU
                "enable_metrics_collection": False,
                **({} if num_gpus else PATIENT),
                # if a worker is killed, kill its children too, e.g. the processes of an engine
                "kill_child_processes_on_worker_exit_with_raylet_subreaper": True,
            },
        )
    signal.signal(signal.SIGCHLD, on_child_end)  # the option above made Ray ignore it here too
    session = Path(context.address_info["session_dir"])
    session.chmod(0o700)  # it has logs, and sockets whose processes run any code they receive
    remove_dead_sessions(session.parent)
    mark = mark_as_living(session)
    started = ray._private.worker._global_node.all_processes
    own = {name: psutil.Process(started[name][0].process.pid) for name in RAYS_OWN}
    words = [sys.executable, "-I", watchdog.__file__, str(session), str(own["raylet"].pid)]
    beside = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
    return RayCluster(True, session, own, beside, mark=mark)


def mark_as_living(session: Path) -> IO[bytes]:
    """Return a file that tells other processes, for as long as it is open, that the driver of the
    session lives. A process id would not do: containers that share a directory have their own."""
    named, aside = session / MARK, session / f".{MARK}"
    mark = open(aside, "wb")  # noqa: SIM115
    lock(mark)
    aside.rename(named)  # only now, or another start could find it unlocked
    return mark


def remove_dead_sessions(home: Path) -> None:
    """Remove the session directories of our clusters whose drivers were killed before that. On a
    file system without locks nobody can tell which these are, and they stay."""
    for named in home.glob(f"session_*/{MARK}"):
        with suppress(OSError), open(named, "rb") as mark:  # BlockingIOError: its driver lives
            if lock(mark):
                shutil.rmtree(named.parent, ignore_errors=True)


def join_cluster(address: str) -> RayCluster:
    """Connect to the running cluster at ``address``: host:port, or "auto" for the one on this
    machine. Raises UserError if none answers there."""
    check_address(address)
    try:
        if address != "auto":
            _show_token(address)
        context = _init(address=address)
    except (OSError, ValueError) as error:  # Ray's ConnectionError among them
        raise no_cluster(address, error) from error
    return RayCluster(False, Path(context.address_info["session_dir"]))


def _show_token(address: str) -> None:
    """Make Ray send its authentication token if the cluster at ``address`` requires one.

    ``ray start`` requires the token in ~/.ray if there is one. ``ray.init`` sends it to clusters
    that it finds by itself, but not to a given address. $RAY_AUTH_MODE overrides all this."""
    try:
        GcsClient(address=address)
    except AuthenticationError:
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _init(**options: Any) -> Any:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    auto_init_hook.enable_auto_connect = False  # or a late call to Ray would start a new cluster
    with suppress(OSError):  # there is no token, or it belongs to another user
        (Path.home() / ".ray/auth_token").chmod(0o600)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    set_handler = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None  # Ray's ends the process without a word
    try:
        context = ray.init(
            namespace=f"openrl-{uuid.uuid4().hex[:8]}",
            log_to_driver=False,
            logging_level="error",
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(import_path())}},
            **options,
        )
    finally:
        utils.set_sigterm_handler = set_handler
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)  # instead of that of its C++ code, which dumps the stack
    return context


def import_path() -> list[str]:
    """Return the directories from which workers import the package, plugins and the user's files,
    so that they can import whatever this process can.

    Nothing is uploaded: on several nodes these directories must be on a shared file system, or
    their contents installed on each node."""
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = [Path(sysconfig.get_path(kind)).resolve() for kind in kinds]
    package_home = Path(__file__).resolve().parents[2]
    known = dict.fromkeys([package_home, *(Path(entry or ".").resolve() for entry in sys.path)])
    own = (p for p in known if not any(p.is_relative_to(home) for home in installed))
    return [str(p) for p in own if p.is_dir()]
