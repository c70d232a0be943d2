"""Rows that are kept for a job on its way: nobody else's, clean, given back when nobody wants them,
and as good as rows that were found when the job was attached."""

import random
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
import torch
from support.comparing import same_bits
from support.models import packed, sequences_of, super_gradients, super_model, tiny_model
from support.waiting import PATIENCE_S, until

from tlora.core.errors import JobFailed
from tlora.model import adapter_rows, linear
from tlora.model.adapters import AdapterWeights, LoraPair
from tlora.model.berth import Berth, Entry
from tlora.model.job_rows import Moments, Part
from tlora.model.rank_rows import RankRows, RowAllocator
from tlora.model.super_model import SuperModel

Held = dict[str, list[torch.Tensor]]
Rows = set[tuple[int, int]]


def model_of(reserve_rows: int = 16) -> SuperModel:
    return super_model(tiny_model(), reserve_rows=reserve_rows)


def adapter(model: SuperModel, *, rank: int = 4, seed: int = 0) -> AdapterWeights:
    """Both matrices random."""
    generator = torch.Generator().manual_seed(seed)
    return {
        path: LoraPair(
            a=torch.randn(rank, target.in_features, generator=generator),
            b=torch.randn(rank, target.out_features, generator=generator).t(),
        )
        for path, target in model.targets.items()
    }


def moments_of(weights: AdapterWeights, *, seed: int = 0) -> Moments:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        f"{path}.{side}": shape
        for path, pair in weights.items()
        for side, shape in (("lora_A", pair.a.shape), ("lora_B", pair.b.t().shape))
    }
    return {
        kind: {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}
        for kind in ("exp_avg", "exp_avg_sq")
    }


def attach(
    model: SuperModel, job: str, weights: AdapterWeights, moments: Moments | None = None
) -> None:
    model.attach(job, weights, scale=1.0, moments=moments)


def contents(model: SuperModel, job: str) -> Held:
    """All that the job's rows hold, what kernels read too."""
    found = {name: [each.clone() for each in views] for name, views in model.views(job).items()}
    parts = model.rows(job).parts
    operands = [each.matrix.operand[each.first :][: each.rows] for each in parts]
    return found | {"operands": [each.detach().clone() for each in operands]}


def same(found: Held, expected: Held) -> bool:
    return found.keys() == expected.keys() and all(
        same_bits(*pair) for name in found for pair in zip(found[name], expected[name], strict=True)
    )


def as_without(job: str, weights: AdapterWeights, moments: Moments | None = None) -> Held:
    """What its rows hold where it is attached without ado."""
    model = model_of()
    attach(model, job, weights, moments)
    return contents(model, job)


def rows_in(parts: Iterable[Part]) -> Rows:
    """Each row, by its pooled matrix."""
    return {
        (id(each.matrix), row)
        for each in parts
        for row in range(each.first, each.first + each.rows)
    }


def rows_of(model: SuperModel, job: str) -> Rows:
    return rows_in(model.rows(job).parts)


def kept_rows(berth: Berth) -> Rows:
    assert berth.entry is not None
    return rows_in(berth.entry.rows.parts)


def kept(model: SuperModel, weights: AdapterWeights, moments: Moments | None = None) -> Berth:
    berth = model.keep_rows("job", weights, moments)
    assert berth is not None
    return berth


def bits(model: SuperModel) -> list[torch.Tensor]:
    matrices = [rows for pool in model.pools for rows in pool.matrices]
    return [each.detach().clone() for rows in matrices for each in (*rows.tensors, rows.operand)]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def format_(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """That kernels are given adapters in."""
    monkeypatch.setattr(linear, "operand_dtype", lambda *_: request.param)
    return request.param


# What is in the rows.


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("grown", [False, True])
def test_a_job_has_the_bits_that_it_has_without_a_berth(
    format_: torch.dtype, goes_on: bool, grown: bool
) -> None:
    """Weights, moments, and the copy for kernels; no gradient. In the rows that were kept, and also
    when the pools have grown meanwhile and lie elsewhere."""
    model = model_of()
    weights = adapter(model)
    moments = moments_of(weights) if goes_on else None
    expected = as_without("job", weights, moments)
    berth = kept(model, weights, moments)
    rows = kept_rows(berth)
    if grown:
        attach(model, "large", adapter(model, rank=32, seed=1))
    attach(model, "job", weights, moments)
    found = contents(model, "job")
    assert same(found, expected)
    for part, operand in zip(model.rows("job").parts, found["operands"], strict=True):
        value = part.matrix.value.detach()[part.first :][: part.rows]
        assert same_bits(operand, value.to(format_))
    for path, pair in weights.items():
        for side, matrix in (("lora_A", pair.a), ("lora_B", pair.b.t())):
            value, _, exp_avg, exp_avg_sq = found[f"{path}.{side}"]
            assert same_bits(value, matrix.contiguous())
            for kind, moment in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
                wanted = moments[kind][f"{path}.{side}"] if moments else torch.zeros_like(value)
                assert same_bits(moment, wanted)
    assert grown or rows_of(model, "job") == rows
    model.check_integrity()
    # The comparison refuses what lacks a part.
    for name in found:
        assert not same(
            {**found, name: [torch.roll(each, 1) + 1e-3 for each in found[name]]}, expected
        )
    if goes_on:
        assert not same(found, as_without("job", weights))


def test_the_rows_that_were_listed_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is listed anew when the job is attached; its rows are known from there on. What was
    listed before the pools grew is let go."""
    model = model_of()
    weights, other = adapter(model), adapter(model, seed=1)
    called_off = kept(model, other)
    attach(model, "large", adapter(model, rank=32, seed=2))
    assert called_off.entry is None
    berth = kept(model, weights)
    assert berth.entry is not None
    rows = berth.entry.rows

    def listed(*_: object) -> Entry:
        raise AssertionError("listed while others wait")

    monkeypatch.setattr(model.adapter_rows, "_entry", listed)
    attach(model, "job", weights)
    assert model.rows("job") is rows
    with pytest.raises(AssertionError, match="listed while"):
        attach(model, "other", other)


def test_keeping_rows_changes_nothing_that_anybody_sees(format_: torch.dtype) -> None:
    """No bit of any pool, no slot, no route: the graphs and work lists of the others stay good."""
    model = model_of()
    attach(model, "here", adapter(model, seed=1))
    views, before = model.views("here"), bits(model)
    layouts, places = [pool.layout for pool in model.pools], model.places
    berth = kept(model, adapter(model))
    assert all(same_bits(*pair) for pair in zip(bits(model), before, strict=True))
    assert [pool.layout for pool in model.pools] == layouts and model.jobs == ["here"]
    assert model.places == places and model.adapter_rows.growths == 0
    assert model.views("here") is views
    assert not kept_rows(berth) & rows_of(model, "here")
    model.check_integrity()


def test_a_neighbour_has_its_gradients_to_the_bit() -> None:
    """Beside rows that are kept as beside free ones, and nothing comes into them."""
    model = model_of()
    attach(model, "here", adapter(model, seed=1))
    batch = packed({"here": sequences_of([7, 12], seed=3)})
    expected = super_gradients(model, batch)["here"]
    weights = adapter(model)
    berth = kept(model, weights)
    found = super_gradients(model, batch)["here"]
    assert all(same_bits(found[name], expected[name]) for name in expected)
    assert berth.entry is not None
    assert not any(rows.any() for rows in berth.entry.rows.slices)


# Who has them.


def test_everybody_else_gets_other_rows() -> None:
    """Jobs that are attached, and others on their way."""
    model = model_of()
    mine, yours = adapter(model), adapter(model, seed=1)
    first, second = kept(model, mine), kept(model, yours)
    attach(model, "third", adapter(model, seed=2))
    three = [kept_rows(first), kept_rows(second), rows_of(model, "third")]
    assert len(set.union(*three)) == sum(map(len, three)), "no row is in two of them"
    # In whatever order they come.
    attach(model, "second", yours)
    attach(model, "first", mine)
    assert [rows_of(model, job) for job in ("first", "second", "third")] == three
    model.check_integrity()


def test_rows_that_nobody_wants_any_more_are_free_again() -> None:
    """Whoever kept them lets go, in whatever thread; a job that has come keeps its rows."""
    model = model_of(4)
    weights = adapter(model)
    held = [kept(model, weights)]
    rows = kept_rows(held[0])
    assert model.keep_rows("other", adapter(model, seed=1)) is None, "there is no room beside it"
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join(PATIENCE_S)
    model.check_integrity()
    again = kept(model, weights)
    assert kept_rows(again) == rows
    attach(model, "job", weights)
    before = contents(model, "job")
    del again
    model.check_integrity()
    assert model.keep_rows("other", adapter(model, seed=1)) is None
    assert same(contents(model, "job"), before)
    model.detach("job")
    assert kept_rows(kept(model, weights)) == rows


def test_the_integrity_check_refuses_rows_that_leaked() -> None:
    """Kept for nobody, or kept and somebody's too."""
    model = model_of()
    berth = kept(model, adapter(model))
    model.check_integrity()
    ledger = model.adapter_rows._kept
    reference, slots = next(iter(ledger.items()))
    ledger.clear()
    with pytest.raises(AssertionError, match="are claimed"):
        model.check_integrity()
    ledger[reference] = slots
    model.check_integrity()
    model.scalings["thief"] = None  # type: ignore[assignment]
    model.pools[0].give("thief", slots[0])
    with pytest.raises(AssertionError, match="are claimed"):
        model.check_integrity()
    assert berth.entry is not None


def test_only_the_very_tensors_come_into_them() -> None:
    """A job of the same name with others, or with moments that it had not, has rows of its own."""
    model = model_of()
    weights = adapter(model)
    moments = moments_of(weights)
    berth = kept(model, weights, moments)
    rows = kept_rows(berth)
    others: list[tuple[AdapterWeights, Moments | None]] = [
        (dict(weights), moments),
        (weights, None),
        (weights, moments_of(weights, seed=1)),
        (weights, {"exp_avg": moments["exp_avg"]}),
    ]
    for given, more in others:
        attach(model, "job", given, more)
        assert not rows_of(model, "job") & rows
        assert same(contents(model, "job"), as_without("job", given, more))
        model.detach("job")
    # Made anew of the same parts, as the state of a job makes them.
    attach(model, "job", weights, dict(moments))
    assert rows_of(model, "job") == rows
    # Good for one job only.
    attach(model, "twin", weights, moments)
    assert not rows_of(model, "twin") & rows
    model.check_integrity()
    assert berth.entry is None


def test_the_same_tensors_twice_have_two_berths() -> None:
    """A job that was dropped on its way and comes again while its first thread is still at work."""
    model = model_of()
    weights = adapter(model)
    first, second = kept(model, weights), kept(model, weights)
    both = kept_rows(first), kept_rows(second)
    assert both[0].isdisjoint(both[1])
    attach(model, "job", weights)
    assert rows_of(model, "job") in both
    del first, second
    model.check_integrity()
    assert kept_rows(kept(model, weights)) in both, "the other one's rows are free"


def test_rows_that_are_kept_make_no_pool_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is here comes first, and no graph is forgotten for him. One who was to have the rows
    has others when he comes, or the very same if they are free again by then."""
    model = model_of(4)
    forgotten: list[bool] = []
    monkeypatch.setattr(model, "_forget_graphs", lambda: forgotten.append(True))
    mine, other = adapter(model), adapter(model, seed=1)
    berth = kept(model, mine)
    rows = kept_rows(berth)
    attach(model, "(probe)", other)
    assert model.adapter_rows.growths == 0 and rows_of(model, "(probe)") == rows
    assert not forgotten
    assert berth.entry is None
    model.check_integrity()
    model.detach("(probe)")
    attach(model, "job", mine)
    assert model.adapter_rows.growths == 0 and rows_of(model, "job") == rows
    del berth
    model.check_integrity()
    late = adapter(model, seed=2)
    assert model.keep_rows("late", late) is None
    attach(model, "late", late)
    assert model.adapter_rows.growths > 0 and forgotten
    for job, weights in (("job", mine), ("late", late)):
        assert same(contents(model, job), as_without(job, weights))
    model.check_integrity()


# What there is no berth for.


def test_nothing_grows_for_a_job_on_its_way() -> None:
    """Not in the last pool either. It is attached all the same."""
    model = model_of(4)
    last = list(model.targets)[-1]
    own = adapter(model)
    attach(model, "here", {last: own[last]})
    growths = model.adapter_rows.growths
    assert model.keep_rows("job", own) is None
    assert not model.adapter_rows._kept and model.adapter_rows.growths == growths
    model.check_integrity()
    attach(model, "job", own)
    assert model.adapter_rows.growths > growths
    assert same(contents(model, "job"), as_without("job", own))


def test_what_lies_elsewhere_has_no_berth() -> None:
    """Weights or moments that found no room on the device: copies from the host are slow."""
    model = model_of()
    weights = adapter(model)
    away = {path: LoraPair(pair.a.to("meta"), pair.b) for path, pair in weights.items()}
    moments = moments_of(weights)
    late = {
        kind: {n: t.to("meta") for n, t in tensors.items()} for kind, tensors in moments.items()
    }
    assert model.keep_rows("job", away) is None
    assert model.keep_rows("job", weights, late) is None
    model.check_integrity()
    assert model.keep_rows("job", weights, moments) is not None


def test_what_could_not_be_attached_is_refused_with_nothing_kept() -> None:
    """Numbers that are none, matrices that do not fit, moments of another adapter."""
    model = model_of()
    path = next(iter(model.targets))
    spoilt, small = adapter(model), adapter(model)
    spoilt[path].a[1, 2] = torch.nan
    small[path] = LoraPair(small[path].a[:, 1:], small[path].b)
    with pytest.raises(JobFailed, match=r"job 'job': .* no finite numbers"):
        model.keep_rows("job", spoilt)
    with pytest.raises(ValueError, match="job 'job': A and B of"):
        model.keep_rows("job", small)
    few = {"exp_avg": {"elsewhere": torch.zeros(1)}}
    with pytest.raises(KeyError):
        model.keep_rows("job", adapter(model), few)
    model.check_integrity()
    assert not model.adapter_rows._kept


# What goes wrong, and what it costs.


@pytest.mark.parametrize("with_berth", [False, True])
def test_an_attach_that_breaks_off_while_it_fills_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, with_berth: bool
) -> None:
    """Rows that were half filled are clean and free; the berth has nothing to give back."""
    model = model_of()
    attach(model, "here", adapter(model, seed=1))
    weights = adapter(model)
    moments = moments_of(weights)
    before, untouched = contents(model, "here"), bits(model)
    berth = model.keep_rows("job", weights, moments) if with_berth else None
    fill = Entry.fill

    def half(entry: Entry) -> None:
        fill(Entry(entry.rows, [(to[:3], source[:3]) for to, source in entry.copies]))
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(Entry, "fill", half)
        with pytest.raises(torch.OutOfMemoryError):
            attach(model, "job", weights, moments)
    assert model.jobs == ["here"] and not any("job" in pool.slots for pool in model.pools)
    assert all(same_bits(*pair) for pair in zip(bits(model), untouched, strict=True))
    model.check_integrity()
    del berth
    model.check_integrity()
    attach(model, "job", weights, moments)
    assert same(contents(model, "job"), as_without("job", weights, moments))
    assert same(contents(model, "here"), before)
    model.check_integrity()


def test_pools_that_grow_let_go_of_what_they_were_before_the_next_one_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody holds on to berths, before the job is attached and after: not to the pools."""
    model = model_of(8)
    mine, weights = adapter(model), adapter(model, seed=1)
    berths = [kept(model, mine), kept(model, weights)]
    attach(model, "job", mine)
    held: list[weakref.ref] = []
    most = 0
    grow = RankRows._grow

    def counted(rows: RankRows, capacity: int) -> None:
        nonlocal most
        most = max(most, sum(each() is not None for each in held))
        held.extend(weakref.ref(tensor.untyped_storage()) for tensor in rows.tensors)
        grow(rows, capacity)

    monkeypatch.setattr(RankRows, "_grow", counted)
    attach(model, "large", adapter(model, rank=32, seed=2))
    assert len(held) >= 4 * 7
    assert most <= 4, "of the matrix before"
    assert len(berths) == 2
    attach(model, "late", weights)
    assert same(contents(model, "late"), as_without("late", weights))


def test_freed_rows_are_clean_before_anybody_can_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody keeps rows at the worst moment: just before and just after they are cleared."""
    model = model_of(8)
    attach(model, "job", adapter(model))
    for views in model.views("job").values():
        for tensor in views:
            tensor.fill_(torch.nan)
    rows, found = rows_of(model, "job"), list[Berth]()
    cleared = adapter_rows.clear

    def clear(rows: list[torch.Tensor]) -> None:
        found.append(kept(model, adapter(model, seed=1)))
        cleared(rows)
        assert model.keep_rows("job", adapter(model, seed=2)) is None, "the job still has them"

    monkeypatch.setattr(adapter_rows, "clear", clear)
    model.detach("job")
    assert not kept_rows(found[0]) & rows
    heir = kept(model, adapter(model, seed=2))
    assert kept_rows(heir) == rows and heir.entry is not None
    assert not any(rows.any() for rows in heir.entry.rows.slices)
    model.check_integrity()


# Others go on meanwhile.


class Listing:
    """Somebody who keeps rows in a thread, and is held while he lists them."""

    def __init__(self, model: SuperModel, weights: AdapterWeights) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.berths: list[Berth | None] = []
        rows, entry = model.adapter_rows, model.adapter_rows._entry

        def held(slots, given, moments) -> Entry:
            if given is weights:
                self.reached.set()
                assert self.opened.wait(PATIENCE_S)
            return entry(slots, given, moments)

        rows._entry = held  # type: ignore[method-assign]
        self.thread = threading.Thread(
            target=lambda: self.berths.append(model.keep_rows("late", weights)), daemon=True
        )
        self.thread.start()
        assert self.reached.wait(PATIENCE_S)

    def end(self) -> Berth:
        self.opened.set()
        self.thread.join(PATIENCE_S)
        (berth,) = self.berths
        assert berth is not None
        return berth


def test_nobody_waits_for_one_who_lists_rows() -> None:
    """Jobs come and go while another one's rows are listed."""
    model = model_of()
    weights, other = adapter(model), adapter(model, seed=1)
    listing = Listing(model, weights)
    attach(model, "here", other)
    model.detach("here")
    attach(model, "here", other)
    model.check_integrity()
    berth = listing.end()
    attach(model, "late", weights)
    assert same(contents(model, "late"), as_without("late", weights)) and berth.entry is None
    assert same(contents(model, "here"), as_without("here", other))


def test_one_who_is_called_off_before_he_lists_rows_has_no_berth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others have his rows by then."""
    model = model_of(4)
    mine, other = adapter(model), adapter(model, seed=1)
    rows = model.adapter_rows

    class Still:
        """Between claiming and listing somebody else comes."""

        def __enter__(self) -> None:
            monkeypatch.setattr(rows, "_still", threading.Lock())
            attach(model, "here", other)

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(rows, "_still", Still())
    assert model.keep_rows("job", mine) is None
    assert rows.growths == 0 and not rows._kept
    assert same(contents(model, "here"), as_without("here", other))
    model.check_integrity()


def test_pools_do_not_grow_while_somebody_lists_rows() -> None:
    """He would hold on to what they were, part of it old and part of it new."""
    model = model_of()
    weights, large = adapter(model), adapter(model, rank=32, seed=1)
    listing = Listing(model, weights)
    grower = threading.Thread(target=attach, args=(model, "large", large), daemon=True)
    grower.start()
    grower.join(0.2)
    assert grower.is_alive() and model.adapter_rows.growths == 0
    berth = listing.end()
    grower.join(PATIENCE_S)
    assert model.adapter_rows.growths > 0
    assert berth.entry is None, "the pools have moved"
    attach(model, "late", weights)
    assert same(contents(model, "late"), as_without("late", weights))
    model.check_integrity()


def test_rows_are_claimed_and_released_by_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """First fit looks at all that is claimed: whoever does either holds the lock for it."""
    model = model_of(4)
    done: list[str] = []

    def watch(name: str) -> None:
        own = getattr(RowAllocator, name)

        def locked(*about: object) -> object:
            assert model.adapter_rows._books.locked(), name
            done.append(name)
            return own(*about)

        monkeypatch.setattr(RowAllocator, name, locked)

    def does(*names: str) -> bool:
        found = set(done) == set(names)
        done.clear()
        return found

    for name in ("find", "claim", "release", "grow"):
        watch(name)
    weights, other = adapter(model), adapter(model, seed=1)
    berth = kept(model, weights)
    assert does("find", "claim")
    attach(model, "job", weights)
    assert does() and berth.entry is None, "its rows are there"
    model.detach("job")
    assert does("release")
    attach(model, "job", other)
    assert does("find", "claim")
    model.detach("job")
    berth = kept(model, weights)
    attach(model, "job", other)
    assert does("find", "claim", "release"), "that of the berth"
    attach(model, "late", weights)
    assert does("find", "claim", "grow")
    model.detach("late")
    berth = kept(model, weights)
    done.clear()
    del berth
    model.check_integrity()
    assert does("release")


@contextmanager
def restless() -> Iterator[None]:
    """Threads take turns after every few instructions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def test_jobs_come_and_go_while_threads_keep_rows() -> None:
    """Some are attached, others given up on their way; pools grow, and freed rows are had at once.
    Everybody has the bits of his own adapter all the time, and in the end nothing is left over."""
    model = model_of(8)
    adapters = [adapter(model, rank=1 + seed % 5, seed=seed) for seed in range(12)]
    expected = [as_without("job", weights) for weights in adapters]
    come: list[tuple[int, Berth | None]] = []
    errors: list[BaseException] = []
    over = threading.Event()

    def bring(thread: int) -> None:
        generator = random.Random(thread)
        try:
            while not over.is_set():
                if len(come) > 8:
                    over.wait(1e-3)
                    continue
                which = generator.randrange(4) * 3 + thread
                berth = model.keep_rows("job", adapters[which])
                if generator.random() < 0.6:
                    come.append((which, berth))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=bring, args=(each,), daemon=True) for each in range(3)]
    generator, attached, used = random.Random(7), dict[str, int](), 0
    with restless():
        for thread in threads:
            thread.start()
        for number in range(120):
            until(lambda: bool(come or errors))
            assert not errors
            which, berth = come.pop(0)
            name = f"job-{number}"
            used += berth is not None
            attach(model, name, adapters[which])
            attached[name] = which
            del berth
            while len(attached) > 6 or (attached and generator.random() < 0.4):
                leaves = generator.choice(list(attached))
                assert same(contents(model, leaves), expected[attached.pop(leaves)])
                model.detach(leaves)
            if number % 10 == 0:
                model.check_integrity()
        over.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert not errors and used > 20 and model.adapter_rows.growths > 0
    for name, which in attached.items():
        assert same(contents(model, name), expected[which])
        model.detach(name)
    come.clear()
    model.check_integrity()
    assert not model.adapter_rows._kept and not any(each.any() for each in bits(model))
