"""A program: pure functions over states, for one real rank or for all simulated ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.sharding.compat import device_mesh_without_backend
from shardwise.sharding.errors import BatchError, MeshError, strict_keywords
from shardwise.sharding.gradients import Grads
from shardwise.sharding.job import join_job
from shardwise.sharding.lifted import Lifted
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.movement import Alone, Collective, Transport
from shardwise.sharding.plan import call_site
from shardwise.sharding.pytree import tree_leaves, tree_map
from shardwise.sharding.simulation import Simulated, World, current_world
from shardwise.sharding.state import State
from shardwise.sharding.transport import make_transport
from shardwise.transforms.initialise import FromModule
from shardwise.transforms.lowering import Lowering
from shardwise.transforms.metrics import Metrics
from shardwise.transforms.module_init import InitModule
from shardwise.transforms.rank_program import RankProgram

T = TypeVar("T")


class Program:
    """`init`, `step`, `grads`, `update` and `eval` of one lowered plan; made by `lowered.bind()`.

    All methods but `shard_batch` are collective: every rank calls them in the same order.
    """

    def __init__(self, ranks: Sequence[RankProgram], world: World | None) -> None:
        self._ranks = ranks
        self._world = world

    @property
    def lowered(self) -> Lowering:
        """What runs: after the first step, in the order of units that it has shown."""
        return self._ranks[0].lowering

    @property
    def last_collectives(self) -> tuple[Collective, ...]:
        """What the last call ran on this rank (rank 0 of a simulation), as recorded."""
        return tuple(self._ranks[0].mover.executed)

    @strict_keywords
    def init(
        self,
        source: int | FromModule = 0,
        *,
        seed: int | None = None,
        init: InitModule | None = None,
    ) -> State:
        """A fresh state.

        Args:
            source: a seed, or `from_module(model)`.
            seed: the same as `source`, by name; beside `from_module`, what dropout draws from.
            init: called for each module after its own `reset_parameters`, as `module.apply` would.

        Raises:
            InitError: parameters or buffers that no init touched, or that the module lacks.
        """
        if init is not None and isinstance(source, FromModule):
            warnings.warn("init= has no effect: from_module(model) has all values.", stacklevel=3)
        return self._each(lambda rank, source: rank.init(source, seed, init), source)

    @strict_keywords
    def step(self, state: State, batch: Any, *, donate: bool = True) -> tuple[State, Metrics]:
        """Gradients and update on this rank's part of the global batch.

        Args:
            state: consumed; see [Note: donation].
            batch: this rank's part, a pytree; see `shard_batch`.
            donate: False leaves `state` usable and costs a copy of it.

        Raises:
            DonatedStateError: the state was consumed before.
            RankError: a rank has failed; the state is unchanged and still usable.
        """
        site = call_site()

        def run(rank: RankProgram, state: State, batch: Any) -> tuple[State, Metrics]:
            given = state if donate else state.clone()
            result = rank.step(given, batch)
            if donate:
                state.consume(f"step {int(given.count)} at {site}")
            return result

        new, metrics = _unzip(self._each(run, state, batch))
        return new, _same(metrics)

    def grads(self, state: State, batch: Any) -> tuple[Grads, Metrics]:
        """Gradients of the mean loss over the global batch; the state stays usable."""
        grads, metrics = _unzip(self._each(lambda r, s, b: r.grads(s, b), state, batch))
        return grads, _same(metrics)

    @strict_keywords
    def update(self, state: State, grads: Grads, *, donate: bool = True) -> State:
        """One optimizer step with the given gradients."""
        site = call_site()

        def run(rank: RankProgram, state: State, grads: Grads) -> State:
            given = state if donate else state.clone()
            result, _ = rank.update(given, grads)
            if donate:
                state.consume(f"update {int(given.count)} at {site}")
            return result

        return self._each(run, state, grads)

    def eval(self, state: State, batch: Any) -> Metrics:
        """The loss and metrics in eval mode, without gradients; the state stays usable."""
        return _same(self._each(lambda r, s, b: r.evaluate(s, b), state, batch))

    def agree(self, value: bool) -> bool:
        """Whether `value` is true on every rank; one packed reduction.

        Ranks that run out of batches at different times stop together, at the shortest::

            batches = iter(loader)
            while program.agree((batch := next(batches, None)) is not None):
                state, metrics = program.step(state, batch)

        or at the longest, where a rank that has run out passes no rows::

            while not program.agree((batch := next(batches, None)) is None):
                state, metrics = program.step(state, no_rows if batch is None else batch)

        The loss must then be a `Mean`, which counts what is there. `eval` works the same way.

        Args:
            value: this rank's answer; lifted in a simulation if ranks differ.
        """
        return _same(self._each(lambda rank, value: rank.agree(bool(value)), value))

    def shard_batch(self, batch: Any) -> Any:
        """This rank's part of a global batch: dimension 0 of every tensor, in `plan.batch` order.

        Sizes may differ by one row between ranks. In a simulation: the parts of all ranks, lifted.

        Raises:
            BatchError: tensors differ in rows, there are fewer rows than parts, or no tensors.
        """
        parts = [_part(batch, rank.lowering, rank.mover.coords) for rank in self._ranks]
        return Lifted(parts) if self._world is not None else parts[0]

    def _each(self, run: Callable[..., T], *args: Any) -> Any:
        """Call for this rank, or for all simulated ranks with their parts of lifted arguments."""
        if self._world is None:
            # What is made in inference mode could never be trained; new threads are not in it.
            with torch.inference_mode(False):
                return run(self._ranks[0], *args)
        lifted = [
            arg if isinstance(arg, Lifted) else Lifted([arg] * len(self._ranks)) for arg in args
        ]
        return Lifted(
            self._world.run(lambda rank: run(self._ranks[rank], *(a.ranks[rank] for a in lifted)))
        )


def _unzip(pair: Any) -> tuple[Any, Any]:
    return (pair[0], pair[1])


def _same(result: Any) -> Any:
    """What is equal on all ranks, once."""
    return result.ranks[0] if isinstance(result, Lifted) else result


def _part(batch: Any, lowering: Lowering, coords: dict[str, int]) -> Any:
    axes = lowering.batch_axes
    parts = lowering.plan.mesh.product(axes)
    index = lowering.plan.mesh.index(axes, coords)
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    rows = {leaf.shape[0] for leaf in tensors}
    if not rows and parts > 1:
        raise _nothing_to_cut(batch, parts)
    if len(rows) > 1 or (rows and min(rows) < parts):
        raise BatchError(
            "The global batch cannot be cut into the parts of the ranks.",
            where="program.shard_batch(batch)",
            facts=[
                f"rows of its tensors: {', '.join(str(n) for n in sorted(rows))}",
                f"parts: {parts} (axes {' '.join(axes) or 'none'} of {lowering.plan.mesh!r})",
            ],
            why="Dimension 0 of every tensor is cut alike, and every rank needs a row.",
            fix="pass tensors of the same number of rows, at least as many as there are parts",
            parts=parts,
        )

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return leaf
        return leaf.tensor_split(parts)[index]

    return tree_map(cut, batch)


def _nothing_to_cut(batch: Any, parts: int) -> BatchError:
    return BatchError(
        f"The global batch, a {type(batch).__name__}, holds no tensor with rows to cut.",
        where="program.shard_batch(batch)",
        facts=f"parts: {parts}",
        why="Tensors in tuples, lists and dicts are cut; every rank would get all of this batch.",
        fix="pass a dict of tensors, or register the type of the batch with optree",
        parts=parts,
    )


def bind(
    lowering: Lowering, *, device: torch.device | str | None = None, debug: bool = False
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
        _check_world(mesh, world.mesh.size, f"simulate({world.mesh!r})", world.mesh == mesh)
        meshes = [device_mesh_without_backend(mesh, r, where.type) for r in range(mesh.size)]
        return Program([on(r, Simulated(world, r), m) for r, m in enumerate(meshes)], world)
    job = join_job(where.type)
    _check_world(mesh, job.world, f"this job of {job.world} ranks", job.world == mesh.size)
    if job.world == 1 and not dist.is_initialized():
        return Program([on(0, Alone(), device_mesh_without_backend(mesh, 0, where.type))], None)
    device_mesh = init_device_mesh(where.type, mesh.sizes, mesh_dim_names=mesh.names)
    return Program([on(job.rank, make_transport(device_mesh), device_mesh)], None)


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
