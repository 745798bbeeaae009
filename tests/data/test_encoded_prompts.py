"""A set of prompts: its fingerprint, and which rows are chosen."""

import pytest

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
