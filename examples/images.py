"""Name the colour of a square: `python examples/images.py` writes images and a tiny LLaVA with
random weights."""

import base64
import io
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image
from transformers import (
    AutoTokenizer,
    CLIPImageProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

import distflow

COLOURS = {"r": (230, 40, 40), "g": (40, 200, 60), "b": (50, 80, 230)}
START = "runs/images/start"
TINY = Path(distflow.__file__).parent / "models/builtin/tiny-arithmetic"


def squares(number=256, seed=0):
    """Rows with an image of 28 x 28 pixels, as a data URI."""
    draws = Random(seed)
    for _ in range(number):
        colour = draws.choice("rgb")
        size = draws.randint(8, 14)
        x = draws.randint(0, 28 - size)
        y = draws.randint(0, 28 - size)
        pixels = np.full((28, 28, 3), draws.randint(0, 60), np.uint8)
        pixels[y : y + size, x : x + size] = COLOURS[colour]
        Image.fromarray(pixels).save(memory := io.BytesIO(), format="PNG")
        image = "data:image/png;base64," + base64.b64encode(memory.getvalue()).decode()
        yield {"prompt": "=", "images": [image], "response": colour, "answer": colour}


def held_out():
    return squares(64, seed=1)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)


if __name__ == "__main__":
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_tokens([*COLOURS])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    sizes = {"num_attention_heads": 4, "num_hidden_layers": 2}
    config = LlavaConfig(
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "image_size": 28,
            "patch_size": 7,
            **sizes,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
        }
        | {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, **sizes},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    images = CLIPImageProcessor(size={"height": 28, "width": 28}, do_center_crop=False)
    processor = LlavaProcessor(images, tokenizer, patch_size=7, num_additional_image_tokens=1)
    processor.vision_feature_select_strategy = "default"
    for part in (LlavaForConditionalGeneration(config), processor, tokenizer):
        part.save_pretrained(START)
