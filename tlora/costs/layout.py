"""How the weights of a base lie: decoder layers, and what is around them.

What sharding asks for: which weights are gathered together and how many bytes that is, padding
included; and what a profile of another base is scaled by. Plain numbers, so that a base can be
planned for on paper.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tlora.core.errors import SpecError


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights that are gathered with one call."""

    shapes: tuple[tuple[int, int], ...]
    """Of each: rows, which are what is cut into shards, and values in a row."""

    @property
    def parameters(self) -> int:
        return sum(rows * values for rows, values in self.shapes)

    def shard_values(self, shards: int) -> int:
        """What one rank holds: every weight is padded to a whole number of rows on each."""
        return sum(-(-rows // shards) * values for rows, values in self.shapes)


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseLayout:
    name: str
    layers: tuple[Unit, ...]
    embeddings: Unit
    """Gathered to look tokens up, and freed."""

    head: Unit | None
    """Gathered for the losses, whose gradients are made along with them; None where it is the
    embeddings' weight."""

    root: Unit
    """What is left: the last norm."""

    itemsize: int
    """Bytes of a value."""

    hidden: int
    """Values that go from layer to layer, for each token."""

    attention_width: int
    """Heads x their size, which attention's own products grow with."""

    matmul_parameters: int
    """What a token is multiplied with: linears and head. Embeddings are looked up."""

    head_parameters: int
    """The head's part of these."""

    widths: int
    """Inputs and outputs of all linears that can be adapted: adapter parameters per unit of rank,
    and what the activations that are kept for backward grow with."""

    @property
    def units(self) -> tuple[Unit, ...]:
        head = () if self.head is None else (self.head,)
        return (self.root, self.embeddings, *self.layers, *head)

    @property
    def parameters(self) -> int:
        return sum(unit.parameters for unit in self.units)

    @property
    def weights_bytes(self) -> int:
        return self.parameters * self.itemsize

    def gathered_bytes(self, unit: Unit, shards: int) -> int:
        """Of the whole unit, with padding: what an all-gather leaves on every rank."""
        return unit.shard_values(shards) * shards * self.itemsize

    def shard_bytes(self, shards: int) -> int:
        """Of the whole base, on one rank."""
        return sum(unit.shard_values(shards) for unit in self.units) * self.itemsize


@dataclass(frozen=True, slots=True)
class Gathers:
    """All-gathers of one nano-batch, forward and backward, on one rank."""

    calls: int
    moved_bytes: int
    """What the calls leave on the rank, its own shard included."""


def around(layout: BaseLayout) -> tuple[Unit, ...]:
    """What a nano-batch gathers beside its layers: the root forward and backward, the embeddings,
    and the head, which may be the embeddings once more."""
    return (layout.root, layout.embeddings, layout.head or layout.embeddings, layout.root)


def gathers_of(layout: BaseLayout, shards: int, kept_layers: int = 0) -> Gathers:
    """Every layer that is not kept once forward and once backward, and what is around them. Frozen
    weights have no gradients, so nothing is reduced."""
    if shards == 1:
        return Gathers(0, 0)
    units = (*layout.layers[kept_layers:] * 2, *around(layout))
    return Gathers(len(units), sum(layout.gathered_bytes(unit, shards) for unit in units))


def llama_layout(
    name: str,
    *,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocabulary: int,
    tied: bool = False,
    qkv_bias: bool = False,
    itemsize: int = 2,
) -> BaseLayout:
    """Of the Llama family, which Qwen's dense models are laid out as, but for a bias."""
    wide, narrow = heads * head_dim, kv_heads * head_dim
    linears = (
        (wide, hidden),
        (narrow, hidden),
        (narrow, hidden),
        (hidden, wide),
        (intermediate, hidden),
        (intermediate, hidden),
        (hidden, intermediate),
    )
    biases = ((wide, 1), (narrow, 1), (narrow, 1)) if qkv_bias else ()
    layer = Unit((*linears, *biases, (hidden, 1), (hidden, 1)))
    table = Unit(((vocabulary, hidden),))
    multiplied = layers * sum(rows * values for rows, values in linears)
    return BaseLayout(
        name=name,
        layers=(layer,) * layers,
        embeddings=table,
        head=None if tied else table,
        root=Unit(((hidden, 1),)),
        itemsize=itemsize,
        hidden=hidden,
        attention_width=wide,
        matmul_parameters=multiplied + vocabulary * hidden,
        head_parameters=vocabulary * hidden,
        widths=layers * sum(rows + values for rows, values in linears),
    )


NAMED: Mapping[str, BaseLayout] = {
    layout.name: layout
    for layout in (
        llama_layout(
            "llama-1b",
            hidden=2048,
            intermediate=8192,
            layers=16,
            heads=32,
            kv_heads=8,
            head_dim=64,
            vocabulary=128_256,
            tied=True,
        ),
        llama_layout(
            "llama-8b",
            hidden=4096,
            intermediate=14_336,
            layers=32,
            heads=32,
            kv_heads=8,
            head_dim=128,
            vocabulary=128_256,
        ),
        llama_layout(
            "qwen-32b",
            hidden=5120,
            intermediate=27_648,
            layers=64,
            heads=40,
            kv_heads=8,
            head_dim=128,
            vocabulary=152_064,
            qkv_bias=True,
        ),
        llama_layout(
            "llama-70b",
            hidden=8192,
            intermediate=28_672,
            layers=80,
            heads=64,
            kv_heads=8,
            head_dim=128,
            vocabulary=128_256,
        ),
    )
}
"""Shapes that can be planned for without a model: Llama 3.2 1B, Llama 3.1 8B and 70B, Qwen 2.5
32B."""


def named_layout(name: str) -> BaseLayout:
    if name not in NAMED:
        raise SpecError(f"'{name}' is none of {', '.join(NAMED)}", field="--shape")
    return NAMED[name]
