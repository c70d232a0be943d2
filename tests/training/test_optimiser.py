"""One job's step over its rows of the pool is the step that torch's own AdamW and clipping take."""

from collections.abc import Iterator

import pytest
import torch
from support.tiny import spec, tiny_super_model

from tlora.core.job import TrainSpec
from tlora.kernels.adamw import Rows, Work
from tlora.model.rank_rows import RowViews
from tlora.training import optimiser
from tlora.training.optimiser import AdamW, PooledRows

SETTINGS = [
    AdamW(),
    AdamW(weight_decay=0.1),
    AdamW(beta1=0.8, beta2=0.95, epsilon=1e-6, weight_decay=0.01),
    AdamW(beta1=0.0, beta2=0.0, epsilon=1e-3),
]
WIDTHS = (48, 7, 20)


def pools(capacity: int) -> list[RowViews]:
    """Three pooled matrices with values of both signs in every row."""
    generator = torch.Generator().manual_seed(1)

    def fill(width: int) -> RowViews:
        value, grad, first, second = (
            torch.randn(capacity, width, generator=generator) for _ in range(4)
        )
        return RowViews(value, grad, first, second.square())

    return [fill(width) for width in WIDTHS]


def rows_of(pool: list[RowViews], start: int, stop: int) -> list[RowViews]:
    return [RowViews(*(tensor[start:stop] for tensor in matrix)) for matrix in pool]


def gradients(step: int, rows: int) -> Iterator[torch.Tensor]:
    """Small and large ones, of both signs."""
    generator = torch.Generator().manual_seed(100 + step)
    for width in WIDTHS:
        yield torch.randn(rows, width, generator=generator) * 10.0 ** (step % 4 - 2)


def rate(step: int) -> float:
    return 1e-2 / (1 + step)


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6])
@pytest.mark.parametrize("settings", SETTINGS)
def test_twenty_steps_equal_torchs(settings: AdamW, max_norm: float | None) -> None:
    """Weights and norms of twenty steps with a changing rate have the bits that torch gives."""
    pool = pools(12)
    rows = rows_of(pool, 3, 8)
    for row in rows:
        row.exp_avg.zero_()
        row.exp_avg_sq.zero_()
    theirs = [torch.nn.Parameter(row.value.clone()) for row in rows]
    adamw = torch.optim.AdamW(
        theirs,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    for step in range(20):
        for row, parameter, grad in zip(rows, theirs, gradients(step, 5), strict=True):
            row.grad.copy_(grad)
            parameter.grad = grad.clone()
        norm = optimiser.gradient_norm(rows)
        limit = float("inf") if max_norm is None else max_norm
        assert norm == torch.nn.utils.clip_grad_norm_(theirs, limit)
        if max_norm is not None:
            optimiser.clip(rows, norm, max_norm)
        optimiser.step(rows, settings, learning_rate=rate(step), number=step + 1)
        adamw.param_groups[0]["lr"] = rate(step)
        adamw.step()
        for row, parameter in zip(rows, theirs, strict=True):
            assert torch.equal(row.value, parameter)


@pytest.mark.parametrize(
    "broken",
    [
        AdamW(beta1=0.9 * 1.01),
        AdamW(beta2=0.998),
        AdamW(epsilon=1e-6),
        AdamW(weight_decay=1e-4),
    ],
)
def test_a_slightly_wrong_setting_shows(broken: AdamW) -> None:
    """The comparison above is not content with a setting that is a little off."""
    ours, theirs = (rows_of(pools(6), 0, 6) for _ in range(2))
    for number in (1, 2):
        optimiser.step(ours, broken, learning_rate=1e-2, number=number)
        optimiser.step(theirs, AdamW(), learning_rate=1e-2, number=number)
    assert not torch.equal(ours[0].value, theirs[0].value)


def test_other_rows_keep_their_bits() -> None:
    """Norm, clipping, step and clearing of one job read and write its own rows only."""
    pool, before = pools(12), pools(12)
    for matrix in (*pool, *before):
        for tensor in matrix:
            tensor[8:] = float("nan")
    rows = rows_of(pool, 3, 8)
    norm = optimiser.gradient_norm(rows)
    assert torch.isfinite(norm)
    optimiser.clip(rows, norm, 0.1)
    optimiser.step(rows, SETTINGS[2], learning_rate=1e-2, number=1)
    optimiser.clear_gradients(rows)
    for matrix, old in zip(pool, before, strict=True):
        for tensor, was in zip(matrix, old, strict=True):
            for other in (slice(0, 3), slice(8, None)):
                assert torch.equal(tensor[other].view(torch.int32), was[other].view(torch.int32))
            assert not torch.equal(tensor[3:8], was[3:8])
        assert not matrix.grad[3:8].any()


def test_settings_come_from_the_spec() -> None:
    """Betas, epsilon and decay are the job's own."""
    train = TrainSpec(adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6, weight_decay=0.2)
    assert AdamW.of(train) == AdamW(0.8, 0.9, 1e-6, 0.2)


def places_of(work: Work, slot: int) -> list[list[int]]:
    span = work.spans[slot]
    return work.table[span.first : span.first + span.size].tolist()


def test_the_list_is_right_whoever_comes_and_goes() -> None:
    """After every change it is the list that is made anew: jobs that stay, a name that comes back
    in other rows, a pool that grows and moves."""
    model = tiny_super_model(reserve_rows=12)
    rows = PooledRows(model)

    def come(name: str, rank: int) -> None:
        model.attach(name, model.new_adapter(spec(name, lora={"r": rank})), scale=1.0)

    moves = [
        lambda: come("a", 3),
        lambda: come("b", 5),
        lambda: model.detach("a"),
        lambda: come("c", 2),
        lambda: come("a", 4),
        lambda: come("large", 16),
        lambda: model.detach("b"),
    ]
    seen = []
    for move in moves:
        move()
        work, slots = rows.work()
        parts = [
            [
                Rows(part.matrix.tensors, part.first, part.rows)
                for pool in model.pools
                for part in pool.parts(job)
            ]
            for job in model.jobs
        ]
        fresh = Work.of(parts, "cpu")
        assert work.spans == fresh.spans and torch.equal(work.table, fresh.table)
        assert slots == {job: slot for slot, job in enumerate(model.jobs)}
        seen.append(places_of(work, slots["a"]) if "a" in slots else None)
    assert seen[0] == seen[1] and seen[2] is None
    assert seen[4] != seen[0] and seen[5] != seen[4], "other rows, then other memory"
