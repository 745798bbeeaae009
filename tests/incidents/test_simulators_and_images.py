"""Faults in what a policy sees and what its actions do, planted into real runs: each has a twin
that is healthy."""

from typing import Any

import pytest

from distflow.errors import TrustError
from distflow.models.image_inputs import ImageProcessor
from tests.e2e.runs import Playground
from tests.tiny_vision_models import png, square, write_tiny_llava

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fault", ["channels", "brightness"])
def test_pixels_that_are_not_those_of_the_file(tmp_path, monkeypatch, fault):
    """Engine, trainer and the model's own forward agree: they read the same wrong pixels."""
    made = Playground(tmp_path)
    right = ImageProcessor.inputs
    write_tiny_llava(tmp_path / "model")
    for number in range(12):
        (tmp_path / f"{number}.png").write_bytes(png(square("rgb"[number % 3], at=number)))
    made.write_rows([{"prompt": f"{n}?", "answer": "7", "images": [f"{n}.png"]} for n in range(12)])

    def inputs(self: ImageProcessor, paths: Any) -> Any:
        pixels = (found := right(self, paths))["pixel_values"]
        return found | {"pixel_values": pixels.flip(1) if fault == "channels" else pixels / 2}

    monkeypatch.setattr(ImageProcessor, "inputs", inputs)
    keys = (
        "actor_rollout_ref.rollout.name=hf",
        "data.max_prompt_length=48",
        "trainer.total_training_steps=1",
    )

    with pytest.raises(TrustError, match=r"\(responses\): .* pixels"):
        made.run("grpo", *keys)
