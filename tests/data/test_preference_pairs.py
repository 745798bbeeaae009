"""Texts of pairs, and what both begin with, by tokenizers with and without a chat template; and
pairs of a policy in each form of their columns."""

from typing import Any

import pytest

from distflow.builtin_names import PROMPT_MESSAGES
from distflow.data.dataset_columns import BadRows, Columns, RawRow, read_rows
from distflow.data.encode_rows import encode_rows
from distflow.data.encoded_prompts import PromptOptions, PromptRow, Turns, UnusableRow
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
    assert pair([reply], "it is 3", True) == (f"2{EOS}", f"3{EOS}")


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


def policy_pair(
    row: dict[str, Any], names: tuple[str, str] = ("chosen", "rejected"), **options: Any
) -> PromptRow | str:
    """The row as a policy learns from it, or why it cannot."""
    columns = Columns(answer_required=False, pair=names, is_chat=options.get("chat", False))
    bad = BadRows("skip")
    rows = list(read_rows([("rows:1", row)], columns, bad, None))
    if bad.reasons:
        return bad.reasons[0]

    wanted = PromptOptions(99, 99, "chat" if columns.is_chat else "text", pair=names, num_workers=0)
    try:
        (found,) = encode_rows(rows, tiny_tokenizer(), wanted, bad)
    except UnusableRow as error:
        return str(error)
    return found


def shown(found: PromptRow | str) -> tuple[str, str, str]:
    assert isinstance(found, PromptRow), found
    parts = (found.prompt_ids, found.response_ids, found.rejected_ids)
    prompt, chosen, rejected = (str(tiny_tokenizer().decode(list(ids or ()))) for ids in parts)
    return prompt, chosen, rejected


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


HELLO = say("user", "hi")
GOOD = say("assistant", "hello")
BAD = say("assistant", "go away")
CHAT = "<bos>user: hiassistant: "


def test_texts_follow_a_text_prompt() -> None:
    found = policy_pair({"prompt": "1+1=", "chosen": "2", "rejected": "2 or so"})
    assert shown(found) == ("1+1=", f"2{EOS}", f"2 or so{EOS}")
    assert policy_pair({"chosen": "1+1= 2", "rejected": "1+1= 3"}).prompt_text == "1+1="


def scored_pair(row: dict[str, Any]) -> tuple[str, str, str]:
    """The row as a reward model learns from it."""
    names = ("chosen", "rejected")
    bad = BadRows("fail")
    rows = list(read_rows([("rows:1", row)], Columns(answer_required=False, pair=names), bad, None))
    wanted = PromptOptions(
        99, 99, "text", pair=names, scores_pairs=True, keep_messages=True, num_workers=0
    )
    (found,) = encode_rows(rows, tiny_tokenizer(), wanted, bad)
    return shown(found)


def test_a_reward_model_reads_chats_in_each_form() -> None:
    said = [HELLO, GOOD, say("user", "and you?"), say("assistant", "fine")]
    expected = (
        CHAT,
        f"hello{EOS}user: and you?assistant: fine{EOS}",
        f"go away{EOS}",
    )
    assert scored_pair({"prompt": [HELLO], "chosen": said[1:], "rejected": "go away"}) == expected
    assert scored_pair({"chosen": said, "rejected": [HELLO, BAD]}) == expected
    assert scored_pair({"prompt": "hi", "chosen": said, "rejected": [HELLO, BAD]}) == expected


def test_the_answer_may_be_the_chosen_response() -> None:
    row = {"prompt": "1+1=", "answer": "2", "rejected": "3"}
    assert shown(policy_pair(row, ("answer", "rejected"))) == ("1+1=", f"2{EOS}", f"3{EOS}")


def test_chats_in_each_form_are_the_same_pair() -> None:
    """The prompt apart, within both responses, both ways, or as a text of its own."""
    forms = (
        {"prompt": [HELLO], "chosen": "hello", "rejected": "go away"},
        {"prompt": [HELLO], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [HELLO], "chosen": [HELLO, GOOD], "rejected": [HELLO, BAD]},
        {"chosen": [HELLO, GOOD], "rejected": [HELLO, BAD]},
        {"prompt": "hi", "chosen": [HELLO, GOOD], "rejected": [HELLO, BAD]},
    )
    for row in forms:
        found = policy_pair(row)
        assert shown(found) == (CHAT, f"hello{EOS}", f"go away{EOS}")
        assert (found.turns, found.rejected_turns) == (None, None)

    row = {"prompt": "hi", "chosen": "hello", "rejected": "go away"}
    assert shown(policy_pair(row, chat=True)) == (CHAT, f"hello{EOS}", f"go away{EOS}")


def test_only_turns_after_the_prompt_are_trained_on() -> None:
    """Turns of the assistant in the prompt are not, and of a longer response only its own are."""
    asked = [HELLO, GOOD, say("user", "more")]
    longer = [BAD, say("user", "why"), say("assistant", "so")]
    found = policy_pair({"prompt": asked, "chosen": [GOOD], "rejected": longer})
    prompt, chosen, rejected = shown(found)
    assert prompt == f"{CHAT}hello{EOS}user: moreassistant: "
    assert chosen == f"hello{EOS}" and found.turns is None
    assert rejected == f"go away{EOS}user: whyassistant: so{EOS}"
    places = [rejected[start:end] for start, end in spans_of(found.rejected_turns or ())]
    assert places == [f"go away{EOS}", f"so{EOS}"]


def spans_of(turns: Turns) -> list[tuple[int, int]]:
    """As places in the text, where each end token has five characters."""
    more = len(EOS) - 1
    return [(start + more * n, end + more * (n + 1)) for n, (start, end) in enumerate(turns)]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "the same response"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "'rejected'"),
        ({"prompt": "a", "chosen": None, "rejected": "b"}, "'chosen'"),
        ({"prompt": [HELLO], "chosen": [], "rejected": [BAD]}, "'chosen'"),
        ({"prompt": [HELLO], "chosen": [GOOD], "rejected": [{"role": "assistant"}]}, "rejected"),
        ({"prompt": "a", "chosen": [GOOD], "rejected": [BAD]}, "'a'"),
        ({"chosen": "b", "rejected": "c"}, "'prompt'"),
        ({"chosen": [say("user", "a"), GOOD], "rejected": [HELLO, BAD]}, "prompts differ"),
        ({"prompt": "bye", "chosen": [HELLO, GOOD], "rejected": [HELLO, BAD]}, "'bye'"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "score_chosen": 2, "score_rejected": 3},
            "swapped: score_chosen is 2, but score_rejected is 3",
        ),
    ],
)
def test_what_is_no_pair_of_a_policy_is_named(row: dict[str, Any], why: str) -> None:
    found = policy_pair(row)
    assert isinstance(found, str) and why in found and "rows:1" in found
