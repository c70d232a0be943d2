"""`-o K=V`: one setting from the command line, laid over the file.

K is a dotted field. Without a prefix it goes to every job; `defaults.` and `jobs.NAME.` narrow it;
`base`, `engine` and `report_to` belong to the run. V is read as YAML.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tlora.config.fields import JOB, RUN, nearest
from tlora.config.layers import Layer, Place, read_layer
from tlora.config.reading import parse_yaml
from tlora.config.values import Tree
from tlora.core.errors import SpecError

Scope = Literal["run", "defaults", "job", "every job"]


@dataclass(frozen=True, slots=True)
class Override:
    layer: Layer
    scope: Scope
    job: str | None = None
    """The job it goes to, where the scope is one job."""

    def reaches(self, job: str | None) -> bool:
        return self.scope == "every job" or (self.scope == "job" and job == self.job)


@dataclass(frozen=True, slots=True)
class Target:
    scope: Scope
    field: str
    job: str | None = None


def read_override(text: str, job_names: Sequence[str]) -> tuple[Override, list[SpecError]]:
    """Raises SpecError where the text is no K=V or names a job that is not there."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise SpecError(f"override '{text}': must read FIELD=VALUE, such as train.max_steps=5")
    target = find_target(key, job_names)
    vocabulary = RUN if target.scope == "run" else JOB
    place = Place(
        job=target.job,
        prefix="defaults." if target.scope == "defaults" else "",
        note=f" (override '{text}')",
    )
    raw = nest(target.field, parse_yaml(value, f"override '{text}'"))
    layer, problems = read_layer(raw, vocabulary, place)
    return Override(layer, target.scope, target.job), problems


def find_target(key: str, job_names: Sequence[str]) -> Target:
    head, _, rest = key.partition(".")
    if head in RUN.sections[""]:
        return Target("run", key)
    if head not in ("defaults", "jobs"):
        return Target("every job", key)
    if not rest:
        raise SpecError(f"override '{key}': name a field below '{head}', such as {head}.lora.r")
    if head == "defaults":
        return Target("defaults", rest)
    # Names may hold dots, and one may begin another: the longest that fits is meant.
    fitting = [name for name in job_names if rest.startswith(f"{name}.")]
    if not fitting:
        guess = nearest(rest.partition(".")[0], list(job_names))
        raise SpecError(f"override '{key}': no such job; {guess}")
    job = max(fitting, key=len)
    return Target("job", rest.removeprefix(f"{job}."), job)


def nest(key: str, value: object) -> Tree:
    """`a.b.c` and a value as mappings in mappings."""
    head, dot, rest = key.partition(".")
    return {head: nest(rest, value) if dot else value}
