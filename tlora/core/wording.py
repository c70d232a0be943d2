"""Words that messages share."""


def number_of(count: float, thing: str) -> str:
    """As people say it: 1 step, 2 steps, 0.5 epochs."""
    said = f"{count:g}" if isinstance(count, float) else str(count)
    return f"{said} {thing}" if count == 1 else f"{said} {thing}s"
