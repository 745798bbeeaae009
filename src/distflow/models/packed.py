"""Packed forwards: sequences one after the other in one row, no padding, no attention mask, no cache.

With a cache or a mask of ones `transformers` lets packed sequences see each other without a word, so every model is
checked before it is used: each packed sequence against itself alone, through the model's own forward.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from distflow.config.errors import UserError
from distflow.data.transfer import send
from distflow.models.attention import PACKED_ATTENTION, Packing
from distflow.models.heads import backbone, output_head, unwrapped
from distflow.models.packed_layers import packed_layers, runs_natively
from distflow.models.rows import repeat_rows, take_rows
from distflow.models.shared_prefixes import Sharing, shared_prefixes

# Largest error of a logit, relative to the largest logit: rounding stays well below, a leak is far above.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.08, torch.float16: 0.02}
_CHECK_LENGTHS = (5, 1, 11, 1, 3, 8)


def packed_hidden_states(
    model: nn.Module,
    input_ids: Tensor,
    lengths: Tensor,
    *,
    wanted: Tensor | None = None,
    sharing: Sharing | None = None,
) -> Tensor:
    """Last hidden states `(tokens, hidden)` of sequences that follow each other in `input_ids` `(tokens,)`, or of the
    positions `wanted` `(n,)`, each once. The output head is not run.

    lengths: int64 `(sequences,)` on the CPU, all at least 1. sharing: what the sequences share; an attention that is
    not ours computes it for each.
    """
    decoder = backbone(model)
    lengths = lengths[lengths > 0].cpu()  # FSDP moves what it is called with to the device
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    position_ids = torch.arange(int(lengths.sum())) - starts
    is_ours = decoder.config._attn_implementation == PACKED_ATTENTION  # type: ignore[union-attr]  # a decoder has one
    if not is_ours:
        positions = send(position_ids, input_ids.device)
        states = decoder(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        return _rows(states.last_hidden_state[0], wanted)
    if sharing is not None:
        sharing = Sharing(sharing.kept.cpu(), sharing.place.cpu())  # see above
        input_ids, position_ids = input_ids[send(sharing.kept, input_ids.device)], position_ids[sharing.kept]
    packing = Packing(lengths, input_ids.device, sharing)
    if runs_natively(decoder):
        states = packed_layers(decoder, input_ids, position_ids, packing.sequences)
    else:
        states = decoder(
            input_ids=input_ids[None],
            position_ids=send(position_ids, input_ids.device)[None],
            use_cache=False,
            # A mask of four dimensions `transformers` hands on as it is; for none it would look for the bounds of the
            # sequences in their positions, which waits for the device, and build one of (tokens, tokens).
            attention_mask=torch.empty(1, 1, 1, 1, dtype=torch.bool, device=input_ids.device),
            packing=packing,
        ).last_hidden_state[0]
    if sharing is None:
        return _rows(states, wanted)
    place = send(sharing.place, states.device)
    return repeat_rows(states, place if wanted is None else place[wanted])


def _rows(states: Tensor, wanted: Tensor | None) -> Tensor:
    return states if wanted is None else take_rows(states, wanted)


def packed_logits(model: nn.Module, input_ids: Tensor, lengths: Tensor, sharing: Sharing | None = None) -> Tensor:
    """Logits `(tokens, vocabulary)`, or values `(tokens, 1)`; arguments as `packed_hidden_states`."""
    return output_head(model)(packed_hidden_states(model, input_ids, lengths, sharing=sharing))


def choose_attention(model: nn.Module) -> str:
    """Set and return the fastest attention that keeps packed sequences apart in this model, which has its
    `packed_logits`.

    Raises UserError if none does.
    """
    causal = unwrapped(model)
    errors = {}
    for name in _candidates(causal.config):
        causal.set_attn_implementation(name)
        errors[name], allowed = packed_error(model)
        if errors[name] <= allowed:
            return name
    raise UserError(_refusal(model, errors))


def check_packed_forward(model: nn.Module) -> None:
    """Raise UserError if the model's packed forward is not, sequence by sequence, its plain forward."""
    error, allowed = packed_error(model)
    if not error <= allowed:
        raise UserError(_refusal(model, {unwrapped(model).config._attn_implementation: error}))


@torch.no_grad()
def packed_error(model: nn.Module) -> tuple[float, float]:
    """Largest difference of a logit between packed sequences, two of which begin alike, and each alone, relative to
    the largest logit, and how large rounding may make it.

    `inf` if the attention that is set cannot run the model.
    """
    lengths = torch.tensor(_CHECK_LENGTHS)
    embedding = unwrapped(model).get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(embedding.shape[0], (int(lengths.sum()),), generator=generator)
    ids[-8:-5] = ids[-11:-8]
    sharing, ids = shared_prefixes(ids, lengths), ids.to(embedding.device)
    was_training = model.training
    model.eval()
    try:
        packed: Tensor = model.packed_logits(ids, lengths, sharing)  # type: ignore[operator]  # nn.Module declares no methods
        alone = [model(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(lengths.tolist())]
    except (TypeError, ValueError):  # a keyword that the family's layers do not take, softcap under sdpa, ...
        return float("inf"), 0.0
    finally:
        model.train(was_training)
    expected = torch.cat(alone)
    error = (packed - expected).abs().max() / expected.abs().max()
    return float("inf") if error.isnan() else float(error), _TOLERANCE[packed.dtype]


def _candidates(config: PreTrainedConfig) -> tuple[str, ...]:
    """Ours knows plain causal attention only; a window or a soft cap is left to the family's own code."""
    layer_types = set(getattr(config, "layer_types", None) or ("full_attention",))
    windowed = layer_types != {"full_attention"} or getattr(config, "sliding_window", None) is not None
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return ("eager",)
    return ("sdpa", "eager") if windowed else (PACKED_ATTENTION, "sdpa", "eager")


def _refusal(model: nn.Module, errors: dict[str, float]) -> str:
    tried = ", ".join(f"{name}: relative error {error:.2g}" for name, error in errors.items())
    family = getattr(unwrapped(model).config, "model_type", type(model).__name__)
    return f"models of the family '{family}' cannot be trained packed: a packed sequence is not itself alone ({tried})"
