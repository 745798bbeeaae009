"""Chat templates that never end, or fill the memory: one message that names the file, and no
process left."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from distflow import cli
from distflow.data import chat_template
from distflow.data.chat_template import Refused, render_all
from distflow.errors import UserError
from tests.e2e.runs import Playground
from tests.sparse_params import one_fast_in
from tests.tiny_models import tiny_tokenizer

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
ENDLESS += "{% endfor %}{% endfor %}{% endfor %}"
TEMPLATES = {
    "a loop": (ENDLESS, "did not end within"),
    "a loop that writes": (
        ENDLESS.replace("{% endfor %}", "x{% endfor %}", 1),
        "cannot be rendered",
    ),
    "a power": ("{{ 10 ** (10 ** 10) }}", "did not end within"),
    "a power of variables": (
        "{% set n = messages | length * 10 %}{{ n ** (n ** n) }}",
        "cannot be rendered",
    ),
    "a text too large for the memory": ("{{ 'a' * 10 ** 11 }}", "ran out of memory"),
    "a list too large for the memory": ("{{ ([0] * 10 ** 10) | length }}", "ran out of memory"),
    "a long prompt": (
        "{{ messages[0]['content'] * 6000 }}",
        "a prompt becomes 12,000 characters",
    ),
}


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 10_000)
    monkeypatch.setattr(chat_template, "RENDERS_WITHIN_S", 1.0)


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    tokenizer.name_or_path = str(tmp_path)
    return tokenizer


@pytest.mark.parametrize("what", one_fast_in(4, TEMPLATES))
def test_a_template_that_never_ends_stops_the_start(
    ground: Playground, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    template, said = TEMPLATES[what]
    (ground.folder / "model" / "chat_template.jinja").write_text(template)
    keys = ground.overrides("run", "data.prompt_format=chat", "data.max_prompt_length=64")
    assert cli.main(["train", "grpo", *keys]) == 2
    err = capsys.readouterr().err
    assert f"{ground.folder}/model/chat_template.jinja" in err and said in err
    assert err.count("distflow: ") == 1 and "Traceback" not in err
    assert not [
        child for child in multiprocessing.active_children() if child.name == "chat-template"
    ]


@pytest.fixture
def ground(tmp_path: Path) -> Playground:
    ground = Playground(tmp_path, num_rows=4)
    ground.write_rows([{"prompt": "1+", "answer": "7"}] * 4)
    return ground


def test_rows_come_in_order_and_what_is_raised_refuses_its_own(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    def render(number: int) -> str:
        if number == 2:
            raise TypeError("no two")
        return f"{number} \ud800"

    made = list(render_all([1, 2, 3], render, tokenizer))
    assert made == [
        "1 \ud800",
        "the chat template rejects the messages: TypeError: no two",
        "3 \ud800",
    ]
    assert [isinstance(entry, Refused) for entry in made] == [False, True, False]
    assert list(render_all([], render, tokenizer)) == []


def test_a_crash_is_reported(tokenizer: PreTrainedTokenizerBase) -> None:
    def render(number: int) -> str:
        os.kill(os.getpid(), signal.SIGSEGV)
        return ""

    with pytest.raises(UserError, match=r"\(row 1 of 2\): .* crashed"):
        list(render_all([1, 2], render, tokenizer))


def test_the_file_is_the_one_that_holds_the_template(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    for name in chat_template.TEMPLATE_FILES:
        (tmp_path / name).unlink(missing_ok=True)
    assert (
        chat_template.template_of(tokenizer) == f"the chat template of the tokenizer '{tmp_path}'"
    )
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": ""}')
    assert (
        chat_template.template_of(tokenizer)
        == f"the chat template of '{tmp_path}/tokenizer_config.json'"
    )
    (tmp_path / "chat_template.jinja").write_text("x")
    assert (
        chat_template.template_of(tokenizer)
        == f"the chat template of '{tmp_path}/chat_template.jinja'"
    )
