"""What the engine says when a model does what units or their order do not allow."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.sharding.errors import OrderError, UnitError
from shardwise.transforms.order import Walk

_ONE_LIST = "All ranks walk one list of collectives, made from the order of the first step."

PHASES = {"idle": "outside a step", "train": "forward", "eval": "eval", "backward": "backward"}


def read_outside(path: str, unit: str, phase: str) -> UnitError:
    """A parameter that is read where it has no value."""
    return UnitError(
        f"Parameter {path!r} is read outside its unit.",
        where=f"unit {unit or '(root)'!r}, during {phase}",
        why="A unit's parameters are gathered while its forward runs and nowhere else.",
        fix=f"read it inside the forward of {unit!r}, or make it a root parameter with "
        "units=[...] that leave this module out",
        path=path,
        unit=unit,
    )


def outside(unit: str) -> UnitError:
    """A module of the template that is called when no pass is on its way."""
    return UnitError(
        f"Unit {unit or '(root)'!r} is called outside a step.",
        where="the model that loss_fn was given",
        why="Parameters are bound only while loss_fn runs.",
        fix="do not keep the model that loss_fn receives; use program.eval(state, batch)",
        unit=unit,
    )


def recomputed(unit: str) -> UnitError:
    """A recomputation that needs a unit before backward has reached its output."""
    return UnitError(
        f"Unit {unit!r} is run again in backward while it is not gathered.",
        where="a recomputation (torch.utils.checkpoint) that spans several units, or "
        "use_reentrant=True",
        why="A unit is gathered again when backward reaches its output, so one recomputed region "
        "must lie inside one unit.",
        fix="checkpoint each unit by itself with use_reentrant=False",
        unit=unit,
    )


def late(kind: str, unit: str, phase: str, walk: Walk) -> OrderError:
    """A unit that is entered or left when the list is past it."""
    following = [str(action.event) for action in walk.actions[walk.position :][:3]]
    return OrderError(
        f"Unit {unit or '(root)'!r}: {kind!r} came when its turn had passed.",
        where=f"{phase}, at position {walk.position} of {len(walk.actions)}",
        facts=[f"next in the lowered order: {', '.join(following) or 'nothing'}"],
        why=_ONE_LIST,
        fix="keep the order in which modules run the same in every step, or lower again",
        unit=unit,
        position=walk.position,
    )


def still_running(unit: str, phase: str) -> OrderError:
    """Another nesting than the one that was lowered."""
    return OrderError(
        f"Unit {unit!r} is still running where the lowered order has left it.",
        where=phase,
        why=_ONE_LIST,
        fix="keep the nesting of modules the same in every step, or lower again",
        unit=unit,
    )


def needs_grad(unit: str) -> OrderError:
    """A call that had no backward in the first step and has one now."""
    return OrderError(
        f"Unit {unit!r} runs with gradients where the first step ran it without.",
        where="forward",
        why=_ONE_LIST,
        fix="keep torch.no_grad() around the same calls in every step, or lower again",
        unit=unit,
    )


def written_in_place(path: str, unit: str) -> UnitError:
    """A forward pass that changes a parameter by itself."""
    return UnitError(
        f"The forward of unit {unit or '(root)'!r} writes its parameter {path!r} in place.",
        where=f"parameter {path}",
        why="A forward sees a gathered copy: on some plans the change would be lost, on others the "
        "replicas would drift apart.",
        fix="change parameters through the optimizer, compute with a changed copy, or make it a "
        "buffer (an Embedding: max_norm=None)",
        path=path,
        unit=unit,
    )


def inner_backward(unit: str) -> UnitError:
    """A backward pass that loss_fn runs by itself and that reaches into a unit."""
    return UnitError(
        f"A backward pass inside loss_fn reached unit {unit or '(root)'!r}.",
        where="loss_fn: .backward() or torch.autograd.grad",
        why="The step runs backward, once, on what loss_fn returns. Inside loss_fn only gradients "
        "with respect to activations work, through units that stay gathered.",
        fix="return the loss without .backward(); for a gradient penalty on inputs use "
        "sw.keep_gathered()",
        unit=unit,
    )


def left_out(unit: str) -> OrderError:
    """Backward has passed a unit without its gradients."""
    return OrderError(
        f"Backward left unit {unit or '(root)'!r} out.",
        where="backward",
        why="Every unit reduces its gradients in the reverse of the forward order.",
        fix="report this with the model: it is a fault of shardwise",
        unit=unit,
    )


def explained(error: Exception, notes: Sequence[str]) -> Exception:
    """The same failure with what is known beside it, or what a text of torch's means here."""
    if isinstance(error, OrderError):
        error.facts = (*error.facts, *notes)
    if isinstance(error, RuntimeError) and "out of bounds for storage of size 0" in str(error):
        known = emptied()
        known.__cause__ = error
        return known
    return error


def emptied() -> UnitError:
    """A weight that is used after its unit has given its memory back."""
    return UnitError(
        "Backward needs a weight that is not gathered.",
        where="a tensor that left its unit by a side door: an attribute, a global, or a hook",
        why="A unit is gathered again when backward reaches the outputs it returned; a tensor "
        "that left otherwise reaches its operations too early.",
        fix="return the tensor from the unit's forward; bind(debug=True) names the unit",
    )
