"""Critics: decoders with one linear output a token, stored as `transformers` token classifiers with one label. Reward
models: `transformers` sequence classifiers with one label.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from distflow.errors import UserError
from distflow.models.loading import Init, ModelSource, own_aligned_memory, random_model, ready, refuse_garbage
from distflow.models.paths import code_of, is_local, require_files
from distflow.models.sharding import fill

VALUE_HEAD = "score."
"""How the names of a value head's weights begin."""


def load_value_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    init: Init = "pretrained",
    seed: int = 0,
    revision: str | None = None,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
) -> PreTrainedModel:
    """A critic from a language model's or a critic's folder; arguments and errors as `load_model`.

    A folder without a value head (`score`) gets a fresh one by `seed`, small enough that values start near 0.
    """
    source = ModelSource(path, revision=revision, trust_remote_code=trust_remote_code, gguf_file=gguf_file)
    config = value_config(source)
    if init == "random":
        model, missing = random_model(AutoModelForTokenClassification, config, seed), [f"{VALUE_HEAD}weight"]
    else:
        model, missing = source.pretrained(AutoModelForTokenClassification, config, dtype, surplus=("lm_head.",))
    if not hasattr(model, "score"):
        raise _no_critic(source, config)
    source.require_all([name for name in missing if not name.startswith(VALUE_HEAD)])
    if missing:
        fresh_value_head(model, seed)
    return ready(model, dtype, device)


def fresh_value_head(model: nn.Module, seed: int) -> None:
    """Normal weights of deviation 1 / (width + 1) and a zero bias: values of normalised states start near 0."""
    score: nn.Linear = model.score  # type: ignore[assignment]  # found by its name
    weights = torch.randn(score.weight.shape, generator=torch.Generator().manual_seed(seed))
    fill(score.weight, weights / (score.in_features + 1))
    if score.bias is not None:
        fill(score.bias, torch.zeros(score.bias.shape))


def value_config(source: ModelSource) -> PreTrainedConfig:
    """The config of a critic with one label. Raises UserError for a family without such a classifier."""
    config = source.config()
    if type(config) not in AutoModelForTokenClassification._model_mapping:
        raise _no_critic(source, config)
    config.num_labels = 1
    config.classifier_dropout = 0.0
    return config


def _no_critic(source: ModelSource, config: PreTrainedConfig) -> UserError:
    return UserError(
        f"{source} cannot be a critic: transformers has no token classifier with a linear 'score' for the family "
        f"'{config.model_type}'; set critic.model.path to a model of another family (llama, qwen2, qwen3, mistral, ...)"
    )


HEAD = "score"
"""The linear head of decoders: `transformers` reads it at the last token of a text."""


def load_reward_model(
    path: str | Path, *, dtype: torch.dtype, device: torch.device | str, revision: str | None = None
) -> PreTrainedModel:
    """A sequence classifier with one label, for `score_ids`; its head is always float32.

    path: as `resolve_path` takes it. Only safetensors are read, and no code that comes with the model is run.
    Raises UserError for a model that cannot be found or read, that has another head or none (a language model, say).
    """
    source = ModelSource(path, revision=revision)
    if is_local(source.path):
        require_files(source.path, ("*.safetensors",), "safetensors")
    config = _config(source)
    if type(config) not in AutoModelForSequenceClassification._model_mapping:
        raise UserError(f"{source} cannot be a reward model: its family '{config.model_type}' has no classifier")
    if config.num_labels != 1:
        what = next(iter(config.architectures or []), "model")
        raise UserError(f"{source} is no reward model, but a {what} of num_labels={config.num_labels}: a score is one")
    model, missing = source.pretrained(AutoModelForSequenceClassification, config, dtype, only_safetensors=True)
    if missing:
        raise UserError(f"{source} is no reward model: its weights lack {', '.join(missing[:4])}")
    refuse_garbage(model)
    own_aligned_memory(model)
    if isinstance(head := getattr(model, HEAD, None), nn.Linear):
        head.float()
    return nn.Module.to(model, torch.device(device)).eval()


def _config(source: ModelSource) -> PreTrainedConfig:
    try:
        return source.config()
    except UserError:
        if is_local(source.path) and (code := code_of(source.path)):
            raise UserError(
                f"{source} comes with Python code ({', '.join(code)}), and none is run for a reward model: use one of "
                "a family that transformers knows"
            ) from None
        raise


@torch.inference_mode()
def score_ids(model: PreTrainedModel, ids: Sequence[Sequence[int]], pad_id: int, max_tokens: int) -> list[float]:
    """The score of each text.

    ids: its tokens, none empty. pad_id: the padding token; it may occur in the texts too. max_tokens:
    of a forward, padding counted; a longer text has one of its own.
    """
    scores = [0.0] * len(ids)
    for chosen in _micro_batches([len(each) for each in ids], max_tokens):
        for i, score in zip(chosen, _score(model, [ids[i] for i in chosen], pad_id).tolist(), strict=True):
            scores[i] = score
    return scores


def _micro_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices, the longest first: the first of a batch says how wide it is."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    while order:
        number = max(max_tokens // lengths[order[0]], 1)
        yield order[:number]
        order = order[number:]


def _score(model: PreTrainedModel, ids: Sequence[Sequence[int]], pad_id: int) -> Tensor:
    """`(n,)`. Padded on the right, so that no position moves; a decoder's head is read at each text's last token by its
    length: `transformers` looks for the last token that is no padding, and finds another where texts end with it."""
    lengths = torch.tensor([len(each) for each in ids], device=model.device)
    padded = torch.full((len(ids), int(lengths.max())), pad_id, device=model.device)
    for row, each in zip(padded, ids, strict=True):
        row[: len(each)] = torch.tensor(each, device=model.device)
    mask = (torch.arange(padded.shape[1], device=model.device) < lengths[:, None]).long()
    head = getattr(model, HEAD, None)
    if not isinstance(head, nn.Linear):  # an encoder, which reads all of the text
        return model(input_ids=padded, attention_mask=mask).logits[:, 0].float()
    hidden = model.base_model(input_ids=padded, attention_mask=mask).last_hidden_state
    last = hidden[torch.arange(len(ids), device=model.device), lengths - 1]
    return head(last.float())[:, 0]
