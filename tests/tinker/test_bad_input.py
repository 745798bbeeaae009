"""What clients send wrongly, or much of, to a real server: each is told, and others go on."""

import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from tests.tinker.server import Served, tinker_server

tinker = pytest.importorskip("tinker")
pb = pytest.importorskip("tinker.proto.tinker_public_pb2")
zstandard = pytest.importorskip("zstandard")
pytestmark = pytest.mark.slow

IDS = [5, 9, 7, 8, 6, 10, 11]
PROTOBUF = {"Content-Type": "application/x-protobuf"}
ANSWERS_WITHIN_S = 60


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tinker")
    with tinker_server(folder, checkpoints=folder / "checkpoints") as found:
        yield found


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    key = {"X-API-Key": served.key}
    with httpx.Client(base_url=f"{served.url}/api/v1", headers=key, timeout=60) as made:
        yield made


def result(http: httpx.Client, asked: httpx.Response) -> httpx.Response:
    assert asked.status_code == 200, asked.text
    while True:
        found = http.post("retrieve_future", json={"request_id": asked.json()["request_id"]})
        if found.status_code != 408:
            return found


def new_model(http: httpx.Client, served: Served) -> str:
    session = http.post("create_session", json={}).json()["session_id"]
    asked = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": served.model,
        "lora_config": {"rank": 4, "seed": 5},
    }
    created = result(http, http.post("create_model", json=asked)).json()
    model_id: str = created["model_id"]
    return model_id


def one_pass(model_id: str, seq_id: int, repeats: int = 1) -> bytes:
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    for _ in range(repeats):
        data = message.data.add()
        data.model_input.add().encoded_text.tokens = np.array(IDS[:-1], np.int32).tobytes()
        targets = data.loss_fn_inputs["target_tokens"]
        targets.dtype = pb.DTYPE_INT64
        targets.dense = np.array(IDS[1:], np.int64).tobytes()
    encoded: bytes = message.SerializeToString()
    return encoded


def gradient_norm(http: httpx.Client, model_id: str, seq_id: int) -> float:
    step = {"model_id": model_id, "seq_id": seq_id, "adam_params": {"learning_rate": 0.01}}
    found = result(http, http.post("optim_step", json=step)).json()
    norm: float = found["metrics"]["grad_norm"]
    return norm


def test_bodies_may_be_packed(http: httpx.Client, served: Served) -> None:
    """The passes are equal; a packing that is not known, and a broken one, are refused."""
    norms = []
    for pack in (False, True):
        model_id = new_model(http, served)
        body = one_pass(model_id, 1)
        headers = dict(PROTOBUF)
        if pack:
            body = zstandard.ZstdCompressor().compress(body)
            headers["Content-Encoding"] = "zstd"
        passed = http.post("forward_backward", content=body, headers=headers)
        assert result(http, passed).status_code == 200
        norms.append(gradient_norm(http, model_id, 2))
    assert norms[0] == norms[1]

    for coding, named in (("gzip", "gzip"), ("zstd", "zstd")):
        headers = PROTOBUF | {"Content-Encoding": coding}
        refused = http.post("forward_backward", content=b"no frame", headers=headers)
        assert refused.status_code == 422
        assert named in refused.json()["detail"]


def test_a_body_is_counted_whatever_its_head_says(http: httpx.Client) -> None:
    """Sent without a length, or packed to a few bytes."""

    def parts() -> Iterator[bytes]:
        for _ in range(65):
            yield bytes(2**20)

    refused = http.post("forward_backward", content=parts(), headers=PROTOBUF)
    assert refused.status_code == 422
    assert "67,108,864" in refused.json()["detail"]

    packed = zstandard.ZstdCompressor().compress(bytes(65 * 2**20))
    headers = PROTOBUF | {"Content-Encoding": "zstd"}
    refused = http.post("forward_backward", content=packed, headers=headers)
    assert "67,108,864" in refused.json()["detail"]


def test_an_older_client_is_told_which_it_needs(http: httpx.Client) -> None:
    refused = http.post("create_session", json={"sdk_version": "0.24.3"})
    assert refused.status_code == 422
    assert "0.24.3" in refused.json()["detail"]
    assert http.post("create_session", json={"sdk_version": "0.38.0"}).status_code == 200
    old = http.post("forward_backward", json={"model_id": "m", "seq_id": 1})
    assert old.status_code == 422
    assert "0.25" in old.json()["detail"]


def test_a_client_that_stops_within_a_body_keeps_nobody_waiting(
    http: httpx.Client, served: Served
) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    head = (
        f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"X-API-Key: {served.key}\r\nContent-Type: application/x-protobuf\r\n"
        "Content-Length: 1000000\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as stalled:
        stalled.sendall(head.encode() + bytes(1000))
        model_id = new_model(http, served)
        passed = http.post("forward_backward", content=one_pass(model_id, 1), headers=PROTOBUF)
        assert result(http, passed).status_code == 200
    assert gradient_norm(http, model_id, 2) > 0


def datum() -> Any:
    return tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(IDS[:-1]),
        loss_fn_inputs={"target_tokens": IDS[1:]},
    )


def test_a_batch_that_the_client_splits_has_the_gradient_of_one(
    http: httpx.Client, served: Served
) -> None:
    num_data = 2100
    client = tinker.ServiceClient(base_url=served.url, api_key=served.key)
    model = client.create_lora_training_client(base_model=served.model, rank=4, seed=5).result()
    passed = model.forward_backward([datum()] * num_data, "cross_entropy")
    split = model.optim_step(tinker.types.AdamParams(learning_rate=0.01)).result()
    assert len(passed.result().loss_fn_outputs) == num_data
    client.close("success")

    model_id = new_model(http, served)
    whole = one_pass(model_id, 1, num_data)
    result(http, http.post("forward_backward", content=whole, headers=PROTOBUF))
    norm = gradient_norm(http, model_id, 2)
    assert split.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_full_disk_is_told_and_the_model_goes_on(served: Served) -> None:
    """The name is free afterwards."""
    client = tinker.ServiceClient(base_url=served.url, api_key=served.key)
    model = client.create_lora_training_client(base_model=served.model, rank=4, seed=5).result()
    before = resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(tinker.RequestFailedError, match="[Ff]ile too large"):
            model.save_state("full").result(ANSWERS_WITHIN_S)
    finally:
        resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, before)

    path = model.save_state("full").result(ANSWERS_WITHIN_S).path
    assert path.endswith("/weights/full")
    again = client.create_training_client_from_state(path).result(ANSWERS_WITHIN_S)
    assert again.forward([datum()], "cross_entropy").result().metrics["loss:sum"] > 0
    client.close("success")


def test_many_samples_wait_at_once(served: Served) -> None:
    """The server answers others meanwhile."""
    client = tinker.ServiceClient(base_url=served.url, api_key=served.key)
    sampler = client.create_sampling_client(base_model=served.model).result()
    prompt = tinker.types.ModelInput.from_ints(IDS)
    params = tinker.types.SamplingParams(max_tokens=4, temperature=1.0)
    waiting = [sampler.sample(prompt, num_samples=1, sampling_params=params) for _ in range(500)]
    with httpx.Client(base_url=f"{served.url}/api/v1") as other:
        asked = other.get("healthz", headers={"X-API-Key": served.key}, timeout=5)
        assert asked.status_code == 200
    assert all(len(each.result().sequences) == 1 for each in waiting)
    client.close("success")


def test_clients_train_side_by_side(served: Served) -> None:
    """Each learns what it learns alone."""

    def train(number: int) -> list[float]:
        client = tinker.ServiceClient(base_url=served.url, api_key=served.key)
        made = client.create_lora_training_client(base_model=served.model, rank=4, seed=5)
        model = made.result()
        losses = []
        for _ in range(3):
            passed = model.forward_backward([datum()], "cross_entropy")
            model.optim_step(tinker.types.AdamParams(learning_rate=1e-2)).result()
            losses.append(passed.result().metrics["loss:sum"])
        client.close("success")
        return losses

    alone = train(0)
    with ThreadPoolExecutor(12) as pool:
        assert [*pool.map(train, range(24))] == [alone] * 24


def test_a_cancelled_sample_leaves_the_engine_to_others(http: httpx.Client, served: Served) -> None:
    asked = {
        "base_model": served.model,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": IDS}]},
        "sampling_params": {"max_tokens": 1, "temperature": 1.0, "stop": []},
    }
    result(http, http.post("asample", json=asked))
    long = asked | {"num_samples": 256, "sampling_params": {"max_tokens": 480, "stop": []}}
    began = time.monotonic()
    first = http.post("asample", json=long)
    assert result(http, first).status_code == 200
    took = time.monotonic() - began

    began = time.monotonic()
    waiting = [http.post("asample", json=long) for _ in range(4)]
    for each in waiting:
        http.post("cancel_future", json={"request_id": each.json()["request_id"]})
    assert result(http, waiting[0]).status_code == 410
    assert result(http, http.post("asample", json=asked)).status_code == 200
    assert time.monotonic() - began < took / 2


def test_a_request_after_a_refused_one_has_its_turn(http: httpx.Client, served: Served) -> None:
    """The server cannot read the number of the refused one."""
    model_id = new_model(http, served)
    assert http.post("forward_backward", content=b"no", headers=PROTOBUF).status_code == 422
    began = time.monotonic()
    passed = http.post("forward_backward", content=one_pass(model_id, 2), headers=PROTOBUF)
    assert result(http, passed).status_code == 200
    assert time.monotonic() - began < 55
