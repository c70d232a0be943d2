"""The benchmark's single linears on a CUDA device: kernels are timed, not the host."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tlora.model.super_model import SuperModel
from tlora.runtime.benchmark.linears import measure, overhead_pct
from tlora.runtime.benchmark.workload import new_workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def test_adapters_cost_a_fraction_of_the_linears() -> None:
    """Launched one by one they would take most of the time here: the graph is what is timed."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        dtype=torch.bfloat16,
    )
    with torch.device("cuda"):
        base = LlamaForCausalLM(config).to(torch.bfloat16)
    model = SuperModel(base, reserve_rows=512)
    work = new_workload(
        num_jobs=8, ranks=(8, 16, 32, 64), batches=(2,), lengths=(512,), steps=1,
        dropout=0.0, vocabulary=512,
    )  # fmt: skip
    times = measure(model, work, budget_tokens=8192, copy_bytes_per_s=4e12)
    for each in times:
        print(each)
    share = overhead_pct(times)
    assert share is not None
    assert 2 < share < 25, share
    model.check_integrity()
