"""Chats over templates of six families, against an engine that records what it was shown."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from distflow.config.keys.rollout import AgentConfig
from distflow.data.sample import Segment
from distflow.environments.chat import (
    Chat,
    ChatError,
    Limits,
    Prompt,
    TemplatedTwice,
    begin_agents,
)
from distflow.environments.tokens_between_turns import TemplateError, TurnTokens
from tests.data import chat_templates as of


@dataclass
class Family:
    tokenizer: PreTrainedTokenizerFast
    end: str
    kwargs: dict[str, object] = field(default_factory=dict)


FAMILIES: dict[str, Callable[[], Family]] = {
    "llama3": lambda: Family(
        of.byte_level(of.LLAMA3, of.LLAMA3_TOKENS, "<|eot_id|>", "<|begin_of_text|>"), "<|eot_id|>"
    ),
    "qwen2.5": lambda: Family(
        of.byte_level(of.QWEN2, of.CHATML_TOKENS, "<|im_end|>"), "<|im_end|>"
    ),
    "qwen3": lambda: Family(of.byte_level(of.QWEN3, of.CHATML_TOKENS, "<|im_end|>"), "<|im_end|>"),
    "qwen3 without thinking": lambda: Family(
        of.byte_level(of.QWEN3, of.CHATML_TOKENS, "<|im_end|>"),
        "<|im_end|>",
        {"enable_thinking": False},
    ),
    "mistral": lambda: Family(of.metaspace(of.MISTRAL, of.MISTRAL_TOKENS, "</s>", "<s>"), "</s>"),
    "gemma": lambda: Family(
        of.metaspace(of.GEMMA, of.GEMMA_TOKENS, "<end_of_turn>", "<bos>"), "<end_of_turn>"
    ),
    "deepseek": lambda: Family(
        of.byte_level(
            of.DEEPSEEK, of.DEEPSEEK_TOKENS, "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"
        ),
        "<｜end▁of▁sentence｜>",
    ),
}


@dataclass
class Engine:
    """Replies as it is told, and records what it was asked. while_drawn: awaited after each of its
    tokens, with their number."""

    replies: Sequence[Sequence[int]]
    asked: list[tuple[tuple[int, ...], int, tuple[str | int, ...], int]] = field(
        default_factory=list
    )

    async def __call__(
        self, prompt: tuple[int, ...], max_tokens: int, stop: tuple[str | int, ...], num_drawn: int
    ) -> Segment:
        ids = tuple(self.replies[len(self.asked)])
        self.asked.append((prompt, max_tokens, stop, num_drawn))
        reason = "stop" if len(ids) <= max_tokens else "length"
        ids = ids[:max_tokens]
        numbers = tuple(-0.5 * i for i in range(len(ids)))
        return Segment.drawn(0, ids, numbers, numbers, (0,) * len(ids), reason)


# immutable
def chat_of(family: Family, engine: Engine, limits: Limits = Limits(1000, 2000)) -> Chat:  # noqa: B008
    end = family.tokenizer.convert_tokens_to_ids(family.end)
    return Chat(TurnTokens(family.tokenizer, (end,), family.kwargs), engine, limits, templated=True)


def ids(family: Family, text: str) -> list[int]:
    return list(family.tokenizer(text, add_special_tokens=False)["input_ids"])


def rendered(family: Family, messages: list[dict[str, str]]) -> list[int]:
    """The whole conversation by the template at once."""
    text: Any = family.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **family.kwargs
    )
    return ids(family, text)


def without_given(family: Family, chat: Chat) -> list[int]:
    return [
        token
        for segment in chat.segments
        if segment.owner == "policy"
        for token in segment.token_ids
    ]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("cut", [False, True])
def test_each_prompt_is_what_was_seen_before_and_the_templates_own_tokens(name, cut):
    """The last prompt is that of the template over the whole conversation, where it keeps what was
    said; and each begins with the one before and the drawn tokens as they are. cut: replies lack
    their end token."""
    family = FAMILIES[name]()
    end = [] if cut else [family.tokenizer.convert_tokens_to_ids(family.end)]
    words = ("3 + 4 = 7", "so the answer is 8")
    replies = [[*ids(family, word), *end] for word in words]
    engine = Engine([*replies, ids(family, "9")])
    chat = chat_of(family, engine)

    async def talk() -> None:
        await chat.ask("what is 3 + 4?")
        await chat.ask("No, that is wrong.")
        await chat.ask([{"role": "user", "content": "Once more:\nwhat is it?"}])

    asyncio.run(talk())
    prompts = [prompt for prompt, *_ in engine.asked]
    for before, reply, after in zip(prompts, replies, prompts[1:], strict=False):
        assert after[: len(before) + len(reply)] == (*before, *reply)
    assert [num_drawn for *_, num_drawn in engine.asked] == [
        0,
        len(replies[0]),
        len(replies[0]) + len(replies[1]),
    ]
    assert without_given(family, chat) == [*replies[0], *replies[1], *ids(family, "9")]
    assert chat.token_ids == (*prompts[-1], *ids(family, "9")) and chat.turns == 3
    messages = [
        {"role": "user", "content": "what is 3 + 4?"},
        {"role": "assistant", "content": words[0]},
        {"role": "user", "content": "No, that is wrong."},
        {"role": "assistant", "content": words[1]},
        {"role": "user", "content": "Once more:\nwhat is it?"},
    ]
    assert [{**m, "content": m["content"].strip()} for m in chat.messages[:5]] == messages
    whole = rendered(family, messages)

    # its generation prompt stays where it was, and later prompts leave it out
    if name == "qwen3 without thinking":
        thought = ids(family, "<think>\n\n</think>\n\n")
        assert (
            sum(
                prompts[-1][i : i + len(thought)] == tuple(thought) for i in range(len(prompts[-1]))
            )
            == 3
        )
    # SentencePiece puts a space in front of what follows a special token
    elif name not in ("mistral", "gemma"):
        assert list(prompts[-1]) == whole
    else:
        text = family.tokenizer.decode(prompts[-1]).replace(" ", "")
        assert text == family.tokenizer.decode(whole).replace(" ", "")


def test_thinking_stays_as_it_was_drawn():
    """The template would strip it from earlier turns."""
    family = FAMILIES["qwen3"]()
    drawn = ids(family, "<think>\nlet me see\n</think>\n\n7<|im_end|>")
    engine = Engine([drawn, drawn])
    chat = chat_of(family, engine)

    async def talk() -> None:
        await chat.ask("3 + 4?")
        await chat.ask("Again.")

    asyncio.run(talk())
    second = family.tokenizer.decode(engine.asked[1][0])
    first = family.tokenizer.decode(engine.asked[0][0])
    assert second == (
        f"{first}<think>\nlet me see\n</think>\n\n7<|im_end|>\n<|im_start|>user\nAgain.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )

    _, closing, rewriting = chat.tokens.describe()
    assert "<|im_end|>" in closing and "anew" in rewriting
    assert len(chat_of(FAMILIES["qwen2.5"](), engine).tokens.describe()) == 2


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}",
            "does not write each reply exactly once",
        ),
        ("{{ messages[-1]['content'] }}", "does not write each reply exactly once"),
        (None, "the tokenizer has none"),
        (
            "{{ raise_exception('only once') }}",
            "user, assistant, user: TemplateError: only once",
        ),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(template, said):
    family = FAMILIES["qwen2.5"]()
    family.tokenizer.chat_template = template
    with pytest.raises(TemplateError, match=said):
        chat_of(family, Engine([])).tokens.describe()


def test_a_template_whose_text_joins_a_reply_is_refused(monkeypatch):
    monkeypatch.setattr(of, "_CORPUS", ["a replyetc"] * 4)
    template = "{% for m in messages %}{{ m['content'] + 'etc' }}{% endfor %}"
    family = Family(of.byte_level(template, of.CHATML_TOKENS, "<|im_end|>"), "<|im_end|>")

    with pytest.raises(TemplateError, match="'etc.* tokenizer joins"):
        chat_of(family, Engine([])).tokens.describe()


@pytest.mark.parametrize(
    ("template", "tokens", "end"),
    [(of.GLM, of.GLM_TOKENS, "<|user|>"), (of.ENDED_LATE, of.CHATML_TOKENS, "<|im_end|>")],
)
def test_an_end_token_that_the_next_turn_begins_with_is_not_there_twice(template, tokens, end):
    family = Family(of.byte_level(template, tokens, end), end)
    engine = Engine([ids(family, f"seven{end}"), ids(family, "cut"), ids(family, "9")])
    chat = chat_of(family, engine)

    async def talk() -> None:
        for asked in ("3 + 4?", "No.", "So?"):
            await chat.ask(asked)

    asyncio.run(talk())
    said = [
        ("user", "3 + 4?"),
        ("assistant", "seven"),
        ("user", "No."),
        ("assistant", "cut"),
        ("user", "So?"),
    ]
    wanted = rendered(family, [{"role": role, "content": text} for role, text in said])
    assert list(engine.asked[2][0]) == wanted


def test_a_rows_prompt_and_token_ids_are_passed_as_they_are():
    family = FAMILIES["qwen2.5"]()
    engine = Engine([[5, 6], [7], [8]])
    chat = chat_of(family, engine)
    chat.templated = False

    async def talk() -> None:
        await chat.ask(Prompt("any text", (1, 2, 3)), stop=("x",))
        await chat.ask((9, 10))
        await chat.ask("=?")

    asyncio.run(talk())
    assert engine.asked[0] == ((1, 2, 3), 1000, ("x",), 0)
    assert engine.asked[1][0] == (1, 2, 3, 5, 6, 9, 10)
    assert engine.asked[2][0] == (1, 2, 3, 5, 6, 9, 10, 7, *ids(family, "=?"))
    assert [s.owner for s in chat.segments] == [
        "prompt",
        "policy",
        "environment",
        "policy",
        "environment",
        "policy",
    ]


def test_limits_end_a_chat_at_a_whole_turn():
    """12 tokens of response: 5 drawn, 2 given, 4 drawn leave 1, and two more given do not fit."""
    family = FAMILIES["qwen2.5"]()
    engine = Engine([[5] * 5, [6] * 4, [7]])
    chat = chat_of(family, engine, Limits(12, 100))
    chat.templated = False

    async def talk() -> list[Any]:
        return [
            await chat.ask((1, 2, 3)),
            await chat.ask((9, 10), max_tokens=4),
            await chat.ask((9, 10)),
            await chat.ask((9, 10)),
        ]

    first, second, third, fourth = asyncio.run(talk())
    assert [most for _, most, *_ in engine.asked] == [12, 4]
    assert (first.finish_reason, second.finish_reason) == ("stop", "stop")
    assert (
        third.token_ids == fourth.token_ids == ()
        and third.finish_reason == chat.finish_reason == "length"
    )
    assert len(chat.token_ids) == 3 + 5 + 2 + 4 and chat.response_left == 1 and chat.turns == 4


def test_a_full_context_is_named():
    family = FAMILIES["qwen2.5"]()
    chat = chat_of(family, Engine([[5], [6]]), Limits(50, 10))

    with pytest.raises(
        ChatError,
        match="10 tokens",
    ):
        asyncio.run(chat.ask(tuple(range(10))))

    async def talk() -> str:
        await chat.ask(tuple(range(8)))
        return (await chat.ask((1,))).finish_reason

    assert asyncio.run(talk()) == "context" and chat.context_left == 1


@pytest.mark.parametrize("content", [[], {}, [{"content": "x"}], 7, b"x", [[1]]])
def test_what_cannot_be_said_is_refused(content):
    chat = chat_of(FAMILIES["qwen2.5"](), Engine([[5]]))
    with pytest.raises(ChatError, match=r"^ask\(.*'role' and 'content'"):
        asyncio.run(chat.ask(content))


def test_an_agent_that_the_config_does_not_have_is_named():
    agents = begin_agents(chat_of(FAMILIES["qwen2.5"](), Engine([])), {"solver": AgentConfig()})
    with pytest.raises(ChatError, match="agents .*solver"):
        agents["solvr"]


def test_rewards_of_turns_are_added_to_the_last_reply():
    family = FAMILIES["qwen2.5"]()
    chat = chat_of(family, Engine([ids(family, "one"), ids(family, "two")]))

    async def talk() -> None:
        with pytest.raises(ChatError, match="no reply yet"):
            chat.reward(1.0)
        await chat.ask("first")
        chat.reward(0.5)
        chat.reward(0.25)
        await chat.ask("second")
        chat.reward(-1.0)

        for value in (float("nan"), float("inf"), 1e39):
            with pytest.raises(ChatError, match="a finite number"):
                chat.reward(value)

    asyncio.run(talk())
    assert [segment.reward for segment in chat.segments] == [0.0, 0.75, 0.0, -1.0]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_fork_begins_with_the_exact_tokens_so_far_which_are_given_there(name):
    family = FAMILIES[name]()
    end = family.tokenizer.convert_tokens_to_ids(family.end)
    replies = [[*ids(family, word), end] for word in ("7", "8", "nine", "10")]
    engine = Engine(replies)
    chat = chat_of(family, engine, Limits(60, 200))

    async def talk() -> tuple[Chat, Chat]:
        await chat.ask("what is 3 + 4?")
        one = chat.fork()
        two = chat.fork()
        assert (one.response_left, one.context_left) == (60, chat.context_left)
        await asyncio.gather(one.ask("And more?"), two.ask("And less?"))
        await chat.ask("Again.")
        return one, two

    one, two = asyncio.run(talk())
    first, *later = [prompt for prompt, *_ in engine.asked]
    for prompt in later:
        assert prompt[: len(first) + len(replies[0])] == (*first, *replies[0])
    assert [num_drawn for *_, num_drawn in engine.asked] == [0, 0, 0, len(replies[0])], (
        "of a conversation's own stream"
    )
    assert without_given(family, one) == replies[1] and without_given(family, two) == replies[2]
    assert without_given(family, chat) == [*replies[0], *replies[3]]
    assert [(each.name, each.turns) for each in (chat, one, two, two.fork())] == [
        ("", 2),
        ("1", 1),
        ("2", 1),
        ("2.1", 0),
    ]
    assert [len(each.messages) for each in (chat, one, two)] == [4, 4, 4]


def test_a_fork_with_messages_of_its_own_begins_as_the_template_renders_them():
    """Here the user takes the template's choice: thinking is stripped from the history."""
    family = FAMILIES["qwen3"]()
    drawn = ids(family, "<think>\nlet me see\n</think>\n\n7<|im_end|>")
    engine = Engine([drawn, drawn])
    chat = chat_of(family, engine)

    async def talk() -> Chat:
        await chat.ask("3 + 4?")
        rewritten = chat.fork(chat.messages)
        await rewritten.ask("Again.")
        return rewritten

    rewritten = asyncio.run(talk())
    history = [{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": "7"}]
    asked = [*history, {"role": "user", "content": "Again."}]
    assert list(engine.asked[1][0]) == rendered(family, asked)
    assert b"see" not in family.tokenizer.decode(engine.asked[1][0]).encode()
    assert [segment.owner for segment in rewritten.segments] == ["prompt", "policy"]
    assert [message["content"] for message in rewritten.messages[2:]] == [
        "Again.",
        rewritten.messages[1]["content"],
    ]
    assert without_given(family, chat) == drawn == without_given(family, rewritten)


@pytest.mark.parametrize("messages", [[], [7], [{"content": "x"}], "x"])
def test_what_is_no_history_is_refused(messages):
    with pytest.raises(ChatError, match=r"^fork\(.*'role' and 'content'"):
        chat_of(FAMILIES["qwen2.5"](), Engine([])).fork(messages)


NAMED = {
    "default": "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% "
    "endfor %}"
    "{{ '<|im_start|>' if add_generation_prompt }}",
    "tool_use": "{{ tools | length }} tools{% for m in messages %}<|im_start|>{{ m.role }}: {{ "
    "m.content }} "
    "(by tool_use)<|im_end|>{% endfor %}{{ '<|im_start|>' if add_generation_prompt }}",
}
CONDITIONAL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% if tools and "
    "m.role == 'user' %}"
    " by {{ tools[0].name }}{% endif %}{% endfor %}{{ '<|im_start|>' if add_generation_prompt }}"
)


@pytest.mark.parametrize(
    ("template", "told"),
    [(NAMED, "Again. (by tool_use)<|im_end|>"), (CONDITIONAL, "Again.<|im_end|> by add")],
)
def test_later_turns_are_rendered_with_the_tools_of_the_first(template, told):
    family = Family(of.byte_level(of.PLAIN, of.CHATML_TOKENS, "<|im_end|>"), "<|im_end|>")
    family.tokenizer.chat_template = template
    end = family.tokenizer.convert_tokens_to_ids("<|im_end|>")
    with_tools = Engine([[5, end], [6, end]])
    without = Engine([[5, end], [6, end]])
    chat = chat_of(family, with_tools)

    async def talk(chat: Chat, tools: Sequence[dict[str, str]]) -> None:
        await chat.ask("3 + 4?", tools=tools)
        await chat.ask("Again.")

    asyncio.run(talk(chat, [{"name": "add"}]))
    plain = chat_of(family, without)
    plain.tokens = chat.tokens  # which keeps what it has rendered
    asyncio.run(talk(plain, []))
    assert told in family.tokenizer.decode(with_tools.asked[1][0])
    last = family.tokenizer.decode(without.asked[1][0])
    assert "Again.<|im_end|><|im_start|>" in last and "by" not in last


def test_a_chat_asks_for_one_reply_at_a_time_and_goes_on_when_nobody_waits_for_it():
    family = FAMILIES["qwen2.5"]()

    async def talk() -> list[Any]:
        engine, answered = Engine([[5], [6]]), asyncio.Event()
        chat = chat_of(family, engine)

        async def generate(*asked: Any) -> Segment:
            await answered.wait()
            return await engine(*asked)

        chat.generate = generate
        first = asyncio.ensure_future(chat.ask((1, 2)))
        await asyncio.sleep(0)

        for same_or_other in ((1, 2), (3,)):
            with pytest.raises(ChatError, match="still waiting"):
                await chat.ask(same_or_other)

        first.cancel()
        await asyncio.wait((first,))
        answered.set()
        await chat.ask((1, 2))
        await chat.ask((3,))

        return [segment.token_ids for segment in chat.segments]

    assert asyncio.run(talk()) == [(1, 2), (5,), (3,), (6,)]


@pytest.mark.parametrize("name", ["mistral", "qwen2.5"])
def test_text_is_appended_without_a_space(name):
    """SentencePiece puts one in front of each text that it encodes."""
    family = FAMILIES[name]()
    texts = ["2 + 2=", "=?", " two", "\n\nagain", "x"]
    engine = Engine([ids(family, "4")] * 5)
    chat = chat_of(family, engine)
    chat.templated = False

    async def talk() -> None:
        for text in texts:
            await chat.ask(text)

    asyncio.run(talk())
    told = family.tokenizer.decode(engine.asked[-1][0]).strip()
    assert told.replace(" 4", "4") == "4".join(texts), "the replies' own space is theirs"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_message_that_went_through_the_template_is_refused(name):
    family = FAMILIES[name]()
    twice = str(
        family.tokenizer.apply_chat_template(
            [{"role": "user", "content": "3 + 4?"}], tokenize=False
        )
    )
    chat = chat_of(family, Engine([ids(family, "7")] * 3))

    for content in (
        twice,
        {"role": "user", "content": f"Say: {twice}"},
        [{"role": "user", "content": twice}],
    ):
        with pytest.raises(TemplatedTwice, match="message of the user holds '<"):
            asyncio.run(chat.ask(content))

    fork = chat.fork([{"role": "user", "content": twice}])
    with pytest.raises(TemplatedTwice):
        asyncio.run(fork.ask("3 + 4?"))
    assert asyncio.run(chat.ask("3 + 4?")).text.strip() == "7"
    with pytest.raises(TemplatedTwice):
        asyncio.run(chat.ask(twice))

    history = [{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": twice}]
    assert asyncio.run(chat.fork(history).ask(twice)).text.strip() == "7", "it was said before"
