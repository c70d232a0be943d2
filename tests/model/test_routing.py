"""A routing turns a packed nano-batch into the tables that linears read."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tlora.core.sequence import TokenSequence
from tlora.kernels.multi_lora.routes import MIN_SEGMENTS
from tlora.kernels.multi_lora.tables import Segment, read_table
from tlora.model.adapters import LoraPair
from tlora.model.packing import PackedBatch, Share, pack
from tlora.model.pool import GroupPool
from tlora.model.routing import MIN_BOUNDARIES, Routing, Scaling, _group, padded_lengths
from tlora.model.targets import Target

CPU = torch.device("cpu")
SCALINGS = {"one": Scaling(0.5, threshold=0), "two": Scaling(2.0, threshold=2**30)}


def new_pool(*jobs: tuple[str, int, int]) -> GroupPool:
    """Two linears, and (job, rank of the first, rank of the second)."""
    pool = GroupPool([Target("q", 6, 4, False), Target("k", 6, 3, False)], 32, CPU)
    for job, first, second in jobs:
        ranks = {"q": (first, 4), "k": (second, 3)}
        pool.attach(
            job,
            {
                path: LoraPair(torch.ones(rank, 6), torch.ones(out, rank))
                for path, (rank, out) in ranks.items()
                if rank
            },
        )
    return pool


def batch_of(*shares: tuple[str, list[int]]) -> PackedBatch:
    """(job, lengths of its sequences); the dropout key is the length of the job's name."""
    return pack(
        [
            Share(
                job,
                [TokenSequence(*[np.arange(n, dtype=np.int32)] * 2) for n in lengths],
                [0] * len(lengths),
                [1.0] * len(lengths),
                key=len(job),
            )
            for job, lengths in shares
        ],
        32,
    )


@contextmanager
def segments_of(
    routing: Routing, batch: PackedBatch, pools: list[GroupPool], train: bool = True
) -> Iterator[list[list[Segment]]]:
    with routing.entered(batch, pools, SCALINGS, train=train):
        entries = [routing.route(pool) for pool in pools]
        yield [read_table(entry.table, entry.extra) for entry in entries]


def test_a_pool_sees_the_segments_of_the_jobs_it_holds() -> None:
    """With each job's own rows, scale and dropout; a job it does not hold has none there."""
    both, one = new_pool(("one", 2, 0), ("two", 3, 1)), new_pool(("one", 1, 1))
    batch = batch_of(("two", [4, 2]), ("one", [5]))
    with segments_of(Routing(CPU), batch, [both, one]) as (in_both, in_one):
        assert in_both == [
            Segment(0, 6, a_row=2, ranks=(3, 1), b_rows=(2, 0), scale=2.0, threshold=2**30, key=3),
            Segment(6, 11, a_row=0, ranks=(2, 0), b_rows=(0, 0), scale=0.5, key=3),
        ]
        assert in_one == [Segment(6, 11, a_row=0, ranks=(1, 1), b_rows=(0, 0), scale=0.5, key=3)]


def test_evaluation_has_no_dropout() -> None:
    """Thresholds are zero; all else stays."""
    pool, batch = new_pool(("two", 3, 1)), batch_of(("two", [4]))
    with segments_of(Routing(CPU), batch, [pool], train=False) as (segments,):
        assert [(s.threshold, s.scale, s.stop) for s in segments] == [(0, 2.0, 4)]


def test_per_sequence_cuts_every_job_at_its_sequences() -> None:
    """So that no sum depends on how a batch was cut into nano-batches."""
    pool, batch = new_pool(("one", 1, 1), ("two", 1, 1)), batch_of(("two", [4, 2]), ("one", [5]))
    with segments_of(Routing(CPU, per_sequence=True), batch, [pool]) as (segments,):
        assert [(s.start, s.stop, s.scale) for s in segments] == [
            (0, 4, 2.0),
            (4, 6, 2.0),
            (6, 11, 0.5),
        ]


def test_tables_keep_their_tensors_and_lose_the_last_nano_batch() -> None:
    """Compiled code reads the same memory; fewer segments than before leave none behind."""
    routing, pool = Routing(CPU), new_pool(("one", 1, 1), ("two", 1, 1))
    with segments_of(routing, batch_of(("two", [4]), ("one", [5])), [pool]):
        before = routing.route(pool).table
    with segments_of(routing, batch_of(("one", [3])), [pool]) as (segments,):
        assert routing.route(pool).table is before
        assert [(s.start, s.stop) for s in segments] == [(0, 3)]


def test_more_segments_than_a_table_holds_get_a_larger_one() -> None:
    """By doubling, with none lost."""
    routing, pool = Routing(CPU, per_sequence=True), new_pool(("one", 1, 1))
    with segments_of(routing, batch_of(("one", [1])), [pool]):
        assert len(routing.route(pool).extra) == MIN_SEGMENTS
    empty = batch_of(("one", [0] * (MIN_SEGMENTS + 1)))
    with segments_of(routing, empty, [pool]) as (segments,):
        assert len(routing.route(pool).extra) == 2 * MIN_SEGMENTS
        assert len(segments) == MIN_SEGMENTS + 1


def test_pools_share_a_table_only_where_their_rows_are_the_same() -> None:
    """And a pool that changed finds its own again."""
    routing, batch = Routing(CPU), batch_of(("one", [5]))
    pools = [new_pool(("one", 2, 1)), new_pool(("one", 2, 1)), new_pool(("one", 2, 2))]
    with segments_of(routing, batch, pools) as (first, second, third):
        tables = [routing.route(pool).table for pool in pools]
        assert tables[0] is tables[1] and tables[0] is not tables[2]
        assert first == second != third
    pools[1].detach("one")
    routing.forget_routes()
    with segments_of(routing, batch, pools) as (first, second, third):
        assert (len(first), len(second), len(third)) == (1, 0, 1)


def test_one_nano_batch_at_a_time_and_none_outside() -> None:
    """Nesting is refused, so is reading outside; a failure inside leaves the routing usable."""
    routing, pool, batch = Routing(CPU), new_pool(("one", 1, 1)), batch_of(("one", [5]))
    with pytest.raises(AssertionError, match="outside of a routed forward"):
        routing.route(pool)
    with segments_of(routing, batch, [pool]), pytest.raises(RuntimeError, match="already running"):
        routing.entered(batch, [pool], SCALINGS, train=True).__enter__()
    with pytest.raises(ZeroDivisionError), segments_of(routing, batch, [pool]):
        raise ZeroDivisionError
    with pytest.raises(AssertionError, match="outside of a routed forward"):
        routing.route(pool)
    with segments_of(routing, batch, [pool]) as (segments,):
        assert len(segments) == 1


def test_where_bits_count_the_kernels_are_chosen_by_nobodys_adapter() -> None:
    """Neither dropout of a neighbour nor its absence, training or not; ranks decide room alone. In
    a default run they do decide."""

    def chosen(*jobs: tuple[str, int, int], train: bool = True, exact: bool = True):
        group = _group(new_pool(*jobs), SCALINGS, train, exact=exact)
        return group.dropout, group.max_rank > 0

    companies = [(), (("one", 3, 2),), (("two", 3, 2),), (("one", 1, 0), ("two", 0, 9))]
    assert {chosen(*jobs, train=train) for jobs in companies for train in (True, False)} == {
        (True, True)
    }
    assert len({chosen(*jobs, exact=False) for jobs in companies}) > 1


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("padding", [0, 1, 63, 5000])
def test_padding_fills_the_places_that_are_left_in_short_pieces(count, padding) -> None:
    """All rows are covered, sequences come first, and the number of places is a power of two that
    leaves one for padding."""
    lengths = [3] * count
    found = padded_lengths(lengths, 3 * count + padding)
    assert found[:count] == lengths and sum(found) == 3 * count + padding
    assert len(found) >= max(MIN_BOUNDARIES, count + 1) and len(found).bit_count() == 1
    pieces = found[count:]
    assert max(pieces) - min(pieces) <= 1
