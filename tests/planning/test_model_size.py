"""Sizes of models: as written, and counted from a config against the models that `transformers` builds."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from distflow.errors import UserError
from distflow.planning.model_size import count_parameters, parse_size

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 6, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    ("written", "size"),
    [("70B", 70e9), ("500M", 500e6), ("0.5b", 5e8), ("1.5T", 1.5e12), ("12", 12), (600e9, 600e9), (7, 7), (0, 0)],
)
def test_a_size_is_a_number_with_a_unit(written: str | float, size: float) -> None:
    assert parse_size(written) == size


@pytest.mark.parametrize("written", ["", "B", "7 billion", "-1B", "1e9", -1, float("inf"), float("nan")])
def test_what_is_no_size_is_refused(written: str | float) -> None:
    with pytest.raises(UserError, match="no (size of a model|number of parameters)"):
        parse_size(written)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
        ("mixtral", {"num_local_experts": 4}),
        ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 48}),
        ("qwen3_moe", EXPERTS),
        ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [1]}),
        ("qwen3_moe", {**EXPERTS, "decoder_sparse_step": 2}),
    ],
)
def test_the_count_is_that_of_the_model(kind: str, changes: dict[str, object]) -> None:
    config = AutoConfig.for_model(kind, **{**SHAPE, **changes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert count_parameters(config.to_dict()) == model.num_parameters()
    assert count_parameters({"text_config": config.to_dict()}) == model.num_parameters()


def test_a_config_that_does_not_say_the_shape_is_refused() -> None:
    with pytest.raises(UserError, match=r"does not say its hidden_size: say its size, e\.g\. dag\.model_sizes"):
        count_parameters({"model_type": "bert"})
