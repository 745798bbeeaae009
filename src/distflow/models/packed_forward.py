"""Packed forwards: sequences one after another in a single row, without padding, attention mask or
cache; see `choose_attention.py` for models whose attention cannot keep them apart.

The whole pass, from embedding to log-probs, is one method of the model: a wrapper that gathers or
moves weights around a forward (such as FSDP2's `register_fsdp_forward_method`) sees one call that
uses all of them, even the output head. The layers run in native code where there is some
(`native_layers.py`), else by `transformers`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils.rnn import pad_sequence

from distflow.device_transfer import send
from distflow.errors import UserError
from distflow.models.choose_attention import IN_ROWS
from distflow.models.context_share import CONTEXT, ContextShare
from distflow.models.image_inputs import (
    IN_OWN_PASSES,
    ImageInputs,
    embeddings,
    image_positions,
    states_in_own_passes,
    text_decoder,
)
from distflow.models.log_probs import likeliest_tokens, some_targets, token_log_probs
from distflow.models.lora import unwrapped
from distflow.models.native_layers import packed_layers, runs_natively
from distflow.models.number_head import NumberTargets
from distflow.models.packed_attention import PACKED_ATTENTION, take_rows
from distflow.models.packed_layout import Packing, Sharing


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
        if wanted is None:
            return states
        return take_rows(states, wanted)

    if images is not None:
        return _with_images(model, input_ids, lengths, images, wanted)
    if getattr(causal, IN_ROWS, False):
        return _in_rows(decoder, input_ids, lengths, wanted)

    position_ids = _positions(lengths)
    if decoder.config._attn_implementation != PACKED_ATTENTION:
        positions = send(position_ids, input_ids.device)
        states = decoder(
            input_ids=input_ids[None], position_ids=positions[None], use_cache=False
        ).last_hidden_state[0]
        if wanted is None:
            return states
        return take_rows(states, wanted)

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
        if wanted is None:
            return states
        return take_rows(states, wanted)

    place = send(sharing.place, states.device)
    return take_rows(states, place if wanted is None else place[wanted], repeats=True)


def _positions(lengths: Tensor) -> Tensor:
    """The position of each packed token in its sequence: int64 `(tokens,)`."""
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return torch.arange(int(lengths.sum())) - starts


def _transformers_layers(
    decoder: Any, packing: Packing | ContextShare, position_ids: Tensor, **tokens: Any
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
        if softcap:
            return softcap * torch.tanh(out / softcap)
        return out

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


LIKELIEST = ("log_probs", "likeliest_ids", "likeliest_log_probs")
"""Outputs that are computed together."""


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
    """int64 `(n,)`: the tokens that follow them; or `(n, k)`, of which each has its log-prob."""
    sharing: Sharing | None = None
    """The tokens that need not be computed for each sequence, on the CPU; None computes all."""
    images: ImageInputs | None = None
    """Of the sequences; None if there are none."""
    num_likeliest: int = 0
    """Of the outputs `likeliest_ids` and `likeliest_log_probs`, for each target."""
    num_tokens: int | None = None
    """The likeliest are among lower ids; None for all."""


def attach_packed_forward(model: nn.Module) -> None:
    """Give the model the methods `packed_forward` and `packed_logits`; an adapter's wrapper
    forwards them, and a copy of the model has its own."""
    # nn.Module declares no methods
    model.packed_forward = MethodType(packed_forward, model)  # type: ignore[assignment]
    model.packed_logits = MethodType(packed_logits, model)  # type: ignore[assignment]  # likewise


def packed_forward(
    model: nn.Module, inputs: ModelInputs, outputs: tuple[str, ...], *, temperature: float | Tensor
) -> dict[str, Tensor]:
    """The wanted outputs at the predicting positions, each `(n,)` (log-probs as the targets), with
    gradient.

    outputs: of "log_probs" (of the targets, under softmax(logits / temperature)), "entropy" (of the
    same distribution), "values" or "text_scores" (of a value head, a reward model's). temperature:
    of all positions, or float `(n,)`. "likeliest_ids" and "likeliest_log_probs",
    `(n, num_likeliest)`, come with "log_probs", without gradient.
    """
    group = getattr(unwrapped(model), CONTEXT, None)
    if group is not None:
        return _forward_in_shares(model, inputs, outputs, temperature, group)

    hidden = packed_hidden_states(
        model,
        inputs.input_ids,
        inputs.lengths,
        wanted=inputs.predicting,
        sharing=inputs.sharing,
        images=inputs.images,
    )
    return _outputs(model, hidden, inputs, outputs, temperature)


def _forward_in_shares(
    model: nn.Module,
    inputs: ModelInputs,
    outputs: tuple[str, ...],
    temperature: float | Tensor,
    group: ProcessGroup,
) -> dict[str, Tensor]:
    """As `packed_forward`; each rank of the group computes its rows, and has all outputs."""
    decoder = text_decoder(model)
    if decoder.config._attn_implementation != PACKED_ATTENTION or inputs.images is not None:
        raise UserError(
            f"context parallel ranks (c) cannot divide rows of the family "
            f"'{unwrapped(model).config.model_type}' or with images: allocate data parallel ranks "
            "(d) instead"
        )

    lengths = inputs.lengths[inputs.lengths > 0].cpu()  # FSDP moves its arguments to the device
    share = ContextShare.of(lengths, inputs.sharing, group, inputs.input_ids.device)
    ids = inputs.input_ids[share.tokens]
    states = _transformers_layers(decoder, share, share.position_ids[None], input_ids=ids[None])

    own, rows = share.find(inputs.predicting)
    hidden = take_rows(states, rows, repeats=inputs.sharing is not None)
    if isinstance(temperature, Tensor):
        temperature = temperature[own]
    of_own = replace(inputs, targets=some_targets(inputs.targets, own))
    found = _outputs(model, hidden, of_own, outputs, temperature)
    number = len(inputs.predicting)
    return {name: share.gather_outputs(part, own, number) for name, part in found.items()}


def _outputs(
    model: nn.Module,
    hidden: Tensor,
    inputs: ModelInputs,
    outputs: tuple[str, ...],
    temperature: float | Tensor,
) -> dict[str, Tensor]:
    """As `packed_forward`, from the states that predict the targets."""
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

    vocabulary = unwrapped(model).config.get_text_config().vocab_size
    if "likeliest_ids" in outputs:
        assert isinstance(inputs.targets, Tensor), "numbers are not drawn among tokens"
        likeliest = likeliest_tokens(
            output_head(model),
            hidden,
            inputs.targets,
            inputs.num_likeliest,
            num_tokens=inputs.num_tokens,
            temperature=temperature,
            vocabulary=vocabulary,
        )
        for name, values in zip(LIKELIEST, likeliest, strict=True):
            found[name] = values

    elif "log_probs" in outputs or "entropy" in outputs:
        log_probs, entropy = token_log_probs(
            output_head(model),
            hidden,
            inputs.targets,
            temperature=temperature,
            vocabulary=vocabulary,
            with_entropy="entropy" in outputs,
        )
        found["log_probs"] = log_probs
        if entropy is not None:
            found["entropy"] = entropy

    return {name: found[name] for name in outputs}
