"""Numbers as people read them, in few characters."""

import math


def loss_figure(value: float | None) -> str:
    """At most seven characters."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size < 0.001 and size > 0:
        return f"{value:.0e}"
    if size < 1000:
        return f"{value:.{3 if size < 10 else 2 if size < 100 else 1}f}"
    return f"{value:.1e}"


def rate_figure(value: float) -> str:
    """At most six characters up to a thousand million."""
    if value < 9_999.5:
        return f"{value:,.0f}"
    if value < 999_500:
        return f"{value / 1e3:.{1 if value < 99_950 else 0}f}k"
    return f"{value / 1e6:.1f}M"


def duration_figure(seconds: float | None) -> str:
    """1:02, 1:02:03, 3d 4h; a dash where it is not known."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02}"
    if whole < 36 * 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"
    return f"{whole // 86400}d {whole % 86400 // 3600}h"


def together(jobs: int) -> str:
    return "1 job" if jobs == 1 else f"{jobs} jobs together"
