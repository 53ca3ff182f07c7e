"""What a run has been granted on a Ray cluster: which bundle is where."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from openrl.cluster.placement import PlacementPlan


@dataclass
class Reservation:
    """A plan that the cluster has granted. Each bundle of the plan is a bundle of a placement
    group.

    A placement group holds one node group, or all node groups of an engine that spans nodes."""

    plan: PlacementPlan
    groups: list[PlacementGroup]
    # bundle of the plan -> its placement group and its index there
    bundles: dict[int, tuple[PlacementGroup, int]]

    def actor_options(self, role: str, rank: int) -> dict[str, Any]:
        """Return the Ray options that place a rank's actor in the first of its bundles. That of an
        engine that spans nodes takes no GPU: the processes that it starts through Ray take them."""
        bundle, spans = self.plan.of_rank(role, rank)[0], self.plan.spans_nodes(role, rank)
        share = self.plan.share(bundle)
        return {
            "num_cpus": share,
            "num_gpus": share if self.plan.device == "cuda" and not spans else 0,
            "scheduling_strategy": self._strategy(bundle, capture=spans),
        }

    def _strategy(self, bundle: int, capture: bool = False) -> PlacementGroupSchedulingStrategy:
        group, index = self.bundles[bundle]
        return PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=index, placement_group_capture_child_tasks=capture
        )

    async def environment(self, role: str, rank: int) -> dict[str, str]:
        """Return the environment variables that give a rank with several bundles its GPUs. Ray
        itself gives a process the GPUs of one bundle only.

        On one node, CUDA_VISIBLE_DEVICES lists all GPUs of the rank. If the rank spans nodes, the
        variables tell vLLM which bundles to use."""
        bundles = self.plan.of_rank(role, rank)
        if self.plan.device == "cpu" or len(bundles) == 1:
            return {}
        if self.plan.spans_nodes(role, rank):
            indices = ",".join(str(self.bundles[bundle][1]) for bundle in bundles)
            share = str(min(map(self.plan.share, bundles)))
            return {"VLLM_RAY_BUNDLE_INDICES": indices, "VLLM_RAY_PER_WORKER_GPUS": share}
        probes = []
        for bundle in bundles:
            taken = {"num_cpus": 0, "num_gpus": self.plan.share(bundle)}
            where = self._strategy(bundle)
            probe = ray.remote(ray.get_gpu_ids).options(scheduling_strategy=where, **taken)
            probes.append(probe.remote())
        gpus = [str(gpu) for found in await asyncio.gather(*probes) for gpu in found]
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        }

    def release(self) -> None:
        for group in self.groups:
            remove_placement_group(group)
        self.groups.clear()
