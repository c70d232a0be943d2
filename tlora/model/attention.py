"""Packed attention in the place of a model's own.

transformers finds attention functions by name in a register of the process; what a nano-batch's
sequences are, the function learns from the routing of its super-model (routing.py).
"""

import copy
import itertools
import weakref
from typing import Any

import torch
from transformers import AttentionInterface, PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from tlora.core.errors import ModelError
from tlora.model.routing import Routing

_numbers = itertools.count()


def replace_attention(model: PreTrainedModel, routing: Routing) -> None:
    """Refuses a model whose attention cannot be replaced."""
    # A name of its own per super-model: the function carries this model's routing.
    name = f"tlora_packed_{next(_numbers)}"
    # The register outlives this model, so it must not hold on to it.
    reference = weakref.ref(routing)

    def of_this_model(*args: Any, **options: Any) -> tuple[torch.Tensor, None]:
        routing = reference()
        assert routing is not None, "the super-model of this attention is gone"
        return routing.attention(*args, **options)

    AttentionInterface.register(name, of_this_model)
    _unshare_config(model)
    try:
        model.set_attn_implementation(name)
    except (ValueError, NotImplementedError) as error:
        raise _own_attention(model) from error
    if model.config._attn_implementation != name:
        raise _own_attention(model)


def _unshare_config(model: PreTrainedModel) -> None:
    """The name is set in the model's configuration, which other models may be made from."""
    # One memo: modules that share a configuration share its copy.
    memo: dict[int, Any] = {}
    for module in model.modules():
        for attribute, value in vars(module).items():
            if isinstance(value, PretrainedConfig):
                vars(module)[attribute] = copy.deepcopy(value, memo)


def _own_attention(model: PreTrainedModel) -> ModelError:
    return ModelError(
        f"base.model: {type(model).__name__} computes attention with code of its own, which knows "
        "no sequence boundaries: it cannot be trained in packed rows"
    )
