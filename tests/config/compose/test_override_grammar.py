"""The grammar of overrides: what a line sets, and which lines are refused."""

import pytest

from distflow.config.compose.override_grammar import Unreadable, parse_override, quote

VALUES: dict[str, object] = {
    "": "",
    "null": None,
    "True": True,
    "false": False,
    "3": 3,
    "-1_000": -1000,
    "1e-6": 1e-6,
    ".5": 0.5,
    "1.": 1.0,
    "1e": "1e",
    "0x10": "0x10",
    "010": "010",
    " 1": 1,
    "~/runs/x": "~/runs/x",
    "two words ": "two words",
    "a:b": "a:b",
    "'3'": "3",
    '"a, b"': "a, b",
    r"'it\'s'": "it's",
    r"'C:\\'": "C:\\",
    r"'\d+'": r"\d+",
    r"a\,b": "a,b",
    "[]": [],
    "[a, 'b c', [1, null]]": ["a", "b c", [1, None]],
    "{}": {},
    "{a: 1, 2: {b: [c d]}, 'e,f': true}": {"a": 1, 2: {"b": ["c d"]}, "e,f": True},
    "${a.b}": "${a.b}",
    "[${a.${b}}/c, d]": ["${a.${b}}/c", "d"],
    "Say (a, b)": "Say (a, b)",
    "1,2": "1,2",
}


@pytest.mark.parametrize("text", VALUES)
def test_a_value(text):
    value = parse_override(f"a.b={text}").value
    assert value == VALUES[text] and type(value) is type(VALUES[text])


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_a_key(sign):
    override = parse_override(f"{sign}a.b_c=1")
    assert (override.key, override.deletes) == ("a.b_c", False)


@pytest.mark.parametrize("line", ["~a.b", "~a.b=1"])
def test_a_deleted_key(line):
    assert parse_override(line).key == "a.b" and parse_override(line).deletes


@pytest.mark.parametrize(
    "line",
    ["a", "a =1", "a==1", "a=[1", "a=[1}", "a={a: 1", "a={a}", "a='x", "a=[a b[c]]"]
    + ["a=[1] x", "a=[1],[2]", "a='a','b'", "a=[,]", "a={a: }", "a=${b", "=1", "a b=1"],
)
def test_a_line_that_is_none(line):
    with pytest.raises(Unreadable):
        parse_override(line)


def test_a_name_that_is_there_twice():
    with pytest.raises(Unreadable, match="a twice"):
        parse_override("x={a: 1, b: {}, a: 2}")


@pytest.mark.parametrize("text", ["", "it's", 'a"b', "a\\", 'a\\"b', "\\\\d\\", "[1, ${x}]\n"])
def test_a_quoted_text_is_read_as_it_was(text):
    assert parse_override(f"a=[{quote(text)}]").value == [text]
