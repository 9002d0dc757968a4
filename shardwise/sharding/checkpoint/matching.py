"""Which stored tensor fills which tensor of a program; nothing is read, and nothing is guessed.

[Note: what fits]
Tensors are matched by name. The program needs all of its names and the checkpoint must have no
others, with the same shapes, and dtypes that hold the stored values exactly. Four differences are
no faults, as the two programs explain them. A parameter that only the program trains has fresh
optimizer state; so has a transform all of whose parameters are such, its count included. What only
the saved program trained leaves its optimizer state behind. A tie is one tensor: a program that
ties two parameters takes them from one copy, if the copies are equal, and a program that does not
gets two. A buffer that modules do not save (`persistent=False`), such as a table of positions, may
be missing or longer: the program keeps its own. Everything else must be allowed by a pattern of
`partial`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.sharding.checkpoint.extra import EXTRA, unpack_value
from shardwise.sharding.checkpoint.manifest import Manifest, Stored
from shardwise.sharding.checkpoint.records import BUFFERS, OPT, SCALE, Record
from shardwise.sharding.errors import CheckpointError, PatternError, nearest, summarise
from shardwise.sharding.repeats import collapse, render_group
from shardwise.sharding.tree import match


@dataclass(frozen=True)
class Known:
    """What a plan says of parameters.

    Args:
        trained: those that have optimizer state; None: nobody knows.
        aliases: other names of tied parameters, to the path that holds them.
        frozen: those that have none.
        transient: buffers that follow from the model, as modules do not save them.
    """

    trained: frozenset[str] | None
    aliases: Mapping[str, str] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    transient: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Matched:
    """What fills a program from a checkpoint.

    Args:
        sources: stored tensors by the name of what they fill.
        values: saved values of the optimizer state by name.
        fresh: names that start fresh, as only the program trains their parameters.
        left: stored names that are left behind, as the program does not train their parameters.
        kept: names that the checkpoint lacks, which `partial` allows.
        ignored: stored names that the program lacks, which `partial` allows.
        twins: by name, a second stored copy of a tied tensor, which must be equal.
    """

    sources: Mapping[str, Stored]
    values: Mapping[str, Any]
    fresh: tuple[str, ...]
    left: tuple[str, ...]
    kept: tuple[str, ...]
    ignored: tuple[str, ...]
    twins: tuple[tuple[str, Stored], ...]


@dataclass
class Faults:
    """What does not fit, by kind."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """All of them."""
        return sum(len(lines) for lines in vars(self).values())


def match_state(
    records: Sequence[Record],
    values: Mapping[str, Any],
    manifest: Manifest,
    *,
    program: Known,
    saved: Known,
    partial: Sequence[str] = (),
    cast: bool = False,
    scale: Collection[str] | None = None,
    where: str = "",
) -> Matched:
    """Find the stored tensor of every tensor of a program; see [Note: what fits].

    Args:
        records: of a state of the program; only names, shapes and dtypes are read.
        values: of the same state: what is no tensor, by name.
        manifest: of the checkpoint.
        program: of the program.
        saved: of the program that saved.
        partial: patterns of what the checkpoint may lack or have too much.
        cast: whether dtypes may change with loss.
        scale: fields of the loss scale that are taken; None: all.
        where: of the checkpoint, for errors.

    Raises:
        CheckpointError: something does not fit; one report of everything.
        PatternError: a pattern matches no name on either side.
    """
    true = {record.name: record for record in records if not record.derived}
    have = {name: one for name, one in manifest.by_name.items() if not _is_extra(name)}
    known = {name: record.of or _path(name) for name, record in true.items()}
    known |= {name: one.of or _path(name) for name, one in have.items()}
    saved_values = {name: unpack_value(tree) for name, tree in manifest.values.items()}
    known |= {name: _path(name) for name in (*values, *saved_values)}
    allows = _allowed(partial, known)
    matching = _Matching(program, saved, true, have, Faults())
    if scale is not None:
        matching.skip(f"{SCALE}/{name}" for name in {*_fields(true)} - {*scale})
    matching.match(values, saved_values, allows, cast=cast)
    if matching.faults.count:
        raise _unfit(matching.faults, manifest, where)
    return matching.result(values, saved_values)


def exact(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of one dtype is one of the other.

    >>> exact(torch.bfloat16, torch.float32), exact(torch.float16, torch.bfloat16)
    (True, False)
    >>> exact(torch.int32, torch.int64), exact(torch.int32, torch.float64)
    (True, False)
    """
    if source == target:
        return True
    if source.is_floating_point and target.is_floating_point:
        a, b = torch.finfo(source), torch.finfo(target)
        return b.eps <= a.eps and b.max >= a.max and b.smallest_normal <= a.smallest_normal
    if source.is_complex and target.is_complex:
        return exact(source.to_real(), target.to_real())
    kinds = {source, target}
    if torch.bool in kinds or any(d.is_floating_point or d.is_complex for d in kinds):
        return False
    a, b = torch.iinfo(source), torch.iinfo(target)
    return b.min <= a.min and b.max >= a.max


def _allowed(partial: Sequence[str], known: Mapping[str, str]) -> Callable[[str], bool]:
    """Whether a name may be on one side only.

    A pattern with a `/` selects names, any other one paths of parameters and buffers, with all
    that belongs to them.
    """
    unused = {pattern for pattern in partial if pattern.removeprefix("~") != EXTRA}

    def matches(pattern: str, name: str) -> bool:
        pattern = pattern.removeprefix("~")
        if "/" in pattern:
            return match("^" + pattern.removeprefix("^").replace("/", "."), name.replace("/", "."))
        return match(pattern, known[name])

    for name in known:
        unused = {pattern for pattern in unused if not matches(pattern, name)}
    if unused:
        pattern = min(unused)
        raise PatternError(
            f"pattern {pattern!r} matches no name of the checkpoint or of the program.",
            where="restore(path, partial=...)",
            facts=_grouped(list(known)),
            why="A pattern with '/' is of names, as 'opt/**' is; any other one is of paths.",
            fix=nearest(pattern, list(known)),
            pattern=pattern,
        )
    wanted = [pattern for pattern in partial if not pattern.startswith("~")]
    refused = [pattern for pattern in partial if pattern.startswith("~")]

    def allows(name: str) -> bool:
        some = any(matches(pattern, name) for pattern in wanted) or (not wanted and bool(refused))
        return some and not any(matches(pattern, name) for pattern in refused)

    return allows


class _Matching:
    """One match on its way."""

    def __init__(
        self,
        program: Known,
        saved: Known,
        true: Mapping[str, Record],
        have: Mapping[str, Stored],
        faults: Faults,
    ) -> None:
        self.program, self.saved = program, saved
        self.true, self.have, self.faults = true, have, faults
        ours = program.trained or frozenset()
        theirs = ours if saved.trained is None else saved.trained
        # A tie trains under one name here and under another one there.
        self.ours = _with_ties(ours, program.aliases, saved.aliases)
        self.theirs = _with_ties(theirs, program.aliases, saved.aliases)
        # What begins or ends to train is known to both sides: a new layer is no such parameter.
        self.begins = self.ours & _with_ties(saved.frozen, program.aliases, saved.aliases)
        self.ends = self.theirs & _with_ties(program.frozen, program.aliases, saved.aliases)
        self.begun = _nodes(((n, r.of) for n, r in true.items()), self.begins)
        self.ended = _nodes(((n, s.of) for n, s in have.items()), self.ends)
        self.sources: dict[str, Stored] = {}
        self.twins: list[tuple[str, Stored]] = []
        self.fresh: list[str] = []
        self.left: list[str] = []
        self.kept: list[str] = []
        self.ignored: list[str] = []
        self.skipped: set[str] = set()

    def skip(self, names: Iterable[str]) -> None:
        """Take these from neither side."""
        self.skipped.update(names)

    def match(
        self,
        values: Mapping[str, Any],
        saved: Mapping[str, Any],
        allows: Callable[[str], bool],
        *,
        cast: bool,
    ) -> None:
        """Find what fills every tensor, and what is left over."""
        used = {*self.skipped}
        for name, record in self.true.items():
            if name in self.skipped:
                continue
            stored = self._source(name, record.of)
            if self._follows(name) and (stored is None or stored.shape != record.shape):
                self.kept.append(name)
                used.add(name)
                continue
            if stored is None:
                self._lacks(name, record.of, allows)
                continue
            used.add(stored.name)
            self.sources[name] = stored
            self._compare(record, stored, cast=cast)
        for name, stored in self.have.items():
            if name not in used:
                self._left_over(stored, allows)
        for name in (name for name in values if name not in saved):
            self._lacks(name, "", allows)
        for name in (name for name in saved if name not in values):
            self._unexpected(name, "", allows)
        for name, value in values.items():
            if name in saved and type(saved[name]) is not type(value):
                was, now = type(saved[name]).__name__, type(value).__name__
                self.faults.values.append(f"{name}: saved as {was}, here {now}")

    def result(self, values: Mapping[str, Any], saved: Mapping[str, Any]) -> Matched:
        """What was found."""
        return Matched(
            sources=self.sources,
            values={name: saved[name] for name in values if name in saved},
            fresh=tuple(self.fresh),
            left=tuple(self.left),
            kept=tuple(self.kept),
            ignored=tuple(self.ignored),
            twins=tuple(self.twins),
        )

    def _source(self, name: str, of: str) -> Stored | None:
        """The stored tensor of that name, or of another name of the same tie."""
        if name in self.have or not of:
            return self.have.get(name)
        others = [alias for alias, path in self.program.aliases.items() if path == of]
        others += [self.saved.aliases[of]] if of in self.saved.aliases else []
        names = [name.removesuffix(of) + other for other in others]
        return next((self.have[other] for other in names if other in self.have), None)

    def _follows(self, name: str) -> bool:
        """Whether it is a buffer of which the program has the right values itself."""
        return name.removeprefix(f"{BUFFERS}/") in self.program.transient

    def _compare(self, record: Record, stored: Stored, *, cast: bool) -> None:
        if stored.shape != record.shape:
            line = f"{record.name}: {stored.shape} saved, {record.shape} here"
            self.faults.shapes.append(line)
        complex_to_real = stored.dtype.is_complex and not record.dtype.is_complex
        if not exact(stored.dtype, record.dtype) and (not cast or complex_to_real):
            was, now = (str(d).removeprefix("torch.") for d in (stored.dtype, record.dtype))
            self.faults.dtypes.append(f"{record.name}: {was} saved, {now} here")

    def _lacks(self, name: str, of: str, allows: Callable[[str], bool]) -> None:
        in_opt = name.startswith(f"{OPT}/")
        begins = any(name.startswith(f"{node}/") for node in self.begun)
        if in_opt and (begins or of in self.begins):
            self.fresh.append(name)
        elif allows(name):
            self.kept.append(name)
        else:
            self.faults.missing.append(name)

    def _left_over(self, stored: Stored, allows: Callable[[str], bool]) -> None:
        path = stored.of
        holder = self.program.aliases.get(path)
        twin = stored.name.removesuffix(path) + holder if holder else ""
        if twin in self.true and not allows(stored.name):
            self.twins.append((twin, stored))
            if stored.shape != self.true[twin].shape:
                line = f"{stored.name}: {stored.shape} saved, {self.true[twin].shape} here"
                self.faults.shapes.append(line)
            return
        self._unexpected(stored.name, path, allows)

    def _unexpected(self, name: str, of: str, allows: Callable[[str], bool]) -> None:
        in_opt = name.startswith(f"{OPT}/")
        ended = any(name.startswith(f"{node}/") for node in self.ended)
        if in_opt and (ended or of in self.ends):
            self.left.append(name)
        elif allows(name):
            self.ignored.append(name)
        else:
            self.faults.unexpected.append(name)


def _nodes(pairs: Iterable[tuple[str, str]], alone: Collection[str]) -> frozenset[str]:
    """Nodes of an optimizer state whose dicts are over parameters that one side trains alone."""
    paths: dict[str, set[str]] = {}
    for name, of in pairs:
        if of and name.startswith(f"{OPT}/"):
            node = name.removesuffix(f"/{of}").rpartition("/")[0]
            paths.setdefault(node, set()).add(of)
    return frozenset(node for node, over in paths.items() if node and over.issubset(alone))


def _with_ties(paths: frozenset[str], *tables: Mapping[str, str]) -> frozenset[str]:
    ties = [pair for table in tables for pair in table.items()]
    more = {path for pair in ties if not paths.isdisjoint(pair) for path in pair}
    return paths | more


def _fields(true: Mapping[str, Record]) -> list[str]:
    return [name.partition("/")[2] for name in true if name.startswith(f"{SCALE}/")]


def _path(name: str) -> str:
    """The path of a buffer, or the name itself, which may be matched as a path."""
    return re.sub(r"^(buffers|params)/", "", name).replace("/", ".")


def _is_extra(name: str) -> bool:
    return name == EXTRA or name.startswith(f"{EXTRA}/")


def _grouped(names: Sequence[str]) -> list[str]:
    return summarise([render_group(group) for group in collapse(names)])


def _unfit(faults: Faults, manifest: Manifest, where: str) -> CheckpointError:
    facts: list[str] = []
    for title, names in (
        ("missing in the checkpoint", faults.missing),
        ("unexpected in the checkpoint", faults.unexpected),
    ):
        if names:
            facts += [f"{title}: {len(names)}", *(f"  {line}" for line in _grouped(names))]
    for title, lines in (
        ("shapes differ", faults.shapes),
        ("dtypes lose values", faults.dtypes),
        ("values differ in kind", faults.values),
    ):
        if lines:
            facts += [f"{title}: {len(lines)}", *(f"  {line}" for line in summarise(lines))]
    fixes: list[str] = []
    if faults.missing or faults.unexpected:
        names = [*faults.missing, *faults.unexpected]
        fixes.append(f"partial=[{_grouped(names)[0]!r}, ...] allows what it names to differ")
    if faults.dtypes:
        fixes.append("cast=True allows dtypes that lose values")
    if faults.shapes or faults.values:
        fixes.append("lower a plan of the model and the optimizer that were saved")
    return CheckpointError(
        f"The checkpoint does not fit the program: {faults.count} differences; nothing was loaded.",
        where=where,
        facts=facts,
        why="A state that is restored in part trains on without a word, so all of it must fit.",
        fix="; ".join(fixes),
        count=faults.count,
        step=manifest.step,
        **{kind: tuple(lines) for kind, lines in vars(faults).items()},
    )
