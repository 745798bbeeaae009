"""Images in packed sequences against the model's own forward, one sequence at a time."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from distflow.data.batch import Batch
from distflow.data.images import read_images
from distflow.data.sample import Sample, Segment
from distflow.errors import UserError
from distflow.models.choose_attention import TOLERANCE
from distflow.models.image_inputs import (
    IN_OWN_PASSES,
    ImageProcessor,
    image_error,
    images_of,
    own_inputs,
)
from distflow.models.loading import load_model, load_tokenizer, ready
from distflow.training.torch_engine import TorchScorer
from tests.tiny_models import write_tiny_model
from tests.tiny_vision_models import FAMILIES, png, square, tiny_vision_model, write_tiny_llava

IN_EACH_RUN = ("llava", "qwen2_5_vl", "qwen3_vl", "gemma3")
"""Square positions, those by time, height and width, vectors for deeper layers, and images that
look both ways."""
LATER = [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in IN_EACH_RUN]


@pytest.fixture(params=[*IN_EACH_RUN, *LATER])
def model(request, tmp_path):
    if request.param == "llava":
        return load_model(write_tiny_llava(tmp_path / "model"), dtype=torch.float64)
    processor, made = tiny_vision_model(request.param)
    made.image_processor = ImageProcessor(processor)
    return ready(made, torch.float64, "cpu")


def stored(folder: Path, *colours: str) -> tuple[str, ...]:
    """The last image is twice as wide."""
    sizes = [(28, 28)] * (len(colours) - 1) + [(56, 28)]
    images = [png(square(colour, size=size)) for colour, size in zip(colours, sizes, strict=True)]
    return read_images(images, "images", None, folder / "store")


def sample(model: nn.Module, number: int, images: tuple[str, ...], response: list[int]) -> Sample:
    processor = images_of(model)
    assert processor is not None
    text = "".join(f"{i}{processor.mark}" for i in range(len(images))) + "which?"
    prompt = Segment(
        "prompt", tuple(processor.encode(text, images) if images else (5, 6, 7, 8)), images=images
    )
    zeros = (0.0,) * len(response)
    drawn = Segment("policy", tuple(response), zeros, zeros, (0,) * len(response))

    return Sample(f"{number}-0", number, [prompt, drawn])


def own_log_probs(model: nn.Module, one: Sample) -> torch.Tensor:
    """By the model's own forward of the one sequence."""
    ids = torch.tensor([*one.prompt_ids, *one.response_segments[0].token_ids])
    images = one.segments[0].images
    given = (
        own_inputs(model, ids[None], (images,), num_prompt=len(one.prompt_ids)) if images else {}
    )
    logits = model(input_ids=ids[None], use_cache=False, **given).logits[0].log_softmax(-1)
    start = len(one.prompt_ids)

    return logits[start - 1 : -1].gather(-1, ids[start:, None])[:, 0]


def test_packed_log_probs_are_those_of_each_sequence_alone(model, tmp_path):
    a, b, c = stored(tmp_path, "r", "g", "b")
    held = [(a,), (), (b, c), (a,), (c,)]
    samples = [
        sample(model, i, images, [5 + i, 9, 7][: 1 + i % 3]) for i, images in enumerate(held)
    ]
    scored = (
        TorchScorer(model).forward(Batch.from_samples(samples), ("log_probs",)).flat("log_probs")
    )
    expected = torch.cat([own_log_probs(model, each) for each in samples])
    assert torch.allclose(scored.double(), expected, atol=1e-6)


def test_another_image_has_other_log_probs(model, tmp_path):
    a = stored(tmp_path, "r", "g")[:1]
    b = stored(tmp_path, "b", "g")[:1]
    pair = [sample(model, i, images, [5, 6]) for i, images in enumerate((a, b))]

    # only the images differ, so no prefix may be shared
    assert pair[0].prompt_ids == pair[1].prompt_ids
    first, second = (
        TorchScorer(model)
        .forward(Batch.from_samples(pair), ("log_probs",))
        .flat("log_probs")
        .split(2)
    )
    assert float((first - second).abs().max()) > 1e-4


def test_a_drawn_placeholder_is_a_token(model, tmp_path):
    (image,) = stored(tmp_path, "r")
    processor = images_of(model)
    assert processor is not None
    before, after = (
        sample(model, i, (image,), [5, token, 6]) for i, token in enumerate((processor.token_id, 7))
    )
    scored = (
        TorchScorer(model)
        .forward(Batch.from_samples([before, after]), ("log_probs",))
        .flat("log_probs")
    )
    assert torch.isfinite(scored).all()
    assert torch.allclose(scored[0], scored[3])  # the same before the token
    assert torch.allclose(scored[3:].double(), own_log_probs(model, after), atol=1e-6)


def test_gradients_reach_what_computes_images(model, tmp_path):
    a, b = stored(tmp_path, "r", "g")
    samples = [
        sample(model, 0, (a,), [5, 6]),
        sample(model, 1, (), [7]),
        sample(model, 2, (b,), [8]),
    ]
    scorer = TorchScorer(model)
    alone = copy.deepcopy(model)
    model.train()
    scorer.compute(Batch.from_samples(samples), ("log_probs",))["log_probs"].sum().backward()
    torch.stack([own_log_probs(alone, each).sum() for each in samples]).sum().backward()
    expected = dict(alone.named_parameters())

    for name, parameter in model.named_parameters():
        own = parameter.grad
        theirs = expected[name].grad
        assert (own is None) == (theirs is None), name
        if own is not None and theirs is not None:
            assert torch.allclose(own, theirs, atol=1e-6 + 1e-5 * float(theirs.abs().max())), name

    of_images = [parameter.grad for name, parameter in model.named_parameters() if "vis" in name]
    assert any(grad is not None and bool(grad.any()) for grad in of_images)


def test_a_model_whose_packed_images_shift_runs_sequences_one_by_one(model, monkeypatch):
    assert image_error(model)[0] < TOLERANCE[torch.float64]
    if getattr(model, IN_OWN_PASSES):
        return

    from distflow.models import packed_forward

    right = packed_forward.embeddings

    def turned(*arguments: object) -> dict[str, torch.Tensor]:
        given = right(*arguments)  # type: ignore[arg-type]
        return given | {"inputs_embeds": given["inputs_embeds"].roll(1, 1)}

    monkeypatch.setattr(packed_forward, "embeddings", turned)
    assert image_error(model)[0] > TOLERANCE[torch.float64]
    assert getattr(ready(model, torch.float64, "cpu"), IN_OWN_PASSES)


def test_families_differ_in_how_they_run(model):
    # attention in both directions within an image; recurrent layers
    one_by_one = {"gemma3", "qwen3_5"}
    assert getattr(model, IN_OWN_PASSES) == (model.config.model_type in one_by_one)


def test_a_model_whose_response_changes_its_prompt_is_refused():
    processor, made = tiny_vision_model("paligemma")
    made.image_processor = ImageProcessor(processor)
    with pytest.raises(UserError, match="'paligemma' .* images: "):
        ready(made, torch.float64, "cpu")


def test_images_and_placeholders_must_agree(model, tmp_path):
    a, b = stored(tmp_path, "r", "g")
    one = sample(model, 0, (a,), [5])
    more = Sample(
        "0-0", 0, [Segment("prompt", one.prompt_ids, images=(a, b)), *one.response_segments]
    )

    with pytest.raises(
        ValueError,
        match=r"\d+ placeholders .* \d+ vectors|[Ii]mage features and image tokens",
    ):
        TorchScorer(model).forward(Batch.from_samples([more]), ("log_probs",))

    processor = images_of(model)
    assert processor is not None
    with pytest.raises(ValueError, match=" 2 times .* 1 images"):
        processor.encode(2 * processor.mark, (a,))


def test_weights_that_no_image_uses_are_not_trained(tmp_path):
    model = load_model(write_tiny_llava(tmp_path / "model"))
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    assert frozen == {f"model.vision_tower.post_layernorm.{part}" for part in ("weight", "bias")}


def test_models_of_text_have_no_processor(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    assert images_of(load_model(folder)) is None and images_of(load_tokenizer(folder)) is None


def test_a_broken_processor_is_named(tmp_path):
    folder = write_tiny_llava(tmp_path / "model")
    (folder / "processor_config.json").write_text("{")
    with pytest.raises(UserError, match="processor of images .* loaded"):
        load_model(folder)
