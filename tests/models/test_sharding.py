"""Which models can be divided over how many ranks, by the plans of `transformers`."""

import re

import pytest

from distflow.models.sharding import why_not_divided
from tests.models.families import FAMILIES, OURS
from tests.tiny_models import tiny_config


@pytest.mark.parametrize(
    ("family", "tensor", "experts"),
    [
        ("llama", 2, 1),
        ("phi3", 2, 1),
        ("qwen3_moe", 2, 1),
        ("qwen3_moe", 1, 4),
        ("mixtral", 2, 4),
        ("deepseek_v3", 2, 2),
        ("gpt_oss", 1, 2),
        ("gpt2", 1, 1),
    ],
)
def test_those_that_have_a_plan_can_be_divided(family: str, tensor: int, experts: int) -> None:
    changes = FAMILIES[family].changes if family in FAMILIES else {}
    assert why_not_divided(tiny_config(family, **changes), tensor, experts, adapted=False) is None


@pytest.mark.parametrize(
    ("family", "tensor", "experts", "why"),
    [
        ("gpt2", 2, 1, "layers of the family 'gpt2' (t)"),
        ("qwen3", 1, 2, "experts of the family 'qwen3' (e)"),
        ("llama4_text", 2, 1, "several pieces"),
        ("qwen3_moe", 4, 4, "num_key_value_heads=2"),
        ("qwen3_moe", 1, 3, "e3 does not divide the model's num_experts=4"),
        ("deepseek_v3", 1, 8, "e8 does not divide the model's num_experts=4"),
    ],
)
def test_others_are_refused(family: str, tensor: int, experts: int, why: str) -> None:
    changes = FAMILIES[family].changes if family in FAMILIES else {}
    found = why_not_divided(tiny_config(family, **changes), tensor, experts, adapted=False)
    assert found is not None and re.search(re.escape(why), found)


def test_an_adapter_needs_whole_layers_but_no_whole_set_of_experts() -> None:
    config = tiny_config("qwen3_moe", **FAMILIES["qwen3_moe"].changes)
    assert "lora_rank" in str(why_not_divided(config, 2, 1, adapted=True))
    assert why_not_divided(config, 1, 2, adapted=True) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_divided_where_our_attention_packs_them(family: str) -> None:
    own = FAMILIES[family]
    found = why_not_divided(tiny_config(family, **own.changes), 1, 1, adapted=False, context=2)
    if own.forward == OURS:
        assert found is None
    else:
        assert found is not None and f"family '{family}' needs whole rows (c)" in found


def test_rotations_that_depend_on_the_longest_sequence_need_whole_rows() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = tiny_config("llama", rope_parameters=rope)
    assert "'dynamic'" in str(why_not_divided(config, 1, 1, adapted=False, context=2))
    assert why_not_divided(config, 2, 1, adapted=False) is None
