"""The train engine on 1, 2 and 4 real gloo ranks with unequal shares, some empty: the weights of
one process."""

import json
import math

import pytest
import torch

from distflow.models.loading import load_model
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny_model
from tests.training.rank_worker import EMPTY, FAULTY, NUM_MINI_BATCHES, SHARES


def test_weights_and_metrics_do_not_depend_on_the_ranks(tmp_path):
    assert all(sorted(sum(shares, [])) == list(range(8)) for shares in SHARES.values())
    write_tiny_model(tmp_path / "model", "qwen3")
    run_ranks("tests.training.rank_worker", 4, tmp_path)
    start = {
        name: weight.detach() for name, weight in load_model(tmp_path / "model").named_parameters()
    }
    alone = torch.load(tmp_path / "1-0.pt")
    wanted = json.loads((tmp_path / "1-0.json").read_text())["metrics"]
    assert [step["skipped"] for step in wanted] == [
        float(n in (FAULTY, EMPTY)) for n in range(NUM_MINI_BATCHES)
    ]
    assert [step["empty"] for step in wanted] == [
        float(n == EMPTY) for n in range(NUM_MINI_BATCHES)
    ]
    assert all(step["grad_norm"] > 0.1 for step in wanted if not step["skipped"]), (
        "clipping at 0.05 is to be active"
    )
    moved = math.sqrt(sum(float((alone[name] - start[name]).norm() ** 2) for name in alone))

    for size in (2, 4):
        ranks = [torch.load(tmp_path / f"{size}-{rank}.pt") for rank in range(size)]
        off = math.sqrt(sum(float((ranks[0][name] - alone[name]).norm() ** 2) for name in alone))
        assert moved > 0 and off < 1e-4 * moved, (size, off / moved)
        found = [json.loads((tmp_path / f"{size}-{rank}.json").read_text()) for rank in range(size)]
        assert len({rank["passes"] for rank in found}) == 1, (
            "every rank runs the model as often, empty or not"
        )

        for rank in range(size):
            assert all(torch.equal(ranks[rank][name], ranks[0][name]) for name in alone), (
                size,
                rank,
            )
            assert str(found[rank]["metrics"]) == str(found[0]["metrics"]), (
                "NaN is as equal as any other"
            )

        for ours, theirs in zip(found[0]["metrics"], wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6, nan_ok=True)
