"""Images as inputs of a model: its processor; in packed sequences their vectors in place of the
placeholders, and the positions that their model gives them; a check of both against the model's own
forward."""

import inspect
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

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
                f"image, and {len(paths)} images"
            )

        images = [load_image(path) for path in paths]
        encoded = self._processor(text=[text], images=images, **special)
        return [int(token) for token in encoded["input_ids"][0]]

    def save(self, folder: Path) -> None:
        """Write the processor beside a model's weights."""
        self._processor.save_pretrained(folder)

    def inputs(self, paths: Sequence[str]) -> dict[str, Tensor]:
        """The model's inputs for these images, in their order, joined along the first dimension.
        Raises UserError for a file that is missing or has changed."""
        processed = [self._processed(path) for path in paths]
        joined = {}
        for name in processed[0]:
            joined[name] = _joined([inputs[name] for inputs in processed])
        return joined

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

    padded = []
    for value in values:
        whole = value.new_zeros(len(value), *largest)
        whole[tuple(slice(size) for size in value.shape)] = value
        padded.append(whole)

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


@dataclass(frozen=True)
class ImageInputs:
    """The images of packed sequences.

    paths: of each sequence's images. places: int64 `(n,)`, the packed positions of their
    placeholders.
    """

    paths: tuple[tuple[str, ...], ...]
    places: Tensor

    def placeholders_in(self, input_ids: Tensor) -> Tensor:
        """bool `(tokens,)`: which of the packed tokens are placeholders."""
        is_image = torch.zeros_like(input_ids, dtype=torch.bool)
        return is_image.index_fill_(0, self.places, True)


def text_decoder(model: nn.Module) -> Any:
    """The layers that read token embeddings, without what computes those of images."""
    causal = unwrapped(model)

    # Llama 4 names itself its base
    decoder = causal.model if causal.base_model is causal else causal.base_model

    return getattr(decoder, "language_model", decoder)


def embeddings(model: nn.Module, input_ids: Tensor, images: ImageInputs) -> dict[str, Any]:
    """What the layers take of packed tokens: `inputs_embeds` `(1, tokens, hidden)`, with the
    images' vectors at their places, and the vectors that Qwen3-VL adds after its first layers;
    differentiable.

    Raises ValueError if there are more or fewer places than vectors.
    """
    causal = unwrapped(model)
    tensors = _inputs_of(causal, images, input_ids.device)
    output = causal.model.get_image_features(**_accepted(causal.model.get_image_features, tensors))

    vectors = getattr(output, "pooler_output", output)
    if isinstance(vectors, list | tuple):
        vectors = torch.cat([*vectors])
    else:
        vectors = vectors.flatten(0, -2)

    if len(vectors) != len(images.places):
        raise ValueError(
            f"{len(images.places)} placeholders stand for images of {len(vectors)} vectors"
        )

    embedded = causal.get_input_embeddings()(input_ids)
    embedded = embedded.index_copy(0, images.places, vectors.to(embedded.dtype))

    inputs = {"inputs_embeds": embedded[None]}
    if deeper := getattr(output, "deepstack_features", None):
        inputs["visual_pos_masks"] = images.placeholders_in(input_ids)[None]
        inputs["deepstack_visual_embeds"] = [torch.cat([*features]) for features in deeper]

    return inputs


def _inputs_of(causal: nn.Module, images: ImageInputs, device: torch.device) -> dict[str, Tensor]:
    processor = images_of(causal)
    assert processor is not None, "only prompts for models of images have images"
    tensors = processor.inputs([*chain.from_iterable(images.paths)])
    return {name: send(tensor, device) for name, tensor in tensors.items()}


def image_positions(
    model: nn.Module, input_ids: Tensor, lengths: Tensor, images: ImageInputs
) -> Tensor | None:
    """Positions `(3, tokens)` by time, height and width, for a family that has them; else None.
    lengths: see `packed_hidden_states`."""
    causal = unwrapped(model)
    find = getattr(causal.model, "get_rope_index", None)
    if find is None:
        return None

    sizes = lengths.tolist()
    kinds = images.placeholders_in(input_ids).int()
    grids = _inputs_of(causal, images, input_ids.device)["image_grid_thw"]
    sequences = zip(input_ids.split(sizes), kinds.split(sizes), images.paths, strict=True)

    first = 0
    positions = []
    for ids, kinds_of_ids, paths in sequences:
        inputs = {"input_ids": ids[None], "mm_token_type_ids": kinds_of_ids[None]}
        if paths:
            inputs["image_grid_thw"] = grids[first : first + len(paths)]
        positions.append(find(**inputs)[0][:, 0])
        first += len(paths)

    return torch.cat(positions, dim=1)


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
    causal = unwrapped(model)
    processor = images_of(causal)
    assert processor is not None, "only prompts for models of images have images"
    kinds = (input_ids == processor.token_id).int()
    if num_prompt is not None:
        kinds[:, num_prompt:] = 0

    inputs = processor.inputs([*chain.from_iterable(images)])
    inputs |= {"mm_token_type_ids": kinds, "token_type_ids": kinds}
    accepted = _accepted(causal.forward, inputs)
    return {name: send(value, input_ids.device) for name, value in accepted.items()}


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
    processor = images_of(causal)
    if processor is None or not any(images):
        yield {"input_ids": input_ids}
        return

    given = own_inputs(model, input_ids, images, num_prompt)
    placeholder = processor.token_id
    text = causal.config.get_text_config()
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


IN_OWN_PASSES = "images_in_own_passes"
"""The attribute of a model whose sequences cannot be packed if they have images."""


def states_in_own_passes(
    causal: Any, input_ids: Tensor, lengths: Tensor, images: ImageInputs
) -> Tensor:
    """Last hidden states `(tokens, hidden)` of packed sequences, each by the model's own
    forward."""
    inner = causal.model
    sizes = lengths.tolist()
    is_image = images.placeholders_in(input_ids)
    sequences = zip(input_ids.split(sizes), is_image.split(sizes), images.paths, strict=True)

    states = list[Tensor]()
    for ids, is_image_of_ids, paths in sequences:
        num_prompt = int(is_image_of_ids.nonzero()[-1]) + 1 if paths else 0
        with own_pass(causal, ids[None], num_prompt, (paths,)) as inputs:
            accepted = _accepted(inner.forward, inputs)
            states.append(inner(**accepted, use_cache=False).last_hidden_state[0])

    return torch.cat(states)


UNUSED = "weights_that_no_image_uses"
"""The attribute of a model with the names of such weights, which are not trained."""


def image_error(model: nn.Module) -> tuple[float, list[str]]:
    """Largest difference of a logit between packed sequences, with and without images, and the
    model's own forward of each alone, or of its beginning (a response must not change what comes
    before it), relative to the largest logit; and the names of weights that no image uses. Raises
    what a model of another form raises."""
    causal = unwrapped(model)
    processor = images_of(causal)
    assert processor is not None
    words = [token for token in range(4) if token != processor.token_id]
    device = next(model.parameters()).device

    with tempfile.TemporaryDirectory() as folder:
        first, second = _noise(Path(folder), ((56, 84), (84, 56)))
        paths: tuple[tuple[str, ...], ...] = ((first,), (), (second,))

        sequences = []
        for own_paths in paths:
            prompt = processor.encode(processor.mark, own_paths) if own_paths else []
            sequences.append(torch.tensor([*prompt, *words], device=device))

        packed = torch.cat(sequences)
        lengths = torch.tensor([len(ids) for ids in sequences])
        images = ImageInputs(paths, (packed == processor.token_id).nonzero()[:, 0])

        with torch.enable_grad():
            # attached
            ours: Tensor = model.packed_logits(packed, lengths, images=images)  # type: ignore[operator]

        differences = list[Tensor]()
        largest = list[Tensor]()

        packed_logits = ours.detach().split(lengths.tolist())
        for logits, ids, own_paths in zip(packed_logits, sequences, paths, strict=True):
            for num_tokens in (len(ids), len(ids) - 2):
                begun = ids[None, :num_tokens]
                inputs = own_inputs(model, begun, (own_paths,)) if own_paths else {}
                with torch.no_grad():
                    theirs = model(input_ids=begun, use_cache=False, **inputs).logits[0]

                differences.append((logits[:num_tokens] - theirs).abs().max())
                largest.append(theirs.abs().max())

    error = torch.stack(differences).max() / torch.stack(largest).max()
    return float(error), _unused_by_images(causal, ours)


def _unused_by_images(causal: nn.Module, logits: Tensor) -> list[str]:
    """Names of weights below the text decoder on which no logit depends."""
    weights = {}
    for name, weight in causal.named_parameters():
        if weight.requires_grad and not name.startswith(("model.language_model.", "lm_head.")):
            weights[name] = weight

    gradients = torch.autograd.grad(logits.sum(), list(weights.values()), allow_unused=True)
    by_name = zip(weights, gradients, strict=True)
    return [name for name, gradient in by_name if gradient is None]


def _noise(folder: Path, sizes: tuple[tuple[int, int], ...]) -> tuple[str, ...]:
    from PIL import Image

    draws = np.random.default_rng(0)
    paths = list[str]()
    for height, width in sizes:
        image = Image.fromarray(draws.integers(0, 256, (height, width, 3), dtype=np.uint8))
        paths.append(str(folder / f"{image_hash(image)}.png"))
        image.save(paths[-1])

    return tuple(paths)


def _accepted(function: Any, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values that are parameters of a function."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in values.items() if name in names}
