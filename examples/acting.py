"""Reach the target that is named: `python examples/acting.py` writes a tiny VLA with random weights
(of `SEED=1`)."""

import asyncio
import base64
import io
import os
from pathlib import Path
from random import Random

import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    CLIPImageProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

import distflow
from distflow.acting.gridreach import COLOURS, GridReach

MOVES = ["<back>", "<stay>", "<forth>"]
CHUNK = 2
START = "runs/acting/start"
TINY = Path(distflow.__file__).parent / "models/builtin/tiny-arithmetic"


def demonstrations(number=12288, seed=0):
    """Rows with the image of a state, an instruction, and the first actions of a shortest way as
    the response."""
    draws = Random(seed)
    grid = GridReach()

    for _ in range(number):
        seen = asyncio.run(grid.reset(draws.randrange(2**31), {}))
        actions = [*grid.shortest(), *((0, 0),) * CHUNK][:CHUNK]
        Image.fromarray(seen.images["image"]).save(memory := io.BytesIO(), format="PNG")
        image = "data:image/png;base64," + base64.b64encode(memory.getvalue()).decode()
        response = "".join(MOVES[1 + number] for action in actions for number in action)
        yield {
            "prompt": f"<image>{seen.instruction}",
            "images": [image],
            "response": response,
            "answer": response,
        }


def tasks(number=2048, seed=1):
    """Rows with the seed of a state."""
    draws = Random(seed)
    for _ in range(number):
        yield {"prompt": "gridreach", "answer": "", "seed": draws.randrange(2**31)}


def held_out():
    return tasks(256, seed=2)


if __name__ == "__main__":
    torch.manual_seed(int(os.environ.get("SEED", 0)))
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_tokens([*COLOURS, *MOVES])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    sizes = {
        "num_attention_heads": 4,
        "hidden_size": 96,
        "intermediate_size": 192,
        "initializer_range": 0.1,
    }
    config = LlavaConfig(
        # a token per cell
        vision_config={"image_size": 5, "patch_size": 1, "num_hidden_layers": 1, **sizes},
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "num_hidden_layers": 2,
            **sizes,
        }
        | {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    colours = {"image_mean": [0.08] * 3, "image_std": [0.5] * 3}  # empty cells are about 0
    colours |= {"size": {"height": 5, "width": 5}, "resample": Image.Resampling.BOX}
    images = CLIPImageProcessor(do_center_crop=False, **colours)
    processor = LlavaProcessor(images, tokenizer, patch_size=1, num_additional_image_tokens=1)
    processor.vision_feature_select_strategy = "default"
    model = LlavaForConditionalGeneration(config)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters")
    for part in (model, processor, tokenizer):
        part.save_pretrained(START)
