"""Tasks over time, a row for each device: a picture without a script, for the report."""

from collections.abc import Sequence

from markupsafe import Markup, escape

from tlora.runtime.figures import duration_figure
from tlora.runtime.sweeps.timeline import Timeline

WIDTH, ROW, LEFT, TOP = 1000, 30, 70, 8
COLOURS = 8
"""Of the report's own."""


def gantt(timeline: Timeline, tasks: Sequence[str]) -> Markup:
    """Bars carry the names of their tasks, so that nothing is told by colour alone."""
    span = max(timeline.seconds, 1e-9)
    height = TOP + ROW * timeline.devices + 26
    scale = (WIDTH - LEFT - 10) / span
    parts = [
        Markup(
            '<svg viewBox="0 0 {} {}" width="100%" role="img" aria-label="Tasks over time">'
        ).format(WIDTH, height)
    ]
    for device in range(timeline.devices):
        y = TOP + ROW * device
        parts.append(
            Markup('<text x="0" y="{}">device {}</text>').format(y + ROW * 0.62, device)
            + Markup('<rect x="{}" y="{}" width="{:.1f}" height="{}" fill="var(--grid)"/>').format(
                LEFT, y + 2, span * scale, ROW - 4
            )
        )
    for bar in timeline.bars:
        x, y = LEFT + bar.begin * scale, TOP + ROW * bar.device
        width = max(1.0, (bar.end - bar.begin) * scale)
        colour = tasks.index(bar.task) % COLOURS
        words = (
            f"{bar.task} on device {bar.device}: {duration_figure(bar.begin)} to "
            f"{duration_figure(bar.end)}, trials that came: {bar.trials}"
        )
        parts.append(
            Markup(
                '<g><title>{}</title><rect x="{:.1f}" y="{}" width="{:.1f}" height="{}" rx="2" '
                'fill="var(--c{})" fill-opacity="0.75" stroke="var(--card)"/>'
            ).format(words, x, y + 4, width, ROW - 8, colour)
        )
        if width > 9 * len(bar.task):
            # On a coloured bar the page's quiet grey is hard to read.
            label = Markup('<text x="{:.1f}" y="{}" style="fill: var(--ink)">{}</text>')
            parts.append(label.format(x + 5, y + ROW * 0.62, escape(bar.task)))
        parts.append(Markup("</g>"))
    for tick in range(5):
        at = span * tick / 4
        anchor = "end" if tick == 4 else "start"
        parts.append(
            Markup('<text x="{:.1f}" y="{}" text-anchor="{}">{}</text>').format(
                LEFT + at * scale, height - 8, anchor, duration_figure(at)
            )
        )
    return Markup("").join([*parts, Markup("</svg>")])
