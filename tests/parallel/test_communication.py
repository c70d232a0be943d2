"""What ranks say to each other: counted by purpose, and nothing that is not counted."""

import pytest
from support import rank_counts, rank_jobs
from support.jobs import base_model
from support.ranks import Ranks

from tlora.core.plan import Plan
from tlora.costs.layout import gathers_of
from tlora.runtime.layouts import layout_of

LAYERS = 2


def frozen_bytes() -> dict[str, int]:
    """Of the parts that are gathered."""
    model = base_model()
    of = lambda module: sum(4 * each.numel() for each in module.parameters())  # noqa: E731
    return {
        "embeddings": of(model.model.embed_tokens),
        "layers": of(model.model.layers),
        "root": of(model.model.norm),
        "head": of(model.lm_head),
    }


def test_rank_local_adapters_need_the_control_element_alone(ranks: Ranks) -> None:
    """Whole copies of the backbone, each job on one rank."""
    plan = Plan(bucket=192, replicas=2, adapters="rank_local")
    told = ranks.call(rank_counts.watched, 2, plan=plan, first=("one", "odd"))
    for counts, calls in told:
        assert set(counts) == {"control"}
        assert calls == {"all_reduce": counts["control"]["calls"]}


def test_shards_move_the_backbone_and_nothing_else(ranks: Ranks, checkpoint: str) -> None:
    """Every layer once in forward and once in backward, the head and the embeddings once."""
    plan = Plan(bucket=192, fsdp=2, adapters="rank_local")
    told = ranks.call(rank_counts.watched, 2, plan=plan, path=checkpoint, first=("wide", "one"))
    size = frozen_bytes()
    for counts, calls in told:
        assert set(counts) == {"control", "backbone"}
        assert calls == {
            "all_reduce": counts["control"]["calls"],
            "all_gather": counts["backbone"]["calls"],
        }
        forward, train = calls_of(counts["control"]["passes"])
        assert counts["backbone"]["calls"] == (LAYERS + 3) * forward + (2 * LAYERS + 4) * train
        once = sum(size.values())
        again = once + size["layers"] + size["root"]
        assert counts["backbone"]["num_bytes"] == once * forward + again * train


def calls_of(passes: dict[str, int]) -> tuple[int, int]:
    return passes["forward"], passes["train"]


def test_a_job_that_spans_ranks_is_summed_at_its_own_steps(ranks: Ranks) -> None:
    """Its own gradient is dealt and gathered for each of its steps, some numbers for an evaluation;
    nothing for its neighbour on one rank."""
    plan = Plan(bucket=192, replicas=2, adapters="mixed", spread=("odd",))
    told = ranks.call(rank_counts.watched, 2, plan=plan, first=("one", "odd"))
    steps, evaluations = rank_jobs.STEPS["odd"], 3
    numbers = rank_counts.adapter_numbers("odd")
    for counts, calls in told:
        assert counts["gradient"]["calls"] == 2 * steps
        assert counts["figures"]["calls"] == evaluations
        assert calls["all_to_all"] == steps
        figures = 9
        padded = 2 * -(-numbers // 2)
        assert counts["gradient"]["num_bytes"] == steps * 2 * (4 * padded + 8 * figures)


@pytest.mark.parametrize("kept", [0, 1, LAYERS])
def test_kept_layers_are_gathered_once_for_a_run(kept: int, ranks: Ranks, checkpoint: str) -> None:
    """What a training nano-batch gathers is what is priced, to the byte; what is kept is gathered
    by the first nano-batch, and by no other."""
    plan = Plan(bucket=192, fsdp=2, kept_layers=kept, adapters="rank_local")
    told = ranks.call(rank_counts.watched, 2, plan=plan, path=checkpoint, first=("wide", "one"))
    layout = layout_of(base_model(), name="tiny")
    layer = layout.gathered_bytes(layout.layers[0], 2)
    priced = gathers_of(layout, 2, kept)
    # A forward alone does not come back.
    once_less = layout.gathered_bytes(layout.root, 2) + (LAYERS - kept) * layer
    for counts, _ in told:
        forward, train = calls_of(counts["control"]["passes"])
        assert forward and train
        calls = priced.calls * train + (priced.calls - 1 - LAYERS + kept) * forward
        moved = priced.moved_bytes * train + (priced.moved_bytes - once_less) * forward
        assert counts["backbone"]["calls"] == calls + kept
        assert counts["backbone"]["num_bytes"] == moved + kept * layer
