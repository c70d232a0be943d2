"""How the kernels are cut and compiled, by shape: one function answers for each kernel.

Nothing here depends on the jobs of a nano-batch: bits must not. What measured best is one line of a
table; a tuner with a cache on disk would answer in `tuning`'s place.
"""

from dataclasses import dataclass


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


# Tiles: measured on one H200, 8B shapes, 8,192 tokens (README.md has the alternatives and their
# times); `programs` and `turned`: what the compiled registers and shared memory allow.
# benchmarks/gpu_lora_kernels.py times them all.
TUNINGS: dict[str, Tuning] = {
    "shrink": Tuning(tokens=128, features=64, warps=8, stages=3, programs=2, parts=264),
    "shrink deep": Tuning(tokens=128, features=128, warps=8, stages=3, programs=1),
    # Tiles of four bytes a value would not fit the shared memory otherwise.
    "shrink float32": Tuning(tokens=128, features=32, warps=8, stages=2, programs=2, parts=264),
    "expand_y": Tuning(tokens=64, features=128, warps=4, stages=3, programs=8),
    "expand_dx": Tuning(tokens=64, features=128, warps=4, stages=2, programs=8),
    "reduce_a small": Tuning(tokens=64, features=128, warps=4, stages=3, programs=3),
    "reduce_a large": Tuning(
        tokens=64, features=64, warps=4, stages=3, registers=128, programs=4, turned=64
    ),
    "reduce_a dropout": Tuning(
        tokens=64, features=64, warps=4, stages=3, registers=128, programs=4
    ),
    "reduce_b small": Tuning(tokens=64, features=256, warps=4, stages=3, programs=2),
    "reduce_b large": Tuning(tokens=64, features=256, warps=8, stages=3, programs=1, turned=64),
    "reduce_b float32": Tuning(
        tokens=64, features=128, warps=8, stages=2, registers=255, programs=1
    ),
    "sum": Tuning(tokens=16, features=0, programs=8),
}


def tuning(kernel: str, shape: Shape) -> Tuning:
    """The settings of one of shrink, expand_y, expand_dx, reduce_a, reduce_b, sum."""
    return TUNINGS[_case(kernel, shape)]


def _case(kernel: str, shape: Shape) -> str:
    size = "large" if shape.max_rank > 16 else "small"
    wide = shape.itemsize == 4
    match kernel:
        case "shrink":
            # The deep tile of a wide adapter fits the shared memory in half precision only.
            deep = not shape.dropout and (shape.pool_itemsize == 2 or shape.width <= 64)
            return "shrink float32" if wide else "shrink deep" if deep else "shrink"
        case "reduce_a":
            return "reduce_a dropout" if shape.dropout else f"reduce_a {size}"
        case "reduce_b":
            return "reduce_b float32" if wide else f"reduce_b {size}"
        case _:
            return kernel


STACK_RANK = 64
"""Rank rows of all linears that one program holds of the gradient of A."""


def chunk_tokens(num_tokens: int) -> int:
    """Tokens that one program of the gradients walks, so that a small bucket fills the device."""
    return min(1024, max(256, num_tokens // 4))


def expand_tokens(num_tokens: int) -> int:
    return 256 if num_tokens >= 8192 else 128
