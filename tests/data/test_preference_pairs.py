"""Texts of pairs, and what both begin with, by tokenizers with and without a chat template."""

import pytest

from distflow.builtin_names import PROMPT_MESSAGES
from distflow.data.dataset_columns import RawRow
from distflow.data.preference_pairs import encode_pair, encode_text
from tests.tiny_models import EOS, tiny_tokenizer

ASKED = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "1+1?"}]


def pair(chosen: object, rejected: object, template: bool) -> tuple[str, str] | str:
    """Both texts, decoded, or why there are none."""
    tokenizer = tiny_tokenizer()
    if not template:
        tokenizer.chat_template = None
    extra = {PROMPT_MESSAGES: ASKED, "better": chosen, "worse": rejected}
    row = RawRow("rows:1", "1+1?", None, "default", None, extra)
    found = encode_pair(row, tokenizer, ("better", "worse"))
    if isinstance(found, str):
        return found

    (found,) = found
    assert found.prompt_ids and found.response_ids and found.rejected_ids

    for ids, response in ((found.response_ids, chosen), (found.rejected_ids, rejected)):
        said = response if isinstance(response, str) else response[-1]["content"]
        assert [*found.prompt_ids, *ids] == encode_text(tokenizer, ASKED, said)[0], (
            "as the reward function reads it"
        )

    return str(tokenizer.decode(found.response_ids)), str(tokenizer.decode(found.rejected_ids))


def test_what_both_texts_begin_with_is_the_prompt() -> None:
    assert pair("two", "three", True) == (f"wo{EOS}", f"hree{EOS}")
    assert pair("two", "three", False) == (f"wo{EOS}", f"hree{EOS}")
    reply = {"role": "assistant", "content": "it is 2"}
    assert pair([*ASKED, reply], "it is 3", True) == (f"2{EOS}", f"3{EOS}"), (
        "the last message is the response"
    )


def test_a_response_that_begins_the_other_keeps_its_end() -> None:
    assert pair("2", "2 or so", False) == (EOS, f" or so{EOS}")
    assert pair("2 or so", "2", False) == (f" or so{EOS}", EOS)


@pytest.mark.parametrize("bad", [None, "", [], ["2"], [{"role": "assistant"}], 2])
def test_what_is_no_response_is_named(bad: object) -> None:
    assert "the response (column 'worse') is " in str(pair("2", bad, True))
    assert pair("2", "2", True) == "the columns 'better' and 'worse' hold the same response"


def test_a_long_text_loses_its_beginning_but_for_its_start_token() -> None:
    tokenizer = tiny_tokenizer()
    whole, nothing = encode_text(tokenizer, ASKED, "two")
    ids, cut = encode_text(tokenizer, ASKED, "two", max_length=10)
    assert (nothing, cut) == (0, len(whole) - 10)
    assert ids == [whole[0], *whole[-9:]] and whole[0] == tokenizer.bos_token_id
