"""What an equivalence test runs: a plan on a small mesh, in one dtype, from known values."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import optree
import torch
from torch import Tensor, nn

from shardwise.optim.base import GradientTransform, Tensors
from shardwise.sharding.lifted import to_global
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.plan import Plan
from shardwise.sharding.simulation import simulate
from shardwise.sharding.units import dtype_name
from shardwise.testing.plain import LossFunction
from shardwise.transforms.initialise import from_module
from shardwise.transforms.lower import lower


@dataclass(frozen=True)
class Case:
    """A plan with all that is needed to train it.

    Args:
        plan: its module has the parameters' final dtype.
        loss_fn: as for `lower`.
        batches: global batches, one a step.
        optimizer: any gradient transform.
        seed: of the initial weights; None: the values of the plan's module.
    """

    plan: Plan
    loss_fn: LossFunction
    batches: tuple[Any, ...]
    optimizer: GradientTransform
    seed: int | None

    @property
    def model(self) -> nn.Module:
        """The plan's module."""
        assert self.plan.module is not None
        return self.plan.module

    @property
    def source(self) -> Any:
        """What `program.init` is given."""
        return from_module(self.model) if self.seed is None else self.seed

    @property
    def frozen(self) -> list[str]:
        """Parameters that do not train."""
        return [info.path for info in self.plan.infos if not info.trainable]

    @property
    def depth(self) -> int:
        """Elements of the longest sum there may be: a whole batch, or a whole parameter."""
        leaves = [leaf for batch in self.batches for leaf in optree.tree_leaves(batch)]
        sizes = [leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)]
        return max([*sizes, *(p.numel() for p in self.model.parameters())], default=1)

    def is_even(self, batch: Any) -> bool:
        """Whether all micro-batches of a batch have the shapes of those of the first batch."""
        plan, first = self.plan, self.batches[0]
        parts = plan.mesh.product(plan.batch) * plan.accumulation.steps
        return _shapes(batch) == _shapes(first) and all(
            not shape or shape[0] % parts == 0 for shape in _shapes(batch)
        )

    def initial(self) -> tuple[Tensors, Tensors]:
        """Parameters and buffers before the first step, found without sharding."""
        if self.seed is None:
            params, buffers = self.model.named_parameters(), self.model.named_buffers()
            return whole(dict(params)), whole(dict(buffers))
        ones: dict[str, Any] = dict.fromkeys(self.plan.base.mesh.names, 1)
        plan = on_mesh(self.plan, Mesh(**ones), self.model)
        with simulate(plan.mesh):
            state = lower(plan, self.loss_fn, self.optimizer).bind().init(self.seed)
            return whole(state.params), whole(state.buffers)


def make_case(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    *,
    plan: Plan,
    optimizer: GradientTransform,
    mesh: Mesh | None,
    dtype: torch.dtype,
    seed: int | None,
) -> Case:
    """Bring model, plan and batches to one dtype and one mesh; the arguments are not modified."""
    cast = copy.deepcopy(model).to(dtype)
    return Case(
        plan=on_mesh(plan, mesh or plan.base.mesh, cast),
        loss_fn=loss_fn,
        batches=tuple(cast_floats(batch, dtype) for batch in batches),
        optimizer=optimizer,
        seed=seed,
    )


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in optree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def on_mesh(plan: Plan, mesh: Mesh, module: nn.Module) -> Plan:
    """The same edits on another mesh, for a module with the same parameters in other dtypes.

    >>> import shardwise as sw
    >>> model = nn.Linear(4, 4)
    >>> large = sw.plan(model, Mesh(fsdp=4), sw.zero(3, "fsdp"))
    >>> print(on_mesh(large, Mesh(fsdp=2), model.double()).params["bias"])
    d0/fsdp :float64
    """
    dtypes = {path: dtype_name(param.dtype) for path, param in module.named_parameters()}
    infos = tuple(replace(info, dtype=dtypes[info.path]) for info in plan.base.infos)
    moved = Plan(replace(plan.base, mesh=mesh, infos=infos), plan.edits, plan.log, module)
    _ = moved.derived  # edits that this mesh cannot carry fail here
    return moved


def whole(values: Mapping[str, Any]) -> Tensors:
    """Copies of the whole tensors behind a mapping, from one rank or from all simulated ones."""
    return {path: value.detach().clone() for path, value in to_global(values).items()}


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """A pytree with its floating tensors in another dtype."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return optree.tree_map(cast, tree)
