"""Bytes and percentages of single linears."""

import pytest

from tlora.kernels import host_products
from tlora.runtime.benchmark import linears
from tlora.runtime.benchmark.linears import (
    LinearTime,
    adapter_bytes,
    full_batch,
    measure,
    overhead_pct,
)

LLAMA_8B_GROUPS = ((4096, 4096 + 2 * 1024), (4096, 4096), (4096, 2 * 14_336), (14_336, 4096))


def test_the_least_bytes_of_a_layer_are_those_worked_out_by_hand() -> None:
    """Llama-3.1-8B, 8,192 tokens in bfloat16: 1.58 GB; with every linear reading its own input,
    more."""
    shared = sum(adapter_bytes(8192, *group, 2) for group in LLAMA_8B_GROUPS)
    assert shared == 1_577_058_304
    apart = sum(adapter_bytes(8192, i, o, 2) for i, o in [(4096, 4096), *[(4096, 1024)] * 2])
    assert apart > adapter_bytes(8192, 4096, 4096 + 2 * 1024, 2)


def test_overhead_weighs_groups_by_how_many_there_are() -> None:
    """Frozen 2 x 1 + 1 x 2 ms, fused 2 x 1.5 + 1 x 2 ms."""
    times = [
        LinearTime("a", 8, 8, count=2, ms_frozen=1.0, ms_fused=1.5, floor_ms=1.1),
        LinearTime("b", 8, 8, count=1, ms_frozen=2.0, ms_fused=2.0, floor_ms=2.1),
    ]
    assert overhead_pct(times) == pytest.approx(25.0)


def test_every_kind_of_linear_is_measured_once(ours, work) -> None:
    """All four groups of a Llama layer, each in every layer; jobs are gone afterwards."""
    times = measure(ours, work, budget_tokens=128, copy_bytes_per_s=1e9)
    assert [(t.name, t.in_features, t.out_features, t.count) for t in times] == [
        ("q_proj,k_proj,v_proj", 128, 256, 4),
        ("o_proj", 128, 128, 4),
        ("gate_proj,up_proj", 128, 512, 4),
        ("down_proj", 256, 128, 4),
    ]
    for each in times:
        assert 0 < each.ms_frozen < each.floor_ms and each.ms_fused > 0
    tokens = full_batch(work, 128, ours.device).num_tokens
    extra = adapter_bytes(tokens, 128, 256, 4) / 1e9 * 1e3
    assert times[0].floor_ms - times[0].ms_frozen == pytest.approx(extra)
    assert not ours.jobs


def test_a_measured_nano_batch_has_tokens_of_every_job(work, ours) -> None:
    """Even where the budget is smaller than a row each."""
    for budget in (16, 128):
        batch = full_batch(work, budget, ours.device)
        assert [segment.job for segment in batch.segments] == [job.name for job in work.jobs]
        assert all(segment.stop > segment.start for segment in batch.segments)
        assert batch.num_rows >= budget


def test_frozen_linears_of_a_cpu_are_products_both_ways(ours, work, monkeypatch) -> None:
    """As many of either kind as the ones with adapters have beneath them."""
    with_adapters: list[bool] = []
    counts = {"linear": [0, 0], "input_gradient": [0, 0]}
    for name, count in counts.items():
        product = getattr(host_products, name)

        def counted(*given, product=product, count=count):
            count[bool(with_adapters)] += 1
            return product(*given)

        monkeypatch.setattr(host_products, name, counted)

    def once(steps, device):
        for step in steps:
            step()
            with_adapters.append(True)
        with_adapters.clear()
        return [1.0 for _ in steps]

    monkeypatch.setattr(linears, "seconds_in_turn", once)
    monkeypatch.setattr(linears, "replayed", lambda step, device: step)
    # Each of its own: oneDNN's gradients are linears too.
    monkeypatch.setattr(host_products, "_prefers_onednn", lambda: False)
    measure(ours, work, budget_tokens=128, copy_bytes_per_s=1e9)
    assert counts == {"linear": [7, 7], "input_gradient": [4, 4]}
