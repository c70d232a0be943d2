"""A model's output head, where it is a linear and nothing else.

Then losses can be computed without all logits. Some models bound or scale their logits; whether
this one does shows in the logits themselves.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from tlora.kernels.linear_cross_entropy import linear_cross_entropy
from tlora.kernels.linear_cross_entropy.function import rows_at_a_time
from tlora.kernels.multi_lora.routes import triton_serves
from tlora.kernels.row_tiles import TILE_ROWS
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

    def losses(self, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """float32 [N], of N rows of hidden values and as many targets."""
        return linear_cross_entropy(rows, self.weight, self.bias, targets)

    def losses_in_tiles(
        self, rows: torch.Tensor, targets: torch.Tensor, tile_rows: int = 0
    ) -> torch.Tensor:
        """The same by products that are all of one shape, which depends on N alone: a row's bits
        are the same wherever it stands, if those of such a product are (row_probe.py)."""
        count = len(rows)
        if not tile_rows:
            itemsize = rows.dtype.itemsize if triton_serves(rows.device) else None
            most = rows_at_a_time(len(self.weight), rows.device, fused_itemsize=itemsize)
            num_tiles = -(-count // most)
            tile_rows = _round_up(-(-count // num_tiles), TILE_ROWS)
        missing = _round_up(count, tile_rows) - count
        return linear_cross_entropy(
            F.pad(rows, (0, 0, 0, missing)),
            self.weight,
            self.bias,
            F.pad(targets, (0, missing)),
            chunk_rows=tile_rows,
        )[:count]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


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
