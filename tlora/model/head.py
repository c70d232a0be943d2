"""A model's output head, where it is a linear and nothing else.

Then losses can be computed without all logits. Some models bound or scale their logits; whether
this one does shows in the logits themselves.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from tlora.model.packing import PackedBatch


@dataclass(frozen=True, slots=True, eq=False)
class PlainHead:
    """logits = hidden W^T + bias."""

    backbone: nn.Module
    weight: torch.Tensor
    bias: torch.Tensor | None

    def hidden(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """[T, width]: what the head is given, for every row."""
        return self.backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False)[0][0]


def find_plain_head(
    model: PreTrainedModel, batch: PackedBatch, logits: torch.Tensor
) -> PlainHead | None:
    """The head, if it gives these logits of the batch's predicting rows to the bit."""
    backbone, head = model.base_model, model.get_output_embeddings()
    if backbone is model or not isinstance(head, nn.Linear):
        return None
    found = PlainHead(backbone, head.weight, head.bias)
    hidden = found.hidden(batch.input_ids, batch.position_ids)[batch.predicting]
    if hidden.shape[1] != found.weight.shape[1]:
        return None
    own = F.linear(hidden, found.weight, found.bias)
    return found if torch.equal(own.float(), logits) else None
