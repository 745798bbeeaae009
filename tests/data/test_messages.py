"""Conversations in files: read in every form that people write them in, and every mistake told with
its line."""

import json
from pathlib import Path
from typing import Any

import pytest

from distflow.data.dataset_columns import Columns, RawRow
from distflow.data.sources import load_rows
from distflow.errors import UserError

SFT = Columns(response="response", answer_required=False, messages="messages")
RL = Columns(answer_required=False, is_chat=True)
USER = {"role": "user", "content": "1+1?"}
ANSWER = {"role": "assistant", "content": "2"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def load(
    tmp_path: Path, *rows: dict[str, Any], columns: Columns = SFT, bad_rows: str = "error"
) -> list[RawRow]:
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_rows(file, columns, bad_rows=bad_rows)[0]


def messages(*more: Any) -> dict[str, Any]:
    return {"messages": [USER, ANSWER, *more]}


FAULTS = {
    "empty": ({"messages": []}, "(column 'messages') is an empty list of chat messages"),
    "a text": ({"messages": "hi"}, "is text, but not JSON"),
    "a mapping": (
        {"messages": {"role": "user"}},
        "is dict {'role': 'user'}, not a list of chat messages",
    ),
    "a message that is a text": (
        messages("hi"),
        "message 3 of the conversation (column 'messages') is str 'hi', not a",
    ),
    "no role": (
        messages({"content": "a"}),
        "message 3 .* needs the str values 'role' and 'content'",
    ),
    "no content": (messages({"role": "assistant"}), "message 3 .* its content is missing"),
    "null content": (
        messages({"role": "assistant", "content": None}),
        "message 3 .* its content is missing",
    ),
    "number content": (
        messages({"role": "user", "content": 3}),
        "message 3 .* its content is int 3",
    ),
    "parts": (
        messages({"role": "user", "content": [{"type": "text", "text": "a"}]}),
        "message 3 .* a list of parts",
    ),
    "User": (
        messages({"role": "User", "content": "a"}),
        "has the role 'User'; did you mean 'user'?",
    ),
    "critic": (
        messages({"role": "critic", "content": "a"}),
        "has the role 'critic'; known: assistant, developer, ",
    ),
    "no answer": (
        {"messages": [USER]},
        "has no turn of the assistant, so there is nothing to train on",
    ),
    "a question last": (messages(USER), "ends with a message of the user, which has no answer"),
    "a result last": (
        messages({"role": "tool", "content": "3"}),
        "ends with a message of the tool",
    ),
    "an answer first": ({"messages": [ANSWER, USER, ANSWER]}, "begins with the assistant's turn"),
    "an empty answer": ({"messages": [USER, {**ANSWER, "content": ""}]}, "message 2 .* is empty"),
    "a call without a name": (
        messages({"role": "assistant", "tool_calls": [{"id": 1}]}),
        "a tool call without the name",
    ),
    "calls that are none": (
        messages({"role": "assistant", "tool_calls": "add"}),
        "a tool call without the name",
    ),
    "broken arguments": (
        messages({"role": "assistant", "tool_calls": [{"name": "add", "arguments": "{a"}]}),
        "the arguments of 'add' in message 3 .* is text, but not JSON",
    ),
    "a surrogate": (
        messages({"role": "assistant", "content": "\ud800"}),
        "message 3 .* half a surrogate pair",
    ),
    "tools of names": (
        {**messages(), "tools": ["add"]},
        "the tools (column 'tools') are list ['add'], not a list of JSON",
    ),
    "tools that are no JSON": (
        {**messages(), "tools": "add"},
        "the tools (column 'tools') is text, but not JSON",
    ),
    "kwargs that are a list": (
        {**messages(), "chat_template_kwargs": [1]},
        "are list [1], not a mapping",
    ),
    "kwargs that are taken": (
        {**messages(), "chat_template_kwargs": {"tokenize": True}},
        "may not hold 'tokenize'",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_mistakes_are_reported_with_their_line_or_skipped(tmp_path: Path, what: str) -> None:
    bad, said = FAULTS[what]
    with pytest.raises(UserError) as found:
        load(tmp_path, messages(), bad)
    assert f"1 bad row:\n  {tmp_path}/chat.jsonl:2: " in str(found.value)
    assert all(part in str(found.value) for part in said.split(" .* ")), found.value
    assert [row.origin for row in load(tmp_path, messages(), bad, bad_rows="skip")] == [
        f"{tmp_path}/chat.jsonl:1"
    ]


def test_what_a_conversation_may_hold(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "name": None, "tool_calls": [CALL]}
    talk = [{"role": "system", "content": ""}, USER, call, {"role": "tool", "content": "2"}, ANSWER]
    (row,) = load(tmp_path, {"messages": talk, "tools": [TOOL], "answer": "2", "topic": "sums"})
    assert row.prompt == [
        talk[0],
        USER,
        {"role": "assistant", "tool_calls": [CALL]},
        talk[3],
        ANSWER,
    ]
    assert row.is_conversation and row.response is None and row.tools == [TOOL]
    assert row.extra_info == {"tools": [TOOL], "topic": "sums"} and row.answer == "2"


def test_json_texts_in_place_of_lists_and_mappings(tmp_path: Path) -> None:
    as_text = {**CALL["function"], "arguments": '{"a": 1, "b": null}'}
    talk = [USER, {"role": "assistant", "tool_calls": [{"function": as_text}]}]
    row, plain = load(
        tmp_path,
        {
            "messages": json.dumps(talk),
            "tools": json.dumps([TOOL]),
            "chat_template_kwargs": '{"x": 1}',
        },
        {"messages": talk, "tools": "", "chat_template_kwargs": None},
    )
    assert row.prompt[1]["tool_calls"] == [
        {"function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    ]
    assert row.prompt == plain.prompt and (row.tools, plain.tools) == ([TOOL], [])
    assert (row.template_kwargs, plain.template_kwargs) == ({"x": 1}, {})


def test_what_typed_files_fill_in_is_taken_out(tmp_path: Path) -> None:
    """Parquet gives each message, call and schema the keys of all."""
    import pyarrow
    import pyarrow.parquet

    calls = [CALL, {"function": {"name": "say", "arguments": {"text": "x"}}}]
    talk = [
        USER,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "2", "name": "add"},
        ANSWER,
    ]
    values = {
        "messages": talk,
        "tools": [TOOL, {"type": "function", "function": {"name": "say", "description": "Says."}}],
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([values]), tmp_path / "a.parquet")
    (row,) = load_rows(tmp_path / "a.parquet", SFT)[0]
    assert {"messages": row.prompt, "tools": row.tools} == values


def test_a_prompt_with_its_response_is_no_conversation(tmp_path: Path) -> None:
    both, ours = load(
        tmp_path,
        {"prompt": "1+1?", "response": "2", **messages()},
        {"prompt": "1+1?", **messages()},
    )
    assert (both.prompt, both.response, both.is_conversation) == ("1+1?", "2", False)
    assert (ours.prompt, ours.response, ours.is_conversation) == ([USER, ANSWER], None, True)
    assert both.extra_info == messages() and ours.extra_info == {}


def test_the_columns_are_named_where_none_is_found(tmp_path: Path) -> None:
    with pytest.raises(UserError) as found:
        load(tmp_path, {"conversations": []})
    assert "'messages' (data.messages_key); columns: conversations" in str(found.value)

    with pytest.raises(UserError, match=r"'response' \(data\.response_key\).* conversations"):
        load(tmp_path, {"prompt": "a"})


def test_messages_of_prompts_may_call_tools(tmp_path: Path) -> None:
    asked = [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}]
    chat, text = load(
        tmp_path,
        {"prompt": asked, "tools": [TOOL]},
        {"prompt": "1+1?", "tools": [TOOL]},
        columns=RL,
    )
    assert chat.prompt == asked and chat.tools == text.tools == [TOOL] and not chat.is_conversation
    (unused,) = load(
        tmp_path, {"prompt": "1+1?", "tools": "hammer"}, columns=Columns(answer_required=False)
    )
    assert unused.tools == [] and unused.extra_info == {"tools": "hammer"}, "no template sees it"

    with pytest.raises(UserError, match=r"chat\.jsonl:1: message 1 .*'prompt'.*'human'"):
        load(tmp_path, {"prompt": [{"role": "human", "content": "hi"}]}, columns=RL)
