"""Settings that `gpu_lora_kernels.py` times beside those of the product."""

from dataclasses import dataclass, replace

from tlora.kernels.multi_lora import settings
from tlora.kernels.multi_lora.blocks import Tiles
from tlora.kernels.multi_lora.settings import Tuning


@dataclass(frozen=True)
class Candidate:
    """A setting by name."""

    name: str
    tuning: Tuning
    chunk: int = 0
    """Tokens of a chunk (`reduce`) or of an item (`expand`); 0: as settings.py says."""

    stack: int = 0
    """Rank rows of the gradient of A that a program holds."""

    block: int = 0
    """Tokens of a block of `shrink`."""

    core: bool = False
    """Timed for every model; the rest for the first only."""

    def tiles(self, num_tokens: int) -> Tiles:
        tiles = Tiles.for_tokens(num_tokens)
        if self.chunk:
            tiles = replace(tiles, chunk_tokens=self.chunk, expand_tokens=self.chunk)
        if self.block:
            tiles = replace(tiles, shrink_tokens=self.block)
        return replace(tiles, stack_rank=self.stack) if self.stack else tiles


def _tuned(tokens, features, warps, stages, programs, **more) -> Tuning:
    return Tuning(
        tokens=tokens, features=features, warps=warps, stages=stages, programs=programs, **more
    )


def _usual(kernel: str, linears: int) -> Candidate:
    shape = settings.Shape(num_tokens=8192, max_rank=64, width=64 * linears)
    return Candidate("usual *", settings.tuning(kernel, shape), core=True)


def candidates(kernel: str, num_tokens: int, linears: int) -> list[Candidate]:
    """For a group of so many linears, first what settings.py says, marked by a star. wN: warps, sN:
    stages, pN: programs per multiprocessor, rN: most registers. `turned<64`: rank tiles below 64 as
    [features, rank rows]; `read`: the program adds to the gradient, not the memory."""
    c, t = Candidate, _tuned
    # The usual chunk is a job's tokens where jobs are as long as here.
    other = 256 if num_tokens <= 2048 else 512
    expand = settings.expand_tokens(num_tokens)
    few = {"turned": 64, "registers": 128}
    sent = {"turned": 64, "sent": True, "snake": True}
    lists = {
        "reduce_b": [
            c("sent s4", t(64, 256, 8, 4, 1, **sent), core=True),
            c("sent reload in turn", t(64, 256, 8, 3, 1, turned=64, sent=True, reload=True)),
            c("sent reload turned", t(64, 256, 8, 3, 1, **sent | {"turned": 128}, reload=True)),
            c("read reload", t(64, 256, 8, 3, 1, turned=64, reload=True, snake=True)),
            c("read s4", t(64, 256, 8, 4, 1, turned=64), core=True),
            c("one program per item", t(128, 256, 8, 2, 0), core=True),
            c("128x256 w8 s2 p1", t(128, 256, 8, 2, 1), core=True),
            c("128x256 w8 s2 p1 turned<64", t(128, 256, 8, 2, 1, turned=64), core=True),
            c("128x256 w8 s2 p1 turned", t(128, 256, 8, 2, 1, turned=128)),
            c("64x256 w8 s3 p1 turned<64", t(64, 256, 8, 3, 1, turned=64), core=True),
            c("64x256 w16 s3 p1 turned<64", t(64, 256, 16, 3, 1, turned=64)),
            c("32x256 w8 s3 p2 turned", t(32, 256, 8, 3, 2, turned=128, registers=128)),
            c("32x256 w8 s3 p1 turned<64", t(32, 256, 8, 3, 1, turned=64)),
            c("64x128 w8 s3 p2 turned<64", t(64, 128, 8, 3, 2, **few), core=True),
            c("64x128 w4 s3 p2 turned<64", t(64, 128, 4, 3, 2, turned=64), core=True),
            c("64x128 w4 s3 p2", t(64, 128, 4, 3, 2)),
            c("128x128 w8 s2 p1 turned<64", t(128, 128, 8, 2, 1, turned=64)),
            c("128x256 w8 s2 p1 turned<64, chunk", t(128, 256, 8, 2, 1, turned=64), other),
            c("64x128 w8 s3 p2 turned<64, chunk", t(64, 128, 8, 3, 2, **few), other, core=True),
        ],
        "sum": [
            c("one program per item", t(32, 0, 4, 3, 0), core=True),
            c("16 w4 p8", t(16, 0, 4, 3, 8), core=True),
            c("8 w2 p16", t(8, 0, 2, 3, 16)),
        ],
        "reduce_a": [
            c("sent in turn", t(64, 64, 4, 3, 4, **few, sent=True)),
            c("sent 64x128 w4 s3 p3", t(64, 128, 4, 3, 3, **sent, registers=168), core=True),
            c("one program per item", t(64, 64, 4, 3, 0, registers=128), core=True),
            c("64x64 w4 s3 p4", t(64, 64, 4, 3, 4, registers=128), core=True),
            c("64x64 w4 s3 p4 turned<64", t(64, 64, 4, 3, 4, **few), core=True),
            c("64x64 w4 s3 p4 turned", t(64, 64, 4, 3, 4, turned=128)),
            c("64x128 w4 s3 p3 turned<64", t(64, 128, 4, 3, 3, turned=64, registers=168)),
            c("64x128 w8 s3 p2 turned<64", t(64, 128, 8, 3, 2, **few), core=True),
            c("128x128 w8 s2 p2 turned<64", t(128, 128, 8, 2, 2, **few), core=True),
            c("64x256 w8 s3 p1 turned<64", t(64, 256, 8, 3, 1, turned=64)),
            c("64x64 w4 s3 p3 stack 128", t(64, 64, 4, 3, 3, turned=256, registers=168), 0, 128),
            c("64x128 w8 s3 p2 stack 128", t(64, 128, 8, 3, 2, **few), 0, 128, core=True),
            c("64x64 w4 s3 p4 turned<64, chunk", t(64, 64, 4, 3, 4, **few), other),
            c("64x128 w8 s3 p2 turned<64, chunk", t(64, 128, 8, 3, 2, **few), other, core=True),
        ],
        "expand_y": [
            c("64x128 w4 s2 p8", t(64, 128, 4, 2, 8), core=True),
            c("64x128 w4 s3 p8", t(64, 128, 4, 3, 8), core=True),
            c("64x128 w4 s2 p4", t(64, 128, 4, 2, 4)),
            c("64x128 w4 s2 p4, items of 512", t(64, 128, 4, 2, 4), 512, core=True),
            c("64x128 w4 s2 p8, items halved", t(64, 128, 4, 2, 8), expand // 2),
            c("64x256 w8 s2 p2", t(64, 256, 8, 2, 2, registers=128), core=True),
            c("64x256 w8 s2 p4, items of 512", t(64, 256, 8, 2, 4, registers=128), 512),
            c("128x128 w8 s2 p2", t(128, 128, 8, 2, 2, registers=128), core=True),
            c("64x64 w4 s3 p8", t(64, 64, 4, 3, 8)),
        ],
        "expand_dx": [
            c("64x128 w4 s2 p8", t(64, 128, 4, 2, 8), core=True),
            c("64x128 w4 s3 p8", t(64, 128, 4, 3, 8), core=True),
            c("64x128 w4 s2 p4", t(64, 128, 4, 2, 4)),
            c("64x128 w4 s2 p4, items of 512", t(64, 128, 4, 2, 4), 512, core=True),
            c("64x128 w4 s2 p8, items halved", t(64, 128, 4, 2, 8), expand // 2),
            c("64x64 w4 s2 p8", t(64, 64, 4, 2, 8), core=True),
            c("128x128 w8 s2 p2", t(128, 128, 8, 2, 2, registers=128)),
        ],
        "shrink": [
            c("128x128 w8 s3 p1", t(128, 128, 8, 3, 1), block=128, core=True),
            c("128x128 w8 s3 p1, more parts", t(128, 128, 8, 3, 1, parts=264), block=128),
            c("128x64 w8 s3 p2", t(128, 64, 8, 3, 2, registers=128), block=128, core=True),
            c("64x64 w4 s3 p3", t(64, 64, 4, 3, 3, parts=264, registers=168), core=True),
            c("64x64 w4 s3 p2", t(64, 64, 4, 3, 2, parts=264)),
            c("64x64 w4 s4 p2", t(64, 64, 4, 4, 2, parts=264), core=True),
            c("64x64 w4 s4 p3", t(64, 64, 4, 4, 3, parts=264), core=True),
            c("64x128 w4 s3 p2", t(64, 128, 4, 3, 2, parts=264)),
            c("64x128 w4 s3 p1", t(64, 128, 4, 3, 1, parts=264)),
        ],
    }
    name = "shrink" if kernel == "shrink_x" else kernel
    found: dict[tuple, Candidate] = {}
    for one in [_usual(name, linears), *lists[name]]:
        found.setdefault((one.tuning, one.chunk, one.stack, one.block), one)
    return list(found.values())
