"""`distflow chat`: chats with a model, with prompts that are tokenised like the data."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import TextStreamer

from distflow.config import Config, load_config
from distflow.data.dataset_columns import BadRows, RawRow
from distflow.data.encode_rows import encode_rows
from distflow.data.encoded_prompts import PromptOptions
from distflow.errors import UserError
from distflow.launch.configured_models import load_policy, load_policy_tokenizer, policy_limits
from distflow.launch.devices import choose_device
from distflow.launch.run_facts import PROMPT_FORMAT
from distflow.launch.run_folders.export_checkpoint import NOTE, with_models_of_runs, write_config_of
from distflow.models.loading import stop_token_ids
from distflow.observe.crash_safe_files import read_object
from distflow.runtime.checkpoint.find_checkpoint import is_of_a_run

Messages = list[dict[str, Any]]
MAX_TOKENS = 512


@dataclass(frozen=True)
class ChatOptions:
    max_tokens: int | None
    """Of a response; None for MAX_TOKENS, or half of a shorter context."""
    temperature: float | None
    """0 is greedy, None the config's."""
    plain: bool
    """No chat template."""
    trust_code: bool
    """Code that a run's config names may run."""


@dataclass(frozen=True)
class Chat:
    model: Any
    """Of transformers, as the tokenizer."""
    tokenizer: Any
    options: PromptOptions
    config: Config
    temperature: float

    @property
    def has_template(self) -> bool:
        return self.options.prompt_format == "chat"

    def respond(self, prompt: str | Messages) -> str:
        """Print the response as it is generated, and return it. Raises UserError for a prompt that
        the template rejects or that leaves no room for a response."""
        row = RawRow("this line", prompt, None, "default", None, {})
        (encoded,) = encode_rows([row], self.tokenizer, self.options, BadRows())
        ids = torch.tensor([encoded.prompt_ids], device=self.model.device)
        rollout = self.config.actor_rollout_ref.rollout

        drawn: dict[str, Any] = {"do_sample": False}
        if self.temperature:
            drawn = {
                "do_sample": True,
                "temperature": self.temperature,
                "top_p": rollout.top_p,
                "top_k": max(rollout.top_k, 0),
                "min_p": rollout.min_p,
            }

        ends = list(stop_token_ids(self.model, self.tokenizer))
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.options.max_response_length,
            eos_token_id=ends,
            pad_token_id=ends[0] if ends else None,
            # not that of the model's generation_config.json
            repetition_penalty=rollout.repetition_penalty,
            stop_strings=list(rollout.stop) or None,
            tokenizer=self.tokenizer,
            streamer=TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
            **drawn,
        )

        return str(self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def load_config_of(
    path: str, overrides: list[str], folder: Path, note: Callable[[str], None], trust_code: bool
) -> Config:
    """The config of a run, with its policy as the model, or preset `grpo` with a model. Arguments
    as for `load_chat`."""
    file = folder / "config.yaml"
    (folder / "run").mkdir()

    if is_of_a_run(path):
        write_config_of(Path(path), file, note, trust_code=trust_code, generates_only=True)
    else:
        values = {"defaults": ["grpo", "_self_"], "actor_rollout_ref": {"model": {"path": path}}}
        file.write_text(yaml.safe_dump(values), "utf-8")

    loaded = load_config(
        str(file), [*overrides, f"trainer.default_local_dir={folder}/run"], complete=False
    )
    return with_models_of_runs(loaded, note).config


def load_chat(
    path: str, overrides: list[str], options: ChatOptions, folder: Path, note: Callable[[str], None]
) -> Chat:
    """A run's policy with the run's config, or a model with the preset `grpo`, in float32.

    folder: an empty one, for the exported policy. note: called with the chosen checkpoint. Raises
    UserError if there is no such model, or the options do not fit it.
    """
    given = options.temperature
    if given is not None and not 0 <= given < inf:
        raise UserError(f"--temperature {given:g}: it must be 0 (greedy) or more")

    config = load_config_of(path, overrides, folder, note, options.trust_code)
    tokenizer = load_policy_tokenizer(config)
    data = config.data
    has_template = _reads_messages(path, tokenizer)
    if is_of_a_run(path):
        has_template = data.prompt_format == "chat"
    context = policy_limits(config).context or sys.maxsize

    max_tokens = options.max_tokens or min(MAX_TOKENS, context // 2)
    if context <= max_tokens:
        raise UserError(
            f"--max-tokens {max_tokens}: the model's context has {context} tokens, including the "
            "prompt"
        )

    prompts = PromptOptions(
        max_prompt_length=context - max_tokens,
        max_response_length=max_tokens,
        prompt_format="chat" if has_template and not options.plain else "text",
        prompt_template=data.prompt_template,
        system_prompt=data.system_prompt,
        enable_thinking=data.enable_thinking,
        template_kwargs=data.apply_chat_template_kwargs,
        filter_overlong=False,
        num_workers=0,
        has_own_replies=True,
    )
    if given is None:
        given = config.actor_rollout_ref.rollout.temperature
    return Chat(load_policy(config, choose_device(config)), tokenizer, prompts, config, given)


def _reads_messages(path: str, tokenizer: Any) -> bool:
    """Whether a model's folder or id has a chat template, and was not trained without it."""
    trained_on = read_object(Path(path) / NOTE).get(PROMPT_FORMAT, "chat")
    return trained_on == "chat" and bool(tokenizer.chat_template)
