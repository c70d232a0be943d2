"""A benchmark for people: rows of text, and a sentence for each ratio. Fits in 80 columns."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from tlora.core.wording import number_of
from tlora.runtime.benchmark.bench import Result
from tlora.runtime.benchmark.linears import overhead_pct
from tlora.runtime.benchmark.lineup import (
    COMPILED,
    FUSED,
    FUSED_SPREAD,
    ONE_AT_A_TIME,
    OWN,
    PEFT,
    PEFT_SPREAD,
    PLAIN,
)
from tlora.runtime.benchmark.machine import device_name

WIDTH = 80


@dataclass(frozen=True, slots=True)
class Table:
    """The first column is text, the others are numbers."""

    header: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def lines(self) -> list[str]:
        """Columns in line, two spaces apart."""
        table = [self.header, *self.rows]
        first, *others = (max(map(len, column)) for column in zip(*table, strict=True))
        return [
            "  ".join(
                [
                    name.ljust(first),
                    *(cell.rjust(width) for cell, width in zip(cells, others, strict=True)),
                ]
            ).rstrip()
            for name, *cells in table
        ]


def title(result: Result) -> list[str]:
    settings, work = result.settings, result.work
    done = result.rounds.repeats
    rounds = number_of(done, "round")
    if done < settings.repeats:
        rounds += f" of {settings.repeats}"
    assert settings.steps is not None, "settings are resolved"
    steps = number_of(settings.steps, "step")
    dtype = str(result.shape.dtype).removeprefix("torch.")
    if settings.quantization != "none":
        dtype += f" (ours {settings.quantization})"
    ranks, batch = (",".join(map(str, each)) for each in (settings.ranks, settings.batch))
    return wrapped(
        f"{result.shape.name} in {dtype} on {device_name(result.device)}: {settings.jobs} jobs, "
        f"ranks {ranks}, batch {batch}, lengths {settings.lengths}, {steps} each, "
        f"{work.tokens:,} tokens a pass, nano-batches of {settings.budget}, {rounds}"
    )


def rates(result: Result) -> Table:
    """Arms that did not run have no row."""
    rows: list[tuple[str, ...]] = []

    def add(label: str, *arms: str) -> None:
        ran = [arm for arm in arms if arm in result.rounds.seconds]
        if not ran:
            return
        best = min(ran, key=result.rounds.median)
        rate, runs = result.required_rate(best), len(result.rounds.seconds[best])
        which = f" ({best.rpartition(', ')[2]})" if len(arms) > 1 else ""
        rows.append(
            (
                label + which,
                f"{rate:,.0f}",
                f"{rate / result.frozen:.2f}" if result.frozen else "-",
                f"{result.rounds.spread_pct(best):.0f} %" if runs > 1 else "-",
                str(runs),
            )
        )

    add("fused", FUSED)
    add("fused, in processes", FUSED_SPREAD)
    add("one at a time, same engine", ONE_AT_A_TIME)
    add("PEFT one by one", *PEFT.values())
    add("PEFT, in processes", *PEFT_SPREAD.values())
    add("frozen, plain", *PLAIN.values())
    add("frozen, layers compiled", *COMPILED.values())
    add("frozen, our backbone", OWN)
    return Table(("", "tokens/s", "of frozen", "spread", "runs"), rows)


def linears(result: Result) -> Table:
    return Table(
        ("linears of a layer", "in", "out", "frozen ms", "fused ms", "floor ms"),
        [
            (
                textwrap.shorten(each.name.replace(",", " "), 28, placeholder=" ..."),
                str(each.in_features),
                str(each.out_features),
                f"{each.ms_frozen:.3f}",
                f"{each.ms_fused:.3f}",
                f"{each.floor_ms:.3f}",
            )
            for each in result.linears
        ],
    )


def sentences(result: Result) -> list[str]:
    """What each figure means."""
    found = []
    if result.ratio_peft is not None:
        found.append(
            f"fused / PEFT one by one: {result.ratio_peft:.2f}x. The same jobs with PEFT, one "
            "after another, in the better of padded and packed batches."
        )
    if result.ratio_peft_spread is not None:
        both = result.ratio_both_spread
        found.append(
            f"fused in processes of one thread / PEFT one by one: {result.ratio_peft_spread:.2f}x, "
            "with the same threads in all, as `tlora train --devices` runs jobs on a CPU"
            + (f"; over PEFT in such processes too: {both:.2f}x." if both else ".")
        )
    if result.ratio_one_at_a_time is not None:
        found.append(
            f"fused / one at a time in the same engine: {result.ratio_one_at_a_time:.2f}x. What "
            "fusing gives by itself; what is left of a gain over PEFT is the engine's."
        )
    if result.frozen_fraction is not None:
        found.append(
            f"fused / frozen backbone: {result.frozen_fraction:.2f}. The fastest pass over the "
            "same tokens with no adapters is 1; what is missing is what the adapters cost."
        )
    overhead = result.engine_overhead_pct
    if overhead is not None:
        found.append(
            f"Engine overhead: {overhead:.1f} % of the fused time is neither forward, backward nor "
            f"optimiser{_hidden(result)}."
        )
    if result.linears:
        found.append(
            f"Adapters on the linears: {overhead_pct(result.linears):+.0f} % over the frozen ones; "
            f"the floor is what {result.copy_bytes_per_s / 1e9:,.0f} GB/s of copying allows."
        )
    found.append(
        f"Model FLOPs: {result.mfu:.0%} of a large product's "
        f"{result.gemm_flops_per_s / 1e9:,.0f} GFLOP/s. A nano-batch takes "
        f"{result.step_ms:,.1f} ms{_peak(result)}."
    )
    if result.pauses is not None:
        found.append(
            f"Attaching one more job pauses the others for "
            f"{result.pauses.attach_seconds * 1e3:,.1f} ms "
            f"({result.pauses.attach_from_host_seconds * 1e3:,.1f} ms if its adapter is still in "
            f"host memory), detaching it with a snapshot of its state for "
            f"{result.pauses.detach_seconds * 1e3:,.1f} ms."
        )
    found += _graphs(result)
    found += [_noise(result), *(f"Note: {note}." for note in result.notes)]
    return [line for text in found for line in wrapped(text)]


def _graphs(result: Result) -> list[str]:
    graphs = result.graphs
    if not graphs.captures and not graphs.compiled:
        return []
    return [
        f"{graphs.compiled} graphs compiled and {graphs.captures} captured; of {graphs.jobs} jobs "
        f"that came and went under the clock, {graphs.jobs_unchanged} did so with no new one."
    ]


def _noise(result: Result) -> str:
    noise, drift = result.rounds.noise_pct, result.rounds.drift_pct
    if noise is None or drift is None:
        return "One round shows no noise: take --repeats 5 for figures to rely on."
    return (
        f"The largest spread of an arm is {noise:.0f} %, the drift within a round "
        f"{drift:+.0f} %: smaller differences say nothing."
    )


def _peak(result: Result) -> str:
    if result.peak_bytes is None:
        return ""
    what = "the process grew by" if result.device.type == "cpu" else "memory peaked at"
    return f"; {what} {result.peak_bytes / 2**20:,.0f} MiB"


def _hidden(result: Result) -> str:
    if result.device_waits_pct is None:
        return ""
    return f"; the device waits {result.device_waits_pct:.1f} % of the time, the rest is hidden"


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False)


def text(result: Result) -> list[str]:
    """All of it, without colour."""
    parts: Sequence[list[str]] = (
        title(result),
        rates(result).lines(),
        sentences(result),
        linears(result).lines() if result.linears else [],
    )
    return [line for part in parts if part for line in [*part, ""]]
