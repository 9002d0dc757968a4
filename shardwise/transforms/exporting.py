"""A state as a directory of safetensors that transformers and other tools load.

[Note: streaming an export]
All ranks know all layouts, so each knows which slices rank 0 lacks, and in which order. They travel
in rounds of `ROUND_BYTES` at most, cast before they are sent; rank 0 puts them into one whole
tensor and writes that before it begins the next. So rank 0 holds one tensor and two rounds beyond
its shard, every other rank one round. A rank that fails goes on with the rounds, and says so after.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.sharding.checkpoint.records import BUFFERS, PARAMS, Box, Record, records_of
from shardwise.sharding.collectives import Collective
from shardwise.sharding.errors import CheckpointError, strict_keywords
from shardwise.sharding.leaves import Home
from shardwise.sharding.movement import Mover, finish
from shardwise.sharding.relocate import JOB
from shardwise.sharding.state import State, adopt
from shardwise.sharding.tree import Where, select
from shardwise.transforms.export_files import Files, Item, json_of
from shardwise.transforms.on_states import on_state, raise_alike

ROUND_BYTES = 16 << 20
"""That leave one rank at once."""

_ALIGN = 16  # of a slice in a message, so that it can be read as any dtype


@strict_keywords
def export_safetensors(
    state: Any,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5_000_000_000,
    where: Where | None = None,
    trained: bool = False,
    names: Mapping[str, str] | Callable[[str], str] | None = None,
    config: Any = None,
    overwrite: bool = False,
) -> None:
    """Write parameters and persistent buffers as Hugging Face's directories have them.

    All ranks call it; rank 0 writes, and appears complete or not at all: files are written beside
    `directory`, flushed, and renamed. A parameter with a master copy is written from that one. Tied
    weights are written once, by the name that holds them. The state is only read. Each rank sends
    what it holds and rank 0 lacks, once; see [Note: streaming an export].

    Args:
        state: of one rank, or lifted.
        directory: to be made.
        dtype: of floating-point tensors in the files; None: as they are.
        max_file_bytes: more than that is written as several files with an index.
        where: patterns or a predicate that select paths of parameters and buffers.
        trained: only parameters that the plan trains, such as those of an adapter.
        names: path to the name in the files, for those that change.
        config: of transformers, or any mapping; written to `config.json` with `dtype`.
        overwrite: replace what is at `directory`.

    Raises:
        CheckpointError: the directory exists, the disk is full, names collide; on all ranks, and
            nothing is left of the export.
        PatternError: a pattern matches nothing; on all ranks.

    >>> # sw.export_safetensors(state, "out", dtype=torch.bfloat16, config=model.config)
    >>> # transformers.AutoModelForCausalLM.from_pretrained("out")
    """
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes is {max_file_bytes}; it must be at least 1.")
    choice = _Choice(dtype, where, names, trained=trained)
    path = Path(os.path.abspath(directory))

    def run(one: State, mover: Mover) -> None:
        files = Files(path, max_file_bytes, config, overwrite=overwrite)
        _export(adopt(one), mover, choice, files)

    on_state(state, "export_safetensors", run)


@dataclass(frozen=True)
class _Choice:
    """What is exported, and under which name."""

    dtype: torch.dtype | None
    where: Where | None
    names: Mapping[str, str] | Callable[[str], str] | None
    trained: bool

    def items(self, state: State) -> list[tuple[Record, Item]]:
        home = state.home
        records = {_path(r): r for r in records_of(state) if _is_weight(r, home)}
        if self.trained:
            known = {path for bucket in home.buckets if bucket.opt for path in bucket.paths}
            records = {path: record for path, record in records.items() if path in known}
        order = {path: number for number, path in enumerate(home.specs["params"])}
        paths = sorted(records, key=lambda path: order.get(path, len(order)))
        if self.where is not None:
            paths = list(select(self.where, paths))
        made = [(records[path], self._item(path, records[path])) for path in paths]
        self._check_names([item for _, item in made], paths)
        return made

    def _item(self, path: str, record: Record) -> Item:
        name = path
        if callable(self.names):
            name = self.names(path)
        elif self.names is not None:
            name = self.names.get(path, path)
        casts = self.dtype is not None and record.dtype.is_floating_point
        return Item(name, self.dtype if casts and self.dtype else record.dtype, record.shape)

    @staticmethod
    def _check_names(items: Sequence[Item], paths: Sequence[str]) -> None:
        taken: dict[str, str] = {}
        for item, path in zip(items, paths, strict=True):
            if item.name in taken:
                raise CheckpointError(
                    f"Two tensors would be exported as {item.name!r}.",
                    where="export_safetensors(names=...)",
                    facts=f"{taken[item.name]} and {path}",
                    why="A file has one tensor of a name.",
                    fix="give each path a name of its own",
                    name=item.name,
                )
            taken[item.name] = path


def _is_weight(record: Record, home: Home) -> bool:
    kind = record.name.partition("/")[0]
    if kind == BUFFERS:
        return _path(record) not in home.transient
    return kind == PARAMS and not record.derived


def _path(record: Record) -> str:
    return record.name.partition("/")[2]


class _Slice(NamedTuple):
    """A rectangle of one tensor that rank 0 takes from one rank; from itself it costs no bytes."""

    index: int
    source: int
    box: Box
    nbytes: int


def _export(state: State, mover: Mover, choice: _Choice, files: Files) -> None:
    error: Exception | None = None
    made: list[tuple[Record, Item]] = []
    try:
        made = choice.items(state)
        if mover.rank == 0:
            files.begin([item for _, item in made])
    except Exception as one:
        error = one
    digest = hashlib.sha256(repr([item for _, item in made]).encode()).hexdigest()[:12]
    about = f"step {int(state.count)}, {len(made)} tensors {digest}"
    try:
        _check_same(raise_alike(mover.transport, error, "export_safetensors", about))
        rounds = _rounds(made)
        mover.begin([item for one in rounds if (item := _collective(one, mover.rank))])
        writing = _Writing(made, files, mover, _device(state))
        for one in rounds:
            writing.run(one)
        mover.end()
        writing.finish(choice.dtype)
        raise_alike(mover.transport, writing.error, "export_safetensors", None)
    except BaseException:
        if mover.rank == 0:
            files.discard()
        raise


def _check_same(told: Sequence[str]) -> None:
    if any(one != told[0] for one in told):
        raise CheckpointError(
            "Ranks export different things.",
            where="export_safetensors(state, ...)",
            facts=[f"rank {rank}: {one}" for rank, one in enumerate(told)],
            why="All ranks send their parts of the same tensors, in one order.",
            fix="pass the state of the same step, and the same arguments, on every rank",
        )


def _device(state: State) -> torch.device:
    return next((flat.device for flat in state.flats.values()), state.seed.device)


def _rounds(made: Sequence[tuple[Record, Item]]) -> list[list[_Slice]]:
    """What rank 0 takes, in the order of the files, with `ROUND_BYTES` on the wire at most."""
    rounds: list[list[_Slice]] = [[]]
    sent = 0
    for index, (record, item) in enumerate(made):
        for one in _slices(index, record, item):
            if sent and sent + one.nbytes > ROUND_BYTES:
                rounds.append([])
                sent = 0
            rounds[-1].append(one)
            sent += one.nbytes
    return rounds


def _slices(index: int, record: Record, item: Item) -> list[_Slice]:
    holders = record.lying.grid.holders
    nothing = Box((0,) * len(record.shape), record.shape)
    boxes = [(part, box) for part in range(record.parts) for box in record.first_boxes(part)]
    boxes = boxes or [(0, nothing)]
    found: list[_Slice] = []
    for part, box in boxes:
        source = 0 if 0 in holders[part] else holders[part][0]
        if source == 0:
            found.append(_Slice(index, 0, box, 0))
            continue
        for piece in _pieces(box, item.dtype.itemsize):
            nbytes = -(-piece.numel * item.dtype.itemsize // _ALIGN) * _ALIGN
            found.append(_Slice(index, source, piece, nbytes))
    return found


def _pieces(box: Box, itemsize: int) -> list[Box]:
    """Blocks of a rectangle along its first dimension that has several rows."""
    dim = next((d for d, size in enumerate(box.sizes) if size > 1), None)
    if dim is None or box.numel * itemsize <= ROUND_BYTES:
        return [box]
    rows = max(1, ROUND_BYTES // (box.numel // box.sizes[dim] * itemsize))
    found: list[Box] = []
    for start in range(0, box.sizes[dim], rows):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim] += start
        sizes[dim] = min(rows, box.sizes[dim] - start)
        block = Box(tuple(offsets), tuple(sizes))
        found += [block] if rows > 1 else _pieces(block, itemsize)
    return found


def _collective(one: Sequence[_Slice], rank: int) -> Collective | None:
    """The exchange of a round; nothing to send is an exchange too, unless nobody has anything."""
    if not any(piece.nbytes for piece in one):
        return None
    nbytes = sum(piece.nbytes for piece in one if piece.source == rank)
    return Collective("all_to_all", JOB, nbytes, "", "export", torch.uint8)


class _Writing:
    """One export on its way, on one rank."""

    def __init__(
        self,
        made: Sequence[tuple[Record, Item]],
        files: Files,
        mover: Mover,
        device: torch.device,
    ) -> None:
        self.error: Exception | None = None
        self._made = made
        self._files = files
        self._mover = mover
        self._device = device
        self._whole: Tensor | None = None
        self._missing = 0

    def run(self, one: Sequence[_Slice]) -> None:
        """Send or receive what moves in a round, and write what is whole."""
        rank = self._mover.rank
        received = self._exchange(one)
        if rank != 0 or self.error is not None:
            return
        try:
            for piece, start in zip(one, self._starts(one), strict=True):
                self._put(piece, received[start : start + piece.nbytes])
        except Exception as error:
            self.error = error
            self._whole = None

    def _starts(self, one: Sequence[_Slice]) -> list[int]:
        """Where each slice lies in what has arrived: by rank, then in the order of the round."""
        order = sorted(range(len(one)), key=lambda number: one[number].source)
        starts, at = [0] * len(one), 0
        for number in order:
            starts[number] = at
            at += one[number].nbytes
        return starts

    def _exchange(self, one: Sequence[_Slice]) -> Tensor:
        rank, size = self._mover.rank, self._mover.mesh.size
        item = _collective(one, rank)
        total = sum(piece.nbytes for piece in one) if rank == 0 else 0
        out = torch.empty(total, dtype=torch.uint8, device=self._device)
        if item is None:
            return out
        mine = [piece for piece in one if piece.source == rank and piece.nbytes]
        sent = torch.zeros(item.nbytes, dtype=torch.uint8, device=self._device)
        at = 0
        for piece in mine:
            raw = _bytes(self._values(piece))
            sent[at : at + raw.numel()].copy_(raw)
            at += piece.nbytes
        counts = [0] * size
        if rank == 0:
            for piece in one:
                counts[piece.source] += piece.nbytes
        finish(self._mover.all_to_all(out, sent, counts, [at] + [0] * (size - 1), item))
        return out

    def _values(self, piece: _Slice) -> Tensor:
        """This rank's elements of a slice, in the dtype of the file."""
        record, item = self._made[piece.index]
        return record.inside(self._mover.rank, piece.box).detach().to(item.dtype)

    def _put(self, piece: _Slice, raw: Tensor) -> None:
        """Take a slice; a tensor that is whole is written and forgotten."""
        record, item = self._made[piece.index]
        if record.parts == 1:
            self._files.append(item, self._values(piece))
            return
        if self._whole is None:
            self._whole = torch.empty(item.shape, dtype=item.dtype)
            self._missing = self._whole.numel()
        target = self._whole
        for dim, (start, size) in enumerate(zip(*piece.box, strict=True)):
            target = target.narrow(dim, start, size)
        if piece.source == 0:
            target.copy_(self._values(piece))
        else:
            numel = piece.box.numel
            target.copy_(raw[: numel * item.dtype.itemsize].view(item.dtype).view(piece.box.sizes))
        self._missing -= piece.box.numel
        if self._missing == 0:
            self._files.append(item, self._whole)
            self._whole = None

    def finish(self, dtype: torch.dtype | None) -> None:
        """Complete the directory, on rank 0."""
        if self._mover.rank != 0 or self.error is not None:
            return
        try:
            self._files.complete(json_of(self._files.config, dtype))
        except Exception as error:
            self.error = error


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().reshape(-1).view(torch.uint8)
