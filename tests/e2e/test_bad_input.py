"""Bad input ends in one message that names what to change, with the right status, no traceback, and
nothing lost."""

import json
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from distflow import cli
from distflow.runtime.checkpoint.checkpoint_store import CheckpointStore
from tests.e2e.cli_runs import CliRun
from tests.e2e.runs import Playground
from tests.tiny_models import tiny_tokenizer, write_tiny_model

pytestmark = pytest.mark.slow
CHEAP = ("trust.check_rewards=false", "trainer.total_epochs=1", "actor_rollout_ref.rollout.n=2")

Prepare = Callable[[Playground], None]


@pytest.fixture
def ground(tmp_path):
    return Playground(tmp_path, num_rows=4)


def train(ground: Playground, *overrides: str, flags: tuple[str, ...] = ()) -> int:
    return cli.main(["train", "grpo", *flags, *ground.overrides("run", *CHEAP, *overrides)])


def refused(
    capsys: pytest.CaptureFixture[str],
    status: int,
    said: int,
    *needed: str,
    finished: str = "report: ",
) -> str:
    """The one message of a failed start."""
    out, err = capsys.readouterr()
    assert said == status, err + out
    assert "Traceback" not in err + out and finished not in out
    assert len(re.findall(r"^distflow: ", err, flags=re.MULTILINE)) == 1, err
    for part in needed:
        assert part in err, err
    return err


def keep_nothing_of(pattern: str) -> Prepare:
    def prepare(ground: Playground) -> None:
        for path in (ground.folder / "model").glob(pattern):
            path.unlink()

    return prepare


def rows(*rows: dict[str, str]) -> Prepare:
    return lambda ground: ground.write_rows(rows)


def reward(code: str) -> Prepare:
    return lambda ground: ground.write_reward(code)


def nothing(ground: Playground) -> None:
    pass


def module(name: str, code: str) -> Prepare:
    def prepare(ground: Playground) -> None:
        (ground.folder / f"program_{name}.py").write_text(code)

    return prepare


ASKED = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    "
BAD_INPUT: dict[str, tuple[Prepare, tuple[str, ...], tuple[str, ...]]] = {
    "no model folder": (
        nothing,
        ("actor_rollout_ref.model.path=/nowhere/at/all",),
        ("/nowhere/at/all", "there is no folder '/nowhere'"),
    ),
    "no tokenizer": (keep_nothing_of("token*"), (), ("has no tokenizer", "tokenizer_path")),
    "broken weights": (
        lambda ground: (
            (ground.folder / "model" / "model.safetensors").write_bytes(b"\0" * 100) and None
        ),
        (),
        ("cannot be loaded",),
    ),
    "no data file": (
        nothing,
        ("data.train_files=/nowhere/rows.jsonl",),
        ("data.train_files", "/nowhere/rows.jsonl"),
    ),
    "no prompt key": (
        rows({"question": "1+1", "answer": "2"}),
        (),
        ("data.prompt_key", "question"),
    ),
    "no data at all": (rows(), (), ("data.train_files: no rows",)),
    "no reward file": (
        lambda g: (g.folder / "reward.py").unlink(),
        (),
        ("reward.py", "custom_reward_function.path"),
    ),
    "reward that fails to import": (
        reward(f"import nothing_of_this_name\n{ASKED}return 1.0\n"),
        (),
        ("nothing_of_this_name", "custom"),
    ),
    "reward that raises": (
        reward(f"{ASKED}raise KeyError('the lost key')\n"),
        (),
        ("custom: KeyError: 'the lost key' (at reward.py:2)", "custom_reward_function.path"),
    ),
    "reward that exits": (
        reward(f"{ASKED}import os; os._exit(0)\n"),
        ("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"),
        ("exited with status 0, twice",),
    ),
    "reward that is too slow": (
        reward(f"import time\n{ASKED}time.sleep(60)\n"),
        (
            "reward.timeout_s=0.2",
            "data.train_batch_size=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "reward.num_workers=2",
        ),
        ("reward.timeout_s",),
    ),
    "pipeline that raises": (
        module("raises", "def make():\n    raise KeyError('what')\n"),
        ("dag.pipeline=program_raises:make",),
        ("dag.pipeline", "KeyError", "what"),
    ),
    "no such module": (
        nothing,
        ("trainer.imports=[nothing_of_this_name]",),
        ("trainer.imports", "nothing_of_this_name"),
    ),
    "no CUDA": (nothing, ("trainer.device=cuda",), ("trainer.device=cuda", "trainer.device=auto")),
    "folder that cannot be": (
        nothing,
        ("trainer.default_local_dir=/proc/run",),
        ("/proc/run", "trainer.default_local_dir"),
    ),
    "folder that is a file": (
        lambda g: (g.folder / "file").touch(),
        ("trainer.default_local_dir={folder}/file",),
        ("a file is in the way", "trainer.default_local_dir"),
    ),
    "no such checkpoint": (
        nothing,
        ("trainer.resume_mode=/nowhere",),
        ("trainer.resume_mode", "/nowhere"),
    ),
}


@pytest.mark.parametrize("what", BAD_INPUT)
def test_one_message_names_what_to_change(ground, capsys, what, monkeypatch):
    if what == "no CUDA":
        import torch

        if torch.cuda.is_available():
            pytest.skip("wants a machine without CUDA")

    prepare, overrides, needed = BAD_INPUT[what]
    prepare(ground)
    monkeypatch.syspath_prepend(str(ground.folder))
    status = train(ground, *(text.format(folder=ground.folder) for text in overrides))
    refused(capsys, 2, status, *needed)


def test_a_user_s_node_is_the_user_s_fault_and_named_with_its_line(ground, capsys, monkeypatch):
    (ground.folder / "odd_estimator.py").write_text(
        "from distflow import register_adv_est\n"
        "@register_adv_est('odd')\n"
        "def odd(token_level_rewards, response_mask):\n"
        "    raise RuntimeError('no advantage today')\n"
    )
    monkeypatch.syspath_prepend(str(ground.folder))
    status = train(ground, "trainer.imports=[odd_estimator]", "algorithm.adv_estimator=odd")
    refused(
        capsys,
        2,
        status,
        "node 'calculate_advantages' raised RuntimeError: no advantage today",
        "odd_estimator.py:4",
    )


def test_a_run_s_folder_of_another_config_data_or_tokenizer(ground, capsys):
    assert train(ground, "trainer.save_freq=1") == 0
    capsys.readouterr()
    before = (ground.folder / "run" / "metrics.jsonl").read_bytes()

    status = train(
        ground, "trainer.save_freq=1", "actor_rollout_ref.actor.optim.lr=1e-2", "trainer.seed=7"
    )
    message = refused(
        capsys,
        2,
        status,
        "actor_rollout_ref.actor.optim.lr: 0.001 then, 0.01 now",
        "trainer.seed: 1 then",
    )
    assert "--allow-change" in message and "--resume never" in message

    allowed = ("--allow-change", "actor_rollout_ref.actor.optim.lr")
    longer = (
        "trainer.save_freq=1",
        "trainer.total_epochs=2",
        "actor_rollout_ref.actor.optim.lr=1e-2",
    )
    assert train(ground, *longer, flags=allowed) == 0
    capsys.readouterr()
    journal = (ground.folder / "run" / "ledger.jsonl").read_text()
    assert '"allowed_change","keys":["actor_rollout_ref.actor.optim.lr"]' in journal

    ground.write_rows([{"prompt": f"{i}-", "answer": "7"} for i in range(4)])
    refused(
        capsys,
        2,
        train(ground, *longer),
        "different data",
        "files that they name have changed",
        "--resume never",
    )
    ground.write_rows([{"prompt": f"{i}-", "answer": "7"} for i in range(5)])
    refused(capsys, 2, train(ground, *longer), "different data")
    assert (ground.folder / "run" / "metrics.jsonl").read_bytes().startswith(before)


def test_another_tokenizer(ground, capsys):
    assert train(ground, "trainer.save_freq=1") == 0
    capsys.readouterr()
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(ground.folder / "other")
    other = f"actor_rollout_ref.model.tokenizer_path={ground.folder}/other"
    refused(capsys, 2, train(ground, "trainer.save_freq=1", other), "a different tokenizer")


def test_another_model(ground, capsys):
    """The reference would be another one, although the policy's weights are in the checkpoint."""
    assert train(ground, "trainer.save_freq=1") == 0
    capsys.readouterr()
    write_tiny_model(ground.folder / "other", seed=5)
    other = f"actor_rollout_ref.model.path={ground.folder}/other"
    refused(capsys, 2, train(ground, "trainer.save_freq=1", other), "a different model")


def damage(checkpoint: Path) -> None:
    file = checkpoint / "actor.safetensors"
    content = bytearray(file.read_bytes())
    content[-1:] = b"?" if content[-1:] != b"?" else b"!"
    file.write_bytes(content)


def test_a_damaged_checkpoint_is_passed_over_and_told(ground, capsys):
    saving = ("trainer.save_freq=1", "trainer.total_epochs=2")
    assert train(ground, *saving) == 0
    checkpoints = ground.folder / "run" / "checkpoints"
    whole = CheckpointStore(checkpoints).load()
    shutil.copytree(whole.path, ground.folder / "copy")
    damage(whole.path)
    capsys.readouterr()
    assert train(ground, *saving) == 0
    out = capsys.readouterr().out
    assert (
        "step-000002 is damaged (actor.safetensors does not match its checksum): using step 1 "
        "instead"
    ) in out
    again = CheckpointStore(checkpoints).load()
    assert (again.path / "actor.safetensors").read_bytes() == (
        ground.folder / "copy" / "actor.safetensors"
    ).read_bytes()

    for path in checkpoints.glob("step-*"):
        (path / "actor.safetensors").unlink()
    refused(capsys, 2, train(ground, *saving), "no checkpoint in", "is complete", "--resume never")


def limited(ground: Playground, num_bytes: int, *overrides: str) -> CliRun:
    """A run that may write no file larger than `num_bytes`: to it the disk is full."""
    run = CliRun(
        ground.folder / "limited.log",
        ["train", "grpo", *ground.overrides("run", *CHEAP, *overrides)],
    )
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
    return run


def test_a_full_disk_while_saving(ground):
    saving = ("trainer.save_freq=1", "trainer.total_epochs=1")
    assert train(ground, *saving) == 0
    checkpoints = ground.folder / "run" / "checkpoints"
    before = CheckpointStore(checkpoints).load()
    run = limited(ground, 100_000, "trainer.save_freq=1", "trainer.total_epochs=2")
    assert run.status() == 2, run.said()
    assert (
        "the checkpoint of step 2 could not be written" in run.said()
        and "the disk is full" in run.said()
    )
    assert "trainer.default_local_dir" in run.said() and "Traceback" not in run.said()
    after = CheckpointStore(checkpoints).load()
    assert (after.step, after.path) == (before.step, before.path) and not after.message
    assert [path.name for path in checkpoints.glob("*.partial")] == []
    events = [
        json.loads(line)
        for line in (ground.folder / "run" / "events.jsonl").read_text().splitlines()
    ]
    assert events[-1]["status"] == "failed"
    assert train(ground, "trainer.save_freq=1", "trainer.total_epochs=2") == 0
