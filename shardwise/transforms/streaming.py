"""The groups of an update whose state is on disk: read, stepped and written back in chunks.

[Note: a chunk is a call]
An optimizer that works element by element may be given any part of a group: parameters, gradients
and state of the same elements. Each chunk is a call of its own, with copies of what all parameters
share; see [Note: a step in several calls]. Its bits do not depend on how a group is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardwise.offload.engine import Piece
from shardwise.offload.store import Store
from shardwise.sharding.buckets import Group
from shardwise.sharding.opt_state import is_over, split
from shardwise.sharding.pytree import tree_unflatten
from shardwise.transforms.rounding import Rounding
from shardwise.transforms.settle import Failure
from shardwise.transforms.step import Step


class Streamed:
    """A step of which some groups are streamed.

    Args:
        step: all of it.
        store: reads and writes.
        rounding: of state that rests in 16 bits.
        vote: told how the drive of this rank did; raises if that of any rank has failed.
    """

    def __init__(
        self, step: Step, store: Store, rounding: Rounding, vote: Callable[[Failure], None]
    ) -> None:
        self._step = step
        self._vote = vote
        self._store = store
        self._rounding = rounding
        self._stepping = step.stepping
        self._leaves: list[Any] = []
        self._done: list[Any] = []
        self._spec: Any = None

    def run(self, opt: Any) -> Any:
        """The new optimizer state; parameters are written in place."""
        groups = self._stepping.streamed
        if not groups:
            return self._step.run(opt)
        self._leaves, self._spec = split(opt, self._stepping.keys)
        self._done = [
            dict(leaf) if is_over(leaf, self._stepping.keys) else leaf for leaf in self._leaves
        ]
        failure = Failure()
        try:
            self._stream(groups)
        except Exception as error:  # also no memory for buffers: peers wait for this rank
            failure = Failure(error)
        self._vote(failure)
        if not self._stepping.calls:
            return tree_unflatten(self._spec, self._done)
        return self._step.run(opt, self._done)

    def _stream(self, groups: Sequence[Group]) -> None:
        flats = [self._flats(group) for group in groups]
        self._store.stream(
            [self._piece(*pair) for pair in zip(groups, flats, strict=True)],
            lambda number, start, stop, tensors: self._chunk(
                groups[number], list(flats[number]), (start, stop), tensors
            ),
        )

    def _piece(self, group: Group, flats: Mapping[int, Tensor]) -> Piece:
        """Parameter and state, then what the parameter is rounded to, then the gradient."""
        written = (self._step.params[group.key], *flats.values())
        outs = (self._step.outs[group.key],) if group.key in self._step.outs else ()
        # On the host already, unless the device has memory of its own.
        return Piece(written, (self._step.grads[group.key].cpu(),), outs)

    def _flats(self, group: Group) -> dict[int, Tensor]:
        """The flat state of a group, by position among the leaves."""
        found: dict[int, Tensor] = {}
        for index, leaf in enumerate(self._leaves):
            if is_over(leaf, self._stepping.keys):
                value = leaf.get(group.key)
                if value is not None and value.shape == (group.layout.length,):
                    found[index] = value
        return found

    def _chunk(
        self,
        group: Group,
        places: Sequence[int],
        span: tuple[int, int],
        tensors: Sequence[Tensor],
    ) -> None:
        """Step some elements of a group, whose flat state is at these places among the leaves."""
        key = group.key
        param, *rest = tensors
        resting = dict(zip(places, rest, strict=False))
        seen: list[Any] = []
        for index, leaf in enumerate(self._leaves):
            if index in resting:
                chunk = resting[index]
                seen.append({key: chunk.to(group.working(chunk.dtype))})
            elif is_over(leaf, self._stepping.keys):
                seen.append({key: leaf[key].clone()} if key in leaf else {})
            else:
                seen.append(leaf.clone() if isinstance(leaf, Tensor) else leaf)
        shadows = {key: rest[-2]} if key in self._step.outs else {}
        tree = tree_unflatten(self._spec, seen)
        new = self._step.apply({key: param}, {key: tensors[-1]}, tree, shadows)
        for index, leaf in enumerate(self._spec.flatten_up_to(new)):
            if index in resting:
                self._rest(group, resting[index], leaf[key], f"opt {index}", span)
            elif is_over(self._leaves[index], self._stepping.keys):
                self._done[index].update(leaf)
            else:
                self._done[index] = leaf

    def _rest(
        self, group: Group, chunk: Tensor, new: Tensor, what: str, span: tuple[int, int]
    ) -> None:
        """Put the new state of some elements where it is written from."""
        if new.dtype != chunk.dtype:
            layout = group.layout
            chunk.copy_(self._rounding.flat(new, layout, chunk.dtype, what, span=span))
        elif new.data_ptr() != chunk.data_ptr():
            chunk.copy_(new)
