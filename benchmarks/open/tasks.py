"""The tasks of the open benchmark, and the inputs that every system gets: a model, rows in their
order, a reward, and what is fixed."""

import hashlib
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "0123456789+=-:# "
PAD = 0
EOS = 1
MOST_VALIDATED = 200

REWARD = '''\
"""The reward of a response, from its text and the row's answer."""


def score(response: str, answer: str) -> float:
    if response == answer:
        return 1.0
    return 0.2 * (len(response) == len(answer)) + 0.2 * response.startswith(answer)
'''


@dataclass(frozen=True)
class Task:
    """What is fixed. A file `task.json` has the same fields."""

    kind: Literal["grpo", "sft", "dpo"]
    hidden: int
    layers: int
    updates: int
    rows: int
    """Of each update, in the order of the file: prompts, examples or pairs."""
    lr: float
    """Constant; AdamW with betas 0.9 and 0.999, epsilon 1e-8, no decay, gradients clipped to norm
    1."""
    samples: int = 1
    """Responses to each prompt."""
    longest: int = 8
    """Tokens of a response, with its end token."""
    beta: float = 0.1
    """Of DPO."""
    saved_every: int = 5
    """Updates between saved weights. The last ones are saved too."""
    seed: int = 0
    target: float = 0.0
    """The accuracy on the validation rows that a result must reach."""


TASKS = {
    "grpo-1m": Task("grpo", 128, 4, updates=60, rows=16, samples=16, lr=1e-3, target=0.7),
    "grpo-10m": Task("grpo", 384, 6, updates=30, rows=16, samples=16, lr=5e-4),
    "sft-1m": Task("sft", 128, 4, updates=200, rows=64, lr=2e-4, target=0.6),
    "dpo-1m": Task("dpo", 128, 4, updates=60, rows=64, lr=5e-4),
}


def write_inputs(task: Task, folder: Path) -> str:
    """`folder`/task.json, model, rows.jsonl, validation.jsonl and reward.py; returns the hash of
    all of them."""
    folder.mkdir(parents=True)
    make_tokenizer().save_pretrained(folder / "model")
    make_model(task).save_pretrained(folder / "model")
    (folder / "task.json").write_text(json.dumps(asdict(task), indent=1))
    (folder / "reward.py").write_text(REWARD)

    rows = _problems(task)
    num_trained = task.updates * task.rows
    _write_rows(folder / "rows.jsonl", [_row(task, *pair) for pair in rows[:num_trained]])
    validation = [_row(task, *pair) for pair in rows[num_trained:]]
    _write_rows(folder / "validation.jsonl", validation)
    return hash_of(folder)


def hash_of(folder: Path) -> str:
    """Of the contents of all files below a folder, by their names."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found.update(str(path.relative_to(folder)).encode())
            found.update(path.read_bytes())

    return found.hexdigest()[:16]


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _problems(task: Task) -> list[tuple[int, int]]:
    """Pairs of numbers for training and validation. No problem of the validation is trained on,
    and no update has a problem twice."""
    draw = random.Random(task.seed)
    size = 100 if task.kind == "dpo" else 30
    every = [(a, b) for a in range(size) for b in range(size)]
    draw.shuffle(every)
    held_out = every[:MOST_VALIDATED]
    others = every[MOST_VALIDATED:]

    rows: list[tuple[int, int]] = []
    while len(rows) < task.updates * task.rows:
        draw.shuffle(others)
        whole_updates = len(others) // task.rows * task.rows
        rows += others[:whole_updates]

    return rows[: task.updates * task.rows] + held_out


def _row(task: Task, a: int, b: int) -> dict[str, str]:
    if task.kind == "grpo":
        return {"prompt": f"{a}:{b}=", "answer": str(max(a, b) // 10)}
    if task.kind == "sft":
        return {"prompt": f"{a}+{b}=", "answer": str(a + b)}
    return {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1 + (a * b) % 7)}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each character."""
    words = ["<pad>", "<eos>", *CHARACTERS]
    table = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


@torch.no_grad()
def make_model(task: Task) -> LlamaForCausalLM:
    """Random weights, the same bits on every processor: uniform draws, not normal ones."""
    config = LlamaConfig(
        vocab_size=len(CHARACTERS) + 2,
        hidden_size=task.hidden,
        intermediate_size=3 * task.hidden,
        num_hidden_layers=task.layers,
        num_attention_heads=task.hidden // 32,
        num_key_value_heads=task.hidden // 64,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(task.seed)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            drawn = torch.rand(parameter.shape, generator=generator)
            parameter.copy_((drawn - 0.5) * 0.08)

    return model


def read_task(folder: Path) -> Task:
    found: dict[str, Any] = json.loads((folder / "task.json").read_text())
    return Task(**found)
