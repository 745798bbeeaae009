"""CudaGraphs where none can be recorded: steps run as they are, and it is said why."""

import logging

import pytest
import torch

from distflow.rollout.embedded.decode_graphs import CudaGraphs
from tests.rollout.drive import make_model


@pytest.mark.skipif(torch.cuda.is_available(), reason="wants a machine without CUDA")
def test_a_step_that_cannot_be_recorded_runs_as_it_is(caplog):
    graphs = CudaGraphs(make_model(), enabled=True)
    state = torch.zeros(1)
    with caplog.at_level(logging.WARNING):
        found = [float(graphs.run("shape", lambda: state.add_(1).clone())) for _ in range(4)]
    assert found == [1, 2, 3, 4]
    assert graphs.num_recorded == 0 and not graphs.enabled
    assert [record.getMessage()[:19] for record in caplog.records] == ["CUDA graphs are off"]
