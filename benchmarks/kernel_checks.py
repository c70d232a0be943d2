"""Whether a launch of `gpu_lora_kernels.py` gave what it must, against float32."""

import torch
from kernel_candidates import Candidate
from kernel_cases import Layer, Place, launch, sum_tile

from tlora.kernels.multi_lora.blocks import Blocks

# Values in half precision are off by up to 3.8e-3; gradients are float32.
LIMITS = {"reduce_a": 2e-3, "reduce_b": 2e-3}
LIMIT = 6e-3


def outputs_of(kernel: str, layer: Layer) -> list[torch.Tensor]:
    return {
        "shrink_x": [layer.s],
        "sum": [layer.ds],
        "expand_y": layer.y,
        "expand_dx": [layer.dx],
        "reduce_a": [layer.grad_a],
        "reduce_b": layer.grad_b,
    }[kernel]


class Reference:
    """What a kernel must give for one layer's values, in float32."""

    def __init__(self, layer: Layer, place: Place):
        self.layer, self.segments = layer, place.segments
        self.num_linears = len(place.outs)

    def _pieces(self):
        for segment in self.segments:
            col, row = 0, segment.a_row
            for i, rank in enumerate(segment.ranks):
                tokens, columns = slice(segment.start, segment.stop), slice(col, col + rank)
                b_rows = slice(segment.b_rows[i], segment.b_rows[i] + rank)
                yield segment, i, tokens, columns, slice(row, row + rank), b_rows
                col, row = col + rank, row + rank

    def expected(self, kernel: str, part: torch.Tensor | None) -> list[torch.Tensor]:
        layer = self.layer
        like = outputs_of(kernel, layer)
        out = [torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in like]
        for segment, i, tokens, columns, a_rows, b_rows in self._pieces():
            if kernel == "shrink_x":
                value = layer.x[tokens].float() @ layer.a[a_rows].float().T
                out[0][tokens, columns] = segment.scale * value
            elif kernel == "sum":
                tiles = -(-layer.dy[i].shape[1] // sum_tile(part, [d.shape[1] for d in layer.dy]))
                out[0][tokens, columns] = segment.scale * part[:tiles, tokens, columns].float().sum(
                    0
                )
            elif kernel == "expand_y":
                out[i][tokens] = layer.s[tokens, columns].float() @ layer.b[i][b_rows].float()
            elif kernel == "expand_dx":
                out[0][tokens] += layer.ds[tokens, columns].float() @ layer.a[a_rows].float()
            elif kernel == "reduce_a":
                out[0][a_rows] = layer.ds[tokens, columns].float().T @ layer.x[tokens].float()
            else:
                out[i][b_rows] = layer.s[tokens, columns].float().T @ layer.dy[i][tokens].float()
        return out

    def part_expected(self) -> torch.Tensor:
        """dY B^T: what the parts of reduce_b must add up to."""
        layer = self.layer
        out = torch.zeros(layer.s.shape, dtype=torch.float32, device=layer.s.device)
        for _, i, tokens, columns, _, b_rows in self._pieces():
            out[tokens, columns] = layer.dy[i][tokens].float() @ layer.b[i][b_rows].float().T
        return out

    def written(self, kernel: str) -> torch.Tensor | None:
        """Where S or dS is written at all."""
        if kernel not in ("shrink_x", "sum"):
            return None
        mask = torch.zeros(self.layer.s.shape, dtype=torch.bool, device=self.layer.s.device)
        for _, _, tokens, columns, _, _ in self._pieces():
            mask[tokens, columns] = True
        return mask


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm().clamp(min=1e-30))


def check(
    kernel: str, layer: Layer, blocks: Blocks, candidate: Candidate, part, known: dict, place
):
    """The worst relative error, and the least that a twin 1 % off would show."""
    reference = Reference(layer, place)
    outputs = outputs_of(kernel, layer)
    key = (kernel, part.shape[0] if kernel == "sum" else 0)
    if kernel == "sum":
        known.pop(key, None)
    if key not in known:
        known[key] = reference.expected(kernel, part)
    expected = known[key]
    before = [o.clone() for o in outputs]
    if not kernel.startswith("reduce"):
        for output in outputs:
            output.fill_(float("nan"))
    elif part is not None:
        part.fill_(float("nan"))
    launch(kernel, layer, blocks, candidate, part)
    mask = reference.written(kernel)
    pairs = []
    for output, old, right in zip(outputs, before, expected, strict=True):
        found = output.float() - old if kernel.startswith("reduce") else output
        if kernel.startswith("reduce") and place.zero:
            # Rows of jobs without tokens stay as they are.
            found = torch.where((right != 0).any(1, keepdim=True), output, found)
        if mask is not None:
            found, right = found[mask], right[mask]
        pairs.append((found, right))
    if kernel == "reduce_b":
        if "parts" not in known:
            known["parts"] = reference.part_expected()
        mask = known["parts"] != 0
        tile = candidate.tuning.features
        sums = torch.zeros_like(known["parts"])
        for _, i, tokens, columns, _, _ in reference._pieces():
            tiles = -(-layer.dy[i].shape[1] // tile)
            sums[tokens, columns] = part[:tiles, tokens, columns].float().sum(0)
        pairs.append((sums[mask], known["parts"][mask]))
    errors = [relative(found, right) for found, right in pairs]
    twins = [relative(found, 1.01 * right) for found, right in pairs]
    for output, old in zip(outputs, before, strict=True):
        output.copy_(old)
    limits = [LIMITS.get(kernel, LIMIT)] * len(outputs) + [LIMIT] * (len(pairs) - len(outputs))
    ok = all(e < lim < t for e, t, lim in zip(errors, twins, limits, strict=True))
    clean = not bool(blocks.finished.any())
    return max(errors), min(twins), bool(ok and clean)
