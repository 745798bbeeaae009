"""Whole histories become conversations: what extends one continues its tokens, anything else is a
branch."""

import asyncio
import json
from typing import Any

import pytest

from distflow.environments.conversations import Conversations
from distflow.environments.endpoint_calls import (
    Answer,
    Call,
    RequestError,
    Wire,
)
from distflow.environments.openai_format import CHAT, TEXT
from tests.environments.test_chat import FAMILIES, Engine, chat_of, ids

TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}},
    }
]
CALLS = {
    "qwen2.5": 'So: <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "qwen3": (
        '<think>\n[ ]\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n'
        "</tool_call>"
    ),
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]',
    "llama3": '{"name": "add", "parameters": {"a": 1}}',
}


class Agent:
    """Sends histories as a client of OpenAI does, to a policy that gives these replies."""

    def __init__(self, family: str, *replies: str) -> None:
        self.family = FAMILIES[family]()
        end = ids(self.family, self.family.end)
        self.engine = Engine([ids(self.family, text) + end for text in replies])
        self.chat = chat_of(self.family, self.engine)
        self.conversations = Conversations(self.chat, None, 5)

    def send(self, messages: Any, wire: Wire = CHAT, **options: Any) -> Answer:
        body = {"prompt" if wire is TEXT else "messages": messages, **options}
        call: Call = wire.read(json.loads(json.dumps(body)))
        return asyncio.run(self.conversations.answer(call))

    def says(self, *messages: Any, **options: Any) -> dict[str, Any]:
        """The message of the policy, as the client gets it."""
        answer = self.send(list(messages), **options)
        message: dict[str, Any] = CHAT.write({}, answer, {"id": ""})["choices"][0]["message"]
        return message

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [prompt for prompt, *_ in self.engine.asked]

    @property
    def branches(self) -> list[str]:
        """Their names."""
        return [chat.name for chat in self.chat.conversations if chat.name]

    @property
    def owners(self) -> list[list[str]]:
        return [[segment.owner for segment in chat.segments] for chat in self.chat.conversations]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


LINEAR = ["prompt", "policy", "environment", "policy"]


@pytest.mark.parametrize(
    "returned",
    [
        {
            "role": "assistant",
            "content": "one \n",
            "refusal": None,
            "tool_calls": None,
            "audio": None,
        },
        {"role": "assistant", "content": "one", "tool_calls": [], "reasoning_content": "lost"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "on"}, {"type": "output_text", "text": "e"}],
        },
    ],
)
def test_a_reply_is_known_again_however_a_client_returns_it(returned):
    agent = Agent("qwen2.5", "one \n", "two")
    agent.says(user("1"))
    agent.says(user("1"), returned, user("2"))
    assert agent.owners == [LINEAR]
    assert agent.prompts[1][: len(agent.prompts[0]) + len(agent.engine.replies[0])] == (
        *agent.prompts[0],
        *agent.engine.replies[0],
    )


@pytest.mark.parametrize("family", CALLS)
def test_calls_of_tools_go_back_and_forth_in_each_format(family):
    agent = Agent(family, CALLS[family], "2")
    message = agent.says(user("1"), tools=TOOLS)
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "add",
        {"a": 1},
    )
    assert len(call["id"]) == 9 and call["id"].isalnum()
    assert message["content"] == {"qwen2.5": "So:", "qwen3": "<think>\n[ ]\n</think>"}.get(family)
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
    assert agent.says(user("1"), message, answer, tools=TOOLS)["content"].strip() == "2"
    assert agent.owners == [["prompt", "policy", "tool", "policy"]]
    assert agent.chat.messages[2]["name"] == "add"


@pytest.mark.parametrize(
    "history",
    [
        [user("1"), {"role": "assistant", "content": "uno"}, user("2")],
        [user("one"), {"role": "assistant", "content": "one"}, user("2")],
        [user("a summary")],
        [user("1")],
    ],
)
def test_what_extends_no_conversation_is_a_branch_as_it_was_sent(history):
    agent = Agent("qwen2.5", "one", "two", "three", "four")
    agent.says(user("1"))
    reply = agent.says(*history)
    agent.says(*history, reply, user("3"))
    agent.says(user("1"), {"role": "assistant", "content": "one"}, user("4"))
    assert sorted(agent.owners) == [LINEAR, LINEAR] and agent.branches == ["1"]
    text = agent.family.tokenizer.apply_chat_template(
        history, tokenize=False, add_generation_prompt=True
    )
    assert agent.prompts[1] == tuple(ids(agent.family, text))
    assert agent.prompts[2][: len(agent.prompts[1])] == agent.prompts[1]
    assert agent.prompts[3][: len(agent.prompts[0])] == agent.prompts[0]
    assert [talk[-1]["content"] for talk in agent.conversations.messages] == ["three", "four"]


def test_other_tools_are_a_branch_and_unused_ones_are_none():
    agent = Agent("qwen2.5", "one", "two", CALLS["qwen2.5"])
    reply = agent.says(user("1"), tools=TOOLS)
    agent.says(user("1"), reply, user("2"))
    assert sorted(agent.owners) == [["prompt", "policy"]] * 2 and agent.branches == ["1"]
    assert "add" not in agent.family.tokenizer.decode(list(agent.prompts[1]))
    text = agent.says(user("1"), reply, user("3"), tools=TOOLS, tool_choice="none")
    assert "tool_calls" not in text and "<tool_call>" in text["content"]
    assert sorted(agent.owners) == [["prompt", "policy"], LINEAR]


def test_the_longest_conversation_is_extended_and_texts_have_their_own():
    agent = Agent("qwen2.5", "a", "b", "c", "d", "e")
    first = [user("1"), agent.says(user("1")), user("2")]
    longer = [*first, agent.says(*first), user("3")]
    agent.says(*longer)
    assert agent.owners == [[*LINEAR, "environment", "policy"]]
    assert agent.send("say ", TEXT).text == "d"
    assert agent.send("say d, and then ", TEXT).text == "e"
    assert agent.owners[-1] == LINEAR
    assert agent.prompts[3] == tuple(ids(agent.family, "say "))


def test_a_text_is_continued_behind_the_stop_string_that_was_drawn_or_is_a_branch():
    agent = Agent("qwen2.5", "act\nObservation:", "two", "three")
    assert agent.send("Q: ", TEXT, stop=["\nObservation:"]).text == "act"
    agent.send("Q: act\nObservation: 42", TEXT)
    assert agent.owners == [LINEAR]
    assert (
        agent.family.tokenizer.decode(agent.prompts[1], skip_special_tokens=True)
        == "Q: act\nObservation: 42"
    )
    agent.send("Q: act otherwise", TEXT)
    assert agent.branches == ["1"]
    assert agent.prompts[2] == tuple(ids(agent.family, "Q: act otherwise"))


def test_calls_beyond_the_last_are_refused_and_the_episode_says_so():
    agent = Agent("qwen2.5", *"abcde")
    for number in range(5):
        agent.says(user(str(number)))
    with pytest.raises(RequestError, match="its 5 replies") as refused:
        agent.says(user("5"))
    assert refused.value.status == 410
    assert [chat.finish_reason for chat in agent.chat.conversations] == [*["stop"] * 4, "max_turns"]


def test_calls_at_once_are_answered_side_by_side_each_in_a_branch_of_its_own():
    agent = Agent("qwen2.5", "one", "two", "three", "four", "five")
    begun, may_reply = asyncio.Event(), asyncio.Event()
    draw = agent.chat.generate
    waiting = 0

    async def together(*asked: Any) -> Any:
        nonlocal waiting
        waiting += 1
        if waiting == 2:
            begun.set()
        await may_reply.wait()
        return await draw(*asked)

    agent.chat.generate = together

    def call(*messages: Any) -> Call:
        made: Call = CHAT.read({"messages": list(messages)})
        return made

    async def pair(first: Call, second: Call) -> list[Answer]:
        nonlocal waiting
        waiting = 0
        begun.clear(), may_reply.clear()
        both = asyncio.gather(agent.conversations.answer(first), agent.conversations.answer(second))
        await asyncio.wait_for(begun.wait(), 10)  # neither waits for the other
        may_reply.set()
        return list(await both)

    async def play() -> None:
        one, two = await pair(call(user("1")), call(user("1")))
        assert {one.text, two.text} == {"one", "two"}
        more = call(user("1"), one.message, user("2"))
        three, four = await pair(more, more)
        last = call(user("1"), one.message, user("2"), four.message, user("3"))
        waiting_before = len(agent.chat.conversations)
        assert (await agent.conversations.answer(last)).text == "five"
        assert len(agent.chat.conversations) == waiting_before, (
            "it goes on in the branch that it extends"
        )

    asyncio.run(play())
    assert sorted(chat.name for chat in agent.chat.conversations) == ["", "1", "2"]
    assert sorted(agent.branches) == ["1", "2"]
    assert sorted(map(len, agent.owners)) == [2, 4, 4]
    whole = [chat.token_ids for chat in agent.chat.conversations]
    seen = [
        (*prompt, *drawn)
        for (prompt, *_), drawn in zip(agent.engine.asked, agent.engine.replies, strict=True)
    ]
    assert all(any(ids[: len(each)] == each for ids in whole) for each in seen), (
        "what was drawn is where it was drawn"
    )
    assert sum(chat.num_drawn for chat in agent.chat.conversations) == sum(
        map(len, agent.engine.replies)
    )
