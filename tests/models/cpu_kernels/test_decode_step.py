"""Native steps compute what the module does, row by row, whatever happens to it."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distflow.models.cached_decoder import DecoderView
from distflow.models.choose_attention import choose_attention
from distflow.models.cpu_kernels import build as native
from distflow.models.cpu_kernels.decode_step import NativeStep
from distflow.models.packed_forward import attach_packed_forward
from tests.models.test_cached_decoder import make as make_model

pytestmark = pytest.mark.skipif(
    not native.is_there(), reason="wants a C compiler (Debian: apt-get install gcc)"
)

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biased, tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "one kv head": ("llama", {"num_key_value_heads": 1}),
    "no grouping": ("llama", {"num_key_value_heads": 4}),
    "nothing a whole vector": (
        "llama",
        {
            "hidden_size": 27,
            "intermediate_size": 53,
            "head_dim": 10,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
        },
    ),
    "several vectors": ("llama", {"hidden_size": 80, "intermediate_size": 100, "head_dim": 48}),
    "another epsilon": ("llama", {"rms_norm_eps": 0.3}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 24, "rms_norm_eps": 0.1}),
    "mistral": ("mistral", {"sliding_window": None}),
}


def make(family: str = "llama", **changes: Any) -> Any:
    return make_model(family, changes)


def native_view(model: Any) -> DecoderView:
    view = DecoderView(model, native=True)
    assert view._native is not None
    return view


@torch.inference_mode()
def decoded(view: DecoderView, ids: list[list[int]], starts: list[int], extent: int = 64) -> Tensor:
    """Logits `(rows, steps, vocab)` of the tokens from `starts` on, decoded one by one in a common
    batch."""
    kv = view.prefill([tuple(row[:start]) for row, start in zip(ids, starts, strict=True)])
    keys, values = (
        nn.functional.pad(memory, (0, 0, 0, extent - memory.shape[-2]))
        for memory in (kv.keys, kv.values)
    )

    logits = []
    for step in range(min(len(row) - start for row, start in zip(ids, starts, strict=True))):
        tokens = torch.tensor([row[start + step] for row, start in zip(ids, starts, strict=True)])
        hidden = view.decode(tokens, torch.tensor(starts) + step, keys, values)
        logits.append(view.logits(hidden))

    return torch.stack(logits, dim=1)


def some_rows(count: int, longest: int = 30, steps: int = 6) -> tuple[list[list[int]], list[int]]:
    generator = torch.Generator().manual_seed(count)
    starts = [1 + (7 * row) % longest for row in range(count)]
    return [
        torch.randint(3, 90, (start + steps,), generator=generator).tolist() for start in starts
    ], starts


def exact(model: Any, ids: list[list[int]], starts: list[int], steps: int = 6) -> Tensor:
    """By the module itself, in float64."""
    model = model.double()
    with torch.no_grad():
        rows = [
            model(input_ids=torch.tensor([row])).logits[0, start : start + steps]
            for row, start in zip(ids, starts, strict=True)
        ]

    model.float()
    return torch.stack(rows)


def far(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())


# few are shared by columns, many by rows, with tiles of every size
@pytest.mark.parametrize("count", [1, 2, 13, 61])
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_as_near_to_float64_as_torch(variant, count):
    family, changes = VARIANTS[variant]
    model = make(family, **changes)
    ids, starts = some_rows(count)
    expected = exact(model, ids, starts)
    by_torch = far(decoded(DecoderView(model), ids, starts), expected)
    assert far(decoded(native_view(model), ids, starts), expected) <= 3 * by_torch + 1e-6


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_in_bfloat16_it_rounds_where_the_trainer_does(variant, native):
    """Most logits are the trainer's, bit for bit; of a model all in bfloat16 a seventh, and those
    by chance.

    How many depends on the order in which the processor sums a product: 89 to 100 % were seen.
    """
    family, changes = VARIANTS[variant]
    model = make(family, **changes)
    ids, starts = some_rows(61)
    trained = packed_by_autocast(model, ids, starts)
    view = DecoderView(model, native=native, compute_dtype=torch.bfloat16)
    assert (view._native is not None) is native
    ours = decoded(view, ids, starts)
    assert (ours == trained).float().mean() > 0.8
    all_in_bfloat16 = all_in_bfloat16_differs_by(model, trained, ids, starts)
    assert all_in_bfloat16 > 5e-3
    assert (ours - trained).abs().mean() < all_in_bfloat16 / 20


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_weights_with_a_residual_stream_in_float32_are_nearer_to_the_trainer(variant):
    """As the engine has them on a device; keys and values are rounded too. A checkpoint's weights
    have 16 bits."""
    family, changes = VARIANTS[variant]
    model = make(family, **changes)
    for weight in model.requires_grad_(False).parameters():
        weight.copy_(weight.bfloat16())
    ids, starts = some_rows(61)
    trained = packed_by_autocast(model, ids, starts)
    sixteen = copy.deepcopy(model)
    sixteen_bits(sixteen)
    ours = decoded(DecoderView(sixteen, compute_dtype=torch.bfloat16), ids, starts)
    assert (ours - trained).abs().mean() < 0.8 * all_in_bfloat16_differs_by(
        model, trained, ids, starts
    )


def all_in_bfloat16_differs_by(
    model: Any, trained: Tensor, ids: list[list[int]], starts: list[int]
) -> Tensor:
    """Mean distance of the logits from the trainer's, where weights and all that is computed have
    sixteen bits."""
    sixteen = copy.deepcopy(model)
    sixteen_bits(sixteen)
    return (decoded(DecoderView(sixteen), ids, starts) - trained).abs().mean()


@torch.inference_mode()
def packed_by_autocast(
    model: Any, ids: list[list[int]], starts: list[int], steps: int = 6
) -> Tensor:
    """What `decoded` gives, by the trainer's way through the model."""
    trained = copy.deepcopy(model)
    attach_packed_forward(trained)
    choose_attention(trained)
    lengths = torch.tensor([len(row) for row in ids])

    with torch.autocast("cpu", torch.bfloat16):
        logits = trained.packed_logits(
            torch.tensor([token for row in ids for token in row]), lengths
        ).float()

    rows = zip(logits.split(lengths.tolist()), starts, strict=True)
    return torch.stack([row[start : start + steps] for row, start in rows])


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_a_row_does_not_depend_on_its_batch(compute_dtype):
    view = DecoderView(make(), native=True, compute_dtype=compute_dtype)
    ids, starts = some_rows(61)
    together = decoded(view, ids, starts)

    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            with torch.inference_mode():
                assert torch.equal(decoded(view, ids, starts, extent=200), together)
                for rows in (slice(7, 8), slice(20, 27), slice(30, 55)):
                    # The prompts are torch's, whose products round by their number.
                    alone = decoded_after(view, ids, starts, rows)
                    assert torch.equal(alone, together[rows])
    finally:
        torch.set_num_threads(threads)


def decoded_after(
    view: DecoderView, ids: list[list[int]], starts: list[int], rows: slice
) -> Tensor:
    """Some of the rows alone, over the prompts of all."""
    kv = view.prefill([tuple(row[:start]) for row, start in zip(ids, starts, strict=True)])
    keys, values = (
        nn.functional.pad(memory[:, rows], (0, 0, 0, 20)) for memory in (kv.keys, kv.values)
    )

    logits = []
    for step in range(6):
        tokens = torch.tensor(
            [row[start + step] for row, start in zip(ids[rows], starts[rows], strict=True)]
        )
        logits.append(
            view.logits(view.decode(tokens, torch.tensor(starts[rows]) + step, keys, values))
        )

    return torch.stack(logits, dim=1)


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_the_rest_of_a_prompt_is_its_tokens_one_by_one(compute_dtype):
    """Bit for bit, whatever shares the forward, and however many threads compute it."""
    view = DecoderView(make(), native=True, compute_dtype=compute_dtype)
    ids, starts = some_rows(61, steps=7)  # blocks of rows begin within a sequence
    one_by_one = decoded(view, ids, starts)
    ends = torch.arange(61) % 7
    prompts = [
        tuple(row[: start + end + 1])
        for row, start, end in zip(ids, starts, ends.tolist(), strict=True)
    ]
    with torch.inference_mode():
        kv = view.prefill([tuple(row[:start]) for row, start in zip(ids, starts, strict=True)])
    prefixes = [
        (kv.keys[:, row, :, :start], kv.values[:, row, :, :start])
        for row, start in enumerate(starts)
    ]

    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            with torch.inference_mode():
                for rows in (slice(61), slice(6, 7), slice(20, 23)):
                    made = view.prefill_after(prompts[rows], prefixes[rows])
                    expected = one_by_one[torch.arange(61), ends][rows]
                    assert torch.equal(view.logits(made.hidden), expected)
    finally:
        torch.set_num_threads(threads)


def test_the_memory_may_be_a_window_of_a_larger_one():
    view = native_view(make())
    with torch.inference_mode():
        wide = [torch.randn(2, 9, 2, 40, 8) for _ in range(2)]
        keys, values = (memory[:, 2:7, :, :33] for memory in wide)
        before = [memory.clone() for memory in wide]
        apart = [memory.clone() for memory in (keys, values)]
        tokens = torch.tensor([5, 6, 7, 8, 9])
        positions = torch.tensor([0, 32, 5, 5, 17])
        assert torch.equal(
            view.decode(tokens, positions, keys, values), view.decode(tokens, positions, *apart)
        )

        for memory, was in zip(wide, before, strict=True):
            written = torch.zeros(9, 40, dtype=torch.bool)
            written[torch.arange(2, 7), positions] = True
            changed = (memory != was).any(-1).any(2).any(0)
            assert torch.equal(changed, written)


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_scores_and_gates_far_from_zero(size):
    """Masses of one and of nothing; a gate that is open, and one that is shut."""
    model = make()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(size)
            layer.mlp.gate_proj.weight.mul_(size)
            layer.mlp.down_proj.weight.div_(size)

    ids, starts = some_rows(5)
    expected = exact(model, ids, starts)
    by_torch = far(decoded(DecoderView(model), ids, starts), expected)
    assert far(decoded(native_view(model), ids, starts), expected) <= 3 * by_torch + 1e-4


@pytest.mark.parametrize(
    "name", ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "norm", "lm_head"]
)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_what_is_not_finite_comes_out_as_such(name, number, compute_dtype):
    model = make()
    view = DecoderView(model, native=True, compute_dtype=compute_dtype)
    with torch.no_grad():
        next(weight for key, weight in model.named_parameters() if name in key).view(-1)[3] = number
    assert not torch.isfinite(decoded(view, [[5, 6, 7]], [2])).all()


@pytest.mark.parametrize(
    ("token", "position", "error"),
    [(98, 3, None), (99, 3, IndexError), (-1, 3, IndexError), (5, 8, IndexError)],
)
def test_what_lies_outside_is_refused(token, position, error):
    view = native_view(make(vocab_size=99))
    keys = torch.zeros(2, 1, 2, 8, 8)
    values = torch.zeros(2, 1, 2, 8, 8)

    if error is None:
        assert torch.isfinite(
            view.decode(torch.tensor([token]), torch.tensor([position]), keys, values)
        ).all()
        return

    with pytest.raises(error, match="below 99, .* below 8"):
        view.decode(torch.tensor([token]), torch.tensor([position]), keys, values)
    assert not keys.any()


def test_values_in_bfloat16_are_what_the_projection_makes():
    model = make()
    native, by_torch = (
        DecoderView(model, native=each, compute_dtype=torch.bfloat16) for each in (True, False)
    )
    small, large = (view.prefill([(1, 2, 3, 4), (5, 6)]).values for view in (native, by_torch))
    assert small.dtype == torch.bfloat16 and large.dtype == torch.float32
    assert torch.equal(small.float(), large)


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.5)


def a_norm(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.mul_(1.5)


def laid_elsewhere(model: Any) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data * 1.5


def another_module(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj = nn.Linear(32, 16, bias=False)


def another_layer(model: Any) -> None:
    model.model.layers[0] = make(num_hidden_layers=1, initializer_range=0.1).model.layers[0]


def a_hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, output: 2 * output)


def a_hook_before(model: Any) -> None:
    model.model.norm.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))


def a_forward_of_its_own(model: Any) -> None:
    model.model.layers[1].mlp.forward = lambda x: 3 * x


class Halved(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2


def another_kind(model: Any) -> None:
    model.model.layers[1].self_attn.o_proj.__class__ = Halved


def another_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.GELU()


def sixteen_bits(model: Any) -> None:
    model.to(torch.bfloat16)


def the_head(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)


def a_hook_of_the_head(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda _, __, output: 2 * output)


def another_head(model: Any) -> None:
    model.lm_head = Halved(32, model.lm_head.out_features, bias=False)


def adapters(model: Any) -> None:
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(
        peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False), model
    )


@pytest.mark.parametrize(
    ("change", "stays_native"),
    [
        (in_place, True),
        (a_norm, True),
        (laid_elsewhere, True),
        (another_module, True),
        (another_layer, True),
        (a_hook, False),
        (a_hook_before, False),
        (a_forward_of_its_own, False),
        (another_kind, False),
        (another_activation, False),
        (sixteen_bits, False),
        (adapters, False),
        (the_head, True),
        (a_hook_of_the_head, False),
        (another_head, False),
    ],
)
def test_changes_of_the_model_are_followed(change, stays_native):
    model = make()
    step = NativeStep(model)
    view = native_view(model)
    ids, starts = some_rows(5)
    before = decoded(view, ids, starts)
    change(model)
    assert step.refresh() is stays_native
    after = decoded(view, ids, starts)
    assert far(after, before) > 1e-3
    assert far(after, decoded(DecoderView(model), ids, starts)) < (1e-4 if stays_native else 1e-5)


def test_products_in_bfloat16_follow_the_weights_in_float32():
    model = make()
    view = DecoderView(model, native=True, compute_dtype=torch.bfloat16)
    ids, starts = some_rows(5)
    before = decoded(view, ids, starts)
    in_place(model)
    assert far(decoded(view, ids, starts), before) > 1e-3


@pytest.mark.parametrize(
    "change", [laid_elsewhere, the_head, a_hook_of_the_head, another_head, sixteen_bits]
)
def test_logits_follow_the_head_alone(change):
    model = make()
    step = NativeStep(model)
    view = native_view(model)
    hidden = torch.randn(5, 32)
    before = view.logits(hidden)
    assert step.refresh_head()
    change(model)

    with torch.no_grad():
        assert step.refresh_head() is (change in (laid_elsewhere, the_head))
        hidden = hidden.to(model.dtype)
        after = view.logits(hidden)
        assert far(after, before) > 1e-3
        assert far(after, model.lm_head(hidden)) < 1e-4


def test_it_is_native_again_once_a_hook_is_gone():
    model = make()
    step = NativeStep(model)
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert not step.refresh()
    hook.remove()
    assert step.refresh()


def test_what_torch_does_not_count_is_seen_when_told():
    model = make()
    view = native_view(model)
    ids, starts = some_rows(5)
    before = decoded(view, ids, starts)
    model.model.layers[1].mlp.up_proj.weight.data.mul_(1.5)
    view.refresh_weights()
    after = decoded(view, ids, starts)
    assert far(after, before) > 1e-3
    assert far(after, decoded(DecoderView(model), ids, starts)) < 1e-4
