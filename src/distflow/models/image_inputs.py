"""Images as inputs of a model: its processor, and the model's own forward of each sequence with its
images, which knows their vectors, positions and attention. Such sequences are not packed."""

import inspect
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from distflow.device_transfer import send
from distflow.errors import UserError
from distflow.models.lora import unwrapped
from distflow.untrusted_files import image_hash, load_image

_KEPT_BYTES = 2**29
"""Of processed images that a process keeps."""


class ImageProcessor:
    """A model's processor of images (`transformers`), and the images that it processed last.

    token_id: of the placeholders of an image in the token ids, one for each vector that the model
    computes of it.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.token_id = int(processor.image_token_id)
        self.mark = str(getattr(processor, "boi_token", None) or processor.image_token)
        self._kept: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._num_bytes = 0  # of those that are kept

    def __deepcopy__(self, memo: dict[int, object]) -> "ImageProcessor":
        return self  # a copy of a model reads the same images

    def encode(self, text: str, paths: Sequence[str], **special: bool) -> list[int]:
        """Token ids of a text with a placeholder for each image. Raises ValueError if the text has
        more or fewer."""
        if text.count(self.mark) != len(paths):
            raise ValueError(
                f"the prompt has {text.count(self.mark)} times {self.mark!r}, which stands for an "
                "image, and "
                f"{len(paths)} images"
            )
        ids = self._processor(text=[text], images=[load_image(path) for path in paths], **special)[
            "input_ids"
        ][0]
        return [int(token) for token in ids]

    def save(self, folder: Path) -> None:
        """Write the processor beside a model's weights."""
        self._processor.save_pretrained(folder)

    def inputs(self, paths: Sequence[str]) -> dict[str, Tensor]:
        """The model's inputs for these images, in their order, joined along the first dimension.
        Raises UserError for a file that is missing or has changed."""
        each = [self._processed(path) for path in paths]
        return {name: _joined([inputs[name] for inputs in each]) for name in each[0]}

    def _processed(self, path: str) -> dict[str, Tensor]:
        inputs = self._kept.pop(path, None)
        if inputs is None:
            made = self._processor.image_processor(images=[load_image(path)], return_tensors="pt")
            inputs = {name: value for name, value in made.items() if isinstance(value, Tensor)}
            self._num_bytes += _size(inputs)
        self._kept[path] = inputs  # the last one used is the last to go
        while self._num_bytes > _KEPT_BYTES and len(self._kept) > 1:
            self._num_bytes -= _size(self._kept.popitem(last=False)[1])
        return inputs


def _joined(values: Sequence[Tensor]) -> Tensor:
    """One after another; smaller images are padded with zeros at their ends, as their processor
    does (Pixtral)."""
    shapes = torch.tensor([value.shape[1:] for value in values])
    largest = shapes.amax(0).tolist() if shapes.numel() else []
    padded = [values[0].new_zeros(len(value), *largest) for value in values]
    for whole, value in zip(padded, values, strict=True):
        whole[tuple(slice(size) for size in value.shape)] = value
    return torch.cat(padded)


def _size(inputs: Mapping[str, Tensor]) -> int:
    return sum(value.nbytes for value in inputs.values())


def images_of(owner: Any) -> ImageProcessor | None:
    """The processor of a model or a tokenizer; None if it reads text alone."""
    return getattr(owner, "image_processor", None)


@lru_cache(maxsize=4)
def load_image_processor(path: str, revision: str | None = None) -> ImageProcessor:
    """The processor in the folder of a model for images, one for all that read it in this process.
    Raises UserError if there is none that places images by tokens."""
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(path, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(
            f"the processor of images of the model '{path}' cannot be loaded: {reason}"
        ) from error
    if not hasattr(processor, "image_processor") or not hasattr(processor, "image_token_id"):
        raise UserError(
            f"the model '{path}' reads images, but its folder has no processor of text and images "
            "(processor_config.json, preprocessor_config.json): save its AutoProcessor there"
        )
    return ImageProcessor(processor)


class ImageInputs(NamedTuple):
    """The images of packed sequences."""

    paths: tuple[tuple[str, ...], ...]
    """Of each sequence's images."""
    num_given: tuple[int, ...]
    """The tokens of each sequence before the first that a policy drew: a placeholder among the
    others is a token like any other."""


def text_decoder(model: nn.Module) -> Any:
    """The layers that read token embeddings, without what computes those of images."""
    causal = unwrapped(model)
    # Llama 4 names itself its base
    decoder = causal.model if causal.base_model is causal else causal.base_model
    return getattr(decoder, "language_model", decoder)


def own_inputs(
    model: nn.Module,
    input_ids: Tensor,
    images: Sequence[Sequence[str]],
    num_prompt: int | None = None,
) -> dict[str, Tensor]:
    """Arguments of the model's own forward, besides the tokens, for prompts `(rows, tokens)` with
    the images of each, as many in every row.

    num_prompt: the tokens of the prompts, if responses follow.
    """
    processor = images_of(unwrapped(model))
    device = input_ids.device
    assert processor is not None, "only prompts for models of images have images"
    kinds = (input_ids == processor.token_id).int()
    kinds[:, kinds.shape[1] if num_prompt is None else num_prompt :] = 0
    inputs = processor.inputs([path for paths in images for path in paths])
    accepted = _accepted(
        unwrapped(model).forward, {**inputs, "mm_token_type_ids": kinds, "token_type_ids": kinds}
    )
    return {name: send(value, device) for name, value in accepted.items()}


@contextmanager
def own_pass(
    model: nn.Module, input_ids: Tensor, num_prompt: int, images: Sequence[Sequence[str]]
) -> Iterator[dict[str, Tensor]]:
    """Arguments of the model's own forward for prompts `(rows, tokens)` of `num_prompt` tokens with
    the images of each, as many in every row, and a response each.

    If a response has the placeholder of an image, which the model would take for one, another token
    stands for it, which is embedded as the placeholder within this context.
    """
    causal = unwrapped(model)
    processor = images_of(unwrapped(model))
    if processor is None or not any(images):
        yield {"input_ids": input_ids}
        return
    given = own_inputs(model, input_ids, images, num_prompt)
    placeholder, text = processor.token_id, causal.config.get_text_config()
    drawn = input_ids == placeholder
    drawn[:, :num_prompt] = False
    if not bool(drawn.any()):
        yield {"input_ids": input_ids, **given}
        return
    # some are ids of special tokens
    named = (*causal.config.to_dict().values(), *text.to_dict().values())
    used = {*input_ids.flatten().tolist(), *(value for value in named if isinstance(value, int))}
    spare = next(token for token in range(text.vocab_size) if token not in used)

    def embed_placeholder(_: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
        return (torch.where(arguments[0] == spare, placeholder, arguments[0]),)

    hook = causal.get_input_embeddings().register_forward_pre_hook(embed_placeholder)
    try:
        yield {"input_ids": torch.where(drawn, spare, input_ids), **given}
    finally:
        hook.remove()


def states_in_own_passes(
    causal: Any, input_ids: Tensor, lengths: Tensor, images: ImageInputs
) -> Tensor:
    """Last hidden states `(tokens, hidden)` of packed sequences, each by the model's own
    forward."""
    inner = causal.model
    found = list[Tensor]()
    parts = zip(input_ids.split(lengths.tolist()), *images, strict=True)
    for ids, paths, num_given in parts:
        with own_pass(causal, ids[None], num_given, (paths,)) as inputs:
            accepted = _accepted(inner.forward, inputs)
            found.append(inner(**accepted, use_cache=False).last_hidden_state[0])
    return torch.cat(found)


def image_error(model: nn.Module) -> tuple[float, list[str]]:
    """Largest difference of a logit between a sequence with an image and its beginning alone,
    relative to the largest logit: a response must not change what comes before it; and the names of
    weights that no image uses. Raises what a model of another form raises."""
    processor = images_of(unwrapped(model))
    causal = unwrapped(model)
    assert processor is not None
    # attached
    run: Callable[..., Tensor] = model.packed_logits  # type: ignore[assignment]
    words = [token for token in range(4) if token != processor.token_id]
    with tempfile.TemporaryDirectory() as folder:
        path = _noise(Path(folder))
        prompt = processor.encode(processor.mark, (path,))
        ids = torch.tensor([*prompt, *words], device=next(model.parameters()).device)
        images = ImageInputs(((path,),), (len(prompt),))
        with torch.enable_grad():
            whole = run(ids, torch.tensor([len(ids)]), images=images)
        with torch.no_grad():
            begun = run(ids[:-2], torch.tensor([len(ids) - 2]), images=images)
    error = (whole[:-2] - begun).abs().max() / whole.abs().max()
    seeing = {}
    for name, weight in causal.named_parameters():
        is_of_text = name.startswith(("model.language_model.", "lm_head."))
        if weight.requires_grad and not is_of_text:
            seeing[name] = weight
    gradients = torch.autograd.grad(whole.sum(), list(seeing.values()), allow_unused=True)
    unused = [name for name, own in zip(seeing, gradients, strict=True) if own is None]
    return float(error), unused


def _noise(folder: Path) -> str:
    from PIL import Image

    draws = np.random.default_rng(0)
    image = Image.fromarray(draws.integers(0, 256, (56, 84, 3), dtype=np.uint8))
    path = str(folder / f"{image_hash(image)}.png")
    image.save(path)
    return path


def _accepted(function: Any, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values that are parameters of a function."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in values.items() if name in names}
