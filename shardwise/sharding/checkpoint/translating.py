"""Foreign names into those of a program's state.

[Note: names of moments]
An optimizer's moments are found by the last part of their names: torch's `exp_avg` and
`momentum_buffer` are `mu` here, `exp_avg_sq`, `square_avg` and `sum` are `nu`; what `from_torch`
keeps has torch's own names. Counts of steps come from the steps of the parameters that they count.
Rates are what the optimizer makes of the count at the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.sharding.checkpoint.foreign import Foreign
from shardwise.sharding.checkpoint.manifest import Manifest, Stored
from shardwise.sharding.checkpoint.records import BUFFERS, OPT, PARAMS, SCALE, Record
from shardwise.sharding.errors import CheckpointError, summarise

_KINDS: Mapping[str, tuple[str, ...]] = {
    "mu": ("exp_avg", "momentum_buffer"),
    "nu": ("exp_avg_sq", "square_avg", "sum"),
}
_STEPS = frozenset({"steps", "step"})
_NUMBERS = _STEPS | {"count", "learning_rate"}
Rename = Mapping[str, str] | Callable[[str], str] | None


@dataclass(frozen=True)
class Translated:
    """A foreign checkpoint in the names of one program.

    Args:
        manifest: of its tensors.
        records: those of the program that it has to fill.
        numbers: what is filled with one number, by name.
        counted: the parameters whose steps a number counts; none for the other numbers.
        prefix: what was added to its names (`+model.`) or left out (`-model.`); "": nothing.
        trained: parameters that it has optimizer state of.
    """

    manifest: Manifest
    records: tuple[Record, ...]
    numbers: Mapping[str, float]
    counted: Mapping[str, frozenset[str]]
    prefix: str
    trained: frozenset[str]


def translate(
    foreign: Foreign,
    records: Sequence[Record],
    *,
    aliases: Mapping[str, str],
    transient: Collection[str],
    rename: Rename = None,
) -> Translated:
    """Give every tensor of a foreign checkpoint the name that a program has for it.

    Args:
        foreign: what it holds.
        records: of a state of the program.
        aliases: other names of the program's tied parameters.
        transient: buffers that the program need not be given.
        rename: foreign name to the program's, for those that differ.

    Raises:
        CheckpointError: two tensors get one name, or steps of parameters differ that count as one.
    """
    true = [record for record in records if not record.derived]
    paths = {_path(r): r for r in true if r.name.startswith((f"{PARAMS}/", f"{BUFFERS}/"))}
    known = {**dict.fromkeys(paths), **dict.fromkeys(aliases)}
    names = _renamed(foreign, rename)
    prefix = _prefix(list(names.values()), known)
    names = {old: _with_prefix(new, prefix) for old, new in names.items()}
    _check_once(names, foreign.where)
    found = [
        replace(stored, name=_weight(names[old], paths), of=names[old])
        for old, stored in foreign.weights.items()
    ]
    slots = {
        kind: {names.get(path, path): stored for path, stored in one.items()}
        for kind, one in foreign.slots.items()
    }
    has_state = bool(slots or foreign.steps)
    optimizer = [r for r in records if r.name.startswith(f"{OPT}/")] if has_state else []
    moments = _Moments(optimizer, aliases, foreign.where)
    found += moments.named(slots)
    steps = {names.get(path, path): step for path, step in foreign.steps.items()}
    counts, counted = moments.numbers(steps, foreign.step)
    numbers: dict[str, float] = dict(counts)
    if has_state and foreign.step is not None:
        numbers["step"] = foreign.step
    if foreign.loss_scale is not None:
        numbers[f"{SCALE}/scale"] = foreign.loss_scale
    needed = [
        r for r in paths.values() if _path(r) not in transient or _path(r) in {*names.values()}
    ]
    needed += [r for r in optimizer if _kind(r) not in _NUMBERS]
    return Translated(
        Manifest(foreign.step or 0, "", tuple(found), {}, None, {}),
        tuple(needed),
        numbers,
        counted,
        prefix,
        frozenset(path for one in slots.values() for path in one),
    )


class _Moments:
    """The optimizer state of a program, by kind and parameter."""

    def __init__(self, optimizer: Sequence[Record], aliases: Mapping[str, str], where: str) -> None:
        self._records = optimizer
        self._aliases = aliases
        self._where = where
        self._names: dict[tuple[str, str], list[str]] = {}
        for record in optimizer:
            if record.of:
                self._names.setdefault((_kind(record), record.of), []).append(record.name)

    def named(self, slots: Mapping[str, Mapping[str, Stored]]) -> list[Stored]:
        """Moments with the program's names; those that it has none for keep their own."""
        found: list[Stored] = []
        for kind, one in slots.items():
            ours = [kind, *(mine for mine, theirs in _KINDS.items() if kind in theirs)]
            for path, stored in one.items():
                holder = self._aliases.get(path, path)
                names = [n for mine in ours for n in self._names.get((mine, holder), ())]
                if len(names) > 1:
                    raise self._several(kind, path, names)
                name = names[0] if names else f"{OPT}/{kind}/{path}"
                found.append(replace(stored, name=name, of=holder if names else path))
        return found

    def numbers(
        self, steps: Mapping[str, int], step: int | None
    ) -> tuple[dict[str, int], dict[str, frozenset[str]]]:
        """Counts of steps, of each parameter and of whole transforms, and what they count."""
        mine = {self._aliases.get(path, path): count for path, count in steps.items()}
        found: dict[str, int] = {}
        counted: dict[str, frozenset[str]] = {}
        for record in self._records:
            if record.of and _kind(record) in _STEPS:
                if record.of in mine:
                    found[record.name] = mine[record.of]
                    counted[record.name] = frozenset({record.of})
            elif _kind(record) == "count":
                node = record.name.removesuffix("count")
                over = {r.of for r in self._records if r.of and r.name.startswith(node)}
                counts = {mine[path] for path in over if path in mine}
                if not over and step is not None:
                    counts = {step}
                if len(counts) > 1:
                    raise self._uneven(record.name, mine, over)
                if counts:
                    found[record.name] = counts.pop()
                    counted[record.name] = frozenset(over & mine.keys())
        return found, counted

    def _several(self, kind: str, path: str, names: list[str]) -> CheckpointError:
        return CheckpointError(
            f"{kind} of {path} could be any of {len(names)} parts of the optimizer state.",
            where=self._where,
            facts=names,
            why="Moments are told apart by the last part of their names only.",
            fix="lower with an optimizer that has one such moment for a parameter",
            kind=kind,
            path=path,
        )

    def _uneven(
        self, name: str, steps: Mapping[str, int], over: Collection[str]
    ) -> CheckpointError:
        told = [f"{path}: {steps[path]}" for path in sorted(over) if path in steps]
        return CheckpointError(
            "Parameters have taken different numbers of steps.",
            where=f"{self._where}, for {name}",
            facts=summarise(told),
            why="This optimizer counts the steps of all its parameters together.",
            fix="lower with sw.optim.from_torch, which counts for each, or import weights only",
            steps=dict(steps),
        )


def _kind(record: Record) -> str:
    """The last part of the name of optimizer state, without the parameter."""
    return record.name.removesuffix(f"/{record.of}" if record.of else "").rpartition("/")[2]


def _path(record: Record) -> str:
    return record.name.partition("/")[2]


def _weight(path: str, paths: Mapping[str, Record]) -> str:
    record = paths.get(path)
    return record.name if record is not None else f"{PARAMS}/{path}"


def _renamed(foreign: Foreign, rename: Rename) -> dict[str, str]:
    names = [*foreign.weights, *(path for one in foreign.slots.values() for path in one)]
    if callable(rename):
        return {name: rename(name) for name in names}
    table = rename or {}
    lost = [name for name in table if name not in names]
    if lost:
        raise CheckpointError(
            f"rename= names {len(lost)} tensors that are not there.",
            where=foreign.where,
            facts=summarise(lost),
            why="It maps names in the files to paths of the program.",
            fix=f"known are such as {', '.join(names[:3])}",
            names=tuple(lost),
        )
    return {name: table.get(name, name) for name in names}


def _prefix(names: Sequence[str], known: Collection[str]) -> str:
    """A first segment that all names lack or all have too much; "" if that is not certain.

    >>> _prefix(["layers.0.weight"], ["model.layers.0.weight", "head.weight"])
    '+model.'
    >>> _prefix(["model.layers.0.weight", "model.norm"], ["layers.0.weight", "norm"])
    '-model.'
    """
    if any(name in known for name in names):
        return ""
    firsts = {name.partition(".")[0] for name in known if "." in name}
    extra = {name.partition(".")[0] for name in names if "." in name}
    signs = [*(f"+{one}." for one in sorted(firsts)), *(f"-{one}." for one in sorted(extra))]
    fits = [sign for sign in signs if names and all(_with_prefix(n, sign) in known for n in names)]
    return fits[0] if len(fits) == 1 else ""


def _with_prefix(name: str, prefix: str) -> str:
    if prefix.startswith("+"):
        return prefix[1:] + name
    return name.removeprefix(prefix[1:])


def _check_once(names: Mapping[str, str], where: str) -> None:
    taken: dict[str, str] = {}
    for old, new in names.items():
        if taken.setdefault(new, old) != old:
            raise CheckpointError(
                f"Two tensors would be {new!r}.",
                where=where,
                facts=f"{taken[new]} and {old}",
                why="Each tensor of the program has one source.",
                fix="give each name a path of its own in rename=",
                name=new,
            )
