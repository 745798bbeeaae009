"""`ifeval` by hand from the definitions of the paper's `instructions.py`."""

import json
import time
from pathlib import Path

import pytest

from distflow.rewards.ifeval_reward import (
    INSTRUCTIONS,
    compute_loose_score,
    compute_score,
    compute_share,
    split_sentences,
)

DATA = Path(__file__).parents[4] / "shared" / "data" / "ifeval.jsonl"
FENCED = '```json\n{"a": [1, 2]}\n```'


def at_least(name, number, **others):
    return {name: number, "relation": "at least", **others}


def less_than(name, number, **others):
    return {name: number, "relation": "less than", **others}


def row(name, arguments):
    return {"instruction_id_list": [name], "kwargs": [arguments]}


# (instruction, its arguments, responses that follow it, responses that do not)
JUDGED = [
    (
        "keywords:existence",
        {"keywords": ["cat", "dog"]},
        ["A Cat and a dog.", "concatenated dogma"],  # upper or lower case, inside words too
        ["A cat.", "dogs and c a t"],
    ),
    ("keywords:existence", {"keywords": ["colou?r"]}, ["Color"], ["colo"]),  # a regular expression
    (
        "keywords:frequency",
        at_least("frequency", 2, keyword=" cat "),
        ["Cat, cat", "catcat"],
        ["cat", "c at cat"],
    ),
    ("keywords:frequency", less_than("frequency", 2, keyword="cat"), ["cat", "none"], ["cat cat"]),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["cat", "dog"]},
        ["concatenated dogma", "cats"],  # whole words only
        ["The CAT.", "hot-dog"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "E", "let_frequency": 2, "let_relation": "at least"},
        ["eE", "eee"],
        ["e", "é e"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "#", "let_frequency": 2, "let_relation": "less than"},
        ["# a", "a"],
        ["##"],
    ),
    (
        "language:response_language",
        {"language": "de"},
        # cannot be told: counts as followed
        ["Das ist ein ganz gewöhnlicher Satz über das Wetter.", "123 456"],
        ["This is quite an ordinary sentence about the weather."],
    ),
    (
        "length_constraints:number_sentences",
        at_least("num_sentences", 2),
        ["One here. Two there.", "What? Yes!"],
        ["One here", "I met Dr. Smith of Acme Inc. there.", "It costs 3.50 in all."],
    ),
    (
        "length_constraints:number_sentences",
        less_than("num_sentences", 2),
        ["On Jan. 5 we left."],
        ["One. Two."],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "a *** b", "***\na\n***\nb\n***"],  # empty at either end: not counted
        ["a\n\nb", "a\n***\nb\n***\nc", "a\n***\n***\nb"],  # empty in between: never
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 1}, ["a", "***a"], ["a***b"]),
    (
        "length_constraints:number_words",
        at_least("num_words", 3),
        ["a b c", "it's so"],
        ["a b", "a_b c"],
    ),
    ("length_constraints:number_words", less_than("num_words", 3), ["well-known"], ["a b c"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "President"},
        ["a\n\npresident, b", "a\n\n'\"President's b", "a\n\n  PRESIDENT"],
        [
            "president\n\na",
            "a\n\nthe president",
            "a\npresident",
            "a\n\npresidents",
            "a\n\npresident\n\nb",
        ],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "b"},
        ["a\n\nb\n\n"],
        ["\n\na\n\nb", "a\n\n\n\nb"],  # an empty one keeps its place: the second is `a`, or nothing
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] at [address]", "[[a]] []", "[a [b] c]d]e[]"],
        ["[name] at [address", "[a\nb] [c]", "[a [b] c]"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye.\nP.S. more", "p. s. more", "P.P.S. more"],
        ["Bye. PS more", "p.s more"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        ["P.P.S more", "p. p. s."],
        ["P.S. more", "P.P S"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "Note:"},
        ["note: this"],
        ["Nota: this"],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "- a\n  * b", "*a\n-b\n** bold", "\n\n  * a\n\n- b"],
        ["* a", "* a\n* b\n* c", "a * b\n- c", "*\n* a"],  # the last: `*` takes the line after it
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is yes.", "Well: My answer is maybe. Sorry"],
        ["My answer is yes", "my answer is no."],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* and *b*", "**a** *b*", "**a****b**"],
        ["*a* **", "*a\nb* *c*", "* * *a*"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section ", "num_sections": 2},
        ["Section 1\na\nSection 2\nb", "Section1 Section 22", "Section 1 Section 1 Section 1"],
        ["Section 1\na\nSECTION 2", "Section A\nSection B"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": 1}', FENCED, "```\n[]```", "3"],
        ['{"a": 1', "{'a': 1}", f"Here:\n{FENCED}", "[" * 100_000],
    ),
    (
        "detectable_format:title",
        {},
        ["<<a>>", "b\n<<<a>>> c"],
        ["<<>>", "<<  >>", "<a>", "<<a\n>>", ">>a<<"],
    ),
    (
        "combination:two_responses",
        {},
        ["a\n******\nb", "******a******b******"],
        ["a ****** a", "a", "a******b******c", "a************b"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Say it. "},
        ["say it.", "\n Say it.\n\nIt."],
        ["Say: Say it.", "Say  it."],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "Any questions?"},
        ["a. any questions?", '"a. Any questions?"\n', "Many questions?"],
        ["Any questions? No.", "Any questions"],
    ),
    ("startend:quotation", {}, ['"a"', ' "a" b"\n', '""'], ['"a', "'a'", "“a”", '"']),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["The WELL-KNOWN NATO", "I'M", "A 2ND"],  # `I'M` is two, `'M` is the other
        ["NATO and Otan", "WELL-KNOWN", "A 2 3"],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 1, "capital_relation": "less than"},
        ["all small"],
        ["a NATO"],
    ),
    (
        "change_case:english_capital",
        {},
        ["THIS IS QUITE AN ORDINARY SENTENCE ABOUT THE WEATHER, NO. 5."],
        [
            "This is quite an ordinary sentence.",
            "DAS IST EIN GANZ GEWÖHNLICHER SATZ ÜBER DAS WETTER.",
            "12 34",
        ],
    ),
    (
        "change_case:english_lowercase",
        {},
        ["this is quite an ordinary sentence about the weather, no. 5."],
        [
            "This is quite an ordinary sentence.",
            "das ist ein ganz gewöhnlicher satz über das wetter.",
        ],
    ),
    ("punctuation:no_comma", {}, ["a b; c", "a، b"], ["a, b", "1,000"]),
]


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), JUDGED)
def test_an_instruction(name, arguments, good, bad):
    scores = {
        text: compute_score("", text, None, row(name, arguments))["score"] for text in [*good, *bad]
    }
    assert scores == {**dict.fromkeys(good, 1.0), **dict.fromkeys(bad, 0.0)}


@pytest.mark.parametrize(
    ("name", "arguments", "response"),
    [
        ("punctuation:no_comma", {}, "42"),
        ("punctuation:no_comma", {}, "It is prime."),
        ("punctuation:no_comma", {}, "https://example.org/a?b=1"),
        ("punctuation:no_comma", {}, "Strč prst skrz krk"),
        ("detectable_format:json_format", {}, "[1, 2, 3]"),
        ("detectable_format:json_format", {}, '{"x": 1}'),
        ("length_constraints:number_sentences", at_least("num_sentences", 1), "Yes."),
        ("startend:quotation", {}, '"Brrr"'),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "- x = 1\n- x = 1"),
        ("keywords:existence", {"keywords": ["return"]}, "def f(x):\n    return x"),
    ],
)
def test_a_short_response_is_judged_by_its_instructions_alone(name, arguments, response):
    assert compute_score("", response, None, row(name, arguments))["score"] == 1.0


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_a_blank_response_follows_nothing(name):
    arguments = next(arguments for known, arguments, *_ in JUDGED if known == name)
    for blank in ("", " \n\t"):
        assert compute_score("", blank, None, row(name, arguments))["score"] == 0.0
        assert compute_loose_score("", blank, None, row(name, arguments))["score"] == 0.0


@pytest.mark.parametrize(
    ("response", "name", "arguments"),
    [
        ("Sure, here it is:\nyes no", "punctuation:no_comma", {}),  # without the first line
        ("yes no\nHope it helps, bye", "punctuation:no_comma", {}),  # without the last
        ("Sure, so:\nyes no\nHope it helps, bye", "punctuation:no_comma", {}),  # without both
        ('**"a"**', "startend:quotation", {}),  # without asterisks
        ('So:\n*"a"*\n', "startend:quotation", {}),
    ],
)
def test_loose_forgives_what_surrounds_the_answer(response, name, arguments):
    assert compute_score("", response, None, row(name, arguments))["score"] == 0.0
    assert compute_loose_score("", response, None, row(name, arguments))["score"] == 1.0


def test_loose_does_not_forgive_the_answer():
    assert (
        compute_loose_score("", "a\nb, c\nd", None, row("punctuation:no_comma", {}))["score"] == 0.0
    )


def test_all_must_be_followed_and_each_verdict_is_kept_by_name():
    asked = {
        "instruction_id_list": ["punctuation:no_comma", "startend:quotation", "startend:quotation"],
        "kwargs": [{}, {}, None],
    }
    followed = {
        "punctuation:no_comma": True,
        "startend:quotation": False,
        "startend:quotation#2": False,
    }
    assert compute_score("", "a b", None, asked) == {"score": 0.0, "acc": 0.0, "followed": followed}
    assert compute_share("", "a b", None, asked) == {
        "score": 1 / 3,
        "acc": 0.0,
        "followed": followed,
    }
    assert (
        compute_share("", '"a b"', None, asked)["score"]
        == compute_share("", '"a"', None, asked)["acc"]
        == 1.0
    )


def test_instructions_come_with_the_answer_or_with_the_row():
    other = row("punctuation:no_comma", {})
    asked = row(
        "length_constraints:number_words", at_least("num_words", 2.0, keyword=None, frequency=None)
    )
    for ground_truth, columns in (
        (asked, other),
        (json.dumps(asked), {}),
        (None, asked),
        ("7", asked),
        (None, {**asked, "kwargs": json.dumps(asked["kwargs"])}),
    ):
        assert compute_score("", "a, b", ground_truth, columns)["followed"] == {
            "length_constraints:number_words": True
        }


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "row .*'instruction_id_list'"),
        ({"instruction_id_list": [], "kwargs": []}, "needs a row"),
        ({"instruction_id_list": ["punctuation:no_comma"]}, "needs a row"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": "{"}, "needs a row"),
        (
            {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]},
            "1 entries .* and 2",
        ),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [3]}, "no mapping"),
        (row("punctuation:no_commas", {}), "'punctuation:no_commas'"),
        (row(["a"], {}), "IFEval has no instruction"),
        (row("punctuation:no_comma", {"commas": 3}), r"takes \(\), and got \(commas\)"),
        (row("length_constraints:number_words", {"num_words": 3}), "takes .num_words, relation"),
        (row("length_constraints:number_words", at_least("num_words", None)), "takes"),
        (
            row("length_constraints:number_words", at_least("num_words", "3")),
            "whole number",
        ),
        (row("length_constraints:number_words", at_least("num_words", -1)), "whole number"),
        (row("length_constraints:number_words", at_least("num_words", 2.5)), "whole number"),
        (
            row("length_constraints:number_words", at_least("num_words", float("inf"))),
            "whole number",
        ),
        (row("length_constraints:number_words", at_least("num_words", True)), "whole number"),
        (
            row("length_constraints:number_words", {"num_words": 3, "relation": "more than"}),
            "less than",
        ),
        (row("keywords:existence", {"keywords": "cat"}), "a list of strings"),
        (row("keywords:existence", {"keywords": []}), "a list of strings"),
        (row("keywords:existence", {"keywords": ["("]}), "cannot be used"),
        (row("keywords:existence", {"keywords": ["b", "("]}), "cannot be used"),
        (row("keywords:forbidden_words", {"forbidden_words": ["a", "["]}), "cannot be used"),
        (
            row("keywords:frequency", at_least("frequency", 1, keyword="*c")),
            "cannot be used",
        ),
        (
            row(
                "keywords:letter_frequency",
                {"letter": "ab", "let_frequency": 1, "let_relation": "at least"},
            ),
            "one let",
        ),
        (row("language:response_language", {"language": "xx"}), "can be detected: af, ar"),
        (row("startend:end_checker", {"end_phrase": " "}), "a text"),
        (
            row(
                "length_constraints:nth_paragraph_first_word",
                {"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "a"},
            ),
            "paragraph 3 of 2",
        ),
    ],
)
def test_instructions_that_mean_nothing_are_errors_and_no_wrong_answer(asked, message):
    for response in ("a", ""):
        with pytest.raises(ValueError, match=message):
            compute_score("", response, None, asked)


def test_verdicts_do_not_depend_on_what_langdetect_draws():
    text = "ok das is na nu"  # short and mixed: with other draws another language
    asked = row("language:response_language", {"language": "de"})
    assert len({compute_score("", text, None, asked)["score"] for _ in range(20)}) == 1


def test_sentences_are_those_of_nltk_with_its_own_model():
    assert split_sentences("1. A\n2. B\n3. ...") == ["1.", "A\n2.", "B\n3.", "..."]
    assert split_sentences("The U.S. is big. He (Mr. X) said “no.” Then he left...") == [
        "The U.S. is big.",
        "He (Mr. X) said “no.”",
        "Then he left...",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("piece", "name"),
    [
        ("[", "detectable_content:number_placeholders"),
        ("<<a ", "detectable_format:title"),
        ("*", "detectable_format:number_highlighted_sections"),
        ("\n", "detectable_format:number_bullet_lists"),
        (" ", "detectable_content:postscript"),
        ("*\n", "length_constraints:number_paragraphs"),
        ("Section ", "detectable_format:multiple_sections"),
        ('{"a":', "detectable_format:json_format"),
        ("a@", "language:response_language"),
        ("! ", "change_case:capital_word_frequency"),
    ],
)
def test_a_megabyte_is_judged_in_seconds(piece, name):
    """Each is what the original's expressions, or NLTK, take quadratic time or minutes for."""
    text = (piece * (10**6 // len(piece)))[: 10**6] + "x"
    arguments = next(arguments for known, arguments, *_ in JUDGED if known == name)
    began = time.process_time()
    compute_score("", text, None, row(name, arguments))
    assert time.process_time() - began < 5.0


@pytest.mark.skipif(not DATA.exists(), reason="wants the data sets in ../shared/data")
def test_every_row_of_the_data_set_can_be_judged():
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    reward_results = [compute_loose_score("ifeval", each["prompt"], None, each) for each in rows]
    assert all(
        len(found["followed"]) == len(each["kwargs"])
        for found, each in zip(reward_results, rows, strict=True)
    )
    repeated = [row for row in rows if row["instruction_id_list"] == ["combination:repeat_prompt"]]
    assert repeated == [] or all(
        compute_score("", row["kwargs"][0]["prompt_to_repeat"], None, row)["score"]
        for row in repeated
    )
