"""What is learnt of a conversation: the assistant's turns with their ends, by templates of several
families. Expected texts are written by hand, with ⟦⟧ around what is learnt."""

import copy
from typing import Any

import pytest

from distflow.data.dataset_columns import BadRows, RawRow
from distflow.data.encode_rows import encode_rows
from distflow.data.encoded_prompts import PromptOptions, PromptSet
from distflow.data.messages import read_conversation
from distflow.errors import UserError
from distflow.models.loading import end_token_ids
from tests.data import chat_templates as t
from tests.tiny_models import tiny_tokenizer

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello\n\nyou"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
]
WITH_TOOLS = [
    {"role": "user", "content": "1+2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Bye"},
]
THOUGHT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>\none\n</think>\n\n2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "reasoning_content": "two", "content": "4"},
]


def chatml(template: str) -> Any:
    return t.byte_level(template, t.CHATML_TOKENS, "<|im_end|>")


TOKENIZERS = {
    "qwen2": chatml(t.QWEN2),
    "qwen3": chatml(t.QWEN3),
    "smollm2": chatml(t.SMOLLM2),
    "llama3": t.byte_level(t.LLAMA3, t.LLAMA3_TOKENS, "<|eot_id|>", "<|begin_of_text|>"),
    "mistral": t.byte_level(t.MISTRAL, t.MISTRAL_TOKENS, "</s>", "<s>"),
    "phi3": t.byte_level(t.PHI3, t.PHI3_TOKENS, "<|endoftext|>", "<s>"),
    "gemma": t.byte_level(t.GEMMA, t.GEMMA_TOKENS, "<eos>", "<bos>"),
    "phi3 in pieces": t.metaspace(t.PHI3, t.PHI3_TOKENS, "<|endoftext|>", "<s>"),
    "mistral in pieces": t.metaspace(t.MISTRAL, t.MISTRAL_TOKENS, "</s>", "<s>"),
    "characters": tiny_tokenizer(),
    "marked wide": chatml(t.MARKED_WIDE),
    "marked narrow": chatml(t.MARKED_NARROW),
    "marked last": chatml(t.MARKED_LAST),
    "marked thinking": chatml(t.MARKED_THINKING),
}


def encode(tokenizer: Any, messages: Any, bad: BadRows | None = None, **changes: Any) -> PromptSet:
    own = {name: changes.pop(name) for name in ("tools", "template_kwargs") if name in changes}
    row = RawRow(
        "f:7",
        read_conversation(messages, "messages"),
        None,
        "d",
        None,
        {},
        **own,
        is_conversation=True,
    )
    options = PromptOptions(
        **{"max_prompt_length": 500, "max_response_length": 500, "num_workers": 0, **changes}
    )

    return encode_rows([row], tokenizer, options, bad or BadRows(), end_token_ids(tokenizer))


def shown(tokenizer: Any, prompts: PromptSet) -> list[str]:
    """Each row as text, with ⟦⟧ around what is learnt."""
    return [
        tokenizer.decode(row.prompt_ids)
        + "".join(
            f"⟦{tokenizer.decode(part.token_ids)}⟧"
            if part.owner == "policy"
            else tokenizer.decode(part.token_ids)
            for part in row.answer(0)
        )
        for row in prompts
    ]


SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"
HI = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
SUM = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
CHATML = f"{SYSTEM}{HI}⟦Hello\n\nyou<|im_end|>⟧\n{SUM}⟦2<|im_end|>⟧"
HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"
LLAMA = (
    f"<|begin_of_text|>{HEAD.format('system')}Today Date: 26 Jul 2024\n\nBe brief.<|eot_id|>"
    f"{HEAD.format('user')}Hi<|eot_id|>{HEAD.format('assistant')}⟦Hello\n\nyou<|eot_id|>⟧"
    f"{HEAD.format('user')}1+1?<|eot_id|>{HEAD.format('assistant')}⟦2<|eot_id|>⟧"
)
NO_THOUGHT = "<think>\n\n</think>\n\n"
TALKS = {
    "qwen2": [CHATML],
    "smollm2": [CHATML],
    "qwen3": [
        f"{SYSTEM}{HI}{NO_THOUGHT}⟦Hello\n\nyou<|im_end|>⟧",
        f"{SYSTEM}{HI}Hello\n\nyou<|im_end|>\n{SUM}{NO_THOUGHT}⟦2<|im_end|>⟧",
    ],
    "llama3": [LLAMA],
    "phi3": [
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n⟦Hello\n\nyou<|end|>⟧\n"
        "<|user|>\n1+1?<|end|>\n<|assistant|>\n⟦2<|end|>⟧"
    ],
    "characters": [
        "<bos>system: Be brief.user: Hiassistant: ⟦Hello\n\nyou<eos>⟧user: 1+1?assistant: ⟦2<eos>⟧"
    ],
    "marked wide": [CHATML],
    "marked narrow": [CHATML],
    "marked last": [f"{SYSTEM}{HI}Hello\n\nyou<|im_end|>\n{SUM}⟦2<|im_end|>⟧"],
}


@pytest.mark.parametrize("family", TALKS)
def test_each_turn_of_the_assistant_is_learnt_with_its_end_and_nothing_else(family: str) -> None:
    tokenizer = TOKENIZERS[family]
    prompts = encode(tokenizer, TALK)
    assert shown(tokenizer, prompts) == TALKS[family]
    learnt = sum(text.count("⟦") for text in TALKS[family])
    assert (prompts.report.num_turns, prompts.report.num_texts_more) == (
        learnt,
        len(TALKS[family]) - 1,
    )


def test_without_a_system_message() -> None:
    tokenizer = TOKENIZERS["gemma"]
    first = (
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n⟦Hello\n\n"
        "you<end_of_turn>⟧\n"
    )
    second = "<start_of_turn>user\n1+1?<end_of_turn>\n<start_of_turn>model\n⟦2<end_of_turn>⟧"
    assert shown(tokenizer, encode(tokenizer, TALK[1:])) == [first + second]
    tokenizer = TOKENIZERS["mistral"]
    expected = "<s>[INST] Hi[/INST]⟦ Hello\n\nyou</s>⟧[INST] 1+1?[/INST]⟦ 2</s>⟧"
    assert shown(tokenizer, encode(tokenizer, TALK[1:])) == [expected]


SCHEMA = '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}'
CALLED = '⟦<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>⟧\n'
ANSWERED = (
    "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
THANKS = "<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n"


def test_calls_of_tools_are_learnt_and_their_results_are_not() -> None:
    tokenizer = TOKENIZERS["qwen2"]
    asked = "<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n"
    head = f"<|im_start|>system\nYou are Qwen.\n\n# Tools\n<tools>\n{SCHEMA}\n</tools><|im_end|>\n"
    expected = f"{head}{asked}{CALLED}{ANSWERED}⟦It is 3.<|im_end|>⟧\n{THANKS}⟦Bye<|im_end|>⟧"
    assert shown(tokenizer, encode(tokenizer, WITH_TOOLS, tools=TOOLS)) == [expected]
    as_text = copy.deepcopy(WITH_TOOLS)
    as_text[1]["tool_calls"][0]["function"]["arguments"] = '{"a": 1}'
    assert shown(tokenizer, encode(tokenizer, as_text, tools=TOOLS)) == [expected], (
        "as OpenAI writes arguments"
    )


def test_a_call_may_end_with_a_token_of_its_own() -> None:
    tokenizer = TOKENIZERS["llama3"]
    (text,) = shown(
        tokenizer,
        encode(tokenizer, WITH_TOOLS, tools=TOOLS, template_kwargs={"builtin_tools": ["x"]}),
    )
    assert '⟦{"name": "add", "parameters": {"a": 1}}<|eom_id|>⟧' in text and text.endswith(
        "⟦Bye<|eot_id|>⟧"
    )


def test_tools_that_move_make_two_rows() -> None:
    tokenizer = TOKENIZERS["mistral"]
    tools = f"[AVAILABLE_TOOLS] [{SCHEMA}][/AVAILABLE_TOOLS]"
    call = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]'
    result = '[TOOL_RESULTS] {"content": 3}[/TOOL_RESULTS]'
    first = f"<s>{tools}[INST] 1+2?[/INST]⟦{call}</s>⟧{result}⟦ It is 3.</s>⟧"
    second = (
        f"<s>[INST] 1+2?[/INST]{call}</s>{result} It is 3.</s>{tools}[INST] Thanks[/INST]⟦ Bye</s>⟧"
    )
    assert shown(tokenizer, encode(tokenizer, WITH_TOOLS, tools=TOOLS)) == [first, second]


def test_thinking_is_learnt_in_the_turn_where_it_was_thought() -> None:
    tokenizer = TOKENIZERS["qwen3"]
    second = SUM.replace("1+1", "2+2")
    expected = [
        f"{SUM}⟦<think>\none\n</think>\n\n2<|im_end|>⟧",
        f"{SUM}2<|im_end|>\n{second}⟦<think>\ntwo\n</think>\n\n4<|im_end|>⟧",
    ]
    assert shown(tokenizer, encode(tokenizer, THOUGHT, enable_thinking=True)) == expected
    assert (
        shown(tokenizer, encode(tokenizer, THOUGHT, template_kwargs={"enable_thinking": True}))
        == expected
    )

    with pytest.raises(
        UserError,
        match=r"f:7: .* prompts turn 1 .*data\.enable_thinking=true",
    ):
        encode(tokenizer, THOUGHT)


def test_marks_of_the_template_keep_a_conversation_in_one_row() -> None:
    tokenizer = TOKENIZERS["marked thinking"]
    talk = [*THOUGHT[:3], {"role": "assistant", "content": "<think>two</think>4"}]
    second = SUM.replace("1+1", "2+2")
    assert shown(tokenizer, encode(tokenizer, talk)) == [
        f"{SUM}⟦2<|im_end|>⟧\n{second}⟦<think>two</think>4<|im_end|>⟧"
    ]


KNOW_TOOLS = ("qwen2", "qwen3", "llama3", "mistral", "mistral in pieces")


@pytest.mark.parametrize(
    ("family", "messages", "tools"),
    [
        *((name, TALK[1:], []) for name in TOKENIZERS),
        *((name, WITH_TOOLS, TOOLS) for name in KNOW_TOOLS),
    ],
)
def test_tokens_are_those_of_the_whole_conversation_at_once(
    family: str, messages: Any, tools: Any
) -> None:
    tokenizer = TOKENIZERS[family]
    kwargs = {"tools": tools or None, "return_dict": False, "enable_thinking": False}
    asked = [
        tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, **kwargs)
        for i, message in enumerate(messages)
        if message["role"] == "assistant"
    ]

    rows = list(encode(tokenizer, messages, tools=tools))
    for row in rows:
        ids = [*row.prompt_ids, *row.response_ids]
        assert ids[: len(row.prompt_ids) + row.turns[-1][0]] in asked, (
            "a turn is learnt as it is asked for"
        )

    whole = tokenizer.apply_chat_template(messages, **kwargs)
    rest = tokenizer.decode(whole[len(ids) :]).replace("<|endoftext|>", "")
    assert ids == whole[: len(ids)] and not rest.strip()


FAULTS = {
    "a template that drops calls": (
        t.SMOLLM2,
        WITH_TOOLS,
        [],
        "the chat template does not use tool_calls",
    ),
    "a template that drops tools": (t.SMOLLM2, TALK, TOOLS, "the chat template does not use tools"),
    "marks on the user": (t.MARKED_USER, TALK, [], "marks 'Hi' as generated, but it is in no turn"),
    "marks on nothing": (t.MARKED_NEVER, TALK, [], "marks nothing of it as generated"),
    "a template that raises": (t.GEMMA, TALK, [], "rejects the messages: no system role"),
    "no end": (
        t.SMOLLM2.replace("<|im_end|>", ""),
        TALK,
        [],
        r"without a token that ends it \(<\|im_end\|>\)",
    ),
    "an end far away": (
        t.SMOLLM2.replace("'<|im_end|>'", "'. '"),
        TALK,
        [],
        "ends turn 1 .*eos_token",
    ),
    "a marked turn without an end": (
        t.MARKED_NARROW.replace("'<|im_end|>\n'", "'\n'"),
        TALK,
        [],
        "without a token",
    ),
    "a prompt that ends within a token": (
        t.SMOLLM2,
        [*TALK[:-1], {"role": "assistant", "content": "\n2"}],
        [],
        "turn 2 .* inside a token",
    ),
    "an end within a turn": (
        t.QWEN2,
        [*TALK[:-1], {"role": "assistant", "content": "say <|im_end|> and stop"}],
        [],
        r"message 5, .*'<\|im_end\|>'",
    ),
    "a turn of nothing": (
        t.SMOLLM2.replace("message['content']", "''"),
        TALK,
        [],
        "writes nothing of turn 1",
    ),
    "a system message that moves": (
        t.MISTRAL,
        TALK,
        [],
        "prompts turn 1 .* system message",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_what_cannot_be_learnt_as_it_is_asked_for_is_a_bad_row(what: str) -> None:
    template, messages, tools, said = FAULTS[what]
    tokens = t.MISTRAL_TOKENS if template == t.MISTRAL else t.CHATML_TOKENS
    tokenizer = t.byte_level(template, tokens, tokens[1], tokens[0])
    with pytest.raises(UserError, match=f"^1 bad row:\n  f:7: .*{said}"):
        encode(tokenizer, messages, tools=tools)
    with pytest.raises(UserError, match=f"^all rows are bad .* f:7: .*{said}"):
        encode(tokenizer, messages, BadRows("skip"), tools=tools)


def test_arguments_of_the_template_come_from_the_row_then_from_the_config() -> None:
    tokenizer = TOKENIZERS["llama3"]
    (own,) = encode(tokenizer, TALK[1:], template_kwargs={"date_string": "today"})
    assert "Today Date: today\n" in own.prompt_text
    options = PromptOptions(
        500, 500, template_kwargs={"date_string": "then", "builtin_tools": []}, num_workers=0
    )
    rows = [
        RawRow("f:1", TALK[:2], None, "d", None, {}, template_kwargs=own)
        for own in ({}, {"date_string": "now"})
    ]
    then, now = encode_rows(rows, tokenizer, options, BadRows())
    assert "Today Date: then\n" in then.prompt_text and "Today Date: now\n" in now.prompt_text


def test_arguments_that_nothing_reads_are_refused() -> None:
    options = PromptOptions(500, 500, template_kwargs={"date_sting": "then"})
    rows = [RawRow("f:1", TALK[:2], None, "d", None, {})]

    with pytest.raises(UserError, match=r"apply_chat_template_kwargs\.date_sting .*'date_sting'"):
        encode_rows(rows, TOKENIZERS["llama3"], options, BadRows())

    with pytest.raises(
        UserError, match=r"apply_chat_template_kwargs\.date_sting .*data\.prompt_format"
    ):
        encode_rows(
            [RawRow("f:1", "1+1", None, "d", None, {})], TOKENIZERS["llama3"], options, BadRows()
        )


def test_tools_reach_the_prompts_of_rl() -> None:
    tokenizer = TOKENIZERS["qwen2"]
    rows = [RawRow("f:1", "1+2?", "3", "d", None, {}, tools=TOOLS)]
    (prompt,) = encode_rows(
        rows, tokenizer, PromptOptions(500, 500, prompt_format="chat"), BadRows()
    )
    asked = [{"role": "user", "content": "1+2?"}]
    by_hand = tokenizer.apply_chat_template(
        asked, tools=TOOLS, add_generation_prompt=True, return_dict=False
    )
    assert list(prompt.prompt_ids) == by_hand and SCHEMA in prompt.prompt_text


class TestLengths:
    def test_a_conversation_that_is_too_long_is_left_out_and_counted(self) -> None:
        tokenizer = TOKENIZERS["characters"]
        with pytest.raises(
            UserError, match="none of 1 .*max_prompt_length=500 .*37 tokens.*max_response_length=20"
        ):
            encode(tokenizer, TALK, max_response_length=20)

    @pytest.mark.parametrize(
        ("limit", "learnt"),
        [
            (40, ["Hello\n\nyou<eos>", "2<eos>"]),
            (33, ["Hello\n\nyou<eos>", "2"]),
            (20, ["Hello\n\nyou<eos>"]),
            (5, ["Hello"]),
        ],
    )
    def test_or_cut_with_its_turns(self, limit: int, learnt: list[str]) -> None:
        tokenizer = TOKENIZERS["characters"]
        cut = {"filter_overlong": False, "truncation": "left", "max_response_length": limit}
        (row,) = encode(tokenizer, TALK, **cut)
        assert [tokenizer.decode(row.response_ids[a:b]) for a, b in row.turns] == learnt
        assert row.turns[-1][1] == len(row.response_ids) <= limit

    def test_or_refused(self) -> None:
        with pytest.raises(
            UserError,
            match=r"f:7: .* 34 tokens, .*data\.max_response_length=20",
        ):
            encode(TOKENIZERS["characters"], TALK, filter_overlong=False, max_response_length=20)


def test_messages_that_are_kept_for_a_reward_are_no_other_data() -> None:
    asked = [{"role": "user", "content": "1+1?"}]
    rows = [RawRow("f:1", asked, "2", "d", None, {"level": 1})]

    sets = []
    for kept in (False, True):
        options = PromptOptions(99, 99, keep_chats=kept, keep_messages=kept, num_workers=0)
        sets.append(encode_rows(rows, TOKENIZERS["qwen2"], options, BadRows()))

    assert sets[0][0].extra_info != sets[1][0].extra_info
    assert sets[0].fingerprint() == sets[1].fingerprint()


def test_the_fingerprint_sees_which_part_is_learnt() -> None:
    every, last = (encode(TOKENIZERS[name], TALK) for name in ("marked narrow", "marked last"))
    ids = [(*row.prompt_ids, *row.response_ids) for prompts in (every, last) for row in prompts]
    assert ids[0] == ids[1] and every.fingerprint() != last.fingerprint()
