"""Sequences of a batch are themselves alone in every family, packed or padded."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from distflow.errors import UserError
from distflow.models.choose_attention import choose_attention
from distflow.models.loading import ready
from distflow.models.packed_forward import output_head, packed_hidden_states
from tests.models.families import FAMILIES, Family
from tests.tiny_models import tiny_config

LENGTHS = torch.tensor([1, 7, 1, 23, 2, 12])
VOCABULARY = tiny_config().vocab_size
FAST = ("gpt_oss", "deepseek_v3", "qwen3_5_text")


def make_model(family: Family):
    torch.manual_seed(3)
    config = tiny_config(family.family, **family.changes)
    return ready(AutoModelForCausalLM.from_config(config), torch.float32, "cpu")


def sequences() -> list[torch.Tensor]:
    ids = torch.randint(
        3, VOCABULARY, (int(LENGTHS.sum()),), generator=torch.Generator().manual_seed(5)
    )
    ids[9:12] = ids[1:4]  # after a sequence of one token two begin alike
    return list(ids.split(LENGTHS.tolist()))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FAMILIES],
)
def test_logits_are_those_of_each_sequence_alone(name):
    family = FAMILIES[name]
    parts = sequences()
    model = make_model(family)
    assert choose_attention(model) == family.forward
    wanted = torch.tensor([0, 3, 8, 31, 45])

    with torch.no_grad():
        states = packed_hidden_states(model, torch.cat(parts), LENGTHS)
        some = packed_hidden_states(model, torch.cat(parts), LENGTHS, wanted=wanted)
        expected = torch.cat([model(part[None], use_cache=False).logits[0] for part in parts])

    largest = float(expected.abs().max())
    torch.testing.assert_close(output_head(model)(states), expected, rtol=0, atol=1e-5 * largest)
    torch.testing.assert_close(
        output_head(model)(some), expected[wanted], rtol=0, atol=1e-5 * largest
    )


@pytest.mark.parametrize("name", FAST)
def test_gradients_are_those_of_a_loop(name):
    model = make_model(FAMILIES[name])
    parts = sequences()
    weights = torch.randn(
        int(LENGTHS.sum()), VOCABULARY, generator=torch.Generator().manual_seed(9)
    )
    for part, weight in zip(parts, weights.split(LENGTHS.tolist()), strict=True):
        (model(part[None], use_cache=False).logits[0] * weight).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    (
        output_head(model)(packed_hidden_states(model, torch.cat(parts), LENGTHS)) * weights
    ).sum().backward()
    assert len(expected) > 15

    for parameter_name, grad in expected.items():
        found = model.get_parameter(parameter_name).grad
        atol = 1e-4 * float(grad.abs().max())
        torch.testing.assert_close(found, grad, rtol=0, atol=atol, msg=parameter_name)


def test_a_model_that_looks_ahead_is_refused():
    """Padding on the right is no cure for layers that see what comes after."""
    model = make_model(Family("llama", ""))
    model.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: output + output.mean(1, keepdim=True)
    )
    with pytest.raises(UserError, match="family 'llama'.*padded"):
        choose_attention(model)
