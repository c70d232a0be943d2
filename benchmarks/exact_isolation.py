"""What exact isolation costs at start, and what tiles of rows would cost in every nano-batch.

    python benchmarks/exact_isolation.py [--model FOLDER] [--rows 1024] [--threads 1]

Times are process times where one thread runs, so that other processes do not count. Whole products
and tiles are interleaved; medians of seven after one to warm up.
"""

import argparse
import json
import statistics
import time

import numpy as np
import torch

from tlora.core.assets import DEMO
from tlora.core.job import BaseSpec
from tlora.kernels.row_tiles import TILE_ROWS
from tlora.model.loading import load_base
from tlora.model.packing import Share, pack
from tlora.model.row_probe import frozen_products, settle_products
from tlora.model.super_model import SuperModel
from tlora.training.exactness import check_whole_model, random_adapter, random_sequence, run

REPEATS = 7
RANKS = (4, 8, 16)
LENGTHS = (11, 47, 130)


def seconds_of(function, clock) -> float:
    started = clock()
    function()
    return clock() - started


def nano_batch(model: SuperModel, num_rows: int):
    """One job of rank 8, rows of some forty tokens."""
    generator = np.random.default_rng(0)
    sequences = [random_sequence(40, model.vocabulary, generator) for _ in range(num_rows // 40)]
    offsets = [40 * i for i in range(len(sequences))]
    batch = pack([Share("job", sequences, offsets, [1e-3] * len(sequences))], num_rows)
    model.attach("job", random_adapter(model, 8, generator), scale=2.0)
    return lambda: run(model, batch, evaluate=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(DEMO / "base"))
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    base = BaseSpec(model=options.model)
    whole, tiled = (
        SuperModel(load_base(base, torch.device("cpu")), per_sequence=True) for _ in range(2)
    )
    rows = options.rows
    report = settle_products(whole, rows)
    figures: dict[str, object] = {
        "rows": rows,
        "threads": options.threads,
        "products": report.probed,
        "tiled": report.tiled,
        "products_seconds": round(seconds_of(lambda: settle_products(whole, rows), clock), 3),
        "whole_model_seconds": round(
            seconds_of(lambda: check_whole_model(whole, rows, ranks=RANKS, lengths=LENGTHS), clock),
            3,
        ),
    }
    for product in frozen_products(tiled):
        product.use_tiles(TILE_ROWS)
    runs = {"whole": nano_batch(whole, rows), "tiles": nano_batch(tiled, rows)}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPEATS + 1):
        for name, function in runs.items():
            taken[name].append(seconds_of(function, clock))
    for name, seconds in taken.items():
        figures[f"nano_batch_{name}_seconds"] = round(statistics.median(seconds[1:]), 4)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
