"""The parts of the comparison of simulated with real runs that are pure."""

import importlib
import json
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from support.scheduling import PROFILE, request

from tlora.core.cluster import Tier, uniform_cluster
from tlora.core.load import JobLoad
from tlora.core.plan import Plan
from tlora.costs.groups import Costs
from tlora.costs.model import NanoBatch, Segment
from tlora.runtime.executors.messages import Attached, Noted, Stepped
from tlora.simulation.composed import ComposedCosts

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def test_the_calibration_finds_what_workers_cost(script) -> None:
    """Of nano-batches and of jobs in them, from rates of groups that were composed; a fit that
    takes tokens for a liquid does not find it."""
    overheads = script("fidelity_overheads")
    known = overheads.Overheads(
        factor=1.1, round_s=0.02, segment_s=0.004, attach_s=0.1, end_s=0.2
    ).on(PROFILE)
    groups = [
        tuple(request(f"j{n}", batch=1 + n % 4, length=100 * (1 + n % 3)) for n in range(many))
        for many in (1, 2, 3, 5, 8)
    ]

    def rates(costs: Costs) -> list:
        return [
            overheads.GroupRate(
                jobs,
                bucket,
                1 / costs.predict(jobs, [1.0] * len(jobs), plan, Tier.GPU).tokens_per_s,
            )
            for jobs in groups
            for bucket in (512, 2048)
            for plan in [Plan(bucket=bucket)]
        ]

    cluster = uniform_cluster(1)
    truth = rates(ComposedCosts({"llama": known}, cluster))
    found = overheads.fit_overheads(PROFILE, truth, attach_s=0.1, end_s=0.2)
    assert (found.factor, found.round_s, found.segment_s) == pytest.approx((1.1, 0.02, 0.004), 1e-6)
    assert max(map(abs, found.errors_pct)) < 1e-6
    liquid = rates(Costs({"llama": known}, cluster))
    wrong = overheads.fit_overheads(PROFILE, liquid, attach_s=0.1, end_s=0.2)
    assert max(map(abs, wrong.errors_pct)) > 3


def test_a_slower_machine_takes_longer_for_all_of_it(script) -> None:
    """A tenth, in every time that a simulation is told."""
    overheads = script("fidelity_overheads")
    mean = overheads.Overheads(factor=1.1, round_s=0.02, segment_s=0.004, attach_s=0.1, end_s=0.2)
    one, other = mean.on(PROFILE), mean.slower(0.1).on(PROFILE)
    batch = NanoBatch(512, 9000, (Segment(300, 8), Segment(100, 4)))
    assert other.time.seconds(batch) == pytest.approx(1.1 * one.time.seconds(batch))
    for name in ("load_s", "attach_s", "detach_s"):
        assert getattr(other, name) == pytest.approx(1.1 * getattr(one, name))
    sums = [each.steps.seconds(passes=1, jobs=2, parameters=1e6) for each in (one, other)]
    assert sums[1] == pytest.approx(1.1 * sums[0])


def noted(at: float, **tokens: int) -> Noted:
    return Noted("nano_batch", at, {"purpose": "train", "rows": 512, "tokens": tokens})


def stepped(job: str) -> Stepped:
    return Stepped(job, 1, 0.0, 0.0, 0.0, 1, 1, 1, 1)


def test_nano_batches_are_priced_with_the_steps_after_them(script) -> None:
    """Where nothing came in between on their device; those that took 1 % longer than they should
    are priced 1 % too low."""
    prices = script("fidelity_prices")
    loads = {"a": JobLoad(rank=8, batch_size=1, lengths=(100,))}
    batch = NanoBatch(512, 100**2, (Segment(100, 8),))
    parameters = 8 * PROFILE.parameters_per_rank
    after_s = PROFILE.steps.seconds(passes=1, jobs=1, parameters=parameters)
    seconds = PROFILE.time.seconds(batch) + after_s
    heard = prices.NanoBatches()
    heard(0, noted(1.0, a=100))
    heard(1, Attached("b", 0, 0.1))
    heard(0, noted(1.0 + seconds * 1.01, a=100))
    heard(0, stepped("a"))
    assert [each.steps for each in heard.kept] == [["a"]]
    assert prices.price_error_pct(heard.kept, loads, PROFILE) == pytest.approx(-100 / 101)
    heard(0, Attached("c", 0, 0.1))
    heard(0, noted(9.0, a=100))
    heard(0, stepped("a"))
    assert len(heard.kept) == 1 and heard.kept[0].steps == ["a"]


def test_a_pair_that_is_turned_round_is_alike_only_within_what_repeats_differ_by(script) -> None:
    """And a figure beyond its limit fails the whole."""
    verdict = script("fidelity_verdict")

    def policy(simulated: float, *real: float, error: float = 0.0) -> dict:
        figures = verdict.LIMITS_PCT
        return {
            "simulated": dict.fromkeys(figures, simulated),
            "real": [dict.fromkeys(figures, each) for each in real],
            "error_pct": dict.fromkeys(figures, error),
            "replayed": len(real),
        }

    near = verdict.judged({"a": policy(10, 9, 11), "b": policy(9.9, 10, 11)})
    assert near["holds"] and near["turned_within_noise"]["makespan_s"] == [["a", "b"]]
    far = verdict.judged({"a": policy(10, 9, 9.1), "b": policy(9.9, 11, 11.1)})
    assert not far["same_ranking"] and not far["holds"]
    for error, holds in ((4.9, True), (5.1, False)):
        assert verdict.judged({"a": policy(10, 10, 10, error=error)})["holds"] is holds


def test_a_run_is_compared_with_the_mean_over_the_speeds_that_were_seen_for_it(script) -> None:
    """Workers were slowed by the square of what slowed the probe: so is the run between rounds.
    Each simulated figure counts once. What the rounds alone say, and the mean speed, stand
    beside it."""
    fidelity: ModuleType = script("fidelity")
    span = script("fidelity_calibration").Span

    class Rounds:
        spans = (span(0.0, 1.0), span(2.0, 3.0))

        def slowness(self, number: int) -> list[float]:
            return [[0.0, 0.0], [0.2, 0.22]][number]

    class Work:
        def seconds(self, during) -> float:
            return {0.0: 2.0, 1.0: 2.1, 2.0: 2.2}[during.begin]

    class Simulated:
        def run(self, policy: str, slower: float = 0.0):
            return fidelity.Figures(10 * (1 + slower), 5 * (1 + slower), 8.0, 0, 1)

        def price_error_pct(self, run, slower: float) -> float:
            return slower

    real = fidelity.RealRun(fidelity.Figures(11.5, 5.0, 8.0, 0, 1), True, [], 0, span(1.0, 2.0))
    speeds = script("fidelity_probe").Speeds(Rounds(), Work())
    found = fidelity.compared("tlora", [real], Simulated(), speeds)
    # 2.1 / 2.0 squared, in both rounds' places: they lie on the line.
    assert [run["makespan_s"] for run in found["simulated_runs"]] == pytest.approx([11.025] * 2)
    assert found["error_pct"] == pytest.approx(
        {"makespan_s": 100 * (11.025 / 11.5 - 1), "jct_mean_s": 10.25, "jct_p99_s": 0.0}
    )
    assert found["error_by_rounds_pct"] == pytest.approx(
        {"makespan_s": 100 * (11.05 / 11.5 - 1), "jct_mean_s": 10.5, "jct_p99_s": 0.0}
    )
    assert found["error_at_mean_speed_pct"]["makespan_s"] == pytest.approx(100 * (10 / 11.5 - 1))
    assert found["price_error_pct"] == pytest.approx([0.1025])
    assert speeds.as_json["correlation"] == pytest.approx(1.0)
    assert speeds.as_json["slope"] == pytest.approx(2.0)


def test_speeds_lie_as_far_from_the_line_as_rounds_do(script) -> None:
    """And the line is the one of least squares."""
    span = script("fidelity_calibration").Span
    workers = (1.0, 1.3, 1.1, 1.2)

    class Rounds:
        spans = tuple(span(i, i + 1.0) for i in range(4))

        def slowness(self, number: int) -> list[float]:
            return [workers[number] - 1]

    class Work:
        def seconds(self, during) -> float:
            return (1.0, 1.2, 1.2, 1.0)[int(during.begin)] if during.begin < 9 else 1.2

    run = SimpleNamespace(round_before=0, span=span(9.0, 10.0))
    speeds = script("fidelity_probe").Speeds(Rounds(), Work())
    slow = (1.3 * 1.1) ** 0.5
    fast = 1.2**0.5
    expected = [slow / fast * 1.0, 1.3, 1.1, slow / fast * 1.2]
    assert [1 + each for each in speeds.during(run)] == pytest.approx(expected)
    left = speeds.as_json["left_pct"]
    assert left[0] < left[3] and left[2] < left[1]


def test_the_probe_counts_what_its_work_took_in_a_span(script, tmp_path) -> None:
    module: ModuleType = script("fidelity_probe")
    for patience_s in (1.0, 10.0, 100.0):
        began = time.monotonic()
        probe = module.Probe(tmp_path / str(patience_s))
        time.sleep(3 * module.PERIOD_S + patience_s)
        probe.close()
        if len(probe._samples) >= 2:
            break
    assert len(probe._samples) >= 2
    every = module.Span(began, time.monotonic())
    first = module.Span(began, probe._samples[0][0])
    assert probe.seconds(first) == probe._samples[0][1] > 0
    assert probe.seconds(every) == pytest.approx(
        sum(took for _, took in probe._samples) / len(probe._samples)
    )


def test_composed_rates_end_runs_when_nano_batches_one_by_one_do(script, tmp_path, capsys) -> None:
    """Two machines, two policies, a few jobs; dealt like a liquid they end too early."""
    path = tmp_path / "line.jsonl"
    options = ["--jobs", "6", "--seconds", "3", "--runs", "2", "--policies", "solo,tlora"]
    script("fidelity_without_noise").main([*options, "--json", str(path)])
    found = json.loads(path.read_text())["policies"]
    assert all(abs(error) < 3 for each in found.values() for error in each["composed"].values())
    assert found["solo"]["dealt"]["jct_mean_s"] < -3
    assert "fifo-memory" not in capsys.readouterr().out
