"""Which figures of an H200 are claimed, and where each comes from: the table of docs/h200.md, made
of the newest lines under `results/`, so that no figure there can differ from its line.

    python benchmarks/h200_rows.py            # prints the table
    python benchmarks/h200_rows.py --write    # puts it into docs/h200.md

h200_run.py measures the lines anew.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "h200.md"
BEGIN, END = "<!-- rows: python benchmarks/h200_rows.py --write -->", "<!-- end of rows -->"

RANKS = [8, 16, 32, 64]
INSIDE = "inside"
MLORA_FRACTION = 0.34
"""Of the frozen backbone, as published; not measured here."""

Line = dict[str, Any]


@dataclass(frozen=True)
class Said:
    """What a line says about a row."""

    number: float
    """What the bar is held against."""

    text: str


Read = Callable[[Line, list[Line]], Said | None]
"""A line, and all that are in its file. None: it says nothing about this."""


@dataclass(frozen=True)
class Bar:
    """What is to be reached, and what would be better still."""

    first: float | None = None
    text: str = ""
    goal: str = ""
    is_least: bool = True
    """More is better."""

    def is_met(self, number: float) -> bool:
        if self.first is None:
            return True
        return number >= self.first if self.is_least else number <= self.first


@dataclass(frozen=True)
class Row:
    what: str
    file: str
    read: Read
    bar: Bar

    def newest(self, results: Path = RESULTS) -> tuple[Line, Said] | None:
        lines = lines_of(results / self.file)
        for line in reversed(lines):
            said = self.read(line, lines)
            if said is not None:
                return line, said
        return None


def lines_of(path: Path) -> list[Line]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def linears(
    adapters: int, *, zero: bool = False, lengths: str | None = None, how: Sequence[str] = (INSIDE,)
) -> Read:
    """Of gpu_linears.py, ranks 8-64 of an 8B layer: the cost by the layer and by its groups. They
    differ by half a point or more in one run, so their mean is what counts. With lengths of
    sequences (512, or the name of a file) it is of nano-batches as the engine composes them, which
    may be several. `how` has ways to compute the update; the first counts that was timed."""
    case = {"tokens": 8192, "adapters": adapters, "ranks": "mixed", "dropout": 0.0, "zero": zero}

    def of(line: Line) -> list[Line]:
        found = line.get("results", []) if line.get("shape") == "8b" else []
        return [each for each in found if is_it(each.get("case", {}))]

    def is_it(given: Line) -> bool:
        composed = given.get("composed") is not None
        drawn = Path(given.get("lengths", "512")).stem.removesuffix("_a") if composed else None
        return drawn == lengths and all(given.get(name) == wanted for name, wanted in case.items())

    def read(line: Line, beside: list[Line]) -> Said | None:
        for way in how:
            keys = f"overhead_{way}", f"overhead_{way}_by_group"
            pairs = [[100 * each[key] for key in keys] for each in of(line) if keys[0] in each]
            if pairs:
                text = ", ".join(f"+{layer:.1f} / +{group:.1f}" for layer, group in pairs)
                beside_them = "" if way == INSIDE else ", update outside"
                return Said(statistics.mean(map(sum, pairs)) / 2, f"{text} %{beside_them}")
        return None

    return read


def is_step(line: Line, shape: str, budget: int, lengths: str = "512") -> bool:
    """Of gpu_step.py, a whole model."""
    settings = line.get("settings", {})
    is_it = settings.get("shape") == shape and settings.get("layers") is None
    is_it = is_it and Path(settings.get("lengths", "512")).stem == lengths
    return is_it and line.get("budget") == budget and line.get("frozen_fraction") is not None


def step(shape: str, budget: int, lengths: str = "512") -> Read:
    def read(line: Line, beside: list[Line]) -> Said | None:
        if not is_step(line, shape, budget, lengths):
            return None
        fraction = line["frozen_fraction"]
        return Said(fraction, f"{fraction:.3f} ({line['tokens_per_s']:,.0f} tokens/s)")

    return read


def idle(line: Line, beside: list[Line]) -> Said | None:
    """Of the newest steps of the line's commit."""
    shares = []
    for case in (("llama-8b", 8192), ("llama-8b", 2048), ("llama-1b", 8192)):
        found = [each for each in beside if is_step(each, *case)]
        same = [each for each in found if each["commit"] == line["commit"]]
        if not same or "idle_share" not in same[-1]:
            return None
        shares.append(100 * same[-1]["idle_share"])
    return Said(max(shares), f"{', '.join(f'{each:.1f}' for each in shares)} %")


def bench(line: Line, batch: list[int], budget: int) -> bool:
    """Of `tlora bench`, an 8B model: whether the jobs had such batches."""
    settings = line["settings"]
    found = (line["shape"], settings["ranks"], settings["batch"], settings["nano_batch_tokens"])
    return found == ("llama-8b", RANKS, batch, budget)


def benched(batch: list[int], budget: int, key: str, form: str) -> Read:
    def read(line: Line, beside: list[Line]) -> Said | None:
        number = line.get(key) if bench(line, batch, budget) else None
        if number is None:
            return None
        return Said(number, form.format(number, rate=line["fused"]["tokens_per_s"]))

    return read


def as_they_come(line: Line) -> bool:
    return bench(line, [1, 2, 3, 4], 8192) and line["fused"]["tokens_per_s"] is not None


def against_frozen(line: Line, beside: list[Line]) -> Said | None:
    """The fastest of that commit, since its nano-batches are full in other lines."""
    if not as_they_come(line):
        return None
    same = [each for each in beside if each["commit"] == line["commit"]]
    frozen = max(each["frozen"]["best"] or 0 for each in same if each["shape"] == line["shape"])
    rate = line["fused"]["tokens_per_s"]
    return Said(rate / frozen, f"{rate / frozen:.3f} ({rate:,.0f} of {frozen:,.0f} tokens/s)")


def against_mlora(line: Line, beside: list[Line]) -> Said | None:
    found = against_frozen(line, beside)
    return found and Said(found.number / MLORA_FRACTION, f"{found.number / MLORA_FRACTION:.2f}x")


def joining(line: Line, beside: list[Line]) -> Said | None:
    if line["layers"] != 32:
        return None
    anew, *back = line["paused_ms"]
    text = f"{anew:.1f} ms anew, {min(back):.1f} to {max(back):.1f} ms from a checkpoint"
    return Said(max(anew, *back), text)


def tuned(shape: str) -> Read:
    def read(line: Line, beside: list[Line]) -> Said | None:
        if line["shape"] != shape:
            return None
        fixed = {int(size): rate for size, rate in line["fixed_tokens_per_s"].items()}
        best, size = max(fixed, key=lambda each: fixed[each]), line["tuned_to"]
        share = 100 * fixed[size] / fixed[best]
        return Said(share, f"{size:,} tokens: {share:.0f} % of the rate at {best:,}")

    return read


def memory(line: Line, beside: list[Line]) -> Said | None:
    over = line.get("peaks", {}).get("plain", {}).get("over_frozen_gb")
    return None if over is None else Said(over, f"+{over:.2f} GB")


def residents(line: Line, beside: list[Line]) -> Said | None:
    found = line.get("residents") or {}
    slower = found.get("slowdown_pct")
    return None if slower is None else Said(slower, f"{slower:.1f} % with {found['attached']}")


def exact(line: Line, beside: list[Line]) -> Said | None:
    cost = (line.get("cost") or {}).get("cost_pct")
    return None if cost is None else Said(cost, f"{cost:.1f} %")


LINEARS, STEP, BENCH = "h200_linears.jsonl", "h200_step.jsonl", "h200_bench.jsonl"
MEMORY, JOINING = "h200_memory.jsonl", "h200_joining.jsonl"
EXACT, TUNED = "h200_exact.jsonl", "h200_tuned_size.jsonl"

OVER_LINEARS = Bar(12.0, "+12 %", "+5 %", is_least=False)
FRACTION = "{:.3f} ({rate:,.0f} tokens/s)"
WAITING = Bar(2.0, "2 %", "0.5 %", is_least=False)

ROWS = [
    Row(
        "cost of 8 adapters over the frozen linears, 8B layer, 8,192 tokens (the layer / by group)",
        LINEARS,
        linears(8),
        OVER_LINEARS,
    ),
    Row(
        "the same, 32 adapters, gradients zero (the usual case with so many)",
        LINEARS,
        linears(32, zero=True),
        OVER_LINEARS,
    ),
    Row("the same, 32 adapters, all gradients added to", LINEARS, linears(32), OVER_LINEARS),
    Row(
        "the same, 32 jobs as the engine composes them: 10 in a nano-batch",
        LINEARS,
        linears(32, lengths="512"),
        OVER_LINEARS,
    ),
    Row(
        "the same, lengths of gsm8k: 23 and more in a nano-batch",
        LINEARS,
        linears(32, lengths="gsm8k", how=(INSIDE, "write")),
        OVER_LINEARS,
    ),
    Row(
        "the same, lengths of scitldr, batches of one sequence: 30 and more",
        LINEARS,
        linears(32, lengths="scitldr", how=(INSIDE, "write")),
        OVER_LINEARS,
    ),
    Row(
        "frozen fraction, 8B, 8,192 tokens, every job steps after every nano-batch",
        STEP,
        step("llama-8b", 8192),
        Bar(0.90, "0.90", "0.96"),
    ),
    Row(
        "the same, batches of 16 x 512 tokens",
        BENCH,
        benched([16], 8192, "frozen_fraction", FRACTION),
        Bar(0.90, "0.90", "0.96"),
    ),
    Row(
        "frozen fraction, 1B, 8,192 tokens",
        STEP,
        step("llama-1b", 8192),
        Bar(0.82, "0.82", "0.93"),
    ),
    Row(
        "frozen fraction, 8B, 2,048 tokens",
        STEP,
        step("llama-8b", 2048),
        Bar(0.85, "0.85", "0.93"),
    ),
    Row(
        "frozen fraction, 8B, 8,192 tokens, sequences of real lengths (40 to 746)",
        STEP,
        step("llama-8b", 8192, "mixed_14"),
        Bar(0.90, "0.90", "0.96"),
    ),
    Row(
        "useful tokens/s, 8B, batches of 1 to 4 sequences of real lengths, as a fraction of frozen"
        " at 8,192 tokens",
        BENCH,
        against_frozen,
        Bar(0.85, "0.85", "0.93"),
    ),
    Row(
        "speed against PEFT, one job after another, 8B, batches of 1 x 512",
        BENCH,
        benched([1], 4096, "ratio_peft", "{:.2f}x"),
        Bar(4.7, "4.7x", "5.4x"),
    ),
    Row(
        "the same, batches of 16 x 512, which fill the device",
        BENCH,
        benched([16], 8192, "ratio_peft", "{:.2f}x"),
        Bar(1.08, "1.08x", "1.18x"),
    ),
    Row(
        "against mLoRA, 8B: fraction of frozen with batches of 1 to 4, over mLoRA's published"
        f" {MLORA_FRACTION} (not measured here)",
        BENCH,
        against_mlora,
        Bar(2.5, "2.5x", "2.8x"),
    ),
    Row(
        "slowdown per token when 16 of the resident adapters have tokens, not 8",
        MEMORY,
        residents,
        Bar(5.0, "5 % with 64", "120, thousands", is_least=False),
    ),
    Row(
        "how long the other jobs stand still while one joins (168 M parameters)",
        JOINING,
        joining,
        Bar(50.0, "50 ms", "5 ms", is_least=False),
    ),
    Row(
        "the same while one leaves",
        BENCH,
        benched([16], 8192, "detach_ms", "{:.1f} ms"),
        Bar(50.0, "50 ms", "5 ms", is_least=False),
    ),
    Row(
        "peak memory over frozen, 8B, 8,192 tokens",
        MEMORY,
        memory,
        Bar(30.0, "+30 GB", "+25 GB", is_least=False),
    ),
    Row(
        "work of the host, as a share of the time, if the device hid none of it: batches of"
        " 16 x 512",
        BENCH,
        benched([16], 8192, "engine_overhead_pct", "{:.1f} %"),
        WAITING,
    ),
    Row(
        "the same, batches of 1 to 4 as they come",
        BENCH,
        benched([1, 2, 3, 4], 8192, "engine_overhead_pct", "{:.1f} %"),
        WAITING,
    ),
    Row(
        "the same, batches of 1 x 512 in nano-batches of 4,096",
        BENCH,
        benched([1], 4096, "engine_overhead_pct", "{:.1f} %"),
        WAITING,
    ),
    Row(
        "time of a step in which no kernel runs: 8B with 8,192 and 2,048 tokens, 1B",
        STEP,
        idle,
        WAITING,
    ),
    Row(
        "the device waiting for the host, as a share of the time",
        BENCH,
        benched([16], 8192, "device_waits_pct", "{:.1f} %"),
        WAITING,
    ),
    Row("cost of `isolation: exact`, 1B", EXACT, exact, Bar(15.0, "15 %", is_least=False)),
    Row(
        "size of nano-batches that the search finds, against the best fixed one, 1B",
        TUNED,
        tuned("llama-1b"),
        Bar(),
    ),
    Row("the same, 8B", TUNED, tuned("llama-8b"), Bar()),
]


def table(rows: Iterable[Row] = ROWS, results: Path = RESULTS) -> str:
    """In Markdown. What does not reach its bar is bold."""
    lines = ["| figure | bar | goal | measured | line |", "|---|---|---|---|---|"]
    for row in rows:
        text, source, found = "not measured", "", row.newest(results)
        if found is not None:
            line, said = found
            text = said.text if row.bar.is_met(said.number) else f"**{said.text}**"
            source = f"`{row.file}` ({line.get('commit', '-')})"
        lines.append(f"| {row.what} | {row.bar.text} | {row.bar.goal} | {text} | {source} |")
    return "\n".join(lines) + "\n"


def with_table(page: str, made: str) -> str:
    before, rest = page.split(BEGIN + "\n")
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{made}{END}{after}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the table into docs/h200.md")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder with the lines")
    given = parser.parse_args(arguments)
    made = table(results=given.results)
    if given.write:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
    else:
        print(made, end="")


if __name__ == "__main__":
    main(sys.argv[1:])
