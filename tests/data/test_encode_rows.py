"""From rows to tokens: templates, chats, answers; checked against the tokenizer called by hand on
each row alone."""

import numpy as np
import pytest

from distflow.data.dataset_columns import BadRows, RawRow
from distflow.errors import UserError
from tests.data.encoding import encode, row
from tests.tiny_models import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def test_a_text_prompt_is_tokenised_as_it_is(tokenizer):
    (prompt,) = encode([row("1+1=")], tokenizer)
    assert prompt.prompt_text == "1+1=" and prompt.prompt_ids == tuple(
        tokenizer("1+1=")["input_ids"]
    )
    assert (prompt.ground_truth, prompt.domain, prompt.response_ids) == ("a", "d", None)
    assert prompt.extra_info == {}


def test_a_tokenizer_that_adds_a_start_token_adds_it_to_texts_and_once_to_chats():
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    (text,) = encode([row("ab")], tokenizer)
    (chat,) = encode([row("ab")], tokenizer, prompt_format="chat")
    assert text.prompt_ids == tuple(tokenizer("ab")["input_ids"]) and text.prompt_ids.count(1) == 1
    assert chat.prompt_ids[0] == 1 and chat.prompt_ids.count(1) == 1


def test_a_template_takes_the_prompt_literally(tokenizer):
    (prompt,) = encode(
        [row(r"{x} \frac{1}{2} {prompt}")], tokenizer, prompt_template="Q: {prompt} {{0}}\nA:"
    )
    assert prompt.prompt_text == "Q: {x} \\frac{1}{2} {prompt} {0}\nA:"


def test_chat_prompts_go_through_the_chat_template(tokenizer):
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "?"},
    ]
    prompts = encode(
        [row("hi"), row(messages)], tokenizer, prompt_format="chat", system_prompt="be kind"
    )

    system = {"role": "system", "content": "be kind"}
    for prompt, expected in zip(prompts, [[system, messages[0]], [system, *messages]], strict=True):
        by_hand = tokenizer.apply_chat_template(
            expected, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert prompt.prompt_ids == tuple(by_hand) and prompt.prompt_text.endswith("assistant: ")


def test_messages_are_chat_in_either_format_and_a_rows_own_system_message_wins(tokenizer):
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    chat, text = encode(
        [row(messages), row("plain")], tokenizer, prompt_format="text", system_prompt="be kind"
    )
    assert chat.prompt_text == tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert chat.prompt_text.startswith("<bos>system: own") and "be kind" not in chat.prompt_text
    assert text.prompt_text == "plain"


@pytest.mark.parametrize("thinking", [True, False])
def test_enable_thinking_reaches_the_template(thinking):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{{ messages[0]['content'] }}{% if enable_thinking %}<think>{% endif %}"
    )
    (prompt,) = encode([row("a")], tokenizer, prompt_format="chat", enable_thinking=thinking)
    assert prompt.prompt_text == ("a<think>" if thinking else "a")


def test_no_chat_template_is_the_users_error():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="data.prompt_format=chat"):
        encode([row("a")], tokenizer, prompt_format="chat")
    with pytest.raises(UserError, match=r"data\.prompt_format=text"):
        encode([row([{"role": "user", "content": "a"}])], tokenizer)
    assert len(encode([row("a")], tokenizer)) == 1


def test_messages_that_the_template_refuses_are_bad_rows():
    tokenizer = tiny_tokenizer()
    refuse = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    tokenizer.chat_template = refuse + "{{ messages[0]['content'] }}"
    rows = [
        row([{"role": "tool", "content": "a"}], origin="f:1"),
        row([{"role": "user", "content": "b"}], origin="f:2"),
    ]
    with pytest.raises(UserError, match="f:1: .* rejects .*: user first"):
        encode(rows, tokenizer)
    bad = BadRows("skip")
    prompts = encode(rows, tokenizer, bad)
    assert [prompt.prompt_text for prompt in prompts] == ["b"] and prompts.report.num_bad == 1


class TestResponses:
    def test_they_end_with_the_end_token_once(self, tokenizer):
        prompts = encode([row("q", "42"), row("q", "42<eos>")], tokenizer)
        expected = (*tokenizer("42", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
        assert [prompt.response_ids for prompt in prompts] == [
            expected,
            expected,
        ]

    def test_a_tokenizer_without_an_end_token_is_refused(self):
        tokenizer = tiny_tokenizer()
        tokenizer.eos_token = None
        with pytest.raises(UserError, match=r"no end token.*model\.tokenizer_path"):
            encode([row("q", "a")], tokenizer)


def many_rows(num_rows: int) -> list[RawRow]:
    generator = np.random.default_rng(0)
    texts = [
        "".join(map(chr, generator.integers(32, 127, size=generator.integers(1, 60))))
        for _ in range(num_rows)
    ]

    return [
        row(t if i % 3 else [{"role": "user", "content": t}], origin=f"f:{i}")
        for i, t in enumerate(texts)
    ]


@pytest.mark.slow
def test_threads_chunks_and_neighbours_change_nothing(tokenizer):
    rows = many_rows(1300)
    sets = [encode(rows, tokenizer, num_workers=number) for number in (0, 1, 4)]
    assert len({prompts.fingerprint() for prompts in sets}) == 1

    for i in (0, 1, 511, 512, 1299, -1):
        (alone,) = encode([rows[i]], tokenizer)
        assert sets[2][i].prompt_ids == alone.prompt_ids and sets[2][i].origin == rows[i].origin

    assert [prompt.index for prompt in sets[2][-3:]] == [1297, 1298, 1299]
    assert sets[2][-1].index == 1299
