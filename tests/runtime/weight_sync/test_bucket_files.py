"""Files of weights on their way: whole or not there, for their owner alone, and removed without
touching others."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from distflow.errors import UserError
from distflow.launch.run_start import starting
from distflow.observe.crash_safe_files import ASIDE
from distflow.runtime.weight_sync import bucket_files
from distflow.runtime.weight_sync.bucket_files import (
    _WORDS,
    WEIGHTS,
    InFile,
    Spoiled,
    _sum_of,
    hash_of,
    pack,
    write_bucket,
)
from distflow.scheduling.group_states import Version
from tests.e2e.runs import Playground

VERSION = Version(2, 31)


def tensors() -> dict[str, Tensor]:
    base = torch.arange(12.0).view(3, 4)
    return {
        "strided": base.t(),
        "tied": base,
        "again": base,
        "half": torch.full((5,), 0.3, dtype=torch.bfloat16),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "int": torch.tensor([1, -1], dtype=torch.int8),
    }


def write(run_dir: Path, number: int = 0) -> InFile:
    return write_bucket(run_dir, VERSION, number, pack(list(tensors().items())), [0])[0]


def test_what_is_read_is_what_was_written_in_memory_of_its_own(tmp_path):
    sent = write(tmp_path)
    assert sent.path == tmp_path / WEIGHTS / "2-000031" / "bucket-00000.safetensors"
    found = sent.get()
    sent.path.write_bytes(b"")
    assert hash_of(pack(found)) == hash_of(pack(list(tensors().items())))
    for name, tensor in found:
        assert torch.equal(tensor, tensors()[name]) and tensor.dtype == tensors()[name].dtype
    modes = [oct(path.stat().st_mode & 0o777) for path in (sent.path, *list(sent.path.parents)[:2])]
    assert modes == ["0o600", "0o700", "0o700"]


def test_the_last_file_that_is_dropped_takes_the_folders_with_it(tmp_path):
    first = write(tmp_path, 0)
    second = write(tmp_path, 1)
    first.drop()
    assert not first.path.exists() and second.path.exists()
    second.drop()
    second.drop()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "has 0 bytes, but"),
        (b"\x00", "has 1 bytes, but"),
        (None, "differs from what was written"),
    ],
)
def test_a_spoiled_file_is_refused(tmp_path, data, why):
    sent = write(tmp_path)
    sent.path.write_bytes(b"\xff" * sent.num_bytes if data is None else data)
    with pytest.raises(Spoiled, match=why):
        sent.get()


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    sent = write(tmp_path)
    sent.path.unlink()
    sent.path.mkdir()
    with pytest.raises(Spoiled, match=r"bucket-00000\.safetensors (has|differs)"):
        InFile(sent.path, sent.path.stat().st_size).get()


def test_a_file_that_cannot_be_seen_from_here_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(bucket_files, "APPEARS_WITHIN_S", 0.1)
    with pytest.raises(UserError, match=r"trainer\.default_local_dir.* same path"):
        InFile(tmp_path / "elsewhere", 1).get()


def test_a_disk_that_refuses_is_told_by_the_runs_folder(tmp_path):
    (tmp_path / WEIGHTS).write_text("in the way")
    with pytest.raises(UserError, match="cannot be written"):
        write(tmp_path)


def test_the_next_start_removes_what_a_kill_left(tmp_path):
    ground = Playground(tmp_path)
    _, spec = ground.spec("grpo")
    run = spec.run_dir
    aside = f"bucket-00001.safetensors.abcdefg_{ASIDE}"
    run.mkdir(exist_ok=True)
    left = write(run)
    (left.path.parent / aside).write_text("half")
    with starting(spec, ()):
        assert not (run / WEIGHTS).exists()


@pytest.mark.parametrize("change", ["name", "dtype", "shape", "a bit"])
def test_the_hash_is_of_everything_but_the_order(change):
    weights = [("a", torch.zeros(4)), ("b", torch.ones(2, 2))]
    own = hash_of(pack(weights))
    assert own == hash_of(pack(weights[::-1]))
    other = {
        "name": [("c", weights[0][1]), weights[1]],
        "dtype": [("a", torch.zeros(4, dtype=torch.int32)), weights[1]],
        "shape": [("a", torch.zeros(2, 2)), weights[1]],
        "a bit": [("a", torch.tensor([0.0, 0.0, -0.0, 0.0])), weights[1]],
    }[change]
    assert hash_of(pack(other)) != own


def test_the_checksum_of_a_device_differs_for_any_changed_byte_and_for_words_that_change_places():
    for size in (0, 1, 7, 8, 40, 43):
        bytes_ = torch.randint(
            256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size)
        )
        assert torch.equal(_sum_of(bytes_), _sum_of(bytes_.clone()))

        for place in range(size):
            other = bytes_.clone()
            other[place] ^= 1
            assert not torch.equal(_sum_of(bytes_), _sum_of(other)), (size, place)

    words = torch.arange(64, dtype=torch.uint8)
    assert not torch.equal(_sum_of(words), _sum_of(words.roll(8)))

    # begins where no word may begin
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), words])[3:]
    assert torch.equal(_sum_of(words), _sum_of(shifted))
    long = torch.zeros(8 * (_WORDS + 1), dtype=torch.uint8)
    long[-1] = 1
    assert int(_sum_of(long)) != 0
