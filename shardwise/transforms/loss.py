"""What a loss function returns, and how it becomes one exact global mean, or a sum of means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.sharding.errors import BatchError, LossError, LowerError
from shardwise.sharding.pytree import tree_leaves


@dataclass(frozen=True)
class Mean:
    """A sum and how many elements it sums: the exact mean over all ranks is sum / sum.

    The totals of the ranks are added, so a term that does not depend on the batch, such as the
    square of the weights, counts once per rank: give it the weight of this rank's elements,
    `total + count * penalty`, or use `weight_decay` of the optimizer.

    Args:
        total: scalar tensor, the sum over this rank's elements.
        count: number of those elements (a number or a scalar tensor).
        weight: factor of this mean in the loss; not for auxiliary metrics.

    >>> mean = Mean(torch.tensor(6.0), 3)
    >>> float(mean.total), mean.count
    (6.0, 3)
    """

    total: Tensor
    count: Tensor | float
    weight: float = 1.0

    @staticmethod
    def of_tokens(loss: Tensor, labels: Tensor, ignore: int = -100, *, shift: bool = False) -> Mean:
        """From a mean over the labels that are not `ignore`, as cross entropy returns it.

        Args:
            loss: the mean over this rank's labels.
            labels: what was predicted, `[..., position]`.
            ignore: marks labels that do not count.
            shift: the model predicts the label of the next position, as the causal models of
                transformers do with `labels=`; so the first position does not count.

        >>> mean = Mean.of_tokens(torch.tensor(2.0), torch.tensor([1, -100, 3]))
        >>> float(mean.total), float(mean.count)
        (4.0, 2.0)
        >>> float(Mean.of_tokens(torch.tensor(2.0), torch.tensor([1, -100, 3]), shift=True).count)
        1.0
        """
        counted = labels[..., 1:] if shift else labels
        count = (counted != ignore).sum()
        total = torch.where(count > 0, loss, loss.new_zeros(())) * count
        return Mean(total, count)


@dataclass(frozen=True)
class Loss:
    """A parsed result of a loss function.

    Args:
        total: what backward starts from: a sum over elements; of several terms only `joined` tells.
        count: number of the elements; of several terms the sum of theirs.
        aux: auxiliary metrics and loss terms, by name.
        terms: the loss terms by name, if there are several; see [Note: loss terms].
    """

    total: Tensor
    count: Tensor
    aux: Mapping[str, Mean] = field(default_factory=dict)
    terms: Mapping[str, Mean] = field(default_factory=dict)

    @property
    def counts(self) -> Mapping[str, Tensor | float]:
        """This rank's count of each term."""
        return {name: mean.count for name, mean in self.terms.items()}

    def joined(self, counts: Tensor) -> Loss:
        """The loss with the weighted sum of its terms' means as total, this rank's share of it.

        Args:
            counts: global count of each term, in the order of `terms`.
        """
        shares = []
        for mean, count in zip(self.terms.values(), counts, strict=True):
            empty = count == 0
            total = torch.where(empty, torch.zeros_like(mean.total), mean.total)
            shares.append(total * (mean.weight / torch.where(empty, 1.0, count)))
        return replace(self, total=torch.stack(shares).sum())

    def detached(self) -> Loss:
        """The same numbers in float64, without the graph behind them."""

        def wide(mean: Mean) -> Mean:
            return Mean(_wide(mean.total), _wide(mean.count), mean.weight)

        aux = {name: wide(mean) for name, mean in self.aux.items()}
        return Loss(_wide(self.total), _wide(self.count), aux)

    def plus(self, other: Loss) -> Loss:
        """Sums of the numbers of two micro-batches, both `detached` and with the same names."""
        aux = {
            name: Mean(mean.total + other.aux[name].total, mean.count + other.aux[name].count)
            for name, mean in self.aux.items()
        }
        return Loss(self.total + other.total, self.count + other.count, aux)


def _wide(value: Tensor | float) -> Tensor:
    return torch.as_tensor(value).detach().double()


def parse_loss(result: Any, batch: Any) -> Loss:
    """Read a scalar, a `Mean` or a dict of terms, optionally with a dict of auxiliary `Mean`s.

    A scalar is a mean over this rank's rows (dimension 0 of the first tensor in the batch).

    [Note: loss terms]
    A loss of several terms is the sum of `weight * total / count`, each with the count of all ranks
    and micro-batches. A sum over elements can be divided after backward, but terms with different
    counts cannot: so their counts are reduced first, between forward and backward or, from a
    `count_fn`, before the first pass. What backward starts from is then a mean already. A single
    term needs none of this: it is a `Mean`.

    Raises:
        LossError: anything else.
    """
    aux: Mapping[str, Any] = {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        result, aux = result
    metrics = {str(name): _metric(name, metric) for name, metric in aux.items()}
    if not isinstance(result, Mapping):
        return _parse_mean(result, batch, metrics)
    terms = {str(name): _term(name, result[name]) for name in sorted(result, key=str)}
    both = sorted(set(terms) & set(metrics))
    if not terms or both:
        raise _not_a_loss(f"the term and metric {both[0]!r}" if both else "a dict without terms")
    shown = dict(sorted((metrics | terms).items()))
    if len(terms) == 1:
        (mean,) = terms.values()
        return replace(_parse_mean(mean, batch, {}), aux=shown)
    parsed = [_parse_mean(mean, batch, {}) for mean in terms.values()]
    count = torch.stack([one.count for one in parsed]).sum()
    checked = {
        name: Mean(terms[name].total, one.count, terms[name].weight)
        for name, one in zip(terms, parsed, strict=True)
    }
    total = torch.stack([one.total.detach().double() for one in parsed]).sum()
    return Loss(total, count, dict(sorted((metrics | checked).items())), checked)


def _parse_mean(result: Any, batch: Any, aux: Mapping[str, Mean]) -> Loss:
    value = result.total if isinstance(result, Mean) else result
    given = f"a Mean whose total is a {type(value).__name__}" if value is not result else None
    if not isinstance(value, Tensor):
        raise _not_a_loss(given or f"a {type(value).__name__}")
    if value.ndim or not value.is_floating_point():
        form = f"of shape {tuple(value.shape)} and dtype {value.dtype}"
        raise _not_a_loss(f"{given or 'a Tensor'} {form}", shape=tuple(value.shape))
    weight = result.count if isinstance(result, Mean) else num_rows(batch)
    count = torch.as_tensor(weight, dtype=torch.float64, device=value.device)
    count = torch.where(count >= 0, count, torch.nan)  # else the other ranks' counts could hide it
    if count.ndim:
        shape = tuple(count.shape)
        raise _not_a_loss(f"a Mean whose count has shape {shape}", shape=shape)
    if isinstance(result, Mean):
        total = value if result.weight == 1.0 else value * result.weight
    else:
        total = value * weight
    return Loss(total, count.detach(), dict(sorted(aux.items())))


def _metric(name: Any, metric: Any) -> Mean:
    if not isinstance(metric, Mean):
        raise _not_a_loss(f"the auxiliary metric {name!r} as a {type(metric).__name__}")
    if metric.weight != 1.0:
        raise _not_a_loss(f"the auxiliary metric {name!r} with the weight {metric.weight:g}")
    for part in (metric.total, metric.count):
        if isinstance(part, Tensor) and part.numel() != 1:
            shape = tuple(part.shape)
            raise _not_a_loss(f"the auxiliary metric {name!r} of shape {shape}", shape=shape)
    return metric


def _term(name: Any, term: Any) -> Mean:
    if not isinstance(term, Mean):
        raise _not_a_loss(f"the term {name!r} as a {type(term).__name__}")
    return term


def no_gradient(num_trainable: int) -> LossError:
    """The error for a loss in which no rank has used any trainable parameter."""
    return LossError(
        "The loss depends on no trainable parameter.",
        where="loss_fn(model, batch)",
        facts=f"0 of {num_trainable} trainable parameters have a gradient, on every rank.",
        why="A step without a gradient would leave all parameters as they are and say nothing.",
        fix="look for torch.no_grad(), .detach() or .item() between the model and the loss",
        num_trainable=num_trainable,
    )


def bad_count(count: float) -> BatchError:
    """The error for counts of the ranks that do not add up to a number of elements."""
    found = "no elements" if count == 0 else "no countable number of elements"
    return BatchError(
        f"The global batch has {found} to average over.",
        where="program.step(state, batch)",
        facts=[
            f"The counts of all ranks add up to {count:g}"
            + ("; one of them is NaN or negative." if math.isnan(count) else ".")
        ],
        why="The loss is a sum over elements divided by their number.",
        fix="give some rank an element that counts"
        if count == 0
        else "look for an infinite, negative or NaN count in sw.Mean(total, count)",
        count=count,
    )


def counts_unknown(terms: Sequence[str], steps: int) -> LowerError:
    """The error for several loss terms over several passes, without a `count_fn`."""
    example = ", ".join(f"{name!r}: ..." for name in terms)
    return LowerError(
        f"A loss of {len(terms)} terms over {steps} micro-batches needs their counts first.",
        where="loss_fn(model, batch) under accumulate",
        facts=[f"terms: {', '.join(terms)}", f"micro-batches: {steps}"],
        why="Each term is divided by its own count over all ranks and micro-batches, and backward "
        "of the first micro-batch starts before the last one has run.",
        fix=f"lower(..., count_fn=lambda batch: {{{example}}}), or return one sw.Mean",
        terms=tuple(terms),
        steps=steps,
    )


def _not_a_loss(got: str, **numbers: Any) -> LossError:
    return LossError(
        f"The loss function returned {got}.",
        where="loss_fn(model, batch)",
        why="A loss is a floating scalar (the mean over this rank's rows), sw.Mean(total, count) "
        "or a dict of such Means, optionally in a tuple with a dict of sw.Mean metrics.",
        fix="return loss.mean(), or sw.Mean(loss.sum(), loss.numel())",
        **numbers,
    )


def num_rows(batch: Any) -> int:
    """Rows of a batch: dimension 0 of its first tensor."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.shape[0]
    raise BatchError(
        "The batch holds no tensor with a dimension, so a scalar loss has no weight.",
        where="program.step(state, batch)",
        why="A scalar loss is weighted by the rows of the batch.",
        fix="return sw.Mean(total, count) from the loss function",
    )
