"""Tiny decoders with a character tokenizer, written as Hugging Face folders, for the tests of every
room."""

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

PAD = "<pad>"
BOS = "<bos>"
EOS = "<eos>"
CHARACTERS = "\n" + "".join(c for c in string.printable if c.isprintable())
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: printable ASCII and newline after `<pad>` (0), `<bos>` (1), `<eos>`
    (2). A character outside becomes '?'. Adds no special token by itself."""
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS
    )
    wrapped.chat_template = CHAT_TEMPLATE

    return wrapped


def tiny_config(family: str = "llama", **changes: Any) -> Any:
    """A config of that `model_type` with grouped query heads: 2 layers of width 32, as many logits
    as tokens."""
    numbers: dict[str, Any] = {
        "vocab_size": 3 + len(CHARACTERS),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        # large enough that neighbours matter: a leak between sequences shows
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return AutoConfig.for_model(family, **{**numbers, **changes})


def write_tiny_model(
    folder: Path,
    family: str = "llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Path:
    """Write a randomly initialised model of `family` ("llama", "qwen2", "qwen3", ...) and its
    tokenizer to `folder`.

    `changes` replace entries of the config. Returns `folder`. Load the tokenizer with
    `load_tokenizer`: for "qwen2" `AutoTokenizer` would rebuild it as Qwen's own.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(family, **changes)).to(dtype)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return Path(folder)


def write_tiny_reward_model(
    folder: Path,
    family: str = "llama",
    seed: int = 0,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **changes: Any,
) -> Path:
    """The same as a sequence classifier with one label; `tokenizer` in place of
    `tiny_tokenizer`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(
            tiny_config(family, **{"num_labels": 1, **changes})
        )

    model.save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return Path(folder)


GOOD = '{"reason": "odd", "score": 0.75}'
BAD = 'I think {1}. {"reason": "even", "score": 0}'
NOTHING = "no idea"


def write_tiny_judge(folder: Path) -> Path:
    """A language model that answers by the last character of what it is asked: `tiny_verdict`. It
    has no chat template, so that a question may end with the response."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.add_tokens([GOOD, BAD, NOTHING])
    size = len(tokenizer)

    model = AutoModelForCausalLM.from_config(
        tiny_config(vocab_size=size, hidden_size=128, max_position_embeddings=256)
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                weight.zero_()  # so that the last token alone decides

        model.get_input_embeddings().weight.copy_(torch.eye(size, 128))
        for character in CHARACTERS:
            answer = tokenizer.convert_tokens_to_ids(tiny_verdict(character))
            model.lm_head.weight[answer, tokenizer.convert_tokens_to_ids(character)] = 1.0

        for answer in (GOOD, BAD, NOTHING):
            model.lm_head.weight[2, tokenizer.convert_tokens_to_ids(answer)] = 1.0

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def tiny_verdict(asked: str) -> str:
    """What a tiny judge answers to a question that ends so."""
    last = asked[-1]
    return NOTHING if last.isdigit() else GOOD if ord(last) % 2 else BAD
