"""What the demo prints: the plan, a live progress bar, and the table at the end."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from shardwise.demo.options import Outcome

_PLAIN_EVERY_STEPS = 20


class Advance(Protocol):
    """Report one finished step."""

    def __call__(
        self, *, step: int, loss: float, tokens_per_second: float, rest_bytes: int
    ) -> None:
        """Show the figures of the step."""
        ...


@contextmanager
def progress(console: Console, *, steps: int, predicted_bytes: int) -> Generator[Advance]:
    """A live bar on a terminal, a line every 20 steps elsewhere."""
    columns = (
        MofNCompleteColumn(),
        BarColumn(bar_width=10),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=steps)

        def advance(*, step: int, loss: float, tokens_per_second: float, rest_bytes: int) -> None:
            # Bytes at rest per rank, measured/predicted: the whole bar fits 80 columns.
            rest = f"rest {kib(rest_bytes)}/{kib(predicted_bytes)} KiB"
            text = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s  {rest}"
            bar.update(task, completed=step, description=text)
            if not console.is_terminal and (step % _PLAIN_EVERY_STEPS == 0 or step == steps):
                console.print(f"step {step}/{steps}  {text}", highlight=False, soft_wrap=True)

        yield advance


def summary(outcome: Outcome) -> Table:
    """The closing table: losses beside the entropy, speed, and measurements beside predictions."""
    table = Table(title=f"{outcome.ranks} ranks", title_justify="left")
    table.add_column("")
    table.add_column("measured", justify="right")
    table.add_column("compared with", justify="right")
    entropy = f"unigram {outcome.unigram_nats:.3f}"
    table.add_row("train loss, nats/byte", f"{outcome.train_loss:.3f}", entropy)
    table.add_row("eval loss, nats/byte", f"{outcome.eval_loss:.3f}", entropy)
    table.add_row("tokens/s", f"{outcome.tokens_per_second:,.0f}", "")
    table.add_row(
        "rest bytes per rank",
        f"{outcome.measured_bytes:,}",
        f"predicted {outcome.predicted_bytes:,}",
    )
    table.add_row(
        "a step's bytes beyond rest",
        f"{outcome.measured_step:,}",
        f"predicted {outcome.predicted_step:,}",
    )
    if outcome.plain_step != outcome.predicted_step:
        table.add_row("  without options", "", f"predicted {outcome.plain_step:,}")
    table.add_row(
        "collectives per step", str(outcome.executed.count), f"predicted {outcome.predicted.count}"
    )
    table.add_row(
        "payload bytes per step",
        f"{outcome.executed.payload_bytes:,}",
        f"predicted {outcome.predicted.payload_bytes:,}",
    )
    order = "the same" if outcome.same_collectives else "ANOTHER"
    table.add_row("kinds, axes and order", order, "prediction")
    if outcome.largest_difference is not None:
        found = f"{outcome.largest_difference}"
        table.add_row("largest weight difference", found, outcome.reference)
    return table


def printable(text: bytes) -> str:
    r"""Text for a terminal: what is not a printable character or a line break is shown as `?`.

    >>> printable(b"def f(x):" + bytes([10, 27, 255]))
    'def f(x):\n??'
    """
    decoded = text.decode("utf-8", errors="replace")
    return "".join(c if (c.isprintable() and c.isascii()) or c == "\n" else "?" for c in decoded)


def kib(num_bytes: int) -> str:
    """A size in KiB, without the unit.

    >>> kib(1_048_576)
    '1,024'
    """
    return f"{num_bytes / 1024:,.0f}"
