"""A run of several ranks as a whole: what is checked and written before, and what is done when a
rank is lost.

`train_in_group` starts the ranks itself and goes on under a smaller plan when one is lost.
`train_as_rank` is one rank of a group that somebody else started, torchrun say; rank 0 then does
what concerns the whole run.
"""

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist

from tlora.config import dump_spec, load_plan
from tlora.core.errors import SpecError, TloraError
from tlora.core.job import JobSpec, RunSpec
from tlora.core.plan import Plan
from tlora.core.records import as_json
from tlora.data.prepare import PreparedData
from tlora.model.loading import load_shape, resolve_device
from tlora.model.targets import Target, find_targets
from tlora.parallel.counting import Counts
from tlora.parallel.exchange import exchange
from tlora.parallel.mesh import check_runs, join, shares_gpus
from tlora.parallel.sharding import check_kept_layers, follows_another, layers_to_shard
from tlora.runtime.budget import nano_batch_tokens
from tlora.runtime.checking import check_targets, context_length, prepare_jobs
from tlora.runtime.data_lines import full_lines, start_lines
from tlora.runtime.directory import JobResult, RunDirectory, replace_text
from tlora.runtime.elastic.checking import newcomers_data
from tlora.runtime.elastic.desk import CANCELLED, Desk
from tlora.runtime.elastic.roll import read_about, submitted_names, with_submitted
from tlora.runtime.environment import quieten_libraries
from tlora.runtime.executors.messages import Admit, Command, GiveUp, Message, Noted, Said
from tlora.runtime.executors.notes import event_of
from tlora.runtime.group.choosing import planner_for
from tlora.runtime.group.heartbeat import Heartbeat
from tlora.runtime.group.note_files import Notes
from tlora.runtime.group.plans import check_plan, plan_as_json
from tlora.runtime.group.supervisor import Ranks
from tlora.runtime.interrupts import interruptible
from tlora.runtime.live import choose_progress
from tlora.runtime.progress import USAGE, Progress, ProgressLines, RankUsage
from tlora.runtime.resuming import check_unchanged, finished, tried
from tlora.runtime.run_log import read_lines
from tlora.runtime.scheduled import Lead, device_names, proven
from tlora.runtime.sinks import check_trackers
from tlora.runtime.training import RunResult, describe_run, leave_report, proven_ranks
from tlora.schedule.plan_check import nothing_smaller, smaller
from tlora.schedule.planner import gpus_text

GROUP_FILE = "group.json"


def train_in_group(
    spec: RunSpec,
    *,
    output: Path | str,
    plan: Plan,
    fresh: bool = False,
    profile: str | None = None,
    progress: Progress | None = None,
    on_start: Callable[[Ranks], None] = lambda ranks: None,
) -> RunResult:
    """As `training.train`, with a process for each rank of the plan. When a rank is lost, the jobs
    go on from their checkpoints under a smaller plan that fits; what fits is told by the profile,
    as it is where plans are chosen."""
    progress = progress or choose_progress()
    whole = _Whole(spec, plan, Path(output), progress)
    # As many as there are ranks, unless they are to share them.
    names = device_names(whole.device, 1 if shares_gpus() else plan.gpus)
    threads = None if names[0].startswith("cuda") else 1
    stopped = False
    try:
        with using_threads(threads):
            whole.begin(fresh=fresh)
        with interruptible(on_first=progress.on_interrupt) as interrupt:
            while whole.begin_group() and not interrupt():
                current = whole.plan
                progress.say(f"{current.gpus} rank{'s' * (current.gpus > 1)}: {current}")
                ranks = Ranks(
                    current,
                    whole.directory.root.resolve(),
                    whole.unfinished(),
                    threads=threads,
                )
                try:
                    on_start(ranks)
                    loss = ranks.watch(whole.hear, interrupt, whole.commands)
                finally:
                    ranks.close()
                if loss is not None:
                    whole.follow(str(loss), profile)
                elif not whole.was_asked_for_more():
                    break
            stopped = interrupt.asked and bool(whole.unfinished())
    finally:
        whole.close()
    return whole.finish(interrupted=stopped)


def train_as_rank(
    spec: RunSpec, *, output: Path | str, plan: Plan, fresh: bool = False, attempt: int = 0
) -> RunResult:
    """One rank of a group that was started from outside; all of them see the same directory. When
    a rank hangs or raises, all of them end, and the cause is said and on record. `attempt` is what
    this rank's launcher says: above 0 it has started its ranks again, and nothing starts over."""
    join()
    check_runs(plan, dist.get_world_size())
    name, is_first = compare(plan, attempt)
    rank, world = dist.get_rank(), dist.get_world_size()
    progress = choose_progress() if rank == 0 else ProgressLines(io.StringIO())
    whole = _Whole(spec, plan, Path(output), progress, leads=rank == 0, again=not is_first)
    beats = Heartbeat(rank, world, name=name, lost=whole.lost)
    try:
        result = _train_as_rank(whole, rank, fresh=fresh and is_first)
        # Nobody leaves while others need it. Still watched: a rank may be lost right here.
        dist.barrier()
    except Exception as error:
        if not isinstance(error, TloraError) and not follows_another(error):
            whole.lost(f"rank {rank}: {type(error).__name__}: {error}".splitlines()[0])
        beats.close(broken=True)
        raise
    finally:
        beats.close()
    dist.destroy_process_group()
    return result


@contextmanager
def using_threads(count: int | None) -> Iterator[None]:
    """As many as ranks have, where that is known: which bits hold may depend on it."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Common(NamedTuple):
    """What all ranks see alike."""

    name: str
    """Of the group, and of no other."""

    is_first: bool
    """No launcher has started its ranks again: over several nodes some may have, and others not."""


def compare(plan: Plan, attempt: int) -> Common:
    """Each has come to its plan by itself. Raises SpecError if they are not the same."""
    own = {"plan": plan_as_json(plan), "attempt": attempt, "name": uuid4().hex}
    told = [json.loads(text) for text in exchange(json.dumps(own), counts=Counts())]
    for rank, each in enumerate(told):
        if each["plan"] != told[0]["plan"]:
            raise SpecError(
                f"rank 0 has '{load_plan(told[0]['plan'])}' and rank {rank} "
                f"'{load_plan(each['plan'])}': name the same file on all nodes",
                field="--plan",
            )
    return Common(told[0]["name"], not any(each["attempt"] for each in told))


def _train_as_rank(whole: "_Whole", rank: int, *, fresh: bool) -> RunResult:
    from tlora.runtime.group.rank import run_rank

    if rank == 0:
        whole.begin(fresh=fresh)
        whole.begin_group()
    dist.barrier()
    whole.look_again()
    jobs = whole.unfinished()
    with interruptible(on_first=whole.progress.on_interrupt) as interrupt:
        if jobs:
            tell = whole.hear_all if rank == 0 else whole.note
            run_rank(
                whole.directory.root.resolve(),
                whole.plan,
                jobs,
                lambda message: tell(rank, message),
                should_stop=interrupt,
                inbox=whole.commands,
            )
        whole.close_notes()
        dist.barrier()
        if rank == 0:
            whole.end_notes()
        whole.look_again()
        stopped = interrupt.asked and bool(whole.unfinished())
    return whole.finish(interrupted=stopped)


class _Whole:
    """What concerns the run and no rank alone."""

    def __init__(
        self,
        spec: RunSpec,
        plan: Plan,
        output: Path,
        progress: Progress,
        *,
        leads: bool = True,
        again: bool = False,
    ) -> None:
        """`again`: a launcher has started the ranks again, and jobs that failed were tried."""
        quieten_libraries()
        check_trackers(spec.report_to)
        for note in check_plan(plan, spec):
            progress.say(note)
        self.spec = spec
        self.plan = plan
        """Of the ranks that there are now; a smaller one when some were lost."""

        self.progress = progress
        self.leads = leads
        self.device = resolve_device(spec.engine.device)
        self.directory = RunDirectory(output)
        self._ranks: list[dict[str, Any]] = []
        self._losses: list[dict[str, object]] = []
        self._notes = Notes(output)
        self._over = tried if again else finished
        """What came of a job, if it is not to be trained any more."""

        self._lead: Lead | None = None
        self._desk: Desk | None = None
        self._targets: dict[str, Target] = {}
        self._commands: list[Command] = []
        self._admitted = 0
        """Jobs that had joined when the group began."""

        self._closed = False

    def begin(self, *, fresh: bool) -> None:
        spec, directory = self.spec, self.directory
        absent: tuple[JobSpec, ...] = ()
        submitted: list[str] = []
        if directory.is_run and not fresh:
            submitted = submitted_names(directory.root)
            spec = self.spec = with_submitted(spec, directory.root)
            absent = check_unchanged(directory, spec)
        shape = load_shape(spec.base)
        self._targets = find_targets(shape)
        check_targets(spec, self._targets)
        if self.plan.fsdp > 1:
            check_kept_layers(self.plan.kept_layers, len(layers_to_shard(shape)))
        data = prepare_jobs(spec, limit=context_length(shape.config))
        self.progress.say(*start_lines(spec.jobs, data, directory.root / "data.txt"))
        # As each rank does it: bits depend on it, so that it must not depend on the plan.
        budget = nano_batch_tokens(spec, self.device, data, shape.num_parameters())
        proof = proven(spec, self.device, data, budget, directory if not fresh else None)
        if proof is not None:
            self.progress.say(proof.line)
        directory.create(fresh=fresh)
        self._keep_left_notes()
        recorded = replace(spec, jobs=(*spec.jobs, *absent))
        replace_text(directory.root / "resolved.yaml", dump_spec(recorded))
        self._forget_failures()
        replace_text(directory.root / "data.txt", "\n".join(full_lines(data)) + "\n")
        self._write_about(describe_run(spec, self.device, proof, submitted=submitted))
        self._lead = Lead(spec, data, directory, self.progress, over=self._over)
        self._lead.begin(self.plan.bucket)
        self._desk = Desk(
            directory.root,
            recorded,
            self._lead.unfinished,
            prepare=newcomers_data(spec, shape, self.device),
            say=self.progress.say,
            proven_ranks=proven_ranks(spec),
        )
        self._lead.on_result = self._desk.ended

    def begin_group(self) -> bool:
        """Ranks are about to start: whether there is anything for them to do. Whoever joins before
        they have is one of their jobs from the start."""
        assert self._desk is not None
        self._desk.begin_again()
        self._desk.serve(self, now=True)
        asked, self._commands = self._commands, []
        self._commands = [
            each for each in asked if isinstance(each, GiveUp) and not self._has_left(each.job)
        ]
        self._admitted = self._desk.admitted
        return bool(self.unfinished())

    def _has_left(self, job: str) -> bool:
        """One that is to leave and that no rank has: from its newest checkpoint, where that can be
        exported; else the ranks take it in and let it go."""
        assert self._lead is not None
        if job in self._lead.unfinished:
            with suppress(TloraError, OSError):
                self._lead.cancelled(job, self._targets)
        return job not in self._lead.unfinished

    def look_again(self) -> None:
        """Of a rank that does not lead: jobs may have joined, which the one that leads knows of."""
        if not self.leads:
            self.spec = with_submitted(self.spec, self.directory.root)

    def was_asked_for_more(self) -> bool:
        """Of ranks that have come to their end: perhaps just before they could hear of it."""
        assert self._desk is not None
        self._desk.serve(self, now=True)
        return self._desk.admitted > self._admitted

    def commands(self) -> list[Command]:
        """What people have asked of the run since the last time, as ranks are told of it."""
        if self._desk is not None:
            self._desk.serve(self)
        commands, self._commands = self._commands, []
        return commands

    def admit(self, job: JobSpec, data: PreparedData) -> None:
        assert self._lead is not None
        self._lead.join(job, data)
        self.spec = self._lead.spec
        self._commands.append(Admit(job.name))

    def dismiss(self, job: str) -> None:
        self._commands.append(GiveUp(job, CANCELLED, "cancelled"))

    def _keep_left_notes(self) -> None:
        """Events of ranks that ended before they were gathered."""
        for rank, message in self._notes.read():
            if isinstance(message, Noted) and message.what != USAGE:
                record = event_of(rank, message.what, message.time, message.fields)
                self.directory.append(self.directory.root / "events.jsonl", record)
        self._notes.remove()

    def _forget_failures(self) -> None:
        """Of earlier runs: what failed is tried again, and has not been in this one."""
        for job in self.spec.jobs:
            if self._over(self.directory, job) is None:
                (self.directory.root / job.name / "result.json").unlink(missing_ok=True)

    def _write_about(self, about: dict[str, object]) -> None:
        plan = {"plan": plan_as_json(self.plan), "devices": self.plan.gpus}
        self.directory.write_json(self.directory.root / "run.json", about | plan)

    def unfinished(self) -> list[str]:
        """Jobs that are not over; failed ones were tried, in this run."""
        results = self._lead.results if self._lead is not None else {}
        return [
            job.name
            for job in self.spec.jobs
            if job.name not in results and self._over(self.directory, job) is None
        ]

    def hear(self, rank: int, message: Message) -> None:
        assert self._lead is not None
        if isinstance(message, Noted) and message.what == USAGE:
            self.progress.on_rank(RankUsage(**message.fields))
            return
        if isinstance(message, Noted) and message.what == "communication":
            self._ranks.append(message.fields)
        self._lead.hear(rank, message)

    def hear_all(self, rank: int, message: Message) -> None:
        """Of the rank that leads, started from outside; now and then also what the others noted."""
        if isinstance(message, Noted) and message.what == USAGE:
            self.gather_notes()
        self.hear(rank, message)

    def note(self, rank: int, message: Message) -> None:
        """Of a rank that does not lead, started from outside: for rank 0 to gather."""
        try:
            self.directory.append(self._notes.path(rank), as_json(message))
        except OSError:
            # As with all events, no job depends on it; but that a job could not be saved, on a disk
            # as full, must be heard.
            if isinstance(message, Said):
                print(*message.lines, sep="\n", file=sys.stderr, flush=True)

    def close_notes(self) -> None:
        if not self.leads:
            self.directory.close()

    def gather_notes(self) -> None:
        for rank, message in self._notes.read():
            self.hear(rank, message)

    def end_notes(self) -> None:
        self.gather_notes()
        self._notes.remove()
        self._sort_events()

    def _sort_events(self) -> None:
        """Those of other ranks were gathered at the end."""
        path = self.directory.root / "events.jsonl"
        self.directory.close()
        records = sorted(read_lines(path), key=lambda record: record["time"])
        # As with all events, no job depends on it.
        with suppress(OSError):
            replace_text(path, "".join(f"{json.dumps(record)}\n" for record in records))

    def lost(self, cause: str) -> None:
        """Said, and on record; by any rank, since the one that leads may be the one."""
        print(f"{cause}; the group ends, the same command goes on", file=sys.stderr, flush=True)
        RunDirectory(self.directory.root).event("group_lost", cause=cause, ranks=self.plan.gpus)

    def follow(self, cause: str, profile: str | None) -> None:
        """Go on under a smaller plan. Raises TloraError if there is none."""
        plan = self.plan
        self._losses.append({"cause": cause, "plan": plan_as_json(plan)})
        self.directory.event("group_lost", cause=cause, ranks=plan.gpus)
        planner = planner_for(self.spec, plan.gpus, output=self.directory.root, profile=profile)
        if planner is None:
            # It was lost after its jobs had ended.
            return
        following = smaller(plan, planner)
        if following is None:
            why = nothing_smaller(plan, planner)
            raise TloraError(
                f"{cause}; {why}. The jobs are saved: the same command goes on from their last "
                f"checkpoints, with {plan.gpus} devices again or a plan that fits"
            )
        self.progress.say(
            f"{cause}; the jobs go on from their checkpoints with {gpus_text(following.gpus)}"
        )
        self.plan = following
        # Ranks of the lost group that had come to their end.
        self._ranks.clear()
        # With the jobs that have joined since it began.
        self._write_about(read_about(self.directory.root))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self.leads and self.directory.is_run:
            fields = {
                "v": 1,
                "plan": plan_as_json(self.plan),
                "ranks": sorted(self._ranks, key=lambda each: each["rank"]),
                "lost": self._losses,
            }
            self.directory.write_json(self.directory.root / GROUP_FILE, fields)
        if self._desk is not None:
            self._desk.close()
        self.progress.close()
        self.directory.close()

    def finish(self, *, interrupted: bool) -> RunResult:
        results: dict[str, JobResult] = dict(self._lead.results) if self._lead is not None else {}
        for job in self.spec.jobs:
            found = tried(self.directory, job)
            if found is not None:
                results.setdefault(job.name, found)
        if self.leads:
            self.close()
            leave_report(self.directory.root, self.progress)
            self.progress.finish(list(results.values()), self.directory.root)
        return RunResult(self.directory.root, results, interrupted=interrupted)
