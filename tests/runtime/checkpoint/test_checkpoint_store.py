"""Checkpoints: bit-equal round trips, retention, and the faults that must leave one that loads."""

import math
import multiprocessing
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from distflow.runtime.checkpoint import files as checkpoint_files
from distflow.runtime.checkpoint.checkpoint_store import CheckpointError, CheckpointStore


def parts_of(step, size=64):
    generator = torch.Generator().manual_seed(step)
    return {
        "actor": {
            "model/embed.weight": torch.randn(size, generator=generator),
            "m/0": torch.full((3,), float(step)),
        },
        "coordinator": {"step": step, "dropped": {"equal_rewards": 3}},
    }


def save(store, step, parts, metric=None):
    """All of it by one process."""
    writing = store.begin(step)
    for name, part in parts.items():
        writing.write(name, part)
    return writing.commit(parts, metric)


def assert_whole(checkpoint, step):
    assert checkpoint.step == step
    expected = parts_of(step)
    assert checkpoint.load("coordinator") == expected["coordinator"]
    actor = checkpoint.load("actor")
    assert actor.keys() == expected["actor"].keys()
    assert all(torch.equal(actor[name], tensor) for name, tensor in expected["actor"].items())


def names_in(store):
    return sorted(path.name for path in store.folder.iterdir())


def test_tensors_and_values_come_back_bit_for_bit(tmp_path):
    tied = torch.arange(6, dtype=torch.float64).reshape(2, 3)
    tensors = {
        "a/b.c": torch.tensor([1.0, -0.0, math.nan, math.inf, 1e-45]),
        "bf16": torch.randn(5, dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(2, 0),
        "empty too": torch.zeros(0),
        "bool": torch.tensor([True, False]),
        "rng": torch.get_rng_state(),
        "tied": tied,
        "tied again": tied,
        "a row of it": tied[1],
        "strided": tied.t(),
        "expanded": torch.ones(1).expand(4),
        "trained": torch.nn.Parameter(torch.ones(3)),
    }
    values = {
        "rng": list(range(625)),
        "kl": 0.1 + 0.2,
        "nan": math.nan,
        "text": "ünï\ud83d",
        "none": None,
        "big": 2**63,
    }
    store = CheckpointStore(tmp_path / "checkpoints")
    save(store, 3, {"state": tensors, "meta": values, "nothing": {}, "list": [1, [2]]})
    checkpoint = store.load()
    assert sorted(checkpoint.files) == ["list", "meta", "nothing", "state"]
    loaded = checkpoint.load("state")
    assert loaded.keys() == tensors.keys()

    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor
        assert torch.equal(
            loaded[name].contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor, raw
        )

    meta = checkpoint.load("meta")
    assert math.isnan(meta.pop("nan")) and meta == {
        key: value for key, value in values.items() if key != "nan"
    }
    assert checkpoint.load("nothing") == {} and checkpoint.load("list") == [1, [2]]
    with pytest.raises(KeyError):
        checkpoint.load("critic")


def test_load_by_step_by_folder_and_from_another_store(tmp_path):
    store = CheckpointStore(tmp_path)
    paths = {step: save(store, step, parts_of(step)) for step in (5, 10)}
    assert_whole(store.load(), 10)
    assert_whole(store.load(5), 5)
    assert_whole(store.load(paths[5]), 5)
    assert_whole(CheckpointStore(tmp_path / "new run").load(tmp_path), 10)

    with pytest.raises(CheckpointError, match="step 7 .* step-000005, step-000010"):
        store.load(7)

    with pytest.raises(CheckpointError, match="step-000099.* folder"):
        store.load(tmp_path / "step-000099")


def test_nothing_to_load(tmp_path):
    store = CheckpointStore(tmp_path / "none")
    assert not store.exists()
    with pytest.raises(CheckpointError, match="no checkpoint in .*none"):
        store.load()
    save(store, 1, parts_of(1))
    assert store.exists()


def test_retention_keeps_the_newest_and_the_best(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2, keep_best=1)
    for step, metric in enumerate([0.1, 0.9, 0.3, None, math.nan, 0.2]):
        save(store, step, parts_of(step), metric)
    assert names_in(store) == ["step-000001", "step-000004", "step-000005"]
    assert store.load(1).metric == 0.9 and store.load(4).metric is None


def test_the_newest_is_what_was_saved_last_whatever_its_step(tmp_path):
    """After going back to step 2, step 4 is newer than the abandoned steps 10 and 12: those go, it
    stays."""
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (2, 10, 12, 4):
        save(store, step, parts_of(step))
    assert_whole(store.load(), 4)
    save(store, 6, parts_of(6))
    assert names_in(store) == ["step-000004", "step-000006"]


def test_a_link_where_an_old_checkpoint_is_set_aside_goes_without_what_it_leads_to(tmp_path):
    store = CheckpointStore(tmp_path / "store", keep_last=1)
    save(store, 1, parts_of(1))
    precious = tmp_path / "precious"
    precious.mkdir()
    (store.folder / "step-000001.removed").symlink_to(precious)
    save(store, 2, parts_of(2))
    assert names_in(store) == ["step-000002"] and precious.is_dir()


# Several processes


def write_a_part(folder, step, name, part, fatal_point=None):
    def on_point(point):
        if point == fatal_point:
            os.kill(os.getpid(), signal.SIGKILL)

    CheckpointStore(folder, on_point=on_point).writing(step).write(name, part)


def in_a_process(target, *args):
    """Its exit code."""
    child = multiprocessing.get_context("fork").Process(target=target, args=args)
    child.start()
    child.join()
    return child.exitcode


def test_processes_write_their_own_parts_and_one_commits(tmp_path):
    store = CheckpointStore(tmp_path)
    parts = parts_of(2)
    save(store, 1, parts_of(1))
    writing = store.begin(2)
    children = [
        multiprocessing.get_context("fork").Process(
            target=write_a_part, args=(tmp_path, 2, name, part)
        )
        for name, part in parts.items()
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert_whole(store.load(), 1)
    path = writing.commit(parts, metric=0.5)
    assert path == tmp_path / "step-000002"
    assert sorted(entry.name for entry in path.iterdir()) == [
        "actor.safetensors",
        "coordinator.json",
        "manifest.json",
    ]
    assert_whole(CheckpointStore(tmp_path).load(), 2)
    assert store.load().metric == 0.5


def test_a_part_that_was_announced_and_is_missing_commits_nothing(tmp_path):
    store = CheckpointStore(tmp_path)
    parts = parts_of(2)
    save(store, 1, parts_of(1))
    writing = store.begin(2)
    writing.write("actor", parts["actor"])

    with pytest.raises(CheckpointError, match="step 2 .*: coordinator, critic missing"):
        writing.commit([*parts, "critic"])

    assert names_in(store) == ["step-000001"]
    assert_whole(store.load(), 1)


# Fault 12: killed at each point of a checkpoint's writing


def save_and_die(folder, fatal_point):
    def on_point(point):
        if point == fatal_point:
            os.kill(os.getpid(), signal.SIGKILL)

    save(
        CheckpointStore(folder, keep_last=2, keep_best=1, on_point=on_point),
        4,
        parts_of(4),
        metric=0.4,
    )


def points_of_a_save(folder):
    """Every point that a save passes which also removes an old checkpoint."""
    points = []
    for step in (1, 2, 3):
        points.clear()
        save(
            CheckpointStore(folder, keep_last=2, keep_best=1, on_point=points.append),
            step,
            parts_of(step),
            -step,
        )

    points.clear()
    save(
        CheckpointStore(folder, keep_last=2, keep_best=1, on_point=points.append),
        4,
        parts_of(4),
        metric=0.4,
    )

    return points


POINTS = [
    "begun",
    "part actor",
    "part coordinator",
    "manifest",
    "renamed",
    ("removing step-000001"),
    "removing step-000002",
]


def test_these_are_the_points(tmp_path):
    assert points_of_a_save(tmp_path) == POINTS


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_leaves_a_whole_checkpoint_and_no_leftovers(tmp_path, point):
    for step in (1, 2, 3):
        save(CheckpointStore(tmp_path, keep_last=2, keep_best=1), step, parts_of(step), -step)
    assert in_a_process(save_and_die, tmp_path, point) == -signal.SIGKILL, "the fault did not fire"

    survivor = CheckpointStore(tmp_path, keep_last=2, keep_best=1)
    is_committed = POINTS.index(point) >= POINTS.index("renamed")
    assert_whole(survivor.load(), 4 if is_committed else 3)
    assert survivor.load().message == ""
    save(survivor, 4, parts_of(4), metric=0.5)
    assert_whole(survivor.load(), 4)
    names = names_in(survivor)
    assert all(name.startswith("step-") and "." not in name for name in names) and len(names) <= 3


def leave_leftovers(folder):
    """As kills leave them: in a save, and in the removal of an old checkpoint."""
    save(CheckpointStore(folder), 1, parts_of(1))
    save(CheckpointStore(folder), 2, parts_of(2)).rename(folder / "step-000002.removed")
    (folder / "step-000002.removed" / "actor.safetensors").unlink()
    CheckpointStore(folder).begin(3).write("actor", parts_of(3)["actor"])
    (folder / "step-000003.partial" / "actor.safetensors.abcd_123.distflow-partial").write_bytes(
        b"half"
    )
    (folder / "step-000004.partial").mkdir()


def test_leftovers_are_removed_at_the_start(tmp_path):
    store = CheckpointStore(tmp_path)
    store.remove_leftovers()
    leave_leftovers(tmp_path)
    store.remove_leftovers()
    assert names_in(store) == ["step-000001"]
    assert_whole(store.load(), 1)


def test_a_manifest_names_files_of_its_own_folder_only(tmp_path):
    """One that was made by hand, with its checksum: neither is such a file read, nor is it
    removed."""
    (tmp_path / "precious.txt").write_text("precious")
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    path = save(store, 1, parts_of(1))
    entry = checkpoint_files.describe(tmp_path / "precious.txt")
    checkpoint_files.write_manifest(
        path, checkpoint_files.Manifest(1, 0, None, {"../../precious.txt": entry})
    )
    with pytest.raises(CheckpointError, match=r"step-000001 .*manifest\.json "):
        store.load(path)
    for step in (2, 3):
        save(store, step, parts_of(step))
    assert (tmp_path / "precious.txt").read_text() == "precious"


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o277])
def test_nobody_else_can_read_a_checkpoint_whatever_the_umask(tmp_path, umask):
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep_last=2)
    old = os.umask(umask)
    try:
        for step in (1, 2, 3):
            save(store, step, parts_of(step))
    finally:
        os.umask(old)

    modes = {oct(path.stat().st_mode & 0o777) for path in store.folder.rglob("*") if path.is_file()}
    folders = {
        oct(path.stat().st_mode & 0o777) for path in (store.folder, *store.folder.glob("step-*"))
    }
    assert modes == {"0o600"}
    assert folders <= {"0o700", "0o500"}


# Fault 13: disk full


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("wants the right to mount a small disk (root)")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_fails_loudly_and_keeps_the_old_one(small_disk):
    store = CheckpointStore(small_disk / "checkpoints")
    save(store, 1, parts_of(1))
    too_large = {**parts_of(2, size=1 << 20)}

    for _ in range(2):
        with pytest.raises(CheckpointError) as caught:
            save(store, 2, too_large)
        for piece in ("step 2", str(store.folder), "disk is full", "trainer.default_local_dir"):
            assert piece in str(caught.value)
        assert names_in(store) == ["step-000001"]
        assert_whole(store.load(), 1)

    save(store, 3, parts_of(3))
    assert_whole(store.load(), 3)


def write_under_a_limit(folder, limit_bytes):
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    with pytest.raises(CheckpointError, match="step 2 .* disk is full"):
        write_a_part(folder, 2, "actor", parts_of(2, size=1 << 20)["actor"])


def test_a_part_that_another_process_could_not_write_is_told_to_the_one_that_commits(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1, parts_of(1))
    writing = store.begin(2)
    writing.write("coordinator", {})
    assert in_a_process(write_under_a_limit, tmp_path, 50_000) == 0

    with pytest.raises(CheckpointError, match="step 2 .*: actor, coordinator missing"):
        writing.commit(parts_of(2))

    assert names_in(store) == ["step-000001"]
    assert_whole(store.load(), 1)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointError, match="file/checkpoints.*Not a directory.*default_local_dir"
    ):
        save(CheckpointStore(tmp_path / "file" / "checkpoints"), 1, parts_of(1))


# Fault 14: the newest checkpoint is corrupt


def flip_a_bit(path: Path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut_short(path: Path):
    path.write_bytes(path.read_bytes()[:-1])


def test_a_checkpoint_of_another_format_is_passed_over_and_named_so(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    save(store, 1, parts_of(1))

    with monkeypatch.context() as later:
        later.setattr(checkpoint_files, "FORMAT", 2)
        save(store, 2, parts_of(2))

    checkpoint = store.load()
    assert_whole(checkpoint, 1)
    assert "manifest.json has format 2, and this version of distflow reads 1" in checkpoint.message
    assert "checksum" not in checkpoint.message


DAMAGES = [flip_a_bit, cut_short, Path.unlink, lambda path: path.write_bytes(b"")]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["actor.safetensors", "coordinator.json", "manifest.json"])
def test_a_damaged_newest_checkpoint_is_passed_over_and_the_user_told(tmp_path, name, damage):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        save(store, step, parts_of(step))
    damage(tmp_path / "step-000003" / name)
    checkpoint = store.load()
    assert_whole(checkpoint, 2)
    assert "step-000003 is damaged" in checkpoint.message and name in checkpoint.message
    assert "using step 2 instead" in checkpoint.message
    with pytest.raises(CheckpointError, match="step-000003 .*step-000002"):
        store.load(tmp_path / "step-000003")


def test_a_run_goes_on_after_a_damaged_one_and_saves_its_step_again(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (1, 2):
        save(store, step, parts_of(step))
    flip_a_bit(tmp_path / "step-000002" / "actor.safetensors")
    assert_whole(store.load(), 1)
    save(store, 2, parts_of(2))
    checkpoint = store.load()
    assert_whole(checkpoint, 2)
    assert checkpoint.message == ""


def test_all_damaged_is_an_error_that_names_each(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        flip_a_bit(save(store, step, parts_of(step)) / "actor.safetensors")

    with pytest.raises(CheckpointError, match="no checkpoint .*: .*step-000002.*step-000001"):
        store.load()
