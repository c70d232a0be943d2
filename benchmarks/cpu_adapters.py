"""The adapters of a group of linears on a CPU: in C (native.py), by products of torch (cpu.py), and
beside the frozen products, by MKL and as the engine takes them.

    python benchmarks/cpu_adapters.py [--threads 1] [--dropout 0.1] [--json FILE]

Eight jobs of rank 4 to 32 share the tokens. Times are the quickest of many, of both ways in turn,
forward and backward apart; results are compared with the reference before anything is timed.
"""

import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from figures import Figures, figures, options

from tlora.kernels import host_products, streams
from tlora.kernels.multi_lora import cpu, native, reference
from tlora.kernels.multi_lora.routes import Route, table_route
from tlora.kernels.multi_lora.tables import Segment, new_table, write_table

GROUPS = {
    "demo qkv": (128, (128, 64, 64)),
    "demo o": (128, (128,)),
    "demo gate, up": (128, (256, 256)),
    "demo down": (256, (128,)),
    "135M qkv": (576, (576, 192, 192)),
    "135M down": (1536, (576,)),
}
RANKS = (4, 8, 16, 32)
JOBS = 8
TOLERANCE = 1e-5


class Group:
    def __init__(self, into: int, outs: Sequence[int], tokens: int, dropout: float) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.segments, a_row, b_row = [], 0, 0
        for j in range(JOBS):
            rank = RANKS[j % len(RANKS)]
            edges = (j * tokens // JOBS, (j + 1) * tokens // JOBS)
            ranks, b_rows = (rank,) * len(outs), (b_row,) * len(outs)
            threshold = streams.threshold(dropout)
            self.segments.append(Segment(*edges, a_row, ranks, b_rows, 2.0, threshold, key=j))
            a_row, b_row = a_row + rank * len(outs), b_row + rank
        self.x = random(tokens, into)
        self.dy = [random(tokens, out) for out in outs]
        self.weights = [random(out, into) * into**-0.5 for out in outs]
        self.a = random(a_row, into) * into**-0.5
        self.b = [random(b_row, out) for out in outs]
        self.rows = torch.arange(tokens, dtype=torch.int32)
        self.linears = torch.arange(len(outs))
        table, scales = new_table(JOBS, len(outs)), torch.zeros(JOBS)
        write_table(self.segments, table, scales)
        self.route: Route = table_route(table, scales, len(outs) * max(RANKS))
        self.y = [torch.zeros(tokens, out) for out in outs]
        self.dx = torch.zeros_like(self.x)
        self.grads = [torch.zeros_like(each) for each in (self.a, *self.b)]
        self.s = torch.zeros(tokens, self.route.s_like.shape[1])

    def forward(self, kernels) -> None:
        where = (self.a, self.b, self.route, self.rows, self.linears)
        kernels.add_forward(self.y, self.s, self.x, *where)

    def backward(self, kernels) -> None:
        grad_a, *grad_b = self.grads
        where = (grad_a, grad_b, self.route, self.rows, self.linears)
        kernels.add_backward(self.dx, self.x, self.dy, self.s, self.a, self.b, *where)

    def error(self, kernels) -> float:
        """Against the reference in double precision; results were zeros."""
        found = [*self.y, self.dx, *self.grads]
        for each in found:
            each.zero_()
        self.forward(kernels)
        self.backward(kernels)
        x, a, *b = (each.double() for each in (self.x, self.a, *self.b))
        where = (self.segments, self.rows, self.linears.tolist())
        grads = reference.backward(x, [each.double() for each in self.dy], a, b, *where)
        right = [*reference.forward(x, a, b, *where), grads.x, grads.a, *grads.b]
        pairs = zip(found, right, strict=True)
        return max(((one - other).norm() / other.norm()).item() for one, other in pairs)

    def products(self) -> list[torch.Tensor]:
        return [host_products.linear(self.x, weight, None) for weight in self.weights]

    def mkl_products(self) -> list[torch.Tensor]:
        return [F.linear(self.x, weight) for weight in self.weights]

    def mkl_gradient(self) -> torch.Tensor:
        dx = self.dy[0] @ self.weights[0]
        for dy_l, weight in zip(self.dy[1:], self.weights[1:], strict=True):
            dx.addmm_(dy_l, weight)
        return dx


def quickest(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds, in turn."""
    found = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            found[name] = min(found[name], time.perf_counter() - started)
    return {name: round(1e3 * best, 4) for name, best in found.items()}


def measure(group: Group, rounds: int) -> dict[str, object]:
    compiled = native.serving(group.x, group.a)
    kernels = {"plain": cpu} | ({"native": compiled} if compiled else {})
    errors = {name: group.error(each) for name, each in kernels.items()}
    ways: dict[str, Callable[[], object]] = {}
    for name, each in kernels.items():
        ways[f"{name} forward"] = lambda each=each: group.forward(each)
        # S as this way has made it.
        ways[f"{name} backward"] = lambda each=each: group.backward(each)
    ways |= {
        "frozen forward": group.products,
        "frozen backward": lambda: host_products.input_gradient(group.dy, group.weights),
        "MKL forward": group.mkl_products,
        "MKL backward": group.mkl_gradient,
    }
    ms = quickest(ways, rounds)
    both = {
        name: round(ms[f"{name} forward"] + ms[f"{name} backward"], 4)
        for name in (*kernels, "frozen", "MKL")
    }
    return {"errors": errors, "right": max(errors.values()) < TOLERANCE, "ms": ms, "both_ms": both}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, seconds=120)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1172)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=100)
    given = parser.parse_args(arguments)
    given.device = "cpu"
    torch.set_num_threads(given.threads)
    with figures("cpu_adapters", given) as found:
        run(found, given.tokens, given.dropout, given.rounds)


def run(found: Figures, tokens: int, dropout: float, rounds: int) -> None:
    found.values["settings"] = {
        "tokens": tokens, "dropout": dropout, "jobs": JOBS, "ranks": RANKS,
        "threads": torch.get_num_threads(), "rounds": rounds,
    }  # fmt: skip
    groups: dict[str, object] = {}
    found.values["groups"] = groups
    rows = []
    for name, (into, outs) in GROUPS.items():
        with torch.no_grad():
            groups[name] = each = measure(Group(into, outs, tokens, dropout), rounds)
        both = each["both_ms"]
        rows.append([name, *(both.get(way, "-") for way in ("native", "plain", "frozen", "MKL"))])
        rows[-1].append(each["right"])
    found.table(["ms, both ways", "C", "torch", "frozen", "frozen, MKL", "right"], rows)


if __name__ == "__main__":
    main(sys.argv[1:])
