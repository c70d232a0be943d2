"""Whether simulated and real figures agree, for fidelity.py: limits, ranking, a table."""

import statistics
from itertools import combinations
from typing import Any

import numpy as np

LIMITS_PCT = {"makespan_s": 5.0, "jct_mean_s": 5.0, "jct_p99_s": 10.0}


def judged(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    within = all(
        abs(each["error_pct"][name]) <= limit
        for each in found.values()
        for name, limit in LIMITS_PCT.items()
    )
    ranks = {name: (ranking(found, name, real=True), ranking(found, name)) for name in LIMITS_PCT}
    turned = {name: turned_pairs(found, name) for name in LIMITS_PCT}
    replays = all(each["replayed"] == len(each["real"]) for each in found.values())
    same = not any(beyond for pairs in turned.values() for _, _, beyond in pairs)
    return {
        "ranking": {name: list(real) for name, (real, _) in ranks.items()},
        "turned_within_noise": {
            name: [[one, other] for one, other, beyond in pairs if not beyond]
            for name, pairs in turned.items()
        },
        "same_ranking": same,
        "within_limits": within,
        "replays_agree": replays,
        "holds": within and same and replays,
    }


def turned_pairs(found: dict[str, dict[str, Any]], name: str) -> list[tuple[str, str, bool]]:
    """Policies that the simulation has the other way round, and whether they truly differ: by more
    than the repeats of either do."""
    turned: list[tuple[str, str, bool]] = []
    for one, other in combinations(found, 2):
        real = statistics.mean(values(found, one, name)) - statistics.mean(
            values(found, other, name)
        )
        simulated = found[one]["simulated"][name] - found[other]["simulated"][name]
        if real * simulated < 0:
            noise = max(np.ptp(values(found, policy, name)) for policy in (one, other))
            turned.append((one, other, bool(abs(real) > noise)))
    return turned


def values(found: dict[str, dict[str, Any]], policy: str, name: str) -> list[float]:
    return [run[name] for run in found[policy]["real"]]


def ranking(found: dict[str, dict[str, Any]], name: str, *, real: bool = False) -> tuple[str, ...]:
    def value(policy: str) -> float:
        if real:
            return statistics.mean(values(found, policy, name))
        return found[policy]["simulated"][name]

    return tuple(sorted(found, key=value))


def print_table(found: dict[str, dict[str, Any]], verdict: dict[str, Any]) -> None:
    print(f"\n{'policy':20}{'':12}{'real':>10}{'spread':>9}{'simulated':>12}{'error':>9}")
    for policy, each in found.items():
        for name, limit in LIMITS_PCT.items():
            runs = values(found, policy, name)
            mean = statistics.mean(runs)
            spread = (max(runs) - min(runs)) / mean * 100
            error = each["error_pct"][name]
            mark = "" if abs(error) <= limit else f"  above {limit:g} %"
            print(
                f"{policy:20}{name:12}{mean:8.1f} s{spread:7.1f} %{each['simulated'][name]:10.1f} s"
                f"{error:+7.1f} %{mark}"
            )
    for policy, each in found.items():
        prices = ", ".join(f"{error:+.1f} %" for error in each["price_error_pct"])
        once = ", ".join(f"{error:+.1f} %" for error in each["error_at_mean_speed_pct"].values())
        print(f"{policy}: nano-batches that ran are priced {prices} off; simulated once, at the")
        print(f"    mean speed: {once}")
    for name in ("same_ranking", "replays_agree", "within_limits"):
        print(f"{name.replace('_', ' ')}: {'yes' if verdict[name] else 'NO'}")
    for name, pairs in verdict["turned_within_noise"].items():
        for one, other in pairs:
            print(f"alike: {one} and {other} in {name}, by less than repeats differ")
