"""Weights that are not those of the model's files are named at the start."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from distflow.checks.check import Wrong
from distflow.checks.loaded_weights import check_loaded
from distflow.config import load_config
from distflow.models.loading import load_model
from distflow.models.lora import add_lora
from tests.tiny_models import write_tiny_model

ODD = "model.layers.1.self_attn.o_proj"


def begun(folder: Path, model: nn.Module, *overrides: str) -> Any:
    """A run that begins with this model."""
    config = load_config(
        "grpo", [f"actor_rollout_ref.model.path={folder}", *overrides], complete=False
    ).config
    spec = SimpleNamespace(config=config)
    resources = SimpleNamespace(actor=SimpleNamespace(model=model))
    return SimpleNamespace(spec=spec, resources=resources, inputs=SimpleNamespace(resumed=None))


def rescaled(model: nn.Module) -> None:
    model.get_parameter(f"{ODD}.weight").mul_(0.9)


def rounded(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())


@pytest.mark.parametrize("change", [None, rescaled, rounded])
def test_weights_that_are_not_the_files(tmp_path: Path, change: Any) -> None:
    model = load_model(write_tiny_model(tmp_path))
    with torch.no_grad():
        if change is not None:
            change(model)
    with (
        pytest.raises(Wrong, match="of the policy is not what .*model.safetensors has")
        if change
        else nullcontext()
    ):
        assert check_loaded.run(begun(tmp_path, model)) is None


def test_a_weight_without_dimensions_is_passed_over(tmp_path: Path) -> None:
    model = load_model(write_tiny_model(tmp_path))
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    save_file(
        {name: weight.detach().clone() for name, weight in model.named_parameters()},
        tmp_path / "model.safetensors",
    )
    assert check_loaded.run(begun(tmp_path, model)) is None


@pytest.mark.parametrize("is_changed", [False, True])
def test_weights_below_an_adapter(tmp_path: Path, is_changed: bool) -> None:
    model = add_lora(load_model(write_tiny_model(tmp_path)), rank=2)
    if is_changed:
        with torch.no_grad():
            # peft's
            model.get_base_model().get_submodule(ODD).base_layer.weight.mul_(0.9)  # type: ignore[operator]
    with pytest.raises(Wrong, match=f"{ODD}.weight of the policy") if is_changed else nullcontext():
        assert (
            check_loaded.run(begun(tmp_path, model, "actor_rollout_ref.model.lora_rank=2")) is None
        )


def test_models_without_files_are_not_compared(tmp_path: Path) -> None:
    model = load_model(write_tiny_model(tmp_path))
    assert check_loaded.run(begun(tmp_path, model, "actor_rollout_ref.model.init=random")) == ""
    (tmp_path / "model.safetensors").unlink()
    assert (
        check_loaded.run(begun(tmp_path, model))
        == "the model's path has no tensors of the same names"
    )
