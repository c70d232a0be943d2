"""The script that measures a steady step, on a CPU and a tiny model: it says all that it should."""

import importlib
import json
import re
from pathlib import Path

import pytest


@pytest.mark.slow
def test_every_budget_gives_a_line_with_all_figures(run_script, tmp_path) -> None:
    """But for compiled layers and kernels, which need a device."""
    found = run_script(
        "gpu_step", "--shape", "tiny", "--layers", "1", "--budgets", "512,256", "--lengths", "32",
        "--rounds", "2", "--dropout", "0.1",
    )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "line.jsonl").read_text().splitlines()]
    assert [line["budget"] for line in lines] == [512, 256] and lines[-1] == found
    for line in lines:
        assert line["complete"] and line["came_back_unchanged"] == 8
        # All jobs have work in every step, and the nano-batch is full.
        assert line["tokens"] == line["budget"] and len(line["steps_ms"]) == 4
        assert line["frozen_fraction"] == pytest.approx(
            line["tokens_per_s"] / line["frozen"]["own"], rel=1e-3
        )
        assert line["kernels"]["ms"] > 0 and line["frozen_kernels"]["top"]


def test_kernels_of_adapters_are_told_from_those_of_torch(run_script) -> None:
    """torch has a reduce_kernel too."""
    lora = importlib.import_module("gpu_step").LORA
    for own in ("shrink_kernel", "reduce_kernel", "expand_kernel_0", "lay_kernel"):
        assert lora.fullmatch(own)
    for other in ("at::native::reduce_kernel<512, 1>", "softmax_kernel", "step_kernel"):
        assert not lora.fullmatch(other)


def test_every_kernel_of_the_adapters_is_one_or_the_other(run_script) -> None:
    """A new kernel that nobody counts would make the adapters look cheaper."""
    script = importlib.import_module("gpu_step")
    folder = Path(__file__).parents[2] / "tlora" / "kernels" / "multi_lora"
    text = "".join(each.read_text() for each in folder.glob("triton_*.py"))
    kernels = set(re.findall(r"^def ([a-z]\w*_kernel)\(", text, re.MULTILINE))
    assert len(kernels) == 7
    for kernel in kernels:
        assert bool(script.LORA.fullmatch(kernel)) != bool(script.PRODUCT.fullmatch(kernel))


def test_time_without_work_is_counted_behind_what_ran_before(run_script) -> None:
    """Kernels of two streams overlap; what began sooner may end later."""
    script = importlib.import_module("gpu_step")
    busy = [
        script.Busy(*each)
        for each in [(0, 10, "a"), (12, 20, "b"), (13, 15, "c"), (25, 30, "a"), (30, 31, "b")]
    ]
    assert script.gaps_of(reversed(busy)) == {"a": (2.0, 1), "b": (5.0, 1)}
    assert script.gaps_of([]) == {}
    within = [*busy[:2], script.Busy(12, 26, "d"), *busy[3:]]
    assert script.gaps_of(within) == {"a": (2.0, 1)}
