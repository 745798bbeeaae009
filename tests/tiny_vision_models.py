"""Tiny models that read images, written as Hugging Face folders, and images of one coloured
square."""

import io
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from tests.tiny_models import tiny_tokenizer

COLOURS = {"r": (230, 40, 40), "g": (40, 200, 60), "b": (50, 80, 230)}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}{{ "
    "message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else "
    "%}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% "
    "endif %}"
)


def square(colour: str, at: int = 4, size: tuple[int, int] = (28, 28)) -> Image.Image:
    """An image with one square of 12 pixels. size: width, height."""
    pixels = np.full((size[1], size[0], 3), 20, np.uint8)
    pixels[at : at + 12, at : at + 12] = COLOURS[colour]
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    memory = io.BytesIO()
    image.save(memory, format="PNG")
    return memory.getvalue()


def write_tiny_llava(folder: Path, seed: int = 0) -> Path:
    """A LLaVA of 28 x 28 pixels: 16 tokens an image."""
    tokenizer = _with_tokens("<image>")
    tokenizer.chat_template = TEMPLATE
    resizer = CLIPImageProcessorPil(size={"height": 28, "width": 28}, do_center_crop=False)
    processor = LlavaProcessor(
        image_processor=resizer,
        tokenizer=tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=7,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(vocab_size=len(tokenizer), **_TEXT),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlavaForConditionalGeneration(config)

    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _with_tokens(*names: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(names)})
    return tokenizer


class TinyProcessor:
    """What a family's processor does with images. num_tokens: the placeholders of one, from the
    image processor's output."""

    def __init__(self, image_processor: Any, num_tokens: Callable[[Any], int]) -> None:
        self.tokenizer = _with_tokens("<image>")
        self.image_token = "<image>"
        self.image_token_id = self.tokenizer.convert_tokens_to_ids("<image>")
        self.image_processor = image_processor
        self.num_tokens = num_tokens

    def __call__(
        self, text: list[str], images: list[Any], **special: bool
    ) -> dict[str, list[list[int]]]:
        whole, *pieces = text[0].split(self.image_token)
        for image, piece in zip(images, pieces, strict=True):
            whole += self.image_token * self.num_tokens(
                self.image_processor(images=[image], return_tensors="pt")
            )
            whole += piece

        return self.tokenizer([whole], **special)


_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
_OF_QWEN: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 7,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_SQUARE = {"height": 28, "width": 28}


def _pil(family: str, name: str, **sizes: Any) -> Any:
    """The family's image processor that needs no torchvision."""
    return getattr(
        import_module(f"transformers.models.{family}.image_processing_pil_{family}"), name
    )(**sizes)


def _with_grid(
    family: str = "qwen2_vl", name: str = "Qwen2VLImageProcessorPil", **sizes: Any
) -> TinyProcessor:
    limits = sizes or {"min_pixels": 14 * 14, "max_pixels": 56 * 56}
    made = _pil(family, name, **limits, patch_size=7, merge_size=2, temporal_patch_size=2)
    return TinyProcessor(made, lambda out: int(out["image_grid_thw"].prod()) // 4)


def _of_tokens(processor: TinyProcessor, *others: str) -> dict[str, int]:
    """The ids of special tokens, of which only that of images is in the vocabulary."""
    first = len(processor.tokenizer)
    return {"image_token_id": processor.image_token_id} | {
        f"{name}_token_id": first + i for i, name in enumerate(others)
    }


def _text(processor: TinyProcessor, **more: Any) -> dict[str, Any]:
    return {"vocab_size": len(processor.tokenizer), **_TEXT, **more}


def _rope(**more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0, **more}


_QWEN_TOKENS = ("video", "vision_start", "vision_end")


def _qwen2_vl() -> tuple[TinyProcessor, Any]:
    processor = _with_grid()
    vision = {**_OF_QWEN, "embed_dim": 32, "mlp_ratio": 2}
    text = _text(processor, rope_parameters=_rope())
    return processor, transformers.Qwen2VLConfig(
        vision_config=vision, text_config=text, **_of_tokens(processor, *_QWEN_TOKENS)
    )


def _qwen2_5_vl() -> tuple[TinyProcessor, Any]:
    processor = _with_grid()
    vision = {**_OF_QWEN, "out_hidden_size": 32, "window_size": 28, "fullatt_block_indexes": [1]}
    text = _text(processor, rope_parameters=_rope())
    return processor, transformers.Qwen2_5_VLConfig(
        vision_config=vision, text_config=text, **_of_tokens(processor, *_QWEN_TOKENS)
    )


def _qwen3_vl() -> tuple[TinyProcessor, Any]:
    processor = _with_grid()
    vision = {
        **_OF_QWEN,
        "out_hidden_size": 32,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    text = _text(processor, head_dim=8, rope_parameters=_rope(mrope_interleaved=True))

    return processor, transformers.Qwen3VLConfig(
        vision_config=vision, text_config=text, **_of_tokens(processor, *_QWEN_TOKENS)
    )


def _qwen3_5() -> tuple[TinyProcessor, Any]:
    processor = _with_grid()
    vision = {**_OF_QWEN, "out_hidden_size": 32, "num_position_embeddings": 64}
    heads = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
    sizes = {"head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    rope = _rope(mrope_interleaved=True, partial_rotary_factor=1.0)
    kinds = ["linear_attention", "full_attention"]
    text = _text(processor, **heads, **sizes, layer_types=kinds, rope_parameters=rope)

    return processor, transformers.Qwen3_5Config(
        vision_config=vision, text_config=text, **_of_tokens(processor, *_QWEN_TOKENS)
    )


def _glm4v() -> tuple[TinyProcessor, Any]:
    limits = {"shortest_edge": 14 * 14 * 4, "longest_edge": 56 * 56 * 4}
    processor = _with_grid("glm4v", "Glm4vImageProcessorPil", size=limits)
    text = _text(processor, rope_parameters=_rope(partial_rotary_factor=1.0))
    others = ("video", "image_start", "image_end", "video_start", "video_end")

    return processor, transformers.Glm4vConfig(
        vision_config={**_OF_QWEN, "out_hidden_size": 32, "image_size": 56},
        text_config=text,
        **_of_tokens(processor, *others),
    )


def _gemma3() -> tuple[TinyProcessor, Any]:
    processor = TinyProcessor(_pil("gemma3", "Gemma3ImageProcessorPil", size=_SQUARE), lambda _: 4)
    text = _text(processor, head_dim=8, sliding_window=8)
    token = processor.image_token_id
    return processor, transformers.Gemma3Config(
        vision_config=_VISION, text_config=text, image_token_index=token, mm_tokens_per_image=4
    )


def _internvl() -> tuple[TinyProcessor, Any]:
    resizer = _pil("got_ocr2", "GotOcr2ImageProcessorPil", size=_SQUARE, crop_to_patches=False)
    processor = TinyProcessor(resizer, lambda _: 4)
    vision = {**_VISION, "image_size": [28, 28], "patch_size": [7, 7]}
    text = transformers.Qwen2Config(**_text(processor))
    return processor, transformers.InternVLConfig(
        vision_config=vision, text_config=text, image_seq_length=4, **_of_tokens(processor)
    )


def _mistral3() -> tuple[TinyProcessor, Any]:
    resizer = _pil("pixtral", "PixtralImageProcessorPil", size={"longest_edge": 56}, patch_size=14)
    processor = TinyProcessor(resizer, lambda out: int(out["image_sizes"].prod()) // 14**2)
    vision = transformers.PixtralVisionConfig(**{**_VISION, "image_size": 56, "head_dim": 16})
    text = transformers.MistralConfig(**_text(processor, sliding_window=None))
    token = processor.image_token_id

    return processor, transformers.Mistral3Config(
        vision_config=vision,
        text_config=text,
        image_token_index=token,
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )


def _smolvlm() -> tuple[TinyProcessor, Any]:
    edge = {"longest_edge": 28}
    resizer = _pil(
        "smolvlm",
        "SmolVLMImageProcessorPil",
        size=edge,
        max_image_size=edge,
        do_image_splitting=False,
    )
    processor = TinyProcessor(resizer, lambda _: 4)
    text = {"model_type": "llama", **_text(processor)}

    return processor, transformers.SmolVLMConfig(
        vision_config=_VISION, text_config=text, scale_factor=2, **_of_tokens(processor)
    )


def _paligemma() -> tuple[TinyProcessor, Any]:
    processor = TinyProcessor(_pil("siglip", "SiglipImageProcessorPil", size=_SQUARE), lambda _: 16)
    vision = {"model_type": "siglip_vision_model", **_VISION, "projection_dim": 32}
    text = {"model_type": "gemma", **_text(processor, head_dim=8)}
    return processor, transformers.PaliGemmaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=processor.image_token_id,
        projection_dim=32,
    )


_MADE = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_5": _qwen3_5,
    "glm4v": _glm4v,
    "gemma3": _gemma3,
    "internvl": _internvl,
    "mistral3": _mistral3,
    "smolvlm": _smolvlm,
    "paligemma": _paligemma,
}
FAMILIES = tuple(name for name in _MADE if name != "paligemma")
"""Besides LLaVA, those whose policies can be trained."""


def tiny_vision_model(family: str, seed: int = 0) -> tuple[TinyProcessor, Any]:
    """A processor and a model with random weights."""
    processor, config = _MADE[family]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForImageTextToText.from_config(config)

        with torch.no_grad():
            for weight in model.parameters():
                # Gemma 3 begins with images that are all zeros
                if weight.dim() > 1 and not weight.any():
                    weight.normal_(0.0, 0.2)

    return processor, model
