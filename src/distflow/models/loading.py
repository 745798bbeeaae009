"""Loads language models and critics from Hugging Face folders, hub ids and GGUF files, whole or in
shards, ready for packed training forwards; loads their tokenizers, and determines which tokens end
a generation."""

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from distflow.errors import UserError
from distflow.hub_id_or_local_path import WEIGHT_PATTERNS
from distflow.models.choose_attention import TOLERANCE, choose_attention
from distflow.models.image_inputs import (
    IN_OWN_PASSES,
    UNUSED,
    image_error,
    images_of,
    load_image_processor,
    text_decoder,
)
from distflow.models.lora import base_of_adapter, merge_adapter, unwrapped
from distflow.models.model_folder import first_lines, readable, require_files
from distflow.models.model_paths import TOKENIZER_FILES, is_local, resolve_path
from distflow.models.packed_attention import PACKED_ATTENTION
from distflow.models.packed_forward import attach_packed_forward
from distflow.models.sharding import Sharding, empty_model, fill, read_own_parts, shard_model
from distflow.models.weight_soundness import magnitudes, unsound
from distflow.observe.crash_safe_files import read_object

Init = Literal["pretrained", "random"]
Model = TypeVar("Model", bound=nn.Module)

_ALIGNMENT_BYTES = 64

_log = logging.getLogger(__name__)


VALUE_HEAD = "score."
"""The prefix of a value head's weight names."""


class SourceOptions(TypedDict, total=False):
    """Which weights of a model's path.

    init: "random" uses only the folder's config and draws fresh weights from `seed`. revision: of a
    hub id. gguf_file: the name of a GGUF file in the folder, dequantised on loading. scores: a
    reward model, with a head for a score instead of the language model's.
    """

    init: Init
    seed: int
    revision: str | None
    trust_remote_code: bool
    gguf_file: str | None
    scores: bool


def load_model(
    path: str | Path,
    *,
    critic: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    sharding: Sharding | None = None,
    draws_head: bool = True,
    **options: Unpack[SourceOptions],
) -> PreTrainedModel:
    """A causal language model, or with `critic` one with a value head; dropout is off and the
    packed forward checked.

    path: see `resolve_path`. critic: a `transformers` token classifier with one label, from the
    folder of a language model or a critic; without a value head (`score`) it gets a fresh one from
    `seed`, small enough that values start near 0, or is rejected unless `draws_head`. A reward
    model (`scores`) is a critic without a bias, like sequence classifiers. sharding: each rank has
    its part of every weight, and reads only that part of the folder's safetensors; it creates fresh
    or GGUF weights whole first. All ranks call this; then `dtype` is float32. Raises UserError if
    the model cannot be found, read or run packed, or if weights read in parts have other names or
    shapes than the model's."""
    source = ModelSource(path, **options)
    critic = critic or source.scores
    config = source.config()
    if critic and type(config) not in AutoModelForTokenClassification._model_mapping:
        raise _no_critic(source, config)

    auto_class: Any = AutoModelForCausalLM
    reads_images = False
    if critic:
        config.num_labels = 1
        config.classifier_dropout = 0.0
        auto_class = AutoModelForTokenClassification
    elif has_image_processor(source.path, source.revision):
        reads_images = True
        auto_class = AutoModelForImageTextToText

    is_stored_whole = source.gguf_file is not None or source.adapter is not None
    in_parts = sharding is not None and source.init == "pretrained" and not is_stored_whole
    if sharding is not None and in_parts:
        model, missing = source.parts(auto_class, config, sharding, device)
    elif source.init == "random":
        model = _random_model(auto_class, config, source.seed)
        missing = [f"{VALUE_HEAD}weight"] if critic else []
    else:
        surplus = ("lm_head.",) if critic else ()
        model, missing = source.pretrained(auto_class, config, dtype, surplus)

    if critic:
        missing = _settle_value_head(model, source, missing, draws_head)

    if missing:  # `transformers` would have initialised them
        raise UserError(
            f"{source} lacks weights of its architecture: {_few(missing)}; the folder is incomplete"
        )

    if reads_images:
        model.image_processor = load_image_processor(source.path, source.revision)

    if in_parts:
        refuse_garbage(model)
        choose_attention(model)
        return model.eval()

    ready(model, dtype, device)
    if sharding is not None:
        with quiet_transformers():
            shard_model(model, sharding)
    return model


def _settle_value_head(
    model: Any, source: "ModelSource", missing: list[str], draws_head: bool
) -> list[str]:
    """Draw a value head if it is missing; returns the names of other weights that are."""
    if not hasattr(model, "score"):
        raise _no_critic(source, model.config)

    if source.scores:
        model.score.bias = None
        missing = [name for name in missing if name != f"{VALUE_HEAD}bias"]

    if f"{VALUE_HEAD}weight" in missing and not draws_head:
        raise UserError(f"{source} is not a reward model: its weights lack {VALUE_HEAD}weight")

    others = [name for name in missing if not name.startswith(VALUE_HEAD)]
    if len(others) < len(missing):
        _fresh_value_head(model, source.seed)
    return others


def context_length(path: str | Path, **options: Unpack[SourceOptions]) -> int | None:
    """The most tokens of prompt and response together according to the model's config; None if it
    has no limit.

    Loads no weights. Raises UserError as `load_model` does.
    """
    config = ModelSource(path, **options).config().get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


class ModelSource:
    """A model's source, and how to read it. `str()` names it in messages."""

    def __init__(self, path: str | Path, **options: Unpack[SourceOptions]) -> None:
        """Raises UserError for a missing folder or file, and for remote code that is not pinned."""
        self.path = resolve_path(path)
        self.adapter = None

        base = base_of_adapter(self.path)
        if base is not None:
            self.adapter = self.path
            self.path = resolve_path(base)

        self.init = options.get("init", "pretrained")
        self.seed = options.get("seed", 0)
        self.gguf_file = gguf_file = options.get("gguf_file")
        self.scores = options.get("scores", False)
        revision = options.get("revision")
        trust_remote_code = options.get("trust_remote_code", False)
        self.revision = revision
        self._options: dict[str, Any] = {
            "revision": revision,
            "trust_remote_code": trust_remote_code,
        }

        if trust_remote_code and not is_local(self.path) and revision is None:
            raise UserError(
                "trust_remote_code=true runs code from the hub: pin its revision, or use a local "
                "folder"
            )

        if gguf_file is None:
            require_files(self.path, ("config.json",), "config.json")
        else:
            require_files(self.path, (gguf_file,), "such GGUF file")
            self._options["gguf_file"] = gguf_file

    def __str__(self) -> str:
        text = f"model '{self.path}'"
        if self.gguf_file:
            return f"{text} ({self.gguf_file})"
        if self.adapter:
            return f"{text} with '{self.adapter}'"
        return text

    def config(self) -> PreTrainedConfig:
        """The model's config. Raises UserError if it cannot be read, is of an unknown architecture,
        or brings code."""
        with self._readable():
            config = AutoConfig.from_pretrained(self.path, **self._options)

        kernel = getattr(config, "_attn_implementation", None)
        if isinstance(kernel, str) and "/" in kernel:
            raise UserError(
                f"{self} requests code of the hub's repository '{kernel}' (attn_implementation): "
                "remove it"
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

        Warns of stored weights that the model lacks, except those with a prefix in `surplus`.
        only_safetensors: other files are not read.
        """
        if self.gguf_file is None:
            require_files(self.path, WEIGHT_PATTERNS, "weights")

        with self._readable(), quiet_transformers():
            model, info = auto_class.from_pretrained(
                self.path,
                config=config,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # else its error names none of them
                use_safetensors=True if only_safetensors else None,
                **self._options,
            )

        if other := sorted(info["mismatched_keys"]):
            name, stored, expected = other[0]
            raise UserError(
                f"{self}: {len(other)} weights do not have the sizes that its config.json implies, "
                f"{name} is {list(stored)} and should be {list(expected)}: take config.json and "
                "weights of the same model"
            )

        quantizer = getattr(model, "hf_quantizer", None)
        if self.gguf_file is not None and quantizer is not None:
            # its weights are plain by now, and are saved as such
            quantizer.remove_quantization_config(model)

        unused = [name for name in info["unexpected_keys"] if not name.startswith(surplus)]
        if unused:
            _log.warning("%s: weights that its architecture does not use: %s", self, _few(unused))

        if self.adapter is not None:
            with readable(
                f"the adapter '{self.adapter}'", self.adapter, runs_code=False, extra="lora"
            ):
                model = merge_adapter(model, self.adapter)

        return model, sorted(info["missing_keys"])

    def parts(
        self,
        auto_class: Any,
        config: PreTrainedConfig,
        sharding: Sharding,
        device: torch.device | str,
    ) -> tuple[PreTrainedModel, list[str]]:
        """As `pretrained`, in float32 and sharded: first created without weights, as no rank ever
        holds them all."""
        model = empty_model(auto_class, config)
        if self.scores and hasattr(model, "score"):
            model.score.bias = None  # looked up by name
        disable_dropout(model)
        attach_packed_forward(model)
        with quiet_transformers():
            shard_model(model, sharding)

        def allocated(tensor: Tensor) -> Tensor:
            if tensor.is_meta:
                return torch.empty_like(tensor, device="cpu" if sharding.on_host else device)
            return tensor.to(device)

        model._apply(allocated)

        with self._readable():
            path = self.path
            if not is_local(path):
                wanted = ["*.json", "model*.safetensors"]
                path = snapshot_download(path, revision=self.revision, allow_patterns=wanted)

            folder = Path(path)
            if (folder / "generation_config.json").is_file():
                model.generation_config = GenerationConfig.from_pretrained(folder)
            with quiet_transformers():
                return model, read_own_parts(model, folder)

    def _readable(self) -> AbstractContextManager[None]:
        extra = None if self.gguf_file is None else "smollm2"
        return readable(
            str(self), self.path, runs_code=self._options["trust_remote_code"], extra=extra
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence progress bars and the load report: we report what matters."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()

    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _random_model(auto_class: Any, config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Fresh float32 weights that depend only on `seed`; the global random state is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return auto_class.from_config(config, dtype=torch.float32)
        except ValueError as error:
            raise UserError(
                f"no {config.model_type} model of this kind: {first_lines(error)}"
            ) from error


def _fresh_value_head(model: nn.Module, seed: int) -> None:
    """Normal weights of deviation 1 / (width + 1) and a zero bias: values of normalised states
    start near 0."""
    score: nn.Linear = model.score  # type: ignore[assignment]  # looked up by name
    weights = torch.randn(score.weight.shape, generator=torch.Generator().manual_seed(seed))
    fill(score.weight, weights / (score.in_features + 1))
    if score.bias is not None:
        fill(score.bias, torch.zeros(score.bias.shape))


def _no_critic(source: ModelSource, config: PreTrainedConfig) -> UserError:
    return UserError(
        f"{source} cannot be a critic: transformers has no token classifier with a linear 'score' "
        f"for the family '{config.model_type}'; set critic.model.path to a model of another family "
        "(llama, qwen2, qwen3, mistral, ...)"
    )


def ready(model: Model, dtype: torch.dtype, device: torch.device | str) -> Model:
    """Move the model, switch dropout off, choose an attention that keeps packed sequences apart,
    and attach `packed_forward`. Raises UserError for implausible weights."""
    model = model.to(device=torch.device(device), dtype=dtype)
    refuse_garbage(model)
    own_aligned_memory(model)
    disable_dropout(model)
    attach_packed_forward(model)
    choose_attention(model.eval())
    if images_of(unwrapped(model)) is not None:
        _check_images(model)
    return model


def _check_images(model: nn.Module) -> None:
    """Choose whether sequences with images are packed. Raises UserError if the forward differs from
    the model's own in either way. Weights that no image uses are not trained."""
    limit = TOLERANCE[next(model.parameters()).dtype]
    can_pack = text_decoder(model).config._attn_implementation == PACKED_ATTENTION
    for in_own_passes in (False, True) if can_pack else (True,):
        setattr(unwrapped(model), IN_OWN_PASSES, in_own_passes)
        why = "a response changes what comes before it"
        try:
            error, unused = image_error(model)
        # a family of another form
        except (TypeError, ValueError, RuntimeError, KeyError, AttributeError) as reason:
            error = math.inf
            unused = []
            why = first_lines(reason)

        if error <= limit:
            break

    if not error <= limit:
        raise UserError(
            f"models of the family '{unwrapped(model).config.model_type}' cannot be trained with "
            f"images: {why} (relative error {error:.2g})"
        )

    setattr(unwrapped(model), UNUSED, unused)
    for name in unused:
        unwrapped(model).get_parameter(name).requires_grad_(False)


def has_image_processor(path: str | Path, revision: str | None = None) -> bool:
    """Whether the model reads images: its config is of such a family, and its folder has a
    processor of images."""
    if is_local(str(path)):
        has_files = any((Path(path) / name).is_file() for name in IMAGE_PROCESSOR_FILES)
    else:
        has_files = _hub_has_processor(str(path), revision)

    if not has_files:
        return False

    try:
        # None would ask
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    except (OSError, ValueError):  # reported by who loads the model
        return False

    return type(config) in AutoModelForImageTextToText._model_mapping and hasattr(
        config, "vision_config"
    )


@cache
def _hub_has_processor(path: str, revision: str | None) -> bool:
    return any(
        cached_file(path, name, revision=revision, **_IF_THERE) for name in IMAGE_PROCESSOR_FILES
    )


IMAGE_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_IF_THERE: Any = {
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_gated_repo": False,
    "_raise_exceptions_for_connection_errors": False,
}


def disable_dropout(model: nn.Module) -> None:
    """Switch dropout off, so that a policy's old and new log-probs differ only through its
    weights."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]  # a number, as was just seen


def refuse_garbage(model: nn.Module) -> None:
    """Raises UserError for implausible weights; each rank checks its part of sharded ones."""
    wrong = unsound(magnitudes(model.named_parameters()))
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UserError(f"the model's weights are damaged: {wrong[0]}{more}; use an intact copy")


def own_aligned_memory(model: nn.Module) -> None:
    """Copy the weights out of the file that they are mapped from.

    There they start wherever the file's header ends. Rounding of matrix products depends on
    alignment, so the same weights from another file would not give the same bits; and changing a
    mapped file would change the model.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % _ALIGNMENT_BYTES:
            parameter.data = parameter.data.clone()


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(sorted(names)[:4]) + more


# Ends of a chat turn. They count only if the tokenizer has them as one special token.
CHAT_END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|end_of_text|>",
    "<|return|>",
)

_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


def load_tokenizer(
    path: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
    generates: bool = True,
    model: PreTrainedConfig | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a path (see `resolve_path`) or a GGUF file in its folder; with a pad token
    if it has an end.

    Raises UserError if there is none, it has no end-of-sequence token but `generates`, or it is not
    that of `model`."""
    source = resolve_path(path)
    if gguf_file is None:
        require_files(
            source, TOKENIZER_FILES, "tokenizer; add one, or for the policy set tokenizer_path"
        )

    options: dict[str, str | bool | None] = {
        "revision": revision,
        "trust_remote_code": trust_remote_code,
    }
    if gguf_file is not None:
        options["gguf_file"] = gguf_file

    with readable(f"the tokenizer of '{source}'", source, runs_code=trust_remote_code):
        config = Path(source) / "tokenizer_config.json"
        own_class = None
        if is_local(source) and config.is_file() and (config.parent / "tokenizer.json").is_file():
            own_class = read_object(config).get("tokenizer_class")

        # `AutoTokenizer` rebuilds some families' tokenizers (qwen2) from the vocabulary even if the
        # folder declares that tokenizer.json is the whole tokenizer, which changes how text is
        # split.
        loader: Any = PreTrainedTokenizerFast if own_class in _GENERIC_CLASSES else AutoTokenizer
        tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(source, **options)
        if model is not None:
            _require_embeddings(tokenizer, model.get_text_config().vocab_size)

        if generates and tokenizer.eos_token_id is None:
            raise UserError(
                f"the tokenizer of '{source}' has no eos_token: responses could not end; set it "
                "there"
            )

        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if gguf_file is None and has_image_processor(source, revision):
            tokenizer.image_processor = load_image_processor(source, revision)  # see `images_of`

    return tokenizer


def _require_embeddings(tokenizer: PreTrainedTokenizerBase, size: int) -> None:
    """Raises UserError for a token without an embedding. Added ones may lack it, as placeholders of
    images do."""
    own = tokenizer.get_vocab().items() - tokenizer.get_added_vocab().items()
    number, token = max(((number, token) for token, number in own), default=(-1, ""))
    if number >= size:
        why = f"{token!r} has the id {number:,}, and the model embeds only the ids below {size:,}"
        raise UserError(f"its tokenizer is another model's: the token {why}")


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a generation, ascending: the model's eos ids, and those of `end_token_ids`."""
    ids = set(end_token_ids(tokenizer))
    for owner in (model.config, getattr(model, "generation_config", None)):
        found = getattr(owner, "eos_token_id", None)
        ids.update([found] if isinstance(found, int) else found or [])
    return tuple(sorted(ids))


def end_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a turn, ascending: the tokenizer's eos id, and the turn ends that its chat
    template writes."""
    ids = {int(tokenizer.eos_token_id)}
    template = ""
    if isinstance(tokenizer.chat_template, str):
        template = tokenizer.chat_template

    added = tokenizer.get_added_vocab()
    ids.update(added[token] for token in CHAT_END_TOKENS if token in added and token in template)
    return tuple(sorted(ids))
