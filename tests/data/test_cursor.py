"""The order of rows: every row once an epoch, and the same from any point on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora.data.cursor import Cursor, next_batch, order, steps_per_epoch, total_steps


def walk(cursor: Cursor, n: int, batch_size: int, seed: int, steps: int):
    batches, cursors = [], [cursor]
    for _ in range(steps):
        indices, cursor = next_batch(cursor, n, batch_size, seed)
        batches.append(indices.tolist())
        cursors.append(cursor)
    return batches, cursors


sizes = st.integers(1, 40)


@given(n=sizes, batch_size=sizes, seed=st.integers(-(2**70), 2**70), stop=st.integers(0, 20))
def test_a_walk_goes_on_from_any_cursor_as_if_it_had_not_stopped(n, batch_size, seed, stop):
    batches, cursors = walk(Cursor(), n, batch_size, seed, 25)
    again, _ = walk(cursors[stop], n, batch_size, seed, 25 - stop)
    assert again == batches[stop:]


@given(n=sizes, batch_size=sizes, seed=st.integers(0, 100))
def test_every_epoch_holds_every_row_once_and_no_batch_crosses_it(n, batch_size, seed):
    steps = steps_per_epoch(n, batch_size)
    batches, cursors = walk(Cursor(), n, batch_size, seed, 2 * steps)
    for epoch in (0, 1):
        rows = [row for batch in batches[epoch * steps : (epoch + 1) * steps] for row in batch]
        assert sorted(rows) == list(range(n))
    assert cursors[steps] == Cursor(1, 0)
    assert {len(batch) for batch in batches[: steps - 1]} <= {batch_size}


def test_orders_differ_between_seeds_and_epochs():
    orders = [order(seed, epoch, 100).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(each) for each in orders}) == 4


def test_the_order_is_the_same_on_every_machine_and_version():
    """Written down once: a change here would move every job that resumes."""
    assert order(0, 0, 8).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert order(7, 3, 8).tolist() == [2, 5, 7, 3, 0, 6, 4, 1]


def test_an_order_cannot_be_changed_by_its_users():
    with pytest.raises(ValueError, match="read-only"):
        order(0, 0, 8)[0] = 1


@pytest.mark.parametrize(
    ("n", "batch_size", "epochs", "max_steps", "steps"),
    [
        (10, 4, 1.0, None, 3),
        (10, 4, 0.5, None, 2),
        (10, 4, 2.1, None, 7),
        (30, 1, 0.1, None, 3),
        (10, 4, 3.0, 5, 5),
        (10, 100, 3.0, None, 3),
    ],
)
def test_total_steps_rounds_parts_of_an_epoch_up(n, batch_size, epochs, max_steps, steps):
    assert total_steps(n, batch_size, epochs, max_steps) == steps


def test_a_cursor_of_another_dataset_is_refused():
    with pytest.raises(ValueError, match="another dataset"):
        next_batch(Cursor(0, 10), 10, 2, 0)
    with pytest.raises(ValueError, match="negative"):
        Cursor(-1, 0)


def test_orders_are_even():
    """Each row comes first about as often as any other: within five standard deviations."""
    firsts = np.bincount([order(seed, 0, 4)[0] for seed in range(2000)], minlength=4)
    assert (np.abs(firsts - 500) < 5 * np.sqrt(2000 * 0.25 * 0.75)).all()
