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

if TYPE_CHECKING:
    from distflow.data.dataset_columns import RawRow
    from distflow.rewards.reward_check import CheckResult, Fault, Row


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
    from distflow.rewards.function_loading import with_answer_key
    from distflow.rewards.pool.domain_pools import alone, is_large
    from distflow.rewards.pool.pool import PoolSettings, RewardPool
    from distflow.rewards.reward_check import check_reward

    target = _target(arguments.reward, arguments.response_key is not None)
    answer_key = "answer"
    if is_own(arguments.reward):
        answer_key = arguments.answer_key

    target = with_answer_key(target, arguments.options, answer_key)
    rows, skipped = _rows(arguments)

    if is_large(arguments.reward):
        settings = alone("it", target, arguments.timeout)
    else:
        settings = PoolSettings({"it": target}, arguments.workers, arguments.timeout)

    try:
        pool = RewardPool(settings)
    except UserError as error:  # no config names the function here
        raise UserError(
            str(error).replace("; see custom_reward_function.path and reward.functions", "")
        ) from error

    try:
        result = asyncio.run(check_reward(pool, "it", rows, arguments.workers))
    finally:
        pool.close()

    head = f"{escape_control(arguments.reward, one_line=True)} on {count_of(len(rows), 'row')}"
    if skipped:
        head += (
            f"; {count_of(len(skipped), 'bad row')} skipped, the first: "
            f"{escape_control(skipped[0], one_line=True)}"
        )

    print("\n".join([head, *_lines(result, arguments.show)]))
    return int(result.num_faults > 0)


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
                "responses with --response-key"
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


def _rows(arguments: argparse.Namespace) -> "tuple[list[Row], list[str]]":
    """The rows, and why others were skipped."""
    from distflow.builtin_names import REWARDS
    from distflow.data.dataset_columns import Columns
    from distflow.data.sources import load_rows

    entry = REWARDS.get(arguments.reward)
    columns = Columns(
        arguments.prompt_key,
        arguments.answer_key,
        response=arguments.response_key,
        answer_required=entry is None or entry.needs_answer,
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

    reads_messages = entry is not None and entry.reads_messages
    rows = [_row(row, reads_messages, arguments.chat) for row in raw]
    return rows, bad.reasons


def _row(raw: "RawRow", reads_messages: bool, is_chat: bool) -> "Row":
    from distflow.builtin_names import PROMPT_CHAT, PROMPT_MESSAGES
    from distflow.data.messages import asked_text
    from distflow.rewards.reward_check import Row

    prompt = raw.prompt
    asked: dict[str, object] = {}
    if is_chat or not isinstance(prompt, str):
        if isinstance(prompt, str):
            asked[PROMPT_CHAT] = [{"role": "user", "content": prompt}]
        else:
            asked[PROMPT_CHAT] = list(prompt)

    if not isinstance(prompt, str):
        prompt = asked_text(prompt)
    if reads_messages:
        asked[PROMPT_MESSAGES] = [{"role": "user", "content": prompt}]
    return Row(
        raw.origin, raw.domain, raw.answer, {**raw.extra_info, **asked}, raw.response, prompt
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
