"""The groups as a policy would have them: changed on paper first, then told as decisions."""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tlora.core.cluster import Cluster
from tlora.core.decision import Decision, Join, Move, Pause, Reasons, Resize, Start
from tlora.core.plan import Plan
from tlora.core.state import State
from tlora.costs.groups import Costs
from tlora.schedule.pieces import Load, Piece, Priced, group_loads
from tlora.schedule.placement import choose_gpus
from tlora.schedule.pricing import Pricing

LOOKS = 8
"""Groups whose bucket and weights are brought up to date at a tick."""

WEIGHT_CHANGE = 0.05
"""Weights that changed by less, against each other, are not worth a decision."""


NO_REASONS = Reasons(why="")


@dataclass(slots=True, eq=False)
class Bin:
    """A group, there already or planned."""

    name: str
    base: str
    gpus: tuple[int, ...]
    load: Load
    known: Priced | None
    """Asked for only where it matters: most groups are not looked at in a turn."""

    pricing: Pricing
    is_new: bool = False
    reasons: Reasons = NO_REASONS

    @property
    def priced(self) -> Priced:
        if self.known is None:
            self.known = self.pricing.on(self.load, self.gpus)
        return self.known

    @property
    def pressure(self) -> float:
        """Tokens of a round on one GPU for each second that a step may take: near to what it is
        in breach of its bounds, and known without a price."""
        return self.load.tokens / len(self.gpus) / self.load.limit_s


@dataclass(slots=True)
class Memory:
    """A board as it once was."""

    free: set[int]
    bins: list[tuple[Bin, tuple[int, ...], Load, Priced | None, Reasons]]
    place: dict[str, str | None]
    why: dict[str, Reasons]
    touched: set[str]
    next_group: int
    by_base: dict[str, list[tuple[float, str]]]
    wide: list[tuple[float, str]]
    keys: dict[str, float]


class Board:
    def __init__(
        self,
        state: State,
        costs: Costs,
        pieces: dict[str, Piece],
        loads: Mapping[str, Load] | None = None,
    ) -> None:
        """`loads`: of the groups, where that is known."""
        self.state = state
        self.costs = costs
        self.cluster: Cluster = state.cluster
        self.pricing = pricing = Pricing(costs, state.speed)
        self.price, self.holding = pricing.on, pricing.holding
        self.pieces = pieces
        self.is_contended = sum(each.gpus for each in pieces.values()) > state.up_gpus
        """Not every job can have the GPUs it brings."""

        self.splits: dict[tuple[tuple[int, ...], int], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """GPUs and a number of them -> those kept and those given."""

        self._chosen: dict[int, tuple[int, ...] | None] = {}
        self._free = set(state.free)
        self.bins: dict[str, Bin] = {}
        self.place: dict[str, str | None] = {name: pieces[name].job.group for name in pieces}
        self.why: dict[str, Reasons] = {}
        """Job -> why it was placed where it is."""

        self.barred: set[str] = set()
        """Jobs without a group that may have none in this turn: the limit forbids."""

        self.touched: set[str] = set()
        self._next = state.next_group
        self._by_base: dict[str, list[tuple[float, str]]] = {}
        self._wide: list[tuple[float, str]] = []
        self._keys: dict[str, float] = {}
        loads = group_loads(state, pieces) if loads is None else loads
        for name, group in state.groups.items():
            load, gpus = loads[name], group.gpus
            self.bins[name] = Bin(name, group.base, gpus, load, None, pricing)
            # As `Bin.pressure`.
            self._keys[name] = key = load.tokens / len(gpus) / load.limit_s
            self._by_base.setdefault(group.base, []).append((key, name))
            if len(gpus) > 1:
                self._wide.append((key, name))
        for filed in (*self._by_base.values(), self._wide):
            filed.sort()

    @property
    def free(self) -> set[int]:
        """Changed only by assignment: what was chosen from it is remembered."""
        return self._free

    @free.setter
    def free(self, gpus: set[int]) -> None:
        self._free = gpus
        self._chosen = {}

    def choose(self, count: int) -> tuple[int, ...] | None:
        """Free GPUs, at full speed before slowed ones."""
        if count not in self._chosen:
            self._chosen[count] = self.choose_from(self._free, count)
        return self._chosen[count]

    def choose_from(self, gpus: set[int], count: int) -> tuple[int, ...] | None:
        """Likewise, if these were free."""
        speeds, good = self.state.speed, gpus
        if speeds:
            good = {gpu for gpu in good if speeds.get(gpu, 1.0) == 1.0}
        if len(good) < count:
            good = gpus
        return choose_gpus(self.cluster, good, count)

    def open(self, load: Load, gpus: tuple[int, ...], priced: Priced) -> Bin:
        """A new group of jobs that are in none."""
        name, base = f"g{self._next}", load.pieces[0].base
        found = Bin(name, base, gpus, load, priced, self.pricing, is_new=True)
        self._next += 1
        self.bins[found.name] = found
        self._file(found)
        self.touched.add(found.name)
        self.free -= set(gpus)
        for piece in load.pieces:
            self.place[piece.name] = found.name
        return found

    def slowest(self, priced: Priced) -> float:
        """The slowdown of the job that presses most on its bound."""
        return priced.breach * self.pieces[priced.pressed].job.request.slowdown_bound

    def put(self, piece: Piece, target: Bin, priced: Priced) -> None:
        target.load = target.load.plus(piece)
        self._refile(target, priced)
        self.place[piece.name] = target.name

    def take(self, piece: Piece) -> None:
        """Out of its group, which ends if it was the last."""
        name = self.place[piece.name]
        assert name is not None
        self.place[piece.name] = None
        source = self.bins[name]
        if len(source.load.pieces) == 1:
            self.free |= set(source.gpus)
            self._unfile(source)
            del self.bins[name]
            return
        source.load = source.load.without(piece)
        self._refile(source, self.price(source.load, source.gpus))

    def resize(self, which: Bin, gpus: tuple[int, ...], priced: Priced) -> None:
        self.free |= set(which.gpus)
        self.free -= set(gpus)
        self._unfile(which)
        which.gpus = gpus
        self._file(which)
        self._refile(which, priced)

    def remember(self) -> Memory:
        """For trying something that takes several changes; `go_back` undoes them."""
        return Memory(
            free=set(self.free),
            bins=[
                (each, each.gpus, each.load, each.known, each.reasons)
                for each in self.bins.values()
            ],
            place=dict(self.place),
            why=dict(self.why),
            touched=set(self.touched),
            next_group=self._next,
            by_base={base: list(each) for base, each in self._by_base.items()},
            wide=list(self._wide),
            keys=dict(self._keys),
        )

    def go_back(self, memory: Memory) -> None:
        """To what was remembered, which is used up by it."""
        self.bins = {}
        for which, gpus, load, known, reasons in memory.bins:
            which.gpus, which.load, which.known, which.reasons = gpus, load, known, reasons
            self.bins[which.name] = which
        self.free, self.place, self.why = memory.free, memory.place, memory.why
        self.touched, self._next = memory.touched, memory.next_group
        self._by_base, self._wide, self._keys = memory.by_base, memory.wide, memory.keys

    def waiting(self) -> list[Piece]:
        """Jobs without a group that may have one, in order of arrival."""
        place, barred = self.place, self.barred
        return [
            piece
            for name, piece in self.pieces.items()
            if place[name] is None and name not in barred
        ]

    @property
    def running(self) -> int:
        """Jobs that have a group."""
        return sum(name is not None for name in self.place.values())

    def rearrange(
        self,
        contents: Sequence[tuple[Bin | None, Load | None, tuple[int, ...], Priced | None]],
    ) -> None:
        """All at once: groups with new jobs and GPUs; without jobs, it ends; without a group, a new
        one. Every job named is taken from where it was."""
        for which, load, _, _ in contents:
            if which is not None:
                self.free |= set(which.gpus)
                self._unfile(which)
                if load is None:
                    del self.bins[which.name]
        for which, load, gpus, priced in contents:
            if load is None or priced is None:
                continue
            if which is None:
                self.open(load, gpus, priced)
                continue
            which.load, which.gpus, which.known = load, gpus, priced
            self.free -= set(gpus)
            self._file(which)
            self.touched.add(which.name)
            for piece in load.pieces:
                self.place[piece.name] = which.name

    def roomiest(self, base: str, count: int) -> list[Bin]:
        """The groups of a base that are farthest from their bounds, first."""
        return [self.bins[name] for _, name in self._by_base.get(base, [])[:count]]

    def pressed(self, base: str, count: int) -> list[Bin]:
        """Those nearest to their bounds, or beyond them, first."""
        return [self.bins[name] for _, name in reversed(self._by_base.get(base, [])[-count:])]

    def widest(self, count: int) -> list[Bin]:
        """Groups of several GPUs, those farthest from their bounds first."""
        return [self.bins[name] for _, name in self._wide[:count]]

    @property
    def bases(self) -> list[str]:
        return sorted(self._by_base)

    def _file(self, which: Bin) -> None:
        key = which.pressure
        self._keys[which.name] = key
        insort(self._by_base.setdefault(which.base, []), (key, which.name))
        if len(which.gpus) > 1:
            insort(self._wide, (key, which.name))

    def _unfile(self, which: Bin) -> None:
        entry = (self._keys.pop(which.name), which.name)
        for filed in (self._by_base[which.base], self._wide):
            place = bisect_left(filed, entry)
            if place < len(filed) and filed[place] == entry:
                del filed[place]

    def _refile(self, which: Bin, priced: Priced) -> None:
        self._unfile(which)
        which.known = priced
        self._file(which)
        self.touched.add(which.name)

    @property
    def worth(self) -> float:
        return sum(each.priced.worth for each in self.bins.values())

    def decisions(self, *, everywhere: bool = False) -> list[Decision]:
        """What leads from the state to the board, in an order that can be carried out: what gives
        GPUs back comes first. `everywhere`: buckets and weights of a few groups that
        nothing happened to are brought up to date too."""
        if self.touched:
            self._rename_taken_over()
        looked_at = self._due_for_a_look() if everywhere else set[str]()
        if not self.touched and not any(self._is_stale(name) for name in looked_at):
            return []
        return _Telling(self).decisions(looked_at)

    def _due_for_a_look(self) -> set[str]:
        """A few groups that nothing happened to, others at every tick."""
        names = list(self.bins)
        first = int(self.state.now // 60) * LOOKS % max(1, len(names))
        return set([*names[first:], *names[:first]][:LOOKS])

    def _is_stale(self, name: str) -> bool:
        """A group that nothing happened to on the board."""
        group = self.state.groups[name]
        return is_stale(self.bins[name], group.plan, group.jobs, self.pieces, WEIGHT_CHANGE)

    def _rename_taken_over(self) -> None:
        """A group that none of its jobs stays in ends on the way: what is there then is new."""
        taken = [name for name in self.touched if name in self.bins and self._is_taken_over(name)]
        if len(taken) > 1:
            # New names are given in the groups' order.
            taken = [name for name in self.bins if name in taken]
        for name in taken:
            which = self.bins[name]
            self._unfile(which)
            del self.bins[name]
            which.name, which.is_new = f"g{self._next}", True
            self._next += 1
            self.bins[which.name] = which
            self._file(which)
            for piece in which.load.pieces:
                self.place[piece.name] = which.name

    def _is_taken_over(self, name: str) -> bool:
        which = self.bins[name]
        return not which.is_new and all(piece.job.group != name for piece in which.load.pieces)


class _Telling:
    """Walks from the state to the board, with a shadow of the groups as they will be."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.out: list[Decision] = []
        groups = board.state.groups
        self.gpus = {name: group.gpus for name, group in groups.items()}
        self.plans: dict[str, Plan] = {}
        """Where they differ from the state's."""

        self.weights = {name: group.jobs for name, group in groups.items()}
        """Those of the state until something changes: see `_own_weights`."""

        self._owned: set[str] = set()

    def decisions(self, looked_at: set[str]) -> list[Decision]:
        """`looked_at`: groups that nothing happened to, and that may be stale."""
        if self.board.touched:
            self._tell_changes()
        self._tell_stale(looked_at)
        return self.out

    def _tell_changes(self) -> None:
        board = self.board
        moved: list[Piece] = []
        arriving: list[Piece] = []
        for piece in board.pieces.values():
            old, new = piece.job.group, board.place[piece.name]
            if old == new:
                continue
            if old is None:
                arriving.append(piece)
            elif new is None or board.bins[new].is_new:
                self._pause(piece, old)
                if new is not None:
                    arriving.append(piece)
            else:
                moved.append(piece)
        for name, which in board.bins.items():
            if which.is_new or which.gpus == self.gpus[name]:
                continue
            kept = tuple(gpu for gpu in self.gpus[name] if gpu in which.gpus)
            if kept and len(kept) < len(self.gpus[name]):
                self._resize(which, kept)
        for piece in moved:
            self._move(piece)
        self._grow()
        starting: dict[str, list[Piece]] = {}
        for piece in arriving:
            name = board.place[piece.name]
            assert name is not None
            if board.bins[name].is_new:
                starting.setdefault(name, []).append(piece)
            else:
                self._join(piece, name)
        for name in [each.name for each in board.bins.values() if each.is_new]:
            self._start(board.bins[name], starting[name])

    def _tell_stale(self, looked_at: set[str]) -> None:
        board = self.board
        for name, which in board.bins.items():
            if which.is_new:
                continue
            if name in board.touched:
                # Its bounds were reckoned with the weights that are due.
                slack = 1e-6
            elif name in looked_at:
                slack = WEIGHT_CHANGE
            else:
                continue
            if is_stale(which, self._plan(name), self.weights[name], board.pieces, slack):
                self._resize(which)

    def _grow(self) -> None:
        """Groups to their GPUs, each when these are free."""
        pending = [
            each
            for name, each in self.board.bins.items()
            if not each.is_new
            and each.gpus != self.gpus[name]
            and set(each.gpus) != set(self.gpus[name])
        ]
        while pending:
            taken = {gpu: name for name, gpus in self.gpus.items() for gpu in gpus}
            ready = [
                each
                for each in pending
                if all(taken.get(gpu, each.name) == each.name for gpu in each.gpus)
            ]
            assert ready, f"{pending[0].name} waits for GPUs that wait for it"
            for each in ready:
                self._resize(each)
            pending = [each for each in pending if each not in ready]

    def _own_weights(self, name: str) -> dict[str, float]:
        """That may be changed."""
        if name not in self._owned:
            self._owned.add(name)
            self.weights[name] = dict(self.weights[name])
        return self.weights[name]

    def _plan(self, name: str) -> Plan:
        return self.plans.get(name) or self.board.state.groups[name].plan

    def _reasons(self, piece: Piece) -> Reasons:
        return self.board.why.get(piece.name) or Reasons(why="regrouped")

    def _pause(self, piece: Piece, old: str) -> None:
        self._leave(piece, old)
        self.out.append(Pause(job=piece.name, group=old, reasons=self._reasons(piece)))

    def _leave(self, piece: Piece, old: str) -> None:
        del self._own_weights(old)[piece.name]
        if not self.weights[old]:
            del self.weights[old], self.gpus[old]

    def _move(self, piece: Piece) -> None:
        old, new = piece.job.group, self.board.place[piece.name]
        assert old is not None and new is not None
        self._leave(piece, old)
        self._own_weights(new)[piece.name] = piece.weight
        self.out.append(
            Move(
                job=piece.name,
                source=old,
                target=new,
                weight=piece.weight,
                reasons=self._reasons(piece),
            )
        )

    def _join(self, piece: Piece, name: str) -> None:
        self._own_weights(name)[piece.name] = piece.weight
        self.out.append(
            Join(job=piece.name, group=name, weight=piece.weight, reasons=self._reasons(piece))
        )

    def _start(self, which: Bin, pieces: list[Piece]) -> None:
        self.out.append(
            Start(
                group=which.name,
                base=which.base,
                jobs=tuple(piece.name for piece in pieces),
                gpus=which.gpus,
                plan=Plan(replicas=len(which.gpus), bucket=which.priced.bucket),
                weights=tuple(piece.weight for piece in pieces),
                reasons=self._start_reasons(which, pieces),
            )
        )

    def _start_reasons(self, which: Bin, pieces: list[Piece]) -> Reasons:
        """As the group starts: others may have come or gone since its first job was placed."""
        found, priced = self._reasons(pieces[0]), which.priced
        alone = len(pieces) == 1
        return replace(
            found,
            before=found.before if alone and found.after == priced.worth else 0.0,
            after=priced.worth,
            slowdown=self.board.slowest(priced),
            bound_by=found.bound_by if alone else priced.bound_by,
        )

    def _resize(self, which: Bin, gpus: tuple[int, ...] | None = None) -> None:
        gpus = gpus or which.gpus
        bucket = which.priced.bucket
        weights = {name: self.board.pieces[name].weight for name in self.weights[which.name]}
        if not which.priced.holds:
            # Bounds are broken already: with the old bucket and weights nobody is worse off for
            # what others gain.
            bucket, weights = self._plan(which.name).bucket, self.weights[which.name]
        plan = Plan(replicas=len(gpus), bucket=bucket)
        self.gpus[which.name], self.plans[which.name] = gpus, plan
        self.weights[which.name] = weights
        self.out.append(
            Resize(
                group=which.name,
                gpus=gpus,
                plan=plan,
                weights=tuple(weights.values()),
                reasons=which.reasons
                if which.reasons.why
                else Reasons(why="its jobs or their dues changed", after=which.priced.worth),
            )
        )


def is_stale(
    which: Bin,
    plan: Plan,
    weights: Mapping[str, float],
    pieces: Mapping[str, Piece],
    slack: float,
) -> bool:
    """A group's bucket or weights are not those that are best for its jobs."""
    if not which.priced.holds:
        return False
    if plan.bucket != which.priced.bucket:
        return True
    capacity = which.priced.bucket * len(which.gpus)
    if len(weights) == 1 or which.load.tokens <= capacity:
        # All batches are whole in every round, whatever the weights.
        return False
    ratios = [weight / pieces[name].weight for name, weight in weights.items()]
    return max(ratios) > min(ratios) * (1 + slack)
