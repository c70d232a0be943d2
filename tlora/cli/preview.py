"""`tlora preview`."""

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from tlora.cli.options import JobFile, Overrides
from tlora.core.errors import SpecError


def preview(
    file: JobFile,
    job: Annotated[
        list[str] | None,
        typer.Option(
            "--job",
            metavar="NAME",
            help="Only this job; may be given several times.",
            show_default="every job",
        ),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, metavar="N", help="Rows per job.")] = 2,
    override: Overrides = None,
) -> None:
    """Show rows as the model sees them, with the trained tokens marked."""
    # The spec first: a typo should not wait for the libraries.
    from tlora.config import load_spec
    from tlora.config.fields import nearest

    spec = load_spec(file, override or ())
    names = [each.name for each in spec.jobs]
    for each in job or ():
        if each not in names:
            raise SpecError(f"no job '{each}' in {file}; {nearest(each, names)}", field="--job")

    from tlora.runtime.previewing import preview_job

    console = Console()
    for each in spec.jobs:
        if not job or each.name in job:
            for shown in preview_job(each, spec.base, rows):
                console.print(Text(shown.title, style="bold"), soft_wrap=True)
                console.print(marked(shown.pieces, plain=not console.is_terminal), soft_wrap=True)
                console.print()


def marked(pieces: list[tuple[str, bool]], *, plain: bool) -> Text:
    """Trained text in green and underlined; between [[ and ]] where there is no colour."""
    text = Text()
    before = False
    for piece, trained in pieces:
        if plain and trained != before:
            text.append("[[" if trained else "]]")
        before = trained
        text.append(piece, style="green underline" if trained and not plain else "")
    if plain and before:
        text.append("]]")
    return text
