"""The samples that the report carries, whole groups of answers thinned to fit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from distflow.observe.jsonlines import encode
from distflow.observe.report_answers import MAX_TEXT, cut, cut_answer
from distflow.observe.run_folder import DROPPED
from distflow.observe.run_reader import Timeline, read_samples, sample_splits, sample_steps

MAX_STEPS = 40
_LEAST_TEXT = 100
_FAILED_FIRST = 2


class SampleGroup(TypedDict):
    """The answers to one prompt in one step or validation: everything of it that the sample file held.

    answers: what `cut_answer` keeps of each.
    """

    step: int
    split: str
    name: str
    prompt: object
    truth: object
    domain: object
    prompt_length: object
    answers: list[dict[str, object]]


class Samples(TypedDict):
    """Whole groups for the table. num_groups, num_answers: those in the files that were looked into, of `all_files`
    files."""

    groups: list[SampleGroup]
    num_groups: int
    num_answers: int
    num_files: int
    all_files: int


def thin_samples(run_dir: Path, timeline: Timeline, max_bytes: int) -> Samples:
    """Whole groups of answers.

    From at most `MAX_STEPS` steps of each split, evenly chosen with the first and the last, as many groups of each as
    fit into its share of `max_bytes`, the texts of large ones cut for that: a few with verdicts that failed, then
    evenly chosen ones of each domain.
    """
    splits = [*sample_splits(run_dir), DROPPED]
    files = [(split, step) for split in splits for step in sample_steps(run_dir, split)]
    chosen = [(split, step) for split in splits for step in evenly(sample_steps(run_dir, split), MAX_STEPS)]
    shown: list[SampleGroup] = []
    num_groups = num_answers = 0
    left_bytes = max_bytes
    for position, (split, step) in enumerate(chosen):
        rows = read_samples(run_dir, step, split, timeline)
        share = left_bytes // (len(chosen) - position)
        groups = sample_groups(rows, step, split)
        num_groups += len(groups)
        num_answers += len(rows)
        sizes = [len(encode(group)) for group in groups]
        if max(sizes, default=0) > share:
            groups = sample_groups(rows, step, split, max(MAX_TEXT * share // max(sizes), _LEAST_TEXT))
            sizes = [len(encode(group)) for group in groups]
        fitting = _chosen(groups, sizes, share)
        shown += [groups[i] for i in fitting]
        left_bytes -= sum(sizes[i] for i in fitting)
    return {
        "groups": shown,
        "num_groups": num_groups,
        "num_answers": num_answers,
        "num_files": len(chosen),
        "all_files": len(files),
    }


def sample_groups(
    rows: Sequence[Mapping[str, object]], step: int, split: str, max_text: int = MAX_TEXT
) -> list[SampleGroup]:
    """The rows of a file by prompt group, as their `uid` says ("17-3" is answer 3 of group 17), else by prompt."""
    groups: dict[tuple[str, ...], list[Mapping[str, object]]] = {}
    for row in rows:
        name, dash, number = str(row.get("uid", "")).rpartition("-")
        in_group = dash and number.isdigit()
        key = (str(row.get("set")), name) if in_group else ("", str(row.get("prompt")), str(row.get("ground_truth")))
        groups.setdefault(key, []).append(row)
    return [
        {
            "step": step,
            "split": split,
            "name": key[1] if len(key) == 2 else "",
            "prompt": cut(answers[0].get("prompt"), max_text),
            "truth": cut(answers[0].get("ground_truth"), max_text),
            "domain": cut(answers[0].get("domain"), 200),
            "prompt_length": cut(answers[0].get("prompt_length"), 200),
            "answers": [cut_answer(answer, max_text) for answer in answers],
        }
        for key, answers in groups.items()
    ]


def _chosen(groups: Sequence[SampleGroup], sizes: Sequence[int], max_bytes: int) -> list[int]:
    """Positions of groups that fit together, ascending: failures are rare, and would seldom be among evenly chosen."""
    by_domain = sorted(range(len(groups)), key=lambda i: str(groups[i]["domain"]))
    failed = [i for i in by_domain if any("failure" in answer for answer in groups[i]["answers"])][:_FAILED_FIRST]
    if sum(sizes[i] for i in failed) > max_bytes // 2:
        failed = []
    others = [i for i in by_domain if i not in failed]
    left = max_bytes - sum(sizes[i] for i in failed)
    return sorted([*failed, *(others[i] for i in _fitting([sizes[i] for i in others], left))])


def _fitting(sizes: Sequence[int], max_bytes: int) -> list[int]:
    """Evenly spread positions of parts that fit together, or of one."""
    number = len(sizes)
    while number > 1 and sum(sizes[i] for i in evenly(range(len(sizes)), number)) > max_bytes:
        number = max(number * 3 // 4, 1)
    return evenly(range(len(sizes)), number) if sizes else []


def evenly(items: Sequence[int], number: int) -> list[int]:
    """At most `number` of the items, evenly spread, the first and the last among them."""
    if len(items) <= number:
        return list(items)
    if number == 1:
        return [items[0]]
    return [items[round(i * (len(items) - 1) / (number - 1))] for i in range(number)]
