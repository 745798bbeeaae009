"""One of two gloo ranks with unequal shares of a step, and a phase that only the second has."""

from pathlib import Path

import pytest

from distflow.cluster.process_groups import TorchCollective
from distflow.runtime.step_metrics import throughput

TOKENS = (300, 1700)
TIMINGS = (
    {"timing_s/train_step": 1.0, "timing_s/step": 9.0},
    {"timing_s/train_step": 4.0, "timing_s/ref_logp": 2.0},
)


def main(rank: int, folder: Path) -> None:
    metrics = {**TIMINGS[rank], "rollout/decoded_tokens": 1200.0, "rollout/decode_s": 3.0}
    found = throughput(
        metrics, ["train_step", "ref_logp", "train_step"], TOKENS[rank], TorchCollective()
    )
    assert found == {
        "throughput/rollout": 400.0,
        "throughput/train_step": pytest.approx(2000 / 5),  # and not the mean of 300 and 425
        "throughput/ref_logp": 850.0,
    }
    assert metrics == TIMINGS[rank], "what it is made of is no metric"
