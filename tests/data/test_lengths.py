"""Prompts and answers that are too long are left out, cut or refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.data.encode_rows import truncated
from distflow.errors import UserError
from tests.data.encoding import encode, row
from tests.tiny_models import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


class TestLengths:
    rows = [
        row("x" * 5, origin="f:1"),
        row("y" * 11, origin="f:2"),
        row("abcdefghijkl", origin="f:3"),
    ]

    def test_prompts_that_are_too_long_are_left_out_and_counted(self, tokenizer):
        prompts = encode(self.rows, tokenizer, max_prompt_length=10)
        assert [prompt.origin for prompt in prompts] == ["f:1"] and prompts[0].index == 0
        assert (
            prompts.report.num_rows,
            prompts.report.num_overlong_prompts,
            prompts.report.longest_prompt_tokens,
        ) == (
            1,
            2,
            5,
        )
        assert "2 overlong prompts left out" in prompts.report.lines()

    def test_the_limit_itself_is_not_too_long(self, tokenizer):
        prompts = encode(self.rows, tokenizer, max_prompt_length=12)
        assert len(prompts) == 3 and prompts.report.longest_prompt_tokens == 12
        assert len(encode(self.rows, tokenizer, max_prompt_length=11)) == 2

    @pytest.mark.parametrize(
        ("side", "text"), [("left", "hijkl"), ("right", "abcde"), ("middle", "abjkl")]
    )
    def test_or_cut_on_the_side_that_is_named(self, tokenizer, side, text):
        prompts = encode(
            self.rows, tokenizer, max_prompt_length=5, filter_overlong=False, truncation=side
        )
        assert prompts[2].prompt_text == text and prompts[2].prompt_ids == tuple(
            tokenizer(text)["input_ids"]
        )
        assert prompts[0].prompt_text == "xxxxx" and prompts.report.num_truncated == 2

    def test_or_refused(self, tokenizer):
        with pytest.raises(UserError, match=r"f:2: .* 11 tokens, .*data\.max_prompt_length=10"):
            encode(
                self.rows,
                tokenizer,
                max_prompt_length=10,
                filter_overlong=False,
                truncation="error",
            )

    def test_nothing_left_is_the_users_error(self, tokenizer):
        with pytest.raises(
            UserError,
            match="none of 3 .*max_prompt_length=4 .* 5 tokens",
        ):
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


def test_responses_that_are_too_long_are_left_out_cut_or_refused(tokenizer):
    rows = [row("q", "1234"), row("q", "12345", origin="f:9")]
    kept = encode(rows, tokenizer, max_response_length=5)
    assert len(kept) == 1 and kept.report.num_overlong_responses == 1
    cut = encode(rows, tokenizer, max_response_length=5, filter_overlong=False, truncation="left")
    assert (
        cut[1].response_ids == tuple(tokenizer("12345")["input_ids"]) and cut[1].prompt_text == "q"
    )

    with pytest.raises(UserError, match=r"f:9: .* 6 tokens, .*data\.max_response_length=5"):
        encode(rows, tokenizer, max_response_length=5, filter_overlong=False)
