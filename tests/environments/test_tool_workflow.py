"""Tools as an episode calls them: whatever a tool does, the model gets a bounded text that says
so."""

import asyncio
import math
import random
import time
from collections import Counter
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distflow.environments.answer_calls import answer_call
from distflow.environments.builtin_tools import Search
from distflow.environments.parse_tool_calls import ToolCall
from distflow.environments.tool_workflow import EpisodeTools
from distflow.environments.tools import Tools
from distflow.errors import UserError
from tests.patience import is_running

FILE = f"{Path(__file__).with_name('hostile_tools.py')}:"
MOST = 300
HOSTILE = [
    ("exits", "exited with status 3"),
    ("crashes", "killed by SIGSEGV"),
    ("fills", "it ran out of memory"),
    ("asks_to_exit", "raised SystemExit: 4 (at hostile_tools.py:"),
    ("raises", "raised KeyError: 'no such thing' (at hostile_tools.py:"),
    ("returns_bytes", "returned bytes, which is neither text nor a JSON value"),
    ("returns_nan", "returned float, which is neither text nor a JSON value"),
    ("returns_much", "[cut: the answer has 1,000,000 characters]"),
    ("colours", "red and\tplain\n\n[control characters are left out]"),
    ("half", "ab\n[control characters are left out]"),
]
GOOD = ["total", "later", "secret", "forks", "starts"]


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    texts = tmp_path_factory.mktemp("texts") / "texts.txt"
    texts.write_text(
        "The capital of France is Paris.\nCats have four legs.\nA tower in Paris is tall.\n"
    )
    own = [FILE + name for name in (*(name for name, _ in HOSTILE), *GOOD) if name != "secret"]
    keyed = {"name": f"{FILE}secret", "options": {"key": "-hidden"}}
    search = {"name": "search", "options": {"file": str(texts), "count": 2}}
    with closing(Tools([*own, keyed, search, "calculator", "python"], 60.0, MOST)) as tools:
        yield tools


def answers(tools: Tools, *calls: ToolCall) -> tuple[list[str], Counter[str]]:
    """What the model is told of each call, and the episode's counts."""
    chat: Any = SimpleNamespace(counts=Counter(), clock_stopped=nullcontext)

    async def run() -> list[str]:
        with EpisodeTools(tools, ("a seed",)) as episode:
            return [await answer_call(chat, call, tools.parameters, episode.run) for call in calls]

    return asyncio.run(run()), chat.counts


def test_whatever_a_tool_does_is_a_bounded_text_and_counted(tools):
    calls = [ToolCall(name) for name, _ in HOSTILE]
    texts, counts = answers(tools, *calls, ToolCall("later", {"a": 1}))
    for (name, said), text in zip(HOSTILE, texts, strict=False):
        assert said in text and len(text) < MOST + 100, (name, text)
    assert texts[-1] == '{"sum": 3}'
    for name, _ in HOSTILE:
        assert (counts[f"tool/{name}/calls"], counts[f"tool/{name}/errors"]) == (1, 1)
    assert (counts["tool/later/calls"], counts["tool/later/errors"]) == (1, 0)


def test_what_a_module_keeps_lasts_for_the_episode_and_not_longer(tools):
    call = ToolCall("total", {"amount": 2})
    assert answers(tools, call, call)[0] == ["2", "4"] and answers(tools, call)[0] == ["2"]


def test_a_tool_that_forks_answers_once(tools):
    assert answers(tools, ToolCall("forks"), ToolCall("total", {"amount": 1}))[0] == ["forked", "1"]


def test_processes_of_a_tool_end_with_the_episode(tools, tmp_path):
    file = tmp_path / "pid"
    assert answers(tools, ToolCall("starts", {"file": str(file)}))[0] == ["started"]
    while is_running(int(file.read_text())):  # else this test runs into its timeout
        time.sleep(0.05)


def test_a_call_that_does_not_end_is_ended_at_its_deadline():
    with closing(Tools([f"{FILE}hangs", "python"], 0.5, MOST)) as tools:
        calls = ToolCall("hangs"), ToolCall("python", {"code": "while True: pass"})
        texts, counts = answers(tools, *calls)

    assert texts == [
        "error: hangs ended its process: no answer within 0.5 s",
        "error: python ended its process: no answer within 0.5 s; names defined before are lost",
    ]
    for name in ("hangs", "python"):
        assert counts[f"tool/{name}/errors"] == 1 and counts[f"tool/{name}/ms"] >= 400


def test_calls_that_fit_no_tool_are_answered(tools):
    bad = [
        (ToolCall("totl", {"amount": 1}), "error: there is no tool 'totl'; did you mean 'total'?"),
        (
            ToolCall("total", {"amont": 1}),
            "error: total has no parameter 'amont'; did you mean 'amount'?",
        ),
        (ToolCall("total", {}), "missing 1 required positional argument: 'amount'"),
        (ToolCall("", problem="it is broken"), "error: it is broken"),
        (ToolCall("x" * 10_000), "there is no tool 'xxx"),
        (ToolCall("secret", {"word": "a", "key": "mine"}), "secret has no parameter 'key'"),
    ]
    texts, counts = answers(tools, *(call for call, _ in bad))
    for (_, said), text in zip(bad, texts, strict=True):
        assert said in text and len(text) < 700
    assert counts["tool/unknown/errors"] == 3 and counts["tool/total/errors"] == 2


def test_text_arguments_become_what_the_schema_declares(tools):
    calls = [
        ToolCall("later", {"a": "1", "b": "4"}, typed=False),
        ToolCall("secret", {"word": "12"}, typed=False),
    ]
    assert answers(tools, *calls)[0] == ['{"sum": 5}', "12-hidden"]


def test_schemas_are_those_of_signature_and_docstring_without_options(tools):
    schemas = {schema["function"]["name"]: schema["function"] for schema in tools.schemas}
    assert schemas["later"]["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first."},
            "b": {"type": "integer", "description": "The second."},
        },
        "required": ["a"],
    }
    assert set(schemas["secret"]["parameters"]["properties"]) == {"word"}
    assert set(schemas["search"]["parameters"]["properties"]) == {"query"}
    assert schemas["calculator"]["description"].startswith("Computes")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(12 + 30) * 2 / sqrt(16)", "21.0"),
        ("2^10 - 7 // 2 % 2", "1023"),
        ("max(3, -4, 5) + abs(-6)", "11"),
        ("1/0", "ZeroDivisionError"),
        ("__import__('os')", "is no arithmetic"),
        ("9**9**9", "exponent is larger"),
        ("1+", "SyntaxError"),
        ("True + 1", "is no arithmetic"),
    ],
)
def test_calculator(tools, expression, value):
    (text,), _ = answers(tools, ToolCall("calculator", {"expression": expression}))
    assert value in text and ("error" in text) == (not value[0].isdigit())


def test_search_ranks_by_bm25(tools, tmp_path):
    found, nothing = answers(
        tools, ToolCall("search", {"query": "PARIS capital"}), ToolCall("search", {"query": "x"})
    )[0]
    assert found == "The capital of France is Paris.\n\nA tower in Paris is tall."
    assert nothing == "no text has any of these words"

    rng = random.Random(1)
    for _ in range(50):
        texts = [rng.choices("abcdef", (1, 1, 2, 3, 5, 8), k=rng.randint(1, 12)) for _ in range(9)]
        file = tmp_path / "texts.txt"
        file.write_text("\n".join(map(" ".join, texts)))
        assert Search(str(file), 9)("a b f").split("\n\n") == bm25(texts, ["a", "b", "f"])


def bm25(texts: list[list[str]], query: list[str]) -> list[str]:
    """The texts that have a word of the query, the best first."""
    mean = sum(map(len, texts)) / len(texts)

    def score(text: list[str]) -> float:
        total = 0.0
        for word in query:
            number = sum(word in other for other in texts)
            rarity = math.log1p((len(texts) - number + 0.5) / (number + 0.5))
            weight = 1.2 * (0.25 + 0.75 * len(text) / mean)
            total += rarity * 2.2 * text.count(word) / (text.count(word) + weight)

        return total

    ranked = sorted(texts, key=score, reverse=True)
    return [" ".join(text) for text in ranked if score(text) > 0]


def test_python_keeps_names_over_the_calls_of_an_episode(tools):
    codes = [
        "x = 3\nprint('set')\nx + 1",
        "x * 2",
        "1/0",
        "x",
        "import os\nos.fork()",
        "import os\nos._exit(0)",
        "x",
        "f(",
    ]
    texts, counts = answers(
        tools, *(ToolCall("python", {"code": code}) for code in codes), ToolCall("python", {})
    )
    assert texts[:2] == ["set\n4\n", "6\n"] and texts[3] == "3\n"
    assert "ZeroDivisionError" in texts[2] and "Error" in texts[4]
    assert "names defined before are lost" in texts[5] and "NameError" in texts[6]
    assert (
        "SyntaxError" in texts[7]
        and "code must be a text" in texts[8]
        and counts["tool/python/errors"] == 6
    )
    assert "NameError" in answers(tools, ToolCall("python", {"code": "x"}))[0][0]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("calculater", "no built-in tool 'calculater'; did you mean 'calculator'?"),
        (f"{FILE}missing", "has no 'missing'"),
        (f"{FILE}undescribed", "Give every parameter a type"),
        ({"name": "search"}, "cannot be made: TypeError"),
        (
            {"name": "search", "options": {"file": "/no/such/file"}},
            "cannot be read from '/no/such/file'",
        ),
        ({"name": "search", "options": {"files": "x"}}, "does not take its options"),
        ({"path": "x"}, "neither a name nor {name, options}"),
    ],
)
def test_a_tool_that_cannot_be_used_is_refused(entry, said):
    with pytest.raises(UserError) as error:
        Tools([entry], 1.0, 100).close()  # type: ignore[list-item]  # a wrong entry
    assert said in str(error.value)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(UserError, match="calculator"):
        Tools(["calculator", "calculator"], 1.0, 100)
