"""Chooses the attention that keeps packed sequences apart in a model, by trying.

With a cache or a mask of ones `transformers` silently lets packed sequences attend to each other,
so each model is first checked: every packed sequence against itself alone, through the model's own
forward. In some families attention cannot keep them apart: recurrent layers (Mamba, Qwen3.5)
continue from the previous sequence, and ALiBi (BLOOM, MPT) counts positions over the whole row.
Their sequences are padded on the right instead, one per row: no real token of a causal model sees
the padding.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from distflow.errors import UserError
from distflow.models.image_inputs import text_decoder
from distflow.models.lora import unwrapped
from distflow.models.packed_attention import PACKED_ATTENTION
from distflow.models.packed_layout import shared_prefixes

TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.08, torch.float16: 0.02}
"""Largest error of a logit, relative to the largest logit: rounding stays well below, a wrong
formula far above."""
_LEAK = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 0.02, torch.float16: 5e-3}
"""The same if tokens of other sequences change and no shape does: zero, except for experts of a
mixture, whose products have as many rows as tokens chose them."""
_CHECK_LENGTHS = (5, 1, 11, 1, 4, 9, 3, 8)
IN_ROWS = "sequences_in_rows"
"""The attribute of a model whose sequences are padded, not packed."""


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

        setattr(causal, IN_ROWS, in_rows)
        errors[tried], allowed = packed_error(model)
        if errors[tried] <= allowed:
            return tried

    all_tried = ", ".join(f"{name}: relative error {error:.2g}" for name, error in errors.items())
    family = getattr(causal.config, "model_type", type(model).__name__)
    raise UserError(
        f"models of the family '{family}' cannot be trained: packing changes a sequence's results "
        f"({all_tried})"
    )


def why_rows_stay_whole(config: PreTrainedConfig) -> str | None:
    """Why ranks cannot divide the packed rows of such a model between them; None if they can."""
    text = config.get_text_config()
    family = config.model_type
    if hasattr(config, "vision_config"):
        return f"the family '{family}' reads images, so its rows are not divided (c)"

    # a family of the user's own code is not in the mapping
    model = AutoModelForCausalLM._model_mapping.get(type(text), None)
    is_ours = _packed_candidates(text)[0] == PACKED_ATTENTION
    if not (is_ours and getattr(model, "_supports_attention_backend", False)):
        return f"attention of the family '{family}' needs whole rows (c)"

    rotation = (getattr(text, "rope_parameters", None) or {}).get("rope_type")
    if rotation in ("dynamic", "longrope"):
        return f"rotations of type '{rotation}' depend on the longest sequence of whole rows (c)"
    return None


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
