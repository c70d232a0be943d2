"""How the segments of a nano-batch reach the kernels: as a table in host memory (tables.py), or as
the work lists of the Triton kernels (blocks.py).

Tensors are kept from one nano-batch to the next, so that compiled code and captured graphs see only
their values change.
"""

import functools
import logging
import os
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch

from tlora.kernels.multi_lora import pages, settings
from tlora.kernels.multi_lora.blocks import Blocks, Layout, Tiles
from tlora.kernels.multi_lora.devices import limits
from tlora.kernels.multi_lora.pages import Ways
from tlora.kernels.multi_lora.tables import Segment, new_table, write_table

logger = logging.getLogger(__name__)

MIN_SEGMENTS = 64
MIN_RANK = 64
"""Kernels are compiled for the largest rank there may be: jobs of usual ranks share one."""

MOST_LINEARS = 3
"""Of one group, in the Triton kernels."""

_layouts: list[Layout] = []
_NO_LAYOUT = torch.tensor(-1)


class Route(NamedTuple):
    """What an operator is given: tensors and nothing else, so that code that was compiled with one
    route serves all others of its shapes."""

    table: torch.Tensor
    extra: torch.Tensor
    """The scales of a table's segments; the counters of work lists."""

    layout: torch.Tensor
    """int64, in host memory: which layout the lists have, by `layout_number`."""

    s_like: torch.Tensor
    """[0, columns of S]: only its shape counts."""

    @property
    def is_table(self) -> bool:
        return self.extra.is_floating_point()


class Group(NamedTuple):
    """What is the same for all nano-batches of a group of linears while its jobs stay."""

    in_features: int
    out_features: tuple[int, ...]
    max_rank: int
    dropout: bool
    inside: Ways = ()
    """Which of its products may take the update in their own loop."""


def table_route(table: torch.Tensor, scales: torch.Tensor, s_width: int) -> Route:
    """`s_width`: at least the rank rows of any job over all linears of the group."""
    # In cache lines, so that there is room to begin every segment's S with one.
    return Route(table, scales, _NO_LAYOUT, scales.new_empty(0, max(1, -(-s_width // 16)) * 16))


def blocks_route(blocks: Blocks) -> Route:
    s_like = torch.empty(0, blocks.layout.s_width, device=blocks.table.device)
    number = torch.tensor(layout_number(blocks.layout))
    return Route(blocks.table, blocks.finished, number, s_like)


def layout_number(layout: Layout) -> int:
    """Equal layouts have one number."""
    if layout not in _layouts:
        _layouts.append(layout)
    return _layouts.index(layout)


def blocks_of(route: Route) -> Blocks:
    return Blocks(_layouts[int(route.layout)], route.table, route.extra)


@functools.cache
def triton_serves(device: torch.device) -> bool:
    """On CUDA, or wherever Triton's interpreter was asked for."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (device.type == "cuda" or interpreted) and find_spec("triton") is not None


_refused: set[torch.device] = set()
"""Where the kernels were seen to be wrong (proving.py)."""


def refuse_kernels(device: torch.device) -> None:
    """Plain products serve there from here on."""
    _refused.add(device)


def kernels_serve(device: torch.device, num_linears: int) -> bool:
    """A group of so many linears."""
    return num_linears <= MOST_LINEARS and triton_serves(device) and device not in _refused


def operand_dtype(device: torch.device, weights: torch.dtype, num_linears: int) -> torch.dtype:
    """Of the A and B that a group is given: kernels that cast every tile to half precision read
    half the bytes if it is done before."""
    half = weights in (torch.bfloat16, torch.float16) and device.type == "cuda"
    return weights if half and kernels_serve(device, num_linears) else torch.float32


def update_inside() -> Literal["none", "measured", "all"]:
    """Which products take it: none, those that were measured to gain, or all that can."""
    asked = os.environ.get("TLORA_UPDATE_INSIDE", "")
    if asked not in ("", "0", "all"):
        _say_unknown(asked)
    return "none" if asked == "0" else "all" if asked == "all" else "measured"


@functools.cache
def _say_unknown(asked: str) -> None:
    logger.warning("TLORA_UPDATE_INSIDE=%s is not known and does nothing: 0 and all are", asked)


def inside_ways(
    device: torch.device, operands: torch.dtype, in_features: int, out_features: tuple[int, ...]
) -> Ways:
    """Which products of a group of linears may take the update in their own loop. Rows of other
    jobs meet zeros there, so the pool's copy must hold numbers only."""
    half = operands in (torch.bfloat16, torch.float16)
    asked = update_inside()
    if asked == "none" or not half or not triton_serves(device):
        return ()
    return settings.inside_ways(in_features, out_features, limits(device), every=asked == "all")


class Routes:
    """The routes of pools that share their rows; one per layout that has been needed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._table: Route | None = None
        self._blocks: dict[Layout, tuple[Blocks, Route]] = {}

    def write(self, group: Group, segments: list[Segment], num_tokens: int) -> Route:
        # With no adapter in it a nano-batch is frozen products and nothing else. Where jobs are
        # attached and have no tokens, compiled code stays the one that it was.
        if group.max_rank > 0 and kernels_serve(self.device, len(group.out_features)):
            return self._write_blocks(group, segments, num_tokens)
        return self._write_table(group, segments)

    def _write_table(self, group: Group, segments: list[Segment]) -> Route:
        width = len(group.out_features) * group.max_rank
        known = self._table
        if known is None or len(known.extra) < len(segments) or known.s_like.shape[1] < width:
            capacity = power_of_two(len(segments), MIN_SEGMENTS)
            table, scales = new_table(capacity, len(group.out_features)), torch.zeros(capacity)
            known = self._table = table_route(table, scales, width)
        write_table(segments, known.table, known.extra)
        return known

    def _write_blocks(self, group: Group, segments: list[Segment], num_tokens: int) -> Route:
        inside = _inside(group, num_tokens)
        found = pages.find(segments, num_tokens, inside) if inside else None
        if found and not found.fit:
            # A crowd in a block of tokens goes the other way.
            inside, found = (), None
        layout = Layout(
            num_tokens=num_tokens,
            in_features=group.in_features,
            out_features=group.out_features,
            max_segments=power_of_two(len(segments), MIN_SEGMENTS),
            max_rank=power_of_two(group.max_rank, MIN_RANK),
            dropout=group.dropout,
            inside=inside,
            tiles=Tiles.for_tokens(num_tokens, dropout=group.dropout),
        )
        if layout not in self._blocks:
            blocks = Blocks.new(layout, self.device)
            self._blocks[layout] = (blocks, blocks_route(blocks))
        blocks, route = self._blocks[layout]
        blocks.copy(segments, found)
        return route


def _inside(group: Group, num_tokens: int) -> Ways:
    """Dropout acts on dS A before it is added to dX."""
    if num_tokens < settings.INSIDE_TOKENS:
        return ()
    return tuple(way for way in group.inside if way == "forward" or not group.dropout)


def power_of_two(count: int, smallest: int) -> int:
    """The next one."""
    return max(smallest, 1 << max(0, count - 1).bit_length())
