"""A profile carried over to another base, held against the one that was measured there."""

import pytest

from tlora.costs.extrapolate import extrapolated
from tlora.costs.layout import NAMED
from tlora.costs.model import NanoBatch, Segment
from tlora.costs.profile import shipped_profiles

SHIPPED = shipped_profiles()


def seconds(name: str, source: str) -> float:
    """Of a full nano-batch of eight jobs on `name`, by the profile of `source`."""
    profile = extrapolated(
        SHIPPED[f"h200-{source}"], NAMED[SHIPPED[f"h200-{source}"].shape], NAMED[name]
    )
    batch = NanoBatch(8192.0, 8192.0 * 512, (Segment(1024.0, 16),) * 8)
    return profile.time.seconds(batch)


def test_an_eightfold_base_is_foretold_within_a_fifth() -> None:
    """From the measured 1B to the measured 8B and back, at 8,192 tokens. By layers alone it is
    not."""
    for name, source in (("llama-8b", "llama-1b"), ("llama-1b", "llama-8b")):
        measured, found = seconds(name, name), seconds(name, source)
        assert found == pytest.approx(measured, rel=0.1)
        layers = len(NAMED[name].layers) / len(NAMED[source].layers)
        assert seconds(source, source) * layers != pytest.approx(measured, rel=0.1)


def test_weights_are_counted_and_activations_follow_the_widths() -> None:
    """Carried from 1B, the bytes of a row of 8B are within a sixteenth of what was measured."""
    measured = SHIPPED["h200-llama-8b"].memory
    found = extrapolated(SHIPPED["h200-llama-1b"], NAMED["llama-1b"], NAMED["llama-8b"]).memory
    assert found.weights_bytes == 2 * NAMED["llama-8b"].parameters
    assert found.row_bytes == pytest.approx(measured.row_bytes, rel=0.06)


def test_a_base_of_its_own_is_left_alone() -> None:
    """And what is carried over says so."""
    profile = SHIPPED["h200-llama-8b"]
    assert extrapolated(profile, NAMED["llama-8b"], NAMED["llama-8b"]) is profile
    notes = extrapolated(profile, NAMED["llama-8b"], NAMED["llama-70b"]).notes
    assert any("extrapolated from llama-8b" in note for note in notes)
