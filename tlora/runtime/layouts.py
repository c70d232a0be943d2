"""How the weights of a model lie, read from the model itself; meta tensors are enough."""

import torch
from transformers.modeling_utils import PreTrainedModel

from tlora.costs.layout import BaseLayout, Unit
from tlora.model.compiling import layers_of
from tlora.model.targets import find_targets


def layout_of(model: PreTrainedModel, *, name: str, itemsize: int | None = None) -> BaseLayout:
    """`itemsize` is that of the weights once they are loaded, where the model's own differs."""
    config = model.config
    layers = layers_of(model)
    embeddings = list(model.get_input_embeddings().parameters())
    output = model.get_output_embeddings()
    assert output is not None
    head = list(output.parameters())
    is_tied = any(weight is each for weight in head for each in embeddings)
    inside = {id(weight) for layer in layers for weight in layer.parameters()}
    inside |= {id(weight) for weight in (*embeddings, *head)}
    root = [weight for weight in model.parameters() if id(weight) not in inside]
    targets = list(find_targets(model).values())
    head_parameters = sum(weight.numel() for weight in head)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    linears = sum(target.in_features * target.out_features for target in targets)
    return BaseLayout(
        name=name,
        layers=tuple(_unit(list(layer.parameters())) for layer in layers),
        embeddings=_unit(embeddings),
        head=None if is_tied else _unit(head),
        root=_unit(root),
        itemsize=itemsize or model.dtype.itemsize,
        hidden=config.hidden_size,
        attention_width=heads * head_dim,
        matmul_parameters=linears + head_parameters,
        head_parameters=head_parameters,
        widths=sum(target.in_features + target.out_features for target in targets),
    )


def _unit(weights: list[torch.nn.Parameter]) -> Unit:
    return Unit(tuple((weight.shape[0], weight[0].numel()) for weight in weights))
