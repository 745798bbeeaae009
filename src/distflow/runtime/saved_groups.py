"""All columns of a step's groups, as a run saves them in `tokens/`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.data.batch import Batch
from distflow.observe.crash_safe_files import encode, replacing, write_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS = "tokens"
TOKEN_TEXTS = "texts.json"


def keep_groups(run_dir: Path, step: int, batch: Batch, part: int = 0, num_parts: int = 1) -> None:
    """Write a worker's share of a step, one file per worker. part: its number among the `num_parts`
    of the run. The first removes the step's files from an earlier start with more workers."""
    folder = run_dir / TOKENS
    folder.mkdir(mode=0o700, exist_ok=True)
    name = f"{step:06d}.{part}" if part else f"{step:06d}"
    with replacing(folder / f"{name}.safetensors") as aside:
        batch.save(aside)

    if part == 0:
        for path in _saved_files(folder, f"{step:06d}.*.safetensors"):
            if int(path.name.split(".")[1]) >= num_parts:
                path.unlink(missing_ok=True)


def keep_token_texts(run_dir: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Write the text of each token of the vocabulary once, so that saved steps can be read without
    the tokenizer."""
    path = run_dir / TOKENS / TOKEN_TEXTS
    if path.exists():
        return

    read = partial(
        tokenizer.batch_decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )

    # some decoders strip a text's first space
    before = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
    (prefix,) = read([before])
    texts = read([[*before, number] for number in range(len(tokenizer))])
    write_atomically(path, encode({"texts": [text.removeprefix(prefix) for text in texts]}))


def forget_groups(run_dir: Path, num_steps: int) -> None:
    """Remove the files of all steps but the last `num_steps`."""
    paths = _saved_files(run_dir / TOKENS, "*.safetensors")
    kept = sorted({_step(path) for path in paths})[-num_steps:]
    for path in paths:
        if _step(path) not in kept:
            path.unlink(missing_ok=True)


def load_groups(run_dir: Path, step: int) -> Batch:
    """A step as its workers wrote it, in group order. Raises FileNotFoundError, and ValueError if
    workers run different nodes and so have different columns."""
    folder = run_dir / TOKENS
    first = Batch.load(folder / f"{step:06d}.safetensors")
    others = [Batch.load(path) for path in _saved_files(folder, f"{step:06d}.*.safetensors")]
    shares = [share for share in (first, *others) if len(share)]
    batch = Batch.concat(shares or [first])
    return batch.select(batch["group_index"].argsort(stable=True))


def _saved_files(folder: Path, pattern: str) -> list[Path]:
    """The matching files that we wrote, by step."""
    return sorted(path for path in folder.glob(pattern) if Batch.is_saved(path))


def _step(path: Path) -> str:
    return path.name.split(".")[0]
