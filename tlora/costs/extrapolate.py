"""A profile of a base that was not measured, from one of the same device that was.

Every parameter grows with what causes it: products with the weights that a token meets, attention
with the heads' width and the layers, adapters with the widths of the linears, launches with the
layers, memory with the same. Large products run no slower than small ones, so this errs on the
slow side for larger bases. `tests/costs/test_extrapolate.py` holds it against a pair of bases that
were both measured.
"""

from dataclasses import replace

from tlora.costs.layout import BaseLayout
from tlora.costs.profile import Profile


def extrapolated(profile: Profile, measured: BaseLayout, wanted: BaseLayout) -> Profile:
    """`measured` is the layout of the profile's own base. The points stay those of that base, and
    so do buckets and the costs of attaching."""
    if wanted.name == measured.name:
        return profile
    products = wanted.matmul_parameters / measured.matmul_parameters
    layers = len(wanted.layers) / len(measured.layers)
    attention = layers * wanted.attention_width / measured.attention_width
    widths = wanted.widths / measured.widths
    weights = wanted.weights_bytes / measured.weights_bytes
    time, memory = profile.time, profile.memory
    return replace(
        profile,
        shape=wanted.name,
        time=replace(
            time,
            fixed_s=time.fixed_s * layers,
            segment_s=time.segment_s * layers,
            flat_s=time.flat_s * weights,
            row_s=time.row_s * products,
            square_s=time.square_s * attention,
            lora_s=time.lora_s * widths,
            rank_s=time.rank_s * widths,
        ),
        memory=replace(
            memory,
            weights_bytes=wanted.weights_bytes,
            row_bytes=None if memory.row_bytes is None else memory.row_bytes * widths,
        ),
        parameters_per_rank=wanted.widths,
        load_s=None if profile.load_s is None else profile.load_s * weights,
        notes=(
            *profile.notes,
            f"times and memory of {wanted.name} extrapolated from {measured.name}: products by "
            f"{products:.2f}, attention by {attention:.2f}, adapters and activations by "
            f"{widths:.2f}",
        ),
    )
