"""The page on job files shows what the code declares."""

from pathlib import Path

from tlora.config import load_spec
from tlora.config.reference import field_tables

PAGE = Path(__file__).parents[2] / "docs" / "specs.md"


def test_the_tables_of_the_page_are_current() -> None:
    """`python -m tlora.config.reference` prints them."""
    assert field_tables() in PAGE.read_text()


def test_the_examples_of_the_page_load(tmp_path: Path) -> None:
    """Every YAML block is a job file."""
    for name in ("support.jsonl", "sql.jsonl", "a.jsonl"):
        (tmp_path / name).touch()
    blocks = [part.partition("```")[0] for part in PAGE.read_text().split("```yaml\n")[1:]]
    assert blocks
    for index, block in enumerate(blocks):
        file = tmp_path / f"{index}.yaml"
        file.write_text(block)
        assert load_spec(file).jobs
