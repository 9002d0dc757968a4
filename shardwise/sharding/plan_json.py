"""Plans as JSON text, read strictly: an unknown key is an error that names the nearest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from shardwise.sharding.axes import Axes
from shardwise.sharding.derived import Base, Naming
from shardwise.sharding.edits import Edit
from shardwise.sharding.errors import PlanError, nearest
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.replay import KINDS, replay_order
from shardwise.sharding.rules import Rules
from shardwise.sharding.tree import FrozenMap
from shardwise.sharding.units import ParamInfo, Unit

T = TypeVar("T")

_LATER: dict[str, dict[str, Any]] = {"remat": {"tier": ""}}
"""By kind, what edits did not say before there was a choice."""

VERSION = 1
"""Schema version; raised whenever an older reader would misread a newer plan."""


def encode(base: Base, edits: Sequence[Edit], log: Sequence[str]) -> str:
    """JSON text of a plan: one line per parameter, unit and edit, so that diffs are readable."""
    lines = {
        "version": VERSION,
        "mesh": {"sizes": _mesh_sizes(base.mesh), "links": _mesh_links(base.mesh)},
        "rules": None if base.rules is None else base.rules.to_json(),
        "modules": base.modules,
        "buffers": base.buffers,
        "naming": {field.name: dict(getattr(base.naming, field.name)) for field in fields(Naming)},
    }
    blocks = {
        "params": [_record(info) | {"axes": str(info.axes)} for info in base.infos],
        "units": [_record(unit) for unit in base.units],
        "edits": [
            {"kind": edit.kind, **_record(edit), "site": site}
            for edit, site in zip(edits, log, strict=True)
        ],
    }
    parts = [f'"{key}": {json.dumps(value)}' for key, value in lines.items()]
    parts += [f'"{key}": {_block(records)}' for key, records in blocks.items()]
    return "{" + ",\n".join(parts) + "}\n"


def decode(text: str) -> tuple[Base, tuple[Edit, ...], tuple[str, ...]]:
    """Base, edits and log of a plan.

    Raises:
        PlanError: not JSON, not a plan, another version, or unknown keys.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise _bad("text", f"it is not JSON: {error}") from None
    version = data.get("version") if isinstance(data, dict) else None
    if version != VERSION:
        raise PlanError(
            f"Plan.from_json cannot read schema version {version!r}.",
            facts=f"This shardwise writes and reads version {VERSION}.",
            why="A plan of another version may mean something else.",
            fix="write the plan again with this version of shardwise",
            version=version,
        )
    lines = {"version", "mesh", "rules", "modules", "buffers", "naming"}
    # Plans that were written before names had sources say nothing of them.
    unnamed: dict[str, Any] = {"naming": {field.name: {} for field in fields(Naming)}}
    top = _read(unnamed | data, "plan", {*lines, "params", "units", "edits"})
    mesh = _read(top["mesh"], "mesh", {"sizes", "links"})
    infos = tuple(_info(record) for record in top["params"])
    units = tuple(_build(Unit, record, "unit") for record in top["units"])
    rules = None if top["rules"] is None else Rules.from_json(top["rules"])
    pairs = [_edit(record) for record in top["edits"]]
    pairs.sort(key=lambda pair: replay_order(pair[0]))
    mesh = Mesh(links=mesh["links"], **mesh["sizes"])
    paths = (tuple(top["modules"]), tuple(top["buffers"]))
    known = _read(top["naming"], "naming", {field.name for field in fields(Naming)})
    naming = Naming(**{name: FrozenMap(values) for name, values in known.items()})
    base = Base(mesh, infos, units, rules, *paths, naming)
    return base, tuple(edit for edit, _ in pairs), tuple(site for _, site in pairs)


def _mesh_sizes(mesh: Mesh) -> dict[str, int]:
    return dict(zip(mesh.names, mesh.sizes, strict=True))


def _mesh_links(mesh: Mesh) -> dict[str, str]:
    return {name: link for name, link in zip(mesh.names, mesh.links, strict=True) if link}


def _block(records: Iterable[Mapping[str, Any]]) -> str:
    lines = ",\n  ".join(json.dumps(record) for record in records)
    return f"[\n  {lines}]" if lines else "[]"


def _record(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _info(record: Any) -> ParamInfo:
    known = _read(record, "parameter", {field.name for field in fields(ParamInfo)})
    values: dict[str, Any] = {**_tuples(known), "axes": Axes.parse(known["axes"])}
    return ParamInfo(**values)


def _edit(record: Any) -> tuple[Edit, str]:
    kind = str(record.get("kind")) if isinstance(record, dict) else ""
    if kind not in KINDS:
        raise _bad(f"edit {record!r}", f"unknown kind {kind!r}; {nearest(kind, KINDS)}")
    edit = KINDS[kind].edit
    known = _LATER.get(kind, {}) | record
    known = _read(known, f"{kind} edit", {"kind", "site", *(f.name for f in fields(edit))})
    site = known["site"]
    return edit(**_tuples({k: v for k, v in known.items() if k not in ("kind", "site")})), site


def _build(kind: Callable[..., T], record: Any, what: str) -> T:
    return kind(**_tuples(_read(record, what, {field.name for field in fields(kind)})))  # type: ignore[arg-type]


def _read(record: Any, what: str, known: set[str]) -> dict[str, Any]:
    """The record, once it has exactly the known keys."""
    if not isinstance(record, dict):
        raise _bad(what, f"it is a {type(record).__name__}, not a record")
    for key in record:
        if key not in known:
            raise _bad(what, f"unknown key {key!r}; {nearest(key, sorted(known))}")
    missing = sorted(known - set(record))
    if missing:
        raise _bad(what, f"missing {', '.join(map(repr, missing))}")
    return record


def _tuples(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _tuple(value) for key, value in record.items()}


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def _bad(what: str, fault: str) -> PlanError:
    return PlanError(
        f"Plan.from_json cannot read the {what}.",
        facts=fault,
        why="Plans are read strictly, so that nothing in them is silently ignored.",
        fix="write plans with Plan.to_json",
    )
