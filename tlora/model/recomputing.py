"""Decoder layers that keep their input only and run again in backward."""

from transformers.modeling_utils import PreTrainedModel

from tlora.model.compiling import layers_of
from tlora.model.linear import SharedInput


def recompute_layers(model: PreTrainedModel, groups: list[SharedInput], *, keep_s: bool) -> None:
    """`keep_s`: what is small and dear to make is kept all the same."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for group in groups:
        group.keeps = keep_s
    for layer in layers_of(model):
        # Layers recompute only in training mode; their children stay in evaluation mode, so that
        # the backbone's own dropout stays off.
        layer.training = True
