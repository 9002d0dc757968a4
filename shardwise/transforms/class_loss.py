"""The arithmetic of cross entropy on one block of the classes of each token.

[Note: cut classes]
With classes cut over ranks, the loss of a token follows from four numbers of each rank: the largest
logit, the sum of the exponentials relative to it, the logit of the target if it is here (else 0),
and, only with label smoothing, the sum of all logits. One gather brings them together; they are
combined in rank order, so that all ranks have the same bits. The logarithm of the sum of all
exponentials (`lse`) is all that backward needs beside the logits: a rank finds the gradient of its
own block without another collective. Padding at the end of a block is looked at by nobody.

Everything is computed in float32, float64 for float64 logits, in blocks of tokens, so that nothing
of the size of the logits is made beside the logits.

References: Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053, section 3 (fused cross entropy);
Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, arXiv:1805.02867.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Temporary results of a block of tokens: 1 MiB stays in a cache, 64 MiB outweigh launches.
_BLOCK_BYTES = {"cpu": 1 << 20}
_OTHER_BLOCK_BYTES = 1 << 26


def accurate(dtype: torch.dtype) -> torch.dtype:
    """In what logits of a dtype are computed with.

    >>> accurate(torch.bfloat16), accurate(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class ClassLoss:
    """Cross entropy with its options, on the block of classes `first` to `first + count`.

    Args:
        classes: in all.
        first: of the classes that are here.
        count: of the classes that are here; a block may have padding after them.
        ignore_index: the target that marks tokens without a loss.
        label_smoothing: part of a target that is spread over all classes.
        z_loss: factor of the square of `lse` that is added to the loss of a token.
    """

    classes: int
    first: int
    count: int
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def numbers(self, logits: Tensor, target: Tensor) -> Tensor:
        """What the loss needs of this block: 3 numbers for each token, or 4 with smoothing.

        Args:
            logits: `tokens classes`.
            target: `tokens`, over all classes.
        """
        size = 4 if self.label_smoothing else 3
        out = logits.new_zeros((size, logits.shape[0]), dtype=accurate(logits.dtype))
        if not self.count:
            out[0] = -torch.inf
            return out
        for rows in _blocks(logits):
            x = logits[rows, : self.count].to(out.dtype)
            top = x.amax(1)
            here, index = self._here(target[rows])
            out[0, rows] = top
            # -inf - (-inf) would be no number, and a block may be masked as a whole.
            base = top.masked_fill(top == -torch.inf, 0)
            out[1, rows] = torch.sub(x, base.unsqueeze(1)).exp_().sum(1)
            out[2, rows] = x.gather(1, index.unsqueeze(1)).squeeze(1).masked_fill_(~here, 0)
            if self.label_smoothing:
                out[3, rows] = x.sum(1)
        return out

    def losses(self, numbers: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each token, zero where it is ignored, and `lse`.

        Args:
            numbers: of all ranks in rank order, `ranks 3|4 tokens`.
            target: `tokens`.
        """
        tops = numbers[:, 0]
        top = tops.amax(0)
        base = top.masked_fill(top == -torch.inf, 0)
        lse = base + (numbers[:, 1] * (tops - base).exp()).sum(0).log()
        loss = lse - (1 - self.label_smoothing) * numbers[:, 2].sum(0)
        if self.label_smoothing:
            loss = loss - self.label_smoothing / self.classes * numbers[:, 3].sum(0)
        if self.z_loss:
            loss = loss + self.z_loss * lse**2
        return loss.masked_fill(target == self.ignore_index, 0), lse

    def write_grads(
        self, grads: Tensor, logits: Tensor, target: Tensor, lse: Tensor, scale: Tensor
    ) -> None:
        """Write the gradient of the logits of this block; zero for padding and ignored tokens.

        Args:
            grads: `tokens classes`; may be `logits` itself.
            logits: `tokens classes`.
            target: `tokens`.
            lse: `tokens`.
            scale: the gradient of the loss of each token.
        """
        scale = scale.masked_fill(target == self.ignore_index, 0).to(lse.dtype)
        factor = scale * (1 + 2 * self.z_loss * lse) if self.z_loss else scale
        grads[:, self.count :].zero_()
        if not self.count:
            return
        smooth = self.label_smoothing
        for rows in _blocks(logits):
            x = logits[rows, : self.count].to(lse.dtype)
            part = torch.sub(x, lse[rows].unsqueeze(1)).exp_().mul_(factor[rows].unsqueeze(1))
            if smooth:
                part.sub_((scale[rows] * (smooth / self.classes)).unsqueeze(1))
            here, index = self._here(target[rows])
            own = ((smooth - 1) * scale[rows]).masked_fill(~here, 0)
            part.scatter_add_(1, index.unsqueeze(1), own.unsqueeze(1))
            grads[rows, : self.count] = part

    def _here(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Which targets are in this block, and their places in it; 0 for the others."""
        local = target - self.first
        here = (local >= 0) & (local < self.count) & (target != self.ignore_index)
        return here, local.masked_fill(~here, 0)


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Cut tokens so that temporary results stay small; several tokens, or one."""
    tokens, columns = logits.shape
    size = _BLOCK_BYTES.get(logits.device.type, _OTHER_BLOCK_BYTES)
    step = max(1, size // (max(1, columns) * accurate(logits.dtype).itemsize))
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))
