"""Tiny models that read images, written as Hugging Face folders, and images of one coloured square."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.tiny_models import tiny_tokenizer

COLOURS = {"r": (230, 40, 40), "g": (40, 200, 60), "b": (50, 80, 230)}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
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
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=7
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


class TinyQwenProcessor:
    """What Qwen2.5-VL's processor does with images, without that of videos, which needs torchvision."""

    def __init__(self) -> None:
        self.tokenizer = _with_tokens("<|image_pad|>")
        self.image_token = "<|image_pad|>"
        self.image_token_id = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self.image_processor = Qwen2VLImageProcessorPil(
            min_pixels=14 * 14, max_pixels=56 * 56, patch_size=7, merge_size=2, temporal_patch_size=2
        )

    def __call__(self, text: list[str], images: list[Any], **special: bool) -> dict[str, list[list[int]]]:
        grids = self.image_processor(images=images, return_tensors="pt")["image_grid_thw"]
        pieces = text[0].split(self.image_token)
        whole = pieces[0]
        for grid, piece in zip(grids, pieces[1:], strict=True):
            whole += self.image_token * (int(grid.prod()) // 4) + piece
        return self.tokenizer([whole], **special)


def tiny_qwen(processor: TinyQwenProcessor, seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    """A Qwen2.5-VL, whose positions are by time, height and width."""
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 7,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 32,
        "window_size": 28,
        "fullatt_block_indexes": [1],
    }
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    text = {"vocab_size": len(processor.tokenizer), **_TEXT, "rope_parameters": rope}
    config = Qwen2_5_VLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=processor.image_token_id,
        video_token_id=len(processor.tokenizer) + 1,
        vision_start_token_id=len(processor.tokenizer) + 2,
        vision_end_token_id=len(processor.tokenizer) + 3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2_5_VLForConditionalGeneration(config)
