"""The life of one rank: its share of the backbone, its jobs, in step with the others.

What a job leaves on disk is written by the rank that has it, by the recorder of an ordinary run, so
that it can be resumed under any plan. A job that spans ranks is written by rank 0.
"""

import json
import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

from tlora.config import load_spec
from tlora.core.dealing import Load, deal_jobs, least_loaded, load_of
from tlora.core.errors import JobFailed, TloraError
from tlora.core.job import RunSpec
from tlora.core.plan import Plan
from tlora.data.prepare import PreparedData, Preparer
from tlora.model.adapters import AdapterWeights
from tlora.model.loading import load_shape, load_tokenizer
from tlora.model.memory import is_out_of_memory
from tlora.model.super_model import SuperModel
from tlora.parallel.counting import Counts, Purpose
from tlora.parallel.dealing import moves_to_balance
from tlora.parallel.exchange import exchange
from tlora.parallel.mesh import check_runs, join, shard_mesh
from tlora.parallel.shard_loading import load_sharded
from tlora.parallel.sharding import Sharded
from tlora.runtime.arriving import Arrival
from tlora.runtime.budget import nano_batch_tokens, room_for_tokens, tuning
from tlora.runtime.entering import adapter_start, enter_job, leave_job, restore
from tlora.runtime.environment import cache_directory, quieten_libraries
from tlora.runtime.executors.messages import (
    Admit,
    Attached,
    Command,
    Ended,
    GiveUp,
    Ready,
    Said,
    commands_of,
    encoded,
)
from tlora.runtime.executors.worker import Tell, ToldProgress, no_result
from tlora.runtime.group.coming import Account, Coming, Newcomers, common_problem
from tlora.runtime.group.figures import Figures
from tlora.runtime.group.plans import spans
from tlora.runtime.group.records import GroupDirectory, OwnJobs
from tlora.runtime.group.timing import TimedEngine
from tlora.runtime.recording import Recorder
from tlora.runtime.requests import request_of
from tlora.runtime.resuming import Resumption, check_same_bits, resumption, saved_steps
from tlora.runtime.sinks import Sinks
from tlora.runtime.training import compiles, describe_run, load_super_model, show_exact
from tlora.training.controller import Controller
from tlora.training.driver import JobDriver, Status
from tlora.training.group_loop import GroupLoop, run_group
from tlora.training.size_search import ControllerSettings

LOOK_S = 0.2
"""Between two looks of a rank at what has reached the disk, and of rank 0 for what the group is
asked."""

BEARABLE = (TloraError, OSError, ValueError, RuntimeError, MemoryError)
"""What one job may fail of on its way in, alone: no room for it, say."""

REST_S = 0.02
"""Where all wait for a job on its way, between two agreements."""


_Told = tuple[str, float, int]
"""A load, as ranks tell each other of it."""


def run_rank(
    directory: Path,
    plan: Plan,
    jobs: list[str],
    tell: Tell,
    *,
    should_stop: Callable[[], bool],
    inbox: Callable[[], list[Command]] = list,
) -> bool:
    """Train these jobs of the run in `directory` with the other ranks: whether some are left.
    `inbox`: what the group is asked meanwhile, jobs to admit and to give up, by rank 0 alone."""
    quieten_libraries()
    started = time.perf_counter()
    spec = load_spec(directory / "resolved.yaml")
    device = join(spec.engine.device)
    check_runs(plan, dist.get_world_size())
    member = Member(spec, plan, jobs, directory, device, tell, inbox)
    tell(Ready(time.perf_counter() - started))
    try:
        return member.run(should_stop)
    finally:
        member.close()


def load_backbone(
    spec: RunSpec, plan: Plan, device: torch.device, counts: Counts
) -> tuple[SuperModel, Sharded | None]:
    if plan.fsdp == 1:
        return load_super_model(spec, device), None
    mesh = shard_mesh(plan, device)
    model, sharded = load_sharded(
        spec.base, device, mesh, counts=counts, kept_layers=plan.kept_layers
    )
    with sharded.building():
        super_model = SuperModel(
            model,
            reserve_rows=sum(job.lora.r for job in spec.jobs),
            gradient_checkpointing=spec.engine.gradient_checkpointing,
            compiled=compiles(spec.engine, device),
        )
        sharded.serve(super_model)
    return super_model, sharded


class Member:
    """A rank with its engine and its jobs."""

    def __init__(
        self,
        spec: RunSpec,
        plan: Plan,
        jobs: list[str],
        directory: Path,
        device: torch.device,
        tell: Tell,
        inbox: Callable[[], list[Command]],
    ) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.plan = plan
        self.tell = tell
        self.specs = {job.name: job for job in spec.jobs if job.name in jobs}
        self.counts = Counts()
        self.model, sharded = load_backbone(spec, plan, device, self.counts)
        self._preparer = Preparer(load_tokenizer(spec.base), cache_dir=cache_directory())
        self.data: dict[str, PreparedData] = {
            name: self._preparer.prepare(job) for name, job in self.specs.items()
        }
        exact = spec.engine.isolation == "exact"
        budget = plan.bucket
        if exact:
            # Bits depend on it: it must not depend on the plan.
            parameters = load_shape(spec.base).num_parameters()
            budget = nano_batch_tokens(spec, device, self.data, parameters)
            proof = show_exact(self.model, spec, self.data, budget)
            # Of several nodes each may have another kind of device.
            check_same_bits(directory, describe_run(spec, device, proof))
        self.tuned = self._tuning(spec, device)
        self.engine = TimedEngine(
            self.model,
            budget_tokens=self.tuned.start if self.tuned else budget,
            counts=self.counts,
            sharded=sharded,
            spans=lambda job: spans(plan, job),
            exact=exact,
            controller=Controller(self.tuned) if self.tuned and self.rank == 0 else None,
            # A job that spans ranks must be told of its steps at the same turn on all.
            ahead=None if plan.adapters == "rank_local" else 0,
        )
        self.directory = GroupDirectory(directory, tell, plan)
        self.recorder = Recorder(
            self.directory,
            spec.base,
            self.engine,
            ToldProgress(tell),
            Sinks(spec.report_to, directory, lambda line: tell(Said((line,)))),
            # A look at the logits is a pass through the backbone, which one rank cannot make.
            looks=sharded is None,
        )
        self.recorder.data_keys = {name: each.key for name, each in self.data.items()}
        self._observer = OwnJobs(self.recorder, self._records)
        self._local = 0
        """Jobs that were on this rank alone when it was last looked."""

        self._entering_s = math.inf
        """The least that taking a job in took."""

        self._entered: dict[str, JobDriver] = {}
        """All that were taken in, later ones too; some have ended or moved on."""

        self._newcomers = Newcomers(directory, self._preparer)
        self._put_off = False
        """Jobs were to be moved, which waits until nobody is on its way."""

        self._inbox = inbox
        self._looked = time.perf_counter()
        self._asked: list[Command] = []
        """Of rank 0: to be carried out by all ranks at the next agreement."""

        self._figures = Figures(self.engine, plan, tell)

    def run(self, should_stop: Callable[[], bool]) -> bool:
        drivers = self._enter_all()
        if self.tuned is not None and self.rank == 0:
            self.recorder.start([], self.tuned)
        self._figures.begin()
        try:
            left = run_group(
                self.engine,
                drivers,
                self._observer,
                should_stop=should_stop,
                between=self._between,
            )
        except Exception:
            self.recorder.rescue(list(self._entered.values()))
            raise
        self.recorder.save([each for each in left if self._records(each.name)])
        self._figures.tell_all()
        return bool(left)

    def close(self) -> None:
        self.recorder.close()

    def _tuning(self, spec: RunSpec, device: torch.device) -> ControllerSettings | None:
        """The plan has a size, which holds unless it is asked to be tuned: then from there, as far
        as the rank with the least room goes."""
        if spec.engine.nano_batch_tokens != "tuned":
            return None
        room = exchange(str(room_for_tokens(spec, self.model)), counts=self.counts)
        return tuning(spec, device, budget=self.plan.bucket, fits=min(map(int, room)))

    def _records(self, name: str) -> bool:
        """Whether this rank writes the job's files."""
        return self.rank == 0 or not spans(self.plan, name)

    def _enter_all(self) -> list[JobDriver]:
        """All ranks come to the same places, from what is on disk."""
        found = {name: resumption(self.directory, job) for name, job in self.specs.items()}
        over = [name for name, each in found.items() if each.result is not None]
        loads = [self._load(name, _step_of(found[name])) for name in self.specs if name not in over]
        places = deal_jobs([load for load in loads if not spans(self.plan, load.job)], self.world)
        # Nobody writes before all have read.
        exchange("", counts=self.counts)
        drivers = []
        for load in loads:
            if spans(self.plan, load.job) or places[load.job] == self.rank:
                driver = self._enter(load.job, found[load.job])
                drivers += [driver] if driver is not None else []
        self._local = self._num_local(drivers)
        return drivers

    def _enter(
        self,
        name: str,
        found: Resumption,
        start: AdapterWeights | None = None,
        *,
        arriving_s: float = 0.0,
    ) -> JobDriver | None:
        """`start`: of a job that begins, if it is there."""
        since = time.perf_counter()
        driver = self._driver(name)
        try:
            if start is None:
                is_new = found.checkpoint is None
                start = adapter_start(self.specs[name], self.model) if is_new else {}
            if not self._records(name):
                self._attach_unrecorded(driver, found, start)
                return driver
            began = time.perf_counter()
            enter_job(driver, found, start, self.recorder)
        except BEARABLE as error:
            if spans(self.plan, name) and not isinstance(error, TloraError):
                # It must come to the same on all ranks, and the others may not meet this.
                raise
            if name in self.engine.jobs:
                self.engine.detach(name)
            what = "out of memory: " if is_out_of_memory(error) else ""
            message = error.message if isinstance(error, JobFailed) else f"{what}{error}"
            self._fail(driver, message)
            return None
        self._entered[name] = driver
        self.recorder.start([driver], since=since)
        seconds = time.perf_counter() - began
        self._entering_s = min(seconds, self._entering_s)
        self.tell(Attached(name, driver.step, seconds, arriving_s))
        return driver

    def _fail(self, driver: JobDriver, reason: str) -> None:
        driver.on_failure(JobFailed(reason, job=driver.name))
        if self._records(driver.name):
            self.recorder.on_end(driver)

    def _attach_unrecorded(
        self, driver: JobDriver, found: Resumption, start: AdapterWeights
    ) -> None:
        """As `enter_job`, by the same checks: all ranks must come to the same."""
        if found.checkpoint is None:
            driver.attach(self.engine, start)
            return
        restore(driver, found.checkpoint, data_key=self.data[driver.name].key)
        state = found.checkpoint.state
        driver.attach(self.engine, state.weights, state=state)

    def _between(self, loop: GroupLoop) -> bool:
        self._figures.tell_usage(list(loop.active))
        verdict = self.engine.verdict
        if verdict is not None:
            for coming in self._newcomers.here(verdict.away):
                self._go_on_with(loop, coming)
            if verdict.drift:
                self._meet(loop)
            if self._newcomers and not loop.active and verdict.kind is None:
                self._newcomers.wait(REST_S)
        self._look()
        local = self._num_local(list(loop.active.values()))
        # One that has ended leaves this rank with less to do than the others.
        uneven = (local < self._local or self._put_off) and self.world > 1
        self._put_off = uneven and bool(self._asked or self._newcomers)
        self.engine.drift = bool(self._asked) or (uneven and not self._put_off)
        self._local = local
        self.engine.away = self._newcomers.away
        return bool(self._asked) or len(self._newcomers) > 0

    def _look(self) -> None:
        now = time.perf_counter()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        # A rank that has run dry has no nano-batch to tell of its last job's end with.
        self.recorder.settle()
        if self.rank == 0:
            self._asked += self._inbox()

    def _num_local(self, drivers: list[JobDriver]) -> int:
        return sum(not spans(self.plan, driver.name) for driver in drivers)

    def _meet(self, loop: GroupLoop) -> None:
        """All ranks, at the same turn: jobs come and go as rank 0 was asked, or else they go from
        ranks with much left to ranks with little."""
        for outcome in self.engine.drain():
            loop.tell(outcome)
        asked, self._asked = self._asked, []
        text = [self._move_cost(), self._loads(loop), encoded(asked).decode()]
        told = exchange(json.dumps(text), counts=self.counts, purpose=Purpose.MOVING)
        costs, held, asked_there = zip(*map(json.loads, told), strict=True)
        commands = [each for text in asked_there for each in commands_of(text.encode())]
        for command in commands:
            match command:
                case Admit(job=name):
                    self._newcomers.begin(name)
                case GiveUp():
                    self._give_up(loop, command)
                case _:
                    raise AssertionError(f"{command} is for workers")
        if commands or self._newcomers:
            self._put_off = True
        else:
            self._balance(loop, *_by_rank(held), move_cost=max(costs))

    def _loads(self, loop: GroupLoop) -> list[_Told]:
        """Of the jobs that are on this rank alone."""
        steps = {driver.name: driver.step for driver in loop.active.values()}
        return self._told_loads(steps)

    def _loads_coming(self) -> list[_Told]:
        """Of those that it is about to take in."""
        names = [each.name for each in self._newcomers if each.arrival is not None]
        return self._told_loads({name: self._saved_steps(name) for name in names})

    def _saved_steps(self, name: str) -> int:
        """As far as this node sees them: where its load counts a little too much, nothing is
        lost."""
        try:
            return saved_steps(self.directory, name)
        except (OSError, ValueError):
            return 0

    def _told_loads(self, steps: dict[str, int]) -> list[_Told]:
        loads = [self._load(*each) for each in steps.items() if not spans(self.plan, each[0])]
        return [(load.job, load.tokens, load.rank) for load in loads]

    def _go_on_with(self, loop: GroupLoop, coming: Coming) -> None:
        """On all ranks, none of which waits for it any more."""
        if coming.has_place:
            self._newcomers.remove(coming.name)
            self._attach_newcomer(loop, coming)
        else:
            self._find_place(loop, coming)

    def _find_place(self, loop: GroupLoop, coming: Coming) -> None:
        """A job that spans ranks comes to each, another one to whoever has the least to do; one
        that was cancelled on its way to rank 0, which keeps what there is of it."""
        name = coming.name
        loads = self._loads(loop) + self._loads_coming()
        text = json.dumps([coming.account(self.rank), loads])
        texts = exchange(text, counts=self.counts, purpose=Purpose.MOVING)
        told = [json.loads(each) for each in texts]
        problem = common_problem([Account(*account) for account, _ in told])
        if problem:
            self._newcomers.remove(name)
            if self.rank == 0:
                self._refuse(coming, problem)
            return
        self.specs[name], self.data[name] = coming.opening.result()
        self.recorder.data_keys[name] = self.data[name].key
        wanted = coming.verdict is None
        place = least_loaded(*_by_rank([loads for _, loads in told]), self.world) if wanted else 0
        if place == self.rank or (wanted and spans(self.plan, name)):
            data = self.data[name]
            coming.settle(Arrival(self.specs[name], self.directory, self.model, data))
        else:
            coming.settle(None)

    def _attach_newcomer(self, loop: GroupLoop, coming: Coming) -> None:
        name, arrival, wanted = coming.name, coming.arrival, coming.verdict is None
        accounts = [coming.account(self.rank)]
        if wanted and spans(self.plan, name):
            # One that cannot come here comes nowhere.
            texts = exchange(json.dumps(accounts[0]), counts=self.counts)
            accounts = [Account(*json.loads(text)) for text in texts]
        if arrival is None:
            return
        problem = common_problem(accounts)
        if problem and not wanted:
            if self._records(name):
                self._refuse(coming, problem)
            return
        if problem:
            self._fail(self._driver(name), problem)
            return
        for outcome in self.engine.drain():
            loop.tell(outcome)
        arrived = arrival.result()
        if not wanted:
            self._leave_unattached(coming, arrived.found)
            return
        arriving_s = time.perf_counter() - coming.began
        driver = self._enter(name, arrived.brought, arrived.start, arriving_s=arriving_s)
        if driver is not None:
            loop.enter(driver)

    def _leave_unattached(self, coming: Coming, found: Resumption) -> None:
        """It was cancelled on its way."""
        if not self._records(coming.name):
            return
        assert coming.verdict is not None
        driver = self._driver(coming.name)
        try:
            driver.status, driver.reason = coming.verdict
            leave_job(driver, found, self.recorder)
        except BEARABLE as error:
            self._fail(driver, error.message if isinstance(error, JobFailed) else str(error))

    def _driver(self, name: str) -> JobDriver:
        return JobDriver(self.specs[name], self.data[name].train, self.data[name].evaluation)

    def _refuse(self, coming: Coming, reason: str) -> None:
        """By one rank: a job that cannot come, and nobody else is touched by it. One that was
        cancelled on its way is as it was."""
        result = no_result(coming.name, reason)
        if coming.verdict is not None:
            status, reason = coming.verdict
            steps = self._saved_steps(coming.name)
            result = replace(result, status=status.value, reason=reason, steps=steps)
        # On a full disk whoever leads the run says so.
        with suppress(OSError):
            self.directory.write_result(result)
        self.directory.event("ended", job=result.job, status=result.status, reason=result.reason)
        self.tell(Ended(result.job, asdict(result)))

    def _give_up(self, loop: GroupLoop, command: GiveUp) -> None:
        """On all ranks: with its state, so that it can go on from here."""
        if command.job in self._newcomers:
            self._newcomers.of(command.job).dismiss(Status(command.status), command.reason)
            return
        driver = loop.active.get(command.job)
        if driver is None or command.job in self.engine.ended:
            # It has come to its end, which is told as that of any.
            return
        driver.status, driver.reason = Status(command.status), command.reason
        if self._records(driver.name):
            self.recorder.checkpoint(driver)
            self.recorder.on_end(driver)
        loop.leave(driver.name)

    def _balance(
        self, loop: GroupLoop, loads: list[Load], places: dict[str, int], *, move_cost: float
    ) -> None:
        """By way of their checkpoints."""
        moves = moves_to_balance(loads, places, self.world, move_cost=move_cost)
        if not moves:
            return
        stay = [
            move.job
            for move in moves
            if move.source == self.rank and not self._send_off(loop, move.job, move.target)
        ]
        # What was sent off is on disk.
        told = exchange(json.dumps(stay), counts=self.counts, purpose=Purpose.MOVING)
        stay = [job for text in told for job in json.loads(text)]
        for move in moves:
            if move.target == self.rank and move.job not in stay:
                found = resumption(self.directory, self.specs[move.job])
                driver = self._enter(move.job, found) if found.result is None else None
                if driver is not None:
                    loop.enter(driver)

    def _move_cost(self) -> float:
        """Tokens that this rank would train in the time of a move, for which all ranks wait: saving
        a job takes about as long as taking it in."""
        if math.isinf(self._entering_s):
            return 0.0
        return 2 * self._entering_s * self._figures.tokens_per_s

    def _send_off(self, loop: GroupLoop, name: str, target: int) -> bool:
        """Whether it goes. One that cannot be saved would go on elsewhere from an older step, or
        from none: it stays, and stops where it is."""
        driver = loop.active[name]
        for failure in self.recorder.save([driver]):
            self.recorder.pause(failure)
        if driver.status is not Status.RUNNING:
            return False
        loop.leave(name)
        self.recorder.sinks.close(name, "moved")
        self.directory.event("detached", job=name, step=driver.step)
        self.tell(Said((f"{name}: moves from rank {self.rank} to rank {target}",)))
        return True

    def _load(self, name: str, step: int) -> Load:
        """As the planner sees it, so that jobs are where it priced them."""
        request = request_of(self.specs[name], self.data[name], self.model.targets, base="")
        return load_of(request, step=step)


def _by_rank(told: Iterable[list[_Told]]) -> tuple[list[Load], dict[str, int]]:
    """What each rank told: the loads of all, and where they are."""
    held = [[Load(*load) for load in loads] for loads in told]
    places = {load.job: rank for rank, loads in enumerate(held) for load in loads}
    return [load for loads in held for load in loads], places


def _step_of(found: Resumption) -> int:
    return found.checkpoint.state.step if found.checkpoint is not None else 0
