"""Checkpoints that several real gloo ranks write, loaded on more, on fewer and on one, and what
happens to the rest."""

import json
import pickle
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from distflow.data import global_random_states
from distflow.launch.run_folders.export_checkpoint import export_checkpoint
from distflow.runtime.checkpoint.checkpoint_store import CheckpointStore
from distflow.runtime.checkpoint.restore import restore
from distflow.runtime.checkpoint.saved_parts import saved_parts
from distflow.runtime.checkpoint.saver import Saver
from distflow.runtime.resources import build_resources
from distflow.training.engine import OneRank
from tests.e2e.runs import Playground
from tests.ranks import run_ranks
from tests.runtime.checkpoint.sharded_worker import SEED, draws, resume_point, whole_odd_tensors

WORKER = "tests.runtime.checkpoint.sharded_worker"


def run_task(
    do: str,
    num_ranks: int,
    folder: Path,
    spec: Path,
    checkpoints: Path,
    exit_codes: tuple[int, ...] | None = None,
    **more: object,
) -> Path:
    task = {"do": do, "spec": str(spec), "checkpoints": str(checkpoints), **more}
    (folder / "task.json").write_text(json.dumps(task))
    run_ranks(WORKER, num_ranks, folder, exit_codes)
    return folder


def told(folder: Path, rank: int) -> object:
    return json.loads((folder / f"{rank}.json").read_text())


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys() and any("exp_avg_sq" in name for name in found)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    """Of a supervised run, pickled."""
    folder = tmp_path_factory.mktemp("spec")
    off = (
        "~reward.functions",
        "~reward.num_workers",
        "~custom_reward_function.path",
        "~actor_rollout_ref.rollout.n",
    )
    (folder / "spec.pkl").write_bytes(
        pickle.dumps(Playground(folder).spec("sft", "data.response_key=answer", *off)[1])
    )

    return folder / "spec.pkl"


@pytest.fixture(scope="module")
def on_two(spec, tmp_path_factory):
    """Steps 1 and 2, saved on two ranks to `checkpoints`."""
    folder = tmp_path_factory.mktemp("two")
    return run_task("save", 2, folder, spec, folder / "checkpoints")


@pytest.fixture(scope="module")
def on_four(spec, on_two, tmp_path_factory):
    """Step 1 of those loaded on four ranks, two replicas of two shards, and saved to
    `checkpoints`."""
    return run_task(
        "reshard", 4, tmp_path_factory.mktemp("four"), spec, on_two / "checkpoints", hybrid=True
    )


@pytest.fixture
def copy_of_two(on_two, tmp_path):
    return Path(shutil.copytree(on_two / "checkpoints", tmp_path / "checkpoints"))


@pytest.mark.slow
def test_two_ranks_save_during_the_run_and_one_process_resumes(on_two, spec):
    loaded = pickle.loads(spec.read_bytes())
    resources = build_resources(loaded.factories, loaded.plan.ranks[0])
    assert resources.actor is not None

    for step in (1, 2):
        restore(CheckpointStore(on_two / "checkpoints").load(step), resources)
        assert_same_bits(
            resources.actor.state().tensors, load_file(on_two / f"step-{step}.safetensors")
        )


def test_each_rank_wrote_its_own_shards_and_what_it_alone_has(on_two):
    path = CheckpointStore(on_two / "checkpoints").load().path
    assert sorted(file.name for file in path.iterdir()) == [
        "actor-rank0.safetensors", "actor-rank1.safetensors", "actor_meta.json", "manifest.json",
        "odd-rank0.safetensors", "odd-rank1.safetensors", "rank_0.json", "rank_1.json", "run.json",
    ]  # fmt: skip
    whole = sum(tensor.nbytes for tensor in load_file(on_two / "step-2.safetensors").values())
    sizes = [(path / f"actor-rank{rank}.safetensors").stat().st_size for rank in (0, 1)]
    assert whole <= sum(sizes) < 1.2 * whole and max(sizes) < 0.7 * whole


def test_tensors_of_every_shape_come_back_whole(on_two, on_four):
    for folder in (on_two, on_four):
        found = CheckpointStore(folder / "checkpoints").load().load("odd")
        expected = whole_odd_tensors()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_four_ranks_go_on_from_two_and_two_from_four(on_two, on_four, spec, tmp_path):
    expected = load_file(on_two / "step-1.safetensors")
    assert_same_bits(load_file(on_four / "loaded.safetensors"), expected)
    again = run_task("reshard", 2, tmp_path, spec, on_four / "checkpoints")
    assert_same_bits(load_file(again / "loaded.safetensors"), expected)


def test_two_ranks_go_on_from_one_process(on_two, spec, tmp_path):
    loaded = pickle.loads(spec.read_bytes())
    resources = build_resources(loaded.factories, loaded.plan.ranks[0])
    restore(CheckpointStore(on_two / "checkpoints").load(1), resources)
    store = CheckpointStore(tmp_path / "checkpoints")
    parts = [
        *saved_parts(loaded, resources, lambda: resume_point(loaded), {}),
        ("odd", whole_odd_tensors()),
    ]
    Saver(store, OneRank()).save(1, parts, (), wait=True)
    assert "actor.safetensors" in [path.name for path in store.load().path.iterdir()]
    folder = run_task("reshard", 2, tmp_path, spec, store.folder)
    assert_same_bits(
        load_file(folder / "loaded.safetensors"), load_file(on_two / "step-1.safetensors")
    )


def test_of_replicas_one_writes(on_four):
    path = CheckpointStore(on_four / "checkpoints").load().path
    for rank in (2, 3):
        with safe_open(path / f"actor-rank{rank}.safetensors", "pt") as file:
            assert not list(file.keys())


def test_a_rank_draws_on_where_it_stood_and_a_new_one_from_its_seed(on_two, on_four):
    for rank in (0, 1):
        assert told(on_four, rank) == told(on_two, rank)
    before = global_random_states.states()

    for rank in (2, 3):
        global_random_states.seed("run", SEED, 1, rank)
        assert told(on_four, rank) == draws()

    global_random_states.put_back(before)
    assert len({json.dumps(told(on_four, rank)) for rank in range(4)}) == 4


def test_export_needs_no_ranks(on_two, on_four, tmp_path):
    for folder, step in ((on_two, 2), (on_four, 1)):
        target = export_checkpoint(
            CheckpointStore(folder / "checkpoints").load().path, tmp_path / folder.name
        )
        model = AutoModelForCausalLM.from_pretrained(target)
        expected = load_file(on_two / f"step-{step}.safetensors")
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected[f"model.{name}"])


def test_a_rank_that_is_killed_within_a_save_is_named_and_the_one_before_is_whole(
    copy_of_two, spec, tmp_path
):
    kill = (1, "part actor-rank1")
    folder = run_task(
        "be_killed", 2, tmp_path, spec, copy_of_two, exit_codes=(0, -signal.SIGKILL), kill=kill
    )
    message = str(told(folder, 0))
    assert "the checkpoint of step 4 was not written" in message and "rank_1 missing" in message
    assert CheckpointStore(copy_of_two).load().step == 2
    assert sorted(path.name for path in copy_of_two.iterdir()) == [
        "step-000001",
        "step-000002",
    ]
