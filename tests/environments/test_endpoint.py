"""The endpoint with the official clients of OpenAI and Anthropic, against an engine that records
what it was shown."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import Future
from importlib import import_module
from typing import Any

import httpx
import pytest

from distflow.environments.endpoint import MAX_BODY_BYTES
from distflow.environments.endpoint_calls import Answer, Call
from tests.environments.test_chat import ids

ASKED = {"role": "user", "content": "What is 1 + 1?"}
CALLS = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
LISTED = {"type": "object", "properties": ["a", "b"]}


@pytest.fixture(autouse=True)
def official_clients():
    """Imported by the tests that use them: that takes longer than to collect all others."""
    for name in ("anthropic", "openai"):
        pytest.importorskip(
            name, reason="the endpoint is tested with the official clients (extra dev)"
        )


def test_chat_completions_of_several_turns_are_one_conversation_token_by_token(begin):
    episode = begin("two", "four\n", "six")
    create = episode.openai.chat.completions.create
    messages = [ASKED]
    first = create(model="gpt-4o", messages=messages, temperature=0, top_p=0, user="ignored")
    choice = first.choices[0]
    assert (choice.message.content, choice.finish_reason, first.model) == ("two", "stop", "gpt-4o")
    assert first.usage.completion_tokens == len(episode.engine.replies[0])
    assert first.usage.prompt_tokens == len(episode.engine.asked[0][0])
    more = {
        "role": "user",
        "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "2 + 2?"}],
    }
    messages += [choice.message.model_dump(), more]
    chunks = list(
        create(model="x", messages=messages, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "four\n" and chunks[-1].usage.completion_tokens == len(episode.engine.replies[1])
    messages += [
        {"role": "assistant", "content": text.strip()},
        {"role": "user", "content": "3 + 3?"},
    ]

    async def last() -> Any:
        async with import_module("openai").AsyncOpenAI(
            base_url=f"{episode.session.base_url}/v1", api_key=episode.session.key
        ) as client:
            return await client.chat.completions.create(model="x", messages=messages)

    assert asyncio.run(last()).choices[0].message.content == "six"
    episode.check_exact()
    assert len(episode.chat.segments) == 6
    assert [message["content"] for message in episode.chat.messages][::2] == [
        "What is 1 + 1?",
        "And 2 + 2?",
        "3 + 3?",
    ]


@pytest.mark.parametrize("streams", [False, True])
def test_tools_of_openai(begin, streams):
    episode = begin(f"Let me see. {CALLS}", "2")
    create = episode.openai.chat.completions.create
    messages = [ASKED]

    if streams:
        with episode.openai.chat.completions.stream(
            model="x", messages=messages, tools=[TOOL]
        ) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        message = (
            create(model="x", messages=messages, tools=[TOOL], tool_choice="required")
            .choices[0]
            .message
        )

    assert message.content == "Let me see."
    (call,) = message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 1, "b": 1}
    messages += [
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "2"},
    ]
    messages[1]["tool_calls"][0]["function"]["arguments"] = '{ "b":1,"a" : 1 }'
    assert create(model="x", messages=messages, tools=[TOOL]).choices[0].message.content == "2"
    episode.check_exact()
    assert [segment.owner for segment in episode.chat.segments] == [
        "prompt",
        "policy",
        "tool",
        "policy",
    ]


@pytest.mark.parametrize("streams", [False, True])
def test_tools_of_responses(begin, streams):
    episode = begin(CALLS, "2")
    options = {
        "model": "x",
        "tools": [{"type": "function", **FUNCTION}],
        "instructions": "Be brief.",
    }

    def ask(items: Any) -> Any:
        if not streams:
            return episode.openai.responses.create(input=items, **options)
        with episode.openai.responses.stream(input=items, **options) as stream:
            return stream.get_final_response()

    items: list[Any] = [ASKED]
    (call,) = ask(items).output
    assert (call.type, json.loads(call.arguments)) == ("function_call", {"a": 1, "b": 1})
    items += [
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "2"},
    ]
    last = ask(items)
    assert last.output_text == "2" and last.status == "completed"
    episode.check_exact()


@pytest.mark.parametrize("streams", [False, True])
def test_tools_of_anthropic(begin, streams):
    episode = begin(f"Let me see. {CALLS}", "2 END")
    tools = [{"name": "add", "description": "Adds.", "input_schema": PARAMETERS}]
    options = {
        "model": "x",
        "max_tokens": 200,
        "system": "Be brief.",
        "tools": tools,
        "stop_sequences": ["END"],
    }

    def ask(messages: Any) -> Any:
        if not streams:
            return episode.anthropic.messages.create(messages=messages, **options)
        with episode.anthropic.messages.stream(messages=messages, **options) as stream:
            return stream.get_final_message()

    first = ask([ASKED])
    text, call = first.content
    assert (text.text, call.name, call.input) == ("Let me see.", "add", {"a": 1, "b": 1})
    assert first.stop_reason == "tool_use"
    content = [{"type": "text", "text": "no"}]
    result = {"type": "tool_result", "tool_use_id": call.id, "is_error": True, "content": content}
    returned = {"role": "assistant", "content": [block.model_dump() for block in first.content]}
    last = ask([ASKED, returned, {"role": "user", "content": [result]}])
    assert (last.content[0].text, last.stop_reason, last.stop_sequence) == (
        "2 ",
        "stop_sequence",
        "END",
    )
    assert episode.chat.messages[-2]["content"] == "error: no"
    episode.check_exact()


SAID = "two 日本 🎉 and a long  tail."


def openai_pieces(client: Any) -> Iterator[str]:
    for chunk in client.chat.completions.create(model="x", messages=[ASKED], stream=True):
        yield from [chunk.choices[0].delta.content or ""]


def text_pieces(client: Any) -> Iterator[str]:
    for chunk in client.completions.create(model="x", prompt="1 + 1 =", stream=True):
        yield from [chunk.choices[0].text]


def responses_pieces(client: Any) -> Iterator[str]:
    with client.responses.stream(model="x", input=[ASKED]) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                yield event.delta
        assert stream.get_final_response().output_text == SAID


def anthropic_pieces(client: Any) -> Iterator[str]:
    with client.messages.stream(model="x", max_tokens=200, messages=[ASKED]) as stream:
        yield from stream.text_stream
        assert stream.get_final_message().content[0].text == SAID


@pytest.mark.parametrize("pieces", [openai_pieces, text_pieces, responses_pieces, anthropic_pieces])
def test_a_streamed_text_is_the_answer(begin, pieces):
    episode = begin(SAID)
    client = episode.anthropic if pieces is anthropic_pieces else episode.openai
    assert "".join(pieces(client)) == SAID
    episode.check_exact()


def test_completions_continue_a_text(begin):
    episode = begin("two", "four")
    create = episode.openai.completions.create
    assert create(model="x", prompt="1 + 1 =").choices[0].text == "two"
    chunks = create(model="x", prompt="1 + 1 =two; 2 + 2 =", max_tokens=50, stop="!", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "four"
    episode.check_exact()
    assert episode.engine.asked[1][2] == ("!",)
    assert episode.engine.asked[0][0] == tuple(ids(episode.family, "1 + 1 ="))


def test_a_reply_is_cut_by_its_length_and_a_call_that_cannot_be_read_is_text(begin):
    episode = begin("two and more", CALLS.replace("}}", "}"))
    create = episode.openai.chat.completions.create
    cut = create(model="x", messages=[ASKED], tools=[TOOL], max_completion_tokens=1).choices[0]
    assert cut.finish_reason == "length" and len(cut.message.content) < 5
    messages = [ASKED, cut.message.model_dump(), {"role": "user", "content": "more"}]
    wrong = create(model="x", messages=messages, tools=[TOOL]).choices[0]
    assert (
        wrong.finish_reason == "stop"
        and "<tool_call>" in wrong.message.content
        and not wrong.message.tool_calls
    )


@pytest.mark.parametrize(
    ("path", "changes", "status", "said"),
    [
        ("chat/completions", {"n": 2}, 400, "'n' is not supported"),
        ("responses", {"input": "hi", "n": 2}, 400, "'n' is not supported"),
        (
            "chat/completions",
            {"response_format": {"type": "json_object"}},
            400,
            "'response_format' is not supported",
        ),
        ("responses", {"input": "hi", "text": {"format": {"type": "json_object"}}}, 400, "'text"),
        ("chat/completions", {"messages": []}, 400, "no messages"),
        ("chat/completions", {"messages": 7}, 400, "the request is invalid"),
        (
            "chat/completions",
            {"messages": [{"role": "robot", "content": ""}]},
            400,
            "the role 'robot'",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "\ud800"}]},
            400,
            "surrogate",
        ),
        (
            "chat/completions",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            400,
            "'image_url' is not supported",
        ),
        ("chat/completions", {"max_tokens": 0}, 400, "'max_tokens' is 0"),
        ("chat/completions", {"max_tokens": True}, 400, "'max_tokens' is True"),
        (
            "chat/completions",
            {"tools": [{"type": "web_search"}]},
            400,
            "'web_search' is not supported",
        ),
        (
            "chat/completions",
            {"tools": [{**TOOL, "function": {**FUNCTION, "parameters": LISTED}}]},
            400,
            "'add'",
        ),
        ("completions", {"prompt": ["a", "b"]}, 400, "one text"),
        ("completions", {}, 400, "'prompt' is missing"),
        (
            "responses",
            {"input": "hi", "previous_response_id": "resp_1"},
            400,
            "previous_response_id",
        ),
        ("messages", {}, 400, "'max_tokens' is missing"),
        (
            "messages",
            {"max_tokens": 5, "tools": [{"type": "bash", "name": "bash"}]},
            400,
            "input_schema",
        ),
        (
            "embeddings",
            {},
            404,
            (
                "there is no route POST /v1/embeddings: there are /v1/chat/completions, "
                "/v1/completions"
            ),
        ),
        ("messages/count_tokens", {}, 404, "there is no route POST /v1/messages/count_tokens"),
    ],
)
def test_bad_requests_are_refused_and_leave_the_conversation_as_it_was(
    begin, path, changes, status, said
):
    episode = begin("two")
    url = f"{episode.session.base_url}/v1"
    headers = {"Authorization": f"Bearer {episode.session.key}"}
    body = json.dumps({"model": "x", "messages": [ASKED], **changes})
    found = httpx.post(f"{url}/{path}", content=body, headers=headers)
    assert found.status_code == status and said in found.text
    assert [error.status for error in episode.session.refused] == [status]
    assert not episode.engine.asked
    assert (
        episode.openai.chat.completions.create(model="x", messages=[ASKED])
        .choices[0]
        .message.content
        == "two"
    )


def test_bodies_that_are_no_json_or_too_large_are_refused(begin):
    episode = begin("two")
    url = f"{episode.session.base_url}/v1/chat/completions"
    headers = {"x-api-key": episode.session.key}
    for content in (b"[1]", b"{", b"\xff", b"[" * 100_000):
        assert httpx.post(url, content=content, headers=headers).status_code == 400
    large = {"model": "x", "messages": [{"role": "user", "content": "a" * MAX_BODY_BYTES}]}
    found = httpx.post(url, json=large, headers=headers)
    assert [error.status for error in episode.session.refused] == [400] * 4 + [413]
    assert found.status_code == 413 and f"{MAX_BODY_BYTES:,}" in found.json()["error"]["message"]


def test_a_key_opens_its_own_episode_while_it_lasts(endpoint, begin):
    one = begin("two")
    other = begin("three")
    assert one.session.key != other.session.key and one.session.base_url != other.session.base_url

    for key in (other.session.key, "", "ä"):
        found = httpx.get(f"{one.session.base_url}/v1/models", headers={"x-api-key": key.encode()})
        assert found.status_code == 401 and "not that of this base URL" in found.text

    assert [model.id for model in one.openai.models.list()] == ["policy"]
    assert [model.id for model in one.anthropic.models.list()] == ["policy"]

    def nobody(call: Call) -> "Future[Answer]":
        raise AssertionError

    with endpoint.session(nobody) as session:
        pass
    openai = import_module("openai")
    client = openai.OpenAI(base_url=f"{session.base_url}/v1", api_key=session.key, max_retries=0)
    with pytest.raises(openai.APIStatusError, match="API key .*episode") as ended:
        client.chat.completions.create(model="x", messages=[ASKED])
    assert ended.value.status_code == 401
    assert not (one.engine.asked or other.engine.asked)


def test_errors_have_the_types_of_their_api(begin):
    episode = begin("two")
    errors = tuple(import_module(name).APIStatusError for name in ("openai", "anthropic"))

    async def breaks(*_: Any) -> Any:
        raise KeyError("broken")

    episode.chat.generate = breaks
    for client, messages, known in (
        (episode.anthropic, episode.anthropic.messages, ("authentication_error", "api_error")),
        (
            episode.openai,
            episode.openai.chat.completions,
            ("invalid_request_error", "server_error"),
        ),
    ):
        with pytest.raises(errors) as unknown:
            client.with_options(api_key="other").models.list()
        with pytest.raises(errors) as broken:
            messages.create(model="x", max_tokens=5, messages=[ASKED])
        kinds = [failed.value.response.json()["error"]["type"] for failed in (unknown, broken)]
        assert kinds == [*known]
