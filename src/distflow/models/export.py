"""Writes a model and its tokenizer as a folder that `transformers` loads, adapters merged; or the adapter alone, as
`peft` loads it."""

import json
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from distflow.errors import UserError
from distflow.models.loading import quiet_transformers
from distflow.models.lora import has_adapter, named_weights, unwrapped


def export_model(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: str | Path,
    *,
    note: tuple[str, Mapping[str, object]] | None = None,
    adapter: bool = False,
) -> Path:
    """Write config, safetensors and tokenizer to `folder`, which must not exist or be empty; it appears whole.

    note: a JSON file beside them. adapter: write the model's adapter alone, which names the folder or hub id of the
    model below it. Returns the folder.
    Raises UserError if the folder holds something already, or cannot be written.
    """
    target = check_target(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            if adapter:
                model.save_pretrained(aside, save_embedding_layers=False)  # type: ignore[operator]  # peft's
            else:
                _save_whole(model, aside)
            if tokenizer is not None:
                tokenizer.save_pretrained(aside)
            if note is not None:
                (aside / note[0]).write_text(json.dumps(note[1], indent=2) + "\n", "utf-8")
            aside.chmod(stat.S_IMODE(target.stat().st_mode))
            aside.rename(target)  # over the empty folder; refused where somebody filled it meanwhile
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise UserError(f"'{target}' cannot be written: {error}") from error
    return Path(folder)


def _save_whole(model: nn.Module, folder: Path) -> None:
    causal = unwrapped(model)
    weights: dict[str, Tensor] = causal.state_dict()
    if has_adapter(model):
        buffers = {name: buffer for name, buffer in causal.named_buffers() if name in weights}
        weights = {**dict(named_weights(model)), **buffers}
    with quiet_transformers():
        causal.save_pretrained(folder, state_dict=weights)
    file = folder / "config.json"  # a reward model's weights are those of either class
    file.write_text(file.read_text().replace("ForTokenClassification", "ForSequenceClassification"))


def check_target(folder: str | Path) -> Path:
    """The absolute path of a folder that does not exist yet or is empty. Raises UserError for any other."""
    target = Path(folder).expanduser().resolve()
    try:
        is_occupied = target.exists() and (not target.is_dir() or any(target.iterdir()))
    except OSError as error:
        raise UserError(f"'{target}' cannot be looked into: {error.strerror}: export to another folder") from error
    if is_occupied:
        raise UserError(f"'{target}' exists and is not an empty folder: export to another one")
    return target
