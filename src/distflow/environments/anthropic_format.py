"""Anthropic's wire format: messages. Pure functions."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from distflow.environments.endpoint_call_types import (
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
    text_of,
    tool_schema,
)

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
            raise RequestError(400, f"the tool '{tool.get('name')}' has no 'input_schema': only your own tools are run")
        tools.append(tool_schema(tool["name"], tool.get("description"), tool["input_schema"]))
    wanted = (body.get("tool_choice") or {}).get("type") != "none"
    common = read_common(body, "max_tokens", "stop_sequences")
    return Call(named_tools(messages), tools, parses_tools=wanted, **common)


def _read(role: str, content: object) -> list[Json]:
    blocks: list[Any] = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if role == "assistant":
        text = text_of([block for block in blocks if block["type"] not in ("tool_use", *_THOUGHTS)])
        calls = [block for block in blocks if block["type"] == "tool_use"]
        return assistant(text, [(call["id"], call["name"], call["input"]) for call in calls])
    if role != "user":
        raise RequestError(400, f"a message has the role {role!r:.40}: it must be user or assistant")
    results = [block for block in blocks if block["type"] == "tool_result"]
    found: list[Json] = [
        {"role": "tool", "content": _result(block), "tool_call_id": str(block["tool_use_id"])} for block in results
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
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments})
    reason = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}[answer.finish_reason]
    return {
        **{"id": f"msg_{head['id']}", "type": "message", "role": "assistant", "model": head["model"]},
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
        yield "content_block_start", {"type": "content_block_start", "index": index, "content_block": empty}
        if is_text:
            yield Piece("content_block_delta", block["text"], partial(_delta, index, "text_delta", "text"))
        else:
            arguments = json.dumps(block["input"])
            yield "content_block_delta", _delta(index, "input_json_delta", "partial_json", arguments)
        yield "content_block_stop", {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    yield "message_delta", {"type": "message_delta", "delta": ended, "usage": whole["usage"]}
    yield "message_stop", {"type": "message_stop"}


def _delta(index: int, kind: str, name: str, text: str) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: text}}


MESSAGES = Wire(read_messages, write_messages, stream_messages)
