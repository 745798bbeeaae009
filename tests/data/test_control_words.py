"""Words of a chat template in a message's content are found for several families, and ordinary text
is left alone."""

import pytest
from transformers import PreTrainedTokenizerFast

from distflow.data.control_words import control_words, find_control_word
from distflow.data.dataset_columns import BadRows
from distflow.data.preference_pairs import encode_pair
from distflow.errors import UserError
from tests.data import chat_templates as of
from tests.data.encoding import encode, row
from tests.environments.test_chat import FAMILIES
from tests.tiny_models import tiny_tokenizer

MISTRAL_WITHOUT_TOKENS = ("<s>", "</s>")
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ '[INST] <<SYS>>\n' + m.content + '\n"
    "<</SYS>>\n\n' }}"
    "{% elif m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + "
    "m.content + eos_token }}"
    "{% endif %}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for part in m.content %}"
    "{{ part.text }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
)
THINKS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[USER] ' + m.content + ' [DONE]' }}{% "
    "endif %}"
    "{% if m.role == 'assistant' %}{{ '<think>\n\n</think>\n\n"
    "' + m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
)

MADE = {
    **{name: lambda name=name: FAMILIES[name]().tokenizer for name in FAMILIES},
    "mistral in plain text": lambda: of.metaspace(
        of.MISTRAL, MISTRAL_WITHOUT_TOKENS, "</s>", "<s>"
    ),
    "gemma in plain text": lambda: of.metaspace(of.GEMMA, ("<bos>", "<eos>"), "<eos>", "<bos>"),
    "zephyr": lambda: of.metaspace(of.PHI3, MISTRAL_WITHOUT_TOKENS, "</s>", "<s>"),
    "phi3": lambda: of.metaspace(of.PHI3, of.PHI3_TOKENS, "<|endoftext|>"),
    "llama2": lambda: of.metaspace(LLAMA2, MISTRAL_WITHOUT_TOKENS, "</s>", "<s>"),
    "parts": lambda: of.byte_level(PARTS, of.CHATML_TOKENS, "<|im_end|>"),
    "thinks": lambda: of.byte_level(THINKS, ("<think>", "</think>", "<end>"), "<end>"),
}


def made(name: str) -> PreTrainedTokenizerFast:
    return MADE[name]()


@pytest.mark.parametrize("name", [*MADE])
def test_a_chat_that_went_through_the_template_is_found(name: str) -> None:
    tokenizer = made(name)
    words = control_words(tokenizer)
    assert words is not None
    content = [{"type": "text", "text": "hi"}] if name == "parts" else "hi"
    text = str(
        tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    )
    assert find_control_word(text, words)
    assert find_control_word([{"type": "text", "text": f"say {text}"}], words)


@pytest.mark.parametrize("name", [*MADE])
@pytest.mark.parametrize(
    "text",
    [
        "<think>\nfour\n</think>\n\n4",
        '<tool_call>\n{"name": "add"}\n</tool_call>',
        (
            "if a < b and c > d: x[i] = [1, 2]; print(f'{x}') | tee <file> [ERROR] user: model "
            "assistant"
        ),
        "<b>bold</b> <user> [x] [TODO] <<EOF>> </div> <my_tag>",
        "User: hello\nAssistant: hi\n### Instruction:",
        None,
    ],
)
def test_ordinary_text_is_not_accused(name: str, text: str | None) -> None:
    words = control_words(made(name))
    assert words is not None and not find_control_word(text, words)


TWICE = "<|im_start|>user\n1+1=<|im_end|>\n"
ASKED = {"role": "user", "content": "1+1="}


@pytest.mark.parametrize(
    ("found", "options"),
    [
        (row(TWICE), {"prompt_format": "chat"}),
        (row([{"role": "user", "content": TWICE}]), {}),
        (row([{"role": "system", "content": "x <|im_end|>"}, ASKED]), {}),
        (row("1+1="), {"prompt_format": "chat", "system_prompt": "<|im_start|>system"}),
        (row("1+1="), {"prompt_format": "chat", "prompt_template": "<|im_start|>user\n{prompt}"}),
        (row("1+1=", "<|im_start|>assistant\n2"), {"prompt_format": "chat"}),
        (row([ASKED, {"role": "assistant", "content": "<|im_start|>2"}], is_conversation=True), {}),
    ],
    ids=[
        "text",
        "messages",
        "system",
        "system_prompt",
        "prompt_template",
        "response",
        "conversation",
    ],
)
def test_a_row_that_would_be_templated_twice_is_a_bad_row(found, options) -> None:
    with pytest.raises(UserError, match=r"f:1.*<\|im_"):
        encode([found], made("qwen2.5"), **options)


def test_a_bad_row_can_be_skipped() -> None:
    skipped = BadRows("skip")
    (left,) = encode([row(TWICE), row("2+2=")], made("qwen2.5"), skipped, prompt_format="chat")
    assert "2+2=" in left.prompt_text and len(skipped.reasons) == 1


def test_text_that_is_templated_already_is_a_prompt_of_plain_text() -> None:
    (prompt,) = encode([row(TWICE)], made("qwen2.5"), prompt_format="text")
    assert prompt.prompt_text == TWICE


def test_a_response_may_bring_its_end_token() -> None:
    (prompt,) = encode([row("1+1=", "2<|im_end|>")], made("qwen2.5"), prompt_format="chat")
    assert made("qwen2.5").decode(list(prompt.response_ids)) == "2<|im_end|>"


def test_a_preference_pair_with_words_of_the_template_is_a_bad_row() -> None:
    columns = {"prompt_messages": [ASKED], "chosen": "<|im_start|>2", "rejected": "3"}
    said = encode_pair(row("1+1=", extra_info=columns), made("qwen2.5"), ("chosen", "rejected"))
    assert isinstance(said, str) and "<|im_start|>" in said


def test_a_template_that_is_replaced_has_other_words() -> None:
    tokenizer = tiny_tokenizer()
    assert control_words(tokenizer).search("<eos>")
    tokenizer.chat_template = of.PLAIN
    assert control_words(tokenizer) is None
