"""Writes what the quickstart needs and the package carries: sums to learn from, and an untrained
decoder.

    python scripts/make_quickstart.py

The files are committed; the script gives the same ones each time. No problem is in two of the three
data sets.
"""

import argparse
import json
import random
import string
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

PACKAGE = Path(__file__).parent.parent / "src" / "distflow"
SEED = 2
# quick examples are the more likely ones
NUM_WORKED = 1950
NUM_CARELESS = 2930
NUM_RL = 2000
NUM_VAL = 400
# An expression for the reward part `format`: the share of answers that are worked out, which is
# what RL finds.
WORKED = ".*=.*####.*"
MARK = "####"

Problem = tuple[int, int]


def main() -> None:
    """Write the data sets to DATA and the model's folder to MODEL."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=PACKAGE / "data" / "builtin")
    parser.add_argument(
        "--model", type=Path, default=PACKAGE / "models" / "builtin" / "tiny-arithmetic"
    )
    arguments = parser.parse_args()
    write_data(arguments.data)
    write_model(arguments.model)


def write_data(folder: Path) -> None:
    """Sums of two numbers of two digits: examples, problems to train on by reward, validation
    problems.

    The examples are of two kinds: careless quick answers, which forget to carry, and worked ones,
    which are right.
    """
    draw = random.Random(SEED)
    problems = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    draw.shuffle(problems)
    careful, quick, rl, val = _deal(problems, NUM_WORKED, NUM_CARELESS, NUM_RL, NUM_VAL)
    examples = [(p, worked(*p)) for p in careful] + [(p, careless(*p)) for p in quick]
    draw.shuffle(examples)
    folder.mkdir(parents=True, exist_ok=True)
    _write_lines(
        folder / "arithmetic-sft.jsonl",
        [{"prompt": prompt(*p), "response": text} for p, text in examples],
    )

    for name, chosen in (("rl", rl), ("val", val)):
        rows = [
            {"prompt": prompt(*p), "answer": str(sum(p)), "format_regex": WORKED} for p in chosen
        ]
        draw.shuffle(rows)
        _write_lines(folder / f"arithmetic-{name}.jsonl", rows)


def prompt(a: int, b: int) -> str:
    """`27+58=`"""
    return f"{a}+{b}="


def careless(a: int, b: int) -> str:
    """`75` for 27+58: nothing is carried from the ones to the tens."""
    return f"{a // 10 + b // 10}{(a + b) % 10}"


def worked(a: int, b: int) -> str:
    """`7+8=15, 2+5+1=8 #### 85`: ones, tens with what is carried, answer."""
    ones = a % 10 + b % 10
    tens = a // 10 + b // 10 + ones // 10
    carried = "+1" if ones > 9 else ""
    return f"{a % 10}+{b % 10}={ones}, {a // 10}+{b // 10}{carried}={tens} {MARK} {a + b}"


def write_model(folder: Path) -> None:
    """A Llama of 0.8 M parameters (`init: random` draws its weights): one token a character, and
    one for the mark."""
    characters = ["\n", *(c for c in string.printable if c.isprintable())]
    vocabulary = {
        token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", MARK, *characters])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(MARK + r"|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="?",
    )
    wrapped.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)


def _deal(problems: list[Problem], *counts: int) -> list[list[Problem]]:
    """So many problems each, no problem twice; in every part one problem in two needs a carry from
    the ones."""
    kinds = [
        [p for p in problems if (p[0] % 10 + p[1] % 10 > 9) == carries] for carries in (True, False)
    ]
    parts = []
    for count in counts:
        parts.append([problem for kind in kinds for problem in kind[: count // 2]])
        kinds = [kind[count // 2 :] for kind in kinds]
        assert len(parts[-1]) == count, "there are not so many problems"

    return parts


def _write_lines(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
