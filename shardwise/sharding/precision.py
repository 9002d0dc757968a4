"""Dtypes: what precision asks of a parameter, and the dtype of each of its layouts that follows.

[Note: dtypes of a parameter]
It rests in `params`; a unit gathers it in `gather` and its modules see it in `compute`. Gradients
come in the compute dtype, are summed over ranks in `reduce`, and rest in `grads`. The optimizer
steps in `master`. What is not given follows from what is: `compute` from `params`, `gather` from
`compute`, `reduce` is float32 or the compute dtype if that is wider, `grads` follows `reduce`, and
`master` is float32 or the params dtype if that is wider. A parameter that no `precision` selects
has its own dtype everywhere. Passes of a step add gradients up in the wider of `reduce` and
`grads`. With stochastic rounding no master copy rests: the optimizer steps a copy in float32 (or in
`master`, if that is wider), and what comes out is rounded up or down at random, so that the mean is
right; see [Note: stochastic rounding].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from shardwise.sharding.edits import Edit
from shardwise.sharding.errors import PlanError, nearest
from shardwise.sharding.failures import Failure
from shardwise.sharding.units import ParamInfo, dtype_name

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""Names of the dtypes that a model can compute in."""

ROUNDINGS = ("nearest", "stochastic")
"""How what the optimizer has computed becomes a parameter of 16 bits."""

SETTINGS = ("params", "master", "compute", "gather", "reduce", "grads", "rounding")
"""What can be set for a parameter."""

_HALF_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionEdit(Edit):
    """Set dtypes; None leaves what earlier edits have set.

    One edit is for parameters, which `where` selects, for the `outputs` of `modules` (patterns over
    their paths, `""`: the model), or for the `buffers` of `buffer_paths` (patterns; none: all). In
    the latter two `where` holds only the masks around the call.
    """

    kind: ClassVar[str] = "precision"
    params: str | None = None
    master: str | None = None
    compute: str | None = None
    gather: str | None = None
    reduce: str | None = None
    grads: str | None = None
    rounding: str | None = None
    outputs: str | None = None
    buffers: str | None = None
    modules: tuple[str, ...] = ()
    buffer_paths: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        Edit.__post_init__(self)
        for name in (*SETTINGS[:-1], "outputs", "buffers"):
            if getattr(self, name) is not None:
                check_float(self.by or "a precision edit", name, getattr(self, name))
        if self.rounding not in (None, *ROUNDINGS):
            raise PlanError(
                f"{self.by or 'a precision edit'} rounds in an unknown way.",
                where="argument rounding of precision()",
                facts=f"rounding is {self.rounding!r}; allowed: {', '.join(map(repr, ROUNDINGS))}.",
                why="It says how an updated parameter becomes one of 16 bits.",
                fix=nearest(str(self.rounding), ROUNDINGS),
                rounding=self.rounding,
            )

    @property
    def phase(self) -> str:
        """Its own."""
        return "precision"

    @property
    def settings(self) -> dict[str, str]:
        """What is set for parameters."""
        given = {name: getattr(self, name) for name in SETTINGS}
        return {name: value for name, value in given.items() if value is not None}


class Asked(NamedTuple):
    """One setting, and the call that made it."""

    value: str
    by: str = ""


class Dtypes(NamedTuple):
    """The dtypes of one parameter; see [Note: dtypes of a parameter]."""

    params: str
    master: str
    compute: str
    gather: str
    reduce: str
    grads: str


def check_float(by: str, argument: str, name: str) -> None:
    """Raise `PlanError` for a name of no dtype that a model can compute in."""
    if name in FLOATS:
        return
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    if is_float:
        why = f"{name} needs a scale beside every tensor, which plans do not have yet."
        fix = "'bfloat16' is the narrowest dtype with the range of float32"
    elif isinstance(dtype, torch.dtype):
        why = "Precision is about floating dtypes; integer and complex parameters keep theirs."
        fix = nearest(name, FLOATS)
    else:
        why = "Dtypes are called as in torch, without abbreviations."
        fix = nearest(str(name), FLOATS)
    raise PlanError(
        f"{by} names the {'unsupported' if dtype is not None else 'unknown'} dtype {name!r}.",
        where=f"argument {argument} of precision()",
        facts=f"{argument} is {name!r}; allowed: {', '.join(FLOATS)}.",
        why=why,
        fix=fix,
        argument=argument,
        dtype=name,
    )


def is_float(dtype: str) -> bool:
    """Whether precision may change a dtype.

    >>> is_float("bfloat16"), is_float("complex64")
    (True, False)
    """
    return getattr(torch, dtype).is_floating_point


def is_half(dtype: str) -> bool:
    """Whether a floating dtype has 16 bits.

    >>> is_half("bfloat16"), is_half("float32")
    (True, False)
    """
    return is_float(dtype) and getattr(torch, dtype).itemsize == _HALF_BYTES


def wider(one: str, other: str) -> str:
    """The narrowest dtype that holds the values of both.

    >>> wider("float32", "bfloat16"), wider("float16", "bfloat16")
    ('float32', 'float32')
    """
    return dtype_name(torch.promote_types(getattr(torch, one), getattr(torch, other)))


def dtypes_of(info: ParamInfo, asked: Mapping[str, Asked]) -> Dtypes:
    """The dtypes of a parameter from what was asked; see [Note: dtypes of a parameter]."""
    if not asked:
        return Dtypes(*[info.dtype] * len(Dtypes._fields))

    def get(setting: str, default: str) -> str:
        return asked[setting].value if setting in asked else default

    params = get("params", info.dtype)
    compute = get("compute", params)
    reduce = get("reduce", wider("float32", compute))
    return Dtypes(
        params=params,
        master=get("master", wider("float32", params)),
        compute=compute,
        gather=get("gather", compute),
        reduce=reduce,
        grads=get("grads", reduce),
    )


def misfit(info: ParamInfo, asked: Mapping[str, Asked], dtypes: Dtypes) -> Failure | None:
    """Why the optimizer cannot step a parameter in these dtypes; None: it can."""
    if not info.trainable:
        return None
    rounding = asked.get("rounding", Asked("nearest"))
    if rounding.value == "stochastic" and not is_half(dtypes.params):
        return Failure(
            by=rounding.by or "a precision edit",
            problem="rounds {count} stochastically that have more than 16 bits",
            path=info.path,
            tail=f"params {dtypes.params}   master {dtypes.master}",
            why="Stochastic rounding takes the place of a master copy for parameters of 16 bits; "
            f"{dtypes.params} parameters need neither.",
            fix="params='bfloat16', or where= to leave these parameters out",
            numbers={"dtype": dtypes.params},
        )
    if wider(dtypes.master, dtypes.params) != dtypes.master:
        source = asked.get("master") or asked.get("params") or Asked("")
        return Failure(
            by=source.by or "a precision edit",
            problem="gives {count} a master that does not hold their values",
            path=info.path,
            tail=f"params {dtypes.params}   master {dtypes.master}",
            why="The master is the truth and the parameter its rounding.",
            fix=f"master={wider(dtypes.master, dtypes.params)!r}, or leave master= out",
            numbers={"params": dtypes.params, "master": dtypes.master},
        )
    return None


def no_float(info: ParamInfo, edit: PrecisionEdit) -> Failure:
    """The failure of a parameter without a floating dtype that was selected by itself."""
    return Failure(
        by=edit.by or "a precision edit",
        problem="selects {count} that are no floating numbers",
        path=info.path,
        tail=f"shape {info.shape}   dtype {info.dtype}",
        why="Integer and complex parameters keep their dtype; a pattern over the modules around "
        "them passes them over, one that names them is a mistake.",
        fix="take it out of where=, such as where=(..., '~" + info.path + "')",
        numbers={"dtype": info.dtype},
    )
