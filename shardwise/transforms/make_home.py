"""The home of a program's states: where its leaves lie on one rank."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.sharding.compat import device_mesh_without_backend
from shardwise.sharding.leaves import Home
from shardwise.transforms.lowering import Lowering


def make_home(lowering: Lowering, rank: int, device_mesh: DeviceMesh) -> Home:
    """Specs and layouts of one rank's leaves.

    Args:
        lowering: of the program.
        rank: this rank.
        device_mesh: torch's view of the mesh.
    """
    plan = lowering.plan
    landing = {
        path: (plan.opt if bucket.lands_in_opt else plan.grads)[path].with_(
            dtype=plan.grads[path].dtype
        )
        for bucket in lowering.all_buckets
        if bucket.trainable
        for path in bucket.paths
    }
    aliases = {alias: info.path for info in plan.infos for alias in info.aliases}
    specs = {"params": plan.params, "opt": plan.opt, "landing": landing}
    return Home(
        lowering.all_buckets,
        specs,
        aliases,
        plan.mesh,
        rank,
        device_mesh,
        loss_scale=plan.loss_scale,
        half=plan.uses_half,
        transient=_transient(lowering.module),
    )


def _transient(module: nn.Module) -> frozenset[str]:
    """Buffers that are in no `state_dict`; one that several modules hold is known by each name."""
    kept = module.state_dict(keep_vars=True)
    return frozenset(name for name, _ in module.named_buffers() if name not in kept)


def home_without_job(lowering: Lowering, rank: int) -> Home:
    """The home of a rank of a job that need not exist: good for layouts, not for leaves."""
    mesh = lowering.plan.mesh
    return make_home(lowering, rank, device_mesh_without_backend(mesh, rank, "cpu"))
