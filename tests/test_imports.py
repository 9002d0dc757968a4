"""The import order, the size limits and the private names of the package, read from its files."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.abstract

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "shardwise"
FILES = sorted(PACKAGE.rglob("*.py"))

# A folder imports from itself and from folders to its left; all else is the face of the package.
ORDER = ("sharding", "kernels", "optim", "offload", "transforms")
FACE = len(ORDER)

# May be imported inside a function, because a plain install does not have them.
OPTIONAL = {"transformers", "tokenizers", "triton", "deepspeed", "hypothesis"}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# Path or path::function -> why it may be longer.
LONGER: dict[str, str] = {}

PRIVATE_HOME = "shardwise/sharding/compat.py"


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def level(module: str) -> int:
    """Position of a module of the package in the import order."""
    parts = module.split(".")
    return ORDER.index(parts[1]) if len(parts) > 1 and parts[1] in ORDER else FACE


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imported(node: ast.AST) -> list[str]:
    """Full names a statement imports: `from a.b import c` gives `a.b` and `a.b.c`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        return [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return []


def wrong_edges(module: str, tree: ast.AST) -> list[str]:
    own = level(module)
    targets = {target for node in ast.walk(tree) for target in imported(node)}
    return [
        f"{module} imports {target}"
        for target in sorted(targets)
        if target.startswith("shardwise.") and level(target) > own
    ]


def late_imports(tree: ast.AST) -> Iterator[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    for function in ast.walk(tree):
        if isinstance(function, functions):
            for node in ast.walk(function):
                for target in imported(node)[:1]:
                    if target.split(".")[0] not in OPTIONAL:
                        yield f"line {node.lineno}: {target}"


def type_checking(tree: ast.AST) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id == "TYPE_CHECKING")
        or (isinstance(node, ast.Attribute) and node.attr == "TYPE_CHECKING")
    ]


def is_private(target: str) -> bool:
    parts = target.split(".")
    return parts[0] == "torch" and any(
        part.startswith("_") and not part.startswith("__") for part in parts[1:]
    )


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain that starts at a plain name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def private_names(tree: ast.AST) -> list[str]:
    aliases = {
        alias.asname or alias.name.split(".")[0]: alias.name if alias.asname else "torch"
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.split(".")[0] == "torch"
    }
    found = [t for node in ast.walk(tree) for t in imported(node) if is_private(t)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = dotted(node).partition(".")
            if first in aliases and is_private(f"{aliases[first]}.{rest}"):
                found.append(f"line {node.lineno}: {aliases[first]}.{rest}")
    return found


def functions(path: Path, tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # The docstring is for the reader of the docs; the limit is on what is executed.
            start = node.body[0].end_lineno if ast.get_docstring(node) else node.lineno - 1
            yield f"{name(path)}::{node.name}", (node.end_lineno or 0) - (start or 0)


@pytest.fixture(params=FILES, ids=name)
def source(request: pytest.FixtureRequest) -> tuple[Path, ast.Module, str]:
    text = request.param.read_text()
    return request.param, ast.parse(text), text


def test_a_folder_imports_only_from_its_left(source: tuple[Path, ast.Module, str]) -> None:
    path, tree, _ = source
    assert not wrong_edges(module_of(path), tree)


def test_imports_stand_at_the_top(source: tuple[Path, ast.Module, str]) -> None:
    _, tree, _ = source
    assert not list(late_imports(tree))
    assert not type_checking(tree)
    relative = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level]
    assert not relative


def test_private_torch_names_live_in_one_file(source: tuple[Path, ast.Module, str]) -> None:
    path, tree, _ = source
    if name(path) != PRIVATE_HOME:
        assert not private_names(tree)


def test_sizes(source: tuple[Path, ast.Module, str]) -> None:
    path, tree, text = source
    lines = len(text.splitlines())
    assert lines <= MAX_FILE_LINES or name(path) in LONGER, f"{lines} lines"
    long = [
        (function, count)
        for function, count in functions(path, tree)
        if count > MAX_FUNCTION_LINES and function not in LONGER
    ]
    assert not long


def test_the_first_line_says_the_idea_in_ascii(source: tuple[Path, ast.Module, str]) -> None:
    _, tree, text = source
    assert ast.get_docstring(tree)
    assert text.isascii()


def test_exceptions_are_still_needed() -> None:
    sizes = {name(path): len(path.read_text().splitlines()) for path in FILES}
    for path in FILES:
        sizes |= dict(functions(path, ast.parse(path.read_text())))
    for key, reason in LONGER.items():
        limit = MAX_FUNCTION_LINES if "::" in key else MAX_FILE_LINES
        assert sizes.get(key, 0) > limit, f"{key} no longer needs its exception"
        assert reason


def test_the_checks_can_fail() -> None:
    """Each check finds what it looks for in a file that breaks all of them."""
    bad = ast.parse(
        "import torch\n"
        "import torch.distributed as dist\n"
        "from torch.distributed._tensor import DTensor\n"
        "from shardwise.transforms.zero import zero\n"
        "from shardwise.cli import app\n"
        "def late():\n"
        "    import json\n"
        "    import triton\n"
        "    dist._functional_collectives\n"
        "    return torch._C, typing.TYPE_CHECKING\n"
    )
    assert wrong_edges("shardwise.optim.adamw", bad) == [
        "shardwise.optim.adamw imports shardwise.cli",
        "shardwise.optim.adamw imports shardwise.cli.app",
        "shardwise.optim.adamw imports shardwise.transforms.zero",
        "shardwise.optim.adamw imports shardwise.transforms.zero.zero",
    ]
    assert not wrong_edges("shardwise.cli", bad)
    assert list(late_imports(bad)) == ["line 7: json"]
    assert type_checking(bad) == [10]
    assert private_names(bad) == [
        "torch.distributed._tensor",
        "torch.distributed._tensor.DTensor",
        "line 9: torch.distributed._functional_collectives",
        "line 10: torch._C",
    ]


IMPORT_QUIETLY = """
import sys, threading
import torch, torch.distributed as dist

before = threading.active_count(), torch.get_num_threads(), torch.initial_seed()
import shardwise

assert not {"transformers", "tokenizers", "triton", "deepspeed"} & set(sys.modules)
assert not dist.is_initialized()
assert not torch.cuda.is_initialized()
assert (threading.active_count(), torch.get_num_threads(), torch.initial_seed()) == before
"""


def test_import_does_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_QUIETLY],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
