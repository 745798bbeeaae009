"""Loading models and tokenizers: what comes out, and one clear message for everything that can be
wrong."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from distflow.errors import UserError
from distflow.models.loading import ModelSource, load_model, load_tokenizer, stop_token_ids
from distflow.models.model_paths import resolve_path
from tests.tiny_models import tiny_tokenizer, write_tiny_model


@pytest.fixture
def folder(tmp_path):
    return write_tiny_model(tmp_path / "model")


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_come_out_as_stored_in_the_dtype_asked_for(folder, dtype):
    model = load_model(folder, dtype=dtype)
    stored = load_file(folder / "model.safetensors")
    loaded = dict(model.named_parameters())
    assert stored.keys() == loaded.keys()

    for name, weight in stored.items():
        assert torch.equal(loaded[name], weight.to(dtype))
        assert loaded[name].data_ptr() % 64 == 0, (
            "rounding must not depend on where the file's header ended"
        )

    assert not model.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [1e30, -1e30, 1e6, float("nan"), float("inf")])
def test_garbage_in_a_file_of_weights_is_found(folder, dtype, value):
    stored = load_file(folder / "model.safetensors")
    name = next(name for name in stored if "down_proj" in name)
    stored[name] = stored[name].to(dtype)
    stored[name][0, 1] = value
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"damaged: '{name}' "):
        load_model(folder, dtype=dtype)


def test_random_weights_depend_on_the_seed_alone(folder):
    (folder / "model.safetensors").unlink()
    torch.manual_seed(1)
    first = load_model(folder, init="random", seed=7)
    after = torch.rand(())
    torch.manual_seed(1)
    untouched = torch.rand(())
    torch.manual_seed(2)
    again = load_model(folder, init="random", seed=7)
    other = load_model(folder, init="random", seed=8)
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert torch.equal(after, untouched), "loading must not move the global random state"


def test_dropout_is_off_even_in_training_mode(tmp_path):
    model = load_model(write_tiny_model(tmp_path / "m", attention_dropout=0.5)).train()
    ids = torch.arange(3, 30)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)
    assert all(module.p == 0 for module in model.modules() if isinstance(module, nn.Dropout))


def test_missing_and_odd_paths(tmp_path, folder):
    with pytest.raises(UserError, match="'/no/such/folder'.*'/no'"):
        load_model("/no/such/folder")
    with pytest.raises(UserError, match="no-runs/of/mine'.*'no-runs'"):
        load_model("no-runs/of/mine")
    with pytest.raises(UserError, match=r"config\.json': .* folder, "):
        load_model(folder / "config.json")
    (tmp_path / "x.gguf").touch()
    with pytest.raises(UserError, match="gguf_file"):
        load_model(tmp_path / "x.gguf")
    with pytest.raises(UserError, match="'nonesuch'"):
        resolve_path("builtin:nonesuch")
    with pytest.raises(UserError, match=r"no config\.json"):
        load_model(tmp_path)
    with pytest.raises(UserError, match=r"no config\.json"):
        load_model(tmp_path, init="random")


def test_a_hub_id_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="no-such-org/no-such-model.*HF_HUB_OFFLINE"):
        load_model("no-such-org/no-such-model")
    with pytest.raises(UserError, match="tokenizer of 'no-such-org/no-such-model'"):
        load_tokenizer("no-such-org/no-such-model")


def test_remote_code_of_the_hub_must_be_pinned():
    with pytest.raises(UserError, match="revision"):
        load_model("some-org/some-model", trust_remote_code=True)


def test_folders_without_weights_or_with_broken_ones(folder):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="model' .* weights is cut off"):
        load_model(folder)
    save_file(
        {k: v for k, v in load_file_bytes(whole, folder).items() if "layers.1.mlp" not in k},
        weights,
    )
    with pytest.raises(UserError, match=r"lacks .*layers\.1\.mlp\.down_proj\.weight"):
        load_model(folder)
    weights.unlink()
    with pytest.raises(UserError, match="no weights"):
        load_model(folder)


def load_file_bytes(content: bytes, folder: Path) -> dict[str, torch.Tensor]:
    copy = folder.parent / "copy.safetensors"
    copy.write_bytes(content)
    return load_file(copy)


def test_weights_of_other_shapes_are_refused(folder):
    edit_json(folder / "config.json", hidden_size=64)
    said = (
        r"\d+ weights do not have the sizes that its config.json implies, lm_head.weight is \[\d+, "
        r"\d+\] and .*64\]"
    )
    with pytest.raises(UserError, match=said):
        load_model(folder)


def test_unknown_architectures_are_refused(folder):
    edit_json(folder / "config.json", model_type="nonesuch")
    with pytest.raises(UserError, match="loaded.*nonesuch"):
        load_model(folder)
    (folder / "config.json").write_text('{"model_type": "vit"}')

    for init in ("pretrained", "random"):
        with pytest.raises(UserError):
            load_model(folder, init=init)

    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json' is not"):
        load_model(folder)


def test_gguf_files_that_are_missing_or_broken(folder):
    with pytest.raises(UserError, match=r"other.gguf"):
        load_model(folder, gguf_file="other.gguf")
    (folder / "weights.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"weights\.gguf.* loaded"):
        load_model(folder, gguf_file="weights.gguf")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tokenizers_split_text_as_they_were_saved(tmp_path, family):
    tokenizer = load_tokenizer(write_tiny_model(tmp_path / "m", family))
    text = "2 + 2 = 4\nIs it?  Yes!"
    assert tokenizer(text).input_ids == tiny_tokenizer()(text).input_ids
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_models_without_a_usable_tokenizer(folder):
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(UserError, match="eos_token"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(UserError, match="tokenizer of .* loaded"):
        load_tokenizer(folder)
    for file in folder.glob("tokenizer*"):
        file.unlink()

    with pytest.raises(UserError, match="no tokenizer; .* tokenizer_path"):
        load_tokenizer(folder)


def test_a_tokenizer_without_a_pad_token_gets_its_eos(folder):
    edit_json(folder / "tokenizer_config.json", pad_token=None)
    assert load_tokenizer(folder).pad_token == "<eos>"


def test_a_tokenizer_with_ids_that_the_model_does_not_embed_is_refused_unless_they_were_added(
    folder,
):
    tokenizer = load_tokenizer(folder)
    config = ModelSource(folder).config()
    tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained(folder)
    assert len(load_tokenizer(folder, model=config)) == config.vocab_size + 1
    config.vocab_size -= 1
    last = (
        f"the token ' ' has the id {config.vocab_size}, and the model embeds only the ids below "
        f"{config.vocab_size}"
    )
    with pytest.raises(UserError, match=f"another model's: {last}"):
        load_tokenizer(folder, model=config)


def test_stop_ids_are_those_of_model_tokenizer_and_chat_template(folder):
    model = load_model(folder)
    tokenizer = load_tokenizer(folder)
    assert stop_token_ids(model, tokenizer) == (2,)
    model.generation_config.eos_token_id = [2, 9]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|eot_id|>"]})
    assert stop_token_ids(model, tokenizer) == (2, 9), (
        "a special token that no chat template writes ends nothing"
    )
    tokenizer.chat_template = "{{ messages[0]['content'] }}<|im_end|>"
    im_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert stop_token_ids(model, tokenizer) == (2, 9, im_end)


@pytest.mark.parametrize("elsewhere", ["../x.safetensors", "/dev/zero"])
def test_an_index_that_leads_elsewhere_is_refused(folder, elsewhere):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": elsewhere}}))
    with pytest.raises(UserError, match=f"another folder: '{elsewhere}'"):
        load_model(folder)
