"""A device's profile: what was measured, what was fitted to it, and how well that fits.

One line of JSON, as `tlora profile` writes it. Reading one is strict: a missing or impossible
figure is named, and the error that a profile claims must be the one that its own points give.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from tlora.core.errors import SpecError
from tlora.costs.fit import mean_error_pct
from tlora.costs.memory import Memory
from tlora.costs.model import NanoBatch, NanoBatchTime, Segment, StepTime

SHIPPED = Path(__file__).parent / "profiles"
ERROR_SLACK_PCT = 0.01
"""Between the error that a profile claims and the one that its points give: rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A nano-batch that was measured, with the optimiser steps of its jobs."""

    batch: NanoBatch
    adapter_parameters: int
    """Of the jobs in it, which all stepped."""

    seconds: float
    """Composing, forward, loss and backward: the median of the repeats."""

    spread_pct: float | None
    """From the fastest to the slowest repeat, of the median; None for a single one."""

    repeats: int
    step_seconds: float
    """All of its jobs' steps together."""

    peak_bytes: int | None
    """Beyond weights and adapters; None where it cannot be seen."""

    heldout: bool
    """Kept from the fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A nano-batch that could not be measured, and why."""

    rows: int
    length: int
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCheck:
    """A group of jobs that was trained, and what the profile said it would take."""

    jobs: int
    tokens: int
    predicted_s: float
    measured_s: float

    @property
    def error_pct(self) -> float:
        return (self.predicted_s / self.measured_s - 1) * 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    device: str
    dtype: str
    shape: str
    versions: dict[str, str | None]
    points: tuple[Point, ...]
    skipped: tuple[Skipped, ...] = ()
    time: NanoBatchTime
    steps: StepTime
    memory: Memory
    heldout_error_pct: float
    """Mean absolute error of nano-batch times on the points kept from the fit."""

    parameters_per_rank: int
    """Adapter parameters per unit of rank on all linears."""

    budget_tokens: int
    """What the engine puts into a nano-batch here where nobody says."""

    buckets: tuple[int, ...]
    """The sizes that nano-batches under that budget are padded to."""

    bucket_step: int | None = None
    """Under every budget they are multiples of this; None where they are parts of the budget."""

    attach_s: float
    detach_s: float
    warmup_s: float
    """The first nano-batch on a fresh super-model, with whatever is compiled for it."""

    load_s: float | None = None
    """Loading the base and taking it over."""

    noise_pct: float | None = None
    """The median of the points' spreads."""

    group_check: GroupCheck | None = None
    commit: str | None = None
    command: str | None = None
    notes: tuple[str, ...] = ()

    def sizes(self, budget: int) -> list[float]:
        """That nano-batches under this budget are padded to, the smallest first."""
        if self.bucket_step is not None:
            return [*map(float, range(self.bucket_step, budget, self.bucket_step)), float(budget)]
        return sorted(size * budget / self.budget_tokens for size in self.buckets)

    def error_pct(self, *, heldout: bool) -> float | None:
        """The mean error on points of this kind; None if there are none."""
        chosen = [point for point in self.points if point.heldout is heldout]
        if not chosen:
            return None
        return mean_error_pct(
            [self.time.seconds(point.batch) for point in chosen],
            [point.seconds for point in chosen],
        )


def write_profile(profile: Profile, path: Path) -> None:
    """Whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(json.dumps(as_json(profile), allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror}", field="--output") from None


def read_profile(path: str | Path) -> Profile:
    """Raises SpecError with the file and the field that is wrong."""
    path = Path(path).expanduser()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise SpecError(f"{path} cannot be read: {reason}") from None
    except json.JSONDecodeError as error:
        raise SpecError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    try:
        return of_json(data)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


def find_profile(name: str) -> Profile:
    """A shipped one by its name, or a file."""
    shipped = SHIPPED / f"{name}.json"
    path = shipped if shipped.exists() else Path(name).expanduser()
    if not path.exists():
        known = sorted(each.stem for each in SHIPPED.glob("*.json"))
        raise SpecError(
            f"'{name}' is neither a file nor one of {', '.join(known)}", field="--profile"
        )
    return read_profile(path)


def shipped_profiles() -> dict[str, Profile]:
    """Those that come with tlora, by the names of their files."""
    return {path.stem: read_profile(path) for path in sorted(SHIPPED.glob("*.json"))}


def as_json(profile: Profile) -> dict[str, Any]:
    return {
        "v": 1,
        "kind": "profile",
        "commit": profile.commit,
        "command": profile.command,
        "device": profile.device,
        "dtype": profile.dtype,
        "shape": profile.shape,
        "versions": profile.versions,
        "points": [_point_as_json(point) for point in profile.points],
        "skipped": [asdict(each) for each in profile.skipped],
        "fit": {
            "time": asdict(profile.time),
            "steps": asdict(profile.steps),
            "memory": asdict(profile.memory),
        },
        "heldout_error_pct": profile.heldout_error_pct,
        "parameters_per_rank": profile.parameters_per_rank,
        "budget_tokens": profile.budget_tokens,
        "buckets": list(profile.buckets),
        "bucket_step": profile.bucket_step,
        "attach_s": profile.attach_s,
        "detach_s": profile.detach_s,
        "warmup_s": profile.warmup_s,
        "load_s": profile.load_s,
        "noise_pct": profile.noise_pct,
        "group_check": asdict(profile.group_check) if profile.group_check else None,
        "notes": list(profile.notes),
    }


def of_json(data: object) -> Profile:
    """Raises SpecError naming the field. Fields that are not known are left alone."""
    top = _Fields(data, "")
    if top.get("kind") != "profile" or top.get("v") != 1:
        raise SpecError("is not a profile of version 1 (kind, v); `tlora profile` writes one")
    fit = _Fields(top.get("fit"), "fit.")
    check = top.data.get("group_check")
    points = tuple(
        _point_of_json(_Fields(each, f"points[{place}]."))
        for place, each in enumerate(top.items("points"))
    )
    profile = Profile(
        device=top.text("device"),
        dtype=top.text("dtype"),
        shape=top.text("shape"),
        versions=dict(_Fields(top.get("versions"), "versions.").data),
        points=points,
        skipped=tuple(
            _skipped_of_json(_Fields(each, f"skipped[{place}]."))
            for place, each in enumerate(top.items("skipped"))
        ),
        time=_Fields(fit.get("time"), "fit.time.").all_numbers(NanoBatchTime),
        steps=_Fields(fit.get("steps"), "fit.steps.").all_numbers(StepTime),
        memory=_Fields(fit.get("memory"), "fit.memory.").all_numbers(Memory, optional=True),
        heldout_error_pct=top.number("heldout_error_pct"),
        parameters_per_rank=top.count("parameters_per_rank"),
        budget_tokens=top.count("budget_tokens"),
        buckets=tuple(int(size) for size in top.numbers("buckets")),
        bucket_step=top.optional_count("bucket_step"),
        attach_s=top.number("attach_s"),
        detach_s=top.number("detach_s"),
        warmup_s=top.number("warmup_s"),
        load_s=top.optional_number("load_s"),
        noise_pct=top.optional_number("noise_pct"),
        group_check=_Fields(check, "group_check.").all_numbers(GroupCheck) if check else None,
        commit=top.data.get("commit"),
        command=top.data.get("command"),
        notes=tuple(map(str, top.items("notes"))),
    )
    if not profile.buckets:
        raise SpecError("must name at least one size", field="buckets")
    if profile.time.sharpness < 1:
        raise SpecError("must be at least 1", field="fit.time.sharpness")
    _check_error(profile)
    return profile


def _check_error(profile: Profile) -> None:
    found = profile.error_pct(heldout=True)
    if found is None:
        raise SpecError("none was held out, so the fit is not checked", field="points")
    claimed = profile.heldout_error_pct
    if abs(found - claimed) > ERROR_SLACK_PCT:
        raise SpecError(
            f"says {claimed:.2f}, but its points give {found:.2f}: points and fit do not belong "
            "together",
            field="heldout_error_pct",
        )


def _point_as_json(point: Point) -> dict[str, Any]:
    batch = point.batch
    return {
        "rows": batch.rows,
        "tokens": batch.tokens,
        "squares": batch.squares,
        "segments": [[each.tokens, each.rank, each.coverage] for each in batch.segments],
        "adapter_parameters": point.adapter_parameters,
        "seconds": point.seconds,
        "spread_pct": point.spread_pct,
        "repeats": point.repeats,
        "step_seconds": point.step_seconds,
        "peak_bytes": point.peak_bytes,
        "heldout": point.heldout,
    }


def _point_of_json(found: "_Fields") -> Point:
    segments: list[Segment] = []
    for place, each in enumerate(found.items("segments")):
        values = _Fields({"it": each}, f"{found.place}segments[{place}].").numbers("it")
        if len(values) != 3:
            raise SpecError("must be [tokens, rank, coverage]", field=f"{found.place}segments")
        segments.append(Segment(*values))
    seconds = found.number("seconds")
    if not seconds:
        raise SpecError("must be above 0", field=f"{found.place}seconds")
    return Point(
        batch=NanoBatch(found.number("rows"), found.number("squares"), tuple(segments)),
        adapter_parameters=found.count("adapter_parameters"),
        seconds=seconds,
        spread_pct=found.optional_number("spread_pct"),
        repeats=found.count("repeats"),
        step_seconds=found.number("step_seconds"),
        peak_bytes=found.optional_count("peak_bytes"),
        heldout=bool(found.get("heldout")),
    )


def _skipped_of_json(found: "_Fields") -> Skipped:
    return Skipped(
        rows=found.count("rows"),
        length=found.count("length"),
        ranks=tuple(int(rank) for rank in found.numbers("ranks")),
        reason=found.text("reason"),
    )


T = TypeVar("T")


class _Fields:
    """A JSON object whose fields are asked for by name and kind."""

    def __init__(self, data: object, place: str) -> None:
        if not isinstance(data, Mapping):
            raise SpecError(
                f"must be an object, got {_shown(data)}", field=place.removesuffix(".") or None
            )
        self.data: Mapping[str, Any] = data
        self.place = place

    def get(self, name: str) -> Any:
        if name not in self.data:
            raise SpecError("is missing", field=f"{self.place}{name}")
        return self.data[name]

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise SpecError(f"must be text, got {_shown(value)}", field=f"{self.place}{name}")
        return value

    def items(self, name: str) -> list[Any]:
        value = self.get(name)
        if not isinstance(value, list):
            raise SpecError(f"must be a list, got {_shown(value)}", field=f"{self.place}{name}")
        return value

    def number(self, name: str) -> float:
        return _number(self.get(name), f"{self.place}{name}")

    def numbers(self, name: str) -> list[float]:
        return [_number(value, f"{self.place}{name}") for value in self.items(name)]

    def optional_number(self, name: str) -> float | None:
        return None if self.data.get(name) is None else self.number(name)

    def optional_count(self, name: str) -> int | None:
        return None if not self.data.get(name) else self.count(name)

    def count(self, name: str) -> int:
        value = self.number(name)
        if value != int(value) or value < 1:
            raise SpecError(
                f"must be a whole number of at least 1, got {_shown(value)}",
                field=f"{self.place}{name}",
            )
        return int(value)

    def all_numbers(self, kind: type[T], *, optional: bool = False) -> T:
        """A dataclass of numbers; `optional` ones may be null."""
        values = {
            field.name: None
            if optional and self.get(field.name) is None
            else self.number(field.name)
            for field in fields(kind)  # type: ignore[arg-type]
        }
        return kind(**values)


def _number(value: object, place: str) -> float:
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not math.isfinite(value)
        or value < 0
    ):
        raise SpecError(f"must be a number of at least 0, got {_shown(value)}", field=place)
    return value


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."
