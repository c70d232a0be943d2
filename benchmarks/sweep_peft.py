"""A sweep against the same trials one by one with PEFT, in seconds, and what fusing and early exit
have of it.

    python benchmarks/sweep_peft.py --model DIR --data FOLDER [--json FILE]
        [--curves DIR [--only-curves]]

48 trials (learning rate x rank x batch size, the highest rates hopeless on purpose) of each dataset
are run three ways on one device: by PEFT, one after another, every one to its end; fused, every one
to its end; fused with the published early exit. All start from the same adapters and see the same
batches, rates and held-out rows, at the same steps; `difference` says how far PEFT's held-out
losses are from ours. So seconds(PEFT) / seconds(fused) is what fusing gains, seconds(fused) /
seconds(early exit) what early exit gains, and their product is the whole.

Loading, tokenising, making adapters and compiling are outside of every clock. Ours is the study and
the engine of `tlora tune` without its files: trials that wait are kept in host memory. PEFT is done
well (tlora/runtime/benchmark/peft_arm.py), and ends a trial at an evaluation that is no number, as
ours fails it. If PEFT would take longer than --seconds leaves, it runs as many trials as fit, every
rank and batch size among them, and the rest is reckoned from these; such a line says so.

With --curves what each trial came to that was run to its end goes to DIR/DATASET-ROWS for
benchmarks/sweep_rules.py, which brings other rules over it; with --only-curves nothing else is run.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path

import torch
from bf16_noise import in_memory
from figures import Figures, compiles, figures, options
from transformers import AutoTokenizer

from tlora.core.job import BaseSpec, DataSpec, EvalSpec, JobSpec, LoraSpec, TrainSpec
from tlora.core.sequence import IGNORED, TokenSequence
from tlora.core.sweep import EarlyExitSpec, Method, ObjectiveSpec
from tlora.data.cursor import Cursor, next_batch, total_steps
from tlora.data.dataset import TokenDataset
from tlora.data.prepare import Preparer
from tlora.model.loading import load_base
from tlora.model.super_model import SuperModel
from tlora.runtime.benchmark.machine import now
from tlora.runtime.benchmark.peft_arm import PeftJob, PeftJobs, padded_inputs
from tlora.runtime.benchmark.shapes import twin
from tlora.runtime.budget import default_budget
from tlora.runtime.environment import quieten_libraries
from tlora.store.study import StudyLog
from tlora.training.driver import JobDriver, Status
from tlora.training.engine import Engine
from tlora.training.engine_job import JobState
from tlora.training.learning_rate import learning_rate
from tlora.training.loop import run_jobs
from tlora.training.outcome import EvaluationDone, Outcome, StepDone
from tlora.tuning.events import (
    Action,
    Added,
    Attach,
    Closed,
    Completed,
    Evaluated,
    Event,
    Exit,
    Failed,
    Hold,
    TrialPlan,
)
from tlora.tuning.exits import rule_of
from tlora.tuning.results import tokens_full
from tlora.tuning.study import Phase, StudyState

DATASETS = "nl2bash,gsm8k,commonsense_mc"
RATES = 8
LOWEST, HIGHEST = 1e-5, 1.0
RANKS = (2, 8, 32)
BATCHES = (4, 16)
ALPHA = 16.0
EVALUATIONS = 10
HELD_OUT = 16
HELD_OUT_OF = 320
"""Rows that held-out ones are taken from, since those that are too long are left out."""

EVALUATED_AT_ONCE = 16
"""Held-out rows in one of PEFT's forward passes."""

WARM_UP_STEPS = 2
MARGIN = 1.1
"""Of the time that a trial of PEFT is expected to take."""


@dataclass(frozen=True)
class Sweep:
    """The trials of one dataset, each learning rate's together, and what they learn from."""

    name: str
    jobs: list[JobSpec]
    train: list[TokenSequence]
    evaluation: list[TokenSequence]

    def steps(self, job: JobSpec) -> int:
        train = job.train
        return total_steps(
            len(self.train), train.batch_size, train.num_train_epochs, train.max_steps
        )

    def plan(self, job: JobSpec) -> TrialPlan:
        tokens = sum(map(len, self.train)) * job.train.num_train_epochs
        return TrialPlan(
            name=job.name,
            params={"train.learning_rate": job.train.learning_rate, "lora.r": job.lora.r},
            total_steps=self.steps(job),
            total_tokens=round(tokens),
            batch_size=job.train.batch_size,
            adapter_bytes=0.0,
        )


@dataclass
class Seconds:
    wall: float = 0.0
    cpu: float = 0.0
    """Of this process: on a machine that others use, too, the better measure on one thread."""

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)

    def as_json(self) -> dict[str, float]:
        return {"wall_s": round(self.wall, 3), "cpu_s": round(self.cpu, 3)}


class Clock:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.started = now(device)
        self.cpu = time.process_time()

    def read(self) -> Seconds:
        return Seconds(now(self.device) - self.started, time.process_time() - self.cpu)


# Ours


class FusedSweep:
    """The loop of tlora/runtime/sweeps/running.py without files and people."""

    def __init__(self, sweep: Sweep, model: SuperModel, budget: int, method: Method) -> None:
        objective = ObjectiveSpec()
        self.sweep = sweep
        self.state = StudyState(rule_of(EarlyExitSpec(method=method), objective), objective)
        # Few sizes: a device compiles for each.
        step = None if model.device.type == "cpu" else budget // 4
        self.engine = Engine(model, budget_tokens=budget, bucket_step=step)
        self.starts = {job.name: model.new_adapter(job) for job in sweep.jobs}
        self.drivers = {
            job.name: JobDriver(job, sweep.train, sweep.evaluation) for job in sweep.jobs
        }
        self.waiting: dict[str, JobState] = {}
        self.running: dict[str, JobDriver] = {}
        self.todo: deque[Action] = deque()
        self.told: list[Event] = []
        self.nano_batches = 0

    def run(self) -> Seconds:
        clock = Clock(self.engine.super_model.device)
        try:
            self.tell(Added(tuple(map(self.sweep.plan, self.sweep.jobs))))
            self.tell(Closed())
            while self.todo or self.running:
                while self.todo:
                    self.carry_out(self.todo.popleft())
                left = run_jobs(
                    self.engine, self.running.values(), self, should_stop=lambda: bool(self.todo)
                )
                self.running = {driver.name: driver for driver in left}
            return clock.read()
        finally:
            for name in self.engine.jobs:
                self.engine.detach(name)

    def tell(self, event: Event) -> None:
        self.told.append(event)
        self.todo.extend(self.state.on(event))

    def carry_out(self, action: Action) -> None:
        name = action.trial
        if isinstance(action, Attach):
            driver, state = self.drivers[name], self.waiting.pop(name, None)
            driver.attach(self.engine, state.weights if state else self.starts[name], state=state)
            self.running[name] = driver
            return
        driver = self.running.pop(name, None)
        if driver is None or name not in self.engine.jobs:
            return
        if isinstance(action, Hold):
            self.waiting[name] = self.engine.state(name)
        else:
            assert isinstance(action, Exit)
        self.engine.detach(name)

    def on_nano_batch(self, outcome: Outcome) -> None:
        assert outcome.error is None, outcome.error
        self.nano_batches += 1

    def on_step(self, driver: JobDriver, done: StepDone) -> None:
        pass

    def on_evaluation(self, driver: JobDriver, done: EvaluationDone) -> None:
        if done.step == 0:
            return
        self.tell(
            Evaluated(
                trial=driver.name,
                step=driver.step,
                tokens=driver.tokens_seen,
                metrics={"eval_loss": done.loss, "loss": driver.recent_loss},
            )
        )

    def on_end(self, driver: JobDriver) -> None:
        told = {"trial": driver.name, "step": driver.step, "tokens": driver.tokens_seen}
        if driver.status is Status.COMPLETED:
            self.tell(Completed(**told))
        else:
            self.tell(Failed(**told, reason=driver.reason or ""))

    @property
    def best_losses(self) -> dict[str, float]:
        """Of the trials that did not fail."""
        return {
            trial.name: value
            for trial in self.state.trials.values()
            if trial.phase is not Phase.FAILED and (value := self.state.value(trial)) is not None
        }


# PEFT


@dataclass
class OneByOne:
    """What PEFT took, trial by trial."""

    train: dict[str, Seconds] = field(default_factory=dict)
    evaluate: dict[str, Seconds] = field(default_factory=dict)
    best_losses: dict[str, float] = field(default_factory=dict)
    tokens: int = 0

    def seconds(self, jobs: Sequence[JobSpec]) -> Seconds:
        """Of all trials: those that were not run take what others of their rank and batch size
        took."""
        kinds: dict[tuple[int, int], list[Seconds]] = {}
        for job in jobs:
            if job.name in self.train:
                both = self.train[job.name] + self.evaluate[job.name]
                kinds.setdefault(kind_of(job), []).append(both)
        total = Seconds()
        for job in jobs:
            if job.name in self.train:
                total += self.train[job.name] + self.evaluate[job.name]
            else:
                seen = kinds[kind_of(job)]
                total += Seconds(
                    statistics.mean(each.wall for each in seen),
                    statistics.mean(each.cpu for each in seen),
                )
        return total


def kind_of(job: JobSpec) -> tuple[int, int]:
    return job.lora.r, job.train.batch_size


def one_by_one(sweep: Sweep, peft: PeftJobs, has_time: Callable[[float], bool]) -> OneByOne:
    """One of every rank and batch size, whatever it takes, and as many more as there is time
    for."""
    found, expected = OneByOne(), dict[tuple[int, int], float]()
    for job in sweep.jobs:
        if kind_of(job) in expected and not has_time(MARGIN * expected[kind_of(job)]):
            break
        train_trial(sweep, job, peft, found)
        took = found.train[job.name] + found.evaluate[job.name]
        expected[kind_of(job)] = took.wall
    return found


def train_trial(sweep: Sweep, job: JobSpec, peft: PeftJobs, found: OneByOne) -> None:
    device, steps = peft.base.device, sweep.steps(job)
    train, evaluate, losses = Seconds(), Seconds(), list[float]()
    clock = Clock(device)
    adapted = peft.start(job)
    cursor = Cursor()
    # As ours, which is evaluated before its first step, too.
    train += clock.read()
    clock = Clock(device)
    evaluated(adapted, sweep.evaluation)
    evaluate += clock.read()
    clock = Clock(device)
    for step in range(1, steps + 1):
        indices, cursor = next_batch(cursor, len(sweep.train), job.train.batch_size, job.train.seed)
        batch = [sweep.train[int(index)] for index in indices]
        assert adapted.optimiser is not None
        for group in adapted.optimiser.param_groups:
            group["lr"] = learning_rate(job.train, step - 1, steps)
        adapted.step(batch, packed=False)
        found.tokens += sum(map(len, batch))
        if step % (job.eval.steps or steps) == 0 or step == steps:
            train += clock.read()
            clock = Clock(device)
            losses.append(evaluated(adapted, sweep.evaluation))
            evaluate += clock.read()
            if not math.isfinite(losses[-1]):
                break
            clock = Clock(device)
    adapted.stop()
    found.train[job.name], found.evaluate[job.name] = train, evaluate
    if losses and all(map(math.isfinite, losses)):
        found.best_losses[job.name] = min(losses)


@torch.no_grad()
def evaluated(adapted: PeftJob, rows: Sequence[TokenSequence]) -> float:
    """Mean loss per trained token, of rows of like lengths together."""
    ordered = sorted(rows, key=len)
    total, targets = torch.zeros((), dtype=torch.float64), 0
    for start in range(0, len(ordered), EVALUATED_AT_ONCE):
        batch = ordered[start : start + EVALUATED_AT_ONCE]
        inputs = padded_inputs(batch)
        count = int((inputs["labels"][:, 1:] != IGNORED).sum())
        total += adapted.loss(inputs).double().cpu() * count
        targets += count
    return float(total / targets)


# The comparison


def measure(
    sweep: Sweep,
    model: SuperModel,
    peft: PeftJobs,
    budget: int,
    seconds: float,
    found: Figures,
    line: dict[str, object],
    curves: Path | None,
) -> None:
    """All three ways into `line`, as they come; PEFT last, as long as `seconds` from now allow."""
    end = found.left - seconds
    with_exit = FusedSweep(sweep, model, budget, "alto")
    exit_s = with_exit.run()
    found.say(f"{sweep.name}: fused, early exit: {exit_s.wall:.1f} s")
    line |= {
        "early_exit": exit_s.as_json(),
        "early_exit_tokens": with_exit.state.tokens_spent,
        "early_exit_nano_batches": with_exit.nano_batches,
        "tokens_saved": 1 - with_exit.state.tokens_spent / tokens_full(with_exit.state),
        "fates": fates(with_exit.state),
    }
    to_end = FusedSweep(sweep, model, budget, "none")
    fused_s = to_end.run()
    found.say(f"{sweep.name}: fused, all to their ends: {fused_s.wall:.1f} s")
    if curves is not None:
        keep_curves(to_end, curves)
    line |= {
        "fused": fused_s.as_json(),
        "fused_tokens": to_end.state.tokens_spent,
        "fused_nano_batches": to_end.nano_batches,
        "speedup_early_exit": fused_s.wall / exit_s.wall,
        "cpu_speedup_early_exit": fused_s.cpu / exit_s.cpu,
        **kept(to_end.state, with_exit.state),
    }
    plain = one_by_one(sweep, peft, lambda needed: found.left - needed > end)
    peft_s = plain.seconds(sweep.jobs)
    whole = len(plain.train) == len(sweep.jobs)
    found.say(
        f"{sweep.name}: PEFT, {len(plain.train)} of {len(sweep.jobs)} trials one by one: "
        f"{peft_s.wall:.1f} s{'' if whole else ' reckoned for all'}"
    )
    line |= {
        "peft": peft_s.as_json(),
        "peft_trials": len(plain.train),
        "peft_reckoned": not whole,
        "peft_evaluating": sum(plain.evaluate.values(), Seconds()).as_json(),
        "peft_tokens": plain.tokens,
        "speedup": peft_s.wall / exit_s.wall,
        "speedup_fusion": peft_s.wall / fused_s.wall,
        "cpu_speedup": peft_s.cpu / exit_s.cpu,
        "cpu_speedup_fusion": peft_s.cpu / fused_s.cpu,
        "difference": difference(to_end.best_losses, plain.best_losses, str(line["best"])),
    }


def keep_curves(to_end: FusedSweep, root: Path) -> None:
    """As a log of `tlora tune` has them."""
    root.mkdir(parents=True)
    log = StudyLog(root / "state.sqlite")
    log.begin({"spec": {"search": {"objective": asdict(ObjectiveSpec())}}})
    for event in to_end.told:
        log.append(event, [])
    log.close()


def kept(to_end: StudyState, with_exit: StudyState) -> dict[str, object]:
    """Whether early exit has kept the best, and what it lost."""
    best, other = to_end.best, with_exit.best
    assert best is not None and other is not None, "no trial has a finite loss"
    value, other_value = to_end.value(best), with_exit.value(other)
    assert value is not None and other_value is not None
    return {
        "best": best.name,
        "best_loss": value,
        "best_early_exit": other.name,
        "best_loss_early_exit": other_value,
        "regret": (other_value - value) / value,
    }


def fates(state: StudyState) -> dict[str, int]:
    every = state.trials.values()
    return dict(Counter(t.verdict.rule if t.verdict else t.phase.value for t in every))


def difference(ours: dict[str, float], others: dict[str, float], best: str) -> dict[str, object]:
    """Of the best held-out losses, as a part of them, over the trials that both ran."""
    both = {name: abs(ours[name] - others[name]) / others[name] for name in ours if name in others}
    return {
        "trials": len(both),
        "median": statistics.median(both.values()) if both else None,
        "largest": max(both.values(), default=None),
        "of_the_best": both.get(best),
    }


def warm_up(sweep: Sweep, model: SuperModel, peft: PeftJobs, budget: int) -> None:
    """What is slow at first is outside of the clocks. A device compiles for every size of a
    nano-batch, and a whole sweep meets them all."""
    kinds = list({kind_of(job): job for job in sweep.jobs[::-1]}.values())
    whole = model.device.type == "cuda"
    chosen = sweep if whole else replace(sweep, jobs=short(kinds, WARM_UP_STEPS))
    FusedSweep(chosen, model, budget, "alto" if whole else "none").run()
    largest = max(sweep.jobs, key=lambda job: job.train.batch_size)
    peft.choose_products(largest, list(sweep.train[: largest.train.batch_size]), packed=False)
    for job in short(kinds, WARM_UP_STEPS):
        train_trial(sweep, job, peft, OneByOne())


def short(jobs: Sequence[JobSpec], steps: int) -> list[JobSpec]:
    return [
        replace(job, train=replace(job.train, max_steps=steps), eval=replace(job.eval, steps=steps))
        for job in jobs
    ]


def read_sweep(name: str, given: argparse.Namespace) -> Sweep:
    with tempfile.TemporaryDirectory() as cache:
        preparer = Preparer(AutoTokenizer.from_pretrained(given.model), cache_dir=Path(cache))
        task = JobSpec(
            name=name,
            data=DataSpec(path=str(given.data / f"{name}.jsonl.gz")),
            lora=LoraSpec(r=RANKS[0], lora_alpha=ALPHA),
            train=TrainSpec(
                num_train_epochs=given.epochs, max_length=given.length, over_length="drop"
            ),
            eval=EvalSpec(split=HELD_OUT_OF),
        )
        prepared = preparer.prepare(task)
        assert isinstance(prepared.train, TokenDataset)
        assert isinstance(prepared.evaluation, TokenDataset)
        # In memory: the files are gone with the folder.
        train = in_memory(prepared.train)[: given.rows]
        sweep = Sweep(name, [], train, in_memory(prepared.evaluation)[:HELD_OUT])
    shares = [at / (given.rates - 1) for at in range(given.rates)]
    rates = [LOWEST * (HIGHEST / LOWEST) ** share for share in shares]
    for at, (rate, rank, batch) in enumerate(product(rates, RANKS, BATCHES)):
        trained = replace(task.train, learning_rate=rate, batch_size=batch)
        lora = replace(task.lora, r=rank)
        job = replace(task, name=f"{name}-{at:02}", lora=lora, train=trained)
        every = max(1, sweep.steps(job) // EVALUATIONS)
        sweep.jobs.append(replace(job, eval=replace(job.eval, steps=every)))
    return sweep


def table(lines: Sequence[dict[str, object]], found: Figures) -> None:
    def seconds(line: dict[str, object], name: str) -> float:
        taken = line[name]
        assert isinstance(taken, dict)
        return float(taken["wall_s"])

    head = [
        "dataset",
        "PEFT s",
        "fused s",
        "early exit s",
        "in all",
        "fusing",
        "early exit",
        "tokens saved",
        "regret",
        "difference",
    ]
    rows: list[list[object]] = []
    for line in lines:
        apart = line["difference"]
        assert isinstance(apart, dict)
        rows.append(
            [
                f"{line['dataset']}{' (PEFT reckoned)' if line['peft_reckoned'] else ''}",
                *(round(seconds(line, name), 1) for name in ("peft", "fused", "early_exit")),
                line["speedup"],
                line["speedup_fusion"],
                line["speedup_early_exit"],
                line["tokens_saved"],
                line["regret"],
                apart["median"],
            ]
        )
    found.table(head, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, seconds=1500)
    parser.add_argument("--model", required=True, help="a Hugging Face checkpoint's directory")
    parser.add_argument("--data", type=Path, required=True, help="folder of NAME.jsonl.gz")
    parser.add_argument("--datasets", default=DATASETS)
    parser.add_argument("--rows", type=int, default=128, help="to train on")
    parser.add_argument("--rates", type=int, default=RATES, help="learning rates to try")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--length", type=int, default=200, help="longer rows are left out")
    parser.add_argument("--budget", type=int, help="tokens of a nano-batch; else as a run's")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU")
    parser.add_argument("--curves", type=Path, metavar="DIR", help="kept for sweep_rules.py")
    parser.add_argument("--only-curves", action="store_true")
    given = parser.parse_args(arguments)
    if given.only_curves and given.curves is None:
        parser.error("--only-curves needs --curves DIR")
    torch.set_num_threads(given.threads)
    quieten_libraries()
    with figures("sweep_peft", given) as found:
        device, names = torch.device(given.device), given.datasets.split(",")
        base = load_base(BaseSpec(model=given.model, dtype=given.dtype), device).eval()
        budget = given.budget or default_budget(device, base.num_parameters())
        found.values["settings"] = {
            "model": Path(given.model).name,
            "parameters": base.num_parameters(),
            "nano_batch_tokens": budget,
            "rates": [LOWEST, HIGHEST, given.rates],
            "ranks": RANKS,
            "batches": BATCHES,
            **{key: getattr(given, key) for key in ("rows", "epochs", "length", "dtype")},
            "threads": torch.get_num_threads(),
        }
        sweeps = [read_sweep(name, given) for name in names]
        # Adapters of PEFT go onto a model of their own over the same weights.
        alone = twin(base)
        rows = sum(job.lora.r for job in sweeps[0].jobs)
        model = SuperModel(base, reserve_rows=rows, compiled=compiles(given))
        lines: list[dict[str, object]] = []
        found.values["sweeps"] = lines
        for at, sweep in enumerate(sweeps):
            curves = given.curves and given.curves / f"{sweep.name}-{given.rows}"
            if given.only_curves:
                to_end = FusedSweep(sweep, model, budget, "none")
                found.say(f"{sweep.name}: all to their ends: {to_end.run().wall:.1f} s")
                keep_curves(to_end, curves)
                continue
            starts = {job.name: model.new_adapter(job) for job in sweep.jobs}
            peft = PeftJobs(alone, starts)
            before = found.left
            warm_up(sweep, model, peft, budget)
            warm_s = before - found.left
            found.say(f"{sweep.name}: warm after {warm_s:.1f} s")
            line: dict[str, object] = {
                "dataset": sweep.name,
                "train_rows": len(sweep.train),
                "train_tokens": sum(map(len, sweep.train)),
                "trials": len(sweep.jobs),
                "warm_up_s": round(warm_s, 1),
                "peft_autocast": peft.autocast,
            }
            lines.append(line)
            share = found.left / (len(sweeps) - at)
            measure(sweep, model, peft, budget, share, found, line, curves)
            table(lines, found)


if __name__ == "__main__":
    main(sys.argv[1:])
