"""The tables of fields in docs/specs.md, made from the one declaration in `core/job.py`.

`python -m tlora.config.reference` prints them.
"""

from dataclasses import MISSING, fields

from tlora.config.fields import ALIASES, JOB, PARTS, RUN, section_of, short
from tlora.config.schema import field_schema, section_texts
from tlora.config.values import described
from tlora.core.job import (
    BaseSpec,
    DataSpec,
    EngineSpec,
    EvalSpec,
    JobSpec,
    LoraSpec,
    RunSpec,
    SaveSpec,
    TrainSpec,
)

SECTIONS = {
    "base": BaseSpec,
    "engine": EngineSpec,
    "data": DataSpec,
    "lora": LoraSpec,
    "train": TrainSpec,
    "eval": EvalSpec,
    "save": SaveSpec,
}
HEADER = ["| field | value | default | other spellings | meaning |", "|---|---|---|---|---|"]


def field_tables() -> str:
    """A Markdown table for each section, and one for the fields outside of sections."""
    tables = [
        "\n".join(["### At the top of the file", "", *HEADER, row("report_to")]),
        "\n".join(["### At the top of a job", "", *HEADER, row("name"), row("init_from")]),
    ]
    for section in SECTIONS:
        names = [name for name in {**RUN.fields, **JOB.fields} if section_of(name) == section]
        title = [f"### `{section}`", "", section_texts()[section], ""]
        tables.append("\n".join([*title, *HEADER, *(row(name) for name in names)]))
    return "\n\n".join(tables) + "\n"


def row(name: str) -> str:
    annotation = {**RUN.fields, **JOB.fields}[name]
    spellings = ", ".join(f"`{alias}`" for alias, target in ALIASES.items() if target == name)
    meaning = field_schema(name, "")["description"]
    cells = [f"`{short(name)}`", described(annotation), default_of(name), spellings, meaning]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def default_of(name: str) -> str:
    if name in PARTS:
        return ""
    owners = [SECTIONS[section_of(name)]] if section_of(name) else [RunSpec, JobSpec]
    field = next(f for owner in owners for f in fields(owner) if f.name == short(name))
    if field.default is not MISSING:
        return f"`{shown_default(field.default)}`"
    return "required" if field.default_factory is MISSING else "`{}`"


def shown_default(value: object) -> str:
    """As it would stand in the file."""
    if value is None:
        return "null"
    if value == ():
        return "[]"
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    print(field_tables(), end="")
