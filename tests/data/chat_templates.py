"""Chat templates of several families, shortened to what they do with messages, and tokenizers with
their tokens."""

from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "templates"
QWEN2 = (FOLDER / "qwen2.jinja").read_text()
QWEN3 = (FOLDER / "qwen3.jinja").read_text()
"""Thinking is written behind the last question only, and empty where there is none."""
LLAMA3 = (FOLDER / "llama3.jinja").read_text()
"""The date is in the first message; a call is one, and may end with a token of its own."""
MISTRAL = (FOLDER / "mistral.jinja").read_text()
"""Tools and the system message stand in front of the last question, so they move as the
conversation goes on."""

SMOLLM2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are SmolLM<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""  # noqa: E501

# A whole conversation ends with the end of a text, which no turn within it has.
PHI3 = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n"
    "' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') "
    "}}{% endif %}"
    "{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else "
    "message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n"
    "' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

# Earlier turns lose their thinking, and the next question follows the end token at once.
DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '<｜User｜>' + message['content'] }}{% elif message['role'] == 'system' %}{{ "
    "message['content'] }}{% else %}"
    "{{ '<｜Assistant｜>' + message['content'].split('</think>')[-1] + eos_token }}{% endif %}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
# No token of its own ends a turn.
PLAIN = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n"
    "' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

# The model ends a turn with the mark of the next speaker, so a turn has no end in the template.
GLM = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n"
    "' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# The end token stands only between turns.
ENDED_LATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n"
    "' + message['content'] }}"
    "{% if add_generation_prompt or not loop.last %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# The header is inside the mark, and so is the line break behind the end.
MARKED_WIDE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ '<|im_start|>assistant\n' + message.content + '<|im_end|>\n"
    "' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n"
    "' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The token that ends a turn is outside.
MARKED_NARROW = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n"
    "' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% "
    "endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n"
    "' }}{% endif %}"
)
MARKED_LAST = MARKED_NARROW.replace(
    "{% if message.role == 'assistant' %}", "{% if loop.last and message.role == 'assistant' %}"
)
# Earlier turns lose their thinking.
MARKED_THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n"
    "' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content if loop.last else message.content.split('</think>')[-1] | "
    "trim }}"
    "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ message.content + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_USER = MARKED_NARROW.replace("'assistant' %}{% gen", "'user' %}{% gen")
MARKED_NEVER = MARKED_NARROW.replace("'assistant' %}{% gen", "'critic' %}{% gen")

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
LLAMA3_TOKENS = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
)
MISTRAL_TOKENS = (
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
)
PHI3_TOKENS = ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
GLM_TOKENS = ("<|user|>", "<|assistant|>")
GEMMA_TOKENS = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")

DEEPSEEK_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
)

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS = [
    "\n\nthe user asks: what is the capital of France?\n\n",
    '{"name": "add", "arguments": {"a": 1}}\n\n\n',
] * 4


def byte_level(
    template: str, tokens: tuple[str, ...], eos: str, bos: str | None = None
) -> PreTrainedTokenizerFast:
    """Byte pairs as of Qwen and Llama 3: line breaks that meet are one token."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)

    return _finished(tokenizer, template, tokens, eos, bos)


def metaspace(
    template: str, tokens: tuple[str, ...], eos: str, bos: str | None = None
) -> PreTrainedTokenizerFast:
    """Pieces as of Llama 2 and Mistral: a space is put in front of each text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", *bytes_], limit_alphabet=200, show_progress=False
    )
    tokenizer.train_from_iterator(
        [*_CORPUS, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+=.,:\n"], trainer
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )

    return _finished(tokenizer, template, tokens, eos, bos)


def _finished(
    tokenizer: Tokenizer, template: str, tokens: tuple[str, ...], eos: str, bos: str | None
) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in tokens]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token=bos)
    wrapped.chat_template = template
    return wrapped
