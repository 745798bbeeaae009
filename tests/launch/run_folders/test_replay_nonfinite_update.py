"""`distflow replay`: the same update again, and which columns, weights and samples are at fault."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from distflow import cli
from distflow.checks.nonfinite import BATCH
from distflow.data.batch import Batch
from distflow.errors import UserError
from distflow.launch.run_folders.replay_nonfinite_update import replay_bundle
from tests.e2e.planting import plant_before_update
from tests.e2e.runs import Playground
from tests.sparse_params import one_fast_in


def make_bundle(
    playground: Playground, monkeypatch: pytest.MonkeyPatch, column: str, *options: str
) -> Path:
    """A run whose second step has a NaN at the last token of its third sample in `column`."""
    count = iter(range(100))

    def spoil(batch: Batch) -> None:
        if next(count) == 1:
            values = batch[column]
            values[2, int(batch.lengths("response")[2]) - 1] = math.nan
            batch[column] = values

    plant_before_update(monkeypatch, spoil)
    run = playground.run(*options, "trainer.total_training_steps=2", "trust.check_freq=0")
    (bundle,) = (run.folder / "bundles").iterdir()
    return bundle


@pytest.mark.parametrize(
    ("column", "options", "role"),
    one_fast_in(
        3,
        [
            ("returns", ["ppo"], "critic"),
            ("ref_log_prob", ["grpo", "actor_rollout_ref.model.lora_rank=4"], "actor"),
            ("advantages", ["grpo"], "actor"),
        ],
        unpack=True,
    ),
)
def test_the_sample_and_the_column_are_named(tmp_path, monkeypatch, column, options, role):
    bundle = make_bundle(Playground(tmp_path), monkeypatch, column, *options)
    lines = list(replay_bundle(bundle))
    assert lines[0].startswith(f"update of the {role} in step 2")
    sample = "4-2"
    assert f"column {column}: 1 entries are not finite" in lines
    assert any(line.startswith("loss nan") and "(in the run: loss nan" in line for line in lines)
    alone = [line for line in lines if "alone" in line]
    assert len(alone) == 1 and alone[0].startswith(f"sample {sample} alone: loss nan")


@pytest.mark.slow
def test_weights_of_the_bundle_are_those_that_are_replayed(tmp_path, monkeypatch):
    bundle = make_bundle(Playground(tmp_path), monkeypatch, "advantages", "grpo")
    spoil(bundle, lambda weights: weights["lm_head.weight"].fill_(math.inf))
    lines = list(replay_bundle(bundle))
    assert any(line.startswith("weight lm_head.weight:") for line in lines)
    assert sum("alone" in line for line in lines) > 5, "every sample meets that weight"


def test_another_model_and_a_batch_without_a_column_are_refused(tmp_path, monkeypatch):
    bundle = make_bundle(Playground(tmp_path), monkeypatch, "advantages", "grpo")
    monkeypatch.undo()
    batch = Batch.load(bundle / BATCH)
    batch.only(name for name in batch.names if name != "ref_log_prob").save(bundle / BATCH)
    with pytest.raises(UserError, match="is damaged.*ref_log_prob"):
        list(replay_bundle(bundle))
    batch.save(bundle / BATCH)
    spoil(bundle, lambda weights: weights.update(other=torch.ones(1)))
    with pytest.raises(UserError, match="weight other .* model"):
        list(replay_bundle(bundle))


def test_a_folder_that_is_no_bundle(tmp_path, capsys):
    assert cli.main(["replay", str(tmp_path)]) == 2
    assert "is not a bundle" in capsys.readouterr().err


def spoil(bundle: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(bundle / "weights.safetensors")
    change(weights)
    save_file(weights, bundle / "weights.safetensors")
