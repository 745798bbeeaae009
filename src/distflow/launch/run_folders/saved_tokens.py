"""The tokens that `trainer.save_groups` saved of a run."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.observe.crash_safe_files import read_object

if TYPE_CHECKING:
    from distflow.data.batch import Batch

_COLUMNS = {
    "trained": "response_mask",
    "log_prob": "rollout_log_probs",
    "old": "old_log_probs",
    "ref": "ref_log_prob",
    "advantage": "advantages",
    "version": "versions",
}
"""The column of the batch that has each entry of a token."""


def saved_tokens(run_dir: Path, step: int, uid: str) -> list[dict[str, Any]]:
    """The tokens of a sample's response, in order: `id`, `text`, `owner`, and the entries of
    `_COLUMNS`, of which None was not saved. Empty if the step was not saved, or its file is torn.
    """
    from safetensors import SafetensorError

    from distflow.runtime.saved_groups import load_groups

    with suppress(OSError, ValueError, LookupError, SafetensorError):
        batch = load_groups(run_dir, step)
        row = [*batch["uid"]].index(uid)
        return _tokens_of(batch.select([row]), _texts(run_dir))

    return []


def _texts(run_dir: Path) -> list[str]:
    """Of the vocabulary; empty if no step was saved."""
    from distflow.runtime.saved_groups import TOKEN_TEXTS, TOKENS

    texts = read_object(run_dir / TOKENS / TOKEN_TEXTS, run_dir).get("texts")
    if isinstance(texts, list):
        return [str(text) for text in texts]
    return []


def _tokens_of(sample: "Batch", texts: list[str]) -> list[dict[str, Any]]:
    axis = sample.field("response_ids").axis
    owners = _owners(sample) if "owners" in sample else []

    tokens = []
    for place, token_id in enumerate(sample.flat("response_ids").tolist()):
        token: dict[str, Any] = dict.fromkeys(("text", "owner", *_COLUMNS))
        token["id"] = token_id
        if 0 <= token_id < len(texts):
            token["text"] = texts[token_id]
        if owners:
            token["owner"] = owners[place]
        tokens.append(token)

    for entry, column in _COLUMNS.items():
        if column not in sample or sample.field(column).axis != axis:
            continue
        for token, value in zip(tokens, sample.flat(column).tolist(), strict=True):
            token[entry] = value > 0 if entry == "trained" else value

    return tokens


def _owners(sample: "Batch") -> list[str]:
    """Of each token; behind the name of its conversation, or of its agent, if it has one."""
    forks = dict(sample["forks"][0])
    name = "" if sample["agent"][0] == "policy" else sample["agent"][0]
    if "conversation" in sample:
        for turn in sample["conversation"][0]:
            if "agent" in turn and turn["agent"] not in forks:
                name = turn["agent"]
                break

    begins = {start: fork for fork, start in forks.items()}
    found = list[str]()
    for owner, number in sample["owners"][0]:
        for _ in range(number):
            name = begins.get(len(found), name)
            found.append(f"{name}: {owner}" if name else owner)

    return found
