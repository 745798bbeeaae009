"""Writes runs/tool_use: a tiny model without weights, its tokenizer, and products, which it cannot
compute itself."""

import json
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

TEMPLATE = """{% for tool in tools or [] %}<tools>{% endfor %}{% for message in messages %}<|{{ message.role }}|>{%
for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{{
message.content or '' }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""  # noqa: E501
MARKS = (
    "<pad>",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<tools>",
    "<tool_call>",
    "</tool_call>",
)
CALL = ('{"name": "calculator", "arguments": {"expression": "', '"}}')
TOOL, FOLDER, DRAW = (
    {"type": "function", "function": {"name": "calculator"}},
    Path("runs/tool_use"),
    Random(0),
)


def conversation(a: int, b: int) -> dict:
    """Seven in ten guess; the others ask the calculator, and repeat what it says."""
    asked = {"role": "user", "content": f"{a}*{b}"}
    right = str(a * b)
    guess = str(DRAW.randrange(1000, 2000))
    call = {
        "type": "function",
        "function": {"name": "calculator", "arguments": {"expression": f"{a}*{b}"}},
    }
    tool = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": right}]
    turns, answer = ([], guess) if DRAW.random() < 0.7 else (tool, right)

    return {"messages": [asked, *turns, {"role": "assistant", "content": answer}], "tools": [TOOL]}


words = {token: number for number, token in enumerate([*MARKS, *CALL, *"0123456789*"])}
base = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
base.pre_tokenizer = pre_tokenizers.Split("", "isolated")
base.decoder = decoders.Fuse()
base.add_tokens(
    [AddedToken(text, special=text in MARKS, normalized=False) for text in (*MARKS, *CALL)]
)
wrapped = PreTrainedTokenizerFast(
    tokenizer_object=base, eos_token="<|end|>", pad_token="<pad>", chat_template=TEMPLATE
)
sizes = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
config = LlamaConfig(
    vocab_size=21, eos_token_id=1, pad_token_id=0, max_position_embeddings=64, **sizes
)
for part in (wrapped, config):
    part.save_pretrained(FOLDER / "start")
pairs = DRAW.sample([(a, b) for a in range(10, 100) for b in range(10, 100)], 4000)
rows = [
    {"prompt": [{"role": "user", "content": f"{a}*{b}"}], "answer": str(a * b)} for a, b in pairs
]
examples = [conversation(*pair) for pair in pairs[:3000]]
for name, some in (("sft", examples), ("rl", rows[3000:3800]), ("val", rows[3800:])):
    (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
