"""From rows to tokens: templates, chats, lengths; checked against the tokenizer called by hand on each row alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.config.errors import UserError
from distflow.data.lengths import truncated
from distflow.data.prompts import PromptOptions, PromptSet
from distflow.data.rows import BadRows, RawRow
from distflow.data.tokenising import encode_rows
from tests.tiny_models import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def row(prompt, response: str | None = None, **changes) -> RawRow:
    values = {"origin": "f:1", "answer": "a", "domain": "d", "extra_info": {}}
    return RawRow(prompt=prompt, response=response, **{**values, **changes})


def encode(rows, tokenizer, bad: BadRows | None = None, **options) -> PromptSet:
    options = {"max_prompt_length": 100, "max_response_length": 100, **options}
    return encode_rows(rows, tokenizer, PromptOptions(**options), bad or BadRows())


def test_a_text_prompt_is_tokenised_as_it_is(tokenizer):
    (prompt,) = encode([row("1+1=")], tokenizer)
    assert prompt.prompt_text == "1+1=" and prompt.prompt_ids == tuple(tokenizer("1+1=")["input_ids"])
    assert (prompt.ground_truth, prompt.domain, prompt.response_ids) == ("a", "d", None)


def test_a_tokenizer_that_adds_a_start_token_adds_it_to_texts_and_once_to_chats():
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    (text,) = encode([row("ab")], tokenizer)
    (chat,) = encode([row("ab")], tokenizer, prompt_format="chat")
    assert text.prompt_ids == tuple(tokenizer("ab")["input_ids"]) and text.prompt_ids.count(1) == 1
    assert chat.prompt_ids[0] == 1 and chat.prompt_ids.count(1) == 1


def test_a_template_takes_the_prompt_literally(tokenizer):
    (prompt,) = encode([row(r"{x} \frac{1}{2} {prompt}")], tokenizer, prompt_template="Q: {prompt} {{0}}\nA:")
    assert prompt.prompt_text == "Q: {x} \\frac{1}{2} {prompt} {0}\nA:"


def test_a_template_without_a_place_is_refused(tokenizer):
    with pytest.raises(UserError, match="data.prompt_template has no {prompt}"):
        encode([row("a")], tokenizer, prompt_template="Q: A:")


def test_chat_prompts_go_through_the_chat_template(tokenizer):
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "?"},
    ]
    prompts = encode([row("hi"), row(messages)], tokenizer, prompt_format="chat", system_prompt="be kind")
    system = {"role": "system", "content": "be kind"}
    for prompt, expected in zip(prompts, [[system, messages[0]], [system, *messages]], strict=True):
        by_hand = tokenizer.apply_chat_template(expected, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert prompt.prompt_ids == tuple(by_hand) and prompt.prompt_text.endswith("assistant: ")


def test_messages_are_chat_in_either_format_and_a_rows_own_system_message_wins(tokenizer):
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    chat, text = encode([row(messages), row("plain")], tokenizer, prompt_format="text", system_prompt="be kind")
    assert chat.prompt_text == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.prompt_text.startswith("<bos>system: own") and "be kind" not in chat.prompt_text
    assert text.prompt_text == "plain"


@pytest.mark.parametrize("thinking", [True, False])
def test_enable_thinking_reaches_the_template(thinking):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if enable_thinking %}<think>{% endif %}"
    (prompt,) = encode([row("a")], tokenizer, prompt_format="chat", enable_thinking=thinking)
    assert prompt.prompt_text == ("a<think>" if thinking else "a")


def test_no_chat_template_is_the_users_error():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="data.prompt_format=chat"):
        encode([row("a")], tokenizer, prompt_format="chat")
    with pytest.raises(UserError, match="the prompts are chat messages"):
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
    with pytest.raises(UserError, match="f:1: the chat template refuses the messages: user first"):
        encode(rows, tokenizer)
    bad = BadRows("skip")
    prompts = encode(rows, tokenizer, bad)
    assert [prompt.prompt_text for prompt in prompts] == ["b"] and prompts.report.num_bad == 1


class TestLengths:
    rows = [row("x" * 5, origin="f:1"), row("y" * 11, origin="f:2"), row("abcdefghijkl", origin="f:3")]

    def test_prompts_that_are_too_long_are_left_out_and_counted(self, tokenizer):
        prompts = encode(self.rows, tokenizer, max_prompt_length=10)
        assert [prompt.origin for prompt in prompts] == ["f:1"] and prompts[0].index == 0
        assert (prompts.report.num_rows, prompts.report.num_overlong_prompts, prompts.report.longest_prompt_tokens) == (
            1,
            2,
            5,
        )
        assert "2 over-long prompts left out" in prompts.report.lines()

    def test_the_limit_itself_is_not_too_long(self, tokenizer):
        assert len(encode(self.rows, tokenizer, max_prompt_length=12)) == 3
        assert len(encode(self.rows, tokenizer, max_prompt_length=11)) == 2

    @pytest.mark.parametrize(("side", "text"), [("left", "hijkl"), ("right", "abcde"), ("middle", "abjkl")])
    def test_or_cut_on_the_side_that_is_named(self, tokenizer, side, text):
        prompts = encode(self.rows, tokenizer, max_prompt_length=5, filter_overlong=False, truncation=side)
        assert prompts[2].prompt_text == text and prompts[2].prompt_ids == tuple(tokenizer(text)["input_ids"])
        assert prompts[0].prompt_text == "xxxxx" and prompts.report.num_truncated == 2

    def test_or_refused(self, tokenizer):
        with pytest.raises(UserError, match="f:2: the prompt has 11 tokens, more than data.max_prompt_length=10"):
            encode(self.rows, tokenizer, max_prompt_length=10, filter_overlong=False, truncation="error")

    def test_nothing_left_is_the_users_error(self, tokenizer):
        with pytest.raises(UserError, match="none of 3 rows .*max_prompt_length=4 .the shortest prompt has 5 tokens"):
            encode(self.rows, tokenizer, max_prompt_length=4)

    @given(
        st.lists(st.integers(0, 99), min_size=0, max_size=30),
        st.integers(1, 30),
        st.sampled_from(["left", "right", "middle"]),
    )
    def test_cutting_keeps_order_and_length(self, ids, limit, side):
        cut = list(truncated(ids, limit, side))
        assert len(cut) == min(len(ids), limit)
        position = iter(ids)
        assert all(token in position for token in cut), "a subsequence"
        if len(ids) > limit and side == "middle" and limit > 1:
            assert cut[0] == ids[0] and cut[-1] == ids[-1]


class TestResponses:
    def test_they_end_with_the_end_token_once(self, tokenizer):
        prompts = encode([row("q", "42"), row("q", "42<eos>")], tokenizer)
        expected = (*tokenizer("42", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
        assert prompts.has_responses and [prompt.response_ids for prompt in prompts] == [expected, expected]

    def test_those_that_are_too_long_are_left_out_cut_or_refused(self, tokenizer):
        rows = [row("q", "1234"), row("q", "12345", origin="f:9")]
        kept = encode(rows, tokenizer, max_response_length=5)
        assert len(kept) == 1 and kept.report.num_overlong_responses == 1
        cut = encode(rows, tokenizer, max_response_length=5, filter_overlong=False, truncation="left")
        assert cut[1].response_ids == tuple(tokenizer("12345")["input_ids"]) and cut[1].prompt_text == "q"
        with pytest.raises(UserError, match="f:9: the response has 6 tokens, more than data.max_response_length=5"):
            encode(rows, tokenizer, max_response_length=5, filter_overlong=False)

    def test_a_tokenizer_without_an_end_token_is_refused(self):
        tokenizer = tiny_tokenizer()
        tokenizer.eos_token = None
        with pytest.raises(UserError, match="no end token"):
            encode([row("q", "a")], tokenizer)


def many_rows(num_rows: int) -> list[RawRow]:
    generator = np.random.default_rng(0)
    texts = ["".join(map(chr, generator.integers(32, 127, size=generator.integers(1, 60)))) for _ in range(num_rows)]
    return [row(t if i % 3 else [{"role": "user", "content": t}], origin=f"f:{i}") for i, t in enumerate(texts)]


def test_threads_chunks_and_neighbours_change_nothing(tokenizer):
    rows = many_rows(1300)
    sets = [encode(rows, tokenizer, num_workers=number) for number in (0, 1, 4)]
    assert len({prompts.fingerprint() for prompts in sets}) == 1
    for i in (0, 1, 511, 512, 1299, -1):
        (alone,) = encode([rows[i]], tokenizer)
        assert sets[2][i].prompt_ids == alone.prompt_ids and sets[2][i].origin == rows[i].origin
    assert [prompt.index for prompt in sets[2][-3:]] == [1297, 1298, 1299]
    assert sets[2][-1].index == 1299


@pytest.mark.parametrize(
    "changes", [{"answer": "b"}, {"domain": "e"}, {"extra_info": {"k": 1}}, {"prompt": "q "}, {"response": "s"}]
)
def test_the_fingerprint_sees_every_part_of_a_row(tokenizer, changes):
    base = {"prompt": "q", "response": "r", "extra_info": {"k": 0}}
    assert encode([row(**base)], tokenizer).fingerprint() == encode([row(**base)], tokenizer).fingerprint()
    assert (
        encode([row(**base)], tokenizer).fingerprint() != encode([row(**{**base, **changes})], tokenizer).fingerprint()
    )


def test_the_fingerprint_sees_where_one_prompt_ends_and_the_order(tokenizer):
    def prints(*prompts: str) -> str:
        return encode([row(p) for p in prompts], tokenizer).fingerprint()

    assert len({prints("ab", "c"), prints("a", "bc"), prints("abc"), prints("c", "ab")}) == 4


def test_rows_are_chosen_by_their_measured_pass_rate(tokenizer):
    rows = [row(f"{rate}", pass_rate=rate) for rate in (0.0, 0.1, 0.5, 0.9, 1.0)]
    prompts = encode(rows, tokenizer, pass_rate=(0.1, 0.9))
    assert [prompt.prompt_text for prompt in prompts] == ["0.1", "0.5", "0.9"]
    assert "2 rows outside of data.pass_rate left out" in prompts.report.lines()
    said = r"data.domains.a.pass_rate=\[0.6, 0.7\]: of 5 rows none .*data.domains.a.pass_rate_key\) go from 0 to 1"
    with pytest.raises(UserError, match=said):
        encode(rows, tokenizer, pass_rate=(0.6, 0.7), group="data.domains.a")
