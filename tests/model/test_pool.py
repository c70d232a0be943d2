"""The pool: claims never overlap, and a job that comes or goes touches nobody else's rows."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.comparing import same_bits

from tlora.model.adapters import AdapterWeights, LoraPair
from tlora.model.job_rows import adapter_of
from tlora.model.pool import GroupPool, Slot
from tlora.model.rank_rows import RankRows, RowAllocator
from tlora.model.targets import Target

CPU = torch.device("cpu")
TARGETS = [Target("q", 6, 4, False), Target("k", 6, 3, False), Target("v", 6, 8, False)]

# Positive: claim that many rows. Negative: release one of the ranges held.
ACTIONS = st.lists(st.integers(-20, 20).filter(bool), max_size=60)


def adapter(ranks: tuple[int, ...], seed: int = 0) -> AdapterWeights:
    """Random matrices of both signs; no entry where the rank is 0."""
    generator = torch.Generator().manual_seed(seed)
    return {
        target.path: LoraPair(
            a=torch.randn(rank, target.in_features, generator=generator),
            b=torch.randn(target.out_features, rank, generator=generator),
        )
        for target, rank in zip(TARGETS, ranks, strict=True)
        if rank
    }


def same_adapter(left: AdapterWeights, right: AdapterWeights) -> bool:
    return left.keys() == right.keys() and all(
        same_bits(left[path].a, right[path].a) and same_bits(left[path].b, right[path].b)
        for path in left
    )


def fill(pool: GroupPool, job: str, value: float) -> None:
    """Put something into a job's gradients and moments."""
    for _, views in pool.views(job):
        for i, view in enumerate((views.grad, views.exp_avg, views.exp_avg_sq)):
            view.fill_(value + i)


def weights_of(pool: GroupPool, job: str) -> AdapterWeights:
    return adapter_of({name: views.value.clone() for name, views in pool.views(job)})


def contents(pool: GroupPool, job: str) -> dict[str, list[torch.Tensor]]:
    """A copy of all that a job has in the pool."""
    return {name: [view.clone() for view in views] for name, views in pool.views(job)}


def unchanged(before: dict[str, list[torch.Tensor]], after: dict[str, list[torch.Tensor]]) -> bool:
    return before.keys() == after.keys() and all(
        same_bits(*pair) for name in before for pair in zip(before[name], after[name], strict=True)
    )


def held(pool: GroupPool) -> int:
    """How many values of the pool, its gradients and moments are not zero."""
    matrices = itertools.chain(pool.a.tensors, *(rows.tensors for rows in pool.b))
    return sum(int(tensor.count_nonzero()) for tensor in matrices)


# The allocator.


@settings(deadline=None)
@given(actions=ACTIONS, capacity=st.integers(0, 64))
def test_claims_are_first_fit_and_never_overlap(actions: list[int], capacity: int) -> None:
    """Against a plain list of rows: every claim is the first gap that holds it, None if there is
    none."""
    allocator, owners, ranges = RowAllocator(capacity), [None] * capacity, []
    for number, action in enumerate(actions):
        if action > 0:
            gaps = (
                first
                for first in range(capacity - action + 1)
                if not any(owners[first : first + action])
            )
            first = allocator.claim(action)
            assert first == next(gaps, None)
            if first is not None:
                owners[first : first + action] = [f"claim {number}"] * action
                ranges.append((first, action))
        elif ranges:
            first, rows = ranges.pop(action % len(ranges))
            allocator.release(first)
            owners[first : first + rows] = [None] * rows
        allocator.check_integrity(ranges)


@settings(max_examples=50, deadline=None)
@given(actions=ACTIONS)
def test_growth_keeps_contents_and_claims(actions: list[int]) -> None:
    """Rows that outgrow their capacity move whole: value, gradient and moments, and stay a leaf of
    the graph."""
    rows, ranges = RankRows(3, capacity=4, device=CPU), {}
    rows.value.requires_grad_(True)
    for number, action in enumerate(actions, start=1):
        if action > 0:
            first = rows.claim(action)
            ranges[first] = (action, number)
            for i, view in enumerate(rows.view(first, action)):
                view.fill_(number + i / 4)
        elif ranges:
            first = sorted(ranges)[action % len(ranges)]
            rows.release(first, ranges.pop(first)[0])
        rows.allocator.check_integrity([(first, count) for first, (count, _) in ranges.items()])
        for i, tensor in enumerate(rows.tensors):
            wanted = torch.zeros(rows.allocator.capacity, 3)
            for first, (count, owner) in ranges.items():
                wanted[first : first + count] = owner + i / 4
            assert same_bits(tensor, wanted)
    assert rows.value.requires_grad and rows.value.is_leaf
    assert not rows.grad.requires_grad


def test_growth_doubles_or_makes_room_for_a_large_claim() -> None:
    """Few growths for many small adapters, one for a large one."""
    rows = RankRows(2, capacity=4, device=CPU)
    capacities = []
    for size in (3, 2, 1, 1, 100):
        rows.claim(size)
        capacities.append(rows.allocator.capacity)
    assert capacities == [4, 8, 8, 8, 108]


def test_integrity_refuses_a_planted_overlap() -> None:
    """Two ranges that share a row, one beyond the end, one that nobody owns or that nobody gave."""
    allocator = RowAllocator(10)
    allocator.claim(4)
    allocator.claim(3)
    allocator.check_integrity([(4, 3), (0, 4)])
    for owned in ([(0, 4)], [(0, 4), (4, 3), (7, 1)], [(0, 4), (4, 2)]):
        with pytest.raises(AssertionError, match="are claimed"):
            allocator.check_integrity(owned)
    allocator._claimed[4] = 7
    with pytest.raises(AssertionError, match="rows up to 11 are claimed of 10"):
        allocator.check_integrity([(0, 4), (4, 7)])
    allocator._claimed = {0: 4, 3: 3}
    with pytest.raises(AssertionError, match=r"rows 3\.\. overlap"):
        allocator.check_integrity([(0, 4), (3, 3)])


# The pool of a group of linears.


@pytest.mark.parametrize("ranks", [(2, 2, 2), (1, 0, 5), (0, 0, 3), (7, 1, 64)])
def test_what_is_attached_comes_back(ranks: tuple[int, ...]) -> None:
    """Every bit of both matrices, in PEFT's orientation; no linear that the job does not adapt."""
    pool = GroupPool(TARGETS, capacity=8, device=CPU)
    pool.attach("other", adapter((3, 3, 3), seed=1))
    weights = adapter(ranks)
    pool.attach("job", weights)
    assert same_adapter(weights_of(pool, "job"), weights)
    pool.check_integrity()


def test_a_slot_names_the_rows_that_hold_the_matrices() -> None:
    """A's rows of all linears side by side, B's per linear and transposed: what kernels read."""
    pool = GroupPool(TARGETS, capacity=8, device=CPU)
    pool.attach("other", adapter((3, 3, 3), seed=1))
    weights = adapter((2, 0, 5))
    pool.attach("job", weights)
    slot = pool.slots["job"]
    assert slot == Slot(a_row=9, ranks=(2, 0, 5), b_rows=(3, 0, 3))
    a = torch.cat([weights["q"].a, weights["v"].a])
    assert same_bits(pool.a.value[9:16], a)
    assert same_bits(pool.b[0].value[3:5], weights["q"].b.T)
    assert same_bits(pool.b[2].value[3:8], weights["v"].b.T)


def test_views_are_the_jobs_rows_and_write_through() -> None:
    """Named lora_A before lora_B, gradient and moments at the same rows, shared with the pool."""
    pool = GroupPool(TARGETS, capacity=8, device=CPU)
    pool.attach("other", adapter((1, 1, 1), seed=1))
    pool.attach("job", adapter((2, 0, 3)))
    views = dict(pool.views("job"))
    assert list(views) == ["q.lora_A", "q.lora_B", "v.lora_A", "v.lora_B"]
    for i, view in enumerate(views["v.lora_A"]):
        view.fill_(10.0 + i)
        assert (pool.a.tensors[i][5:8] == 10.0 + i).all()
    for i, view in enumerate(views["v.lora_B"]):
        view.fill_(20.0 + i)
        assert (pool.b[2].tensors[i][1:4] == 20.0 + i).all()
    assert [view.requires_grad for view in views["v.lora_A"]] == [False] * 4


def test_parts_are_the_rows_of_the_views() -> None:
    """Whole matrices with first row and rows: the same memory, once, as the views by linear."""
    pool = GroupPool(TARGETS, 8, torch.device("cpu"))
    pool.attach("before", adapter((1, 1, 1)))
    pool.attach("job", adapter((2, 0, 3)))
    for index in range(4):
        viewed = sorted(
            element.data_ptr()
            for _, views in pool.views("job")
            for element in views[index].flatten()
        )
        parted = sorted(
            element.data_ptr()
            for part in pool.parts("job")
            for element in part.matrix.tensors[index][part.first :][: part.rows].detach().flatten()
        )
        assert viewed == parted
    assert [part.rows for part in pool.parts("job")] == [5, 2, 3]
    assert pool.parts("elsewhere") == []


def test_rows_that_were_claimed_are_nobodys_until_they_are_given() -> None:
    """Others get other rows, and no layout knows of them; given up they are free again."""
    pool = GroupPool(TARGETS, capacity=8, device=CPU)
    pool.attach("before", adapter((1, 1, 1)))
    layout = pool.layout
    first, second = pool.claim(adapter((2, 0, 3))), pool.claim(adapter((1, 1, 1)))
    assert first == Slot(a_row=3, ranks=(2, 0, 3), b_rows=(1, 0, 1))
    assert second == Slot(a_row=8, ranks=(1, 1, 1), b_rows=(3, 1, 4))
    assert pool.layout == layout
    pool.check_integrity([second, None, first])
    for wrong in ([first], [second], [first, second, second], ()):
        with pytest.raises(AssertionError, match="are claimed"):
            pool.check_integrity(wrong)
    pool.release(first)
    pool.check_integrity([second])
    pool.give("job", second)
    pool.check_integrity()
    assert [part.rows for part in pool.parts("job")] == [3, 1, 1, 1]
    assert pool.parts("job") == pool.parts_of(second)
    assert pool.claim({"mlp": LoraPair(torch.ones(2, 6), torch.ones(4, 2))}) is None
    pool.give("elsewhere", None)
    pool.release(None)
    assert set(pool.slots) == {"before", "job"}
    with pytest.raises(AssertionError, match="attached already"):
        pool.give("job", pool.claim(adapter((2, 0, 3))))


def test_the_given_matrices_are_copied() -> None:
    """What was handed in does not move with the training."""
    pool, given_in = GroupPool(TARGETS, capacity=8, device=CPU), adapter((2, 2, 2))
    pool.attach("job", given_in)
    for _, views in pool.views("job"):
        views.value.add_(1.0)
    assert same_adapter(given_in, adapter((2, 2, 2)))
    assert not same_adapter(weights_of(pool, "job"), given_in)


def test_cuts_name_the_matrices_of_each_part() -> None:
    """Split at the ranks they say, the parts are the views, to the bit; a linear without an adapter
    is in none of them."""
    pool = GroupPool(TARGETS, capacity=8, device=CPU)
    pool.attach("before", adapter((1, 2, 3), seed=1))
    pool.attach("job", adapter((2, 0, 3)))
    views, found = dict(pool.views("job")), {}
    for part in pool.parts("job"):
        rows = part.matrix.value.detach()[part.first : part.first + part.rows]
        matrices = rows.split([rank for _, rank in part.cut])
        found |= {name: matrix for (name, _), matrix in zip(part.cut, matrices, strict=True)}
    assert found.keys() == views.keys()
    assert all(same_bits(found[name], views[name].value) for name in found)
    assert not same_bits(found["q.lora_A"], views["q.lora_A"].value.flip(0))


def test_a_new_job_starts_with_empty_gradients_and_moments() -> None:
    """Also in rows that another job had before it."""
    pool = GroupPool(TARGETS, capacity=4, device=CPU)
    pool.attach("old", adapter((4, 4, 4), seed=1))
    fill(pool, "old", 5.0)
    pool.detach("old")
    pool.attach("new", adapter((4, 4, 4)))
    assert pool.slots["new"].a_row == 0, "the same rows"
    for _, views in pool.views("new"):
        assert not any(view.any() for view in views[1:])


def test_released_rows_are_zero_in_every_tensor() -> None:
    """Value, gradient and both moments: nothing of a job outlives it, not even a NaN."""
    pool = GroupPool(TARGETS, capacity=8, device=CPU)
    pool.attach("job", adapter((2, 0, 7)))
    fill(pool, "job", float("nan"))
    assert held(pool) > 0
    pool.detach("job")
    assert held(pool) == 0
    assert pool.slots == {}
    pool.check_integrity()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.tuples(*[st.integers(0, 9)] * 3)), min_size=1, max_size=25
    )
)
def test_neighbours_keep_their_bits_whoever_comes_and_goes(
    moves: list[tuple[int, tuple[int, ...]]],
) -> None:
    """Random attachments and detachments of mixed ranks, growths included."""
    pool = GroupPool(TARGETS, capacity=3, device=CPU)
    jobs: dict[str, dict[str, list[torch.Tensor]]] = {}
    for number, (place, ranks) in enumerate(moves):
        job = f"job {place}"
        if job in jobs:
            pool.detach(job)
            del jobs[job]
        else:
            pool.attach(job, adapter(ranks, seed=number))
            fill(pool, job, number + 0.5)
            jobs[job] = contents(pool, job)
        pool.check_integrity()
        for other, before in jobs.items():
            assert unchanged(before, contents(pool, other))
    owned = sum(int(t.count_nonzero()) for job in jobs.values() for v in job.values() for t in v)
    assert held(pool) == owned


def test_the_copy_that_kernels_read_follows_the_weights() -> None:
    """Through attaching, growing and leaving; it is the leaf that wants a gradient."""
    pool = GroupPool(TARGETS, 4, CPU, torch.bfloat16)

    def is_current() -> bool:
        matrices = (pool.a, *pool.b)
        return all(torch.equal(rows.operand, rows.value.bfloat16()) for rows in matrices)

    pool.attach("one", adapter((2, 1, 3)))
    assert is_current() and pool.a.operand.any()
    pool.attach("two", adapter((9, 2, 4), seed=1))
    assert is_current() and pool.a.operand.requires_grad
    pool.detach("one")
    assert is_current()
    for _, views in pool.views("two"):
        views.value.add_(1.0)
    assert not is_current()


def test_without_a_copy_kernels_read_the_weights_themselves() -> None:
    pool = GroupPool(TARGETS, 4, CPU)
    pool.attach("one", adapter((9, 2, 4)))
    assert all(rows.operand is rows.value for rows in (pool.a, *pool.b))
    assert pool.a.value.requires_grad


def test_a_job_on_none_of_the_linears_takes_no_rows() -> None:
    """It targets other groups: no slot, no views, and leaving is no error."""
    pool = GroupPool(TARGETS, capacity=8, device=CPU)
    pool.attach("elsewhere", {"mlp": LoraPair(torch.ones(2, 6), torch.ones(4, 2))})
    assert (pool.slots, pool.views("elsewhere"), pool.parts("elsewhere")) == ({}, [], [])
    pool.detach("elsewhere")
    assert held(pool) == 0


def test_a_job_cannot_be_attached_twice() -> None:
    """Its first rows would be lost."""
    pool = GroupPool(TARGETS, capacity=8, device=CPU)
    pool.attach("job", adapter((1, 1, 1)))
    with pytest.raises(AssertionError, match="attached already"):
        pool.attach("job", adapter((1, 1, 1)))


def test_layouts_are_equal_where_tables_can_be_shared() -> None:
    """The same jobs on the same rows, in whatever order they came; else different."""
    pools = [GroupPool(TARGETS, capacity=8, device=CPU) for _ in range(3)]
    for pool in pools[:2]:
        pool.attach("one", adapter((2, 2, 2)))
        pool.attach("two", adapter((3, 0, 1)))
    pools[2].attach("two", adapter((3, 0, 1)))
    pools[2].attach("one", adapter((2, 2, 2)))
    assert pools[0].layout == pools[1].layout
    assert pools[0].layout != pools[2].layout


def test_the_pools_integrity_check_refuses_a_planted_overlap() -> None:
    """Slots that share rows, though the allocators' own books are in order; a slot that leaked."""
    pool = GroupPool(TARGETS, capacity=8, device=CPU)
    pool.attach("one", adapter((2, 2, 2)))
    pool.attach("two", adapter((2, 2, 2)))
    right = dict(pool.slots)
    pool.check_integrity()
    for planted in (
        {**right, "two": Slot(a_row=4, ranks=(2, 2, 2), b_rows=(2, 2, 2))},
        {**right, "two": Slot(a_row=6, ranks=(2, 2, 2), b_rows=(2, 1, 2))},
        {**right, "two": right["one"]},
        {"one": right["one"]},
    ):
        pool.slots = planted
        with pytest.raises(AssertionError, match="are claimed"):
            pool.check_integrity()


# No room.


class NoRoom(RuntimeError):
    pass


def test_growth_that_fails_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever allocation is the one too many."""
    new_zeros = torch.Tensor.new_zeros
    for failing in range(1, 6):
        pool = GroupPool(TARGETS, 4, CPU, torch.bfloat16)
        pool.attach("one", adapter((2, 1, 3)))
        before = contents(pool, "one")
        calls = itertools.count(1)

        def fails(tensor: torch.Tensor, *size, failing=failing, calls=calls):
            if next(calls) == failing:
                raise NoRoom
            return new_zeros(tensor, *size)

        monkeypatch.setattr(torch.Tensor, "new_zeros", fails)
        with pytest.raises(NoRoom):
            pool.attach("two", adapter((40, 1, 1)))
        monkeypatch.setattr(torch.Tensor, "new_zeros", new_zeros)
        pool.check_integrity()
        assert "two" not in pool.slots
        assert len({len(t) for t in (*pool.a.tensors, pool.a.operand)}) == 1
        assert unchanged(before, contents(pool, "one"))
        pool.attach("two", adapter((40, 1, 1)))
        pool.check_integrity()


def test_a_claim_that_fails_halfway_gives_the_rest_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = GroupPool(TARGETS, 4, CPU)
    pool.attach("one", adapter((2, 1, 3)))

    def fails(rows: int) -> int:
        raise NoRoom

    monkeypatch.setattr(pool.b[2], "claim", fails)
    with pytest.raises(NoRoom):
        pool.attach("two", adapter((1, 1, 1)))
    pool.check_integrity()
    assert set(pool.slots) == {"one"}
