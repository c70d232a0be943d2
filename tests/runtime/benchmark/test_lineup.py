"""The arms of a benchmark and their order."""

import pytest
from torch import nn

from tlora.runtime.benchmark.arms import draw_adapters
from tlora.runtime.benchmark.linears import measure
from tlora.runtime.benchmark.lineup import (
    COMPILED,
    FUSED,
    NAMES,
    ONE_AT_A_TIME,
    OWN,
    PLAIN,
    Lineup,
    new_lineup,
)
from tlora.runtime.benchmark.rounds import LeftOut, Run
from tlora.runtime.benchmark.settings import ARMS, Settings
from tlora.runtime.benchmark.steadiness import Graphs
from tlora.runtime.benchmark.workload import Done, new_workload


@pytest.fixture
def lineup(plain, ours, work) -> Lineup:
    return Lineup(
        settings=Settings(budget=64),
        model=plain,
        ours=ours,
        work=work,
        adapters=draw_adapters(ours, work.jobs),
        graphs=Graphs(ours),
        until=float("inf"),
    )


def test_what_matters_most_comes_first(lineup) -> None:
    """And every arm that can be asked for has a name."""
    assert tuple(NAMES) == ARMS
    arms = list(lineup.arms(ARMS))
    assert arms[:5] == [FUSED, OWN, *COMPILED.values(), ONE_AT_A_TIME]
    assert list(lineup.arms(["fused", "plain"])) == [FUSED, *PLAIN.values()]


def test_jobs_that_come_and_go_are_counted_once_the_arms_are_warm(lineup, work) -> None:
    """Not those of warm-ups."""
    lineup.warm_fused()
    assert lineup.graphs.warm_up_runs == 1 and lineup.nano_batches > 1
    lineup.own()
    one = lineup.one_at_a_time()
    assert lineup.graphs.jobs == 0
    assert one().done == lineup.fused().done == work.of(work.jobs)
    assert lineup.graphs.jobs == lineup.graphs.jobs_unchanged == 2 * len(work.jobs)


def test_only_the_faster_layout_is_compiled(lineup, monkeypatch) -> None:
    """With one length that is the padded one, and nothing is run to see; the other is left out
    without a word. A compiler that fails is named."""
    lineup.work = new_workload(
        num_jobs=1, ranks=(2,), batches=(2,), lengths=(9,), steps=1, dropout=0.0, vocabulary=100
    )
    monkeypatch.setattr(Lineup, "plain", None)
    reasons = ["no compiler here", None]
    monkeypatch.setattr(
        "tlora.runtime.benchmark.frozen.why_not_compiled",
        lambda *args, **options: reasons.pop(0),
    )
    with pytest.raises(LeftOut, match=r"^$"):
        lineup.compiled("packed")
    with pytest.raises(LeftOut, match="no compiler here"):
        lineup.compiled("padded")
    assert lineup.compiled("padded").shapes_vary is False
    lineup.until = 0.0
    with pytest.raises(LeftOut, match="time was over"):
        lineup.compiled("padded")


def test_layouts_are_compared_only_where_the_plain_backbone_is_measured(
    lineup, monkeypatch
) -> None:
    """Lengths differ here: the plain arms run to see, and the faster one is taken."""
    ran: list[str] = []

    def plain(self: Lineup, how: str):
        ran.append(how)
        return lambda: Run(2.0 if how == "padded" else 1.0, Done(0, 0, 0))

    monkeypatch.setattr(Lineup, "plain", plain)
    assert lineup.faster_layout() == "packed" and ran == ["padded", "packed"]
    lineup._faster, lineup.settings = None, Settings(budget=64, arms=("compiled",))
    assert lineup.faster_layout() == "padded" and len(ran) == 2


@pytest.mark.parametrize("how", ["nf4", "fp8"])
def test_our_linears_may_be_held_in_fewer_bits(how: str, plain, work) -> None:
    """Ours alone: what we are compared with keeps its weights. They train, and their cost over
    linears in full is measured."""
    paths = {path for path, module in plain.named_modules() if isinstance(module, nn.Linear)}
    settings = Settings(budget=64, quantization=how, skip_compile=True)
    lineup = new_lineup(settings, plain, work, until=float("inf"))
    assert lineup.ours.groups[0].scales is not None
    assert all(isinstance(plain.get_submodule(path), nn.Linear) for path in paths)
    assert lineup.fused().done.tokens == work.tokens
    times = measure(lineup.ours, work, budget_tokens=64, copy_bytes_per_s=1e9)
    assert len(times) == 4 and all(each.ms_frozen > 0 for each in times)
