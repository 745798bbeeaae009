"""The four formats of tool calls, in the models' own words: read, and refused with a reason where
they are broken."""

import json
from pathlib import Path

import pytest

from distflow.environments.parse_tool_calls import (
    FORMATS,
    find_tool_calls,
    format_of,
    opens_thought,
    text_before_calls,
)
from distflow.errors import UserError

ADD = ("add", {"a": 1, "b": [2, {"c": "x"}]})
READ = [
    (
        "hermes",
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "x"}]}}\n</tool_call>',
        [ADD],
    ),
    (
        "hermes",
        'I add.\n<tool_call>\n{"name": "f", "arguments": {"text": "</tool_call> in\na string"}}\n'
        "</tool_call>\n"
        '<tool_call>{"name": "g", "arguments": "{\\"a\\": 1}"}</tool_call>',
        [("f", {"text": "</tool_call> in\na string"}), ("g", {"a": 1})],
    ),
    (
        "hermes",
        'it is <think> so\n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        [("f", {})],
    ),
    (
        "hermes",
        (
            '<think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n</think>\n'
            "The answer is 3."
        ),
        [],
    ),
    ("hermes", '<think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>', []),
    ("hermes", "The answer is 3.", []),
    ("llama3", '{"name": "add", "parameters": {"a": 1, "b": [2, {"c": "x"}]}}', [ADD]),
    (
        "llama3",
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": null}}',
        [("f", {}), ("g", {"a": None})],
    ),
    ("llama3", 'The JSON {"name": "add"} is an example.', []),
    ("llama3", '{"answer": 3}', []),
    (
        "mistral",
        (
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "x"}]}, "id": '
            '"000000001"}]'
        ),
        [ADD],
    ),
    (
        "mistral",
        '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": "[ARGS]"}[TOOL_CALLS]g[ARGS]{}',
        [("f", {"a": "[ARGS]"}), ("g", {})],
    ),
    ("mistral", "The answer is [3].", []),
    (
        "xml",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
        "<parameter=b>\nline 1\nline > 2\n</parameter>\n</function>\n</tool_call>",
        [("add", {"a": "1", "b": "line 1\nline > 2"})],
    ),
    (
        "xml",
        "<function=f></function>\n<function=g><parameter=a></parameter></function>",
        [("f", {}), ("g", {"a": ""})],
    ),
]
BROKEN = [
    (
        "hermes",
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>',
        "cannot be read",
    ),
    ("hermes", '<tool_call>\n{"name": "add", "argum', "cut off"),
    ("hermes", "<tool_call></tool_call>", "cut off"),
    ("hermes", '<tool_call>{"name": "f"} and </tool_call>', "'and </tool_call>' follows"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is not JSON"),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "must be a JSON object"),
    ("hermes", '<tool_call>["f"]</tool_call>', "must be"),
    ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "cannot be read"),
    (
        "hermes",
        f'<tool_call>{{"name": "f", "arguments": {{"a": {"9" * 5000}}}}}</tool_call>',
        "cannot be read",
    ),
    ("llama3", '<|python_tag|>brave_search.call(query="x")', "cannot be read"),
    ("llama3", '{"name": "add", "parameters": {"a": 1}', "cannot be read"),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}', "cannot be read"),
    ("mistral", "[TOOL_CALLS]f[ARGS]{a: 1}", "cannot be read"),
    ("xml", "<tool_call>\n<function=add>\n<parameter=a>\n1", "no </function>"),
    ("xml", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>", "no </parameter>"),
    ("xml", '<tool_call>\n{"name": "add"}\n</tool_call>', "no <function="),
]


MARKS = {
    "hermes": "<tool_call>{}</tool_call> </tool_call> </think>",
    "llama3": '<|python_tag|>{"name": "g", "parameters": {}} </think>',
    "mistral": '[TOOL_CALLS][{"name": "g", "arguments": {}}] [TOOL_CALLS]g[ARGS]{} [ARGS] </think>',
    "xml": "</parameter> </function> </tool_call> </think>",
}
CALL = {
    "hermes": lambda text: (
        "<tool_call>" + json.dumps({"name": "f", "arguments": {"a": text}}) + "</tool_call>"
    ),
    "llama3": lambda text: json.dumps({"name": "f", "parameters": {"a": text}}),
    "mistral": lambda text: "[TOOL_CALLS]" + json.dumps([{"name": "f", "arguments": {"a": text}}]),
    "xml": lambda text: (
        f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    ),
}


@pytest.mark.parametrize("form", FORMATS)
def test_marks_and_quoted_calls_in_an_argument_are_text(form):
    quoted = [f"{prefix}{CALL[form]('x')} and more" for prefix in ("", "see: ", "\n")]
    for text in (*MARKS.values(), f"a {MARKS[form]} b", *quoted):
        (call,) = find_tool_calls(CALL[form](text), form)
        assert (call.name, call.arguments) == ("f", {"a": text})


@pytest.mark.parametrize("form", FORMATS)
def test_thinking_that_the_prompt_has_opened_holds_no_calls(form):
    call = CALL[form]("x")
    assert not find_tool_calls(call, form, in_thought=True)
    assert not find_tool_calls(f"{call}</think>It is 3.", form, in_thought=True)
    assert len(find_tool_calls(f"{call}</think>\n{call}", form, in_thought=True)) == 1
    assert text_before_calls(f"{call}</think>{call}", form, in_thought=True) == f"{call}</think>"
    assert opens_thought("<|im_start|>assistant\n<think>\n") and not opens_thought(
        "<think>\n\n</think>\n\n"
    )


def test_a_parameter_that_does_not_end_takes_no_other_call():
    calls = find_tool_calls(f"<function=e><parameter=a>1</function>{CALL['xml']('x')}", "xml")
    assert "</parameter>" in calls[0].problem and calls[1].arguments == {"a": "x"}


@pytest.mark.parametrize(("form", "text", "calls"), READ)
def test_calls_are_read(form, text, calls):
    found = find_tool_calls(text, form)
    assert [(call.name, call.arguments) for call in found] == calls and not any(
        call.problem for call in found
    )
    assert all(call.typed == (form != "xml") for call in found)


@pytest.mark.parametrize(("form", "text", "reason"), BROKEN)
def test_a_broken_call_has_a_reason(form, text, reason):
    assert reason in find_tool_calls(text, form)[-1].problem


@pytest.mark.parametrize("value", ['"\\ud800"', "1e999", "-1e999", '{"a": ["\\udfff"]}'])
def test_an_argument_that_no_tool_can_receive_has_a_reason(value):
    calls = {
        "hermes": '<tool_call>{"name": "f", "arguments": {"x": %s}}</tool_call>',
        "llama3": '{"name": "f", "parameters": {"x": %s}}',
        "mistral": '[TOOL_CALLS]f[ARGS]{"x": %s}',
    }
    for form, text in calls.items():
        (call,) = find_tool_calls(text % value, form)
        assert call.problem and not call.arguments, form


def test_a_broken_call_leaves_the_others():
    one = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    problems = [
        bool(call.problem)
        for call in find_tool_calls(f"{one}<tool_call>{{</tool_call>{one}", "hermes")
    ]
    assert problems == [False, True, False]


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama3", "mistral"])
def test_the_template_says_the_format(name):
    template = (Path(__file__).parents[1] / "data" / "templates" / f"{name}.jinja").read_text()
    assert format_of(template) == {"qwen2": "hermes", "qwen3": "hermes"}.get(name, name)


def test_a_template_without_calls_is_refused_with_all_formats():
    with pytest.raises(UserError) as error:
        format_of("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert all(name in str(error.value) for name in FORMATS)
