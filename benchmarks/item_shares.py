"""How evenly programs share the lists of a layer: the busiest program's share over the mean, for
each way to share. Counted, not measured: what an item costs is guessed, in three ways.

    python benchmarks/item_shares.py            # 8B, 8,192 tokens, 8, 12 and 32 unequal jobs
"""

import argparse
from collections import defaultdict

import numpy as np
from kernel_candidates import Candidate
from kernel_cases import MODELS, Place

from tlora.kernels.multi_lora import blocks as lists
from tlora.kernels.multi_lora import settings
from tlora.kernels.multi_lora.blocks import build_table

PROCESSORS = 132
KERNELS = ("reduce_b", "reduce_a", "expand_y", "expand_dx")
# Microseconds of an item: to begin it, a block of 64 tokens, a rank row of its tile.
COSTS = {"reduce_b": (1.2, 0.55, 0.08), "reduce_a": (1.0, 0.35, 0.05)}
EXPAND_COSTS = (0.8, 0.5, 0.025)
# Were the guess wrong: items that take longer to begin, or shorter.
SCALES = ((1.0, 1.0), (2.0, 0.7), (0.3, 1.3))


def item_costs(kernel: str, place: Place, scales: tuple[float, float]) -> np.ndarray:
    """Of every item, in the order of the list."""
    num_in, outs = place.features
    layout = place.layout(Candidate("usual", usual(kernel, place)))
    table = build_table(layout, place.segments).numpy()
    first = layout.first_row[kernel]
    rows = table[first : first + table[0, lists.LISTS.index(kernel)]]
    widths = np.array(outs if kernel in ("reduce_b", "expand_y") else [num_in] * len(outs))
    tiles = -(-widths[rows[:, lists.LINEAR]] // usual(kernel, place).features)
    begin, block, row = COSTS.get(kernel, EXPAND_COSTS)
    rank = np.maximum(16, 2 ** np.ceil(np.log2(np.maximum(rows[:, lists.RANK], 1))))
    blocks = -(-rows[:, lists.COUNT] // 64)
    return np.repeat(scales[0] * begin + scales[1] * block * blocks + row * rank, tiles)


def usual(kernel: str, place: Place) -> settings.Tuning:
    shape = settings.Shape(num_tokens=place.num_tokens, max_rank=64, width=64 * len(place.outs))
    return settings.tuning(kernel, shape)


def shares(costs: np.ndarray, programs: int) -> dict[str, float]:
    """Of the busiest program, over the mean."""
    mean = costs.sum() / programs
    i_round, i_program = np.divmod(np.arange(len(costs)), programs)
    back = np.where(i_round % 2 == 1, programs - 1 - i_program, i_program)
    return {
        "turns": np.bincount(i_program, costs, minlength=programs).max() / mean,
        "snake": np.bincount(back, costs, minlength=programs).max() / mean,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="8b", choices=MODELS)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--jobs", type=int, nargs="+", default=[8, 12, 32])
    args = parser.parse_args()
    for jobs in args.jobs:
        for kernel in KERNELS:
            found, weights = defaultdict(list), []
            for group in MODELS[args.model]:
                place = Place(args.model, group, args.tokens, jobs, uneven=True)
                for scales in SCALES:
                    costs = item_costs(kernel, place, scales)
                    programs = PROCESSORS * usual(kernel, place).programs
                    weights.append(costs.sum() / programs)
                    for how, share in shares(costs, programs).items():
                        found[how].append(share)
            mean = {how: np.average(each, weights=weights) for how, each in found.items()}
            print(f"{jobs:3} jobs, {kernel:9}", *(f"{how} {mean[how]:.2f}" for how in mean))


if __name__ == "__main__":
    main()
