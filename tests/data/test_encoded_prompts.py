"""A set of prompts: its fingerprint, and which rows are chosen."""

import pytest

from distflow.errors import UserError
from tests.data.encoding import encode, row
from tests.tiny_models import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.mark.parametrize(
    "changes",
    [
        {"answer": "b"},
        {"domain": "e"},
        {"extra_info": {"k": 1}},
        {"prompt": "q "},
        {"response": "s"},
    ],
)
def test_the_fingerprint_sees_every_part_of_a_row(tokenizer, changes):
    base = {"prompt": "q", "response": "r", "extra_info": {"k": 0}}
    assert (
        encode([row(**base)], tokenizer).fingerprint()
        == encode([row(**base)], tokenizer).fingerprint()
    )
    assert (
        encode([row(**base)], tokenizer).fingerprint()
        != encode([row(**{**base, **changes})], tokenizer).fingerprint()
    )


def test_the_fingerprint_sees_where_one_prompt_ends_and_the_order(tokenizer):
    def prints(*prompts: str) -> str:
        return encode([row(p) for p in prompts], tokenizer).fingerprint()

    assert len({prints("ab", "c"), prints("a", "bc"), prints("abc"), prints("c", "ab")}) == 4


def test_rows_are_chosen_by_their_measured_pass_rate(tokenizer):
    rows = [row(f"{rate}", pass_rate=rate) for rate in (0.0, 0.1, 0.5, 0.9, 1.0)]
    prompts = encode(rows, tokenizer, pass_rate=(0.1, 0.9))
    assert [prompt.prompt_text for prompt in prompts] == ["0.1", "0.5", "0.9"]
    assert "2 rows outside data.pass_rate left out" in prompts.report.lines()
    said = (
        r"data.domains.a.pass_rate=\[0.6, 0.7\]: of 5 rows none .*data.domains.a.pass_rate_key\) "
        r"go from 0 to 1"
    )
    with pytest.raises(UserError, match=said):
        encode(rows, tokenizer, pass_rate=(0.6, 0.7), group="data.domains.a")
