"""A layer's linears under several settings of the kernels, in the same rounds as frozen ones.

    python benchmarks/gpu_ways.py --json ways.jsonl --inner 32 --rounds 4 \\
        --ways "read = reduce_b large: sent=False reload=False stages=4" \\
               "three = expand_y: programs=3; expand_dx: programs=3"

A way is a name and what it changes in lines of `settings.TUNINGS`; the settings as they are come
first. Whether a way leaves the bits of the usual settings is said beside its times. Cases as in
gpu_linears.py: bf16 copies of the pools, adapters first or, `--how inside`, inside of the products
that have them there, no dropout. One JSON line per case.
"""

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from multiprocessing import get_context

import torch
import triton
from gpu_linears import by_group, graph_of, new_group, times_us, workers
from inside_group import WAYS
from layer_shapes import SHAPES
from linear_group import Case, Group

from tlora.kernels.multi_lora import devices, settings
from tlora.kernels.multi_lora.settings import Tuning
from tlora.runtime.benchmark.record import commit


@dataclass(frozen=True)
class Way:
    name: str
    changes: dict[str, dict[str, int | bool | str]]
    """By line of the table."""

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        before = dict(settings.TUNINGS)
        for line, changed in self.changes.items():
            settings.TUNINGS[line] = replace(before[line], **changed)  # pyright: ignore
        devices.tuning_of.cache_clear()
        try:
            yield
        finally:
            settings.TUNINGS.update(before)
            devices.tuning_of.cache_clear()


USUAL = Way("usual", {})


def parse_way(text: str) -> Way:
    """`NAME = LINE: FIELD=VALUE ...; LINE: ...`"""
    name, found, rest = text.partition("=")
    if not found or ":" in name or " " in name.strip():
        raise ValueError(f"a way is NAME = LINE: FIELD=VALUE ..., its name one word, not {text!r}")
    changes = {}
    for part in rest.split(";"):
        line, _, values = part.partition(":")
        if line.strip() not in settings.TUNINGS:
            raise ValueError(f"no line {line.strip()!r}; there are: {', '.join(settings.TUNINGS)}")
        changes[line.strip()] = dict(_parse_value(each) for each in values.split())
    return Way(name.strip(), changes)


def _parse_value(text: str) -> tuple[str, int | bool | str]:
    field, _, value = text.partition("=")
    if field not in {each.name for each in fields(Tuning)}:
        raise ValueError(f"settings have no field {field!r}")
    if value in ("True", "False"):
        return field, value == "True"
    return field, int(value) if value.isdigit() else value


def outputs(groups: dict[str, Group], how: str) -> list[torch.Tensor]:
    """Of a forward and backward, over gradients that are the same every time."""
    found = []
    for group in groups.values():
        grads = [group.grad_a, *group.grad_b]
        for grad in grads:
            grad.fill_(0.5)
        group.forward(how)
        group.backward(how)
        found += [each.clone() for each in (*group.y, group.dx, *grads)]
    return found


def steps_of(groups: dict[str, Group], way: Way, how: str) -> dict[str, torch.cuda.CUDAGraph]:
    """The layer, and each group by itself."""

    def all_groups() -> None:
        for group in groups.values():
            group.forward(how)
        for group in reversed(groups.values()):
            group.backward(how)

    found = {way.name: graph_of(all_groups)}
    for name, group in groups.items():
        found[f"{name} {way.name} fwd"] = graph_of(lambda g=group: g.forward(how))
        found[f"{name} {way.name} bwd"] = graph_of(lambda g=group: g.backward(how))
    return found


def frozen_steps(groups: dict[str, Group]) -> dict[str, torch.cuda.CUDAGraph]:
    def all_groups() -> None:
        for group in groups.values():
            group.frozen_forward()
        for group in reversed(groups.values()):
            group.frozen_backward()

    found = {"frozen": graph_of(all_groups)}
    for name, group in groups.items():
        found[f"{name} frozen fwd"] = graph_of(group.frozen_forward)
        found[f"{name} frozen bwd"] = graph_of(group.frozen_backward)
    return found


def measure(case: Case, shape: str, ways: list[Way], how: str, timing: dict[str, int]) -> dict:
    groups = {name: new_group(case, f, True, [how]) for name, f in SHAPES[shape].items()}
    graphs = frozen_steps(groups)
    same, right = {}, None
    for way in ways:
        with way.in_force():
            found = outputs(groups, how)
            right = right or found
            same[way.name] = all(torch.equal(u, v) for u, v in zip(found, right, strict=True))
            graphs |= steps_of(groups, way, how)
    times = times_us({name: graph.replay for name, graph in graphs.items()}, **timing)
    result = {}
    for way in ways:
        result[way.name] = {
            "layer": round(times[way.name] / times["frozen"] - 1, 4),
            "by_group": round(by_group(times, way.name), 4),
            "same_bits": same[way.name],
            "changes": way.changes,
        }
    return {"ways": result, "us": {name: round(us, 1) for name, us in times.items()}}


def compile_way(case: Case, features: tuple, way: Way, how: str) -> None:
    """In a process of its own: what it compiles is kept on disk for others."""
    with way.in_force():
        group = new_group(case, features, True, [how])
        group.forward(how)
        group.backward(how)
        torch.cuda.synchronize()


def warm(cases: list[Case], shape: str, ways: list[Way], how: str) -> None:
    kinds = {(case.max_rank, max(32, case.adapters)): case for case in cases}
    with ProcessPoolExecutor(workers(), mp_context=get_context("spawn")) as pool:
        made = [
            pool.submit(compile_way, case, features, way, how)
            for case, way, features in itertools.product(
                kinds.values(), ways, SHAPES[shape].values()
            )
        ]
        for each in made:
            each.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ways", nargs="+", type=parse_way, default=[])
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--how", default="write", choices=["write", *WAYS])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--adapters", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--ranks", nargs="+", default=["mixed"])
    parser.add_argument("--zero", action="store_true", help="gradients are zero and not read")
    parser.add_argument("--inner", type=int, default=2, help="replays of a sample")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="append one line per case here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    ways = [USUAL, *args.ways]
    cases = [
        Case(args.tokens, adapters, ranks, 0.0, args.zero)
        for adapters, ranks in itertools.product(args.adapters, args.ranks)
    ]
    warm(cases, args.shape, ways, args.how)
    for case in cases:
        timing = {"rounds": args.rounds, "inner": args.inner}
        result = measure(case, args.shape, ways, args.how, timing)
        line = {
            "kind": "gpu_ways",
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "commit": commit(),
            "command": " ".join(sys.argv[1:]),
            "case": vars(case),
            **result,
        }
        print(f"{case.adapters} adapters of rank {case.ranks}: frozen {result['us']['frozen']} us")
        for name, each in result["ways"].items():
            bits = "the same bits" if each["same_bits"] else "OTHER BITS"
            print(
                f"  {name:24} layer +{100 * each['layer']:.1f} %,"
                f" by group +{100 * each['by_group']:.1f} %, {bits}",
                flush=True,
            )
        if args.json:
            with open(args.json, "a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
