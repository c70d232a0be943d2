"""How the kernels are cut and compiled, by shape and device: one function answers for each kernel.

What measured best is one line of a table. A device with less shared memory than that line needs
gets the nearest smaller tiles that fit it. Nothing here depends on the jobs of a nano-batch: bits
must not. Warps, stages, programs and how these share a list change no bit; tuner.py may choose the
first three otherwise.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tlora.kernels.multi_lora.pages import BLOCK, Ways


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How one kernel is compiled: tile sizes, warps, depth of the load pipeline."""

    tokens: int
    features: int
    warps: int = 4
    stages: int = 3
    registers: int = 0
    """Most registers per thread; 0: the compiler's choice."""

    programs: int = 0
    """Programs per multiprocessor, each of which takes every n-th item of the list. 0: one program
    per item that the list has room for, most of which find nothing to do."""

    parts: int = 132
    """`shrink`: programs that a small bucket is cut into along the features. A number, not the
    device's: bits depend on it."""

    turned: int = 0
    """`reduce`: rank tiles below this are computed as [features, rank rows], which fills the tensor
    cores' 64 rows with features."""

    sent: bool = False
    """`reduce`: a sum is sent to the memory, which adds it; the gradient is not read at all."""

    reload: bool = False
    """`reduce_b`: the tile of B is loaded with every block of tokens, ahead like them, and not
    before the first, which would wait for it."""

    snake: bool = False
    """`reduce`: programs take items from the other end of the list in every other round."""

    @property
    def limits(self) -> dict[str, int]:
        return {"maxnreg": self.registers} if self.registers else {}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a choice may depend on."""

    num_tokens: int
    max_rank: int
    """Largest rank of a job in one linear."""

    width: int
    """Columns of S: the ranks of all linears of the group."""

    itemsize: int = 2
    """Bytes of an activation."""

    pool_itemsize: int = 2
    """Bytes of a value of A or B."""

    dropout: bool = False
    """Whether jobs may have it and the kernel has to do with it."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """What of a device decides whether a kernel can start."""

    shared_bytes: int
    """Shared memory that one program may ask for."""

    capability: int
    """Compute capability: 75, 80, 90 ..."""


MEASURED = Device(shared_bytes=232_448, capability=90)
"""What the table below was measured on; every line of it fits."""


# Tiles: measured on one H200, 8B shapes, 8,192 tokens (tried.md has the alternatives and their
# times); `programs` and `turned`: what the compiled registers and shared memory allow, or more.
# benchmarks/gpu_lora_kernels.py times them all.
TUNINGS: dict[str, Tuning] = {
    "shrink": Tuning(tokens=128, features=64, warps=8, stages=3, programs=2, parts=264),
    "shrink deep": Tuning(
        tokens=64, features=64, warps=4, stages=4, registers=168, programs=3, parts=264
    ),
    "shrink wide": Tuning(
        tokens=64, features=64, warps=4, stages=3, registers=168, programs=3, parts=264
    ),
    # Tiles of four bytes a value would not fit the shared memory otherwise.
    "shrink float32": Tuning(tokens=128, features=32, warps=8, stages=2, programs=2, parts=264),
    "expand_y": Tuning(tokens=64, features=128, warps=4, stages=3, registers=128, programs=4),
    "expand_dx": Tuning(tokens=64, features=128, warps=4, stages=2, registers=128, programs=4),
    "expand_dx stacked": Tuning(
        tokens=64, features=128, warps=4, stages=1, registers=128, programs=4
    ),
    # At 128 registers the masks spill 4.7 KB (sm_90, rank 64).
    "expand_dx dropout": Tuning(tokens=64, features=128, warps=4, stages=2, programs=8),
    # Without tensor cores a product is written out: larger tiles take half a minute to compile.
    "expand float32": Tuning(tokens=32, features=64, warps=4, stages=2, programs=8),
    "reduce_a small": Tuning(tokens=64, features=128, warps=4, stages=3, programs=3),
    "reduce_a large": Tuning(
        tokens=64,
        features=128,
        warps=4,
        stages=3,
        registers=168,
        programs=3,
        turned=64,
        sent=True,
        snake=True,
    ),
    "reduce_a dropout": Tuning(
        tokens=64, features=64, warps=4, stages=3, registers=128, programs=4
    ),
    "reduce_b small": Tuning(tokens=64, features=256, warps=4, stages=3, programs=2, turned=64),
    "reduce_b large": Tuning(
        tokens=64,
        features=256,
        warps=8,
        stages=3,
        programs=1,
        turned=64,
        sent=True,
        reload=True,
        snake=True,
    ),
    # A tile of B in four bytes a value would not fit every stage.
    "reduce_b cast": Tuning(
        tokens=64, features=256, warps=8, stages=4, programs=1, turned=64, sent=True, snake=True
    ),
    "reduce_b float32": Tuning(
        tokens=64, features=128, warps=8, stages=2, registers=255, programs=1
    ),
    "sum": Tuning(tokens=8, features=0, programs=16),
}


PRODUCT = Tuning(tokens=BLOCK, features=256, warps=8, stages=3, programs=1)
"""Of a frozen product with the update inside (triton_product.py)."""

LAY = Tuning(tokens=32, features=128, warps=4, programs=4)
"""Of what such a product of Y reads (triton_pages.py): S and B turned."""

INSIDE_TOKENS = 8192
"""Of a nano-batch whose products take the update inside: smaller ones were not compared."""


def inside_ways(
    in_features: int, out_features: tuple[int, ...], device: Device, *, every: bool = False
) -> Ways:
    """Where the update costs less inside of a group's products than in a kernel that writes Y or
    dX (README.md has the times), or `every` way that it may go. Of Y it costs as much with 32 jobs,
    whose pages are more. The product relies on what Hopper has."""
    rows_are_aligned = all(features % 8 == 0 for features in (in_features, *out_features))
    if device.capability != 90 or not rows_are_aligned:
        return ()
    if every:
        return ("forward", "backward")
    return ("backward",) if sum(out_features) <= 2 * in_features else ()


LEAST_FEATURES = 32
"""Of a tile: the counters of unfinished sums have room for no more tiles (blocks.py)."""


def tuning(kernel: str, shape: Shape, device: Device = MEASURED) -> Tuning:
    """The settings of one of shrink, expand_y, expand_dx, reduce_a, reduce_b, sum."""
    best = TUNINGS[case_of(kernel, shape, device)]
    if not _reads_shared(device.capability):
        best = _held_in_registers(best)
    if kernel == "sum":
        return best  # It has no shared memory to run out of.
    last = best
    for last in _smaller(kernel, best):
        if shared_bytes(kernel, shape, last, device.capability) <= device.shared_bytes:
            break
    return last


def _held_in_registers(best: Tuning) -> Tuning:
    """For devices whose products take operands from registers: B would come through them with every
    block. Sums are not sent either, which before Hopper goes one value at a time."""
    return replace(best, sent=False, reload=False) if best.sent or best.reload else best


def _smaller(kernel: str, best: Tuning) -> Iterator[Tuning]:
    """`best` and then less and less: stages first, then features, then tokens."""
    # Blocks of `shrink` have the tokens that the work list says.
    tokens = [best.tokens] if kernel == "shrink" else _halves(best.tokens, 16)
    for t, f in itertools.product(tokens, _halves(best.features, LEAST_FEATURES)):
        for stages in range(best.stages, min(best.stages, 2) - 1, -1):
            # The line itself where it fits, not a copy.
            smaller = replace(best, tokens=t, features=f, stages=stages)
            yield best if smaller == best else smaller


def _halves(size: int, least: int) -> list[int]:
    return [size >> i for i in range(size.bit_length()) if size >> i >= least]


def _reads_shared(capability: int) -> bool:
    """Whether products in half precision read shared memory themselves: Hopper and server
    Blackwell."""
    return 90 <= capability < 120


def case_of(kernel: str, shape: Shape, device: Device = MEASURED) -> str:
    """The line of the table."""
    size = "large" if shape.max_rank > 16 else "small"
    wide = shape.itemsize == 4
    match kernel:
        case "shrink":
            # The deep tile of a wide adapter fits the shared memory in half precision only.
            deep = not shape.dropout and (shape.pool_itemsize == 2 or shape.width <= 64)
            if wide:
                return "shrink float32"
            if not deep:
                return "shrink"
            # Tiles of 128 rank rows: three programs fit with three stages only.
            return "shrink wide" if shape.width > SHRINK_RANK else "shrink deep"
        case "reduce_a":
            return "reduce_a dropout" if shape.dropout else f"reduce_a {size}"
        case "reduce_b" if not wide and size == "large" and shape.pool_itemsize == 4:
            return "reduce_b cast"
        case "reduce_b":
            return "reduce_b float32" if wide else f"reduce_b {size}"
        case "expand_y" | "expand_dx" if wide:
            return "expand float32"
        case "expand_dx" if shape.dropout:
            return "expand_dx dropout"
        case "expand_dx" if _holds_several(shape) and _reads_shared(device.capability):
            # Without loads ahead four programs fit.
            return "expand_dx stacked"
        case _:
            return kernel


def _holds_several(shape: Shape) -> bool:
    """Whether a program of dX holds pieces of several linears."""
    stacked = shape.width > -(-shape.max_rank // 8) * 8
    return stacked and shape.max_rank <= CHUNK_RANK


def shared_bytes(kernel: str, shape: Shape, tuning: Tuning, capability: int) -> int:
    """Shared memory that a program takes at most: what Triton lays there of the tiles of the widest
    adapter. The compiler is asked in tests/kernels/multi_lora/test_shared_memory.py."""
    depth = _buffers(shape, tuning, capability)
    match kernel:
        case "shrink":
            found = _shrink_bytes(shape, tuning, depth, capability)
        case "expand_y" | "expand_dx":
            found = _expand_bytes(kernel, shape, tuning, depth, capability)
        case "reduce_a" | "reduce_b":
            found = _reduce_bytes(kernel, shape, tuning, depth, capability)
        case _:
            return 0
    return found + (BARRIER_BYTES if capability >= 100 else 0)


BARRIER_BYTES = 64


def _buffers(shape: Shape, tuning: Tuning, capability: int) -> int:
    """Tiles of one operand that lie there at once. Products that read shared memory themselves keep
    theirs while the next are on their way; before Ampere nothing loads ahead."""
    if capability < 80:
        return 1
    keeps = shape.itemsize == 2 and _reads_shared(capability)
    return tuning.stages if keeps else max(1, tuning.stages - 1)


def _lies_twice(shape: Shape, capability: int) -> bool:
    """Before Ampere an operand in half precision goes through there in two orders."""
    return capability < 80 and shape.itemsize == 2


def _rank_tile(rank: int, most: int) -> int:
    return max(16, 1 << (min(rank, most) - 1).bit_length())


def _shrink_bytes(shape: Shape, tuning: Tuning, depth: int, capability: int) -> int:
    rank = _rank_tile(shape.width, SHRINK_RANK)
    x = tuning.tokens * tuning.features * shape.itemsize
    w = rank * tuning.features * shape.pool_itemsize
    # What is masked or cast in registers goes back for the product; in float32 the loops with and
    # without a mask have tiles of their own.
    masked = x if shape.itemsize == 2 else depth * (x + w)
    again = masked if shape.dropout else 0
    if shape.pool_itemsize != shape.itemsize:
        again += rank * tuning.features * shape.itemsize
    most = depth * (x + w) + again
    if _lies_twice(shape, capability):
        most = max(most, 2 * x, 2 * w)
    # Or the float32 sums, which change places between threads before they are stored.
    return max(most, tuning.tokens * rank * 4)


def _expand_bytes(kernel: str, shape: Shape, tuning: Tuning, depth: int, capability: int) -> int:
    stacked = kernel == "expand_dx"
    rank = _rank_tile(shape.width if stacked else shape.max_rank, CHUNK_RANK)
    s = tuning.tokens * rank * shape.itemsize
    w = rank * tuning.features * shape.itemsize
    if shape.max_rank > CHUNK_RANK:
        # Rows of A or B are loaded with those of S, block by block.
        cast = w if shape.pool_itemsize != shape.itemsize else 0
        loaded = rank * tuning.features * shape.pool_itemsize
        most = max(depth * (s + loaded) + cast, w + depth * s)
    else:
        pieces = max(1, shape.width // (-(-shape.max_rank // 8) * 8)) if stacked else 1
        w *= pieces
        most = w + pieces * depth * s
        if tuning.stages == 1 and capability >= 80:
            # Nothing is loaded ahead: S of a piece takes the place of the one before it, and Y that
            # of S.
            return w + max(s, tuning.warps * 2048)
    if _lies_twice(shape, capability):
        most = max(most, 2 * (w + s))
    return most + tuning.warps * 2048  # Y on its way to be stored.


def _reduce_bytes(kernel: str, shape: Shape, tuning: Tuning, depth: int, capability: int) -> int:
    fused = kernel == "reduce_b"
    rank = _rank_tile(shape.max_rank, CHUNK_RANK) if fused else _rank_tile(shape.width, STACK_RANK)
    p = tuning.tokens * rank * shape.itemsize
    q = tuning.tokens * tuning.features * shape.itemsize
    w = rank * tuning.features * shape.itemsize
    most = depth * (p + q)
    if fused:
        # B, and the part of dS before it is stored.
        most += (depth * w if tuning.reload else w) + p
    elif shape.dropout:
        # What is masked goes back for the product; the rows' numbers are loaded ahead too.
        most += q + depth * tuning.tokens * 4
    if _lies_twice(shape, capability):
        most = max(most, 2 * (max(p, q) + (w if fused else 0)))
    # Or the gradient, which changes places between threads before it is stored.
    return max(most, rank * tuning.features * 4 + (p if fused else 0))


SHRINK_RANK = 128
"""Rank rows of a block of S; wider adapters read their input again."""

CHUNK_RANK = 64
"""Rank rows held by a program that walks tokens."""

STACK_RANK = 64
"""Rank rows of all linears that one program holds of the gradient of A."""


def shrink_tokens(dropout: bool) -> int:
    """Of a block of S. Small ones fit short jobs better; dropout was measured with large ones."""
    return 128 if dropout else 64


def chunk_tokens(num_tokens: int) -> int:
    """Tokens that one program of the gradients walks, so that a small bucket fills the device."""
    return min(1024, max(256, num_tokens // 4))


def expand_tokens(num_tokens: int) -> int:
    return 256 if num_tokens >= 8192 else 128
