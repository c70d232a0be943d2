"""Prices from sums against the plain prediction, which looks at every job."""

import random
from dataclasses import astuple

import pytest
from support.scheduling import costs_of, request

from tlora.core.cluster import uniform_cluster
from tlora.core.decision import Start
from tlora.core.event import Arrival
from tlora.core.plan import Plan
from tlora.core.state import State
from tlora.costs.groups import Costs
from tlora.schedule.board import NO_REASONS, Board
from tlora.schedule.pieces import Load, Piece, Pieces, load_of, pieces_of


def drawn_pieces(seed: int, costs: Costs) -> list[Piece]:
    """Of one base, two tenants, all sizes, and dues that differ."""
    draw = random.Random(seed)
    state = State(costs.cluster, shares={"a": draw.choice([1.0, 3.0])})
    for i in range(draw.randint(1, 6)):
        batch = draw.choice([1, 2, 4, 8])
        state.happen(
            Arrival(
                0.0,
                request(
                    f"j{i}",
                    rank=draw.choice([2, 16, 64]),
                    batch=batch,
                    length=draw.choice([64, 512, 1500]),
                    gpus=draw.choice([1, batch]),
                    tenant=draw.choice(["a", "b"]),
                    priority=draw.choice([1.0, 4.0]),
                    slowdown_bound=draw.choice([1.0, 1.5, 3.0]),
                ),
            )
        )
    return list(pieces_of(state, costs).values())


def plain(costs: Costs, load: Load, gpus: tuple[int, ...], bucket: int) -> tuple[float, float]:
    """Worth and breach, with the weights that pieces have."""
    found = costs.predict(
        [piece.job.request for piece in load.pieces],
        [piece.weight for piece in load.pieces],
        Plan(replicas=len(gpus), bucket=bucket),
        costs.cluster.tier(gpus),
    )
    rates = zip(found.steps_per_s, load.pieces, strict=True)
    return found.worth, max(1 / rate / piece.limit_s for rate, piece in rates)


@pytest.mark.parametrize("seed", range(200))
def test_a_price_is_what_the_plain_prediction_says_of_its_bucket(seed: int) -> None:
    """On one GPU and on several, with wrong predictions too; a price without one of the jobs is
    told."""
    cluster = uniform_cluster(8)
    costs = costs_of(cluster, error=0.2 if seed % 2 else 0.0)
    pieces = drawn_pieces(seed, costs)
    board = Board(State(cluster), costs, {})
    load = load_of(pieces)
    gpus = tuple(range(random.Random(seed).choice([1, 1, 2, 5])))
    priced = board.price(load, gpus)
    assert (priced.worth, priced.breach) == pytest.approx(plain(costs, load, gpus, priced.bucket))
    if len(pieces) > 1:
        fewer = plain(costs, load.without(pieces[0]), gpus, priced.bucket)
        assert fewer != pytest.approx((priced.worth, priced.breach))


def test_jobs_that_are_added_one_by_one_come_to_what_they_are_together() -> None:
    """To the last digit, or decisions would depend on the way that led to a group; and one that was
    taken out and put back is the last in the sums."""
    costs = costs_of(uniform_cluster(8))
    pieces = next(each for seed in range(99) if len(each := drawn_pieces(seed, costs)) == 6)
    grown = pieces[0].alone
    for piece in pieces[1:]:
        grown = grown.plus(piece)
    assert figures(grown) == figures(load_of(pieces))
    again = grown.without(pieces[2]).plus(pieces[2])
    assert figures(again) == figures(load_of([*pieces[:2], *pieces[3:], pieces[2]]))
    assert figures(grown) != figures(grown.exchanged(pieces[0], pieces[1]))


def test_what_is_kept_when_dues_change_is_what_would_be_worked_out_anew() -> None:
    """A load of a group, with a job more and with one less; what a load was before the change is
    told apart."""
    cluster = uniform_cluster(2)
    costs = costs_of(cluster, error=0.2)
    state = State(cluster)
    names = ("a", "b", "c", "d")
    for name in names:
        state.happen(Arrival(0.0, request(name, batch=2, gpus=2)))
    state.apply(
        Start(
            group="g0",
            base="llama",
            jobs=names[:3],
            gpus=(0,),
            plan=Plan(bucket=4096),
            weights=(1.0, 1.0, 1.0),
            reasons=NO_REASONS,
        )
    )

    def asked(maker: Pieces) -> list[object]:
        pieces = maker.of(state)
        load = maker.loads(state, pieces)["g0"]
        board = Board(state, costs, pieces)
        some = (load, load.plus(pieces["d"]), load.without(pieces["a"]), pieces["a"].alone)
        return [
            (figures(each), [astuple(board.price(each, gpus)) for gpus in ((0,), (0, 1))])
            for each in some
        ]

    kept = Pieces(costs)
    before = asked(kept)
    for name in ("e", "f"):
        state.happen(Arrival(0.0, request(name)))
    after = asked(kept)
    assert after == asked(Pieces(costs))
    assert all(one != other for one, other in zip(before, after, strict=True))


def figures(load: Load) -> list[object]:
    kept = ("pieces", "prices", "refused", "wholes", "mistake", "dues", "_more", "_less")
    return [getattr(load, name) for name in Load.__slots__ if name not in kept]


def test_what_is_called_hopeless_holds_under_no_bucket() -> None:
    """And some of what is not, too; a load that holds is never called so."""
    cluster = uniform_cluster(8)
    hopeless = 0
    for seed in range(400):
        costs = costs_of(cluster, error=0.2 if seed % 2 else 0.0)
        pieces = drawn_pieces(seed, costs)
        board = Board(State(cluster), costs, {})
        gpus = tuple(range(1 + seed % 3))
        load = load_of(pieces)
        if board.pricing.is_hopeless(load, len(gpus)):
            hopeless += 1
            assert not board.price(load, gpus).holds
            assert all(
                plain(costs, load, gpus, each)[1] > 1 for each in costs.base("llama").buckets
            )
        if len(pieces) > 1:
            fewer = load.without(pieces[0])
            one_more = board.pricing.is_hopeless(fewer, len(gpus), pieces[0])
            assert one_more == board.pricing.is_hopeless(load, len(gpus))
    assert 10 < hopeless < 390


def test_holding_is_the_price_where_it_holds_and_counts_alike() -> None:
    """Of random loads, asked first or after the price; what the quick look says of holding is what
    the price says. One that refuses by needs a tenth too large refuses what holds."""
    cluster = uniform_cluster(8)
    refused, wrongly = 0, 0
    for seed in range(400):
        costs = costs_of(cluster, error=0.2 if seed % 2 else 0.0)
        gpus = tuple(range(1 + seed % 3))
        load, other = (load_of(drawn_pieces(seed, costs)) for _ in range(2))
        one, two = Board(State(cluster), costs, {}), Board(State(cluster), costs, {})
        priced = one.price(load, gpus)
        for _ in range(2):
            found = two.holding(other, gpus)
            assert (found and astuple(found)) == (astuple(priced) if priced.holds else None)
        assert two.pricing.asked == 2 * one.pricing.asked
        assert two.pricing.does_hold(load_of(other.pieces), gpus) == priced.holds
        assert two.pricing.does_hold(other, gpus) == priced.holds
        refused += found is None
        doubted = load_of(drawn_pieces(seed, costs))
        doubted.needs *= 1.1
        wrongly += priced.holds and two.holding(doubted, gpus) is None
    assert 100 < refused < 390
    assert wrongly


@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_a_job_by_itself_shares_a_round_as_it_would_among_others(replicas: int) -> None:
    """To the last digit: beside a job that asks for next to nothing its figures are near to those,
    and far from those of a round with a bucket half as large."""
    costs = costs_of(uniform_cluster(8))
    base = costs.base("llama")
    pricing = Board(State(costs.cluster), costs, {}).pricing
    for seed in range(20):
        piece = drawn_pieces(seed, costs)[0]
        gpus = tuple(range(replicas))
        for bucket in base.buckets[:2]:
            if bucket * replicas >= piece.figures.batch_tokens:
                continue
            link = costs.span(gpus).link
            found = pricing._shared(base, piece.alone, bucket, replicas, link, 1.0)
            near = pytest.approx((found.worth, found.breach), rel=1e-9)
            assert plain(costs, piece.alone, gpus, bucket) == near
            assert plain(costs, piece.alone, gpus, bucket // 2) != near


def test_what_a_job_leaves_behind_is_worth_no_more_than_the_bound_says() -> None:
    """Half of the bound would be too little for some."""
    cluster = uniform_cluster(8)
    ratios: list[float] = []
    for seed in range(300):
        costs = costs_of(cluster, error=0.2 if seed % 2 else 0.0)
        pieces = drawn_pieces(seed, costs)
        if len(pieces) == 1:
            continue
        board = Board(State(cluster), costs, {})
        gpus = tuple(range(1 + seed % 3))
        load = load_of(pieces)
        most = board.pricing.most_without(load, pieces[0], len(gpus))
        ratios.append(board.price(load.without(pieces[0]), gpus).worth / most)
    assert 0.5 < max(ratios) <= 1
