"""One layer of settings (the defaults, a job, an override): canonical names to typed values.

A layer is flat, dotted name to value, so that laying one over another is nearly a dictionary
update. Reading a layer replaces every other spelling; what cannot be read becomes a problem and is
left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tlora.config.fields import (
    ACCUMULATION,
    MIN_LR_RATE,
    PER_DEVICE,
    Vocabulary,
    is_left_out,
    short,
    unknown_key,
    usual_word,
)
from tlora.config.values import Tree, convert, is_tree, shown
from tlora.core.errors import SpecError
from tlora.core.job import TrainSpec

BATCH_SIZE = "train.batch_size"
MIN_LR = "train.min_lr"
RIVALS = (({BATCH_SIZE}, {PER_DEVICE, ACCUMULATION}), ({MIN_LR}, {MIN_LR_RATE}))
"""Two ways to say one thing: a higher layer that uses one way silences the other below it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where settings were written, for messages."""

    job: str | None = None
    prefix: str = ""
    note: str = ""

    def problem(self, field: str, message: str) -> SpecError:
        return SpecError(message + self.note, job=self.job, field=self.prefix + field)


@dataclass(frozen=True, slots=True)
class Layer:
    values: Tree
    place: Place
    broken: frozenset[str] = frozenset()
    """Fields that were written but could not be read; they are not missing."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A field as it was written."""

    name: str
    written: str
    value: object


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong with one field; a `Place` makes a problem of it."""

    field: str
    message: str


def read_layer(raw: Tree, vocabulary: Vocabulary, place: Place) -> tuple[Layer, list[SpecError]]:
    values: Tree = {}
    written: dict[str, Entry] = {}
    faults: list[Fault] = []
    broken: set[str] = set()
    for entry in entries(raw, vocabulary):
        if isinstance(entry, Fault):
            faults.append(entry)
            continue
        try:
            value = read_value(entry, vocabulary)
        except ValueError as error:
            alias = "" if entry.written == entry.name else f" (written as {entry.written})"
            faults.append(Fault(entry.name, f"{error}{alias}"))
            broken.add(entry.name)
            continue
        first = written.setdefault(entry.name, entry)
        if first is not entry and values[entry.name] != value:
            faults.append(Fault(entry.name, given_twice(first, entry)))
            continue
        values[entry.name] = value
    faults += settle_batch(values) + refuse_two_floors(values)
    problems = [place.problem(fault.field, fault.message) for fault in faults]
    return Layer(values, place, frozenset(broken)), problems


def entries(
    raw: Tree, vocabulary: Vocabulary, section: str = "", path: str = ""
) -> Iterator[Entry | Fault]:
    """The fields of a mapping and of its sections, under their canonical names."""
    for key, value in raw.items():
        target = vocabulary.sections[section].get(key)
        written = path + key
        if target is None:
            if not is_left_out(key, value):
                yield Fault(written, unknown_key(key, vocabulary, section))
        elif target not in vocabulary.sections:
            yield Entry(target, written, value)
        elif is_tree(value):
            yield from entries(value, vocabulary, target, f"{written}.")
        elif value is None:
            continue
        elif target in vocabulary.shorthands:
            yield Entry(vocabulary.shorthands[target], written, value)
        else:
            yield Fault(written, f"must be a mapping of fields, got {shown(value)}")


def read_value(entry: Entry, vocabulary: Vocabulary) -> object:
    if short(entry.written) == "warmup_ratio":
        return read_ratio(entry.value)
    value = convert(usual_word(entry.name, entry.value), vocabulary.fields[entry.name])
    if entry.name in (PER_DEVICE, ACCUMULATION) and isinstance(value, int) and value < 1:
        raise ValueError(f"must be at least 1, got {value}")
    return value


def read_ratio(value: object) -> float:
    """A ratio must not reach 1: warmup_steps would take it for a number of steps."""
    ratio = convert(value, float)
    if not isinstance(ratio, (int, float)) or not 0 <= ratio < 1:
        raise ValueError(f"must be a fraction in [0, 1), got {shown(value)}")
    return float(ratio)


def given_twice(first: Entry, second: Entry) -> str:
    return (
        f"given twice with different values: {first.written} is {shown(first.value)}, "
        f"{second.written} is {shown(second.value)}"
    )


def settle_batch(values: Tree) -> list[Fault]:
    """Where one layer gives the batch size both ways, keep it as factors if they agree."""
    if BATCH_SIZE not in values or not (PER_DEVICE in values or ACCUMULATION in values):
        return []
    whole, product = values.pop(BATCH_SIZE), batch_product(values)
    values.setdefault(PER_DEVICE, 1)
    values.setdefault(ACCUMULATION, 1)
    if whole == product:
        return []
    per_device, accumulation = values[PER_DEVICE], values[ACCUMULATION]
    return [
        Fault(
            BATCH_SIZE,
            f"is {whole}, but per_device_train_batch_size x gradient_accumulation_steps is "
            f"{per_device} x {accumulation} = {product}; give one of the two",
        )
    ]


def refuse_two_floors(values: Tree) -> list[Fault]:
    if MIN_LR in values and MIN_LR_RATE in values:
        return [Fault(MIN_LR, "give min_lr or min_lr_rate, not both")]
    return []


def batch_product(values: Tree) -> int:
    per_device, accumulation = values.get(PER_DEVICE, 1), values.get(ACCUMULATION, 1)
    assert isinstance(per_device, int) and isinstance(accumulation, int)
    return per_device * accumulation


def merge(lower: Tree, upper: Tree) -> Tree:
    """The upper layer laid over the lower one."""
    silenced: set[str] = set()
    for one, other in RIVALS:
        silenced |= other if one & upper.keys() else set()
        silenced |= one if other & upper.keys() else set()
    merged = {name: value for name, value in lower.items() if name not in silenced}
    for name, value in upper.items():
        below = merged.get(name)
        merged[name] = {**below, **value} if is_tree(below) and is_tree(value) else value
    return merged


def finish(values: Tree) -> Tree:
    """The same settings without the fields that a resolved job does not have."""
    finished = {name: value for name, value in values.items() if name not in RIVALS[0][1]}
    if PER_DEVICE in values or ACCUMULATION in values:
        finished[BATCH_SIZE] = batch_product(values)
    rate = finished.pop(MIN_LR_RATE, None)
    if isinstance(rate, (int, float)):
        peak = values.get("train.learning_rate", TrainSpec().learning_rate)
        assert isinstance(peak, (int, float))
        finished[MIN_LR] = rate * peak
    return finished


def nested(values: Tree) -> Tree:
    """Dotted names opened into sections."""
    tree: Tree = {}
    for name, value in values.items():
        section, _, field = name.rpartition(".")
        inner = tree.setdefault(section, {}) if section else tree
        assert is_tree(inner)
        inner[field] = value
    return tree
