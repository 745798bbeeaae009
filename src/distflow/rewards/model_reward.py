"""`model`: a reward model in Hugging Face format scores the response.

Prompt and response are encoded from their messages with its own tokenizer and chat template, as it may be of another
family than the policy. One process holds it and scores for all domains that use it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distflow.builtin_names import DTYPES, PROMPT_MESSAGES
from distflow.errors import UserError
from distflow.models.reward_model import HEAD, load_reward_model, score_ids
from distflow.models.tokenizer import load_tokenizer
from distflow.rewards.score import CUT, Case

CASES: tuple[Case, ...] = ()
"""No known cases: a model's scores are its own."""


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
    """The model's score of each response, any finite number, and how many tokens were cut off, if any.

    path, revision: a folder or a hub id, with its commit. dtype: of the computation; the head is float32. device:
    "auto" is the first CUDA device that the process sees, else the CPU. max_length: tokens that it reads, from the end;
    0 is as many as it can. max_tokens: of a forward, padding counted. Raises UserError if the model cannot be
    loaded, ValueError for a text without a token."""
    if max_length < 0 or max_tokens < 1:
        raise UserError("the reward 'model': max_length is 0 or more, max_tokens 1 or more")
    reward_model = _loaded(path, revision, dtype, device, max_length)
    if not solution_strs:
        return []
    texts = [
        reward_model.encode(_messages(extra, prompts[i] if prompts else ""), _whole(response))
        for i, (response, extra) in enumerate(zip(solution_strs, extra_infos, strict=True))
    ]
    if not all(ids for ids, _ in texts):
        raise ValueError("neither prompt nor response has a token: there is nothing to score")
    pad_id = reward_model.tokenizer.pad_token_id
    scores = score_ids(reward_model.model, [ids for ids, _ in texts], 0 if pad_id is None else pad_id, max_tokens)
    return [{"score": score, **({CUT: cut} if cut else {})} for score, (_, cut) in zip(scores, texts, strict=True)]


def prepare(**options: Any) -> None:
    """Load the model, for `compute_score` with the same options. Raises UserError if that fails."""
    compute_score([], [], **options)


@dataclass(frozen=True)
class _RewardModel:
    """max_length: in tokens; None if neither config nor tokenizer has a limit. is_encoder: it attends to the whole
    text, and was trained with prompt and response as a pair."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_length: int | None
    is_encoder: bool

    def encode(self, messages: Sequence[Mapping[str, object]], response: str) -> tuple[list[int], int]:
        """Token ids, and how many were cut off: of a decoder's text the first ones after its start token."""
        ids = self._encode(messages, response)
        cut = 0 if self.max_length is None else max(len(ids) - self.max_length, 0)
        if not cut:
            return ids, 0
        if self.is_encoder:
            return self._encode(messages, response, truncation=True, max_length=self.max_length), cut
        start = ids[:1] if ids[0] == self.tokenizer.bos_token_id else []
        return start + ids[cut + len(start) :], cut

    def _encode(self, messages: Sequence[Mapping[str, object]], response: str, **cut: object) -> list[int]:
        tokenizer = self.tokenizer
        options = {"return_attention_mask": False, "verbose": False, **cut}
        if tokenizer.chat_template:
            answered: list[Any] = [*messages, {"role": "assistant", "content": response}]
            text = tokenizer.apply_chat_template(answered, tokenize=False)
            return tokenizer(text, add_special_tokens=False, **options)["input_ids"]
        prompt = "\n\n".join(str(message.get("content") or "") for message in messages)
        if self.is_encoder:
            return tokenizer(prompt, response, **options)["input_ids"]
        return tokenizer(prompt + response + (tokenizer.eos_token or ""), **options)["input_ids"]


@cache
def _loaded(path: str, revision: str, dtype: str, device: str, max_length: int) -> _RewardModel:
    if not path:
        raise UserError("the reward 'model' has no path: write {name: model, options: {path: DIR}}")
    if dtype not in DTYPES:
        raise UserError(f"the reward 'model' computes in {' or '.join(DTYPES)}, not in '{dtype}' (dtype)")
    model = load_reward_model(path, dtype=getattr(torch, dtype), device=_device(device), revision=revision or None)
    tokenizer = load_tokenizer(path, revision=revision or None, generates=False)
    longest = _longest(model, tokenizer)
    if longest is not None and max_length > longest:
        raise UserError(f"the reward 'model' reads {longest} tokens at most, not {max_length} (max_length)")
    is_encoder = not isinstance(getattr(model, HEAD, None), torch.nn.Linear)
    return _RewardModel(model, tokenizer, max_length or longest, is_encoder)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"the reward 'model' finds no device '{name}' ({reason}): write cpu, cuda or cuda:1") from error
    return device


def _longest(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Tokens that the model can read, by its config and its tokenizer (which has 1e30 if it knows no limit)."""
    limits = [getattr(model.config.get_text_config(), "max_position_embeddings", None), tokenizer.model_max_length]
    return min((int(each) for each in limits if each is not None and 0 < each < 2**31), default=None)


def _messages(extra: Mapping[str, object] | None, prompt: str) -> list[Mapping[str, object]]:
    """A prompt that is plain text is one user message."""
    found = (extra or {}).get(PROMPT_MESSAGES)
    return list(found) if isinstance(found, list) else [{"role": "user", "content": _whole(prompt)}]


def _whole(text: str) -> str:
    """Without single surrogates, which no tokenizer accepts."""
    return text.encode("utf-8", "replace").decode()
