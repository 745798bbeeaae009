"""OpenAI's wire formats: chat completions, completions and responses. Pure functions."""

import json
from typing import Any

from distflow.environments.endpoint_calls import (
    Answer,
    Call,
    Events,
    Json,
    RequestError,
    Wire,
    assistant,
    named_tools,
    read_common,
    refuse,
    text_of,
    tool_schema,
)

_ONE_TEXT: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "logit_bias": ({},),
    "functions": ([],),
    "logprobs": (False,),
    "top_logprobs": (0,),
}
_DONE = ("", "[DONE]")


def read_chat(body: Json) -> Call:
    refuse(body, _ONE_TEXT)
    messages = list[Json]()
    for message in body["messages"]:
        messages += _message(message)
    most = "max_completion_tokens"
    if body.get(most) is None:
        most = "max_tokens"
    return Call(
        named_tools(messages),
        [_tool(tool, tool.get("function") or {}) for tool in body.get("tools") or ()],
        parses_tools=body.get("tool_choice") != "none",
        **read_common(body, most),
    )


def _message(message: Json) -> list[Json]:
    role = message["role"]
    text = text_of(message.get("content"))

    if role == "assistant":
        calls = list[tuple[str, str, object]]()
        for call in message.get("tool_calls") or ():
            function = call["function"]
            calls.append((call["id"], function["name"], function.get("arguments")))
        return assistant(text, calls)

    if role == "tool":
        return [{"role": role, "content": text, "tool_call_id": str(message["tool_call_id"])}]
    return [_given_message(role, text)]


def _given_message(role: object, text: str) -> Json:
    if role not in ("system", "developer", "user"):
        raise RequestError(
            400, f"a message has the role {role!r:.40}: it must be system, user, assistant or tool"
        )
    return {"role": "system" if role == "developer" else role, "content": text}


def _tool(tool: Json, function: Json) -> Json:
    if tool.get("type") != "function":
        raise RequestError(
            400, f"a tool of type '{tool.get('type')}' is not supported: only functions are"
        )
    return tool_schema(function["name"], function.get("description"), function.get("parameters"))


def write_chat(body: Json, answer: Answer, head: Json) -> Json:
    message: Json = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = _calls(answer)

    choice = {
        "index": 0,
        "finish_reason": answer.finish_reason,
        "logprobs": None,
        "message": message,
    }
    return {**head, "object": "chat.completion", "choices": [choice], "usage": _usage(answer)}


def stream_chat(body: Json, answer: Answer, head: Json) -> Events:
    whole = write_chat(body, answer, head)
    (choice,) = whole["choices"]
    message = choice["message"]
    head = {**head, "object": "chat.completion.chunk"}
    begun = {"index": 0, "logprobs": None, "finish_reason": None}

    # Null stays null, and a text begins as an empty one.
    yield "", _chunk(head, begun, {"role": "assistant", "content": message["content"] and ""})
    if message["content"]:
        yield "", _chunk(head, begun, {"content": message["content"]})

    # clients read one call of a chunk
    for number, call in enumerate(message.get("tool_calls", ())):
        yield "", _chunk(head, begun, {"tool_calls": [{"index": number, **call}]})
    yield "", _chunk(head, {"index": 0, "finish_reason": choice["finish_reason"]}, {})
    yield from _stream_end(body, whole, head)


def _chunk(head: Json, choice: Json, delta: Json) -> Json:
    return {**head, "choices": [{**choice, "delta": delta}]}


def _stream_end(body: Json, whole: Json, head: Json) -> Events:
    if (body.get("stream_options") or {}).get("include_usage"):
        yield "", {**head, "choices": [], "usage": whole["usage"]}
    yield _DONE


def _calls(answer: Answer) -> list[Json]:
    found = []
    for call in answer.calls:
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        found.append({"id": call.id, "type": "function", "function": function})
    return found


def _usage(answer: Answer, prompt: str = "prompt_tokens", drawn: str = "completion_tokens") -> Json:
    num_prompt = answer.num_prompt_tokens
    num_drawn = answer.num_tokens
    return {prompt: num_prompt, drawn: num_drawn, "total_tokens": num_prompt + num_drawn}


def read_text(body: Json) -> Call:
    refuse(body, {**_ONE_TEXT, "echo": (False,), "suffix": ("",)})
    prompt: Any = body["prompt"]
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if not isinstance(prompt, str) or not prompt:
        raise RequestError(400, "'prompt' must be one text that is not empty")
    return Call(prompt, **read_common(body, "max_tokens"))


def write_text(body: Json, answer: Answer, head: Json) -> Json:
    choice = {
        "index": 0,
        "text": answer.text,
        "logprobs": None,
        "finish_reason": answer.finish_reason,
    }
    return {**head, "object": "text_completion", "choices": [choice], "usage": _usage(answer)}


def stream_text(body: Json, answer: Answer, head: Json) -> Events:
    whole = write_text(body, answer, head)
    head = {**head, "object": "text_completion"}
    yield "", {**head, "choices": whole["choices"]}
    yield from _stream_end(body, whole, head)


def read_responses(body: Json) -> Call:
    refuse(
        body,
        {
            **_ONE_TEXT,
            "conversation": (),
            "background": (False,),
            "prompt": (),
            "previous_response_id": (),
        },
    )

    form = (body.get("text") or {}).get("format")
    if form not in (None, {"type": "text"}):
        raise RequestError(
            400, f"'text.format' is not supported ({json.dumps(form):.80}): remove it"
        )

    messages = list[Json]()
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})

    turn = list[Json]()  # items of the current turn of the policy
    for item in _input_items(body):
        if item.get("role") == "assistant" or item.get("type") in ("function_call", "reasoning"):
            turn.append(item)
            continue
        messages += _message_of_turn(turn)
        turn = []
        messages.append(_message_of_item(item))

    messages += _message_of_turn(turn)
    return Call(
        named_tools(messages),
        [_tool(tool, tool) for tool in body.get("tools") or ()],
        parses_tools=body.get("tool_choice") != "none",
        **read_common(body, "max_output_tokens"),
    )


def _message_of_item(item: Json) -> Json:
    """The message of a tool, the system or the user."""
    kind = item.get("type", "message")
    if kind == "function_call_output":
        output = text_of(item["output"])
        return {"role": "tool", "content": output, "tool_call_id": str(item["call_id"])}
    if kind == "message":
        return _given_message(item["role"], text_of(item.get("content")))
    raise RequestError(400, f"an item of type '{kind}' is not supported")


def _input_items(body: Json) -> list[Json]:
    items: str | list[Json] = body["input"]
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    return items


def _message_of_turn(items: list[Json]) -> list[Json]:
    """The policy's message of one turn; none if the turn has no text and no calls."""
    text = ""
    calls = list[tuple[str, str, object]]()
    for item in items:
        if item.get("role") == "assistant":
            text += text_of(item.get("content"))
        if item.get("type") == "function_call":
            calls.append((item["call_id"], item["name"], item.get("arguments")))

    return assistant(text, calls)


def write_responses(body: Json, answer: Answer, head: Json) -> Json:
    status = "completed"
    incomplete_details = None
    if answer.finish_reason == "length":
        status = "incomplete"
        incomplete_details = {"reason": "max_output_tokens"}

    return {
        "id": head["id"],
        "object": "response",
        "created_at": head["created"],
        "model": head["model"],
        "status": status,
        "output": _output_items(answer, head),
        "usage": {
            **_usage(answer, "input_tokens", "output_tokens"),
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
        "incomplete_details": incomplete_details,
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": {},
        "temperature": None,
        "top_p": None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
    }


def _output_items(answer: Answer, head: Json) -> list[Json]:
    output: list[Json] = []
    if answer.text or not answer.calls:
        output.append(
            {
                "type": "message",
                "id": f"msg_{head['id']}",
                "role": "assistant",
                "status": "incomplete" if answer.finish_reason == "length" else "completed",
                "content": [{"type": "output_text", "text": answer.text, "annotations": []}],
            }
        )

    for call in answer.calls:
        output.append(
            {
                "type": "function_call",
                "id": f"fc_{call.id}",
                "status": "completed",
                "call_id": call.id,
                "name": call.name,
                "arguments": json.dumps(call.arguments),
            }
        )

    return output


def stream_responses(body: Json, answer: Answer, head: Json) -> Events:
    whole = write_responses(body, answer, head)
    nothing_yet: Json = {"output": [], "usage": None, "incomplete_details": None}
    begun = {**whole, "status": "in_progress", **nothing_yet}
    yield _event("response.created", response=begun)
    yield _event("response.in_progress", response=begun)

    for index, item in enumerate(whole["output"]):
        begins = {**item, "status": "in_progress"}
        if item["type"] == "message":
            begins["content"] = []
        else:
            begins["arguments"] = ""

        yield _event("response.output_item.added", output_index=index, item=begins)
        place = {"output_index": index, "item_id": item["id"]}

        if item["type"] == "message":
            yield from _stream_text_part(item, {**place, "content_index": 0})
        else:
            kind = "response.function_call_arguments"
            arguments = item["arguments"]
            yield _event(f"{kind}.delta", **place, delta=arguments)
            yield _event(f"{kind}.done", **place, arguments=arguments, name=item["name"])

        yield _event("response.output_item.done", output_index=index, item=item)

    yield _event(f"response.{whole['status']}", response=whole)


def _stream_text_part(item: Json, place: Json) -> Events:
    (part,) = item["content"]
    text = part["text"]
    yield _event("response.content_part.added", **place, part={**part, "text": ""})
    kind = "response.output_text"
    yield _event(f"{kind}.delta", **place, logprobs=[], delta=text)
    yield _event(f"{kind}.done", **place, text=text, logprobs=[])
    yield _event("response.content_part.done", **place, part=part)


def _event(kind: str, **data: Any) -> tuple[str, Json]:
    """An event, which the endpoint numbers."""
    return kind, {"type": kind, **data, "sequence_number": 0}


CHAT = Wire(read_chat, write_chat, stream_chat)
TEXT = Wire(read_text, write_text, stream_text)
RESPONSES = Wire(read_responses, write_responses, stream_responses)
