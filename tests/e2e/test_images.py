"""Runs whose prompts have images: drawn by hf, trained on packed, checked, resumed; and what such a
run refuses."""

import json

import pytest

from distflow.config import load_config
from distflow.errors import TrustError, UserError
from distflow.launch.make_spec import make_spec
from distflow.launch.one_process_launcher import launch_local
from distflow.launch.run_folders.export_checkpoint import export_checkpoint
from distflow.models import image_inputs
from distflow.models.image_inputs import images_of
from distflow.models.loading import load_model, load_tokenizer
from distflow.pipelines.nodes import sample_responses
from tests.e2e.runs import Playground
from tests.tiny_vision_models import png, square, write_tiny_llava

HF = (
    "actor_rollout_ref.rollout.name=hf",
    "data.max_prompt_length=48",
    "trainer.total_training_steps=2",
)
EVERY = ("trust.check_freq=1",)


@pytest.fixture
def playground(tmp_path):
    """Rows with an image, with two, and with none."""
    made = Playground(tmp_path)
    write_tiny_llava(tmp_path / "model")

    rows = []
    for number in range(12):
        colours = ["rgb"[number % 3], "rgb"[number // 3 % 3]][: number % 3]
        for place, colour in enumerate(colours):
            (tmp_path / f"{number}-{place}.png").write_bytes(png(square(colour, at=number)))
        images = [f"{number}-{place}.png" for place in range(len(colours))]
        rows.append({"prompt": f"{number}?", "answer": "7", "response": "r", "images": images})

    made.write_rows(rows)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("preset, staleness", [("grpo", 0), ("dapo", 0), ("grpo", 1)])
def test_every_check_of_a_run_passes(playground, preset, staleness):
    stale = f"async.max_staleness={staleness}"
    run = playground.run(preset, *HF, *EVERY, "actor_rollout_ref.rollout.n=2", stale)
    passed = {name for step in run.checks() for name in step["passed"]}
    assert {"data", "gradients", "log_probs", "responses", "versions"} <= passed
    assert not run.notes("warning")


def test_fine_tuning_reads_images(playground):
    rows = (
        f"data.train_files={playground.folder}/rows.jsonl",
        f"data.val_files={playground.folder}/rows.jsonl",
    )
    steps = ("trainer.total_training_steps=2", "trainer.test_freq=1", "data.train_batch_size=4")
    folder = (f"trainer.default_local_dir={playground.folder}/run", "trainer.num_threads=1")
    sizes = ("data.max_prompt_length=48", "data.max_response_length=4", "data.allow_overlap=true")
    model = (
        f"actor_rollout_ref.model.path={playground.folder}/model",
        "actor_rollout_ref.model.dtype=float32",
    )
    launch_local(
        make_spec(
            load_config("sft", [*rows, *steps, *folder, *sizes, *model, *EVERY]),
            say=lambda line: None,
        )
    )


@pytest.mark.slow
def test_an_exported_model_has_its_processor(playground):
    playground.run("grpo", *HF, "trainer.save_freq=2")
    folder = playground.folder / "exported"
    export_checkpoint(playground.folder / "run", folder, say=lambda line: None)
    assert images_of(load_tokenizer(folder)) is images_of(load_model(folder)) is not None


def test_the_trainer_must_see_the_images_of_the_engine(playground, monkeypatch):
    right = image_inputs._inputs_of

    def others(model, images, device):  # type: ignore[no-untyped-def]
        found = right(model, images, device)
        # those at loading are right
        if any("data/images" in path for paths in images.paths for path in paths):
            found = found | {"pixel_values": found["pixel_values"].flip(-1)}
        return found

    monkeypatch.setattr(image_inputs, "_inputs_of", others)
    with pytest.raises(TrustError, match="canary|mismatch|log_probs"):
        playground.run("grpo", *HF, *EVERY)


@pytest.mark.slow
def test_the_engine_must_see_the_images_of_the_row(playground, monkeypatch):
    request = sample_responses.GenerateRequest

    def without(*arguments, images, **named):  # type: ignore[no-untyped-def]
        return request(*arguments, images=images[::-1], **named)

    monkeypatch.setattr(sample_responses, "GenerateRequest", without)
    with pytest.raises(TrustError, match=r"images of sample|found \(versions\)"):
        playground.run("grpo", *HF, *EVERY)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "actor_rollout_ref.rollout.name=embedded",
            "embedded engine .* images",
        ),
        ("actor_rollout_ref.rollout.workflow=multi_turn", "episodes have no images"),
    ],
)
def test_what_would_not_see_images_is_refused(playground, override, says):
    with pytest.raises(UserError, match=says):
        playground.spec("grpo", *HF, override)


def test_a_critic_of_images_is_refused(playground):
    with pytest.raises(UserError, match="without a critic"):
        playground.spec("ppo", *HF)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "<image> <image>", "images": ["0.png"]}, "has 2 times <image> and 1 images"),
        ({"prompt": "q", "images": ["../0.png"]}, "outside the folder"),
        ({"prompt": "q", "images": ["none.png"]}, "cannot be read"),
        ({"prompt": "q <image>"}, "stands for an image, but no image"),
    ],
)
def test_faulty_rows_are_named(playground, row, says):
    (playground.folder / "0.png").write_bytes(png(square("r")))
    text = "".join(json.dumps({"answer": "7", **each}) + "\n" for each in ({"prompt": "fine"}, row))
    (playground.folder / "rows.jsonl").write_text(text)
    with pytest.raises(UserError, match=says):
        playground.spec("grpo", *HF)
