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

import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from figures import Figures, compiles, figures, options
from sweep_fused import FusedSweep
from sweep_one_by_one import OneByOne, one_by_one, train_trial
from sweep_trials import BATCHES, HIGHEST, LOWEST, RANKS, Seconds, Sweep, kind_of, read_sweep

from tlora.core.job import BaseSpec, JobSpec
from tlora.core.sweep import ObjectiveSpec
from tlora.model.loading import load_base
from tlora.model.super_model import SuperModel
from tlora.runtime.benchmark.peft_arm import PeftJobs
from tlora.runtime.benchmark.shapes import twin
from tlora.runtime.budget import default_budget
from tlora.runtime.environment import quieten_libraries
from tlora.store.study import StudyLog
from tlora.tuning.results import tokens_full
from tlora.tuning.study import StudyState

DATASETS = "nl2bash,gsm8k,commonsense_mc"
RATES = 8
WARM_UP_STEPS = 2


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
