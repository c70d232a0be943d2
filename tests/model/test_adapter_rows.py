"""The rows of all jobs: found once, moved when pools grow, clean when they are freed."""

import weakref

import pytest
import torch
from support.models import job_spec, super_model, tiny_model

from tlora.core.errors import JobFailed
from tlora.model import linear
from tlora.model.adapters import AdapterWeights
from tlora.model.rank_rows import RankRows


def test_a_pool_that_grows_lets_go_of_what_it_was_before_the_next_one_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Views that were found before would keep all of the old pools beside the new ones."""
    model = super_model(tiny_model(), reserve_rows=2)
    model.attach("a", model.new_adapter(job_spec("a", r=2)), scale=1.0)
    assert model.views("a")
    held: list[weakref.ref] = []
    most = 0
    grow = RankRows._grow

    def counted(rows: RankRows, capacity: int) -> None:
        nonlocal most
        most = max(most, sum(each() is not None for each in held))
        held.extend(weakref.ref(tensor.untyped_storage()) for tensor in rows.tensors)
        grow(rows, capacity)

    monkeypatch.setattr(RankRows, "_grow", counted)
    model.attach("b", model.new_adapter(job_spec("b", r=4)), scale=1.0)
    assert len(held) >= 4 * 7
    assert most <= 4, "of the matrix before"


def test_rows_are_found_once_and_again_when_a_pool_has_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who stays keeps its views when others come and go. Growing voids them, also in an attach
    that breaks off afterwards; and a name that comes back has other rows."""
    model = super_model(tiny_model(), reserve_rows=8)

    def come(name: str, rank: int) -> None:
        model.attach(name, model.new_adapter(job_spec(name, r=rank)), scale=1.0)

    def are_true(name: str) -> bool:
        found = dict(view for pool in model.pools for view in pool.views(name))
        kept = model.views(name)
        return kept.keys() == found.keys() and all(
            ours.data_ptr() == theirs.data_ptr() and ours.shape == theirs.shape
            for key in found
            for ours, theirs in zip(kept[key], found[key], strict=True)
        )

    come("a", 2)
    come("b", 2)
    views = model.views("a")
    assert model.views("b")
    model.detach("b")
    assert not model.views("b")
    come("c", 1)
    come("b", 3)
    assert model.views("a") is views and all(map(are_true, model.jobs))

    def no_room(weights: AdapterWeights) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(model.pools[-1], "claim", no_room)
        with pytest.raises(MemoryError):
            come("large", 16)
    assert model.views("a") is not views and all(map(are_true, model.jobs))
    views = model.views("a")
    come("large", 16)
    assert model.views("a") is not views and all(map(are_true, model.jobs))


def test_one_copy_of_the_base_whatever_the_number_of_jobs() -> None:
    """A hundred adapters: the base's storages stay where and as large as they were, and the pool's
    bytes are those of the rank rows."""
    model = super_model(tiny_model(), reserve_rows=8)

    def base_storages() -> dict[int, int]:
        storages = [parameter.untyped_storage() for parameter in model.model.parameters()]
        return {storage.data_ptr(): storage.nbytes() for storage in storages}

    before = base_storages()
    names = [f"job-{number}" for number in range(100)]
    for number, name in enumerate(names):
        spec = job_spec(name, r=1 + number % 5, seed=number)
        model.attach(name, model.new_adapter(spec), scale=1.0)
    assert base_storages() == before
    assert sum(before.values()) == sum(p.nbytes for p in model.model.parameters())
    rows = sum(1 + number % 5 for number in range(100))
    pooled = [t for pool in model.pools for part in (pool.a, *pool.b) for t in part.tensors]
    widths = [
        target.in_features + target.out_features for pool in model.pools for target in pool.targets
    ]
    needed = 4 * 4 * rows * sum(widths)
    assert needed <= sum(tensor.nbytes for tensor in pooled) <= 2 * needed
    model.check_integrity()


@pytest.mark.parametrize(
    ("dtype", "held", "beyond"),
    [
        (torch.float16, 65519.0, 65520.0),
        (torch.bfloat16, 3.39e38, 3.3962e38),
        (torch.float32, 3.4e38, torch.inf),
    ],
    ids=["float16", "bfloat16", "float32"],
)
def test_weights_that_kernels_could_not_hold_are_refused(
    dtype: torch.dtype, held: float, beyond: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is given to kernels is always a finite number: the largest that their format holds comes
    in, the next one fails its job by name, with nothing claimed, as do infinity and NaN."""
    monkeypatch.setattr(linear, "operand_dtype", lambda *_: dtype)
    model = super_model(tiny_model(), reserve_rows=8)
    model.attach("a", model.new_adapter(job_spec("a")), scale=1.0)
    path = next(iter(model.targets))
    for number in (-held, beyond, -beyond, torch.inf, torch.nan):
        weights = model.new_adapter(job_spec("b"))
        weights[path].b[1, 2] = number
        if number == -held:
            model.attach("b", weights, scale=1.0)
            model.detach("b")
            continue
        name = str(dtype).removeprefix("torch.")
        with pytest.raises(JobFailed, match=rf"job 'b': .* on {path} that .* numbers in {name};"):
            model.attach("b", weights, scale=1.0)
        model.check_integrity()
        assert model.jobs == ["a"] and not any("b" in pool.slots for pool in model.pools)
    operands = [rows.operand for pool in model.pools for rows in pool.matrices]
    assert all(operand.dtype == dtype and operand.isfinite().all() for operand in operands)


def test_a_freed_row_holds_nothing_of_its_last_owner() -> None:
    """The next job in the same rows starts with clean gradients and moments."""
    model = super_model(tiny_model())
    model.attach("a", model.new_adapter(job_spec("a")), scale=1.0)
    for views in model.views("a").values():
        for tensor in views:
            tensor.fill_(torch.nan)
    model.detach("a")
    model.attach("b", model.new_adapter(job_spec("b")), scale=1.0)
    for views in model.views("b").values():
        assert torch.isfinite(views.value).all()
        assert not any(tensor.any() for tensor in (views.grad, views.exp_avg, views.exp_avg_sq))
