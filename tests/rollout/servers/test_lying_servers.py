"""No answer of a server is believed that cannot be true, and what is wrong is said in one
sentence."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest

from distflow.errors import TrustError, UserError
from distflow.rollout.engine import GenerateRequest
from distflow.rollout.engine_weights import stripe_hashes
from distflow.rollout.servers import http_engine
from distflow.rollout.servers.http_engine import HttpEngine, ServerFailed
from distflow.rollout.servers.sglang_engine import SGLangEngine
from distflow.rollout.servers.vllm_engine import VllmEngine
from distflow.runtime.weight_sync.protocol import check_receipt
from distflow.scheduling.group_states import Version
from tests.rollout.drive import DEADLINE_S, FIRST, Served, make_model, request_of
from tests.rollout.servers.lying_server import Server, name_of, serving
from tests.rollout.servers.sglang_server import Running
from tests.tiny_models import tiny_tokenizer

GENERATE = "/inference/v1/generate"
Change = Callable[[dict[str, Any], list[float]], object]
"""Of a choice, and of the three numbers per token that were drawn for it: the token, and its
log-probs."""


@pytest.fixture
def server():
    with serving() as found:
        yield found


def make(url: str, kind: type[HttpEngine] = VllmEngine, **options: Any) -> Any:
    return Served(kind(make_model(), tiny_tokenizer(), version=FIRST, url=url, **options))


def run(engine: Any, story: Callable[[Any], Awaitable[Any]]) -> Any:
    async def with_engine() -> Any:
        async with engine:
            await engine.load_weights(FIRST, list(engine.model.named_parameters()))
            return await asyncio.wait_for(story(engine), DEADLINE_S)

    return asyncio.run(with_engine())


def request(**params: Any) -> GenerateRequest:
    return request_of((5, 6), (0, 1), **{"max_tokens": 4, **params})


def lie_about_first(server: Server, change: Change) -> None:
    """Of the samples that are generated from now on."""

    def lie(path: str, asked: dict[str, Any], answer: Any) -> Any:
        if path == GENERATE:
            change(answer["choices"][0], server.drawn[name_of(asked)][0])
        return answer

    server.lie = lie


def set_number(place: int, value: float) -> Change:
    return lambda choice, drawn: drawn.__setitem__(place, value)


def set_tokens(choice: dict[str, Any], drawn: list[float], token: int) -> None:
    choice["token_ids"][:] = [token] * 4
    drawn[::3] = [token] * 4


def lengthen(choice: dict[str, Any], drawn: list[float]) -> None:
    choice["token_ids"].append(7)
    choice["weight_versions"][0]["end"] += 1
    drawn.extend((7, -1.0, -0.5))


def spans(*labels: Any) -> Iterator[dict[str, Any]]:
    """Of four tokens."""
    each = 4 // len(labels)
    for number, label in enumerate(labels):
        yield {"version": label, "start": number * each, "end": (number + 1) * each}


LIES: dict[str, tuple[Change, str]] = {
    "NaN": (set_number(4, float("nan")), "invalid log-probs"),
    "above 0": (set_number(4, 0.3), "invalid log-probs"),
    "no log-probs": (lambda choice, drawn: drawn.clear(), "4 tokens with 0 and 0 log-probs"),
    "one log-prob a token": (
        lambda choice, drawn: drawn.__delitem__(slice(2, None, 3)),
        "of other tokens",
    ),
    "a token that is no number": (set_number(0, float("nan")), "in a form that its interface"),
    "log-probs of other tokens": (set_number(3, 8), "of other tokens"),
    "a token too many": (
        lambda choice, _: choice["token_ids"].append(7),
        "5 tokens with 4 and 4 log-probs",
    ),
    "no such token": (lambda choice, drawn: set_tokens(choice, drawn, 99), "a token 99"),
    "a token as text": (lambda choice, _: choice.update(token_ids=["7"] * 4), "of other tokens"),
    "older weights": (
        lambda choice, _: choice["weight_versions"][0].update(version="0.2"),
        "weights '0.2'",
    ),
    "weights of no version": (
        lambda choice, _: choice.update(weight_versions=None),
        "and 0 versions",
    ),
    "versions for a part": (
        lambda choice, _: choice["weight_versions"][0].update(end=3),
        "and 3 versions",
    ),
    "too few tokens": (
        lambda choice, _: choice.update(token_ids=[7, 7]),
        "2 tokens with 2 and 2 log-probs, and 4",
    ),
    "more tokens than asked": (
        lambda choice, drawn: lengthen(choice, drawn),
        "5 tokens where at most 4",
    ),
    "a token of many digits": (
        lambda choice, _: choice["token_ids"].__setitem__(0, 10**400),
        "of other tokens",
    ),
    "tokens that are no list": (
        lambda choice, _: choice.update(token_ids=4),
        "in a form that its interface",
    ),
    "versions of many tokens": (
        lambda choice, _: choice["weight_versions"][0].update(end=10**12),
        "4 tokens with 4 and 4 log-probs, and 1048576 versions",
    ),
    "an index of many digits": (
        lambda choice, _: choice.update(index="1" * 5000),
        "in a form that its interface",
    ),
    "no end": (lambda choice, _: choice.clear(), "in a form that its interface"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_response_that_cannot_be_true(server, name):
    change, said = LIES[name]

    async def story(engine: VllmEngine) -> None:
        await engine.load_weights(Version(0, 3), list(engine.model.named_parameters()))
        (honest, _) = await engine.generate(request())
        assert (honest.token_ids, honest.versions, honest.finish_reason) == (
            (7,) * 4,
            (3,) * 4,
            "length",
        )
        assert (honest.rollout_log_probs, honest.sampling_log_probs) == ((-1.0,) * 4, (-0.5,) * 4)
        lie_about_first(server, change)
        with pytest.raises(TrustError) as error:
            await engine.generate(request())
        assert said in str(error.value) and server.url in str(error.value)

    run(make(server.url), story)


SGLANG = "/generate"
NUMBERS = {
    "400 digits": b"-" + b"9" * 400,
    "5000 digits": b"-" + b"9" * 5000,
    "beyond a float": b"-1e400",
    "NaN": b"NaN",
}
OTHER_TYPES = {
    "text": b'"-1.0"',
    "true": b"true",
    "nothing": b"null",
}
NUMBERS |= OTHER_TYPES


@pytest.mark.parametrize("name", NUMBERS)
def test_a_log_prob_that_is_no_log_prob_is_its_servers_error(server, name):
    """Also with top_k, where SGLang's are computed with."""

    def lie(path: str, asked: dict[str, Any], true: Any) -> Any:
        return (
            json.dumps(true).encode().replace(b"-1.0", NUMBERS[name], 1) if path == SGLANG else true
        )

    async def story(engine: Any) -> None:
        await engine.generate(request())
        server.lie = lie
        with pytest.raises(TrustError) as error:
            await engine.generate(request())
        assert server.url in str(error.value)
        said = {"5000 digits": "no JSON"}.get(
            name, "a log-prob is" if name in OTHER_TYPES else "invalid log-probs"
        )
        assert said in str(error.value)

    run(make(server.url, SGLangEngine), story)


def test_more_tokens_than_were_asked_for_are_their_servers_error(server):
    def lie(path: str, asked: dict[str, Any], true: Any) -> Any:
        if path == SGLANG:
            asked["sampling_params"]["max_new_tokens"] = 9
            return server.answer(path, asked)
        return true

    async def story(engine: Any) -> None:
        server.lie = lie
        with pytest.raises(TrustError, match=f"{server.url} .* 9 tokens .* 4"):
            await engine.generate(request())

    run(make(server.url, SGLangEngine), story)


@pytest.mark.parametrize(
    ("kind", "path", "answer"),
    [
        (VllmEngine, "/collective_rpc", {"results": [{"max_model_len": "x"}]}),
        (VllmEngine, "/collective_rpc", {"results": []}),
        (SGLangEngine, "/server_info", []),
        (SGLangEngine, "/server_info", {"context_length": "long"}),
        (SGLangEngine, "/get_model_info", b"[" * 200_000),
    ],
    ids=str,
)
def test_what_a_server_says_of_itself_is_its_error_if_nobody_can_read_it(
    server, kind, path, answer
):
    server.lie = lambda asked_path, asked, true: answer if asked_path == path else true
    with pytest.raises((TrustError, UserError)) as error:
        run(make(server.url, kind), lambda engine: asyncio.sleep(0))
    assert server.url in str(error.value)


def test_tokens_behind_a_stop_are_cut_off(server):
    """A server that sees a stop late has drawn too much; one that ends by nothing has lost
    something."""

    async def story(engine: VllmEngine) -> None:
        (cut, _) = await engine.generate(request(stop_token_ids=(7,)))
        assert (cut.token_ids, len(cut.rollout_log_probs), cut.versions, cut.finish_reason) == (
            (7,),
            1,
            (0,),
            "stop",
        )

        def shorten(choice: dict[str, Any], _: object) -> None:
            del choice["token_ids"][2:]
            choice["weight_versions"][0]["end"] = 2

        lie_about_first(server, shorten)
        with pytest.raises(TrustError, match="'length' after 2 of 4 tokens"):
            await engine.generate(request())

    run(make(server.url), story)


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (500, ServerFailed, "with 500"),
        (404, ServerFailed, "with 404"),
        (b"<html>", TrustError, "no JSON, but '<html>'"),
        ([], TrustError, "in a form that its interface"),
        ({"choices": [], "prompt_token_ids": [5, 6]}, TrustError, "0 responses where 2"),
        ({"choices": [], "prompt_token_ids": [5]}, TrustError, "a prompt other than"),
    ],
)
def test_what_is_no_answer(server, answer, error, said, monkeypatch):
    monkeypatch.setattr(http_engine, "BACK_OFF_S", 0.001)

    async def story(engine: VllmEngine) -> None:
        server.lie = lambda path, asked, true: answer if path == GENERATE else true
        with pytest.raises(error, match=said):
            await engine.generate(request())

    run(make(server.url), story)


def test_a_failure_that_passes_is_no_failure(server, monkeypatch):
    monkeypatch.setattr(http_engine, "BACK_OFF_S", 0.001)
    failures = iter((500, 503))

    async def story(engine: VllmEngine) -> None:
        server.lie = lambda path, asked, true: next(failures, true) if path == GENERATE else true
        assert len(await engine.generate(request())) == 2

    run(make(server.url), story)


def test_there_is_no_server(monkeypatch):
    monkeypatch.setattr(http_engine, "ATTACH_S", 0.3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"rollout\.url={url}: no server"):
            run(make(url), lambda engine: asyncio.sleep(0))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vocab_size": 50}, "vocab_size 50"),
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
        ({"interface": 0}, "interface 0"),
    ],
)
def test_a_server_of_something_else(server, change, said):
    def lie(path: str, asked: dict[str, Any], answer: Any) -> Any:
        if asked.get("method") == "distflow_describe":
            answer["results"][0].update(change)
        return answer

    server.lie = lie
    with pytest.raises(UserError, match=said):
        run(make(server.url), lambda engine: asyncio.sleep(0))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"longest": 257},
            r" 256 tokens, .*data\.max_prompt_length .* 257",
        ),
        (
            {"free_cache_engine": True},
            "free_cache_engine: start the vLLM server at http://.* with --enable-sleep-mode",
        ),
    ],
)
def test_a_server_that_cannot_do_what_the_run_needs(server, options, said):
    with pytest.raises(UserError, match=said):
        run(make(server.url, **options), lambda engine: asyncio.sleep(0))
    run(make(server.url, longest=256), lambda engine: engine.generate(request()))


def test_a_server_that_read_other_weights_than_were_sent_gets_no_requests(server, monkeypatch):
    monkeypatch.setattr(http_engine, "BACK_OFF_S", 0.001)

    async def story(engine: VllmEngine) -> None:
        weights = dict(engine.model.named_parameters())
        receipt = await engine.load_weights(Version(0, 1), list(weights.items()))
        check_receipt(receipt, Version(0, 1), stripe_hashes(weights.items()))
        name = next(iter(weights))

        def lie(path: str, asked: dict[str, Any], answer: Any) -> Any:
            is_load = asked.get("method") == "distflow_load"
            return {"results": [{**server.hashes, name: "0"}]} if is_load else answer

        server.lie = lie
        with pytest.raises(ServerFailed, match=f"{server.url} .* hashes "):
            await engine.load_weights(Version(0, 2), list(weights.items()))

    run(make(server.url), story)


def test_a_server_that_cannot_load_the_weights(server, monkeypatch):
    monkeypatch.setattr(http_engine, "BACK_OFF_S", 0.001)
    server.lie = lambda path, asked, true: 500 if asked.get("method") == "distflow_load" else true
    with pytest.raises(ServerFailed, match="LlamaForCausalLM.*\\n?.*name=hf"):
        run(make(server.url), lambda engine: asyncio.sleep(0))


def test_a_server_that_never_reports_hashes_is_given_up(server, monkeypatch):
    monkeypatch.setattr(http_engine, "BACK_OFF_S", 0.001)
    server.lie = lambda path, asked, true: 500 if asked.get("method") == "distflow_hashes" else true
    with pytest.raises(ServerFailed, match="hashes .* 500"):
        run(make(server.url), lambda engine: engine.hashes())


def test_a_server_that_keeps_its_cache_below_new_weights(server, monkeypatch):
    monkeypatch.setattr(http_engine, "BACK_OFF_S", 0.001)
    server.lie = lambda path, asked, true: (
        {"success": False} if path == "/reset_prefix_cache" else true
    )
    with pytest.raises(ServerFailed, match=f"{server.url} .* cache: "):
        run(make(server.url), lambda engine: asyncio.sleep(0))


def test_weights_that_do_not_fit_are_not_sent(server):
    async def story(engine: VllmEngine) -> None:
        weights = list(engine.model.named_parameters())
        asked = len(server.asked)
        with pytest.raises(ValueError, match=f"{weights[0][0]}: missing"):
            await engine.load_weights(Version(0, 1), weights[1:])
        with pytest.raises(ValueError, match=rf"{weights[0][0]}: shape \("):
            await engine.load_weights(Version(0, 1), [(weights[0][0], weights[1][1]), *weights[1:]])
        with pytest.raises(ValueError, match="never decrease"):
            await engine.load_weights(Version(-1, 0), weights)
        assert len(server.asked) == asked and engine.version == FIRST

    run(make(server.url), story)


def test_a_server_that_stalls_is_found(server, monkeypatch):
    monkeypatch.setattr(http_engine, "ATTACH_S", 0.5)
    monkeypatch.setattr(http_engine, "SILENT_S", 0.5)
    monkeypatch.setattr(http_engine, "BACK_OFF_S", 0.001)
    monkeypatch.setattr(http_engine, "LOOKS_EVERY_S", 0.05)
    monkeypatch.setattr(http_engine, "CALL_S", 0.5)

    async def story(engine: VllmEngine) -> None:
        server.lie = lambda path, asked, true: server.released.wait(DEADLINE_S) and true
        with pytest.raises(ServerFailed, match=rf"rollout\.url={server.url}: no server"):
            await engine.generate(request())

    run(make(server.url), story)


def test_one_to_which_no_connection_leads_is_found_by_no_open_request(server, monkeypatch):
    """As of a machine that is gone. Whoever answers there next is asked again."""
    monkeypatch.setattr(http_engine, "LOOKS_EVERY_S", 0.05)

    async def story(engine: VllmEngine) -> None:
        monkeypatch.setattr(http_engine, "ATTACH_S", 0.5)

        def lie(path: str, asked: dict[str, Any], true: Any) -> Any:
            is_gone = [each for each, _ in server.asked].count(GENERATE) == 1
            if is_gone and asked.get("method") == "distflow_count":
                return None
            return server.released.wait(DEADLINE_S) if is_gone and path == GENERATE else true

        server.lie = lie
        (response, _) = await engine.generate(request())
        assert list(response.token_ids) == [7] * 4 and engine.number_of_server > 0

    run(make(server.url), story)


def test_one_that_answers_everything_but_a_request_is_asked_again(server, monkeypatch):
    """Pauses and weight syncs do not count."""
    monkeypatch.setattr(http_engine, "LOOKS_EVERY_S", 0.02)
    monkeypatch.setattr(http_engine, "STUCK_S", 0.3)

    async def story(engine: VllmEngine) -> None:
        def lie(path: str, asked: dict[str, Any], true: Any) -> Any:
            asked_before = [each for each, _ in server.asked].count(GENERATE)
            if asked_before > 1:
                monkeypatch.setattr(http_engine, "STUCK_S", 600.0)
            return (
                server.released.wait(DEADLINE_S) if asked_before == 1 and path == GENERATE else true
            )

        server.lie = lie
        await engine.pause()
        task = asyncio.create_task(engine.generate(request()))
        await asyncio.sleep(0.6)
        assert engine.number_of_server == 0
        await engine.resume()
        (response, _) = await task
        assert list(response.token_ids) == [7] * 4 and engine.number_of_server == 1

    run(make(server.url), story)


@pytest.mark.parametrize(
    ("kind", "path"),
    [(VllmEngine, GENERATE), (SGLangEngine, "/generate")],
)
def test_a_response_may_take_as_long_as_it_takes(kind, path):
    """With its wait in the server's queue and all pauses; everything else has a limit."""
    limits = dict[str, float | None]()

    async def note(asked: httpx.Request) -> None:
        limits[asked.url.path] = asked.extensions["timeout"]["read"]

    async def story(url: str) -> None:
        async with make(url, kind) as engine:
            engine.client.event_hooks = {"request": [note]}
            await engine.load_weights(FIRST, list(engine.model.named_parameters()))
            await engine.generate(request())
            await engine.pause()
        assert limits.pop(path, 0) is None and {*limits.values()} == {http_engine.CALL_S}

    own = (
        serving()
        if kind is VllmEngine
        else Running(make_model(), tiny_tokenizer(), names=["policy"])
    )
    with own as server:
        asyncio.run(story(server.url))


def test_versions_rise_within_a_response(server):
    async def story(engine: VllmEngine) -> None:
        def lie(path: str, asked: dict[str, Any], true: Any) -> Any:
            if path == GENERATE:
                true["choices"][0]["weight_versions"] = [*spans(*labels)]
            return (
                server.released.wait(DEADLINE_S) and true
                if path == "/update_weight_version"
                else true
            )

        server.lie = lie
        labels = ("0.0", "0.1")
        update = asyncio.create_task(engine.load_weights(Version(0, 1), None))
        while server.label != "0.1":
            await asyncio.sleep(0.01)
        (response, _) = await engine.generate(request())
        assert list(response.versions) == [0, 0, 1, 1]
        labels = ("0.1", "0.0")
        with pytest.raises(TrustError, match=r"weights '0\.0' after .* newer"):
            await engine.generate(request())
        server.released.set()
        await update

    run(make(server.url), story)


def test_one_that_comes_back_is_given_the_weights_again(server, monkeypatch):
    """It has lost its weights with its process: the request that was open is answered by the new
    one, with them."""
    monkeypatch.setattr(http_engine, "BACK_OFF_S", 0.001)

    async def story(engine: VllmEngine) -> None:
        await engine.load_weights(Version(0, 1), list(engine.model.named_parameters()))
        held = server.hashes
        server.hashes = {}
        server.label = "default"

        def is_gone(path: str, asked: dict[str, Any], true: Any) -> Any:
            return 500 if path in (GENERATE, "/health") and not server.hashes else true

        server.lie = is_gone
        (response, _) = await engine.generate(request())
        assert list(response.versions) == [1] * 4 and server.hashes == held

    run(make(server.url), story)


@pytest.mark.parametrize("path", [GENERATE, "/collective_rpc"])
def test_one_that_was_started_anew_is_not_believed(server, monkeypatch, path):
    """It is well, but has neither the weights nor what its predecessor drew. path: the call that
    meets it first."""

    async def story(engine: VllmEngine) -> None:
        await engine.load_weights(Version(0, 1), list(engine.model.named_parameters()))
        held = server.hashes

        def start_anew(asked_path: str, asked: dict[str, Any], true: Any) -> Any:
            takes = asked.get("method") == "distflow_take_drawn"
            if asked_path == path and (takes or path == GENERATE) and server.label == "0.1":
                server.hashes = {}
                server.label = "default"

            if takes and not server.hashes:
                return {"results": [[[""] * number for number in asked["args"][0].values()]]}
            return true

        server.lie = start_anew
        server.label = "0.1"
        task = asyncio.create_task(engine.generate(request()))
        while server.hashes == held:
            await asyncio.sleep(0.01)
        server.lie = lambda _, asked, true: start_anew("", asked, true)
        (response, _) = await task
        assert list(response.versions) == [1] * 4 and list(response.rollout_log_probs) == [-1.0] * 4
        assert server.hashes == held and engine.number_of_server == 1

    run(make(server.url), story)


def test_a_cancelled_request_is_closed(server):
    """Which is how vLLM learns that nobody wants it."""

    async def story(engine: VllmEngine) -> None:
        server.lie = lambda path, asked, true: (
            server.released.wait(DEADLINE_S) if path == GENERATE else true
        )
        task = asyncio.create_task(engine.generate(request()))
        while not any(path == GENERATE for path, _ in server.asked):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        server.released.set()
        await engine.hashes()

    run(make(server.url), story)
