"""What workers note down, as whoever leads them shows and records it."""

from typing import Any

from tlora.training.compose import Kind
from tlora.training.outcome import Outcome


def outcome_of(fields: dict[str, Any]) -> Outcome:
    """Of a nano-batch that was noted."""
    purpose = fields["purpose"]
    return Outcome(
        kind=Kind(purpose) if purpose else None,
        rows=fields["rows"],
        tokens=fields["tokens"],
        seconds=fields["seconds"],
        error=fields["error"],
    )


def event_of(
    device: int, what: str, when: float, fields: dict[str, Any], *, began: float = 0.0
) -> dict[str, Any]:
    """A line of events.jsonl. A worker may have taken in its first job before whoever leads heard
    that it is ready, which is when the run began: such a line has that time."""
    kind = "joined" if what == "attached" else what
    return {"v": 1, "kind": kind, **fields, "device": device, "time": max(when, began)}
