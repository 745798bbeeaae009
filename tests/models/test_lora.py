"""Adapters: nothing at the start, off is the base model, merged weights are peft's own."""

from pathlib import Path

import pytest
import torch

from distflow.errors import UserError
from distflow.models.choose_attention import packed_error
from distflow.models.loading import load_model
from distflow.models.lora import adapter_off, add_lora, has_adapter, named_weights
from distflow.models.packed_forward import packed_hidden_states
from tests.tiny_models import write_tiny_model

IDS = torch.arange(3, 40)
LENGTHS = torch.tensor([30, 7])
ROUNDING = 1e-5  # native code computes where there is no adapter, torch where there is one


def adapted(tmp_path: Path, family: str = "qwen3", **options):
    """A model with an adapter that has moved away from its start."""
    model = add_lora(load_model(write_tiny_model(tmp_path / "m", family)), rank=4, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(0))
    return model


def test_a_new_adapter_changes_nothing_and_is_all_that_trains(tmp_path):
    base = load_model(write_tiny_model(tmp_path / "m"))
    expected = packed_hidden_states(base, IDS, LENGTHS)
    model = add_lora(base, rank=4)
    assert has_adapter(model) and not has_adapter(load_model(tmp_path / "m"))
    torch.testing.assert_close(
        packed_hidden_states(model, IDS, LENGTHS), expected, rtol=0, atol=ROUNDING
    )
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable and all(".lora_" in name for name in trainable)
    assert not any("lm_head" in name for name in trainable)


def test_adapters_depend_on_the_seed_alone(tmp_path):
    def first_a(seed: int) -> torch.Tensor:
        model = add_lora(load_model(write_tiny_model(tmp_path / "m")), rank=4, seed=seed)
        return next(p for name, p in model.named_parameters() if "lora_A" in name)

    torch.manual_seed(1)
    one = first_a(5)
    torch.manual_seed(2)
    assert torch.equal(one, first_a(5)) and not torch.equal(one, first_a(6))


def test_switched_off_the_model_is_its_own_reference(tmp_path):
    model = adapted(tmp_path)
    base = load_model(tmp_path / "m")

    with torch.no_grad():
        with_adapter = packed_hidden_states(model, IDS, LENGTHS)
        with adapter_off(model):
            off = packed_hidden_states(model, IDS, LENGTHS)
            torch.testing.assert_close(
                off, packed_hidden_states(base, IDS, LENGTHS), rtol=0, atol=ROUNDING
            )

        assert torch.equal(packed_hidden_states(model, IDS, LENGTHS), with_adapter)

    assert (with_adapter - packed_hidden_states(base, IDS, LENGTHS)).abs().max() > 0.1
    assert any(p.requires_grad for p in model.parameters()), (
        "switching back must leave the adapter trainable"
    )


@pytest.mark.parametrize("tied", [False, True])
def test_merged_weights_are_pefts_own_and_leave_the_model_as_it_is(tmp_path, tied):
    folder = write_tiny_model(tmp_path / "m", "qwen2", tie_word_embeddings=tied)
    model = add_lora(load_model(folder), rank=4, alpha=9, target_modules=["q_proj", "down_proj"])

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(0))

    error, allowed = packed_error(model)
    assert error <= allowed
    before = packed_hidden_states(model, IDS, LENGTHS)
    merged = {name: weight.clone() for name, weight in named_weights(model)}
    assert torch.equal(packed_hidden_states(model, IDS, LENGTHS), before)

    plain = dict(load_model(folder).named_parameters())
    unmerged = dict(named_weights(model, merge=False))
    assert all(torch.equal(unmerged.pop(name), weight) for name, weight in plain.items())
    assert unmerged and all(
        torch.equal(weight, model.get_parameter(f"base_model.model.{name}"))
        for name, weight in unmerged.items()
    )
    theirs = dict(model.merge_and_unload().named_parameters())
    assert list(merged) == list(plain) and merged.keys() == theirs.keys()
    for name, weight in merged.items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-6)
    assert not torch.equal(
        merged["model.layers.0.mlp.down_proj.weight"], plain["model.layers.0.mlp.down_proj.weight"]
    )


def test_names_of_no_module_are_refused(tmp_path):
    with pytest.raises(UserError, match="nonesuch"):
        add_lora(load_model(write_tiny_model(tmp_path / "m")), rank=4, target_modules=["nonesuch"])


def test_each_name_must_be_that_of_a_layer(tmp_path):
    """Also beside one that is: nobody wants half of an adapter."""
    with pytest.raises(UserError, match="'q_prj'.*'q_proj'"):
        add_lora(
            load_model(write_tiny_model(tmp_path / "m")), rank=4, target_modules=["v_proj", "q_prj"]
        )


def test_a_text_is_a_pattern_of_whole_names(tmp_path):
    model = load_model(write_tiny_model(tmp_path / "m"))
    with pytest.raises(
        UserError,
        match=r"'q_proj'.*\[q_proj\]",
    ):
        add_lora(model, rank=4, target_modules="q_proj")

    with pytest.raises(UserError, match=r"'\*q_proj'"):
        add_lora(model, rank=4, target_modules="*q_proj")
    assert has_adapter(add_lora(model, rank=4, target_modules=r".*\.q_proj"))
