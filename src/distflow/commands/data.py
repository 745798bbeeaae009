"""`distflow data check`: the data of a config as the model will see them. Loads no weights."""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from distflow import __version__
from distflow.commands.arguments import add_preset_arguments, at_least
from distflow.commands.quick_start import importing
from distflow.observe.sanitized_output import escape_control

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from distflow.data.encoded_prompts import PromptRow, PromptSet


_MAX_TEXT = 1_000
_MAX_IDS = 48


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["check"], help="show the data as the model receives it")
    add_preset_arguments(parser)
    parser.add_argument(
        "--rows", type=partial(at_least, 0), default=2, help="show the first ROWS rows of each file"
    )


def run_data(arguments: argparse.Namespace) -> int:
    """Print counts, lengths, duplicates and the first rows as tokens. Runs the code that the config
    names."""
    from distflow.config import load_config
    from distflow.config.compose.check_paths import NEEDED_TO_TRAIN

    say = partial(print, flush=True)
    say(f"distflow {__version__} · data of {arguments.preset}")

    with TemporaryDirectory() as folder:  # rows from Python code are written into a run's folder
        overrides = [*arguments.overrides, f"trainer.default_local_dir={folder}"]
        loaded = load_config(arguments.preset, overrides, needed=NEEDED_TO_TRAIN)

        with importing():
            from distflow.launch.read_config import (
                fitted_to_files,
                follow_pipeline,
                read_config,
            )
            from distflow.launch.run_folders.export_checkpoint import with_models_of_runs

        loaded = with_models_of_runs(follow_pipeline(loaded), say)
        _, data = fitted_to_files(read_config(loaded))
        sets = {"training": data.looked_at}
        for name, found in data.validation.items():
            sets[f"validation {name}".strip()] = found

        for name, found in sets.items():
            say(f"\n{name} data: {', '.join(found.report.lines())}")
            shown = _shown(found, arguments.rows, data.tokenizer)
            for line in chain(_lengths(found), _duplicates(found), shown):
                say(f"  {line}")

        overlap = data.overlap()

    if overlap and loaded.config.data.allow_overlap:
        overlap = f"as data.allow_overlap allows, {overlap.rpartition(' (')[0]}"
    elif overlap:
        overlap = f"warning: {overlap}"

    say(f"\n{overlap or 'no validation prompt is trained on'}" if data.validation else "")
    return 0


def _lengths(rows: "PromptSet") -> Iterator[str]:
    prompts = sorted(len(row.prompt_ids) for row in rows)
    responses = sorted(len(row.response_ids) for row in rows if row.response_ids is not None)
    for what, lengths in (("prompt", prompts), ("response", responses)):
        if lengths:
            parts = {"minimum": 0.0, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "maximum": 1.0}
            quantiles = (
                f"{name} {lengths[round(at * (len(lengths) - 1))]:,}" for name, at in parts.items()
            )
            yield f"tokens of a {what}: {', '.join(quantiles)}"


def _duplicates(rows: "PromptSet") -> Iterator[str]:
    """Lines on rows with the same prompt and the same response to learn from."""
    same = defaultdict[tuple[Any, ...], list[str]](list)  # origins of each
    for row in rows:
        same[*row.content, row.rejected_ids].append(row.origin)
    if len(same) == len(rows):
        yield "there are no duplicate rows"
        return

    (text, *_), origins = max(same.items(), key=lambda each: len(each[1]))
    often = f"{_quoted(text, 60)} most often: {len(origins):,} times, in {', '.join(origins[:3])}"
    yield f"{len(rows) - len(same):,} duplicate rows, {often}"


def _shown(rows: "PromptSet", count: int, tokenizer: "PreTrainedTokenizerBase") -> Iterator[str]:
    for row in rows[:count]:
        yield f"row {row.index + 1} ({escape_control(row.origin, one_line=True)})"
        yield from _tokens("prompt, not trained on", row.prompt_ids, tokenizer)
        yield from _response(row, tokenizer)
        if row.ground_truth is not None:
            yield f"  ground truth: {_quoted(row.ground_truth)}"
        if row.domain != "default":
            yield f"  domain: {escape_control(row.domain, one_line=True)}"


def _response(row: "PromptRow", tokenizer: "PreTrainedTokenizerBase") -> Iterator[str]:
    """For supervised data the parts in order; for a preference pair both responses."""
    if row.rejected_ids is not None:
        yield from _tokens("chosen", row.response_ids or (), tokenizer)
        yield from _tokens("rejected", row.rejected_ids, tokenizer)
    elif row.response_ids is not None:
        for segment in row.answer(0):
            trained = "not trained on"
            if segment.owner == "policy":
                trained = "trained on"
            yield from _tokens(f"response, {trained}", segment.token_ids, tokenizer)


def _tokens(what: str, ids: Sequence[int], tokenizer: "PreTrainedTokenizerBase") -> Iterator[str]:
    rest = ""
    if len(ids) > _MAX_IDS:
        rest = f" … {len(ids) - _MAX_IDS:,} more"
    yield f"  {what}, {len(ids):,} tokens: {_quoted(tokenizer.decode(list(ids)))}"
    yield f"    ids {' '.join(map(str, ids[:_MAX_IDS]))}{rest}"


def _quoted(value: object, limit: int = _MAX_TEXT) -> str:
    return escape_control(repr(value), limit, one_line=True)
