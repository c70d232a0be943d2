"""What a group takes: counted parts, and a line through measured peaks."""

from dataclasses import replace

import pytest

from tlora.costs.memory import Memory, MemoryPoint, fit_memory

COUNTED = {"weights_bytes": 1000, "device_bytes": 100_000, "outside_bytes": 10}


def test_known_parts_come_back_from_peaks() -> None:
    """A nano-batch of any size is then predicted; a twin of 1 % is refused."""
    points = [MemoryPoint(rows, 700 + 3 * rows, heldout=False) for rows in (512, 1024, 4096)]
    found = fit_memory(points, **COUNTED)
    expected = 1000 + 18 * 50 + 700 + 3 * 2048
    assert found.bytes(rows=2048, adapter_parameters=50) == pytest.approx(expected)
    assert found.reserve_bytes == pytest.approx(0, abs=1e-6)
    assert found.row_bytes is not None
    twin = replace(found, row_bytes=found.row_bytes * 1.01)
    assert twin.bytes(rows=2048, adapter_parameters=50) != pytest.approx(expected, rel=1e-3)


def test_the_reserve_covers_every_peak_that_was_seen() -> None:
    """Held-out ones too, which the line itself does not follow."""
    points = [MemoryPoint(rows, 700 + 3 * rows, heldout=False) for rows in (512, 1024, 4096)]
    high = MemoryPoint(2048, 700 + 3 * 2048 + 90, heldout=True)
    found = fit_memory([*points, high], **COUNTED)
    assert found.row_bytes == pytest.approx(3.0) and found.reserve_bytes == pytest.approx(90)
    for point in (*points, high):
        predicted = found.bytes(rows=point.rows, adapter_parameters=0)
        assert predicted is not None and predicted >= point.peak_bytes + 1000 - 1e-6


def test_without_peaks_only_what_is_counted_is_known() -> None:
    """As on a CPU; no figure is made up."""
    found = fit_memory([], weights_bytes=1000, device_bytes=None, outside_bytes=None)
    assert found == Memory(
        weights_bytes=1000,
        device_bytes=None,
        outside_bytes=None,
        fixed_bytes=None,
        row_bytes=None,
        reserve_bytes=None,
    )
    assert found.bytes(rows=1, adapter_parameters=1) is None and found.usable_bytes is None
    one_size = [MemoryPoint(512, 5.0, heldout=False)] * 2
    assert fit_memory(one_size, **COUNTED).row_bytes is None


def test_what_a_graph_hid_does_not_make_rows_cheap():
    """Of two nano-batches of a size, one was a replay, whose memory is not seen."""
    seen = [MemoryPoint(rows, 1000.0 + 10 * rows, heldout=False) for rows in (100, 200, 400)]
    hidden = [MemoryPoint(rows, 50.0, heldout=False) for rows in (100, 400)]
    found = fit_memory([*hidden, *seen], weights_bytes=0, device_bytes=None, outside_bytes=None)
    assert found.row_bytes == pytest.approx(10)
    assert found.fixed_bytes == pytest.approx(1000)
    assert found.reserve_bytes == pytest.approx(0, abs=1e-6)
