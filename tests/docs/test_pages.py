"""Every command, job file and Python block of the documentation does what the page says."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from support.page_runner import REPOSITORY, Shell, run_page
from support.pages import Block, read_page

from tlora.cli.app import app
from tlora.config.fields import JOB, RUN
from tlora.core.assets import DEMO

PAGES = [
    str(path.relative_to(REPOSITORY))
    for pattern in ("*.md", "docs/*.md", "tlora/**/*.md")
    for path in sorted(REPOSITORY.glob(pattern))
]

NOT_RUN = Counter(
    {
        ("README.md", "sets up an environment"): 1,
        ("docs/tutorial.md", "sets up an environment"): 1,
        ("docs/tutorial.md", "needs vLLM"): 1,
        ("docs/tutorial.md", "needs SGLang"): 1,
        ("docs/benchmarks.md", "takes minutes"): 1,
        ("docs/profiles.md", "takes minutes"): 1,
        ("docs/plans.md", "takes a minute"): 1,
        ("docs/plans.md", "takes minutes"): 1,
        ("docs/parallel.md", "needs torchrun, which a test of its own starts, and two nodes"): 1,
        ("docs/simulation.md", "needs a large trace"): 1,
        ("docs/migrating.md", "an Axolotl file"): 1,
        ("docs/migrating.md", "a LLaMA-Factory file"): 1,
        ("docs/migrating.md", "needs TRL"): 1,
    }
)
"""All that the pages may leave out. The makefile's targets are looked up at least."""


SERVER_OPTIONS = ("--lora-modules", "--lora-paths", "--max-lora-rank")
"""Not ours: vLLM's and SGLang's."""

JOBS = """base: Qwen/Qwen3-0.6B
defaults: {lora: {r: 4}, max_steps: 4, eval: {split: 4, steps: 2}}
jobs:
  - {name: support, data: support.jsonl}
  - {name: sql, data: sql.jsonl}
"""


def rows(folder: Path, *names: str) -> None:
    """Small data files under the names that a page speaks of."""
    for name in names:
        folder.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".csv"):
            lines = ["prompt,completion", *(f"What is {i}?,It is {i}." for i in range(20))]
        else:
            pairs = [{"prompt": f"What is {i}?", "completion": f"It is {i}."} for i in range(20)]
            lines = [json.dumps(pair) for pair in pairs]
        folder.joinpath(name).write_text("\n".join(lines) + "\n")


def model(folder: Path, name: str) -> None:
    """The demo's base under the name of a model on the Hub."""
    folder.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
    folder.joinpath(name).symlink_to(DEMO / "base")


def readme(folder: Path) -> None:
    model(folder, "Qwen/Qwen3-0.6B")
    rows(folder, "support.jsonl", "sql.jsonl", "tone.csv")


def specs(folder: Path) -> None:
    model(folder, "Qwen/Qwen3-8B")
    rows(folder, "support.jsonl", "sql.jsonl", "a.jsonl")


def migrating(folder: Path) -> None:
    model(folder, "Qwen/Qwen3-0.6B")
    rows(folder, "support.jsonl", "data/sql.json")


def small_run(folder: Path) -> None:
    """A job file, for pages on what comes of one."""
    model(folder, "Qwen/Qwen3-0.6B")
    rows(folder, "sql.jsonl", "support.jsonl")
    folder.joinpath("jobs.yaml").write_text(JOBS)


SETUP: dict[str, Callable[[Path], None]] = {
    "README.md": readme,
    "docs/adapters.md": small_run,
    "docs/data.md": lambda folder: rows(folder, "support.jsonl", "faq.csv"),
    "docs/elastic.md": lambda folder: rows(folder, "sql.jsonl", "tone.jsonl"),
    "docs/isolation.md": small_run,
    "docs/migrating.md": migrating,
    "docs/nano_batches.md": small_run,
    "docs/parallel.md": small_run,
    "docs/plan.md": small_run,
    "docs/report.md": small_run,
    "docs/resume.md": small_run,
    "docs/specs.md": specs,
    "docs/sweeps.md": small_run,
}
"""What a page takes for granted; all else it makes itself."""


def blocks_of(page: str) -> list[Block]:
    return read_page(REPOSITORY / page, page)


SLOW = ("README.md", "docs/tutorial.md")


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else []) for page in PAGES],
)
def test_the_page_does_what_it_says(page: str, shell: Shell, tmp_path: Path) -> None:
    """Its blocks in order, in a folder with no more than SETUP puts there."""
    SETUP.get(page, lambda _: None)(tmp_path)
    run_page(blocks_of(page), tmp_path, shell)


def test_no_page_leaves_out_more_than_is_agreed() -> None:
    """Each block that is not run, with its reason."""
    found = Counter(
        (page, block.not_run) for page in PAGES for block in blocks_of(page) if block.not_run
    )
    assert found == NOT_RUN


def test_the_makefile_has_the_targets_that_pages_name() -> None:
    """`make WORD` in a block or in the text."""
    makefile = (REPOSITORY / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"(?:^|`)make ([\w-]+)", (REPOSITORY / page).read_text(), re.M):
            assert re.search(rf"^{target}:", makefile, re.M), f"{page}: make {target}"


def test_the_verbs_and_options_that_pages_name_exist() -> None:
    """`tlora VERB` and `--option` in the text, where nothing runs them."""
    command = typer.main.get_command(app)
    verbs: dict = getattr(command, "commands", {})
    options = {"--help", *SERVER_OPTIONS} | {
        option
        for each in (command, *verbs.values())
        for parameter in each.params
        for option in parameter.opts
    }
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", (REPOSITORY / page).read_text(), flags=re.M | re.S)
        for code in re.findall(r"`([^`\n]+)`", text):
            if named := re.match(r"tlora ([\w-]+)", code):
                assert named[1] in verbs, f"{page}: {code}"
            if code.startswith(("tlora", "--")):
                for option in re.findall(r"(?<!\S)--[\w-]+", code):
                    assert option in options, f"{page}: {code}"


def test_the_fields_that_the_migration_tables_name_exist() -> None:
    """Second column: a field or a section of a job file, where it is one word in backticks."""
    text = (REPOSITORY / "docs" / "migrating.md").read_text()
    known = {*JOB.fields, *RUN.fields, *JOB.sections, *RUN.sections, "defaults", "jobs"}
    cells = re.findall(r"^\| `[^|]+\| ([^|]+)\|", text, re.M)
    assert len(cells) > 40
    for cell in cells:
        for word in re.findall(r"`([\w.]+)`", cell):
            assert word in known, f"{word} in: {cell}"


def test_the_index_names_every_page() -> None:
    """docs/README.md, one line each."""
    index = (REPOSITORY / "docs" / "README.md").read_text()
    for path in (REPOSITORY / "docs").glob("*.md"):
        assert path.name == "README.md" or f"]({path.name})" in index, path.name


LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """Headings as links spell them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def broken_links(page: Path) -> list[str]:
    broken: list[str] = []
    for target, anchor in LINK.findall(page.read_text()):
        path = page.parent / target if target else page
        if "://" not in target and not (path.exists() and (not anchor or anchor in anchors(path))):
            broken.append(f"{target}#{anchor}")
    return broken


def test_links_between_pages_lead_somewhere(tmp_path: Path) -> None:
    """Relative ones, with their headings; a page with wrong ones is refused."""
    for page in PAGES:
        assert not broken_links(REPOSITORY / page), page
    (tmp_path / "a.md").write_text("# One two\n[x](a.md#one-two) [y](b.md) [z](a.md#two) [w](#one)")
    assert broken_links(tmp_path / "a.md") == ["b.md#", "a.md#two", "#one"]
