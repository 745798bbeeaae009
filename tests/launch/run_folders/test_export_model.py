"""Exported folders load in `transformers` and compute the same."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from distflow.errors import UserError
from distflow.launch.run_folders.export_checkpoint import export_model
from distflow.models.loading import load_model, load_tokenizer
from distflow.models.lora import add_lora
from tests.tiny_models import tiny_tokenizer, write_tiny_model

IDS = torch.arange(3, 40)[None]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_reloaded_by_transformers_the_logits_are_the_same(tmp_path, family, tied):
    model = load_model(write_tiny_model(tmp_path / "m", family, tie_word_embeddings=tied))
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.5)
    out = export_model(model, load_tokenizer(tmp_path / "m"), tmp_path / "deep" / "out")
    again = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert torch.equal(again(IDS).logits, AutoModelForCausalLM.from_pretrained(out)(IDS).logits)
    torch.testing.assert_close(again(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)
    assert (again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()) is tied
    text = "(3 + 4) * 2\n= 14"
    assert load_tokenizer(out)(text).input_ids == tiny_tokenizer()(text).input_ids
    assert load_tokenizer(out).chat_template == tiny_tokenizer().chat_template


def test_an_adapter_is_merged_and_the_model_left_as_it_is(tmp_path):
    model = add_lora(
        load_model(write_tiny_model(tmp_path / "m", "qwen2", tie_word_embeddings=True)), rank=4
    )

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)

    expected = model(IDS).logits
    again = AutoModelForCausalLM.from_pretrained(export_model(model, None, tmp_path / "out"))
    torch.testing.assert_close(again(IDS).logits, expected, rtol=0, atol=3e-5)
    assert torch.equal(model(IDS).logits, expected)
    again = load_model(tmp_path / "out")
    torch.testing.assert_close(again(IDS).logits, expected, rtol=0, atol=3e-5)


def test_an_adapter_alone_is_a_folder_of_peft_that_we_load_too(tmp_path):
    peft = pytest.importorskip("peft")
    model = add_lora(
        load_model(write_tiny_model(tmp_path / "m", "qwen2", tie_word_embeddings=True)),
        rank=4,
        alpha=32,
    )

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(0))

    expected = model(IDS).logits.log_softmax(-1)
    base = load_model(tmp_path / "m")(IDS).logits.log_softmax(-1)
    out = export_model(model, load_tokenizer(tmp_path / "m"), tmp_path / "out", adapter=True)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        file.name for file in out.iterdir()
    }
    assert not (out / "config.json").exists() and not (out / "model.safetensors").exists()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    theirs = peft.PeftModel.from_pretrained(plain, out)(IDS).logits.log_softmax(-1)
    ours = load_model(out)
    torch.testing.assert_close(theirs, expected, rtol=0, atol=3e-5)
    torch.testing.assert_close(ours(IDS).logits.log_softmax(-1), theirs, rtol=0, atol=3e-5)
    assert (expected - base).abs().max() > 0.1
    assert all(parameter.requires_grad for parameter in ours.parameters())
    assert {n for n, _ in ours.named_parameters()} == {
        n for n, _ in load_model(tmp_path / "m").named_parameters()
    }
    assert load_tokenizer(out)("3 + 4").input_ids == tiny_tokenizer()("3 + 4").input_ids


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"peft_type": "LORA"}, "names its base model"),
        ({"peft_type": "IA3", "base_model_name_or_path": "m"}, "is not that of a LoRA adapter"),
        (
            {"peft_type": "LORA", "base_model_name_or_path": "/no/such/folder"},
            "'/no/such/folder': .* folder",
        ),
        (None, "adapter weights"),
    ],
)
def test_an_adapter_that_cannot_be_loaded_is_named(content, words, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(content or {}))
    if content is not None:
        (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=words):
        load_model(tmp_path)


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    model = load_model(write_tiny_model(tmp_path / "m"))
    (tmp_path / "out").mkdir()
    export_model(model, None, tmp_path / "out")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(UserError, match="out' .* empty folder"):
        export_model(model, None, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_nothing_is_drawn_on_the_screen(tmp_path, capfd):
    model = load_model(write_tiny_model(tmp_path / "m"))
    capfd.readouterr()
    export_model(model, tiny_tokenizer(), tmp_path / "out")
    assert capfd.readouterr() == ("", "")
