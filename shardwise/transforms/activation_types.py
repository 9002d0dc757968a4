"""What each rank holds of an activation: its types along the axes of a mesh, and their table.

The vocabulary is that of spmd_types (free, invariant, replicated, sharded, partial): it says of a
plain local tensor how the global value comes of all ranks' values, and what its gradient is on
each rank. The gradient's layout follows from the type, so one forward pass is all that is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.sharding.compat import storage_key
from shardwise.sharding.errors import PlanError

FIX = (
    "declare the layout of the weight that this operation reads, or convert the activation with "
    "`sw.constrain`, or compute the whole module on one rank's values with `sw.local`"
)


@dataclass(frozen=True)
class Free:
    """Equal on all ranks; the role of its gradient is not decided yet.

    Args:
        uses: paths of the parameters that it was computed from; empty if it needs no gradient.

    >>> str(Free(("b", "a"))), str(Free(()))
    ('free (a, b)', 'free')
    """

    uses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "uses", tuple(sorted(set(self.uses))))

    def __str__(self) -> str:
        return f"free ({', '.join(self.uses)})" if self.uses else "free"


@dataclass(frozen=True)
class Invariant:
    """Equal on all ranks, and so is its gradient.

    >>> str(Invariant())
    'invariant'
    """

    def __str__(self) -> str:
        return "invariant"


@dataclass(frozen=True)
class Replicated:
    """Equal on all ranks; the gradient of each rank is one part of a sum.

    >>> str(Replicated())
    'replicated'
    """

    def __str__(self) -> str:
        return "replicated"


@dataclass(frozen=True)
class Sharded:
    """A block of one dimension.

    Args:
        dim: the dimension that is cut.
        segments: local lengths of the pieces that lie one after the other in it, each of which is
            a contiguous block of a global piece of its own.
        rows: global rows, where the last blocks are padded.
        stack: list of modules between which the sequence is cut; only there its length is known.
        copies: ranks that follow each other and hold the same block.
        mixed: the same for each piece, where they differ.

    >>> str(Sharded(2, (8,))), str(Sharded(2, (8, 4, 4))), str(Sharded(0, (3,), rows=5))
    ('sharded on dim 2', 'sharded on dim 2 in segments 8|4|4', 'sharded on dim 0 of 5 rows, padded')
    """

    dim: int
    segments: tuple[int, ...]
    rows: int | None = None
    stack: str = ""
    copies: int = 1
    mixed: tuple[int, ...] = ()

    def __str__(self) -> str:
        parts = "|".join(map(str, self.segments))
        cut = f" in segments {parts}" if len(self.segments) > 1 else ""
        padded = "" if self.rows is None else f" of {self.rows} rows, padded"
        copied = f", {self.copies} copies of each block" if self.copies > 1 else ""
        copied += f", {'|'.join(map(str, self.mixed))} copies of its segments" if self.mixed else ""
        return f"sharded on dim {self.dim}{cut}{padded}{copied}"

    @property
    def is_copied(self) -> bool:
        """Whether several ranks hold some of the rows, so that a sum would count them twice."""
        return self.copies > 1 or bool(self.mixed)

    @property
    def may_be_padded(self) -> bool:
        """Whether blocks may end with rows that are none: for any batch, not just for this one."""
        return self.rows is not None or bool(self.stack)


@dataclass(frozen=True)
class Partial:
    """The value is the sum over the ranks; its gradient is equal on all.

    >>> str(Partial())
    'partial sum'
    """

    def __str__(self) -> str:
        return "partial sum"


@dataclass(frozen=True)
class Constant:
    """One number everywhere: any block of it looks the same.

    >>> str(Constant())
    'constant'
    """

    def __str__(self) -> str:
        return "constant"


Type = Free | Invariant | Replicated | Sharded | Partial | Constant


class TypeMismatch(Exception):
    """An operation whose inputs have types that do not go together.

    Args:
        reason: the rule that was broken, in one sentence.
        op: name of the operation.
        axis: the mesh axis.
        operands: by argument, its type and its local shape.
        numbers: what the reason counts, by name.
    """

    def __init__(
        self,
        reason: str,
        *,
        op: str = "",
        axis: str = "",
        operands: Sequence[tuple[str, Type, tuple[int, ...]]] = (),
        **numbers: object,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.op = op
        self.axis = axis
        self.operands = tuple(operands)
        self.numbers = numbers

    def error(self, where: str | None) -> PlanError:
        """The same as the five-part error of the plan, at the module `where`; None: `loss_fn`."""
        place = "loss_fn" if where is None else f"module {where or '(root)'}"
        facts = [f"{name}: {kind}, {shape} on each rank" for name, kind, shape in self.operands]
        return PlanError(
            f"{self.op or 'an operation'} does not fit the tensor-parallel layouts of its inputs",
            where=f"{place}, axis {self.axis!r}",
            facts=facts,
            why=f"Along {self.axis!r}, {self.reason}.",
            fix=f"{FIX}.",
            op=self.op,
            axis=self.axis,
            types=tuple(kind for _, kind, _ in self.operands),
            shapes=tuple(shape for _, _, shape in self.operands),
            **self.numbers,
        )


class Types:
    """The types of live tensors, by identity, and how the uncut parameters were used.

    Args:
        axes: names of the mesh axes.

    >>> types = Types(axes=("tp",))
    >>> x = torch.zeros(2, 4)
    >>> str(types.of(x, "tp"))
    'free'
    >>> types.set(x, "tp", Sharded(1, (4,)))
    >>> str(types.of(x, "tp"))
    'sharded on dim 1'
    """

    def __init__(self, axes: Sequence[str]) -> None:
        self.axes = tuple(axes)
        self.used: dict[str, dict[str, set[str]]] = {axis: {} for axis in self.axes}
        self.random: list[tuple[str, dict[str, Type], str | None]] = []
        self._table: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._read: dict[tuple[Any, int, str], Type] = {}
        # Held, so that a storage's address is not given to another one.
        self._rewritten: dict[int, torch.UntypedStorage] = {}

    def of(self, tensor: Tensor, axis: str) -> Type:
        """The type of a tensor along an axis; one that needs no gradient and is not known is free.

        Raises:
            TypeMismatch: nobody said what the tensor is.
        """
        kind = self._known(tensor).get(axis)
        if kind is None and storage_key(tensor) in self._rewritten:
            raise self._untyped(tensor, axis, "a view of it was written")
        if not tensor.requires_grad:
            return kind if isinstance(kind, Sharded | Partial | Constant) else Free(())
        if kind is None or kind == Free(()) or kind == Constant():
            kind = self._made_by_function(tensor, axis)
        if kind is None:
            raise self._untyped(tensor, axis, "it needs a gradient")
        if tensor.grad_fn is not None:
            self._read[tensor.grad_fn, tensor.output_nr, axis] = kind
        return kind

    def raw(self, tensor: Tensor, axis: str) -> Type:
        """What was set for a tensor, whether or not it needs a gradient now; else free."""
        return self._known(tensor).get(axis, Free(()))

    @overload
    def set(self, tensor: Tensor, axis: str, kind: Type) -> None: ...

    @overload
    def set(self, tensor: Tensor, axis: Mapping[str, Type]) -> None: ...

    def set(self, tensor: Tensor, axis: str | Mapping[str, Type], kind: Type = Free(())) -> None:
        """Say what a tensor is along an axis, or along several.

        Args:
            tensor: any tensor.
            axis: the mesh axis, or the types by axis.
            kind: the type along one axis.

        Raises:
            ValueError: the segments do not add up to the local length of the dimension.
        """
        kinds = {axis: kind} if isinstance(axis, str) else dict(axis)
        shape = tuple(tensor.shape)
        for one in kinds.values():
            if isinstance(one, Sharded) and (
                not 0 <= one.dim < len(shape) or sum(one.segments) != shape[one.dim]
            ):
                raise ValueError(f"no tensor of local shape {shape} is {one}")
        self._table[tensor] = {**self._known(tensor), **kinds}

    def use(self, tensor: Tensor, axis: str, role: str) -> None:
        """Note that the gradient of a free tensor is going to be `role`.

        Args:
            tensor: what is used; nothing is noted if it is not free.
            axis: the mesh axis.
            role: "invariant" or "replicated".
        """
        kind = self.of(tensor, axis)
        for path in kind.uses if isinstance(kind, Free) else ():
            self.used[axis].setdefault(path, set()).add(role)

    def aliases(self, tensor: Tensor) -> list[Tensor]:
        """The other known tensors that share its storage."""
        key = storage_key(tensor)
        others = (other for other in list(self._table) if other is not tensor)
        return [other for other in others if storage_key(other) == key]

    def rewrite(self, tensor: Tensor) -> None:
        """Note a write: what is not known of this storage is not to be taken for free."""
        self._rewritten[storage_key(tensor)] = tensor.untyped_storage()

    def _made_by_function(self, tensor: Tensor, axis: str) -> Type | None:
        """The type of what a function of the user's made, whose backward is its own.

        Inside, nothing needs a gradient, so that roles get lost. Of what is equal on all ranks and
        used alike it makes the same; anything else has to be declared.
        """
        if not isinstance(tensor.grad_fn, torch.autograd.function.BackwardCFunction):
            return None
        kinds: list[Type | None] = []
        for node, number in tensor.grad_fn.next_functions:
            leaf: Any = getattr(node, "variable", None)
            if isinstance(leaf, Tensor):
                kinds.append(self._known(leaf).get(axis))
            elif node is not None:
                kinds.append(self._read.get((node, number, axis)))
        roles = {kind for kind in kinds if not isinstance(kind, Free)}
        frees = [kind for kind in kinds if isinstance(kind, Free)]
        uses = tuple(path for free in frees for path in free.uses)
        if not roles:
            return Free(uses) if uses else None
        if len(roles) > 1 or not roles <= {Invariant(), Replicated()}:
            return None
        role = "invariant" if roles == {Invariant()} else "replicated"
        for path in uses:
            self.used[axis].setdefault(path, set()).add(role)
        return roles.pop()

    def _known(self, tensor: Tensor) -> dict[str, Type]:
        found: dict[str, Type] | None = self._table.get(tensor)
        return {} if found is None else found

    def _untyped(self, tensor: Tensor, axis: str, because: str) -> TypeMismatch:
        made = tensor.grad_fn.name() if tensor.grad_fn is not None else "no operation"
        shape = tuple(tensor.shape)
        return TypeMismatch(
            f"a tensor of shape {shape} (made by {made}) has no type, and {because}",
            axis=axis,
            shape=shape,
        )
