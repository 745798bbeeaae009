"""Anthropic's wire format: messages. Pure functions."""

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
    text_of,
    tool_schema,
)

_THOUGHTS = ("thinking", "redacted_thinking")
_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}


def read_messages(body: Json) -> Call:
    if body.get("max_tokens") is None:
        raise RequestError(400, "'max_tokens' is missing")

    messages = list[Json]()
    system = text_of(body.get("system"))
    if system:
        messages.append({"role": "system", "content": system})
    for message in body["messages"]:
        messages += _read(message["role"], message["content"])

    tools = list[Json]()
    for tool in body.get("tools") or ():
        if "input_schema" not in tool:
            raise RequestError(
                400,
                f"the tool '{tool.get('name')}' has no 'input_schema': only your own tools are run",
            )
        tools.append(tool_schema(tool["name"], tool.get("description"), tool["input_schema"]))

    return Call(
        named_tools(messages),
        tools,
        parses_tools=(body.get("tool_choice") or {}).get("type") != "none",
        **read_common(body, "max_tokens", "stop_sequences"),
    )


def _read(role: str, content: object) -> list[Json]:
    blocks: Any = content
    if not isinstance(content, list):
        blocks = [{"type": "text", "text": content}]
    if role == "assistant":
        return _read_turn(blocks)
    if role != "user":
        raise RequestError(
            400, f"a message has the role {role!r:.40}: it must be user or assistant"
        )

    messages = list[Json]()
    texts = list[Json]()
    for block in blocks:
        if block["type"] != "tool_result":
            texts.append(block)
            continue

        result = _result(block)
        messages.append(
            {"role": "tool", "content": result, "tool_call_id": str(block["tool_use_id"])}
        )

    if texts:
        messages.append({"role": "user", "content": text_of(texts)})
    return messages


def _read_turn(blocks: list[Json]) -> list[Json]:
    """The policy's message, without its thoughts."""
    texts = list[Json]()
    calls = list[tuple[str, str, object]]()
    for block in blocks:
        if block["type"] == "tool_use":
            calls.append((block["id"], block["name"], block["input"]))
        elif block["type"] not in _THOUGHTS:
            texts.append(block)

    return assistant(text_of(texts), calls)


def _result(block: Json) -> str:
    """The text of a tool result; templates have no mark for errors."""
    text = text_of(block.get("content"))
    return f"error: {text}" if block.get("is_error") else text


def write_messages(body: Json, answer: Answer, head: Json) -> Json:
    content = list[Json]()
    if answer.text:
        content.append({"type": "text", "text": answer.text})

    for call in answer.calls:
        content.append(
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
        )

    reason = _STOP_REASONS[answer.finish_reason]
    if answer.stopped_by is not None:
        reason = "stop_sequence"
    return {
        "id": f"msg_{head['id']}",
        "type": "message",
        "role": "assistant",
        "model": head["model"],
        "content": content,
        "stop_reason": reason,
        "stop_sequence": answer.stopped_by,
        "usage": {"input_tokens": answer.num_prompt_tokens, "output_tokens": answer.num_tokens},
    }


def stream_messages(body: Json, answer: Answer, head: Json) -> Events:
    whole = write_messages(body, answer, head)
    begun: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
    yield "message_start", {"type": "message_start", "message": {**whole, **begun}}

    for index, block in enumerate(whole["content"]):
        is_text = block["type"] == "text"
        empty: Json = {"text": ""} if is_text else {"input": {}}
        starts = {"index": index, "content_block": {**block, **empty}}
        yield "content_block_start", {"type": "content_block_start", **starts}

        if is_text:
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}

        yield (
            "content_block_delta",
            {"type": "content_block_delta", "index": index, "delta": delta},
        )
        yield "content_block_stop", {"type": "content_block_stop", "index": index}

    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    yield "message_delta", {"type": "message_delta", "delta": ended, "usage": whole["usage"]}
    yield "message_stop", {"type": "message_stop"}


MESSAGES = Wire(read_messages, write_messages, stream_messages)
