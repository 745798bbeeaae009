"""`distflow serve --tinker` with its real client: training, sampling, checkpoints, and requests
that come twice, cut or wrong."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from distflow.models.loading import load_model
from tests.tinker.server import Served, tinker_server

tinker = pytest.importorskip("tinker")
pb = pytest.importorskip("tinker.proto.tinker_public_pb2")
pytestmark = pytest.mark.slow

IDS = [5, 9, 7, 8, 6, 10, 11]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tinker")
    with tinker_server(folder, checkpoints=folder / "checkpoints") as found:
        yield found


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    made = tinker.ServiceClient(base_url=served.url, api_key=served.key)
    yield made
    made.close("success")


def datum(ids: list[int] = IDS, **inputs: list[float]) -> Any:
    targets: dict[str, Any] = {"target_tokens": ids[1:]}
    return tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs=targets | (inputs or {"weights": [1.0] * (len(ids) - 1)}),
    )


def train(model: Any, data: list[Any], loss: str = "cross_entropy", lr: float = 1e-2) -> Any:
    passed = model.forward_backward(data, loss)
    model.optim_step(tinker.types.AdamParams(learning_rate=lr)).result()
    return passed.result()


def test_sft_learns_and_what_is_sampled_is_the_trained_model(client: Any, served: Served) -> None:
    model = client.create_lora_training_client(base_model=served.model, rank=8, seed=3).result()
    losses = [train(model, [datum()]).metrics["loss:sum"] for _ in range(20)]
    assert losses[-1] < 0.3 * losses[0]

    sampler = model.save_weights_and_get_sampling_client().result()
    prompt = tinker.types.ModelInput.from_ints(IDS[:1])
    greedy = tinker.types.SamplingParams(max_tokens=len(IDS) - 1, temperature=0.0)
    drawn = sampler.sample(prompt, num_samples=1, sampling_params=greedy).result().sequences[0]
    assert list(drawn.tokens) == IDS[1:]

    trained = model.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    whole = tinker.types.ModelInput.from_ints(IDS)
    first, *scored = sampler.compute_logprobs(whole).result()
    assert first is None
    assert scored == pytest.approx(list(trained.data), abs=1e-4)
    assert list(drawn.logprobs) == pytest.approx(list(trained.data), abs=1e-4)


def test_log_probs_beside_a_sample_are_the_models(client: Any, served: Served) -> None:
    """Of the prompt, and of the most likely tokens at each place of both."""
    sampler = client.create_sampling_client(base_model=served.model).result()
    params = tinker.types.SamplingParams(max_tokens=5, temperature=0.7, seed=4)
    asked = tinker.types.ModelInput.from_ints(IDS)
    answer = sampler.sample(
        asked,
        num_samples=2,
        sampling_params=params,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
    ).result()

    model = load_model(served.model)
    law = model(torch.tensor([IDS])).logits[0].log_softmax(-1)
    first, *of_prompt = answer.prompt_logprobs
    assert first is None
    assert of_prompt == pytest.approx(
        law[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0].tolist(), abs=1e-4
    )
    values, tokens = law[:-1].topk(3)
    for place, row in enumerate(answer.topk_prompt_logprobs[1:]):
        assert [token for token, _ in row] == tokens[place].tolist()
        assert [value for _, value in row] == pytest.approx(values[place].tolist(), abs=1e-4)

    for drawn in answer.sequences:
        whole = model(torch.tensor([[*IDS, *drawn.tokens]])).logits[0, len(IDS) - 1 : -1]
        heated = (whole / 0.7).log_softmax(-1)
        own = heated.gather(1, torch.tensor(list(drawn.tokens))[:, None])[:, 0]
        assert list(drawn.logprobs) == pytest.approx(own.tolist(), abs=1e-4)
        best = whole.log_softmax(-1).topk(2)
        assert drawn.topk_logprobs_np.token_ids.tolist() == best.indices.tolist()

    alone = sampler.compute_logprobs(tinker.types.ModelInput.from_ints(IDS[:1])).result()
    assert alone == [None]


def test_rl_raises_the_reward_of_its_samples(client: Any, served: Served) -> None:
    """As the cookbook's loop: groups, centred rewards, importance sampling with the drawn
    log-probs."""
    model = client.create_lora_training_client(base_model=served.model, rank=16, seed=1).result()
    prompt = IDS[:3]
    params = tinker.types.SamplingParams(max_tokens=4, temperature=1.0)
    rewards = []
    for _ in range(12):
        sampler = model.save_weights_and_get_sampling_client().result()
        asked = tinker.types.ModelInput.from_ints(prompt)
        group = sampler.sample(asked, num_samples=32, sampling_params=params).result().sequences
        scores = [sum(token % 2 for token in each.tokens) / len(each.tokens) for each in group]
        mean = sum(scores) / len(scores)
        rewards.append(mean)
        data = []
        for each, score in zip(group, scores, strict=True):
            before = len(prompt) - 1
            ids = [*prompt, *each.tokens]
            data.append(
                datum(
                    ids,
                    logprobs=[0.0] * before + list(each.logprobs),
                    advantages=[0.0] * before + [score - mean] * len(each.tokens),
                )
            )
        train(model, data, "importance_sampling", lr=3e-2)
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.2


def test_several_targets_of_a_position_have_their_log_probs(client: Any, served: Served) -> None:
    """Next to data with one: the loss is the sum over all."""
    model = client.create_lora_training_client(base_model=served.model, rank=4, seed=1).result()
    length = len(IDS) - 1
    soft = tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(IDS[:-1]),
        loss_fn_inputs={
            "target_tokens": torch.tensor([IDS[1:], IDS[:-1]]).T,
            "weights": torch.tensor([[0.75, 0.25]] * length),
        },
    )
    passed = model.forward([datum(), soft], "cross_entropy").result()
    one, two = (each["logprobs"].to_torch() for each in passed.loss_fn_outputs)
    assert two.shape == (length, 2)
    assert one.tolist() == pytest.approx(two[:, 0].tolist(), rel=1e-4)
    wanted = -one.sum() - 0.75 * two[:, 0].sum() - 0.25 * two[:, 1].sum()
    assert passed.metrics["loss:sum"] == pytest.approx(float(wanted), rel=1e-4)


def test_a_client_continues_from_a_checkpoint_and_others_read_it(
    client: Any, served: Served
) -> None:
    model = client.create_lora_training_client(base_model=served.model, rank=4, seed=2).result()
    train(model, [datum()])
    path = model.save_state("half").result().path
    went_on = [train(model, [datum()]).metrics["loss:sum"] for _ in range(3)]
    with pytest.raises(tinker.RequestFailedError, match="half"):
        model.save_state("half").result()

    again = client.create_training_client_from_state_with_optimizer(path).result()
    assert [train(again, [datum()]).metrics["loss:sum"] for _ in range(3)] == went_on

    folder = served.checkpoints / path.removeprefix("tinker://")
    saved = load_model(folder)
    ids = torch.tensor([IDS])
    log_probs = saved(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
    assert -float(log_probs.sum()) == pytest.approx(went_on[0], rel=1e-4)


def test_two_models_and_a_sampler_at_once(client: Any, served: Served) -> None:
    """What each computes is what it computes alone."""

    def losses(models: list[Any]) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in models]
        for _ in range(4):
            passed = [model.forward_backward([datum()], "cross_entropy") for model in models]
            for model in models:
                model.optim_step(tinker.types.AdamParams(learning_rate=1e-2))
            for own, future in zip(found, passed, strict=True):
                own.append(future.result().metrics["loss:sum"])
        return found

    def make(rank: int) -> Any:
        return client.create_lora_training_client(
            base_model=served.model, rank=rank, seed=rank
        ).result()

    base = client.create_sampling_client(base_model=served.model).result()
    params = tinker.types.SamplingParams(max_tokens=30, seed=7)
    asked = tinker.types.ModelInput.from_ints(IDS)
    meanwhile = [base.sample(asked, num_samples=8, sampling_params=params) for _ in range(2)]
    first, second = losses([make(4), make(8)])
    assert [first, second] == [losses([make(4)])[0], losses([make(8)])[0]]
    drawn, repeated = ([list(each.tokens) for each in one.result().sequences] for one in meanwhile)
    assert drawn == repeated


def raw(served: Served) -> httpx.Client:
    return httpx.Client(base_url=f"{served.url}/api/v1", headers={"X-API-Key": served.key})


def result(http: httpx.Client, asked: httpx.Response) -> httpx.Response:
    return http.post("retrieve_future", json={"request_id": asked.json()["request_id"]}, timeout=60)


def one_pass(model_id: str, seq_id: int, weights: list[float]) -> bytes:
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    data = message.data.add()
    data.model_input.add().encoded_text.tokens = torch.tensor(IDS[:-1]).int().numpy().tobytes()
    targets = data.loss_fn_inputs["target_tokens"]
    targets.dtype = pb.DTYPE_INT64
    targets.dense = torch.tensor(IDS[1:]).numpy().tobytes()
    values = data.loss_fn_inputs["weights"]
    values.dtype = pb.DTYPE_FLOAT32
    values.dense = torch.tensor(weights).numpy().tobytes()
    encoded: bytes = message.SerializeToString()
    return encoded


def test_a_request_that_comes_twice_is_done_once(served: Served) -> None:
    """In whatever order they come: the step is sent before the pass that it waits for."""
    protobuf = {"Content-Type": "application/x-protobuf"}
    ones = [1.0] * (len(IDS) - 1)
    with raw(served) as http:
        session = http.post("create_session", json={}).json()["session_id"]
        model = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": served.model,
            "lora_config": {"rank": 4, "seed": 5},
        }
        model_id = result(http, http.post("create_model", json=model)).json()["model_id"]
        step = {"model_id": model_id, "seq_id": 3, "adam_params": {"learning_rate": 0.01}}
        last = http.post("optim_step", json=step)
        passes = [one_pass(model_id, seq_id, ones) for seq_id in (2, 1, 2, 1)]
        asked = [http.post("forward_backward", content=one, headers=protobuf) for one in passes]
        assert asked[0].json() == asked[2].json() and asked[1].json() == asked[3].json()

        twice = result(http, last).json()["metrics"]["grad_norm"]
        assert result(http, last).json()["metrics"]["grad_norm"] == twice
        other = http.post(
            "forward_backward",
            content=one_pass(model_id, 1, [2.0] * len(ones)),
            headers=protobuf,
        )
        assert other.status_code == 409

        again = {**model, "model_seq_id": 1}
        model_id = result(http, http.post("create_model", json=again)).json()["model_id"]
        doubled = one_pass(model_id, 1, [2.0] * len(ones))
        http.post("forward_backward", content=doubled, headers=protobuf)
        last = http.post("optim_step", json={**step, "model_id": model_id, "seq_id": 2})
        assert result(http, last).json()["metrics"]["grad_norm"] == pytest.approx(twice, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ids": [5, 9, 4000]}, "datum 0: target_tokens"),
        ({"weights": [1.0]}, r"datum 0: weights .*\(1,\)"),
        ({"weights": [math.nan] * 6}, "datum 0: weights"),
        ({"advantages": [1.0] * 6, "loss": "ppo"}, "datum 0: .*logprobs"),
        ({"loss": "stable_reinforce"}, "loss_fn .*stable_reinforce"),
    ],
)
def test_a_wrong_datum_is_named_and_the_model_goes_on(
    client: Any, served: Served, changes: dict[str, Any], named: str
) -> None:
    model = client.create_lora_training_client(base_model=served.model, rank=4).result()
    loss = changes.pop("loss", "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match=named):
        model.forward_backward([datum(**changes)], loss).result()
    with pytest.raises(tinker.RequestFailedError, match="optim_step"):
        model.optim_step(tinker.types.AdamParams()).result()
    assert train(model, [datum()]).metrics["loss:sum"] > 0


def test_who_has_another_key_gets_nothing(served: Served) -> None:
    with httpx.Client(base_url=f"{served.url}/api/v1") as http:
        for headers in ({}, {"X-API-Key": "tml-other"}):
            asked = http.post("create_session", json={}, headers=headers)
            assert asked.status_code == 401


def test_what_is_not_there_is_said(client: Any, served: Served) -> None:
    with pytest.raises(tinker.RequestFailedError, match="'other'"):
        client.create_lora_training_client(base_model="other").result()
    with raw(served) as http:
        assert http.post("retrieve_future", json={"request_id": "gone"}).status_code == 410
        assert http.post("session_heartbeat", json={"session_id": "gone"}).status_code == 404
        assert http.post("auth/token", json={}).status_code == 404
        assert http.post("optim_step", content=b"{", headers=JSON).status_code == 422
        wrong = http.post("forward_backward", content=b"\xff\xff", headers=PROTOBUF)
        assert wrong.status_code == 422


JSON = {"Content-Type": "application/json"}
PROTOBUF = {"Content-Type": "application/x-protobuf"}


def test_ctrl_c_among_requests_ends_the_server(tmp_path: Path) -> None:
    """Also while a client waits for a result that never comes."""
    with tinker_server(tmp_path) as served, raw(served) as http:
        session = http.post("create_session", json={}).json()["session_id"]
        model = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": served.model,
            "lora_config": {"rank": 4},
        }
        model_id = result(http, http.post("create_model", json=model)).json()["model_id"]
        step = {"model_id": model_id, "seq_id": 9, "adam_params": {}}
        waited = http.post("optim_step", json=step)

        def wait() -> None:
            with suppress(httpx.HTTPError), raw(served) as other:
                result(other, waited)

        def ask() -> None:
            with suppress(httpx.HTTPError), raw(served) as other:
                while True:
                    other.get("healthz")

        threads = [threading.Thread(target=each) for each in (wait, ask, ask)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(30) == 0
        for thread in threads:
            thread.join(30)


def test_checkpoints_survive_the_server(tmp_path: Path) -> None:
    kept = tmp_path / "checkpoints"
    with tinker_server(tmp_path, checkpoints=kept) as served:
        client = tinker.ServiceClient(base_url=served.url, api_key=served.key)
        model = client.create_lora_training_client(base_model=served.model, rank=4).result()
        train(model, [datum()])
        path = model.save_state("kept").result().path
        loss = model.forward([datum()], "cross_entropy").result().metrics["loss:sum"]
        client.close("success")

    with tinker_server(tmp_path, checkpoints=kept) as served:
        client = tinker.ServiceClient(base_url=served.url, api_key=served.key)
        again = client.create_training_client_from_state(path).result()
        found = again.forward([datum()], "cross_entropy").result().metrics["loss:sum"]
        assert found == loss
        client.close("success")
