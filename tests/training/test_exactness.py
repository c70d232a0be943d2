"""The proof before a run: the same sequence has the same bits anywhere in the whole model."""

import numpy as np
import pytest
import torch
from support.models import SUPPORTED, super_model, tiny_model
from support.native import require_native_attention

from tlora.core.errors import SpecError
from tlora.kernels import host_products
from tlora.kernels.attention import native as native_attention
from tlora.kernels.multi_lora import native
from tlora.model.super_model import SuperModel
from tlora.runtime.threads import using_threads
from tlora.training import exactness
from tlora.training.exactness import (
    Subject,
    arrangements,
    calls_of_c,
    check_whole_model,
    make_subjects,
    prove_exact,
)

ROWS = 101
SIZES = {"ranks": (1, 5, 8), "lengths": (3, 11, 29)}


def exact_model(kind: str = "llama") -> SuperModel:
    return super_model(tiny_model(kind), per_sequence=True)


@pytest.mark.parametrize("kind", SUPPORTED)
def test_every_architecture_keeps_its_bits(kind: str) -> None:
    """At an odd number of rows; the pool is as empty afterwards as before."""
    model = exact_model(kind)
    proof = prove_exact(model, ROWS, **SIZES)
    assert proof.products > 1 and not proof.tiled
    assert model.jobs == []
    model.check_integrity()
    assert not any(pool.a.grad.any() or pool.a.value.any() for pool in model.pools)


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_a_nano_batch_may_hold_more_than_the_model_has_positions_for(kind: str) -> None:
    """No made-up row is longer than one that can be trained on."""
    model = super_model(tiny_model(kind, max_position_embeddings=24), per_sequence=True)
    assert not prove_exact(model, ROWS, ranks=(1, 5), lengths=(3, 11, 24)).tiled


def test_the_line_says_what_was_tried() -> None:
    """With the number of rows, for that is what it holds for."""
    assert f"at {ROWS} rows" in prove_exact(exact_model(), ROWS, **SIZES).line


def test_sums_over_whole_segments_are_refused() -> None:
    """A model that cuts its sums by job instead of by sequence depends on how a batch was cut."""
    model = super_model(tiny_model(), per_sequence=False)
    with pytest.raises(SpecError, match="exact isolation cannot be had") as caught:
        check_whole_model(model, ROWS, **SIZES)
    assert caught.value.field == "engine.isolation"
    assert model.jobs == []


@pytest.mark.parametrize("place", [0, 50, ROWS - 2])
def test_an_operation_that_depends_on_the_place_is_refused(place: int) -> None:
    """A norm that rounds one row of the nano-batch otherwise, at the front, in the middle or at the
    end; the very last row predicts nothing."""
    model = exact_model()
    norm = model.model.model.layers[0].input_layernorm

    def favour_others(module, arguments, output):
        moved = output.clone()
        moved[:, place] *= 1 + 2**-22
        return moved

    norm.register_forward_hook(favour_others)
    with pytest.raises(SpecError, match="has other bits"):
        check_whole_model(model, ROWS, **SIZES)


def test_an_operation_that_looks_at_its_neighbours_is_refused() -> None:
    """By as little as a bit of the largest value in the nano-batch."""
    model = exact_model()

    def leak(module, arguments, output):
        return output + output.abs().max() * 1e-6

    model.model.model.layers[1].mlp.register_forward_hook(leak)
    with pytest.raises(SpecError, match="has other bits"):
        check_whole_model(model, ROWS, **SIZES)


@pytest.mark.parametrize("rows", [6, 7, 64, 101, 300])
def test_arrangements_fit_and_hold_the_same_sequences(rows: int) -> None:
    """At every size of nano-batch, each subject's sequences in their own order."""
    generator = np.random.default_rng(0)
    model = exact_model()
    subjects = make_subjects(model, rows, *SIZES.values(), generator)
    assert subjects
    for arrangement in arrangements(model, subjects, rows, generator):
        for shares in arrangement.nano_batches:
            assert sum(len(each) for share in shares for each in share.sequences) <= rows
        for subject in subjects:
            run = [
                each
                for shares in arrangement.nano_batches
                for share in shares
                if share.job == subject.name
                for each in share.sequences
            ]
            assert [id(each) for each in run] == [id(each) for each in subject.sequences]
            assert subject.name in arrangement.attached


def test_a_tiny_nano_batch_is_no_obstacle() -> None:
    """Where nothing fits beside a row there is nothing to move."""
    for rows in (1, 8):
        proof = prove_exact(exact_model(), rows, ranks=(2,), lengths=(8,))
        assert proof.num_rows == rows and proof.products > 1 and not proof.tiled


def test_more_ranks_than_have_room_are_tried_one_group_after_another(monkeypatch) -> None:
    """Twelve in a nano-batch that holds three at a time: nothing is taken for shown that was not
    tried; at once the last ones would have been left out."""
    tried: set[int] = set()

    def noted(*args: object) -> list[Subject]:
        subjects = make_subjects(*args)  # type: ignore[arg-type]
        tried.update(len(next(iter(subject.weights.values())).a) for subject in subjects)
        return subjects

    monkeypatch.setattr(exactness, "make_subjects", noted)
    ranks, model = range(1, 13), exact_model()
    prove_exact(model, ROWS, ranks=ranks, lengths=(3, 11, 29))
    assert tried == set(ranks)
    at_once = make_subjects(model, ROWS, ranks, (3, 11, 29), np.random.default_rng(0))
    assert len(at_once) < len(ranks)


@pytest.mark.parametrize("lengths", [(100, 300, 900), (500, 700, 900), (5,)])
def test_every_rank_and_dropout_are_tried(lengths: tuple[int, ...]) -> None:
    """Whatever the run's lengths; a single rank with dropout and without."""
    model = exact_model()
    for ranks in ((4, 8, 16, 30), (7,)):
        subjects = make_subjects(model, 1024, ranks, lengths, np.random.default_rng(0))
        tried = {len(next(iter(subject.weights.values())).a) for subject in subjects}
        assert tried == set(ranks)
        assert {bool(subject.dropout) for subject in subjects} == {False, True}
        assert sum(len(each) for subject in subjects for each in subject.sequences) <= 768


@pytest.mark.parametrize("preferred", [True, False])
def test_it_says_whose_products_were_proven(preferred: bool, monkeypatch) -> None:
    """A run that goes on with another library's has other bits."""
    monkeypatch.setattr(host_products, "_prefers_onednn", lambda: preferred)
    require_native_attention()
    monkeypatch.setattr(native, "_native", lambda: None)
    proof = prove_exact(exact_model(), ROWS, ranks=(8,), lengths=SIZES["lengths"])
    assert (proof.adapters, proof.frozen) == ("torch", "oneDNN" if preferred else "torch")
    assert proof.attention == "C"
    monkeypatch.setattr(native_attention, "_native", lambda: None)
    proof = prove_exact(exact_model(), ROWS, ranks=(8,), lengths=SIZES["lengths"])
    assert proof.attention == "torch"


def test_attention_in_c_that_is_not_used_is_not_recorded(monkeypatch) -> None:
    """As in a model with soft-caps, whose run goes on without it."""
    require_native_attention()
    monkeypatch.setattr(native_attention, "serves", lambda *_: False)
    proof = prove_exact(exact_model(), ROWS, ranks=(8,), lengths=SIZES["lengths"])
    assert proof.attention == "torch"


def test_nothing_is_compiled_for_a_cpu_where_a_gpu_trains(monkeypatch) -> None:
    monkeypatch.setattr(native_attention, "_native", lambda: pytest.fail("compiled"))
    assert calls_of_c(torch.device("cuda")) == 0


def test_a_cpu_has_one_thread() -> None:
    """As every worker and rank there has: attention of some lengths has other bits with two."""
    model = exact_model()
    with using_threads(2):
        proof = prove_exact(model, ROWS, ranks=(8,), lengths=SIZES["lengths"])
        assert proof.one_thread and torch.get_num_threads() == 1
    assert "with one thread" in proof.line
    with using_threads(1):
        proof = prove_exact(model, ROWS, ranks=(8,), lengths=SIZES["lengths"])
        assert not proof.one_thread and "thread" not in proof.line
