"""A job's settings as a flat list of dotted names, and which of them are worth a look."""

from collections.abc import Mapping
from dataclasses import asdict

from tlora.config.reading import plain
from tlora.core.job import DataSpec, JobSpec


def job_settings(spec: JobSpec) -> dict[str, object]:
    """`lora.r: 16` and so on, under the names of the job file."""
    return flat(plain(asdict(spec)))


def default_settings() -> dict[str, object]:
    """What a job has that sets nothing; its name and data are its own in any case."""
    settings = job_settings(JobSpec(name="none", data=DataSpec(path="none")))
    return {name: value for name, value in settings.items() if name not in ("name", "data.path")}


def flat(tree: object, prefix: str = "") -> dict[str, object]:
    """Lists are values, and so are mappings inside a section (`data.columns`)."""
    if not isinstance(tree, Mapping) or "." in prefix or (prefix and not tree):
        return {prefix: tree}
    found: dict[str, object] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}.{name}" if prefix else str(name))
    return found
