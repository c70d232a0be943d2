"""How long a decision of the tlora policy takes, by the number of runnable jobs.

Jobs fill a cluster of a quarter as many GPUs; then jobs end and come, one a turn, and each decision
is timed (processor time). `all at once` is the first decision, in which nobody runs yet.

    python benchmarks/decision_time.py --docs              # measures all sizes; line, plot and page
    python benchmarks/decision_time.py --docs --last       # plot and page again, from the last line
    python benchmarks/decision_time.py --sizes 128,1000    # prints only; --json FILE keeps the line
"""

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from simulate_study import commit
from support.scheduling import costs_of, request

from tlora.control.loop import Loop
from tlora.control.replay import Nobody, Nowhere
from tlora.core.clock import ManualClock
from tlora.core.cluster import uniform_cluster
from tlora.core.event import Arrival, Completion, Tick
from tlora.core.request import JobRequest
from tlora.core.state import State
from tlora.schedule import make_policy

TURNS = 200
SIZES = (32, 64, 128, 256, 512, 1000, 2000, 4000, 10000)
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "decision_time.jsonl"
PLOT = ROOT / "docs" / "decision_time.svg"
PAGE = ROOT / "docs" / "scheduling.md"
BEGIN, END = "<!-- from benchmarks/decision_time.py -->\n", "<!-- to here -->\n"
"""What lies between is replaced."""


def drawn(draw: random.Random, name: str, at: float) -> JobRequest:
    gpus = draw.choices([1, 2, 4, 8], [0.8, 0.08, 0.07, 0.05])[0]
    return request(
        name,
        base=draw.choice(["llama", "qwen"]),
        rank=draw.choice([2, 4, 8, 16]),
        batch=gpus,
        gpus=gpus,
        steps=10**6,
        at=at,
    )


def measured(jobs: int, gpus: int, turns: int = TURNS) -> dict[str, float]:
    draw = random.Random(0)
    cluster = uniform_cluster(gpus)
    loop = Loop(
        state=State(cluster),
        policy=make_policy("tlora", costs_of(cluster)),
        executor=Nobody(),
        store=Nowhere(),
        clock=ManualClock(),
    )
    first = loop.turn(0.0, [Arrival(0.0, drawn(draw, f"j{i}", 0.0)) for i in range(jobs)], {})
    seconds: list[float] = []
    tick_s: list[float] = []
    for turn in range(turns):
        now = 100.0 * (turn + 1)
        if turn % 10 == 9:
            tick_s.append(loop.turn(now, [Tick(now)], {}).decided_s)
        elif turn % 2:
            event = Arrival(now, drawn(draw, f"n{turn}", now))
            seconds.append(loop.turn(now, [event], {}).decided_s)
        else:
            name = draw.choice(sorted(loop.state.jobs))
            seconds.append(loop.turn(now, [Completion(now, name)], {}).decided_s)
    return {
        "jobs": jobs,
        "gpus": gpus,
        "p50_ms": float(np.percentile(seconds, 50)) * 1e3,
        "p99_ms": float(np.percentile(seconds, 99)) * 1e3,
        "tick_ms": float(np.mean(tick_s)) * 1e3,
        "all_at_once_ms": first.decided_s * 1e3,
        "waiting": len(loop.state.waiting()),
    }


def svg(rows: list[dict[str, float]]) -> str:
    """Both axes logarithmic; the dashed line grows as K log K from the first point."""
    width, height, edge = 640, 420, 60
    jobs = [row["jobs"] for row in rows]
    names = ("p50_ms", "p99_ms", "all_at_once_ms")
    colours = ("#1f6feb", "#d29922", "#8250df")
    first = rows[0]["p50_ms"] / (jobs[0] * math.log2(jobs[0]))
    line = [first * each * math.log2(each) for each in jobs]
    values = [row[name] for row in rows for name in names] + line
    low, high = math.log10(min(values)), math.log10(max(values))

    def point(many: float, ms: float) -> str:
        spread = math.log(jobs[-1] / jobs[0]) or 1.0
        x = edge + (width - 2 * edge) * math.log(many / jobs[0]) / spread
        y = height - edge - (height - 2 * edge) * (math.log10(ms) - low) / (high - low)
        return f"{x:.1f},{y:.1f}"

    def path(series: list[float], colour: str, dash: str = "") -> str:
        points = " ".join(point(many, ms) for many, ms in zip(jobs, series, strict=True))
        return (
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" {dash}/>'
        )

    parts = [path([row[name] for row in rows], c) for name, c in zip(names, colours, strict=True)]
    parts.append(path(line, "#888", 'stroke-dasharray="6 4"'))
    labels = [*zip(names, colours, strict=True), ("K log K", "#888")]
    for place, (name, colour) in enumerate(labels):
        parts.append(f'<text x="80" y="{30 + 16 * place}" fill="{colour}">{name}</text>')
    for many in jobs:
        x = point(many, 10**low).split(",")[0]
        parts.append(f'<text x="{x}" y="{height - 35}" text-anchor="middle">{many:.0f}</text>')
    for power in range(math.floor(low), math.ceil(high) + 1):
        if low <= power <= high:
            y = point(jobs[0], 10**power).split(",")[1]
            parts.append(f'<text x="50" y="{y}" text-anchor="end">{10**power:g} ms</text>')
    parts.append(f'<text x="{width / 2}" y="{height - 12}" text-anchor="middle">jobs</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">\n{body}\n</svg>\n'
    )


def text(line: dict[str, Any]) -> str:
    """Markdown: what the plot shows, and on how quiet a machine."""
    rows = [
        "| jobs | GPUs | p50 ms | p99 | a tick | all at once |",
        "|---:|---:|---:|---:|---:|---:|",
        *[
            f"| {row['jobs']:,.0f} | {row['gpus']:,.0f} | {row['p50_ms']:.2f} | "
            f"{row['p99_ms']:.2f} | {row['tick_ms']:.2f} | {row['all_at_once_ms']:.0f} |"
            for row in line["rows"]
        ],
    ]
    day = datetime.fromtimestamp(line["unix_s"], UTC).date()
    load = f"load average {line['load_average']} on {line['cores']} cores"
    return "\n".join([*rows, "", f"Measured on {day}, {load}.", ""])


def with_text(page: str, new: str) -> str:
    """The page with this between its marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{new}{END}{after}"


def last_full_line(path: Path) -> dict[str, Any]:
    """Of all sizes: others are not plotted."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [each for each in lines if [row["jobs"] for row in each["rows"]] == list(SIZES)][-1]


def measure(sizes: Sequence[int], turns: int) -> dict[str, Any]:
    """Said as it goes."""
    rows: list[dict[str, float]] = []
    print(
        f"{'jobs':>6} {'GPUs':>5} {'p50 ms':>8} {'p99 ms':>8} {'tick ms':>8} {'all at once ms':>15}"
    )
    for size in sizes:
        row = measured(size, 256 if size == 1000 else max(1, size // 4), turns)
        rows.append(row)
        print(
            f"{size:6} {row['gpus']:5.0f} {row['p50_ms']:8.2f} {row['p99_ms']:8.2f} "
            f"{row['tick_ms']:8.2f} {row['all_at_once_ms']:15.1f}",
            flush=True,
        )
    return {
        "v": 1,
        "kind": "decision_time",
        "commit": commit(),
        "command": " ".join(sys.argv),
        "rows": rows,
        "unix_s": round(time.time()),
        # Others on the machine make processor time longer too: caches and clocks are shared.
        "load_average": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--json", type=Path, help="the line is added to this file")
    parser.add_argument(
        "--docs",
        action="store_true",
        help=f"{PLOT.name} and {PAGE.name} from the last line of all sizes in --json "
        f"({RESULTS.relative_to(ROOT)})",
    )
    parser.add_argument("--last", action="store_true", help="measure nothing")
    options = parser.parse_args()
    kept: Path | None = options.json or (RESULTS if options.docs else None)
    if not options.last:
        line = measure([int(size) for size in options.sizes.split(",")], options.turns)
        if kept is not None:
            with kept.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")
    if options.docs and kept is not None:
        line = last_full_line(kept)
        PLOT.write_text(svg(line["rows"]), encoding="utf-8")
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_text(page, text(line)), encoding="utf-8")


if __name__ == "__main__":
    main()
