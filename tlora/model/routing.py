"""What the layers inside a Hugging Face model must know about the nano-batch that runs through
them.

The super-model enters a routing for one forward and backward; its linears and its attention read
it. Routes keep their tensors from one nano-batch to the next, so that compiled code sees only their
values change.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tlora.kernels.attention import grouped, native
from tlora.kernels.attention.layout import AttentionLayout, attention_layout
from tlora.kernels.attention.packed import packed_attention
from tlora.kernels.attention.varlen import supports, varlen_attention
from tlora.kernels.multi_lora import Group, Route, Routes, Segment, power_of_two
from tlora.model.compiling import varies
from tlora.model.packing import PackedBatch, PackedSegment
from tlora.model.pool import GroupPool

MIN_BOUNDARIES = 64
MIN_LONGEST = 128


@dataclass(frozen=True, slots=True)
class Scaling:
    """What a job's adapter does besides its matrices."""

    scale: float
    threshold: int
    """Of its dropout (kernels/streams.py)."""


@dataclass(slots=True)
class Sharing:
    """Pools with the same rows and features, which share their routes."""

    pools: list[GroupPool]
    routes: Routes


class Routing:
    """Belongs to one super-model. `per_sequence` cuts every job's rows at its sequences, so that no
    sum of a gradient depends on how a batch was cut into nano-batches."""

    def __init__(self, device: torch.device, *, per_sequence: bool = False) -> None:
        self.device = device
        self.per_sequence = per_sequence
        self.rows = torch.zeros(0, dtype=torch.int32, device=device)
        self.boundaries = torch.zeros(1, dtype=torch.int32, device=device)
        """Of the sequences, and on a device of the padding."""

        self.longest = torch.empty(0, 0)
        """[0, tokens of the longest sequence, or a little more]: a number that may change without
        compiling anything."""

        self.depends_on_lengths = False
        """Some layer has asked for the lengths: it does other things for other sequences."""

        self._lengths: list[int] = []
        self._layouts: dict[int, AttentionLayout] = {}
        """How sequences are taken apart for attention, by its width."""

        self._widths: set[int] = set()
        """Seen so far, in the probe already."""

        self._buffers: dict[tuple[str, int], torch.Tensor] = {}
        self._routes: dict[tuple[int, ...], Routes] = {}
        """By the pools that share them."""

        self._sharing: list[Sharing] = []
        """Found anew after slots have moved."""

        self._has_native_attention = False
        self._active = False
        self.compiled = False
        """Layers run through torch.compile."""

        self.runs_again = False
        """The layer under way will run once more, in backward."""

        self.counts_in_attention = False
        """Some attention has been of a kind that is not compiled. The last look of the probe sees
        every layer's."""

    def route(self, pool: GroupPool) -> Route:
        """The segments of the nano-batch as this pool's linears need them."""
        assert self._active, "a LoRA linear ran outside of a routed forward"
        assert pool.route is not None
        return pool.route

    @property
    def lengths(self) -> list[int]:
        """Of the sequences in the nano-batch."""
        self.depends_on_lengths = True
        return self._lengths

    @property
    def shape(self) -> tuple[object, ...] | None:
        """All of a nano-batch that decides which kernels run, on a device. None if it is more than
        that: a table is read on the host, and its segments decide."""
        if any(s.pools[0].slots and self.route(s.pools[0]).is_table for s in self._sharing):
            return None
        layouts = [int(self.route(sharing.pools[0]).layout) for sharing in self._sharing]
        pools = [tuple(map(id, sharing.pools)) for sharing in self._sharing]
        sizes = (len(self.rows), len(self.boundaries), self.longest.shape[1])
        return (*sizes, *layouts, hash(tuple(pools)))

    def _routes_of(self, pools: list[GroupPool]) -> Routes:
        """Kept while jobs come and go: graphs know where the lists lie."""
        key = tuple(map(id, pools))
        if key not in self._routes:
            self._routes[key] = Routes(self.device)
        return self._routes[key]

    def forget_routes(self) -> None:
        """Slots have moved: who shares what must be found again."""
        for sharing in self._sharing:
            for pool in sharing.pools:
                pool.route = None
        self._sharing.clear()

    @contextmanager
    def entered(
        self,
        batch: PackedBatch,
        pools: list[GroupPool],
        scalings: dict[str, Scaling],
        *,
        train: bool,
    ) -> Iterator[None]:
        if self._active:
            raise RuntimeError("a nano-batch is already running through this model")
        self._load(batch, pools, scalings, train)
        self._active = True
        try:
            yield
        finally:
            self._active = False

    @contextmanager
    def running_again(self) -> Iterator[None]:
        """The time in which layers run that will run once more, in backward."""
        self.runs_again = True
        try:
            yield
        finally:
            self.runs_again = False

    def _load(self, batch, pools, scalings, train) -> None:
        self.rows = self._kept("rows", batch.rows)
        self._lengths = batch.lengths
        self._layouts = {}
        if self.device.type == "cuda":
            self._load_boundaries(batch)
        else:
            self._has_native_attention = native.is_compiled()
            self._load_starts(batch)
            if self.compiled:
                self._load_layouts(batch)
        if not self._sharing:
            self._sharing = [Sharing(alike, self._routes_of(alike)) for alike in _by_rows(pools)]
        for sharing in self._sharing:
            pool = sharing.pools[0]
            segments = [
                piece
                for segment in batch.segments
                if segment.job in pool.slots
                for piece in self._pieces(segment, pool, scalings[segment.job], train)
            ]
            group = _group(pool, scalings, train, exact=self.per_sequence)
            route = sharing.routes.write(group, segments, batch.num_rows)
            if self.compiled:
                _mark(route)
            for pool in sharing.pools:
                pool.route = route

    def _kept(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """On a device, the same tensor for every nano-batch of this size."""
        if self.device.type != "cuda":
            return values
        key = (name, len(values))
        if key not in self._buffers:
            self._buffers[key] = torch.empty_like(values, device=self.device)
        if not values.is_cuda:
            values = values.pin_memory()
        return self._buffers[key].copy_(values, non_blocking=True)

    def _pieces(
        self, segment: PackedSegment, pool: GroupPool, scaling: Scaling, train: bool
    ) -> Iterator[Segment]:
        slot = pool.slots[segment.job]
        start = segment.start
        for stop in segment.sequence_stops if self.per_sequence else [segment.stop]:
            yield Segment(
                start=start,
                stop=stop,
                a_row=slot.a_row,
                ranks=slot.ranks,
                b_rows=slot.b_rows,
                scale=scaling.scale,
                threshold=scaling.threshold if train else 0,
                key=segment.key,
                zero_grad=segment.zero_grad and train,
            )
            start = stop

    def _load_boundaries(self, batch: PackedBatch) -> None:
        """Of the sequences and then of the padding, in a vector of few sizes. Where bits count they
        depend on the nano-batch's shape alone: a flash backward may choose its splits by the number
        of sequences and by the longest."""
        padding = batch.num_rows - batch.num_tokens
        longest = batch.num_rows
        if self.per_sequence:
            lengths = padded_lengths(batch.lengths, batch.num_rows)
        else:
            longest = min(longest, power_of_two(max(batch.lengths, default=1), MIN_LONGEST))
            lengths = [*batch.lengths, *[longest] * (padding // longest), padding % longest]
        self.boundaries = self._kept("boundaries", _boundaries(lengths))
        self.longest = torch.empty(0, longest)
        if self.compiled:
            varies(self.boundaries, 0)
            varies(self.longest, 1)

    def _load_starts(self, batch: PackedBatch) -> None:
        self.boundaries = _boundaries(batch.lengths)
        if self.compiled:
            varies(self.boundaries, 0)

    def _load_layouts(self, batch: PackedBatch) -> None:
        """Before compiled layers ask for them: they cannot wait."""
        for width in self._widths:
            layout = attention_layout(
                batch.lengths, batch.num_rows, width, self.device, one_by_one=self.per_sequence
            )
            for tensor in (layout.sources, layout.places, layout.repeated, layout.sizes):
                varies(tensor, 0)
            self._layouts[width] = layout

    def _layout_for(self, query: torch.Tensor) -> AttentionLayout:
        num_rows, heads, head_size = query.shape
        width = heads * head_size
        if width not in self._layouts:
            self._widths.add(width)
            self._layouts[width] = attention_layout(
                self.lengths, num_rows, width, query.device, one_by_one=self.per_sequence
            )
        return self._layouts[width]

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **others: object,
    ) -> tuple[torch.Tensor, None]:
        """The attention function registered with transformers: [1, heads, T, head size] in, [1, T,
        heads, head size] out. `s_aux` are the heads' sinks."""
        assert attention_mask is None, "packed attention takes its boundaries from the nano-batch"
        if others.get("position_bias") is not None:
            raise NotImplementedError(f"{type(module).__name__} uses position_bias")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        if supports(q, softcap, s_aux):
            out = varlen_attention(
                q,
                k,
                v,
                self.boundaries,
                self.longest.shape[1],
                scale=scale,
                window=sliding_window,
                repeatable=self.per_sequence,
            )
        elif self._has_native_attention and native.serves(q, k, v, softcap, s_aux):
            out = native.native_attention(
                q, k, v, self.boundaries, scale=scale, window=sliding_window
            )
        elif self.compiled and grouped.serves(q, v, sliding_window, softcap, s_aux):
            out = grouped.grouped_attention(q, k, v, self._layout_for(q), scale=scale)
        else:
            if torch.compiler.is_compiling():
                raise NotImplementedError(NOT_COMPILED)
            if not grouped.serves(q, v, sliding_window, softcap, s_aux):
                self.counts_in_attention = True
            out = packed_attention(
                q,
                k,
                v,
                self._layout_for(q),
                scale=scale,
                window=sliding_window,
                softcap=softcap,
                sinks=s_aux,
            )
        return out[None], None


NOT_COMPILED = (
    "attention in float32 on a GPU, in windows on a CPU where it is not in C, and with soft-caps "
    "or sinks anywhere, is not compiled: it counts in Python, and every nano-batch would be "
    "another graph"
)


def _mark(route: Route) -> None:
    """More segments, larger ranks."""
    varies(route.table, 0)
    varies(route.extra, 0)
    varies(route.s_like, 1)


def _boundaries(lengths: list[int]) -> torch.Tensor:
    """Empty sequences fill it to a power of two."""
    padded = torch.zeros(power_of_two(len(lengths), MIN_BOUNDARIES) + 1, dtype=torch.int32)
    padded[1 : len(lengths) + 1] = torch.tensor(lengths, dtype=torch.int32)
    return padded.cumsum(0, dtype=torch.int32)


def padded_lengths(lengths: list[int], num_rows: int) -> list[int]:
    """Of the sequences and, in what places are left of a power of two, the padding: in short pieces
    it costs attention next to nothing, in one it would cost as much as a sequence of its length."""
    places = power_of_two(len(lengths) + 1, MIN_BOUNDARIES) - len(lengths)
    short, longer = divmod(num_rows - sum(lengths), places)
    return [*lengths, *[short + 1] * longer, *[short] * (places - longer)]


def _by_rows(pools: list[GroupPool]) -> list[list[GroupPool]]:
    sharing: dict[object, list[GroupPool]] = {}
    for pool in pools:
        features = tuple((target.in_features, target.out_features) for target in pool.targets)
        sharing.setdefault((features, pool.layout), []).append(pool)
    return list(sharing.values())


def _group(
    pool: GroupPool, scalings: dict[str, Scaling], train: bool, *, exact: bool = False
) -> Group:
    """Of all attached jobs, not only of those in this nano-batch: nothing is compiled anew when
    one of them has no tokens. Where bits count it depends on nobody: kernels that never meet
    dropout, and products without adapters, sum in another order."""
    return Group(
        in_features=pool.targets[0].in_features,
        out_features=tuple(target.out_features for target in pool.targets),
        max_rank=max((max(slot.ranks) for slot in pool.slots.values()), default=int(exact)),
        dropout=exact or (train and any(scalings[job].threshold for job in pool.slots)),
        inside=pool.inside,
    )
