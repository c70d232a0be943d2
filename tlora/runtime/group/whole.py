"""What concerns a run of several ranks and no rank alone: what is checked and written before, what
is heard meanwhile, what is done when a rank is lost, and what is left in the end."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tlora.core.errors import TloraError
from tlora.core.job import RunSpec
from tlora.core.plan import Plan
from tlora.core.records import as_json
from tlora.core.wording import number_of
from tlora.model.loading import context_length, load_shape, resolve_device
from tlora.model.targets import find_targets
from tlora.parallel.sharding import check_kept_layers, layers_to_shard
from tlora.runtime.budget import nano_batch_tokens
from tlora.runtime.checking import check_targets, prepare_jobs
from tlora.runtime.data_lines import start_lines
from tlora.runtime.directory import JobResult, RunDirectory
from tlora.runtime.elastic.places import check_unlimited
from tlora.runtime.elastic.roll import Again, read_about, with_submitted
from tlora.runtime.environment import quieten_libraries
from tlora.runtime.executors.messages import Command, Message, Noted, Said
from tlora.runtime.group.choosing import planner_for
from tlora.runtime.group.floor import GroupFloor
from tlora.runtime.group.note_files import Notes, sort_events
from tlora.runtime.group.plans import check_plan, plan_as_json
from tlora.runtime.opening import open_run
from tlora.runtime.progress import USAGE, Progress, RankUsage
from tlora.runtime.resuming import finished, tried
from tlora.runtime.scheduled import Lead, proven
from tlora.runtime.sinks import check_trackers
from tlora.runtime.training import RunResult, compiling_lines, describe_run, leave_report
from tlora.schedule.plan_check import nothing_smaller, smaller

GROUP_FILE = "group.json"


class Whole:
    def __init__(
        self,
        spec: RunSpec,
        plan: Plan,
        output: Path,
        progress: Progress,
        *,
        leads: bool = True,
        tries_again: bool = True,
    ) -> None:
        """`tries_again`: jobs that failed before; not where a launcher has started the ranks again,
        which has tried them."""
        quieten_libraries()
        check_trackers(spec.report_to)
        check_unlimited(spec.engine, "a group of ranks trains all of its jobs")
        for note in check_plan(plan, spec):
            progress.say(note)
        self._spec = spec
        self.plan = plan
        """Of the ranks that there are now; a smaller one when some were lost."""

        self.progress = progress
        self.leads = leads
        self.device = resolve_device(spec.engine.device)
        self.directory = RunDirectory(output)
        self._ranks: list[dict[str, Any]] = []
        self._losses: list[dict[str, object]] = []
        self._notes = Notes(output)
        self._over = finished if tries_again else tried
        """What came of a job, if it is not to be trained any more."""

        self._lead: Lead | None = None
        self._floor: GroupFloor | None = None
        self._ended = False

    @property
    def spec(self) -> RunSpec:
        """With the jobs that have joined."""
        return self._spec if self._lead is None else self._lead.spec

    @property
    def floor(self) -> GroupFloor:
        assert self._floor is not None, "it has not begun, or does not lead"
        return self._floor

    def begin(self, *, fresh: bool, again: Again) -> None:
        """Raises, with the directory as it was, what is wrong with the run."""
        opening = open_run(self.spec, self.directory, fresh=fresh, again=again)
        spec, directory = opening.spec, self.directory
        shape = load_shape(spec.base)
        targets = find_targets(shape)
        check_targets(spec, targets)
        if self.plan.fsdp > 1:
            check_kept_layers(self.plan.kept_layers, len(layers_to_shard(shape)))
        data = prepare_jobs(spec, limit=context_length(shape.config))
        self.progress.say(*start_lines(spec.jobs, data, directory.root / "data.txt"))
        self.progress.say(*compiling_lines(spec.engine, self.device))
        # As each rank does it: bits depend on it, so that it must not depend on the plan.
        budget = nano_batch_tokens(spec, self.device, data, shape.num_parameters())
        proof = proven(spec, self.device, data, budget, directory if opening.goes_on else None)
        if proof is not None:
            self.progress.say(proof.line)
        opening.create()
        self._notes.keep_left(directory)
        self._forget_failures(spec)
        opening.write(data, self._with_plan(describe_run(spec, self.device, proof)))
        self._lead = Lead(spec, data, directory, self.progress, over=self._over)
        self._lead.begin(self.plan.bucket)
        desk = opening.desk(self._lead.unfinished, shape, self.device, self.progress, in_turns=True)
        self._floor = GroupFloor(self._lead, desk, targets)

    def begin_group(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Ranks are about to start: whether there is anything for them to do."""
        # Of ranks that have come to their end before.
        self._ranks.clear()
        self.floor.begin(should_stop)
        return bool(self.unfinished())

    def look_again(self) -> None:
        """Of a rank that does not lead: jobs may have joined, which the one that leads knows of."""
        if not self.leads:
            self._spec = with_submitted(self._spec, self.directory.root)

    def commands(self) -> list[Command]:
        return self._floor.commands() if self._floor is not None else []

    def _forget_failures(self, spec: RunSpec) -> None:
        """Of earlier runs: what failed is tried again, and has not been in this one."""
        for job in spec.jobs:
            if self._over(self.directory, job) is None:
                (self.directory.root / job.name / "result.json").unlink(missing_ok=True)

    def _with_plan(self, about: dict[str, object]) -> dict[str, object]:
        return about | {"plan": plan_as_json(self.plan), "devices": self.plan.gpus}

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
            self._gather_notes()
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

    def end_notes(self) -> None:
        self._gather_notes()
        self._notes.remove()
        sort_events(self.directory)

    def _gather_notes(self) -> None:
        for rank, message in self._notes.read():
            self.hear(rank, message)

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
        left = number_of(following.gpus, "GPU")
        self.progress.say(f"{cause}; the jobs go on from their checkpoints with {left}")
        self.plan = following
        # With the jobs that have joined since it began.
        root = self.directory.root
        self.directory.write_json(root / "run.json", self._with_plan(read_about(root)))

    def close(self) -> None:
        self._end()
        self.directory.close()

    def _end(self) -> None:
        """Nothing more happens; the directory stays taken."""
        if self._ended:
            return
        self._ended = True
        if self._lead is not None:
            fields = {
                "v": 1,
                "plan": plan_as_json(self.plan),
                "ranks": sorted(self._ranks, key=lambda each: each["rank"]),
                "lost": self._losses,
            }
            self.directory.write_json(self.directory.root / GROUP_FILE, fields)
        if self._floor is not None:
            self._floor.close()
        self.progress.close()
        self.directory.close_files()

    def finish(self, *, interrupted: bool) -> RunResult:
        results: dict[str, JobResult] = dict(self._lead.results) if self._lead is not None else {}
        for job in self.spec.jobs:
            found = tried(self.directory, job)
            if found is not None:
                results.setdefault(job.name, found)
        if self.leads:
            self._end()
            leave_report(self.directory.root, self.progress)
            self.progress.finish(list(results.values()), self.directory.root)
            self.close()
        return RunResult(self.directory.root, results, interrupted=interrupted)
