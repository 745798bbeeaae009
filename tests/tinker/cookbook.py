"""A folder in which recipes of the Tinker cookbook run as they are: a tiny model and data of ours
lie under the names that the recipes load from the hub."""

import json
from collections.abc import Iterable
from pathlib import Path

from datasets import Dataset

from tests.tiny_models import tiny_tokenizer, write_tiny_model

MODEL = "Qwen/Qwen3.5-9B"
"""What several recipes train, or ask, by default."""
CONTEXT = 8192
OF_CHATS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
"""Tokens that the cookbook writes around the messages of this model."""
GSM8K = Path(__file__).parents[1] / "data" / "sets" / "gsm8k_train_60.jsonl"
Rows = list[dict[str, object]]


def write_kitchen(folder: Path) -> None:
    """Recipes run with the folder as their working directory."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*OF_CHATS]})
    size = len(tokenizer)
    write_tiny_model(folder / MODEL, vocab_size=size, max_position_embeddings=CONTEXT)
    tokenizer.save_pretrained(folder / MODEL)

    chats = [_chat(first, second) for first in range(20) for second in range(20)]
    messages: Rows = [{"messages": _messages(question, answer)} for question, answer in chats]
    (folder / "chats.jsonl").write_text(_lines(messages))
    _write(folder / "HuggingFaceH4/no_robots", {"train": messages, "test": messages[:8]})
    _write(folder / "allenai/tulu-3-sft-mixture", {"train": messages})

    problems = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    _write(folder / "openai/gsm8k", {"train": problems, "test": problems[:8]}, config="main")
    answered: Rows = [{"question": question, "final_answer": answer} for question, answer in chats]
    _write(folder / "zwhe99/DeepMath-103K", {"train": answered})

    thoughts: Rows = []
    pairs: Rows = []
    choices: Rows = []
    graded: Rows = []
    for question, answer in chats:
        said = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        thoughts.append({"conversations": said})

        asked = f"\n\nHuman: {question}\n\nAssistant: "
        pairs.append({"chosen": asked + answer, "rejected": f"{asked}I do not know."})
        choices.append(
            {
                "domain": "Chemistry",
                "details": {"level": "L3"},
                "type": "mcq-4-choices",
                "question": question,
                "choices": {"label": ["A", "B"], "text": [answer, "0"]},
                "answerKey": "A",
            }
        )
        rubric = {
            "rubric_str": f"Is the answer {answer}?",
            "extraction_regex": r"(\d+)",
            "grader_output_format_instruction": "Give a number.",
        }
        graded.append({"convo": [{"role": "user", "content": question}], "rubric_items": [rubric]})

    _write(folder / "open-thoughts/OpenThoughts3-1.2M", {"train": thoughts})
    _write(folder / "Anthropic/hh-rlhf", {"train": pairs, "test": pairs[:8]})
    _write(folder / "hicai-zju/SciKnowEval", {"test": choices})
    (folder / "rubric.jsonl").write_text(_lines(graded))

    # the recipe downloads this file to the user's home
    home = folder / ".cache/tinker-cookbook/PeterJinGo/nq_hotpotqa_train/train"
    home.mkdir(parents=True)
    searched = [
        {"question": question, "golden_answers": [answer], "data_source": "nq"}
        for question, answer in chats
    ]
    Dataset.from_list(searched).to_parquet(home / "train.parquet")


def _chat(first: int, second: int) -> tuple[str, str]:
    return f"What is {first} + {second}?", str(first + second)


def _messages(question: str, answer: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]


def _write(folder: Path, splits: dict[str, Rows], config: str = "default") -> None:
    """A data set as the hub has it."""
    folder.mkdir(parents=True)
    files = ""
    for name, rows in splits.items():
        (folder / f"{name}.jsonl").write_text(_lines(rows))
        files += f"  - split: {name}\n    path: {name}.jsonl\n"
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n"
    )


def _lines(rows: Iterable[dict[str, object]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)
