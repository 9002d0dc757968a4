"""What the demo prints: the plan, a live progress bar, and the table at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from shardwise.demo.options import Outcome, Traffic

_PLAIN_EVERY_STEPS = 20


class Advance(Protocol):
    """Report one finished step."""

    def __call__(self, *, loss: float, tokens_per_second: float, rest_bytes: int) -> None:
        """Show the figures of the step."""
        ...


@contextmanager
def progress(console: Console, *, steps: int, predicted_bytes: int) -> Iterator[Advance]:
    """A live bar on a terminal, a line every 20 steps elsewhere."""
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=steps)
        done = 0

        def advance(*, loss: float, tokens_per_second: float, rest_bytes: int) -> None:
            nonlocal done
            done += 1
            text = (
                f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s  "
                f"at rest {kib(rest_bytes)} a rank, predicted {kib(predicted_bytes)}"
            )
            bar.update(task, advance=1, description=text)
            if not console.is_terminal and (done % _PLAIN_EVERY_STEPS == 0 or done == steps):
                console.print(f"step {done}/{steps}  {text}", highlight=False, soft_wrap=True)

        yield advance


def summary(outcome: Outcome) -> Table:
    """The closing table: losses beside the entropy, speed, and predictions beside measurements."""
    table = Table(title=f"{outcome.ranks} ranks", title_justify="left")
    table.add_column("")
    table.add_column("measured", justify="right")
    table.add_column("beside it", justify="right")
    entropy = f"{outcome.unigram_nats:.3f} unigram entropy"
    table.add_row("train loss, nats per byte", f"{outcome.train_loss:.3f}", entropy)
    table.add_row("eval loss, nats per byte", f"{outcome.eval_loss:.3f}", entropy)
    table.add_row("speed", f"{outcome.tokens_per_second:,.0f} tokens/s", "")
    table.add_row(
        "bytes at rest per rank",
        f"{outcome.measured_bytes:,}",
        f"{outcome.predicted_bytes:,} predicted",
    )
    same = "the same list" if outcome.same_collectives else "ANOTHER LIST"
    table.add_row("collectives per step", moved(outcome.executed), f"{same} predicted")
    table.add_row("", "", f"{moved(outcome.predicted)} predicted")
    if outcome.largest_difference is not None:
        table.add_row(
            "largest difference of a weight", f"{outcome.largest_difference}", "split reference"
        )
    table.add_row("weights", outcome.weights, "")
    return table


def moved(traffic: Traffic) -> str:
    """Number and payload of collectives.

    >>> moved(Traffic(14, 5_120_000))
    '14 with 5,120,000 B'
    """
    return f"{traffic.count} with {traffic.payload_bytes:,} B"


def kib(num_bytes: int) -> str:
    """A size in KiB.

    >>> kib(1_048_576)
    '1,024 KiB'
    """
    return f"{num_bytes / 1024:,.0f} KiB"
