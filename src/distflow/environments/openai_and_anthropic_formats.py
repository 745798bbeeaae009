"""OpenAI's wire formats (chat completions, completions, responses) and Anthropic's (messages). Pure
functions."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from distflow.environments.endpoint_calls_and_conversations import (
    Answer,
    Call,
    Events,
    Json,
    Piece,
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
    "best_of": (1,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "logit_bias": ({},),
    "functions": ([],),
    "top_logprobs": (0,),
}
_DONE = ("", "[DONE]")
MAX_CHOICES = 64


def read_chat(body: Json) -> Call:
    refuse(body, _ONE_TEXT)
    most = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    messages = named_tools([made for message in body["messages"] for made in _message(message)])
    tools = [_tool(tool, tool.get("function") or {}) for tool in body.get("tools") or ()]
    wanted = body.get("tool_choice") != "none"
    return Call(
        messages, tools, parses_tools=wanted, n=_num_choices(body), **read_common(body, most)
    )


def _num_choices(body: Json) -> int:
    n = body.get("n")
    if n is not None and (type(n) is not int or not 1 <= n <= MAX_CHOICES):
        raise RequestError(400, f"'n' is {n!r:.40}: it must be a number from 1 to {MAX_CHOICES}")
    return n or 1


def _message(message: Json) -> list[Json]:
    role = message["role"]
    text = text_of(message.get("content"))
    if role == "assistant":
        calls = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
        return assistant(
            text, [(id, function["name"], function.get("arguments")) for id, function in calls]
        )
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


def write_chat(body: Json, answers: Sequence[Answer], head: Json) -> Json:
    choices = [_choice(body, answer, index) for index, answer in enumerate(answers)]
    return {**head, "object": "chat.completion", "choices": choices, "usage": _usage(answers)}


def _choice(body: Json, answer: Answer, index: int) -> Json:
    choice = {
        "index": index,
        "finish_reason": answer.finish_reason,
        "logprobs": _chat_log_probs(body, answer),
    }
    content = answer.text or (None if answer.calls else "")
    calls = {"tool_calls": _calls(answer)} if answer.calls else {}
    return {
        **choice,
        "message": {"role": "assistant", "content": content, "refusal": None, **calls},
    }


def stream_chat(body: Json, answers: Sequence[Answer], head: Json) -> Events:
    whole = write_chat(body, answers, head)
    head = {**head, "object": "chat.completion.chunk"}
    for choice in whole["choices"]:
        message = choice["message"]
        begun = {"index": choice["index"], "logprobs": None, "finish_reason": None}
        yield "", _chunk(head, begun, {"role": "assistant", "content": message["content"] and ""})
        if message["content"]:
            yield Piece(
                "",
                message["content"],
                partial(_said, head, {**begun, "logprobs": choice["logprobs"]}),
            )
        # clients read one call of a chunk
        for number, call in enumerate(message.get("tool_calls", ())):
            yield "", _chunk(head, begun, {"tool_calls": [{"index": number, **call}]})
        yield (
            "",
            _chunk(head, {"index": choice["index"], "finish_reason": choice["finish_reason"]}, {}),
        )
    yield from _stream_end(body, whole, head)


def _chunk(head: Json, choice: Json, delta: Json) -> Json:
    return {**head, "choices": [{**choice, "delta": delta}]}


def _said(head: Json, choice: Json, text: str) -> Json:
    return _chunk(head, choice, {"content": text})


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


def _chat_log_probs(body: Json, answer: Answer) -> Json | None:
    if not body.get("logprobs"):
        return None
    tokens = [
        {"token": text, "logprob": number, "bytes": list(text.encode()), "top_logprobs": []}
        for text, number in answer.tokens
    ]
    return {"content": tokens, "refusal": None}


def _usage(
    answers: Sequence[Answer], prompt: str = "prompt_tokens", drawn: str = "completion_tokens"
) -> Json:
    numbers = (answers[0].num_prompt_tokens, sum(len(answer.tokens) for answer in answers))
    return {prompt: numbers[0], drawn: numbers[1], "total_tokens": sum(numbers)}


def read_text(body: Json) -> Call:
    refuse(body, {**_ONE_TEXT, "echo": (False,), "suffix": ("",), "logprobs": (0, 1)})
    prompt: Any = body["prompt"]
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if not isinstance(prompt, str) or not prompt:
        raise RequestError(400, "'prompt' must be one text that is not empty")
    return Call(prompt, n=_num_choices(body), **read_common(body, "max_tokens"))


def write_text(body: Json, answers: Sequence[Answer], head: Json) -> Json:
    choices = [_text_choice(body, answer, index) for index, answer in enumerate(answers)]
    return {**head, "object": "text_completion", "choices": choices, "usage": _usage(answers)}


def _text_choice(body: Json, answer: Answer, index: int) -> Json:
    log_probs = None
    offset = 0
    offsets = []
    if body.get("logprobs") is not None:
        for text, _ in answer.tokens:
            offsets.append(offset)
            offset += len(text)
        texts, numbers = ([each[part] for each in answer.tokens] for part in (0, 1))
        log_probs = {
            "tokens": texts,
            "token_logprobs": numbers,
            "top_logprobs": None,
            "text_offset": offsets,
        }
    return {
        "index": index,
        "text": answer.text,
        "logprobs": log_probs,
        "finish_reason": answer.finish_reason,
    }


def stream_text(body: Json, answers: Sequence[Answer], head: Json) -> Events:
    whole = write_text(body, answers, head)
    head = {**head, "object": "text_completion"}
    for choice in whole["choices"]:
        begun = {**choice, "finish_reason": None}
        if choice["text"]:
            yield Piece("", choice["text"], partial(_continued, head, begun))
        yield "", {**head, "choices": [{**choice, "text": "", "logprobs": None}]}
    yield from _stream_end(body, whole, head)


def _continued(head: Json, choice: Json, text: str) -> Json:
    return {**head, "choices": [{**choice, "text": text}]}


def read_responses(body: Json) -> Call:
    refuse(body, {**_ONE_TEXT, "n": (1,), "conversation": (), "background": (False,), "prompt": ()})
    if (form := (body.get("text") or {}).get("format")) not in (None, {"type": "text"}):
        raise RequestError(
            400, f"'text.format' is not supported ({json.dumps(form):.80}): remove it"
        )
    messages: list[Json] = (
        [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    )
    said: list[Json] = []  # items of the current turn of the policy
    for item in input_items(body):
        if item.get("role") == "assistant" or item.get("type") in ("function_call", "reasoning"):
            said.append(item)
            continue
        messages += _turn(said)
        said = []
        if item.get("type") == "function_call_output":
            output = {"content": text_of(item["output"]), "tool_call_id": str(item["call_id"])}
            messages.append({"role": "tool", **output})
        elif item.get("type", "message") == "message":
            messages.append(_given_message(item["role"], text_of(item.get("content"))))
        else:
            raise RequestError(400, f"an item of type '{item['type']}' is not supported")
    tools = [_tool(tool, tool) for tool in body.get("tools") or ()]
    wanted = body.get("tool_choice") != "none"
    common = read_common(body, "max_output_tokens")
    return Call(named_tools(messages + _turn(said)), tools, parses_tools=wanted, **common)


def continued(body: Json, responses: Mapping[str, list[str]]) -> Json:
    """A request with the items of the response that it continues. responses: by id, the items up to
    it as JSON. Raises RequestError if there is none of its id."""
    if (id := body.get("previous_response_id")) is None:
        return body
    if not isinstance(id, str) or id not in responses:
        said = f"'previous_response_id' is {id!r:.40}: the episode has no response of that id"
        raise RequestError(400, said, "previous_response_not_found")
    return {**body, "input": [*map(json.loads, responses[id]), *input_items(body)]}


def input_items(body: Json) -> list[Json]:
    given: str | list[Json] = body["input"]
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _turn(items: list[Json]) -> list[Json]:
    text = "".join(
        text_of(item.get("content")) for item in items if item.get("role") == "assistant"
    )
    calls = [item for item in items if item.get("type") == "function_call"]
    return assistant(
        text, [(call["call_id"], call["name"], call.get("arguments")) for call in calls]
    )


def write_responses(body: Json, answers: Sequence[Answer], head: Json) -> Json:
    (answer,) = answers
    ends_early = answer.finish_reason == "length"
    usage = {
        **_usage(answers, "input_tokens", "output_tokens"),
        "input_tokens_details": {"cached_tokens": 0},
    }
    return {
        **{
            "id": head["id"],
            "object": "response",
            "created_at": head["created"],
            "model": head["model"],
        },
        "status": "incomplete" if ends_early else "completed",
        "output": output_items(answers, head),
        "usage": {**usage, "output_tokens_details": {"reasoning_tokens": 0}},
        "incomplete_details": {"reason": "max_output_tokens"} if ends_early else None,
        **{
            "error": None,
            "instructions": body.get("instructions"),
            "metadata": {},
            "temperature": None,
            "top_p": None,
        },
        **{"parallel_tool_calls": True, "tool_choice": "auto", "tools": body.get("tools") or []},
    }


def output_items(answers: Sequence[Answer], head: Json) -> list[Json]:
    (answer,) = answers
    output: list[Json] = []
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": answer.text, "annotations": []}
        status = "incomplete" if answer.finish_reason == "length" else "completed"
        message = {
            "type": "message",
            "id": f"msg_{head['id']}",
            "role": "assistant",
            "status": status,
        }
        output.append({**message, "content": [part]})
    for call in answer.calls:
        named = {"call_id": call.id, "name": call.name, "arguments": json.dumps(call.arguments)}
        output.append(
            {"type": "function_call", "id": f"fc_{call.id}", "status": "completed", **named}
        )
    return output


def stream_responses(body: Json, answers: Sequence[Answer], head: Json) -> Events:
    whole = write_responses(body, answers, head)
    events = list[Json | Piece]()
    begun = {
        **whole,
        "status": "in_progress",
        "output": [],
        "usage": None,
        "incomplete_details": None,
    }
    events += [
        {"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")
    ]
    for index, item in enumerate(whole["output"]):
        place: Json = {"output_index": index, "item_id": item["id"]}
        empty: Json = {"content": []} if item["type"] == "message" else {"arguments": ""}
        added = {**item, **empty, "status": "in_progress"}
        events.append({"type": "response.output_item.added", "output_index": index, "item": added})
        if item["type"] == "message":
            (part,) = item["content"]
            place["content_index"] = 0
            begins = {"part": {**part, "text": ""}}
            events.append({"type": "response.content_part.added", **place, **begins})
            said = {
                "type": "response.output_text.delta",
                **place,
                "logprobs": [],
                "sequence_number": 0,
            }
            events.append(Piece("response.output_text.delta", part["text"], partial(_delta, said)))
            events.append(
                {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []}
            )
            events.append({"type": "response.content_part.done", **place, "part": part})
        else:
            kind = "response.function_call_arguments"
            text = item["arguments"]
            events.append({"type": f"{kind}.delta", **place, "delta": text})
            events.append(
                {"type": f"{kind}.done", **place, "arguments": text, "name": item["name"]}
            )
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": f"response.{whole['status']}", "response": whole})
    for event in events:  # the endpoint numbers them
        yield (
            event if isinstance(event, Piece) else (event["type"], {**event, "sequence_number": 0})
        )


def _delta(event: Json, text: str) -> Json:
    return {**event, "delta": text}


CHAT = Wire(read_chat, write_chat, stream_chat)
TEXT = Wire(read_text, write_text, stream_text)
RESPONSES = Wire(read_responses, write_responses, stream_responses)

_THOUGHTS = ("thinking", "redacted_thinking")


def read_messages(body: Json) -> Call:
    if body.get("max_tokens") is None:
        raise RequestError(400, "'max_tokens' is missing")
    system = text_of(body.get("system"))
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    for message in body["messages"]:
        messages += _read(message["role"], message["content"])
    tools = []
    for tool in body.get("tools") or ():
        if "input_schema" not in tool:
            raise RequestError(
                400,
                f"the tool '{tool.get('name')}' has no 'input_schema': only your own tools are run",
            )
        tools.append(tool_schema(tool["name"], tool.get("description"), tool["input_schema"]))
    wanted = (body.get("tool_choice") or {}).get("type") != "none"
    common = read_common(body, "max_tokens", "stop_sequences")
    return Call(named_tools(messages), tools, parses_tools=wanted, **common)


def _read(role: str, content: object) -> list[Json]:
    blocks: list[Any] = (
        content if isinstance(content, list) else [{"type": "text", "text": content}]
    )
    if role == "assistant":
        text = text_of([block for block in blocks if block["type"] not in ("tool_use", *_THOUGHTS)])
        calls = [block for block in blocks if block["type"] == "tool_use"]
        return assistant(text, [(call["id"], call["name"], call["input"]) for call in calls])
    if role != "user":
        raise RequestError(
            400, f"a message has the role {role!r:.40}: it must be user or assistant"
        )
    results = [block for block in blocks if block["type"] == "tool_result"]
    found: list[Json] = [
        {"role": "tool", "content": _result(block), "tool_call_id": str(block["tool_use_id"])}
        for block in results
    ]
    if texts := [block for block in blocks if block["type"] != "tool_result"]:
        found.append({"role": "user", "content": text_of(texts)})
    return found


def _result(block: Json) -> str:
    """The text of a tool result; templates have no mark for errors."""
    return "error: " * bool(block.get("is_error")) + text_of(block.get("content"))


def write_messages(body: Json, answers: Sequence[Answer], head: Json) -> Json:
    (answer,) = answers
    content: list[Json] = [{"type": "text", "text": answer.text}] if answer.text else []
    for call in answer.calls:
        content.append(
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
        )
    reason = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}[
        answer.finish_reason
    ]
    return {
        **{
            "id": f"msg_{head['id']}",
            "type": "message",
            "role": "assistant",
            "model": head["model"],
        },
        "content": content,
        "stop_reason": "stop_sequence" if answer.stopped_by is not None else reason,
        "stop_sequence": answer.stopped_by,
        "usage": {"input_tokens": answer.num_prompt_tokens, "output_tokens": len(answer.tokens)},
    }


def stream_messages(body: Json, answers: Sequence[Answer], head: Json) -> Events:
    whole = write_messages(body, answers, head)
    begun: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
    yield "message_start", {"type": "message_start", "message": {**whole, **begun}}
    for index, block in enumerate(whole["content"]):
        is_text = block["type"] == "text"
        empty = {**block, "text": ""} if is_text else {**block, "input": {}}
        yield (
            "content_block_start",
            {"type": "content_block_start", "index": index, "content_block": empty},
        )
        if is_text:
            yield Piece(
                "content_block_delta",
                block["text"],
                partial(_block_delta, index, "text_delta", "text"),
            )
        else:
            arguments = json.dumps(block["input"])
            yield (
                "content_block_delta",
                _block_delta(index, "input_json_delta", "partial_json", arguments),
            )
        yield "content_block_stop", {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    yield "message_delta", {"type": "message_delta", "delta": ended, "usage": whole["usage"]}
    yield "message_stop", {"type": "message_stop"}


def _block_delta(index: int, kind: str, name: str, text: str) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: text}}


MESSAGES = Wire(read_messages, write_messages, stream_messages)
