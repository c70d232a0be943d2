"""The demo's base, ready to be measured, and a little work for it."""

import pytest
import torch

from tlora.model.super_model import SuperModel
from tlora.runtime.benchmark import shapes
from tlora.runtime.benchmark.workload import Workload, new_workload

CPU = torch.device("cpu")


@pytest.fixture(scope="package")
def plain():
    return shapes.load(shapes.look_at("demo", "auto", CPU), CPU)


@pytest.fixture(scope="package")
def ours(plain) -> SuperModel:
    return SuperModel(shapes.twin(plain))


@pytest.fixture(scope="package")
def work(plain) -> Workload:
    return new_workload(
        num_jobs=3,
        ranks=(2, 4),
        batches=(1, 3),
        lengths=(5, 9, 14),
        steps=2,
        dropout=0.0,
        vocabulary=plain.config.vocab_size,
    )
