"""`model`: a reward model in Hugging Face format scores the response.

Prompt and response are encoded from their messages with its own tokenizer and chat template, since
it may be of another family than the policy. One process holds it and scores for all domains that
use it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distflow.builtin_names import DTYPES
from distflow.data.preference_pairs import encode_text, messages_of
from distflow.errors import UserError, first_line
from distflow.models.loading import load_tokenizer
from distflow.models.reward_model import HEAD, load_reward_model, longest_text, score_ids
from distflow.rewards.reward_results import CUT


def compute_score(
    solution_strs: Sequence[str],
    extra_infos: Sequence[Mapping[str, object] | None],
    prompts: Sequence[str] = (),
    path: str = "",
    revision: str = "",
    dtype: str = "bfloat16",
    device: str = "auto",
    max_length: int = 0,
    max_tokens: int = 16384,
) -> list[dict[str, object]]:
    """The model's score of each response, any finite number, and how many tokens were cut off, if
    any.

    path, revision: a folder or a hub id, with its commit. dtype: of the computation; the head is
    float32. device: "auto" is the first CUDA device that the process sees, else the CPU.
    max_length: tokens that it reads, from the end; 0 for as many as possible. max_tokens: of a
    forward, including padding. Raises UserError if the model cannot be loaded, ValueError for a
    text without a token."""
    if max_length < 0 or max_tokens < 1:
        raise UserError("the reward 'model': max_length is 0 or more, max_tokens 1 or more")

    reward_model = _loaded(path, revision, dtype, device, max_length)
    if not solution_strs:
        return []

    texts = [
        encode_text(
            reward_model.tokenizer,
            messages_of(extra, prompts[i] if prompts else ""),
            response,
            reward_model.max_length,
            reward_model.is_encoder,
        )
        for i, (response, extra) in enumerate(zip(solution_strs, extra_infos, strict=True))
    ]
    if not all(ids for ids, _ in texts):
        raise ValueError("prompt and response have no tokens: there is nothing to score")

    pad_id = reward_model.tokenizer.pad_token_id
    scores = score_ids(
        reward_model.model, [ids for ids, _ in texts], 0 if pad_id is None else pad_id, max_tokens
    )

    return [
        {"score": score, **({CUT: cut} if cut else {})}
        for score, (_, cut) in zip(scores, texts, strict=True)
    ]


def prepare(**options: Any) -> None:
    """Load the model, for `compute_score` with the same options. Raises UserError if that fails."""
    compute_score([], [], **options)


@dataclass(frozen=True)
class _RewardModel:
    """A loaded reward model."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_length: int | None
    """In tokens; None if neither config nor tokenizer has a limit."""
    is_encoder: bool
    """It attends to the whole text, and was trained with prompt and response as a pair."""


@cache
def _loaded(path: str, revision: str, dtype: str, device: str, max_length: int) -> _RewardModel:
    if not path:
        raise UserError("the reward 'model' has no path: write {name: model, options: {path: DIR}}")
    if dtype not in DTYPES:
        raise UserError(f"the reward 'model' has dtype '{dtype}': write {' or '.join(DTYPES)}")

    model = load_reward_model(
        path, dtype=getattr(torch, dtype), device=_device(device), revision=revision or None
    )
    tokenizer = load_tokenizer(path, revision=revision or None, generates=False, model=model.config)

    longest = longest_text(model.config, tokenizer)
    if longest is not None and max_length > longest:
        raise UserError(
            f"the reward 'model' reads {longest} tokens at most, not {max_length} (max_length)"
        )

    is_encoder = not isinstance(getattr(model, HEAD, None), torch.nn.Linear)
    return _RewardModel(model, tokenizer, max_length or longest, is_encoder)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"the reward 'model' has no device '{name}' ({first_line(error)}): write cpu, cuda or "
            "cuda:1"
        ) from error

    return device
