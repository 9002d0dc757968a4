"""`sw.cross_entropy`: over classes that a tensor axis may have cut, with one small gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.sharding.compat import FakeTensor, assert_on_device
from shardwise.sharding.errors import BatchError, LossError
from shardwise.transforms.class_loss import ClassLoss
from shardwise.transforms.tensor_context import VocabShard, current_tensor_context

Gather = Callable[[Tensor], Tensor]

_REDUCTIONS = ("sum", "mean", "none")


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "sum",
) -> Tensor:
    """Cross entropy of logits and target classes, in float32 whatever the dtype of the logits.

    In a program it takes logits whose classes a tensor axis has cut as they are: every rank gathers
    12 bytes of each rank for a token (16 with label smoothing; twice that in float64), once, and
    backward moves nothing. Kept for backward are the logits themselves and one number for a token.

    Args:
        logits: `... classes`; the classes come last.
        target: `...`, integers in `[0, classes)` or `ignore_index`.
        ignore_index: marks tokens that have no loss and no gradient.
        label_smoothing: part of the target that is spread over all classes.
        z_loss: `z_loss * logsumexp(logits) ** 2` is added for each token; PaLM takes 1e-4.
        reduction: `"sum"`, `"mean"` over the tokens that are not ignored (not a number if all
            are), or `"none"`.

    Returns:
        A scalar, or `...` for `"none"`; float64 for float64 logits, else float32.

    Raises:
        LossError: shapes, dtypes or options that do not fit.
        BatchError: on the CPU, a target that is no class; on a GPU that is a device-side assert.

    References:
        Szegedy et al., "Rethinking the Inception Architecture", 2015, section 7 (label smoothing);
        Chowdhery et al., "PaLM", 2022, arXiv:2204.02311, section 5 (z-loss).

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([3, -100]))
    tensor(1.3863)
    """
    call = "sw.cross_entropy"
    check_options(call, label_smoothing, z_loss, reduction)
    check_shapes(call, "logits", logits, target)
    context = current_tensor_context()
    shard = context.shard_of(logits, logits.ndim - 1) if context and logits.ndim else None
    loss = class_loss(shard, logits.shape[-1], ignore_index, label_smoothing, z_loss)
    flat = target.reshape(-1).long()
    check_targets(call, flat, loss)
    rows, gather = logits.reshape(-1, logits.shape[-1]), gather_of(shard, "cross_entropy")
    if context is None:
        losses = _CrossEntropy.apply(rows, flat, loss, gather)
    elif shard is None:
        losses = context.by_row(_CrossEntropy.apply, rows, (), flat, loss, gather)
    else:
        losses = context.invariant(_CrossEntropy.apply, rows, flat, loss, gather)
    return reduced(losses, target, ignore_index, reduction)


def shift_labels(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Labels of the next token in the place of each token; the last one has none.

    To be called on whole sequences, so that no token at the end of a part of one loses its label.

    Args:
        labels: `... seq`.
        ignore_index: the label of the last token.

    >>> shift_labels(torch.tensor([5, 6, 7]))
    tensor([   6,    7, -100])
    """
    shifted = torch.full_like(labels, ignore_index)
    shifted[..., :-1] = labels[..., 1:]
    return shifted


class _CrossEntropy(torch.autograd.Function):
    """The loss of each token; keeps the logits and their `lse`."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, loss: ClassLoss, gather: Gather
    ) -> Tensor:
        losses, lse = loss.losses(gather(loss.numbers(logits, target)), target)
        ctx.save_for_backward(logits, target, lse)
        ctx.loss = loss
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        logits, target, lse = ctx.saved_tensors
        written = torch.empty_like(logits)
        ctx.loss.write_grads(written, logits, target, lse, grads[0])
        return written, None, None, None


def class_loss(
    shard: VocabShard | None, columns: int, ignore_index: int, smoothing: float, z_loss: float
) -> ClassLoss:
    """The loss on the block of classes that this rank has.

    Args:
        shard: how classes are cut; None if they are not.
        columns: of the block.
        ignore_index: as in `cross_entropy`.
        smoothing: as in `cross_entropy`.
        z_loss: as in `cross_entropy`.
    """
    rows, first, count = (columns, 0, columns)
    if shard is not None:
        rows, first, count = shard.rows, shard.first, shard.count
    return ClassLoss(rows, first, count, ignore_index, smoothing, z_loss)


def gather_of(shard: VocabShard | None, name: str) -> Gather:
    """What brings the numbers of all ranks together, in rank order.

    Args:
        shard: how classes are cut; None if they are not.
        name: of the collective, in reports.
    """
    context = current_tensor_context()
    if shard is None or context is None:
        return lambda numbers: numbers.unsqueeze(0)
    axis, ranks = shard.axis, shard.ranks

    def gather(numbers: Tensor) -> Tensor:
        if not numbers.numel():  # no tokens, on every rank of the axis alike
            return numbers.new_zeros((ranks, *numbers.shape))
        return context.all_gather(numbers, axis, name)

    return gather


def reduced(losses: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """The losses of tokens as the caller wants them.

    Args:
        losses: of each token.
        target: in its own shape.
        ignore_index: marks tokens that do not count.
        reduction: as in `cross_entropy`.
    """
    if reduction == "none":
        return losses.view(target.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def check_options(call: str, smoothing: float, z_loss: float, reduction: str) -> None:
    """Refuse options that no loss has.

    Raises:
        LossError: always of the first option that is wrong.
    """
    if reduction not in _REDUCTIONS:
        raise LossError(
            f"{call} has no reduction {reduction!r}.",
            where=f"{call}(..., reduction={reduction!r})",
            why="The losses of tokens are summed, averaged, or left as they are.",
            fix='reduction="sum" (for sw.Mean(total, count)), "mean" or "none"',
            reduction=reduction,
        )
    if not 0 <= smoothing <= 1:
        raise LossError(
            f"A label smoothing of {smoothing} is no part of a target.",
            where=f"{call}(..., label_smoothing={smoothing})",
            why="It is the part of the target that is spread over all classes.",
            fix="a number from 0 to 1",
            label_smoothing=smoothing,
        )
    if not 0 <= z_loss < float("inf"):
        raise LossError(
            f"A z-loss of {z_loss} does not pull the logits to zero.",
            where=f"{call}(..., z_loss={z_loss})",
            why="z_loss times the square of logsumexp(logits) is added to the loss.",
            fix="a small positive number such as 1e-4, or 0 for none",
            z_loss=z_loss,
        )


def check_shapes(call: str, name: str, inputs: Tensor, target: Tensor) -> None:
    """Refuse inputs and targets that do not belong together.

    Raises:
        LossError: shapes or dtypes do not fit.
    """
    facts = (
        f"{name} {tuple(inputs.shape)} {inputs.dtype}, target {tuple(target.shape)} {target.dtype}"
    )
    if inputs.shape[:-1] != target.shape or not inputs.ndim:
        raise LossError(
            f"{call} needs one target for each vector of {name}.",
            where=f"{call}({name}, target)",
            facts=facts,
            why="The last dimension is that of the vectors, all others are those of the target.",
            fix=f"{name}.movedim(1, -1) if the channels come second as in torch; target of shape "
            f"{tuple(inputs.shape[:-1])}",
            shape=tuple(inputs.shape),
            target_shape=tuple(target.shape),
        )
    wrong = target.is_floating_point() or target.is_complex() or target.dtype == torch.bool
    if wrong or not inputs.is_floating_point():
        raise LossError(
            f"{call} needs floating {name} and integer targets.",
            where=f"{call}({name}, target)",
            facts=facts,
            why="A target is the number of a class; probabilities of classes are not supported.",
            fix="target.long(), or torch.nn.functional.cross_entropy for probabilities",
            dtype=inputs.dtype,
            target_dtype=target.dtype,
        )


def check_targets(call: str, target: Tensor, loss: ClassLoss) -> None:
    """Refuse targets that are no classes.

    The host does not wait for a GPU, so that there it is an assertion on the device; a trace has no
    values to look at.

    Raises:
        BatchError: on the CPU.
    """
    if isinstance(target, FakeTensor) or target.device.type == "meta" or not target.numel():
        return
    wrong = ((target < 0) | (target >= loss.classes)) & (target != loss.ignore_index)
    if target.device.type != "cpu":
        assert_on_device(~wrong.any(), f"{call}: a target is outside of [0, {loss.classes})")
        return
    count = int(wrong.sum())
    if count:
        value = int(target[wrong][0])
        raise BatchError(
            f"{call} has {count} of {target.numel()} targets that are no class.",
            where=f"{call}(..., target)",
            facts=f"the first one is {value}; there are {loss.classes} classes, "
            f"ignore_index is {loss.ignore_index}",
            why=f"A target is in [0, {loss.classes}), or it is ignore_index.",
            fix=f"mask these targets with {loss.ignore_index}, or give ignore_index={value} if "
            "that is what marks them",
            count=count,
            value=value,
            classes=loss.classes,
        )
