"""The decoder view computes what the module computes, over the module's own parameters."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from distflow.errors import UserError
from distflow.models.cached_decoder import DecoderView, why_not_embedded
from tests.tiny_models import tiny_config

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biased, one kv head, tied": (
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "llama, no grouping": ("llama", {"num_key_value_heads": 4}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn rope": ("llama", {"rope_parameters": YARN}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3, heads wider than the model": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None}),
}


def make(family: str, changes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes)).eval()

    # norms and biases start as ones and zeros, which would hide that they are left out
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))

    return model


@torch.inference_mode()
def view_logits(
    view: DecoderView, ids: list[list[int]], num_prefilled: list[int], extent: int
) -> list[Tensor]:
    """Logits of each sequence from its last prefilled token on, the rest decoded one by one in a
    common batch."""
    kv = view.prefill([tuple(row[:count]) for row, count in zip(ids, num_prefilled, strict=True)])
    pad = extent - kv.keys.shape[-2]
    keys, values = (nn.functional.pad(memory, (0, 0, 0, pad)) for memory in (kv.keys, kv.values))
    logits = [[row] for row in view.logits(kv.hidden)]

    for step in range(len(ids[0]) - num_prefilled[0]):
        positions = torch.tensor([count + step for count in num_prefilled])
        tokens = torch.tensor(
            [row[count + step] for row, count in zip(ids, num_prefilled, strict=True)]
        )
        for row, step_logits in zip(
            logits, view.logits(view.decode(tokens, positions, keys, values)), strict=True
        ):
            row.append(step_logits)

    return [torch.stack(row) for row in logits]


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_decode_equal_the_forward(variant):
    model = make(*VARIANTS[variant])
    view = DecoderView(model)
    num_prefilled = [11, 1, 30, 4]
    num_decoded = 20
    ids = [torch.randint(3, 90, (count + num_decoded,)).tolist() for count in num_prefilled]

    logits = view_logits(view, ids, num_prefilled, extent=64)
    for row, count, got in zip(ids, num_prefilled, logits, strict=True):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([row])).logits[0, count - 1 :]
        assert (got - expected).abs().max() < 1e-4
        assert got.shape == (num_decoded + 1, view.vocab_size)


def test_updates_in_place_are_seen():
    model = make("qwen3", {})
    view = DecoderView(model)
    prompt = (5, 6, 7, 8)
    before = view.logits(view.prefill([prompt]).hidden)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
        expected = model(input_ids=torch.tensor([prompt])).logits[0, -1:]
        after = view.logits(view.prefill([prompt]).hidden)

    assert (after - expected).abs().max() < 1e-4
    assert (after - before).abs().max() > 1e-2


@torch.inference_mode()
def test_padding_beyond_the_positions_of_the_model_does_not_move_the_rotary_table():
    """CUDA graphs of decode steps have its address. The longest prompt ends at the last position,
    and a shorter one has the longest rest."""
    model = make("llama", {})
    view = DecoderView(model)
    size = view.max_positions
    view.decode_paged(
        *torch.tensor([[5], [3]]),
        *torch.zeros(2, 2, 1, 2, 64, 8),
        torch.zeros(1, 1, dtype=torch.int64),
    )
    cos = view._cos
    sin = view._sin
    assert len(cos) == size
    prompts = [tuple(torch.randint(3, 90, (length,)).tolist()) for length in (size, 20)]
    begins = (size - 4, 12)
    whole = view.prefill(prompts)
    cut = [
        (whole.keys[:, row, :, :begin], whole.values[:, row, :, :begin])
        for row, begin in enumerate(begins)
    ]
    after = view.prefill_after(prompts, cut)
    assert view._cos is cos and view._sin is sin
    assert (view.logits(after.hidden) - view.logits(whole.hidden)).abs().max() < 1e-4


def test_sixteen_bit_models_run():
    view = DecoderView(make("qwen2", {}).to(torch.bfloat16))
    assert view.dtype == torch.bfloat16
    assert torch.isfinite(view.logits(view.prefill([(4, 5, 6)]).hidden)).all()


def test_construction_leaves_the_mode_of_the_module():
    model = make("llama", {}).train()
    DecoderView(model)
    assert model.training


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            lambda: GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2)),
            "family 'gpt2'",
        ),
        (
            lambda: make(
                "llama",
                {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            ),
            "rotary type 'dynamic'",
        ),
        (lambda: make("mistral", {"sliding_window": 16}), "sliding window of 16"),
        (
            lambda: make(
                "qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
            ),
            "sliding window of 16",
        ),
    ],
)
def test_other_models_are_refused_with_the_engine_that_can(model, reason):
    made = model()
    with pytest.raises(UserError, match=reason) as refusal:
        DecoderView(made)
    assert "actor_rollout_ref.rollout.name=hf" in str(refusal.value)
    # known before the model is loaded
    assert str(why_not_embedded(made.config)) in str(refusal.value)


def test_a_lookalike_that_computes_something_else_is_refused():
    model = make("llama", {})

    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            mixed, weights = self.inner(*args, **kwargs)
            return 2 * mixed, weights

        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(name) if name == "inner" else getattr(self.inner, name)

    model.model.layers[1].self_attn = Doubled(model.model.layers[1].self_attn)
    with pytest.raises(UserError, match="different logits .* llama"):
        DecoderView(model)


def test_adapters_take_part():
    peft = pytest.importorskip("peft")
    model = make("qwen2", {})
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"], lora_dropout=0.5
    )
    adapted = peft.get_peft_model(model, config).eval()

    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()

    view = DecoderView(adapted)
    ids = [[5, 6, 7, 8, 9, 10]]
    (logits,) = view_logits(view, ids, [3], extent=8)

    with torch.no_grad():
        expected = adapted(input_ids=torch.tensor(ids)).logits[0, 2:]
        with adapted.disable_adapter():
            without = adapted(input_ids=torch.tensor(ids)).logits[0, 2:]

    assert (logits - expected).abs().max() < 1e-3
    assert (logits - without).abs().max() > 0.1
