"""A lowered plan on the devices of this job, or on simulated ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.sharding.compat import device_mesh_without_backend
from shardwise.sharding.errors import MeshError
from shardwise.sharding.job import join_job
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.movement import Transport
from shardwise.sharding.simulation import Simulated, current_world
from shardwise.sharding.transport import Alone, make_transport
from shardwise.transforms.lowering import Lowering
from shardwise.transforms.program import Program
from shardwise.transforms.rank_program import RankProgram


def bind(
    lowering: Lowering,
    *,
    device: torch.device | str | None = None,
    debug: bool = False,
    timeout: float | None = None,
) -> Program:
    """See `Lowered.bind`."""
    mesh = lowering.plan.mesh
    world = current_world()
    where = torch.device(device) if device else _default_device(simulated=world is not None)

    def on(rank: int, transport: Transport, device_mesh: DeviceMesh) -> RankProgram:
        with torch.inference_mode(False):
            return RankProgram(
                lowering, rank, transport, device_mesh=device_mesh, device=where, debug=debug
            )

    if world is not None:
        same = world.mesh in (mesh, mesh.whole)
        _check_world(mesh, world.mesh.size, f"simulate({world.mesh!r})", same)
        meshes = [device_mesh_without_backend(mesh, r, where.type) for r in range(mesh.size)]
        return Program([on(r, Simulated(world, r, mesh), m) for r, m in enumerate(meshes)], world)
    job = join_job(where.type, timeout=timeout)
    _check_world(mesh, job.world, f"this job of {job.world} ranks", job.world == mesh.size)
    if job.world == 1 and not dist.is_initialized():
        return Program([on(0, Alone(), device_mesh_without_backend(mesh, 0, where.type))], None)
    device_mesh = init_device_mesh(where.type, mesh.sizes, mesh_dim_names=mesh.names)
    transport = make_transport(device_mesh, joins=mesh.joins, timeout=timeout)
    return Program([on(job.rank, transport, device_mesh)], None)


def _default_device(*, simulated: bool) -> torch.device:
    if not simulated and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _check_world(mesh: Mesh, world: int, where: str, fits: bool) -> None:
    if fits:
        return
    sizes = " * ".join(str(size) for size in mesh.sizes) or "1"
    raise MeshError(
        f"{mesh!r} does not fit {where}.",
        where="lowered.bind()",
        facts=[f"{sizes} == {mesh.size}; the job has {world} ranks."],
        why="Every rank of the job has one position in the mesh.",
        fix="use -1 for one axis, or start as many ranks as the mesh has",
        size=mesh.size,
        world=world,
    )
