"""The protocol: an optimizer is a few pure functions, and one optional in-place form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from shardwise.optim.norms import Norm
from shardwise.sharding.buckets import Couples, Part

Tensors: TypeAlias = dict[str, Tensor]
Scale: TypeAlias = Tensor | Mapping[str, Tensor]
"""What multiplies gradients: one 0-dim factor, or one per key; keys it leaves out stay."""
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


_COUPLING: tuple[Couples, ...] = ("element", "tensor", "tree")


class EmptyState(NamedTuple):
    """The state of a transform that remembers nothing."""


class GradientTransform(NamedTuple):
    """A function from gradients to updates, with state.

    `params`, `grads` and the dicts inside a state share their keys: bucket names with flat
    1-D local groups in a program, parameter paths with whole tensors in plain use. A key that
    is absent from `grads` keeps its value and its state.

    Attributes:
        init: `init(params) -> opt_state`. Reads shapes, dtypes and devices only.
        update: `update(grads, opt_state, params, **extra) -> (updates, opt_state)`. The
            definition and the oracle: pure, out of place, `new = params + updates`.
        apply: `apply(params, grads, opt_state, *, scale=None, **extra) -> (params, opt_state)`.
            Writes params and state in place and returns the same objects; `grads` is only
            read, unless the extra `reuse_grads` is true, which lets it write to them. `scale`
            multiplies the gradients: a 0-dim tensor, or one by key, see `scale_of`. None when the
            transform has no in-place form.
        couples: what must be seen whole at once, given the extras in `needs`: any single
            `"element"`, a `"tensor"`, or the `"tree"`.
        needs: the norms that a caller whose gradients are cut must pass: `norms={norm: value}`,
            of the gradients after `scale`, as 0-dim tensors.
        parts: `parts({path: shape}) -> {path: Part}`: the label of each parameter and what must be
            seen whole for it. None: all parameters are alike and couple as `couples` says.
        over: `over({path: shape}, {key: path}) -> transform`: the same transform over other keys;
            each stands for parameters of one label, of which one is named. None: keys do not
            matter to the transform.
        factor: `factor(grads, opt_state, *, scale=None, **extra) -> (factor, opt_state)`. Present
            when all that the transform does is multiply every gradient by one 0-dim factor.
        factors: the same with a factor by key; gradients of other keys pass unchanged. Present
            when that is all that the transform does. At most one of the two is present.
        casts: whether `apply` takes the extra `shadows`: tensors by key, in 16 bits, that it rounds
            new parameters to in the pass that makes them.
    """

    init: Callable[[Tensors], Any]
    update: Callable[..., tuple[Tensors, Any]]
    apply: Callable[..., tuple[Tensors, Any]] | None = None
    couples: Couples = "element"
    needs: frozenset[Norm] = frozenset()
    factor: Callable[..., tuple[Tensor, Any]] | None = None
    parts: Callable[[Shapes], dict[str, Part]] | None = None
    over: Callable[[Shapes, Mapping[str, str]], GradientTransform] | None = None
    factors: Callable[..., tuple[Mapping[str, Tensor], Any]] | None = None
    casts: bool = False


def parts_of(transform: GradientTransform, shapes: Shapes) -> dict[str, Part]:
    """How a transform treats each parameter.

    Args:
        transform: any transform.
        shapes: of the trainable parameters, by path.

    Raises:
        PatternError: a pattern of the transform matches none of them.

    >>> same = GradientTransform(lambda params: (), lambda grads, opt_state, params: (grads, ()))
    >>> parts_of(same, {"w": (2, 3)})
    {'w': Part(label='', couples='element')}
    """
    if transform.parts is not None:
        return transform.parts(shapes)
    return {path: Part("", transform.couples) for path in shapes}


def over_keys(
    transform: GradientTransform, shapes: Shapes, keys: Mapping[str, str]
) -> GradientTransform:
    """The transform over other keys; see `GradientTransform.over`."""
    return transform if transform.over is None else transform.over(shapes, keys)


def strongest(couples: Iterable[Couples]) -> Couples:
    """What must be seen whole by several transforms together.

    >>> strongest(["element", "tree", "tensor"])
    'tree'
    """
    return _COUPLING[max(map(_COUPLING.index, couples), default=0)]


def join(parts: Sequence[Part]) -> Part:
    """How several transforms together treat one parameter: each pair of labels is a label.

    >>> join([Part("decay"), Part("", "tensor")])
    Part(label='decay', couples='tensor')
    """
    label = "/".join(part.label for part in parts if part.label)
    return Part(label, strongest(part.couples for part in parts))


def from_factor(
    init: Callable[[Tensors], Any],
    factor: Callable[..., tuple[Tensor, Any]],
    *,
    needs: frozenset[Norm] = frozenset(),
) -> GradientTransform:
    """A transform whose whole effect is one factor, such as clipping by the global norm.

    Args:
        init: makes the state from the params.
        factor: the factor, see `GradientTransform.factor`.
        needs: the norms that `factor` reads.

    >>> halve = from_factor(lambda params: EmptyState(),
    ...                     lambda grads, opt_state, **extra: (torch.tensor(0.5), opt_state))
    >>> halve.update({"w": torch.tensor([4.0])}, EmptyState(), {})[0]
    {'w': tensor([2.])}
    """

    def update(
        grads: Tensors, opt_state: Any, params: Tensors | None = None, **extra: Any
    ) -> tuple[Tensors, Any]:
        del params
        value, opt_state = factor(grads, opt_state, **extra)
        return multiply(grads, value), opt_state

    return GradientTransform(init, update, needs=needs, factor=factor)


def scale_of(scale: Scale | None, key: str) -> Tensor | None:
    """The factor of one key; None: nothing multiplies its gradient.

    >>> print(scale_of({"w": torch.tensor(0.5)}, "w"), scale_of({"w": torch.tensor(0.5)}, "b"))
    tensor(0.5000) None
    """
    return scale.get(key) if isinstance(scale, Mapping) else scale


def multiply(grads: Tensors, scale: Scale) -> Tensors:
    """Every gradient times its 0-dim factor, each in its own dtype."""
    if isinstance(scale, Mapping):
        found = ((key, grad, scale.get(key)) for key, grad in grads.items())
        return {key: grad if one is None else _times(grad, one) for key, grad, one in found}
    return {key: _times(grad, scale) for key, grad in grads.items()}


def _times(grad: Tensor, factor: Tensor) -> Tensor:
    # The cast matters for 0-dim gradients: there the product takes the wider dtype of the two.
    return (grad * factor).to(grad.dtype)


def apply_in_place(
    transform: GradientTransform,
    params: Tensors,
    grads: Tensors,
    opt_state: Any,
    *,
    scale: Scale | None = None,
    **extra: Any,
) -> tuple[Tensors, Any]:
    """Take one step in place: by `apply` where there is one, else by `update` and an addition.

    Args:
        transform: any transform.
        params: written in place.
        grads: read only.
        opt_state: written in place by `apply`; replaced by `update`.
        scale: multiplies the gradients.
        extra: `norms`, as far as `transform.needs` any.

    Returns:
        `params` (the same dict) and the new state.

    >>> halve = from_factor(lambda params: EmptyState(),
    ...                     lambda grads, opt_state, **extra: (torch.tensor(0.5), opt_state))
    >>> params = {"w": torch.tensor([1.0])}
    >>> apply_in_place(halve, params, {"w": torch.tensor([4.0])}, EmptyState())[0]
    {'w': tensor([3.])}
    """
    if transform.apply is not None:
        return transform.apply(params, grads, opt_state, scale=scale, **extra)
    with torch.no_grad():
        scaled = grads if scale is None else multiply(grads, scale)
        updates, opt_state = transform.update(scaled, opt_state, params, **extra)
        for key, change in updates.items():
            params[key].add_(change)
    return params, opt_state
