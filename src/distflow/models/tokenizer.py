"""Loads tokenizers, and says which tokens end a generation."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from distflow.errors import UserError
from distflow.models.paths import TOKENIZER_FILES, is_local, readable, require_files, resolve_path
from distflow.observe.crash_safe_files import read_object

# Ends of a chat turn. They count only where the tokenizer has them as one special token.
CHAT_END_TOKENS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>", "<|return|>"),
)

_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


def load_tokenizer(
    path: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
    generates: bool = True,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a path (see `resolve_path`) or a GGUF file in its folder; with a pad token where it has an end.

    Raises UserError if there is none, or if it has no end-of-sequence token and something is generated with it.
    """
    source = resolve_path(path)
    if gguf_file is None:
        require_files(source, TOKENIZER_FILES, "tokenizer; set tokenizer_path to a folder that has one")
    options: dict[str, str | bool | None] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    with readable(f"the tokenizer of '{source}'", source, runs_code=trust_remote_code):
        config, own_class = Path(source) / "tokenizer_config.json", None
        if is_local(source) and config.is_file() and (config.parent / "tokenizer.json").is_file():
            own_class = read_object(config).get("tokenizer_class")
        # `AutoTokenizer` rebuilds some families' tokenizers (qwen2) from the vocabulary even where the folder says that
        # its tokenizer is nothing but its tokenizer.json, and so changes how text is split.
        loader: Any = PreTrainedTokenizerFast if own_class in _GENERIC_CLASSES else AutoTokenizer
        tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(source, **options)
    if generates and tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of '{source}' has no eos_token: responses could not end; set it there")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a generation, ascending: the model's eos ids, and those of `end_token_ids`."""
    ids = set(end_token_ids(tokenizer))
    for owner in (model.config, getattr(model, "generation_config", None)):
        found = getattr(owner, "eos_token_id", None)
        ids.update([found] if isinstance(found, int) else found or [])
    return tuple(sorted(ids))


def end_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a turn, ascending: the tokenizer's eos id, and the ends of a chat turn that its chat template
    writes."""
    ids = {int(tokenizer.eos_token_id)}
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    added = tokenizer.get_added_vocab()
    ids.update(added[token] for token in CHAT_END_TOKENS if token in added and token in template)
    return tuple(sorted(ids))
