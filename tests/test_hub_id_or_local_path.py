"""A hub that cannot be reached is reported within seconds, and the libraries no longer try it."""

import socket

import datasets.config
import pytest
from huggingface_hub import constants

from distflow.hub_id_or_local_path import unreachable


@pytest.fixture(autouse=True)
def reset(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    unreachable.cache_clear()
    yield
    unreachable.cache_clear()


def test_one_that_refuses(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    assert unreachable() == "127.0.0.1: Connection refused"
    assert constants.HF_HUB_OFFLINE and datasets.config.HF_HUB_OFFLINE


def test_one_that_answers_and_one_behind_a_proxy(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        assert unreachable() is None and not constants.HF_HUB_OFFLINE
        unreachable.cache_clear()
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
        monkeypatch.setenv("https_proxy", address)
        assert unreachable() is None
