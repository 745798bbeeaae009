"""Reward models: `transformers` sequence classifiers with one label."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from distflow.errors import UserError
from distflow.models.loading import ModelSource, own_aligned_memory, refuse_garbage
from distflow.models.model_folder import code_of, require_files
from distflow.models.model_paths import is_local

HEAD = "score"
"""The linear head of decoders: `transformers` reads it at the last token of a text."""


def load_reward_model(
    path: str | Path, *, dtype: torch.dtype, device: torch.device | str, revision: str | None = None
) -> PreTrainedModel:
    """A sequence classifier with one label, for `score_ids`; its head is always float32.

    path: see `resolve_path`. Only safetensors are read, and no code that comes with the model is
    run. Raises UserError for a model that cannot be found or read, or has another head or none
    (e.g. a language model).
    """
    source = ModelSource(path, revision=revision)
    if is_local(source.path):
        require_files(source.path, ("*.safetensors",), "safetensors")

    try:
        config = source.config()
    except UserError:
        if is_local(source.path) and (code := code_of(source.path)):
            raise UserError(
                f"{source} comes with Python code ({', '.join(code)}), which is not run for a "
                "reward model: use a family that transformers supports"
            ) from None
        raise

    check_config(source, config)
    model, missing = source.pretrained(
        AutoModelForSequenceClassification, config, dtype, only_safetensors=True
    )
    if missing:
        raise UserError(
            f"{source} is not a reward model: its weights lack {', '.join(missing[:4])}"
        )

    refuse_garbage(model)
    own_aligned_memory(model)
    if isinstance(head := getattr(model, HEAD, None), nn.Linear):
        head.float()
    return nn.Module.to(model, torch.device(device)).eval()


def check_config(source: ModelSource, config: PreTrainedConfig) -> None:
    """Raises UserError for the config of anything but a sequence classifier with one label."""
    if type(config) not in AutoModelForSequenceClassification._model_mapping:
        raise UserError(
            f"{source} cannot be a reward model: its family '{config.model_type}' has no classifier"
        )

    if config.num_labels != 1:
        what = next(iter(config.architectures or []), "model")
        if what.endswith("CausalLM"):
            labels = ""
        else:
            labels = f" of num_labels={config.num_labels}, not 1"

        raise UserError(
            f"{source} is not a reward model, but a {what}{labels}: train one from pairs (distflow "
            "train rm), or let the model judge in words (docs/judges.md)"
        )


def longest_text(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The most tokens that the model can read, by its config and tokenizer (which has 1e30 if it
    knows no limit)."""
    limits = [
        getattr(config.get_text_config(), "max_position_embeddings", None),
        tokenizer.model_max_length,
    ]
    return min(
        (int(each) for each in limits if each is not None and 0 < each < 2**31), default=None
    )


@torch.inference_mode()
def score_ids(
    model: PreTrainedModel, ids: Sequence[Sequence[int]], pad_id: int, max_tokens: int
) -> list[float]:
    """The score of each text.

    ids: tokens of each text, none empty. pad_id: the padding token, which may also occur in texts.
    max_tokens: of a forward, including padding; a longer text runs alone.
    """
    scores = [0.0] * len(ids)
    order = sorted(range(len(ids)), key=lambda i: (-len(ids[i]), i))
    while order:  # the first text of a micro-batch is the longest, and determines its width
        number = max(max_tokens // len(ids[order[0]]), 1)
        chosen = order[:number]
        order = order[number:]
        found = _score(model, [ids[i] for i in chosen], pad_id).tolist()
        for i, score in zip(chosen, found, strict=True):
            scores[i] = score

    return scores


def _score(model: PreTrainedModel, ids: Sequence[Sequence[int]], pad_id: int) -> Tensor:
    """`(n,)`. Padded on the right, so that no position moves; a decoder's head is read at each
    text's last token by its length: `transformers` looks for the last non-padding token, and finds
    another one if texts end with it."""
    device = model.device
    lengths = torch.tensor([len(text) for text in ids], device=device)
    rows = [torch.tensor(text, device=device) for text in ids]
    padded = pad_sequence(rows, batch_first=True, padding_value=pad_id)
    mask = (torch.arange(padded.shape[1], device=device) < lengths[:, None]).long()
    head = getattr(model, HEAD, None)
    if not isinstance(head, nn.Linear):  # an encoder, which reads the whole text
        return model(input_ids=padded, attention_mask=mask).logits[:, 0].float()

    hidden = model.base_model(input_ids=padded, attention_mask=mask).last_hidden_state
    last = hidden[torch.arange(len(ids), device=device), lengths - 1]
    return head(last.float())[:, 0]
