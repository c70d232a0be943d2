"""Copies through small buffers: every byte arrives, whatever the sizes, and no buffer is used while
it is under way."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.transfers import LateLane

from tlora.model.staging import copy_in, copy_out, pieces, runs

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def slabs_of(sizes: list[int], largest: int, *, seed: int = 0) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        list(torch.randn(sum(cut), generator=generator).split(cut))
        for run in runs(sizes, largest)
        if (cut := [sizes[index] for index in run])
    ]


def flat(slabs: list[list[torch.Tensor]]) -> torch.Tensor:
    return torch.cat([each for slab in slabs for each in slab])


@given(SIZES, st.integers(1, 60))
def test_runs_are_all_in_order_and_as_large_as_they_may_be(sizes: list[int], largest: int) -> None:
    """Together they are everything; only what is alone is larger; no two would fit as one."""
    found = runs(sizes, largest)
    assert [index for run in found for index in run] == list(range(len(sizes)))
    held = [sum(sizes[index] for index in run) for run in found]
    assert all(size <= largest or len(run) == 1 for size, run in zip(held, found, strict=True))
    starts = [sizes[run[0]] for run in found[1:]]
    assert all(size + start > largest for size, start in zip(held, starts, strict=False))


@given(SIZES, st.integers(1, 60))
def test_pieces_are_everything_once(sizes: list[int], largest: int) -> None:
    """And none is larger than a lane."""
    found = list(pieces(sizes, largest))
    assert all(0 < piece.end - piece.first <= largest for piece in found)
    covered = [(each.tensor, at) for each in found for at in range(each.first, each.end)]
    assert covered == [(tensor, at) for tensor, size in enumerate(sizes) for at in range(size)]


@settings(deadline=None)
@given(SIZES, st.integers(1, 50), st.integers(1, 17), st.integers(1, 3))
def test_everything_comes_out(sizes: list[int], largest: int, staging: int, lanes: int) -> None:
    """In its order, to the bit, and the device's copies are let go."""
    slabs = slabs_of(sizes, largest)
    expected = flat(slabs).clone()
    found = copy_out(slabs, [LateLane(staging) for _ in range(lanes)])
    assert [len(each) for each in found] == sizes
    assert torch.equal(torch.cat(found), expected)
    assert not torch.equal(torch.cat(found), expected.roll(1)) or len(expected) == 1
    assert slabs == [[]] * len(slabs)


@settings(deadline=None)
@given(SIZES, st.integers(1, 50), st.integers(1, 17), st.integers(1, 3))
def test_everything_goes_in(sizes: list[int], largest: int, staging: int, lanes: int) -> None:
    """In its order, to the bit."""
    slabs = slabs_of(sizes, largest)
    sources = [each.clone() for slab in slabs_of(sizes, largest, seed=1) for each in slab]
    copy_in(sources, slabs, [LateLane(staging) for _ in range(lanes)])
    assert torch.equal(flat(slabs), torch.cat(sources))


@pytest.mark.parametrize("way", ["out", "in"])
def test_small_tensors_share_a_copy(way: str) -> None:
    """A hundred of ten go through a buffer of five hundred in two copies."""
    sizes, lanes = [10] * 100, [LateLane(500), LateLane(500)]
    slabs = slabs_of(sizes, 5_000)
    if way == "out":
        copy_out(slabs, lanes)
    else:
        copy_in([torch.ones(10)] * 100, slabs, lanes)
    assert sum(lane.used for lane in lanes) == 2
