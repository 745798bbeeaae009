"""Shares of a step on the disk: joined in the order of groups, and gone with the step or the
worker."""

import pytest
import torch

from distflow.data.batch import Batch
from distflow.runtime.saved_groups import forget_groups, keep_groups, load_groups


def share(*prompt_groups: int) -> Batch:
    ones = torch.ones(len(prompt_groups), dtype=torch.int64)
    batch = Batch(ones, ones.clone())
    batch["group_index"] = torch.tensor(prompt_groups)
    batch["uid"] = [f"{prompt_group}-{place}" for place, prompt_group in enumerate(prompt_groups)]
    return batch


def test_shares_are_joined_in_the_order_of_groups(tmp_path):
    for part, own in enumerate((share(3, 3, 5), share(4, 4), share())):
        keep_groups(tmp_path, 7, own, part, num_parts=3)
    assert load_groups(tmp_path, 7)["uid"] == ["3-0", "3-1", "4-0", "4-1", "5-2"]
    with pytest.raises(FileNotFoundError):
        load_groups(tmp_path, 8)


def test_a_start_with_fewer_workers_leaves_nothing_of_the_others(tmp_path):
    for part in range(3):
        keep_groups(tmp_path, 7, share(part), part, num_parts=3)
    keep_groups(tmp_path, 7, share(0, 1), 0, num_parts=2)
    assert sorted(path.name for path in (tmp_path / "tokens").iterdir()) == [
        "000007.1.safetensors",
        "000007.safetensors",
    ]


def test_steps_are_forgotten_whole_and_somebodys_files_stay(tmp_path):
    for step in (1, 2, 3):
        for part in range(2):
            keep_groups(tmp_path, step, share(part), part, num_parts=2)

    (tmp_path / "tokens" / "mine.safetensors").write_bytes(b"mine")
    forget_groups(tmp_path, 2)
    assert sorted(path.name for path in (tmp_path / "tokens").iterdir()) == [
        *(f"{step:06d}{part}.safetensors" for step in (2, 3) for part in (".1", "")),
        "mine.safetensors",
    ]
