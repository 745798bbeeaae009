"""A bucket of all kinds of tensors goes from one process to another through a process group of
two."""

import multiprocessing
from datetime import timedelta
from typing import Any

import pytest
import torch

from distflow.cluster.collective_weight_transport import InPair, Pair, Pairs
from distflow.runtime.weight_sync.bucket_files import hash_of, pack
from distflow.scheduling.group_states import Version
from tests.cluster.fleet import on_loopback

ENDS_WITHIN_S = 300.0


def receive(sent: InPair, hashes: Any) -> None:
    on_loopback()
    hashes.put(hash_of(pack(sent.get(), device=None)))


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "nccl")])
def test_the_backend_is_that_of_the_device(device, backend, tmp_path):
    assert Pair(tmp_path, device, timedelta(seconds=1)).backend == backend


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tensors_of_any_dtype_and_shape_arrive(device, tmp_path, monkeypatch):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("wants two CUDA devices")
    on_loopback()
    bucket = [
        ("transposed", torch.randn(300, 200).T),
        ("bfloat16", torch.randn(7, 33, 5).to(torch.bfloat16)),
        ("empty", torch.empty(0, 3)),
        ("scalar", torch.tensor(2.5, dtype=torch.float64)),
        ("whole", torch.arange(11)),
        ("yes", torch.tensor([True, False, True])),
    ]
    packed = pack(bucket, device)
    pairs = Pairs(tmp_path, device, ENDS_WITHIN_S)
    sent = pairs(Version(0, 1), 0, packed, [3])[3]
    away = multiprocessing.get_context("spawn")
    hashes = away.Queue()

    with monkeypatch.context() as patch:
        # of the other process: nccl wants one device each
        patch.setenv("CUDA_VISIBLE_DEVICES", "1")
        worker = away.Process(target=receive, args=(sent, hashes))
        worker.start()

    assert hashes.get(timeout=ENDS_WITHIN_S) == hash_of(packed)
    worker.join()
    sent.drop()
    assert list(tmp_path.iterdir()) == []
