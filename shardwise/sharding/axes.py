"""Axes: a pattern that names the dimensions of a tensor, and the sizes that follow from a shape."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.sharding.errors import AxesError, nearest
from shardwise.sharding.grammar import Atom, Fault, Node, Position, Reader, Sum, read_dims, render


@dataclass(frozen=True, slots=True, repr=False)
class Axes:
    """Names for the dimensions of a tensor, composite ones included.

    Make one with `Axes.parse`. Equal by value, hashable; `str` gives the canonical text.

    Args:
        dims: one node per dimension.

    >>> axes = Axes.parse("((heads + kv + kv) hd) embed")
    >>> axes.ndim, axes.names, axes.dim_name(0)
    (2, ('heads', 'kv', 'hd', 'embed'), '((heads + kv + kv) hd)')
    >>> axes.sizes((48, 256), heads=8, hd=4)
    {'heads': 8, 'kv': 2, 'hd': 4, 'embed': 256}
    """

    dims: tuple[Node, ...]

    @staticmethod
    def parse(text: str) -> Axes:
        """Read a pattern.

        Raises:
            AxesError: the text does not follow the grammar; the message points at the fault.

        >>> Axes.parse("( 2  mlp ) (embed)")
        Axes('(2 mlp) embed')
        """
        return _parse(text)

    @staticmethod
    def anonymous(ndim: int) -> Axes:
        """Axes for a tensor nobody described.

        >>> Axes.anonymous(2)
        Axes('d0 d1')
        """
        return Axes(tuple(Atom(f"d{i}") for i in range(ndim)))

    def __str__(self) -> str:
        return " ".join(self.dim_name(i) for i in range(self.ndim))

    def __repr__(self) -> str:
        return f"Axes({str(self)!r})"

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name once, in order of first appearance; numbers are not names."""
        atoms = (node for _, node in self.nodes() if isinstance(node, Atom))
        return tuple(dict.fromkeys(atom.text for atom in atoms if atom.fixed is None))

    def dim_name(self, dim: int) -> str:
        """Text of one dimension, such as `embed` or `(heads hd)`."""
        return render(self.dims[dim], {}, (dim,))

    def nodes(self) -> Iterator[tuple[Position, Node]]:
        """Every node with its position, parents before children."""
        for i, node in enumerate(self.dims):
            yield from _walk(node, (i,))

    def node(self, position: Position) -> Node | None:
        """The node at a position, None when there is none."""
        children = self.dims
        node: Node | None = None
        for i in position:
            if not 0 <= i < len(children):
                return None
            node = children[i]
            children = node.children
        return node

    def node_text(self, position: Position) -> str:
        """Text of the node at a position; empty when there is none."""
        node = self.node(position)
        return "" if node is None else render(node, {}, position)

    def places(self) -> dict[str, tuple[Position, ...]]:
        """Positions of every name.

        >>> Axes.parse("(kv + kv) embed").places()
        {'kv': ((0, 0), (0, 1)), 'embed': ((1,),)}
        """
        found: dict[str, tuple[Position, ...]] = dict.fromkeys(self.names, ())
        for position, node in self.nodes():
            if isinstance(node, Atom) and node.fixed is None:
                found[node.text] += (position,)
        return found

    def alternatives(self, a: Position, b: Position) -> bool:
        """Whether two positions lie in different terms of one sum, so that no element is in both.

        >>> Axes.parse("((heads + kv) hd) embed").alternatives((0, 0, 0), (0, 0, 1))
        True
        """
        common = 0
        while common < min(len(a), len(b)) and a[common] == b[common]:
            common += 1
        return common < min(len(a), len(b)) and isinstance(self.node(a[:common]), Sum)

    def check(self, shape: Sequence[int]) -> None:
        """Raise when a tensor of this shape cannot have these axes.

        Raises:
            AxesError: wrong number of dimensions, or sizes that contradict each other.
        """
        _solve(self, tuple(shape), {})

    def sizes(self, shape: Sequence[int], /, **known: int) -> dict[str, int]:
        """Size of every name: given, or the only one that fits the shape.

        Args:
            shape: shape of the tensor.
            known: sizes of names that the shape alone does not determine.

        Raises:
            AxesError: the shape does not fit, or leaves a name open.

        >>> Axes.parse("(heads hd) embed").sizes((32, 16), hd=8)
        {'heads': 4, 'hd': 8, 'embed': 16}
        """
        sizes = self.known_sizes(shape, **known)
        for dim in range(self.ndim):
            missing = [name for name in _names(self.dims[dim]) if name not in sizes]
            if missing:
                raise AxesError(
                    f"axes '{self}' leave {len(missing)} sizes open: {', '.join(missing)}.",
                    facts=f"shape {tuple(shape)}: dim {dim} '{self.dim_name(dim)}' "
                    f"has size {shape[dim]}.",
                    why="One unknown name per dimension follows from the shape.",
                    fix=f"give {' and '.join(f'{name}=' for name in missing[1:] or missing)}",
                    dim=dim,
                )
        return {name: sizes[name] for name in self.names}

    def known_sizes(self, shape: Sequence[int], /, **known: int) -> dict[str, int]:
        """As `sizes`, but names the shape leaves open are absent."""
        for name in known:
            if name not in self.names:
                raise AxesError(
                    f"sizes of '{self}' were given the unknown name {name!r}.",
                    why="Only names of the pattern have a size.",
                    fix=nearest(name, self.names),
                )
        return _solve(self, tuple(shape), known)


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> Axes:
    reader = Reader(text, Fault("Axes.parse", AxesError))
    dims, marks = read_dims(reader)
    if marks:
        raise reader.fault.at(text, text.index("/"), expected="no mesh axes (a Spec has those)")
    if reader.token:
        raise reader.expected("a name, a number, '(' or the end")
    return Axes(dims)


def _walk(node: Node, at: Position) -> Iterator[tuple[Position, Node]]:
    yield at, node
    for i, child in enumerate(node.children):
        yield from _walk(child, (*at, i))


def _names(node: Node) -> tuple[str, ...]:
    return Axes((node,)).names


def _solve(axes: Axes, shape: tuple[int, ...], known: Mapping[str, int]) -> dict[str, int]:
    """Sizes that follow from shape and `known`; raise when they contradict each other."""
    if len(shape) != axes.ndim:
        raise AxesError(
            f"axes '{axes}' name {axes.ndim} dimensions; the tensor has {len(shape)}.",
            facts=f"shape {shape}.",
            why="Axes name every dimension of a tensor.",
            fix=f"write {len(shape)} dimensions; parentheses merge several names into one",
            ndim=axes.ndim,
            shape=shape,
        )
    sizes = dict(known)
    open_dims = list(range(axes.ndim))
    # One name can close another dimension, so dims are revisited until nothing moves.
    while open_dims:
        waiting = [dim for dim in open_dims if not _settle(axes, dim, shape, sizes)]
        if len(waiting) == len(open_dims):
            break
        open_dims = waiting
    return sizes


def _settle(axes: Axes, dim: int, shape: tuple[int, ...], sizes: dict[str, int]) -> bool:
    """Check one dimension, or learn its last unknown; False when it stays open."""
    node = axes.dims[dim]
    unknown = [name for name in _names(node) if name not in sizes]
    if len(unknown) > 1:
        return False
    if not unknown:
        if _measure(node, sizes) != shape[dim]:
            raise _contradiction(axes, dim, shape, sizes)
        return True
    name = unknown[0]
    if _measure(node, {**sizes, name: 0}) == _measure(node, {**sizes, name: 1}) == shape[dim]:
        return False
    found = _invert(node, name, sizes, shape[dim])
    if found is None:
        raise _contradiction(axes, dim, shape, sizes)
    sizes[name] = found
    return True


def _measure(node: Node, sizes: Mapping[str, int]) -> int:
    if isinstance(node, Atom):
        return node.fixed if node.fixed is not None else sizes[node.text]
    parts = [_measure(child, sizes) for child in node.children]
    return sum(parts) if isinstance(node, Sum) else functools.reduce(lambda a, b: a * b, parts)


def _invert(node: Node, name: str, sizes: Mapping[str, int], target: int) -> int | None:
    """The size of `name` that gives `target`: sizes never decrease in it, so bisect."""
    if isinstance(node, Atom):
        return target
    low, high = 0, target
    while low < high:
        middle = (low + high) // 2
        if _measure(node, {**sizes, name: middle}) < target:
            low = middle + 1
        else:
            high = middle
    return low if _measure(node, {**sizes, name: low}) == target else None


def _contradiction(
    axes: Axes, dim: int, shape: tuple[int, ...], sizes: Mapping[str, int]
) -> AxesError:
    used = {name: sizes[name] for name in _names(axes.dims[dim]) if name in sizes}
    given = ", ".join(f"{name}={size}" for name, size in used.items())
    return AxesError(
        f"axes '{axes}' do not fit the shape {shape}.",
        facts=f"dim {dim} '{axes.dim_name(dim)}' has size {shape[dim]}"
        + (f", with {given}." if given else "."),
        why="No whole size of the remaining name gives that; a name has one size in a tensor."
        if len(used) < len(_names(axes.dims[dim]))
        else "A name has one size in a tensor, and a number is that size.",
        fix="correct the pattern or the given sizes",
        dim=dim,
        size=shape[dim],
        shape=shape,
    )
