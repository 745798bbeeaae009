"""Packed forwards: sequences one after another in a single row, without padding, attention mask or
cache.

With a cache or a mask of ones `transformers` silently lets packed sequences attend to each other,
so each model is first checked: every packed sequence against itself alone, through the model's own
forward. In some families attention cannot keep them apart: recurrent layers (Mamba, Qwen3.5)
continue from the previous sequence, and ALiBi (BLOOM, MPT) counts positions over the whole row.
Their sequences are padded on the right instead, one per row: no real token of a causal model sees
the padding.

The whole pass, from embedding to log-probs, is one method of the model: a wrapper that gathers or
moves weights around a forward (such as FSDP2's `register_fsdp_forward_method`) sees one call that
uses all of them, even the output head.

A decoder's layers run in native code (`packed_layers`). On a CPU in float32 a layer is three
operations, which stay in the processor's cache, instead of some fifty; in larger layers, in
bfloat16, and on CUDA, torch computes the products and native code the rest. `transformers` computes
everything if there is no native code for a model or machine.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from distflow.device_transfer import send
from distflow.errors import UserError
from distflow.models.cached_decoder import FAMILIES
from distflow.models.cpu_kernels import build as native
from distflow.models.cpu_kernels import training_layer as cpu_layer
from distflow.models.cpu_kernels.weight_layout import check_modules, layer_modules, side_by_side
from distflow.models.image_inputs import (
    IN_OWN_PASSES,
    ImageInputs,
    embeddings,
    image_positions,
    states_in_own_passes,
    text_decoder,
)
from distflow.models.log_probs import token_log_probs
from distflow.models.lora import unwrapped
from distflow.models.number_head import NumberTargets
from distflow.models.packed_attention import (
    PACKED_ATTENTION,
    attend_together,
    take_rows,
)
from distflow.models.packed_layout import Packing, Sharing, shared_prefixes

LARGEST = 2**19
"""Elements of a gated MLP's float32 matrix above which the cache cannot hold a thread's data, so
torch's products are faster than ours."""


def runs_natively(decoder: Any) -> bool:
    """Whether `packed_layers` computes the same as the decoder in its present state, with only
    modules of `transformers`: on a CPU with float32 weights, perhaps under autocast to bfloat16; on
    CUDA with products in bfloat16."""
    config = decoder.config
    if config.model_type not in FAMILIES or not _has_code(decoder):
        return False
    head_dim = decoder.layers[0].self_attn.head_dim
    if 2 * len(decoder.rotary_emb.inv_freq) != head_dim:  # only a part of each head is rotated
        return False
    if decoder.training and config.attention_dropout:
        return False
    modules = list(layer_modules(decoder))
    device = decoder.embed_tokens.weight.device.type
    if device == "cuda":
        if head_dim & (head_dim - 1):  # Triton needs powers of two
            return False
        modules.remove(decoder.embed_tokens)  # it is called, as it may have a checkpointing hook
    elif decoder.training and any(layer.gradient_checkpointing for layer in decoder.layers):
        return False
    try:
        check_modules((decoder, *decoder.layers, *modules), config.rms_norm_eps, device)
    except native.NotNative:
        return False
    return True


def _has_code(decoder: Any) -> bool:
    """Whether there is native code for the decoder's device and the dtype of its products."""
    device = decoder.embed_tokens.weight.device.type
    if device == "cpu":
        return native.is_there() and _products_of(decoder) in (torch.float32, torch.bfloat16)
    return device == "cuda" and gpu_layer() is not None and _products_of(decoder) == torch.bfloat16


@functools.cache
def gpu_layer() -> Any:
    """The kernels of `gpu_kernels/training_layer.py`; None without Triton, or if it cannot
    compile."""
    try:
        from distflow.models.gpu_kernels import decode_step, training_layer

        decode_step.try_to_compile(torch.device("cuda"))
    except (ImportError, native.NotNative):
        return None
    return training_layer


def _products_of(decoder: Any) -> torch.dtype:
    weight = decoder.embed_tokens.weight
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def packed_layers(decoder: Any, embedded: Tensor, position_ids: Tensor, packing: Packing) -> Tensor:
    """Last hidden states `(rows, hidden)` of a row of embedded tokens, which have positions
    `(rows,)`; in float32 if the weights are. Differentiable once."""
    dtype = _products_of(decoder)
    weight = decoder.embed_tokens.weight
    config = decoder.config
    hidden = embedded.float()
    cos, sin = (each[0] for each in decoder.rotary_emb(hidden, position_ids[None]))
    with torch.autocast(weight.device.type, enabled=False):
        if weight.device.type == "cuda":
            between = Between(gpu_layer(), partial(attend_together, packing), dtype)
            hidden = _by_torchs_products(decoder.layers, hidden, cos, sin, between)
        elif dtype == torch.bfloat16 or config.hidden_size * config.intermediate_size > LARGEST:
            between = Between(cpu_layer, partial(_on_cpu, packing), dtype)
            hidden = _by_torchs_products(decoder.layers, hidden, cos, sin, between)
        else:
            for layer in decoder.layers:
                operands = cpu_layer.before_attention(layer, hidden, cos, sin)
                mixed = _on_cpu(packing, *operands, layer.self_attn.scaling)
                hidden = cpu_layer.after_attention(layer, hidden, mixed)
        return decoder.norm(hidden).to(weight.dtype)


class Between(NamedTuple):
    """What is computed between the products with weights."""

    kernels: Any
    """A module with `add_norm`, `split_heads` and `gate`."""
    attend: Callable[..., Tensor]
    """Takes queries, keys, values and the scale of scores."""
    dtype: torch.dtype
    """Of the products' inputs and outputs."""


def _on_cpu(
    packing: Packing, queries: Tensor, keys: Tensor, values: Tensor, scale: float
) -> Tensor:
    return cpu_layer.attend(queries, keys, values, packing.sequences, scale)


def _by_torchs_products(
    layers: Any, hidden: Tensor, cos: Tensor, sin: Tensor, between: Between
) -> Tensor:
    """`(rows, hidden)` after all layers. cos, sin: `(rows, head_dim)`."""
    kernels, attend, dtype = between

    def product(x: Tensor, *modules: nn.Linear) -> Tensor:
        """The outputs of each for x, side by side."""
        return linear(x, *side_by_side(modules, dtype))

    def through(layer: Any, hidden: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        attention = layer.self_attn
        mlp = layer.mlp
        hidden, normed = kernels.add_norm(hidden, added, layer.input_layernorm, dtype)
        projected = product(normed, attention.q_proj, attention.k_proj, attention.v_proj)
        mixed = attend(*kernels.split_heads(projected, cos, sin, attention), attention.scaling)
        added = product(mixed.flatten(1).to(dtype), attention.o_proj)
        hidden, normed = kernels.add_norm(hidden, added, layer.post_attention_layernorm, dtype)
        gated = kernels.gate(product(normed, mlp.gate_proj, mlp.up_proj))
        return hidden, product(gated, mlp.down_proj)

    added = None
    for layer in layers:
        if layer.training and layer.gradient_checkpointing:
            hidden, added = checkpoint(
                through, layer, hidden, added, use_reentrant=False, preserve_rng_state=False
            )
        else:
            hidden, added = through(layer, hidden, added)
    return hidden if added is None else hidden + added


# Largest error of a logit, relative to the largest logit: rounding stays well below, a wrong
# formula far above.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.08, torch.float16: 0.02}
# The same if tokens of other sequences change and no shape does: zero, except for experts of a
# mixture, whose products have as many rows as tokens chose them.
_LEAK = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 0.02, torch.float16: 5e-3}
_CHECK_LENGTHS = (5, 1, 11, 1, 4, 9, 3, 8)
_IN_ROWS = "sequences_in_rows"  # marks a model whose sequences are padded, not packed


def packed_hidden_states(
    model: nn.Module,
    input_ids: Tensor,
    lengths: Tensor,
    *,
    wanted: Tensor | None = None,
    sharing: Sharing | None = None,
    images: ImageInputs | None = None,
) -> Tensor:
    """Last hidden states `(tokens, hidden)` of sequences that follow each other in `input_ids`
    `(tokens,)`, or of the positions `wanted` `(n,)`, each once. The output head is not run.

    lengths: int64 `(sequences,)` on the CPU, all at least 1. sharing: their shared prefixes;
    attention other than ours computes them for each sequence. images: those of the sequences, which
    then share no prefixes.
    """
    causal = unwrapped(model)
    decoder = text_decoder(model)
    lengths = lengths[lengths > 0].cpu()  # FSDP moves its arguments to the device
    if images is not None and getattr(causal, IN_OWN_PASSES):
        states = states_in_own_passes(causal, input_ids, lengths, images)
        return states if wanted is None else take_rows(states, wanted)
    if images is not None:
        return _with_images(model, input_ids, lengths, images, wanted)
    if getattr(causal, _IN_ROWS, False):
        return _in_rows(decoder, input_ids, lengths, wanted)
    position_ids = _positions(lengths)
    if decoder.config._attn_implementation != PACKED_ATTENTION:
        positions = send(position_ids, input_ids.device)
        states = decoder(
            input_ids=input_ids[None], position_ids=positions[None], use_cache=False
        ).last_hidden_state[0]
        return states if wanted is None else take_rows(states, wanted)
    if sharing is not None:
        sharing = Sharing(sharing.positions.cpu(), sharing.place.cpu())  # see above
        input_ids = input_ids[send(sharing.positions, input_ids.device)]
        position_ids = position_ids[sharing.positions]
    packing = Packing(lengths, input_ids.device, sharing)
    if runs_natively(decoder):
        positions = send(position_ids, input_ids.device)
        states = packed_layers(decoder, decoder.embed_tokens(input_ids), positions, packing)
    else:
        states = _transformers_layers(
            decoder, packing, position_ids[None], input_ids=input_ids[None]
        )
    if sharing is None:
        return states if wanted is None else take_rows(states, wanted)
    place = send(sharing.place, states.device)
    return take_rows(states, place if wanted is None else place[wanted], repeats=True)


def _positions(lengths: Tensor) -> Tensor:
    """The position of each packed token in its sequence: int64 `(tokens,)`."""
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return torch.arange(int(lengths.sum())) - starts


def _transformers_layers(
    decoder: Any, packing: Packing, position_ids: Tensor, **tokens: Any
) -> Tensor:
    """Last hidden states `(rows, hidden)` by the family's own layers. tokens: ids of one packed
    row, or what `embeddings` gives."""
    states: Tensor = decoder(
        **tokens,
        position_ids=send(position_ids, packing.device),
        use_cache=False,
        # `transformers` passes a four-dimensional mask on unchanged; without one it would find the
        # bounds of the sequences by their positions, which waits for the device, and build one of
        # (tokens, tokens).
        attention_mask=torch.empty(1, 1, 1, 1, dtype=torch.bool, device=packing.device),
        packing=packing,
    ).last_hidden_state[0]
    return states


def _with_images(
    model: nn.Module, input_ids: Tensor, lengths: Tensor, images: ImageInputs, wanted: Tensor | None
) -> Tensor:
    """As `packed_hidden_states`."""
    decoder = text_decoder(model)
    packing = Packing(lengths, input_ids.device)
    embedded = embeddings(model, input_ids, images)
    by_family = image_positions(model, input_ids, lengths, images)
    own = _positions(lengths)
    if by_family is not None:
        states = _transformers_layers(decoder, packing, by_family[:, None], **embedded)
    elif runs_natively(decoder):
        states = packed_layers(
            decoder, embedded["inputs_embeds"][0], send(own, input_ids.device), packing
        )
    else:
        states = _transformers_layers(decoder, packing, own[None], **embedded)
    return states if wanted is None else take_rows(states, wanted)


def _in_rows(decoder: Any, input_ids: Tensor, lengths: Tensor, wanted: Tensor | None) -> Tensor:
    """As `packed_hidden_states`, but each sequence in its own row, padded on the right."""
    padded = pad_sequence(input_ids.split(lengths.tolist()), batch_first=True)
    states = decoder(input_ids=padded, use_cache=False).last_hidden_state
    is_token = torch.arange(padded.shape[1]) < lengths[:, None]
    place = send(is_token.flatten().nonzero()[:, 0], states.device)
    return take_rows(states.flatten(0, 1), place if wanted is None else place[wanted])


def output_head(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Hidden states `(n, hidden)` → logits `(n, vocabulary)`, or `(n, 1)` for a value model.

    It applies the scale or soft cap of families that have one. `choose_attention` compares with the
    model's own logits, so a family with another rule is rejected rather than wrong.
    """
    causal = unwrapped(model)
    config = causal.config.get_text_config()
    head = causal.get_output_embeddings()
    if head is None:
        return causal.score
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)

    def logits(hidden: Tensor) -> Tensor:
        out = head(hidden)
        if scale != 1.0:
            out = out * scale
        return softcap * torch.tanh(out / softcap) if softcap else out

    return logits


def packed_logits(
    model: nn.Module,
    input_ids: Tensor,
    lengths: Tensor,
    sharing: Sharing | None = None,
    images: ImageInputs | None = None,
) -> Tensor:
    """Logits `(tokens, vocabulary)`, or values `(tokens, 1)`; arguments as
    `packed_hidden_states`."""
    return output_head(model)(
        packed_hidden_states(model, input_ids, lengths, sharing=sharing, images=images)
    )


def choose_attention(model: nn.Module) -> str:
    """Set and return the fastest attention that keeps packed sequences apart in this model, which
    has `packed_logits`; if there is none, "sdpa, padded" or "eager, padded".

    Raises UserError if padded sequences do not match either.
    """
    causal = unwrapped(model)
    decoder = text_decoder(model)
    # what computes images keeps its own attention
    owner = causal if decoder.config is causal.config else decoder
    candidates = [(name, False) for name in _packed_candidates(causal.config.get_text_config())]
    errors: dict[str, float] = {}
    for name, in_rows in [*candidates, ("sdpa", True), ("eager", True)]:
        tried = f"{name}, padded" if in_rows else name
        try:
            owner.set_attn_implementation(name)
        except ValueError:  # an attention that the family lacks
            errors[tried] = math.inf
            continue
        setattr(causal, _IN_ROWS, in_rows)
        errors[tried], allowed = packed_error(model)
        if errors[tried] <= allowed:
            return tried
    all_tried = ", ".join(f"{name}: relative error {error:.2g}" for name, error in errors.items())
    family = getattr(causal.config, "model_type", type(model).__name__)
    raise UserError(
        f"models of the family '{family}' cannot be trained: packing changes a sequence's results "
        f"({all_tried})"
    )


def _packed_candidates(config: Any) -> tuple[str, ...]:
    """The attentions that may keep packed sequences apart, the fastest first. Ours supports plain
    causal attention only; a window or a soft cap is left to the family's own code."""
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return ("eager",)
    layer_types = getattr(config, "layer_types", None) or ("full_attention",)
    has_window = getattr(config, "sliding_window", None) is not None
    if has_window or set(layer_types) != {"full_attention"}:
        return "sdpa", "eager"
    return PACKED_ATTENTION, "sdpa", "eager"


@torch.no_grad()
def packed_error(model: nn.Module) -> tuple[float, float]:
    """Largest difference of a logit between packed sequences (two of which begin alike) and each
    one alone, relative to the largest logit, and the limit for rounding; if exceeded, the same
    between packed sequences whose neighbours have other tokens.

    `inf` if the attention that is set cannot run the model.
    """
    lengths = torch.tensor(_CHECK_LENGTHS)
    embedding = unwrapped(model).get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    ids, others = torch.randint(embedding.shape[0], (2, int(lengths.sum())), generator=generator)
    ids[-8:-5] = ids[-11:-8]
    sharing = shared_prefixes(ids, lengths)
    ids = ids.to(embedding.device)
    is_kept = (torch.arange(len(lengths)) % 2 == 1).repeat_interleave(lengths)
    kept = is_kept.nonzero()[:, 0].to(ids.device)
    changed = torch.where(is_kept.to(ids.device), ids, others.to(ids.device))
    was_training = model.training
    model.eval()
    # nn.Module declares no methods
    packed_logits: Callable[..., Tensor] = model.packed_logits  # type: ignore[assignment]
    try:
        packed = packed_logits(ids, lengths, sharing)
        before = packed_logits(ids, lengths)[kept]
        after = packed_logits(changed, lengths)[kept]
        parts = ids.split(lengths.tolist())
        alone = torch.cat(
            [model(input_ids=part[None], use_cache=False).logits[0] for part in parts]
        )
    # a keyword that the family's layers lack, softcap under sdpa, ...
    except (TypeError, ValueError):
        return math.inf, 0.0
    finally:
        model.train(was_training)
    largest = alone.abs().max()
    error = float((packed - alone).abs().max() / largest)
    leak = float((after - before).abs().max() / largest)
    if math.isnan(error + leak):
        return math.inf, 0.0
    if leak > _LEAK[packed.dtype]:
        return leak, _LEAK[packed.dtype]
    return error, TOLERANCE[packed.dtype]


@dataclass(frozen=True)
class ModelInputs:
    """Packed sequences on the model's device."""

    input_ids: Tensor
    """int64 `(tokens,)`, at least one."""
    lengths: Tensor
    """Of the sequences: int64 `(sequences,)`, on the CPU."""
    predicting: Tensor
    """int64 `(n,)`: the positions whose outputs are wanted, each once."""
    targets: Tensor | NumberTargets
    """int64 `(n,)`: the tokens that follow them."""
    sharing: Sharing | None = None
    """The tokens that need not be computed for each sequence, on the CPU; None computes all."""
    images: ImageInputs | None = None
    """Of the sequences; None if there are none."""


def attach_packed_forward(model: nn.Module) -> None:
    """Give the model the methods `packed_forward` and `packed_logits`; an adapter's wrapper
    forwards them, and a copy of the model has its own."""
    # nn.Module declares no methods
    model.packed_forward = MethodType(packed_forward, model)  # type: ignore[assignment]
    model.packed_logits = MethodType(packed_logits, model)  # type: ignore[assignment]  # likewise


def packed_forward(
    model: nn.Module, inputs: ModelInputs, outputs: tuple[str, ...], *, temperature: float | Tensor
) -> dict[str, Tensor]:
    """The wanted outputs at the predicting positions, each `(n,)`, with gradient.

    outputs: of "log_probs" (of the targets, under softmax(logits / temperature)), "entropy" (of the
    same distribution), "values" or "text_scores" (of a value head, a reward model's). temperature:
    of all positions, or float `(n,)`.
    """
    hidden = packed_hidden_states(
        model,
        inputs.input_ids,
        inputs.lengths,
        wanted=inputs.predicting,
        sharing=inputs.sharing,
        images=inputs.images,
    )
    found: dict[str, Tensor] = {}
    if "values" in outputs:
        values = output_head(model)(hidden)[:, 0]
        found["values"] = values if values.dtype == torch.float64 else values.float()
    if "text_scores" in outputs:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        weight = unwrapped(model).score.weight[0]
        # the head is always float32, as in `load_reward_model`
        with torch.autocast(hidden.device.type, enabled=False):
            found["text_scores"] = hidden.to(wide) @ weight.to(wide)
    if "log_probs" in outputs or "entropy" in outputs:
        log_probs, entropy = token_log_probs(
            output_head(model),
            hidden,
            inputs.targets,
            temperature=temperature,
            vocabulary=unwrapped(model).config.get_text_config().vocab_size,
            with_entropy="entropy" in outputs,
        )
        found["log_probs"] = log_probs
        if entropy is not None:
            found["entropy"] = entropy
    return {name: found[name] for name in outputs}
