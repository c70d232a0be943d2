"""What is trained on a CUDA device in half precision is what is written."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tlora.core.job import DataSpec, JobSpec, LoraSpec, TrainSpec
from tlora.core.sequence import TokenSequence
from tlora.model.super_model import SuperModel
from tlora.runtime import exporting
from tlora.training.engine import Engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("compiled", [False, True])
def test_an_adapter_is_checked_more_sharply_than_it_was_trained(compiled: bool) -> None:
    """Between nano-batches of compiled layers, by float32 matrices where kernels read copies in
    bfloat16. A hundredth more of one matrix is told apart; training goes on as before."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).to(device="cuda", dtype=torch.bfloat16)
    engine = Engine(SuperModel(model, compiled=compiled, reserve_rows=32), budget_tokens=256)
    job = JobSpec(name="a", data=DataSpec(path="none"), lora=LoraSpec(r=8), train=TrainSpec())
    weights = engine.super_model.new_adapter(job)
    for pair in weights.values():
        pair.b.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
    engine.attach("a", weights, scale=job.lora.scale)
    ids = np.arange(1, 60)
    probe = TokenSequence(ids, ids)

    def step() -> float:
        engine.feed("a", [probe] * 2, loss_scale=0.01)
        engine.request_step("a", learning_rate=1e-3)
        engine.run_nano_batch()
        (outcome,) = engine.drain()
        assert not outcome.error
        return outcome.steps[0].loss

    before = step()
    assert exporting.look(engine.super_model, job, probe).result() < exporting.LOGITS_TOLERANCE
    trained = exporting.adapter_logits(engine.super_model, weights, job.lora.scale, probe)
    next(iter(weights.values())).b.mul_(1.01)
    other = exporting.plain_logits(engine.super_model, weights, job.lora.scale, probe)
    assert exporting.logits_error(other, trained) > exporting.LOGITS_TOLERANCE
    assert step() < before
