"""The settings of a step, as the kernels read them."""

import math

import pytest
import torch

from tlora.kernels.adamw import orders
from tlora.kernels.adamw.orders import Order, order_table

ORDER = Order(
    slot=2,
    learning_rate=3e-3,
    beta1=0.9,
    beta2=0.95,
    epsilon=1e-8,
    weight_decay=0.1,
    number=7,
    max_norm=None,
)


def test_a_row_has_what_torch_derives_from_the_settings() -> None:
    """Places follow the list, slots that are not due are marked, no clipping is an infinity."""
    table = order_table([ORDER, ORDER._replace(slot=0, max_norm=0.5)], 4)
    assert table.dtype == torch.float32 and table.shape == (4, orders.COLUMNS)
    assert table[:, orders.PLACE].tolist() == [1, -1, 0, -1]
    row = table[2].tolist()
    wanted = {
        orders.DECAY: 1 - 3e-4,
        orders.BETA1: 0.9,
        orders.WEIGHT1: 0.1,
        orders.BETA2: 0.95,
        orders.WEIGHT2: 0.05,
        orders.EPSILON: 1e-8,
        orders.STEP_SIZE: 3e-3 / (1 - 0.9**7),
        orders.CORRECTION: math.sqrt(1 - 0.95**7),
    }
    assert [row[column] for column in wanted] == pytest.approx(list(wanted.values()), rel=1e-7)
    assert table[:, orders.MAX_NORM].tolist() == [0.5, -1, math.inf, -1]


def test_a_rate_beyond_float32_raises_nothing() -> None:
    """It is that job's weights alone which become infinite."""
    table = order_table([ORDER._replace(learning_rate=1e300), ORDER._replace(slot=1)], 3)
    assert table[2, orders.STEP_SIZE] == math.inf
    assert table[1].isfinite().sum() == orders.COLUMNS - 1


def test_two_steps_of_one_job_at_once_are_refused() -> None:
    with pytest.raises(AssertionError):
        order_table([ORDER, ORDER], 3)
