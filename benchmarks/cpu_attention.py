"""Packed attention on a CPU in float32: in C (native.py), and by torch's attention of sequences of
one length (packed.py).

    python benchmarks/cpu_attention.py [--threads 1] [--json FILE]

Times are the quickest of many, of both ways in turn, forward and backward apart; results are
compared with scores in double precision before anything is timed.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from cpu_adapters import quickest
from figures import Figures, figures, options

from tlora.kernels.attention.layout import attention_layout
from tlora.kernels.attention.native import is_compiled, native_attention
from tlora.kernels.attention.packed import packed_attention
from tlora.runtime.benchmark.settings import read_lengths

MIXED = tuple(read_lengths(str(Path(__file__).parent / "lengths" / "mixed_14.txt")))
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    heads: int
    key_heads: int
    size: int
    lengths: tuple[int, ...]
    window: int | None = None


CASES = {
    "demo, 36 of 12 to 82": Case(4, 2, 32, tuple(12 + 2 * i for i in range(36))),
    "135M, 14 of 40 to 746": Case(9, 3, 64, MIXED),
    "135M, 1 of 2,048": Case(9, 3, 64, (2048,)),
    "135M, the same, windows of 256": Case(9, 3, 64, (2048,), 256),
    "heads of 8B, 4 of 256": Case(32, 8, 128, (256,) * 4),
    "heads of 8, 16 of 20": Case(8, 4, 8, (20,) * 16),
    "heads of 24, 1 of 512": Case(8, 8, 24, (512,)),
    "heads of 64, 512 of 1": Case(8, 8, 64, (1,) * 512),
}


class Attention:
    """One case's tensors, in the way of its name."""

    def __init__(self, case: Case, way: str, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)
        tokens = sum(case.lengths)
        heads = (case.heads, case.key_heads, case.key_heads, case.heads)
        *qkv, self.dy = (
            torch.randn(tokens, each, case.size, generator=generator).to(dtype) for each in heads
        )
        self.qkv = [each.requires_grad_() for each in qkv]
        self._options = {"scale": case.size**-0.5, "window": case.window}
        starts = torch.tensor((0, *case.lengths)).cumsum(0, dtype=torch.int32)
        layout = attention_layout(list(case.lengths), tokens, case.heads * case.size)
        ways = {"C": (native_attention, starts), "torch": (packed_attention, layout)}
        self._way, self._where = ways[way]
        self.y = self.forward()

    def forward(self) -> torch.Tensor:
        return self._way(*self.qkv, self._where, **self._options)

    def backward(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.y, self.qkv, self.dy, retain_graph=True)


def error(found: Attention, right: Attention) -> float:
    """The largest of Y's and the gradients'. Where only one key is seen those of queries and keys
    are zeros, and count by dY."""
    pairs = zip((found.y, *found.backward()), (right.y, *right.backward()), strict=True)
    least = right.dy.norm()
    return max(((one - other).norm() / max(other.norm(), least)).item() for one, other in pairs)


def measure(case: Case, rounds: int) -> dict[str, object]:
    right = Attention(case, "torch", torch.float64)
    found = {way: Attention(case, way) for way in ("C", "torch") if way == "torch" or is_compiled()}
    errors = {way: error(each, right) for way, each in found.items()}
    ways: dict[str, Callable[[], object]] = {}
    for way, each in found.items():
        ways |= {f"{way} forward": each.forward, f"{way} backward": each.backward}
    ms = quickest(ways, rounds)
    both = {way: round(ms[f"{way} forward"] + ms[f"{way} backward"], 4) for way in found}
    return {"errors": errors, "right": max(errors.values()) < TOLERANCE, "ms": ms, "both_ms": both}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, seconds=120)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args(arguments)
    given.device = "cpu"
    torch.set_num_threads(given.threads)
    with figures("cpu_attention", given) as found:
        run(found, given.rounds)


def run(found: Figures, rounds: int) -> None:
    found.values["settings"] = {"threads": torch.get_num_threads(), "rounds": rounds}
    cases: dict[str, object] = {}
    found.values["cases"] = cases
    rows = []
    for name, case in CASES.items():
        cases[name] = each = measure(case, rounds)
        both = each["both_ms"]
        rows.append([name, *(both.get(way, "-") for way in ("C", "torch")), each["right"]])
    found.table(["ms, both ways", "C", "torch", "right"], rows)


if __name__ == "__main__":
    main(sys.argv[1:])
