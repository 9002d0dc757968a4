"""optree, with the types of trees left open: they are whatever users pass as state and batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree

NAMESPACE = "shardwise"
"""Where `State` and `Grads` are registered."""

tree_map: Callable[..., Any] = optree.tree_map
tree_leaves: Callable[..., list[Any]] = optree.tree_leaves
tree_flatten: Callable[..., tuple[list[Any], Any]] = optree.tree_flatten
tree_unflatten: Callable[..., Any] = optree.tree_unflatten
register: Callable[..., Any] = optree.register_pytree_node
