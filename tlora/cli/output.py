"""What the verbs write: colour and fitted columns on a terminal, plain lines anywhere else."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_error(message: str) -> None:
    """One message on standard error."""
    console = Console(stderr=True)
    console.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


def print_lines(lines: Sequence[str]) -> None:
    console = Console()
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    console = Console()
    if not console.is_terminal:
        print_lines(aligned([header, *rows]))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns in line, two spaces apart, however wide they get."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
