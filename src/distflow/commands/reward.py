"""`distflow reward check`: tests a reward function on right and wrong responses to a data set."""

import argparse
import asyncio
import json
import re
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from distflow.commands.arguments import a_time, at_least
from distflow.errors import UserError, count_of
from distflow.observe.sanitized_output import escape_control
from distflow.rewards.reward_results import RIGHT

if TYPE_CHECKING:
    from distflow.data.dataset_columns import RawRow
    from distflow.rewards.reward_check import Agreement, CheckResult, Fault, Row


_EXAMPLES = 3
_SHOWN = 100


def add_reward_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["check"], help="test the reward function")
    parser.add_argument(
        "reward",
        metavar="REWARD",
        help="file.py, file.py:function, module:function or a built-in name",
    )
    parser.add_argument(
        "--data",
        metavar="FILE",
        action="append",
        required=True,
        help="file with rows, as in data.train_files; repeatable",
    )
    parser.add_argument("--prompt-key", default="prompt", help="column of the prompt")
    parser.add_argument("--answer-key", default="answer", help="column of the ground truth")
    parser.add_argument(
        "--response-key", help="column of correct responses, such as reference solutions"
    )
    parser.add_argument(
        "--label-key",
        help="column that says whether the response is correct, to measure the agreement with it",
    )
    parser.add_argument(
        "--right-from",
        type=float,
        default=RIGHT,
        metavar="X",
        help="score from which a response counts as correct",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="treat prompts as chats, as with data.prompt_format=chat",
    )
    parser.add_argument(
        "--options",
        type=_options,
        default={},
        metavar="JSON",
        help="options of the reward function, as a JSON object",
    )
    parser.add_argument(
        "--rows", type=partial(at_least, 0), default=200, help="use the first ROWS rows; 0 is all"
    )
    parser.add_argument(
        "--show",
        type=partial(at_least, 0),
        default=3,
        help="number of faults of each kind to show; 0 is all",
    )
    above_zero = partial(a_time, may_be_zero=False)
    parser.add_argument(
        "--timeout",
        type=above_zero,
        default=10.0,
        metavar="SECONDS",
        help="time limit of one call, in seconds",
    )
    parser.add_argument(
        "--workers", type=partial(at_least, 1), default=2, help="number of reward processes"
    )


def run_reward(arguments: argparse.Namespace) -> int:
    """Print what the reward function scored wrongly; returns 1 if there is anything. Runs its
    code."""
    from distflow.builtin_names import is_own
    from distflow.rewards.adversarial_responses import ASK_MODELS, NUM_ROWS, PROBE, find_cheap
    from distflow.rewards.function_loading import with_answer_key
    from distflow.rewards.pool.domain_pools import alone, is_large
    from distflow.rewards.pool.faulty_test_functions import probe_target
    from distflow.rewards.pool.pool import PoolSettings, RewardPool
    from distflow.rewards.reward_check import check_reward, measure_agreement

    target = _target(arguments.reward, arguments.response_key is not None)
    answer_key = arguments.answer_key if is_own(arguments.reward) else "answer"
    target = with_answer_key(target, arguments.options, answer_key)
    rows, labels, skipped = _rows(arguments)
    if is_large(arguments.reward):
        settings = alone("it", target, arguments.timeout)
    else:
        functions = {"it": target, PROBE: probe_target(target, network=True)}
        settings = PoolSettings(functions, arguments.workers, arguments.timeout)
    try:
        pool = RewardPool(settings)
    except UserError as error:  # no config names the function here
        raise UserError(
            str(error).replace("; see custom_reward_function.path and reward.functions", "")
        ) from error
    try:
        if arguments.label_key is not None:
            agreement = asyncio.run(
                measure_agreement(pool, "it", rows, labels, arguments.right_from)
            )
            lines = _agreement_lines(agreement)
            fault = bool(agreement.failed)
        else:
            result = asyncio.run(check_reward(pool, "it", rows, arguments.workers))
            if arguments.reward not in ASK_MODELS and not result.hangs:
                result.cheap = asyncio.run(find_cheap(pool, rows[:NUM_ROWS]))
            lines = _lines(result, arguments.show)
            fault = result.num_faults > 0
    finally:
        pool.close()
    head = f"{escape_control(arguments.reward, one_line=True)} on {count_of(len(rows), 'row')}"
    if skipped:
        head += (
            f"; {count_of(len(skipped), 'bad row')} skipped, the first: "
            f"{escape_control(skipped[0], one_line=True)}"
        )
    print("\n".join([head, *lines]))
    return int(fault)


def _options(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("write a JSON object, e.g. '{\"n\": 4}'")
    return found


def _target(name: str, has_responses: bool) -> str:
    """Raises UserError for a built-in that does not compare with the answer if no responses are
    given."""
    from distflow.builtin_names import JUDGE, REWARDS
    from distflow.rewards.function_loading import custom_target, target_of

    if name in REWARDS:
        if not (REWARDS[name].needs_answer or has_responses or name == JUDGE):
            raise UserError(
                f"'{name}' does not compare with the row's answer: name a column of correct "
                "responses with "
                "--response-key"
            )
        return target_of(name, None)
    path, _, function = name.partition(":")
    if Path(path).is_dir() and (files := sorted(Path(path).glob("*.py"))):
        raise UserError(f"'{path}' is a folder: name a file in it, e.g. {files[0]}")
    if path.endswith(".py") and not Path(path).expanduser().is_file():
        raise UserError(
            f"there is no file '{path}': name the file with the reward function; see {Path.cwd()}"
        )
    return custom_target(path, function or "compute_score")


def _rows(arguments: argparse.Namespace) -> "tuple[list[Row], list[bool], list[str]]":
    """The rows, whether their responses are right according to a column, and why others were
    skipped. Raises UserError if the column does not say."""
    from distflow.builtin_names import REWARDS
    from distflow.data.dataset_columns import Columns
    from distflow.data.sources import load_rows

    label = arguments.label_key
    entry = REWARDS.get(arguments.reward)
    compares = entry is None or entry.needs_answer
    if label is not None and arguments.response_key is None:
        raise UserError(
            "--label-key says whether responses are correct: name their column with --response-key"
        )
    columns = Columns(
        arguments.prompt_key,
        arguments.answer_key,
        response=arguments.response_key,
        answer_required=label is None and compares,
    )
    with TemporaryDirectory() as folder:
        kwargs: dict[str, Any] = {
            "max_samples": arguments.rows or -1,
            "run_folder": Path(folder),
            "bad_rows": "skip",
        }
        try:
            raw, bad = load_rows(arguments.data, columns, key="--data", **kwargs)
        except UserError as error:  # here options name the columns
            raise UserError(re.sub(r"data\.(\w+)_key", r"--\1-key", str(error))) from error
    labels = [row.extra_info.pop(label, None) for row in raw] if label is not None else []
    if any(found not in (0, 1) for found in labels):
        wrong = next(
            row.origin for row, found in zip(raw, labels, strict=True) if found not in (0, 1)
        )
        raise UserError(
            f"{wrong}: the column '{label}' (--label-key) is neither true nor false, 1 or 0"
        )
    reads_messages = entry is not None and entry.reads_messages
    rows = [_row(row, reads_messages, arguments.chat) for row in raw]
    return rows, [bool(found) for found in labels], bad.reasons


def _row(raw: "RawRow", reads_messages: bool, is_chat: bool) -> "Row":
    from distflow.builtin_names import PROMPT_CHAT, PROMPT_MESSAGES
    from distflow.data.messages import asked_text
    from distflow.rewards.reward_check import Row
    from distflow.rewards.startup_checks import whole

    prompt = raw.prompt
    asked: dict[str, object] = {}
    if is_chat or not isinstance(prompt, str):
        asked[PROMPT_CHAT] = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        )
    if not isinstance(prompt, str):
        prompt = asked_text(prompt)
    response = None if raw.response is None else whole(raw.response, raw.extra_info, prompt)
    if reads_messages:
        asked[PROMPT_MESSAGES] = [{"role": "user", "content": prompt}]
    return Row(raw.origin, raw.domain, raw.answer, {**raw.extra_info, **asked}, response, prompt)


def _agreement_lines(agreement: "Agreement") -> Iterator[str]:
    counts = agreement.counts
    share = agreement.share
    kappa = agreement.kappa
    yield (
        f"  agrees on {share:.1%} of {counts.total()} labelled responses; Cohen's kappa {kappa:.2f}"
    )
    yield f"  {counts[True, False]} false negatives, {counts[False, True]} false positives"
    yield f"  {len(agreement.failed)} reward errors"
    yield from (
        f"      {escape_control(reason, _SHOWN, one_line=True)}"
        for reason in agreement.failed[:_EXAMPLES]
    )


def _lines(result: "CheckResult", shown: int) -> Iterator[str]:
    found = ", ".join(f"{form} {count}" for form, count in result.read.items())
    if result.read:
        yield f"  answers found, of {result.answers}: {found}"
    if result.hangs:
        yield (
            f"  stopped after {count_of(result.num_hangs, 'call')} that did not return in time "
            "(--timeout)"
        )
    elif result.read and not result.forms():
        yield (
            "  it supports none of these forms: see --answer-key, or name correct responses with "
            "--response-key"
        )
        if result.unread is not None:
            yield f"  it {escape_control(result.unread.said(), one_line=True)}"
    if not result.read:
        yield (
            "  the answers are not strings or numbers: only responses wrong for all are tried; see "
            "--response-key"
        )
    width = max(map(len, result.kinds))
    for name, kind in result.kinds.items():
        what = "false negatives" if kind.is_right else "false positives"
        errors = count_of(len(kind.errors), "error")
        hangs = count_of(len(kind.timeouts), "hang")
        counts = f"{len(kind.wrong)} {what}, {errors}, {hangs}"
        yield f"  {name:<{width}}  {kind.asked:>6} asked  {counts}"
        yield from _examples([*kind.wrong, *kind.errors, *kind.timeouts], shown)
    if not result.hangs:
        yield (
            "  responses that do no work but score:"
            if result.cheap
            else "  no response that does no work scores as much as the answer"
        )
    yield from (f"      {line}" for line in result.cheap)
    seconds = sorted(result.seconds)
    yield (
        f"  a call takes {1e3 * statistics.median(seconds):.2f} ms, 99 of 100 below "
        f"{1e3 * seconds[int(0.99 * (len(seconds) - 1))]:.2f} ms, the longest "
        f"{1e3 * seconds[-1]:.0f} ms"
    )
    yield f"  {result.num_faults} faults" if result.num_faults else "  no fault found"


def _examples(faults: "Sequence[Fault]", shown: int) -> Iterator[str]:
    for fault in faults[: shown or None]:
        response = escape_control(repr(fault.response), _SHOWN)
        truth = escape_control(repr(fault.ground_truth), _SHOWN)
        yield (
            f"      {response} for {truth} got {escape_control(fault.said, _SHOWN, one_line=True)} "
            f"({fault.origin})"
        )
    if 0 < shown < len(faults):
        yield f"      and {len(faults) - shown} more; --show 0 shows all"
