"""`tlora tune`: a sweep file to the best adapter on disk, in this process."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tlora.config import dump_spec
from tlora.config.reading import plain
from tlora.core.errors import AdapterError, SpecError
from tlora.core.job import JobSpec
from tlora.core.sweep import Params, SweepSpec
from tlora.model.loading import load_shape, resolve_device
from tlora.model.super_model import SuperModel
from tlora.runtime.budget import nano_batch_tokens, room_for_tokens, tuning
from tlora.runtime.comparing import compare
from tlora.runtime.data_lines import full_lines, start_lines
from tlora.runtime.directory import RunDirectory, replace_text
from tlora.runtime.environment import quieten_libraries
from tlora.runtime.interrupts import interruptible
from tlora.runtime.recording import Recorder
from tlora.runtime.resuming import check_same_bits, engine_changes
from tlora.runtime.sinks import Sinks, check_trackers
from tlora.runtime.sweeps.course import Course
from tlora.runtime.sweeps.report import write_sweep_report
from tlora.runtime.sweeps.room import room_bytes
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
from tlora.runtime.training import describe_run, load_super_model, show_exact
from tlora.store.study import StudyLog, StudyTurn
from tlora.training.controller import Controller
from tlora.training.engine import Engine
from tlora.tuning.events import Added, Closed
from tlora.tuning.results import Fusion, Study, Winner, tokens_full, trial_result
from tlora.tuning.samplers import OptunaSampler, check_sampler, is_known_before
from tlora.tuning.study import Phase, StudyState, replayed

MAY_CHANGE = (
    "engine",
    "report_to",
    "search.max_seconds",
)
"""Of a sweep that has begun: what changes how long it runs, not what its trials are."""

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
    check_sampler(spec.search.sampler)
    view = view or choose_view()
    device = resolve_device(spec.engine.device)
    directory = RunDirectory(Path(output))
    turns: list[StudyTurn] = []
    if directory.is_run and not fresh:
        turns = known_turns(directory.root, spec)
    shape = load_shape(spec.base)
    maker = TrialMaker(spec, shape)
    made = make_trials(spec, maker, turns)
    sized = made or maker.make(representatives(spec))
    jobs = {name: each.job for name, each in sized.items()}
    data = {name: each.data for name, each in sized.items()}
    run = spec.run(tuple(jobs.values()))
    budget = nano_batch_tokens(run, device, data, shape.num_parameters())
    room = room_bytes(
        shape, device, budget_tokens=budget, recompute=spec.engine.gradient_checkpointing
    )
    state = StudyState.of(spec, room)
    # Trials share their data.
    shared = {spec.task.name: next(iter(data.values()))}
    view.say(*start_lines((spec.task,), shared, directory.root / "data.txt"))
    model = load_super_model(replace(run, jobs=at_once(sized, room, spec)), device)
    proof, ranks = None, {job.lora.r for job in run.jobs} | ranks_to_come(spec)
    if spec.engine.isolation == "exact":
        proof = show_exact(model, run, data, budget, ranks=ranks)
        if directory.is_run and not fresh:
            check_same_bits(directory.root, describe_run(run, device, proof))
        view.say(proof.line)
    tuned = tuning(run, device, budget=budget, fits=room_for_tokens(run, model))
    engine = Engine(
        model,
        budget_tokens=tuned.start if tuned else budget,
        exact=spec.engine.isolation == "exact",
        controller=Controller(tuned) if tuned else None,
    )
    directory = SweepDirectory(directory.root)
    directory.create(fresh=fresh)
    log = StudyLog(directory.root / "state.sqlite")
    sinks = Sinks(spec.report_to, directory.root, view.say)
    # Trials are written at every evaluation that is their best: only the winner's logits count.
    recorder = Recorder(directory, spec.base, engine, view, sinks, looks=False)
    try:
        replace_text(directory.root / "data.txt", "\n".join(full_lines(shared)) + "\n")
        directory.event("began")
        replay(state, turns, spec)
        runner = SweepRunner(
            spec, state, log, maker, made, recorder, view, lambda runner: keep(runner, directory)
        )
        runner.proven_ranks = frozenset(ranks) if proof else None
        log.begin({"spec": as_tree(spec)})
        # From here on the directory holds a sweep that can go on.
        directory.write_json(directory.root / "run.json", describe_run(run, device, proof))
        view.ended = runner.on_result
        keep(runner, directory)
        begin(runner, turns, runner.take_up)
        view.begin(state)
        with interruptible(on_first=view.on_interrupt) as interrupt:
            interrupted = runner.run(interrupt)
    finally:
        # Ends that are told while closing are in the log, too.
        recorder.close()
        log.close()
    study = study_of(state, spec, directory.root, runner.seconds, interrupted=interrupted)
    if not interrupted:
        study = replace(study, winner=kept_winner(spec, study, made, model, view))
        directory.write_json(directory.root / "study.json", study.as_json())
        if measure_fusion:
            study = replace(study, fusion=measured_fusion(spec, made, model, engine.budget_tokens))
    directory.write_json(directory.root / "study.json", study.as_json())
    try:
        write_sweep_report(directory.root)
    except OSError as error:
        view.say(f"the report could not be written: {error}")
    view.summary(study)
    return study


class SweepDirectory(RunDirectory):
    """Trials come at any time: one that does is not the beginning of a session."""

    def event(self, kind: str, **fields: object) -> None:
        super().event("joined" if kind == "attached" else kind, **fields)


def known_turns(root: Path, spec: SweepSpec) -> list[StudyTurn]:
    """What an earlier command of the same sweep has logged. Raises SpecError if it was another
    one."""
    path = root / "state.sqlite"
    if not path.exists():
        raise SpecError(
            f"--output: {root} holds a run that is no sweep; name another directory, or add --fresh"
        )
    log = StudyLog(path)
    try:
        about = log.about()
        if about is None:
            raise SpecError(
                f"--output: {root} holds a run that is no sweep; name another directory, or add "
                "--fresh"
            )
        check_unchanged(about["spec"], spec, root)
        return log.turns()
    finally:
        log.close()


def check_unchanged(old: dict[str, Any], spec: SweepSpec, root: Path) -> None:
    new = as_tree(spec)
    changed = [name for name in differing(old, new) if not name.startswith(MAY_CHANGE)]
    from_engine = type(spec.engine)(**old["engine"])
    changed += engine_changes(from_engine, spec.engine)
    if changed:
        raise SpecError(
            f"has changed since {root} was started; change it back, name another --output, or add "
            "--fresh to start over",
            field=changed[0],
        )


def differing(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Dotted names of what is not the same in two trees."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            name
            for key in {**old, **new}
            for name in differing(old.get(key), new.get(key), f"{prefix}{key}.")
        ]
    return [] if old == new else [prefix.removesuffix(".")]


def as_tree(spec: SweepSpec) -> dict[str, Any]:
    return json.loads(json.dumps(plain(asdict(spec))))


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


def at_once(made: dict[str, MadeTrial], room: float | None, spec: SweepSpec) -> tuple[JobSpec, ...]:
    """The trials that the pool is made for: as many of the largest as may be attached together."""
    largest = sorted(made.values(), key=lambda each: -each.plan.adapter_bytes)
    most, taken, used = spec.search.max_parallel, list[JobSpec](), 0.0
    for each in largest:
        used += each.plan.adapter_bytes
        if taken and ((room is not None and used > room) or len(taken) == most):
            break
        taken.append(each.job)
    return tuple(taken)


def replay(state: StudyState, turns: list[StudyTurn], spec: SweepSpec) -> None:
    """Bring the study to where its log ends. What was decided then must be what is decided now."""
    again = replayed(state, [turn.event for turn in turns])
    for turn, actions in zip(turns, again, strict=True):
        # How many fit depends on the device, and may have changed; who was given up may not.
        if _exits(actions) != _exits(turn.actions):
            raise SpecError(
                "the log of this sweep does not lead to the decisions it holds; it was written by "
                "another version: use that one, or add --fresh to start over"
            )


def _exits(actions: list[Any]) -> set[tuple[str, str]]:
    return {(each.trial, each.verdict.rule) for each in actions if each.kind == "exit"}


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
        runner.view.say(f"{of}goes on: {over} of {len(state.trials)} trials are over")
        take_up()
    elif is_known_before(spec.search):
        rule = spec.early_exit.method
        runner.view.say(f"{of}{len(runner.made)} trials, early exit: {rule}")
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
