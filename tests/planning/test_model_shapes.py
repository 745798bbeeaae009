"""Shapes: those of published models by name, and those of `config.json`, count what transformers
builds."""

import json
import tomllib
from importlib.resources import files

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from distflow.errors import UserError
from distflow.planning.devices import find_device
from distflow.planning.model_shapes import ModelShape, find_shape

TABLE = tomllib.loads(files("distflow.planning").joinpath("model_shapes.toml").read_text("utf-8"))
SMALL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 120,
}
MIXTURES = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [],
    },
}


@pytest.mark.parametrize("name", TABLE)
def test_a_known_model_has_its_published_number_of_parameters(name):
    entry = TABLE[name]
    shape = ModelShape.of(entry["config"])
    assert shape.parameters / 1e9 == pytest.approx(entry["parameters"], rel=0.005)

    for written in (
        entry["hub"],
        f"somebody/{name}-Instruct",
        name.upper(),
        *entry.get("also", ()),
    ):
        assert find_shape(written, None) == shape


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "kind", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "mixtral", "qwen3_moe"]
)
def test_parameters_are_those_that_transformers_builds(kind, tied):
    sizes = {**SMALL, **MIXTURES.get(kind, {}), "tie_word_embeddings": tied}
    sizes |= {"pad_token_id": 0} if kind == "phi3" else {}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    shape = ModelShape.of(model.config.to_dict())
    assert shape.parameters == model.num_parameters()
    assert shape.kv_elements == 2 * 3 * 2 * 16


def test_a_folder_has_the_shape_of_its_config(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "tie_word_embeddings": True, **SMALL})
    )
    assert find_shape(str(tmp_path), tmp_path).hidden == 48


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        ("{", "cannot be read as a model's config"),
        ("[1]", "it is not an object"),
        ("[" * 10**5, "cannot be read as a model's config"),
        (" " * 5_000_000, "cannot be read as a model's config"),
        ('{"model_type": "mamba"}', "model type 'mamba'"),
        (
            '{"model_type": "llama", "hidden_size": 8}',
            "size .*'num_attention_heads'",
        ),
        (
            json.dumps({"model_type": "llama", **SMALL, "num_hidden_layers": 0}),
            "has a size below 1",
        ),
        (
            json.dumps({"model_type": "llama", **SMALL, "head_dim": 0, "num_attention_heads": 0}),
            "a wrong one",
        ),
        ('{"model_type": "llama", "hidden_size": Infinity}', "a wrong one"),
    ],
)
def test_a_model_without_a_usable_config_is_rejected(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=message):
        find_shape(str(tmp_path), tmp_path)


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(UserError, match=r"'qwen2\.5-7bb'.*'qwen2\.5-7b'"):
        find_shape("qwen2.5-7bb", None)


@pytest.mark.parametrize(
    ("value", "threads"), [("1", 1), ("2,1", 2), ("", None), ("many", None), ("0", None)]
)
def test_the_environment_limits_the_threads_of_a_cpu(value, threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert find_device("cpu").threads == threads and find_device("h100").threads is None


def test_devices_are_found_by_their_own_name_and_by_that_of_torch():
    assert find_device("h100") == find_device("NVIDIA H100 80GB HBM3")
    assert find_device("NVIDIA A100-SXM4-80GB").bandwidth == 2039e9
    assert find_device("H200").memory == 141e9
    cpu = find_device("cpu")
    assert (
        cpu.is_cpu
        and cpu.shared(4).memory == cpu.memory / 4
        and find_device("h100").shared(4) == find_device("h100")
    )

    with pytest.raises(UserError, match="device 'h1000'"):
        find_device("h1000")
