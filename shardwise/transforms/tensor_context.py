"""How operations inside a pass find out what tensor axes have cut, and talk along them.

[Note: the tensor context]
A function that users call in the place of torch's (`sw.cross_entropy`, `sw.dropout`) has to know
that what looks like a whole tensor is this rank's block of one. It asks the context of the pass, a
value of the thread as `current_draws` is. A trace has a context as well, whose answers follow from
the types of activations; there the collectives are planned, and a step runs the same ones. Outside
of a pass there is no context, nothing is cut, and the functions are plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from shardwise.sharding.compat import set_thread_value, thread_value
from shardwise.sharding.frames import Run
from shardwise.sharding.spec import Spec
from shardwise.transforms.declared import LocalRegion
from shardwise.transforms.places import Places

_NAME = "shardwise.tensor_context"


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Which classes of a vocabulary a rank has.

    Args:
        axis: tensor axis that cuts the vocabulary.
        ranks: along it.
        place: of this rank.
        rows: of the whole vocabulary.
        first: the first one that is here.
        count: how many are here; the block may be longer, its end is padding.
    """

    axis: str
    ranks: int
    place: int
    rows: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Which indices of one dimension a block has.

    Args:
        dim: of the tensor, not negative.
        runs: of indices; what no run covers is padding.
        size: of the dimension of the whole tensor.
    """

    dim: int
    runs: tuple[Run, ...]
    size: int


class DropoutCall(NamedTuple):
    """A call of `sw.dropout`: path of its module (or `loss_fn`), its name, and its number."""

    place: str
    name: str
    number: int


class TensorContext(Protocol):
    """What a pass knows about tensor axes; see [Note: the tensor context].

    `room` is how many bytes may be taken at the turn from forward to backward without a higher peak
    of the step.
    """

    places: Places
    room: int

    def shard_of(self, tensor: Tensor, dim: int, /) -> VocabShard | None:
        """How a dimension of a tensor is cut in one piece; None if it is whole."""
        ...

    def cuts_of(self, tensor: Tensor, call: DropoutCall, /) -> tuple[Cut, ...]:
        """How the input of a call of `sw.dropout` is cut; empty if it is whole."""
        ...

    def constrain(self, tensor: Tensor, spec: Spec, /) -> Tensor:
        """The activation in a layout; see `sw.constrain`."""
        ...

    def local(self, region: LocalRegion, args: tuple[Any, ...], /) -> Any:
        """Run a function on blocks; see `sw.local`."""
        ...

    def all_gather(self, tensor: Tensor, axis: str, name: str, /) -> Tensor:
        """The tensors of all ranks, stacked in rank order; without a gradient."""
        ...

    def all_reduce(self, tensor: Tensor, axis: str, name: str, /) -> Tensor:
        """The sum over ranks; without a gradient."""
        ...

    def enter(self, tensor: Tensor, axis: str, name: str, /) -> Tensor:
        """The whole tensor, of whose gradient each rank makes a part: backward sums the parts.

        It is the tensor itself where that is so already.
        """
        ...

    def by_row(
        self, run: Callable[..., Tensor], /, rows: Tensor, weights: Sequence[Tensor], *args: Any
    ) -> Tensor:
        """Run `run(rows, *weights, *args)`, which makes one number of each whole row.

        On every rank these are its own numbers, of the rows that it has.
        """
        ...

    def invariant(self, run: Callable[..., Tensor], /, *args: Any) -> Tensor:
        """Run what is equal on all ranks, as its gradient is, whatever the arguments are.

        What it does in between is not followed by a trace.
        """
        ...


def current_tensor_context() -> TensorContext | None:
    """That of the pass that this thread runs; None outside of any.

    >>> current_tensor_context() is None
    True
    """
    return thread_value(_NAME)


@contextmanager
def in_tensor_context(context: TensorContext | None) -> Generator[None]:
    """Make a context that of a pass, for as long as the block runs.

    Args:
        context: None if nothing is cut.

    >>> with in_tensor_context(None):
    ...     current_tensor_context() is None
    True
    """
    around = current_tensor_context()
    set_thread_value(_NAME, context)
    try:
        yield
    finally:
        set_thread_value(_NAME, around)
