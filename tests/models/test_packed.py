"""Packed forwards against each sequence alone, in float64, for values and gradients."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from distflow.errors import UserError
from distflow.models.choose_attention import choose_attention
from distflow.models.cpu_kernels import build as native
from distflow.models.loading import ready
from distflow.models.packed_attention import PACKED_ATTENTION
from distflow.models.packed_forward import (
    output_head,
    packed_hidden_states,
)
from distflow.training.torch_engine import checkpoint_activations
from tests.tiny_models import tiny_config

LENGTHS = torch.tensor([1, 7, 1, 1, 23, 2, 12, 1, 22])
FAMILIES = {
    "llama": {},
    "llama-rope-scaled": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "qwen2": {"tie_word_embeddings": True},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 4},
    "smollm3": {},
    "gemma2": {"sliding_window": 4, "final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.5},
}


def make_model(name: str, dtype: torch.dtype = torch.float64):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(tiny_config(name.split("-")[0], **FAMILIES[name]))
    return ready(model, dtype, "cpu")


def sequences() -> list[torch.Tensor]:
    ids = torch.randint(3, 99, (int(LENGTHS.sum()),), generator=torch.Generator().manual_seed(5))
    return list(ids.split(LENGTHS.tolist()))


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_logits_are_those_of_each_sequence_alone(name):
    model = make_model(name)
    parts = sequences()

    with torch.no_grad():
        packed = output_head(model)(packed_hidden_states(model, torch.cat(parts), LENGTHS))
        for ours, part in zip(packed.split(LENGTHS.tolist()), parts, strict=True):
            # gemma2's eager softmax is float32 whatever the model
            torch.testing.assert_close(
                ours, model(part[None]).logits[0], rtol=0, atol=1e-5 if name == "gemma2" else 1e-10
            )


@pytest.mark.parametrize("implementation", [PACKED_ATTENTION, "sdpa", "eager"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_gradients_are_those_of_a_loop(implementation, checkpointing):
    model = make_model("qwen3")
    parts = sequences()
    weights = torch.randn(
        int(LENGTHS.sum()), 32, dtype=torch.float64, generator=torch.Generator().manual_seed(9)
    )
    for part, weight in zip(parts, weights.split(LENGTHS.tolist()), strict=True):
        (model.model(part[None]).last_hidden_state[0] * weight).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    model.set_attn_implementation(implementation)
    model.train()
    if checkpointing:
        checkpoint_activations(model)
    runs = []
    model.model.layers[1].self_attn.register_forward_hook(lambda *_: runs.append(1))
    (packed_hidden_states(model, torch.cat(parts), LENGTHS) * weights).sum().backward()
    assert len(runs) == (2 if checkpointing else 1)
    assert expected.keys() == {name for name, p in model.named_parameters() if p.grad is not None}

    for name, parameter in model.named_parameters():
        if name in expected:
            atol = 1e-4 if implementation == "eager" else 1e-10
            torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("is_native", [True, False])
def test_gradients_in_float32_are_those_of_float64_to_rounding(is_native, monkeypatch):
    if is_native and not native.is_there():
        pytest.skip("wants a C compiler (Debian: apt-get install gcc)")
    monkeypatch.setattr(native, "is_there", lambda: is_native)

    found = []
    for dtype in (torch.float32, torch.float64):
        model = make_model("qwen3", dtype)
        model.set_attn_implementation(PACKED_ATTENTION)
        states = packed_hidden_states(model, torch.cat(sequences()), LENGTHS)
        weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
        (states * weights).sum().backward()
        found.append(
            {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
        )

    assert len(found[0]) > 20
    for name, exact in found[1].items():
        assert (found[0][name] - exact).abs().max() < 1e-5 * exact.abs().max(), name


def test_plain_families_get_our_attention_and_windows_their_own():
    assert make_model("llama").config._attn_implementation == PACKED_ATTENTION
    assert make_model("qwen3").config._attn_implementation == PACKED_ATTENTION
    assert make_model("mistral").config._attn_implementation == "sdpa"
    assert make_model("gemma2").config._attn_implementation == "eager"


def test_a_head_with_an_unknown_rule_is_refused():
    model = make_model("llama", torch.float32)
    original = model.forward

    def forward(*args, **kwargs):
        out = original(*args, **kwargs)
        out.logits = out.logits / 3.0
        return out

    model.forward = forward
    with pytest.raises(UserError, match="family 'llama'"):
        choose_attention(model)


def test_forwards_that_are_not_packed_stay_as_with_sdpa():
    model = make_model("llama")
    ids = torch.randint(3, 99, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # padded on the left, as in generation

    outputs = {}
    for implementation in (PACKED_ATTENTION, "sdpa"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            logits = model(ids, attention_mask=mask).logits
        tokens = model.generate(
            ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0
        )
        outputs[implementation] = (logits, tokens)

    assert torch.equal(outputs["sdpa"][0], outputs[PACKED_ATTENTION][0])
    assert torch.equal(outputs["sdpa"][1], outputs[PACKED_ATTENTION][1])
