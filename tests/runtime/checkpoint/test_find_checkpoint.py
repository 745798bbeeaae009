"""Starting where a run was: it is done, it is another, it starts anew, it resumes from
elsewhere."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from distflow.errors import UserError
from distflow.launch.one_process_launcher import launch_local
from distflow.observe.run_reader import read_events, read_metrics, sample_steps
from distflow.runtime.checkpoint.checkpoint_store import CheckpointError
from distflow.runtime.checkpoint.files import describe, read_manifest, write_manifest
from distflow.runtime.spec import LaunchOptions, Outcome
from tests.e2e.runs import Playground
from tests.ledger_audit import verify
from tests.sparse_params import one_fast_in

CHEAP = (
    "trust.check_rewards=false",
    "trust.check_freq=0",
    "trainer.save_freq=1",
    "trainer.keep_last=9",
)
STEPS = "trainer.total_training_steps"


@pytest.fixture
def ground(tmp_path):
    return Playground(tmp_path)


def launch(
    ground: Playground, *overrides: str, resume: str | None = None, name: str = "run"
) -> tuple[Outcome, str]:
    """And what was said."""
    said: list[str] = []
    mode = [] if resume is None else [f"trainer.resume_mode='{resume}'"]
    _, spec = ground.spec("grpo", *CHEAP, *overrides, *mode, name=name)
    return launch_local(spec, LaunchOptions(say=said.append)), "\n".join(said)


def steps(folder: Path) -> list[int]:
    return [record.step for record in read_metrics(folder) if record.kind == "train"]


@pytest.mark.parametrize(
    ("length", "longer"),
    one_fast_in(
        2,
        [(f"{STEPS}=2", f"{STEPS}=4"), ("trainer.total_epochs=1", "trainer.total_epochs=2")],
        unpack=True,
    ),
)
def test_a_run_that_is_done_says_so_and_how_to_go_on(ground, length, longer):
    ground.write_rows([{"prompt": f"{i}=", "answer": "7"} for i in range(8)])
    run = ground.folder / "run"
    first, _ = launch(ground, length)
    before = {
        path: path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.name not in ("report.html", ".writer")
    }
    (run / "report.html").unlink()
    again, said = launch(ground, length)
    assert again == first and again.steps == 2 and again.report.is_file()
    assert f"{run} is finished: step 2 was the last. Nothing is trained again." in said
    for way in (longer, "--resume never", "trainer.default_local_dir=FOLDER"):
        assert way in said
    assert {path: path.read_bytes() for path in before} == before, "and nothing was written"
    assert (
        f"step 2 was the last, which is more than {STEPS}=1. Nothing"
        in launch(ground, f"{STEPS}=1")[1]
    )

    assert launch(ground, longer)[0].steps == 4 and steps(run) == [1, 2, 3, 4]


def test_another_config_is_refused_with_all_ways_out_before_the_model_is_loaded(ground):
    launch(ground, f"{STEPS}=1")
    (ground.folder / "model" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UserError) as refused:
        launch(ground, f"{STEPS}=1", "trainer.seed=7", "data.seed=8")

    for way in (
        "trainer.seed: 1 then, 7 now",
        "set them back",
        "--allow-change data.seed --allow-change trainer.seed",
        "trainer.default_local_dir=FOLDER",
        f"--resume never (existing files are moved to {ground.folder}/run/earlier)",
    ):
        assert way in str(refused.value)

    with pytest.raises(UserError) as other:
        launch(
            ground,
            f"{STEPS}=1",
            "dag.pipeline=rlvr",
            "reward.functions={default: [custom, format]}",
        )

    said = str(other.value)
    assert (
        "dag.pipeline: 'grpo' then, 'rlvr' now" in said
        and "{default: ['custom', 'format']} now" in said
    ), said
    assert "--allow-change" not in said


@pytest.mark.slow
def test_a_new_start_has_an_account_of_its_own_and_the_old_one_is_kept(ground):
    run = ground.folder / "run"
    data = (
        f"data.val_files={ground.folder}/rows.jsonl",
        "data.val_max_samples=2",
        "trainer.val_before_train=true",
    )
    launch(ground, f"{STEPS}=3", *data)
    old = {
        str(p.relative_to(run)): p.read_bytes()
        for p in run.rglob("*")
        if p.is_file() and p.name != ".writer"
    }

    outcome, said = launch(ground, f"{STEPS}=1", resume="never")
    assert outcome.steps == 1 and outcome.accuracy_before is None
    assert f"the previous run in {run} was moved to {run}/earlier/1" in said
    assert [(record.step, record.kind, record.restart) for record in read_metrics(run)] == [
        (1, "train", 0)
    ]
    assert {event.restart for event in read_events(run)} == {0} and sample_steps(run) == [1]
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-000001"]
    assert verify(run / "ledger.jsonl").consumed == 4

    for name, content in old.items():
        kept = run / name if name.startswith(("data", ".")) else run / "earlier" / "1" / name
        assert kept.read_bytes() == content, name

    assert steps(run / "earlier" / "1") == [1, 2, 3]

    went_on, _ = launch(
        ground, f"{STEPS}=4", *data, resume=str(run / "earlier" / "1"), name="other"
    )
    assert went_on.steps == 4 and steps(ground.folder / "other") == [4]


def test_going_back_within_a_run_keeps_its_account(ground):
    launch(ground, f"{STEPS}=3")
    outcome, said = launch(
        ground, f"{STEPS}=3", resume=str(ground.folder / "run" / "checkpoints" / "step-000001")
    )
    assert outcome.steps == 3 and "earlier" not in said
    assert (
        steps(ground.folder / "run") == [1, 2, 3]
        and not (ground.folder / "run" / "earlier").exists()
    )


def test_the_end_of_another_run_is_no_start(ground):
    launch(ground, f"{STEPS}=1", name="source")
    with pytest.raises(UserError, match=f"source(.|\n)*{STEPS}=2"):
        launch(ground, f"{STEPS}=1", resume=str(ground.folder / "source"))


SCHEDULERS = [
    {"step": "two"},
    {"dropped": "x"},
    {"live": "x"},
    {"plan": "x"},
    {"ledger": {"offset": 3}},
    {"restart": None},
]


@pytest.mark.parametrize("state", one_fast_in(len(SCHEDULERS), SCHEDULERS))
def test_a_checkpoint_with_another_state_of_the_scheduler_is_refused(ground, state):
    """Its checksums fit, as if another version had written it."""
    launch(ground, f"{STEPS}=1")
    checkpoint = ground.folder / "run" / "checkpoints" / "step-000001"
    run = json.loads((checkpoint / "run.json").read_bytes())
    run["coordinator"] |= state
    (checkpoint / "run.json").write_text(json.dumps(run))
    manifest = read_manifest(checkpoint)
    write_manifest(
        checkpoint,
        replace(manifest, files={**manifest.files, "run.json": describe(checkpoint / "run.json")}),
    )
    before = (ground.folder / "run" / "ledger.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="step-000001 .* format "):
        launch(ground, f"{STEPS}=2")
    assert (ground.folder / "run" / "ledger.jsonl").read_bytes() == before
