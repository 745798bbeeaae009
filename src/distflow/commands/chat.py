"""`distflow chat`: talks to a model, or to the policy of a run, in the terminal. A line becomes tokens as a prompt of the
data does."""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from distflow import __version__
from distflow.commands.shared import at_least, importing
from distflow.errors import UserError

if TYPE_CHECKING:
    from distflow.config import Config
    from distflow.data.prompts import PromptOptions

Messages = list[dict[str, Any]]


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL|RUN", help="a model's folder or hub id, a run's folder or a checkpoint")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the config, e.g. data.system_prompt=")
    parser.add_argument("--max-tokens", type=partial(at_least, 1), metavar="N", help="of a response (512)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy; if left out, that of the config")
    parser.add_argument("--plain", action="store_true", help="without the chat template: each line is a prompt")


def run_chat(arguments: argparse.Namespace) -> int:
    """Answer each line of standard input until it ends. Loads the model in float32."""
    note = partial(print, file=sys.stderr, flush=True)
    note(f"distflow {__version__} · {arguments.model}")
    with TemporaryDirectory() as folder:
        chat = _load(arguments, Path(folder), note)
    note(f"{'with its chat template' if chat.is_chat else 'each line is a prompt, as plain text'}; Ctrl-D ends")
    messages: Messages = []
    for line in _lines():
        asked = [*messages, {"role": "user", "content": line}]
        try:
            response = chat.respond(asked if chat.is_chat else line)
        except UserError as err:  # of this line: another may do
            note(f"distflow: {err}")
            continue
        messages = [*asked, {"role": "assistant", "content": response}]
    return 0


@dataclass(frozen=True)
class _Chat:
    """model, tokenizer: of transformers. temperature: 0 is greedy."""

    model: Any
    tokenizer: Any
    options: "PromptOptions"
    config: "Config"
    temperature: float

    @property
    def is_chat(self) -> bool:
        return self.options.prompt_format == "chat"

    def respond(self, prompt: str | Messages) -> str:
        """Print the response as it is generated, and return it. Raises UserError for a prompt that the template refuses
        or that leaves no room for a response."""
        import torch
        from transformers import TextStreamer

        from distflow.data.dataset_columns import BadRows, RawRow
        from distflow.data.tokenizing import encode_rows
        from distflow.models.tokenizer import stop_token_ids

        row = RawRow("this line", prompt, None, "default", None, {})
        (encoded,) = encode_rows([row], self.tokenizer, self.options, BadRows())
        ids = torch.tensor([encoded.prompt_ids], device=self.model.device)
        rollout, greedy = self.config.actor_rollout_ref.rollout, self.temperature == 0
        sampling = {"temperature": self.temperature, "top_p": rollout.top_p, "top_k": max(rollout.top_k, 0)}
        ends = list(stop_token_ids(self.model, self.tokenizer))
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.options.max_response_length,
            do_sample=not greedy,
            eos_token_id=ends,
            pad_token_id=ends[0] if ends else None,
            streamer=TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
            **({} if greedy else sampling),
        )
        return str(self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def _load(arguments: argparse.Namespace, folder: Path, note: Callable[[str], None]) -> _Chat:
    """By the config of the run, with its policy, or by the preset `grpo` with the model. Raises UserError where there is
    no such model."""
    import yaml

    from distflow.config import load_config

    with importing():
        from distflow.data.prompts import PromptOptions
        from distflow.launch.hardware import choose_device
        from distflow.launch.initial_policy import with_models_of_runs, write_config_of
        from distflow.launch.model_sources import load_policy, policy_context, tokenizer_loader
        from distflow.runtime.checkpoint.find_checkpoint import is_of_a_run

    file, is_run = folder / "config.yaml", is_of_a_run(arguments.model)
    (folder / "run").mkdir()
    if is_run:
        write_config_of(Path(arguments.model), file)
    else:
        values = {"defaults": ["grpo", "_self_"], "actor_rollout_ref": {"model": {"path": arguments.model}}}
        file.write_text(yaml.safe_dump(values), "utf-8")
    overrides = [*arguments.overrides, f"trainer.default_local_dir={folder}/run"]
    config = with_models_of_runs(load_config(str(file), overrides, complete=False), note).config
    tokenizer, context, data = tokenizer_loader(config)(), policy_context(config), config.data
    has_template = data.prompt_format == "chat" if is_run else bool(tokenizer.chat_template)
    max_tokens = arguments.max_tokens or min(512, (context or 1024) // 2)
    options = PromptOptions(
        max_prompt_length=sys.maxsize if context is None else context - max_tokens,
        max_response_length=max_tokens,
        prompt_format="chat" if has_template and not arguments.plain else "text",
        prompt_template=data.prompt_template,
        system_prompt=data.system_prompt,
        enable_thinking=data.enable_thinking,
        template_kwargs=data.apply_chat_template_kwargs,
        filter_overlong=False,
        num_workers=0,
    )
    if options.max_prompt_length < 1:
        raise UserError(f"--max-tokens {max_tokens}: the model's context is {context} tokens, prompt and all")
    given, sampling = arguments.temperature, config.actor_rollout_ref.rollout
    temperature = sampling.temperature if given is None else given
    if temperature < 0:
        raise UserError(f"--temperature {temperature:g}: it is 0, for greedy responses, or more")
    return _Chat(load_policy(config, choose_device(config)), tokenizer, options, config, temperature)


def _lines() -> Iterator[str]:
    """Of a person at a terminal, after a prompt, or of a pipe."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")
