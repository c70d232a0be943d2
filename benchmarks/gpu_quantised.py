"""What frozen linears in fewer bits cost, group by group of a decoder layer, beside those in full.

    python benchmarks/gpu_quantised.py --json benchmarks/results/h200_quantised.jsonl

First a check on this device: the kernels' bits against their definitions, products of FP8 against
float64, a twin with the scales of other rows refused, and rows that keep their bits whatever the
rows behind them are. Then times: Y and dX of each group in bfloat16, with weights unpacked from NF4
for the product, and in FP8; by themselves the parts of these (unpacking, quantising X and dY, the
products, turning a weight), each beside the bytes that it has to move at the speed at which this
device copies. `layer` adds up the groups. The adapters' kernels are not in here.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from figures import Figures, figures, options
from layer_shapes import SHAPES

from tlora.kernels.quantised import dense, devices, fp8, quantise
from tlora.kernels.quantised.proving import prove
from tlora.runtime.benchmark.machine import copy_bytes_per_s, now, replayed

DTYPE = torch.bfloat16
INNER = 8
"""Calls in a sample: the clock settles, and the host's share is small."""

OF_BOTH_SIDES = 6e-2
"""Of the norm; random values rounded to FP8 on both sides are 3.7e-2 off."""


@dataclass
class Group:
    """Weights of one input, in full and quantised, and what goes in."""

    into: int
    outs: tuple[int, ...]
    tokens: int
    device: torch.device

    def __post_init__(self) -> None:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=self.device).to(DTYPE)

        self.x = normal(self.tokens, self.into)
        self.dy = [normal(self.tokens, out) for out in self.outs]
        self.full = [normal(out, self.into) * self.into**-0.5 for out in self.outs]
        self.nf4 = [quantise(weight, "nf4") for weight in self.full]
        self.fp8 = [quantise(weight, "fp8") for weight in self.full]
        self.values = [each.values for each in self.fp8]
        self.scales = [each.scales for each in self.fp8]
        self.turned = fp8.turned(self.values)

    def unpacked(self) -> list[torch.Tensor]:
        shapes = [(out, self.into) for out in self.outs]
        return [dense(*kept, shape, DTYPE) for kept, shape in zip(self.nf4, shapes, strict=True)]

    def y(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        return [F.linear(self.x, weight) for weight in weights]

    def dx(self, weights: list[torch.Tensor]) -> torch.Tensor:
        found = self.dy[0] @ weights[0]
        for dy, weight in zip(self.dy[1:], weights[1:], strict=True):
            found.addmm_(dy, weight)
        return found

    def y_fp8(self) -> list[torch.Tensor]:
        return fp8.linears(self.x, self.values, self.scales, [None] * len(self.outs))

    def dx_fp8(self) -> torch.Tensor:
        return fp8.input_gradient(self.dy, self.scales, self.turned)

    def steps(self) -> dict[str, tuple[Callable[[], object], int]]:
        """With the bytes that each has to move; a product's are not what it waits for."""
        values, out, tokens = self.into * sum(self.outs), sum(self.outs), self.tokens
        factors = torch.cat(self.scales)
        rows, of_rows = fp8.quantise_rows([self.x])
        gradients, of_gradients = fp8.quantise_rows(self.dy, factors)
        ones = torch.ones(self.into, device=self.device)

        def products(fast: bool = False) -> None:
            for weight, scale in zip(self.values, self.scales, strict=True):
                fp8.product(rows, weight, of_rows, scale, DTYPE, fast_sums=fast)

        def product(fast: bool = False) -> None:
            fp8.product(gradients, self.turned, of_gradients, ones, DTYPE, fast_sums=fast)

        return {
            "y": (lambda: self.y(self.full), 0),
            "y nf4": (lambda: self.y(self.unpacked()), 0),
            "y fp8": (self.y_fp8, 0),
            "dx": (lambda: self.dx(self.full), 0),
            "dx nf4": (lambda: self.dx(self.unpacked()), 0),
            "dx fp8": (self.dx_fp8, 0),
            "unpack": (self.unpacked, values * 41 // 16),
            "quantise x": (lambda: fp8.quantise_rows([self.x]), 3 * tokens * self.into),
            "products y": (products, 0),
            "products y, fast sums": (lambda: products(fast=True), 0),
            "quantise dy": (lambda: fp8.quantise_rows(self.dy, factors), 3 * tokens * out),
            "product dx": (product, 0),
            "product dx, fast sums": (lambda: product(fast=True), 0),
            "turn": (lambda: fp8.turned(self.values), 2 * values),
        }


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def check(group: Group, name: str, found: Figures) -> bool:
    x, full = group.x.double(), [weight.double() for weight in group.full]
    y, dx = group.y_fp8(), group.dx_fp8()
    wanted = [x @ weight.T for weight in full]
    gradient = sum(dy.double() @ weight for dy, weight in zip(group.dy, full, strict=True))
    errors = [*(relative(*pair) for pair in zip(y, wanted, strict=True)), relative(dx, gradient)]
    twin = fp8.input_gradient(group.dy, [each.roll(1) for each in group.scales], group.turned)
    # What comes behind must not be seen, however large it is.
    half = len(group.x) // 2
    loud = group.x.clone()
    loud[half:] *= 1e3
    (first, *_) = fp8.linears(loud, group.values, group.scales, [None] * len(group.outs))
    same = torch.equal(first[:half], y[0][:half])
    # A neighbouring row's scale is off by a few per cent, so that much is seen and no more.
    ok = all(error < OF_BOTH_SIDES for error in errors) and same
    ok = ok and relative(twin, gradient) > 1.2 * errors[-1]
    found.say(f"check {name}: {[round(e, 4) for e in errors]}, rows keep their bits {same}: {ok}")
    return ok


def times(group: Group, rounds: int) -> dict[str, float]:
    """Medians in microseconds; rounds take the steps in turn, every other one backwards."""
    steps = {name: step for name, (step, _) in group.steps().items()}

    def several(step: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            for _ in range(INNER):
                step()

        return replayed(run, group.device)

    runs = {name: several(step) for name, step in steps.items()}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in list(runs)[:: -1 if number % 2 else 1]:
            # Behind its like.
            runs[name]()
            began = now(group.device)
            runs[name]()
            samples[name].append(now(group.device) - began)
    return {name: 1e6 * statistics.median(each) / INNER for name, each in samples.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, seconds=240)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--narrow", type=int, default=1, help="widths divided by this, for a try")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    with figures("quantised", given) as found:
        asked = ("shape", "tokens", "rounds", "narrow")
        found.values["settings"] = {key: getattr(given, key) for key in asked}
        for how in ("nf4", "fp8"):
            prove(device, how)
        found.note(
            "served",
            {
                "kernels": devices.device_serves(device),
                "rounding": devices.device_rounds(device),
                "products": devices.has_products(device),
            },
        )
        speed = copy_bytes_per_s(device)
        found.note("copy_gb_per_s", round(speed / 1e9))
        layer: dict[str, float] = {}
        rows: list[list[object]] = []
        groups: dict[str, dict[str, float]] = {}
        found.values["groups_us"] = groups
        right: dict[str, bool] = {}
        found.values["right"] = right
        for name, (into, outs) in SHAPES[given.shape].items():
            widths = tuple(out // given.narrow for out in outs)
            group = Group(into // given.narrow, widths, given.tokens, device)
            right[name] = check(group, name, found)
            taken = times(group, given.rounds)
            groups[name] = {step: round(us, 1) for step, us in taken.items()}
            for step, us in taken.items():
                layer[step] = layer.get(step, 0.0) + us
                floor = group.steps()[step][1] / speed * 1e6
                rows.append([name, step, us, floor if floor else ""])
            found.say(f"{name} is measured")
        rows += [["layer", step, us, ""] for step, us in layer.items()]
        found.table(["group", "what", "us", "floor us"], rows)
        full = layer["y"] + layer["dx"]
        found.note("layer_us", {step: round(us, 1) for step, us in layer.items()})
        for how in ("nf4", "fp8"):
            share = (layer[f"y {how}"] + layer[f"dx {how}"]) / full
            found.note(f"{how}_over_full", round(share, 4))
        found.note("all_right", all(right.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
