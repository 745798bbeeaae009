"""The table of the client's methods in docs/tinker.md: complete, and true of a real server."""

import base64
import json
import re
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from tests.source_trees import SOURCE
from tests.tinker.server import Served, tinker_server

tinker = pytest.importorskip("tinker")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:DEPRECATED", "ignore:.*exper")]

PAGE = SOURCE.parents[1] / "docs" / "tinker.md"
CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient")
ROW = re.compile(r"^\| (\w+Client) \| ([^|]+) \| (works|refused|ignore) \|", re.MULTILINE)
ANSWERS_WITHIN_S = 20
FROM_1_TO_2 = ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z")
Calls = dict[str, Callable[[], Any]]


def listed() -> list[tuple[str, str]]:
    """The methods of the table, as `CLIENT.METHOD`, with their states."""
    found = []
    for client, methods, state in ROW.findall(PAGE.read_text()):
        for name, both in re.findall(r"`(\w+)(\(_async\))?`", methods):
            found.append((f"{client}.{name}", state))
            if both:
                found.append((f"{client}.{name}_async", state))
    return found


def methods_that(state: str) -> set[str]:
    """Without the asynchronous ones, which call the others."""
    return {name for name, found in listed() if found == state and not name.endswith("_async")}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tinker")
    with tinker_server(folder, checkpoints=folder / "checkpoints") as found:
        yield found


@pytest.fixture(scope="module")
def service(served: Served) -> Iterator[Any]:
    made = tinker.ServiceClient(base_url=served.url, api_key=served.key)
    yield made
    made.close("success").result(ANSWERS_WITHIN_S)


def new_model(service: Any, served: Served) -> Any:
    return service.create_lora_training_client(base_model=served.model, rank=4, seed=0).result()


def finished(answer: Any) -> Any:
    return answer.result(ANSWERS_WITHIN_S) if hasattr(answer, "result") else answer


def summed(logprobs: Any) -> Any:
    return logprobs.sum(), {}


def train_by(loss: Any, model: Any) -> Any:
    targets = {"target_tokens": [6, 7, 8]}
    prompt = tinker.types.ModelInput.from_ints([5, 6, 7])
    datum = tinker.types.Datum(model_input=prompt, loss_fn_inputs=targets)
    return model.forward_backward_custom([datum], loss)


def test_the_table_lists_every_public_method_once() -> None:
    public = {
        f"{client}.{name}"
        for client in CLIENTS
        for name in dir(getattr(tinker, client))
        if not name.startswith("_")
    }
    times = Counter(name for name, _ in listed())
    assert set(times) == public
    assert [name for name, count in times.items() if count > 1] == []


def test_methods_that_need_no_gradients_work(service: Any, served: Served) -> None:
    model = new_model(service, served)
    state = model.save_state("state").result().path
    saved = model.save_weights_for_sampler("saved").result().path
    external = model.save_weights_external("outside").result().path
    rest = service.create_rest_client()
    sampler = service.create_sampling_client(base_model=served.model).result()
    handle = sampler.get_sampler_handle()
    sampler_id = json.loads(base64.urlsafe_b64decode(handle))["sampling_session_id"]
    prompt = tinker.types.ModelInput.from_ints([5, 6, 7])
    params = tinker.types.SamplingParams(max_tokens=2, temperature=1.0)
    classes = tinker.SamplingClient
    telemetry = {
        "ServiceClient.get_telemetry": service.get_telemetry,
        "TrainingClient.get_telemetry": model.get_telemetry,
        "SamplingClient.get_telemetry": sampler.get_telemetry,
        "RestClient.get_telemetry": rest.get_telemetry,
    }
    calls: Calls = {
        "ServiceClient.create_lora_training_client": lambda: new_model(service, served),
        "ServiceClient.create_training_client_from_state": lambda: (
            service.create_training_client_from_state(state)
        ),
        "ServiceClient.create_training_client_from_state_with_optimizer": lambda: (
            service.create_training_client_from_state_with_optimizer(state)
        ),
        "ServiceClient.create_sampling_client": lambda: service.create_sampling_client(saved),
        "ServiceClient.create_custom_loss": lambda: train_by(
            service.create_custom_loss(summed, {"logprobs": 1}).result(), model
        ),
        "ServiceClient.get_server_capabilities": service.get_server_capabilities,
        "ServiceClient.create_rest_client": service.create_rest_client,
        "ServiceClient.holder": lambda: service.holder,
        "TrainingClient.save_state": lambda: model.save_state("other"),
        "TrainingClient.load_state": lambda: model.load_state(state),
        "TrainingClient.load_state_with_optimizer": lambda: model.load_state_with_optimizer(state),
        "TrainingClient.save_weights_for_sampler": lambda: model.save_weights_for_sampler("other"),
        "TrainingClient.save_weights_and_get_sampling_client": (
            model.save_weights_and_get_sampling_client
        ),
        "TrainingClient.create_sampling_client": lambda: model.create_sampling_client(saved),
        "TrainingClient.save_weights_external": lambda: model.save_weights_external("again"),
        "TrainingClient.get_info": model.get_info,
        "TrainingClient.get_tokenizer": model.get_tokenizer,
        "SamplingClient.sample": lambda: sampler.sample(prompt, 2, params),
        "SamplingClient.compute_logprobs": lambda: sampler.compute_logprobs(prompt),
        "SamplingClient.get_base_model": sampler.get_base_model,
        "SamplingClient.get_tokenizer": sampler.get_tokenizer,
        "SamplingClient.get_sampler_handle": sampler.get_sampler_handle,
        "SamplingClient.from_sampler_handle": lambda: classes.from_sampler_handle(
            handle, api_key=served.key
        ),
        "SamplingClient.create": lambda: classes.create(service.holder, model_path=saved),
        "RestClient.get_server_capabilities": rest.get_server_capabilities,
        "RestClient.list_checkpoints": lambda: rest.list_checkpoints(model.model_id),
        "RestClient.list_user_checkpoints": rest.list_user_checkpoints,
        "RestClient.get_external_weights_urls": lambda: rest.get_external_weights_urls(external),
        "RestClient.get_training_run": lambda: rest.get_training_run(model.model_id),
        "RestClient.get_training_run_by_tinker_path": lambda: rest.get_training_run_by_tinker_path(
            state
        ),
        "RestClient.list_training_runs": rest.list_training_runs,
        "RestClient.get_session": lambda: rest.get_session(model.model_id.partition(":")[0]),
        "RestClient.list_sessions": rest.list_sessions,
        "RestClient.set_checkpoint_ttl_from_tinker_path": lambda: (
            rest.set_checkpoint_ttl_from_tinker_path(state, 3600)
        ),
        "RestClient.get_weights_info_by_tinker_path": lambda: rest.get_weights_info_by_tinker_path(
            state
        ),
        "RestClient.get_sampler": lambda: rest.get_sampler(sampler_id),
        "RestClient.delete_checkpoint": lambda: rest.delete_checkpoint(
            model.model_id, "weights/state"
        ),
        "RestClient.delete_checkpoint_from_tinker_path": lambda: (
            rest.delete_checkpoint_from_tinker_path(saved)
        ),
    }
    of_training = {
        f"TrainingClient.{name}"
        for name in ("forward", "forward_backward", "forward_backward_custom", "optim_step")
    }
    elsewhere = {"ServiceClient.close", "SamplingClient.on_queue_state_change"}
    assert calls.keys() | telemetry.keys() | of_training | elsewhere == methods_that("works")

    for call in telemetry.values():
        call()
    answers = {name: finished(call()) for name, call in calls.items()}
    silent = {name for name in calls if re.match(r"RestClient\.(delete|set)_checkpoint", name)}
    assert {name for name, answer in answers.items() if answer is None} == silent
    left = [
        each.checkpoint_id for each in rest.list_checkpoints(model.model_id).result().checkpoints
    ]
    assert {"weights/other", "sampler_weights/other"} <= set(left)
    assert not {"weights/state", "sampler_weights/saved"} & set(left)


def test_refused_methods_fail_at_once_and_the_model_trains_on(service: Any, served: Served) -> None:
    model = new_model(service, served)
    session = model.model_id.partition(":")[0]
    path = model.save_state("kept").result().path
    rest = service.create_rest_client()
    search = tinker.types.SessionSearchRequest()

    calls: Calls = {
        "ServiceClient.copy_weights": lambda: service.copy_weights(path),
        "RestClient.search_sessions": lambda: rest.search_sessions(search),
        "RestClient.export_session_trace": lambda: rest.export_session_trace(session),
        "RestClient.publish_checkpoint_from_tinker_path": lambda: (
            rest.publish_checkpoint_from_tinker_path(path)
        ),
        "RestClient.unpublish_checkpoint_from_tinker_path": lambda: (
            rest.unpublish_checkpoint_from_tinker_path(path)
        ),
        "RestClient.copy_weights": lambda: rest.copy_weights(path, "project"),
        "RestClient.assign_session_project": lambda: rest.assign_session_project(session, "p"),
        "RestClient.get_audit_log": rest.get_audit_log,
        "RestClient.get_billing_usage": lambda: rest.get_billing_usage(*FROM_1_TO_2),
        "RestClient.get_current_checkpoint_storage_usage": (
            rest.get_current_checkpoint_storage_usage
        ),
        "RestClient.whoami": rest.whoami,
    }
    assert calls.keys() == methods_that("refused")

    by_the_client = {"ServiceClient.copy_weights", "RestClient.whoami"}
    for name, call in calls.items():
        started = time.monotonic()
        with pytest.raises(Exception) as caught:
            finished(call())
        assert time.monotonic() - started < ANSWERS_WITHIN_S / 2, name
        if name not in by_the_client:
            assert "is not served here: s" in str(caught.value), (name, caught.value)

    assert model.save_state("later").result(ANSWERS_WITHIN_S).path.endswith("/weights/later")


def test_inflight_samplers_take_the_newest_weights_and_snapshots_keep_theirs(
    service: Any, served: Served
) -> None:
    model = new_model(service, served)
    ids = tinker.types.ModelInput.from_ints([5, 9, 7, 8])

    def log_probs(sampler: Any) -> list[float]:
        return list(sampler.compute_logprobs(ids).result(ANSWERS_WITHIN_S)[1:])

    def sampler(kind: str) -> Any:
        return model.save_weights_and_get_sampling_client(kind=kind).result(ANSWERS_WITHIN_S)

    first = sampler("inflight")
    kept = sampler("snapshot")
    before = log_probs(first)
    assert log_probs(kept) == before

    finished(train_by(lambda data, log_probs: (log_probs[0].sum(), {}), model))
    finished(model.optim_step(tinker.types.AdamParams(learning_rate=1e-2)))
    second = sampler("inflight")
    assert log_probs(first) == log_probs(second) != before
    assert log_probs(kept) == before


def test_runs_and_sessions_are_told_with_what_they_left(service: Any, served: Served) -> None:
    model = service.create_lora_training_client(
        base_model=served.model, rank=2, user_metadata={"renderer": "plain"}
    ).result()
    path = model.save_state("named", user_metadata={"loss": "1"}, ttl_seconds=7200).result().path
    sampler = model.save_weights_and_get_sampling_client().result()
    rest = service.create_rest_client()

    run = rest.get_training_run_by_tinker_path(path).result()
    assert (run.training_run_id, run.lora_rank) == (model.model_id, 2)
    assert run.user_metadata == {"renderer": "plain"}
    assert run.last_checkpoint.tinker_path == path
    assert run.last_checkpoint.user_metadata == {"loss": "1"}
    left = run.last_checkpoint.expires_at - run.last_checkpoint.time
    assert 7000 < left.total_seconds() < 7300
    assert run.last_sampler_checkpoint.checkpoint_type == "sampler"

    all_runs = rest.list_training_runs().result()
    second = rest.list_training_runs(limit=1, offset=1).result()
    assert second.training_runs == all_runs.training_runs[1:2]
    assert second.cursor.total_count == len(all_runs.training_runs)
    pages = [rest.list_user_checkpoints(1, offset).result().checkpoints for offset in (0, 1)]
    assert [*pages[0], *pages[1]] == rest.list_user_checkpoints().result().checkpoints[:2]

    session = rest.get_session(model.model_id.partition(":")[0]).result()
    assert model.model_id in session.training_run_ids
    sampler_id = json.loads(base64.urlsafe_b64decode(sampler.get_sampler_handle()))
    assert sampler_id["sampling_session_id"] in session.sampler_ids
    with pytest.raises(Exception, match="other"):
        rest.get_training_run("other").result()


def test_saved_weights_are_downloaded_by_their_addresses(
    service: Any, served: Served, tmp_path: Path
) -> None:
    """As `tinker checkpoint download` and the cookbook do: without a key."""
    model = new_model(service, served)
    path = model.save_weights_external("outside", ttl_seconds=3600).result().path
    rest = service.create_rest_client()
    urls = rest.get_external_weights_urls(path).result().urls
    for name, url in urls.items():
        urllib.request.urlretrieve(url, tmp_path / name)

    assert not any(name.startswith(".") for name in urls)
    adapter = load_file(tmp_path / "adapter_model.safetensors")
    assert {each.shape[0] for name, each in adapter.items() if "lora_A" in name} == {4}
    assert (tmp_path / "adapter_config.json").is_file()

    known = urls["adapter_config.json"]
    secret = known.split("/")[-2]
    for url, status in (
        (known.replace(secret, "other"), 404),
        (known.replace("adapter_config.json", "%2E%2E"), 404),
        (f"{served.url}/api/v1/sessions", 401),
        (f"{served.url}/api/v1/files/../sessions", 404),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url)
        assert refused.value.code == status, url

    with pytest.raises(tinker.RequestFailedError, match="age_encryption_recipients"):
        model.save_weights_external("secret", age_encryption_recipients=["age1"]).result()


def test_a_model_without_an_adapter_trains_all_weights(service: Any, served: Served) -> None:
    """The client has no method for it, but the request."""
    session = new_model(service, served).model_id.partition(":")[0]
    asked = {"session_id": session, "model_seq_id": 99, "base_model": served.model}
    with httpx.Client(
        base_url=f"{served.url}/api/v1", headers={"X-API-Key": served.key}, timeout=60
    ) as http:
        answer = http.post("create_model", json=asked).json()
        made = http.post("retrieve_future", json={"request_id": answer["request_id"]}).json()
        info = http.post("get_info", json={"model_id": made["model_id"]}).json()
    assert (info["is_lora"], info["lora_rank"]) == (False, None)
    run = service.create_rest_client().get_training_run(made["model_id"]).result()
    assert not run.is_lora


def test_a_model_that_cannot_start_is_forgotten(service: Any, served: Served) -> None:
    model = new_model(service, served)
    path = model.save_weights_for_sampler("without").result().path
    rest = service.create_rest_client()
    session = model.model_id.partition(":")[0]
    before = rest.get_session(session).result().training_run_ids
    with pytest.raises(tinker.RequestFailedError, match="for sampling"):
        service.create_training_client_from_state_with_optimizer(path).result()
    assert rest.get_session(session).result().training_run_ids == before
