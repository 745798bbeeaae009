"""The train engine over sharded models on real gloo ranks: the numbers of one process, and what
each rank keeps."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from distflow.models.loading import load_model
from distflow.runtime.checkpoint.files import read_shards
from distflow.training.engine import OneRank
from distflow.training.torch_engine import TorchScorer
from tests.made_once import made_once
from tests.models.families import FAMILIES
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny_model
from tests.training.batches import ragged_batch
from tests.training.fsdp_worker import CASES, LAYOUTS, make_engine, train
from tests.training.rank_worker import EMPTY, FAULTY, mini_batch
from tests.training.sharded_worker import BIG, OUTPUTS

pytestmark = pytest.mark.slow

PER_TOKEN = float(mini_batch(0).flat("advantages").abs().mean())
"""What the loss of a token is about, at a ratio of 1."""


def norm(weights: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(weight.double().norm() ** 2) for weight in weights.values()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four ranks have trained, with unequal shares, one of them empty."""

    def make(folder: Path) -> None:
        write_tiny_model(folder / "model", "qwen3")
        write_tiny_model(folder / "tied", "qwen2", tie_word_embeddings=True)
        write_tiny_model(folder / "experts", "qwen3_moe", **FAMILIES["qwen3_moe"].changes)
        write_tiny_model(folder / "fused", "phi3")
        run_ranks("tests.training.fsdp_worker", 4, folder)

    return made_once(tmp_path_factory, "fsdp", make)


@pytest.mark.parametrize("case", CASES)
def test_weights_and_metrics_are_those_of_whole_weights_in_one_process(
    folder: Path, case: str
) -> None:
    engine = make_engine(case, folder, None, OneRank())
    wanted = train(case, engine, list(range(8)))
    weights = dict(engine.weights())
    files = sorted(folder.glob(f"{case}-*.pt"))
    assert len(files) == sum(len(LAYOUTS[name].ranks) for name in CASES[case][3])

    for file in files:
        found = torch.load(file)
        assert list(found) == list(weights)
        assert norm({name: found[name] - weights[name] for name in weights}) <= 1e-5 * norm(
            weights
        ), file.name
        metrics = json.loads(file.with_suffix(".json").read_text())
        assert [step["skipped"] for step in metrics] == [step["skipped"] for step in wanted]

        for ours, theirs in zip(metrics, wanted, strict=True):
            if not theirs["skipped"]:
                assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
                assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5 * PER_TOKEN)


@pytest.mark.parametrize("mesh", LAYOUTS)
def test_all_ranks_of_a_mesh_replicas_too_have_the_same_bits(folder: Path, mesh: str) -> None:
    case = next(case for case, (_, _, _, names, _) in CASES.items() if mesh in names)
    first, *others = [torch.load(file) for file in sorted(folder.glob(f"{case}-{mesh}-*.pt"))]
    assert len(others) == len(LAYOUTS[mesh].ranks) - 1
    assert all(torch.equal(weights[name], first[name]) for weights in others for name in first)


@pytest.mark.parametrize("mesh", LAYOUTS)
def test_each_part_of_weights_and_moments_is_saved_by_one_rank(folder: Path, mesh: str) -> None:
    case = next(case for case, (_, _, _, names, _) in CASES.items() if mesh in names)
    files = sorted(folder.glob(f"{case}-{mesh}-*.safetensors"))
    saved = read_shards(files, lambda name: None)
    weights = torch.load(folder / f"{case}-{mesh}-0.pt")
    assert all(torch.equal(saved[f"model.{name}"], weight) for name, weight in weights.items())
    assert len(saved) == 4 * len(weights), "weights, two moments and a count each"
    written = sum(tensor.numel() for file in files for tensor in load_file(file).values())
    assert written == sum(tensor.numel() for tensor in saved.values())


def test_what_is_not_finite_on_one_rank_is_skipped_by_all(folder: Path) -> None:
    for file in folder.glob("policy-*.json"):
        metrics = json.loads(file.read_text())
        assert [step["skipped"] for step in metrics] == [
            float(n in (FAULTY, EMPTY)) for n in range(len(metrics))
        ]
        assert all(step["grad_norm"] > 0.1 for step in metrics if not step["skipped"]), (
            "clipping at 0.05 is active"
        )


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks that share a model have found out; each has asserted what it can see by
    itself."""

    def make(folder: Path) -> None:
        write_tiny_model(folder / "model", "qwen3")
        write_tiny_model(folder / "big", "llama", **BIG)
        run_ranks("tests.training.sharded_worker", 2, folder)

    return made_once(tmp_path_factory, "parts", make)


def test_a_reference_scores_as_whole_weights_do(parts: Path) -> None:
    plain = TorchScorer(load_model(parts / "model"), max_tokens_per_micro_batch=30)
    wanted = plain.forward(ragged_batch(), OUTPUTS)

    for dtype, atol in (("float32", 1e-5), ("bfloat16", 0.1)):
        found = [torch.load(parts / f"scores-{dtype}-{rank}.pt") for rank in range(2)]
        for name in OUTPUTS:
            together = torch.cat([rank[name] for rank in found])
            torch.testing.assert_close(together, wanted.flat(name), rtol=0, atol=atol)


def test_no_rank_ever_holds_the_whole_model(parts: Path) -> None:
    """Neither while it is loaded and checked, nor while its weights are asked for one after the
    other."""
    size = (parts / "big" / "model.safetensors").stat().st_size
    assert 5e7 < size < 2e8
    for rank in range(2):
        grown = json.loads((parts / f"memory-{rank}.json").read_text())
        assert size / 2 < grown["sharded"] < 0.75 * size
        assert grown["whole"] > size, "so that what was measured is what a model takes"
