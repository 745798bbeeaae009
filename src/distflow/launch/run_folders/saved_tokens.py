"""The tokens that `trainer.save_groups` saved of a run."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.observe.crash_safe_files import read_object

if TYPE_CHECKING:
    from distflow.data.batch import Batch

_FILE = re.compile(r"(\d{6,18})(?:\.\d+)?\.safetensors")
_COLUMNS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages", "versions")


def token_texts(run_dir: Path) -> list[str]:
    """Of the vocabulary; empty if no step was saved."""
    from distflow.runtime.run_recorder import TOKEN_TEXTS, TOKENS

    texts = read_object(run_dir / TOKENS / TOKEN_TEXTS, run_dir).get("texts")
    return [str(text) for text in texts] if isinstance(texts, list) else []


def saved_tokens(
    run_dir: Path, step: int, texts: Sequence[str] = ()
) -> Iterator[tuple[object, ...]]:
    """The tokens of a step, each with the columns of the view `tokens`. Nothing if there is no
    file, or it is torn. texts: see `token_texts`."""
    from safetensors import SafetensorError

    from distflow.runtime.run_recorder import load_groups

    with suppress(OSError, ValueError, KeyError, SafetensorError):
        yield from _tokens_of(load_groups(run_dir, step), step, texts)


def _tokens_of(batch: "Batch", step: int, texts: Sequence[str]) -> Iterator[tuple[object, ...]]:
    axis = batch.field("response_ids").axis
    lengths = batch.lengths("response").tolist()
    uids = [
        str(uid) for uid, length in zip(batch["uid"], lengths, strict=True) for _ in range(length)
    ]
    positions = [position for length in lengths for position in range(length)]
    masks, *others = (
        batch.flat(name).tolist()
        if name in batch and batch.field(name).axis == axis
        else [None] * len(uids)
        for name in ("response_mask", *_COLUMNS)
    )
    ids: list[int] = batch.flat("response_ids").tolist()
    trained = [None if mask is None else mask > 0 for mask in masks]
    read = [texts[token] if 0 <= token < len(texts) else None for token in ids]
    owners = _owners(batch) if "owners" in batch else [None] * len(uids)
    yield from zip(
        [step] * len(uids), uids, positions, ids, trained, *others, read, owners, strict=True
    )


def _owners(batch: "Batch") -> list[str]:
    """Of each token of the responses; behind the name of its conversation, or of its agent, if it
    has one."""
    found = []
    said = batch["conversation"] if "conversation" in batch else [()] * len(batch)
    for agent, forks, parts, turns in zip(
        batch["agent"], batch["forks"], batch["owners"], said, strict=True
    ):
        own = [owner for owner, number in parts for _ in range(number)]
        agents = [
            turn["agent"] for turn in turns if "agent" in turn and turn["agent"] not in dict(forks)
        ]
        first = agents[0] if agents else "" if agent == "policy" else agent
        starts = [(0, first), *((start, name) for name, start in forks), (len(own), "")]
        for (start, name), (end, _) in pairwise(starts):
            found += [f"{name}: {owner}" if name else owner for owner in own[start:end]]
    return found
