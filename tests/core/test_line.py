"""Who comes in first where only so many jobs may be looked at."""

import random

from tlora.core.line import Line


def line_of(*jobs: tuple[str, float, float]) -> Line:
    """Of names, when they began to wait, and sizes."""
    line = Line()
    for number, (name, began, size) in enumerate(jobs):
        line.add(name, began=began, number=number, size=size)
    return line


def test_the_longest_wait_against_its_own_size_comes_first() -> None:
    """A short one overtakes a long one that came before it, but not at once."""
    line = line_of(("long", 0.0, 1000.0), ("short", 90.0, 10.0))
    assert line.split(1, 90.5).inside == ["long"]
    found = line.split(1, 100.0)
    assert found.inside == ["short"] and found.heads == ["long"]
    assert line.split(2, 100.0) == (["short", "long"], [])
    line.remove("short")
    assert line.split(1, 100.0) == (["long"], [])
    assert len(line) == 1


def test_those_next_in_line_change_places_as_time_goes_on() -> None:
    """Without anybody having come or gone."""
    line = line_of(("long", 0.0, 1000.0), ("short", 90.0, 10.0))
    assert line.by_wait(["short", "long"], 90.5) == ["long", "short"]
    assert line.by_wait(["short", "long"], 100.0) == ["short", "long"]


def test_within_a_factor_of_two_it_is_as_if_all_were_compared() -> None:
    """Against a sort of everybody: who is inside has at least half of the relative wait of whoever
    is not. Taking the last of each class instead would not do."""
    draw = random.Random(0)
    jobs = [(f"j{n}", draw.uniform(0, 100), 2 ** draw.uniform(0, 20)) for n in range(300)]
    line = line_of(*jobs)
    waits = {name: (200.0 - began) / size for name, began, size in jobs}
    inside = line.split(50, 200.0).inside
    assert len(set(inside)) == 50
    left_out = max(wait for name, wait in waits.items() if name not in inside)
    assert min(waits[name] for name in inside) * 2 >= left_out
    broken = sorted(waits, key=lambda name: waits[name])[:50]
    left_out = max(wait for name, wait in waits.items() if name not in broken)
    assert min(waits[name] for name in broken) * 2 < left_out


def test_nobody_waits_for_ever() -> None:
    """However many short ones come after it, a long job is the first some day."""
    line = line_of(("long", 0.0, 1000.0))
    for now in range(1, 5000):
        line.add(f"s{now}", began=float(now - 1), number=now, size=1.0)
        (first,) = line.split(1, float(now)).inside
        if first == "long":
            break
        line.remove(first)
    assert 900 < now < 1100
