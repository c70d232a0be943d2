"""Rotary embeddings whose frequencies depend on the length of the sequence, one sequence at a time.

For dynamic NTK and LongRoPE transformers takes the largest position of the whole row as the length:
in a packed row a long neighbour would choose the frequencies of a short sequence, and the dynamic
kind remembers the longest it has seen. Here every sequence gets those it would get alone, from a
model that has seen nothing before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from tlora.core.errors import ModelError
from tlora.model.routing import Routing

OF_ANY_LENGTH = {"default", "linear", "llama3", "yarn", "proportional"}
"""Kinds of which the frequencies are the same for every sequence."""


class SequenceRope(nn.Module):
    """Stands in for a rotary embedding in packed rows."""

    def __init__(self, rope: nn.Module, routing: Routing) -> None:
        super().__init__()
        self.rope = rope
        self.routing = routing

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *more: object, **others: object):
        lengths = self.routing.lengths
        if max(lengths, default=0) <= length_limit(self.rope):
            forget_lengths(self.rope)
            return self.rope(x, position_ids, *more, **others)
        tail = position_ids.shape[-1] - sum(lengths)
        parts = []
        for positions in position_ids.split([*lengths, tail] if tail else lengths, dim=-1):
            forget_lengths(self.rope)
            parts.append(self.rope(x, positions, *more, **others))
        return tuple(torch.cat(pieces, dim=-2) for pieces in zip(*parts, strict=True))


def separate_sequences(model: PreTrainedModel, routing: Routing) -> None:
    """Put a SequenceRope in the place of every rotary embedding that looks at the length; refuse a
    kind that is not known."""
    for path, rope in list(model.named_modules()):
        kinds = rope_kinds(rope)
        unknown = {kind for kind in kinds if not _by_length(kind)} - OF_ANY_LENGTH
        if unknown:
            raise ModelError(
                f"base.model: {type(model).__name__} has rotary embeddings of type "
                f"{', '.join(sorted(unknown))}, which are not known to work in packed rows"
            )
        if any(map(_by_length, kinds)):
            model.set_submodule(path, SequenceRope(rope, routing))


@contextmanager
def short_limits(model: nn.Module, limit: int) -> Iterator[None]:
    """While entered, frequencies change for sequences of more than `limit` tokens."""
    ropes = [module for module in model.modules() if any(map(_by_length, rope_kinds(module)))]
    places: list[tuple[dict, str]] = []
    for rope in ropes:
        # Some configurations hold the limit twice and copy this one over the other.
        if "original_max_position_embeddings" in vars(rope.config):
            places += [(vars(rope.config), "original_max_position_embeddings")]
        places += [
            (parameters, "original_max_position_embeddings")
            for parameters in _rope_parameters(rope)
            if parameters["rope_type"] == "longrope"
        ]
        if any("dynamic" in kind for kind in rope_kinds(rope)):
            places += [(vars(rope), "original_max_seq_len")]
            places += [(vars(rope.config), "max_position_embeddings")]
    before = [owner[name] for owner, name in places]
    try:
        for owner, name in places:
            owner[name] = limit
        for rope in ropes:
            forget_lengths(rope)
        yield
    finally:
        # Backwards: what several embeddings share was first seen with its own value.
        for (owner, name), value in reversed(list(zip(places, before, strict=True))):
            owner[name] = value
        for rope in ropes:
            forget_lengths(rope)


def rope_kinds(module: nn.Module) -> set[str]:
    """Of a rotary embedding, by its layer types where they differ; empty for other modules."""
    kinds = vars(module).get("rope_type")
    if isinstance(kinds, dict):
        return set(kinds.values())
    return {kinds} if isinstance(kinds, str) else set()


def length_limit(rope: nn.Module) -> int:
    """Up to so many tokens the frequencies are those of the start."""
    return min(
        parameters["original_max_position_embeddings"]
        if parameters["rope_type"] == "longrope"
        else vars(rope)["original_max_seq_len"]
        for parameters in _rope_parameters(rope)
        if _by_length(parameters["rope_type"])
    )


def forget_lengths(rope: nn.Module) -> None:
    """Back to the frequencies of the start, whatever was seen since."""
    for name, frequencies in list(rope.named_buffers(recurse=False)):
        if name.endswith("original_inv_freq"):
            setattr(rope, name.removesuffix("original_inv_freq") + "inv_freq", frequencies)
    for name in list(vars(rope)):
        if name.endswith("max_seq_len_cached"):
            setattr(rope, name, vars(rope)["original_max_seq_len"])


def _by_length(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _rope_parameters(rope: nn.Module) -> list[dict]:
    """One dictionary, or one for each layer type."""
    parameters = cast(PretrainedConfig, rope.config).rope_parameters
    return [each for each in parameters.values() if isinstance(each, dict)] or [parameters]
