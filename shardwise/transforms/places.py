"""Which module of the template runs, and what has been counted in that call of it.

[Note: places]
What a trace finds out about a call inside of a module (its n-th random function, its n-th
`sw.constrain`) has to be found again in a step, and in a recomputation, which runs a module once
more and nothing around it. So calls are known by the path of the innermost module and by their
number in one call of it, which starts from 0 whenever the module is called. Modules say that they
run through the context of the pass: all of them in a trace, in a step those that the trace names.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from shardwise.sharding.compat import saved_tensor_hooks

Forward = Callable[..., Any]
"""The forward of a module."""


@dataclass(slots=True)
class _Frame:
    """One call of a module; `path` is None outside of any."""

    path: str | None
    hooks: Any
    counts: Counter[str] = field(default_factory=Counter[str])


class Places:
    """The calls of modules that are on their way; see [Note: places].

    >>> places = Places()
    >>> with places.inside("mlp"):
    ...     places.path, places.number("constrain"), places.number("constrain")
    ('mlp', 0, 1)
    >>> places.path is None
    True
    """

    def __init__(self) -> None:
        self._open = [_Frame(None, None)]

    @property
    def path(self) -> str | None:
        """Of the innermost module; None outside of all, which is in the loss function."""
        return self._open[-1].path

    @property
    def is_recomputed(self) -> bool:
        """Whether a checkpoint has begun inside of the innermost module, around a part of it."""
        hooks = saved_tensor_hooks()
        name: str = getattr(hooks, "__qualname__", "")
        return hooks is not self._open[-1].hooks and name.startswith("_checkpoint_hook")

    def restart(self) -> None:
        """Begin a pass."""
        self._open = [_Frame(None, saved_tensor_hooks())]

    def number(self, what: str) -> int:
        """How many such calls the innermost module has made before in this call of it."""
        counts = self._open[-1].counts
        counts[what] += 1
        return counts[what] - 1

    def number_around(self, what: str) -> int:
        """The same, and every module around counts it too."""
        for frame in self._open[:-1]:
            frame.counts[what] += 1
        return self.number(what)

    @contextmanager
    def inside(self, path: str) -> Generator[None]:
        """Context of a call of a module."""
        self._open.append(_Frame(path, saved_tensor_hooks()))
        try:
            yield
        finally:
            self._open.pop()


def placed(run: Forward, path: str, places: Callable[[], Places | None]) -> Forward:
    """A forward that says that it runs.

    Args:
        run: the forward of a module.
        path: of the module.
        places: gives those of the pass; None outside of any.
    """

    @functools.wraps(run)
    def forward(*args: Any, **kwargs: Any) -> Any:
        found = places()
        if found is None:
            return run(*args, **kwargs)
        with found.inside(path):
            return run(*args, **kwargs)

    return forward


def function_name(func: Any) -> str:
    """What a function that torch calls back with is called in counts.

    >>> import torch
    >>> function_name(torch.nn.functional.dropout), function_name(torch.Tensor.bernoulli_)
    ('dropout', 'bernoulli_')
    """
    name: str = getattr(func, "__name__", "") or str(func)
    return name
