"""`tlora tune`: a sweep file to the best adapter on disk, in this process."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tlora.config import dump_spec
from tlora.core.errors import AdapterError
from tlora.core.job import RunSpec
from tlora.core.sweep import Params, SweepSpec
from tlora.core.wording import number_of
from tlora.data.prepare import PreparedData
from tlora.model.loading import load_shape, resolve_device
from tlora.model.super_model import SuperModel
from tlora.runtime.budget import nano_batch_tokens, room_for_tokens, tuning
from tlora.runtime.comparing import compare
from tlora.runtime.data_lines import full_lines, start_lines
from tlora.runtime.directory import RunDirectory, replace_text
from tlora.runtime.elastic.places import check_unlimited
from tlora.runtime.environment import quieten_libraries
from tlora.runtime.giving_way import giving_way
from tlora.runtime.interrupts import interruptible
from tlora.runtime.recording import Recorder
from tlora.runtime.resuming import check_same_bits
from tlora.runtime.room import room_bytes
from tlora.runtime.sinks import Sinks, check_trackers
from tlora.runtime.sweeps.course import Course
from tlora.runtime.sweeps.opening import SweepOpening, opened
from tlora.runtime.sweeps.replaying import as_tree, replay
from tlora.runtime.sweeps.report import write_sweep_report
from tlora.runtime.sweeps.room import at_once
from tlora.runtime.sweeps.running import SweepRunner
from tlora.runtime.sweeps.trials import (
    MadeTrial,
    TrialMaker,
    first_trials,
    ranks_to_come,
    representatives,
)
from tlora.runtime.sweeps.view import View, choose_view
from tlora.runtime.sweeps.winning import keep_winner
from tlora.runtime.threads import using_threads
from tlora.runtime.training import compiling_lines, describe_run, load_super_model, show_exact
from tlora.store.study import StudyLog, StudyTurn
from tlora.training.controller import Controller
from tlora.training.engine import Engine
from tlora.training.exactness import Exactness
from tlora.tuning.events import Added, Closed
from tlora.tuning.results import (
    Fusion,
    Study,
    Winner,
    tokens_full,
    tokens_given_up,
    trial_result,
)
from tlora.tuning.samplers import OptunaSampler, check_sampler, is_known_before
from tlora.tuning.study import Phase, StudyState

COMPARED_SHARE = 0.2
COMPARED_SECONDS = 5.0
COMPARED_TRIALS = 8


def tune(
    spec: SweepSpec,
    *,
    output: Path | str,
    fresh: bool = False,
    measure_fusion: bool = False,
    view: View | None = None,
) -> Study:
    """Run the sweep, going on where an earlier command in `output` stopped. Raises for what is
    wrong before training starts; afterwards a trial that fails is a result, and the others go
    on. With `measure_fusion` some trials are run for some seconds together and one at a time, so
    that the report can tell what fusing saved."""
    quieten_libraries()
    check_trackers(spec.report_to)
    check_unlimited(spec.engine, "a sweep has search.max_parallel")
    check_sampler(spec.search.sampler)
    view = view or choose_view()
    with using_threads(None), opened(Path(output), (spec,), fresh=fresh) as opening:
        return _tune(opening, spec, view, measure_fusion=measure_fusion)


def _tune(opening: SweepOpening, spec: SweepSpec, view: View, *, measure_fusion: bool) -> Study:
    root, turns = opening.root, opening.turns[spec.task.name]
    outset = look_ahead(spec, turns)
    view.say(*start_lines((spec.task,), outset.shared, root / "data.txt"))
    view.say(*compiling_lines(spec.engine, outset.device))
    stage = set_up(outset, root if opening.goes_on else None, view)
    directory = SweepDirectory(root)
    opening.create()
    study = run_through(outset, stage, turns, directory, view)
    if not study.interrupted:
        study = replace(study, winner=kept_winner(spec, study, outset.made, stage.model, view))
        directory.write_json(root / "study.json", study.as_json())
        if measure_fusion:
            budget = stage.engine.budget_tokens
            study = replace(study, fusion=measured_fusion(spec, outset.made, stage.model, budget))
    directory.write_json(root / "study.json", study.as_json())
    try:
        write_sweep_report(root)
    except OSError as error:
        view.say(f"the report could not be written: {error}")
    view.summary(study)
    return study


@dataclass(frozen=True, slots=True, eq=False)
class Outset:
    """All that is known before the base is loaded."""

    spec: SweepSpec
    device: torch.device
    maker: TrialMaker
    made: dict[str, MadeTrial]
    """Those that are known: grows as a sampler names others, and people clone."""

    sized: dict[str, MadeTrial]
    """The trials, or some that could be, where a sampler names them as it goes."""

    run: RunSpec
    budget: int
    room: float | None

    @property
    def data(self) -> dict[str, PreparedData]:
        return {name: each.data for name, each in self.sized.items()}

    @property
    def shared(self) -> dict[str, PreparedData]:
        """Trials share their data."""
        return {self.spec.task.name: next(iter(self.data.values()))}


def look_ahead(spec: SweepSpec, turns: list[StudyTurn]) -> Outset:
    """Raises SpecError for settings or data that are wrong."""
    device, shape = resolve_device(spec.engine.device), load_shape(spec.base)
    maker = TrialMaker(spec, shape)
    made = make_trials(spec, maker, turns)
    sized = made or maker.make(representatives(spec))
    run = spec.run(tuple(each.job for each in sized.values()))
    data = {name: each.data for name, each in sized.items()}
    budget = nano_batch_tokens(run, device, data, shape.num_parameters())
    recompute = spec.engine.gradient_checkpointing
    room = room_bytes(spec.base, shape, device, budget_tokens=budget, recompute=recompute)
    return Outset(spec, device, maker, made, sized, run, budget, room)


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """What trials are run on."""

    model: SuperModel
    engine: Engine
    proof: Exactness | None
    ranks: frozenset[int]
    """That trials have or may come to have."""


def set_up(outset: Outset, begun: Path | None, view: View) -> Stage:
    """The base with room for the trials; where bits count, shown to be exact. `begun`: the run
    directory of a sweep that goes on, whose bits must be these."""
    spec, run, device = outset.spec, outset.run, outset.device
    exact = spec.engine.isolation == "exact"
    together = at_once(outset.sized, outset.room, spec)
    model = load_super_model(replace(run, jobs=together), device)
    proof, ranks = None, {job.lora.r for job in run.jobs} | ranks_to_come(spec)
    if exact:
        with giving_way(device):
            proof = show_exact(model, run, outset.data, outset.budget, ranks=ranks)
        if begun is not None:
            check_same_bits(begun, describe_run(run, device, proof))
        view.say(proof.line)
    tuned = tuning(run, device, budget=outset.budget, fits=room_for_tokens(run, model))
    engine = Engine(
        model,
        budget_tokens=tuned.start if tuned else outset.budget,
        exact=exact,
        controller=Controller(tuned) if tuned else None,
    )
    return Stage(model, engine, proof, frozenset(ranks))


def run_through(
    outset: Outset, stage: Stage, turns: list[StudyTurn], directory: RunDirectory, view: View
) -> Study:
    """Until the study is over, or a person stops it."""
    spec, root = outset.spec, directory.root
    state = StudyState.of(spec, outset.room)
    log = StudyLog(root / "state.sqlite")
    sinks = Sinks(spec.report_to, root, view.say)
    # Trials are written at every evaluation that is their best: only the winner's logits count.
    recorder = Recorder(directory, spec.base, stage.engine, view, sinks, looks=False)
    try:
        replace_text(root / "data.txt", "\n".join(full_lines(outset.shared)) + "\n")
        directory.event("began")
        replay(state, turns, spec)
        runner = SweepRunner(
            spec,
            state,
            log,
            outset.maker,
            outset.made,
            recorder,
            view,
            lambda runner: keep(runner, directory),
        )
        runner.proven_ranks = stage.ranks if stage.proof else None
        log.begin({"spec": as_tree(spec)})
        # From here on the directory holds a sweep that can go on.
        about = describe_run(outset.run, outset.device, stage.proof)
        directory.write_json(root / "run.json", about)
        view.ended = runner.on_result
        keep(runner, directory)
        begin(runner, turns, runner.take_up)
        view.begin(state)
        with giving_way(outset.device), interruptible(on_first=view.on_interrupt) as interrupt:
            interrupted = runner.run(interrupt)
    finally:
        # Ends that are told while closing are in the log, too.
        recorder.close()
        log.close()
    return study_of(state, spec, root, runner.seconds, interrupted=interrupted)


class SweepDirectory(RunDirectory):
    """Trials come at any time: one that does is not the beginning of a session."""

    def event(self, kind: str, **fields: object) -> None:
        super().event("joined" if kind == "attached" else kind, **fields)


def make_trials(spec: SweepSpec, maker: TrialMaker, turns: list[StudyTurn]) -> dict[str, MadeTrial]:
    """Those of the log, clones included, or those that the sweep begins with."""
    plans = [plan for turn in turns if isinstance(turn.event, Added) for plan in turn.event.plans]
    if not plans:
        return maker.make(first_trials(spec))
    own: dict[str, Params] = {plan.name: plan.params for plan in plans if plan.parent is None}
    made = maker.make(own)
    for plan in plans:
        if plan.parent is not None:
            made |= maker.make({plan.name: plan.params}, parent=plan.parent)
    return made


def begin(runner: Course, turns: list[StudyTurn], take_up: Callable[[], None]) -> None:
    """The trials of a new sweep, and a word on what goes on."""
    spec, state, of = runner.spec, runner.state, f"{runner.task}: " if runner.task else ""
    if not is_known_before(spec.search):
        runner.sampler = OptunaSampler(spec.search, asked=len(state.trials))
        for trial in state.trials.values():
            value = state.value(trial)
            if trial.plan.parent is not None or trial.phase is Phase.FAILED:
                continue
            if value is not None and (trial.phase is Phase.HELD or not trial.live):
                runner.sampler.remember(trial.plan.params, value)
            elif trial.live:
                runner.sampler.expect(trial.name, trial.plan.params)
    if turns:
        over = sum(not trial.live for trial in state.trials.values())
        runner.view.say(f"{of}goes on: {over} of {number_of(len(state.trials), 'trial')} are over")
        take_up()
    elif is_known_before(spec.search):
        rule = spec.early_exit.method
        runner.view.say(f"{of}{number_of(len(runner.made), 'trial')}, early exit: {rule}")
        runner.tell(Added(tuple(each.plan for each in runner.made.values())))
    if is_known_before(spec.search) and not state.closed:
        runner.tell(Closed())


def keep(runner: SweepRunner, directory: RunDirectory) -> None:
    """What others read while the sweep runs: the trials as a job file, and how they stand."""
    if len(runner.made) != runner.kept:
        runner.kept = len(runner.made)
        jobs = tuple(each.job for each in runner.made.values())
        replace_text(directory.root / "resolved.yaml", dump_spec(runner.spec.run(jobs)))
    study = study_of(runner.state, runner.spec, directory.root, runner.seconds, interrupted=True)
    directory.write_json(directory.root / "study.json", study.as_json())


def study_of(
    state: StudyState, spec: SweepSpec, root: Path, seconds: float, *, interrupted: bool
) -> Study:
    best = state.best
    return Study(
        output=root,
        trials=[trial_result(state, trial) for trial in state.trials.values()],
        best=trial_result(state, best) if best else None,
        metric=spec.search.objective.metric,
        mode=spec.search.objective.mode,
        method=spec.early_exit.method,
        tokens_spent=state.tokens_spent,
        tokens_full=tokens_full(state),
        tokens_given_up=tokens_given_up(state),
        wall_s=seconds,
        interrupted=interrupted,
        over=state.over,
    )


def kept_winner(
    spec: SweepSpec,
    study: Study,
    made: dict[str, MadeTrial],
    model: SuperModel,
    view: View,
    folder: Path | None = None,
) -> Winner | None:
    try:
        return keep_winner(spec, study, made, model, folder)
    except (AdapterError, OSError) as error:
        view.say(f"the winner's adapter is not to be used: {error}")
        return None


def measured_fusion(
    spec: SweepSpec, made: dict[str, MadeTrial], model: SuperModel, budget: int
) -> Fusion:
    """Trials from all over the space, for some seconds."""
    every = list(made.values())
    step = max(1, len(every) // COMPARED_TRIALS)
    chosen = every[::step][:COMPARED_TRIALS]
    found = compare(
        model,
        [each.job for each in chosen],
        {each.job.name: each.data for each in chosen},
        budget_tokens=budget,
        share=COMPARED_SHARE,
        seconds=COMPARED_SECONDS,
    )
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return Fusion(together_rate=found.together_rate, alone_rate=found.alone_rate)
