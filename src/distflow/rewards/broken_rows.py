"""Rows of which a reward could judge no response: their tests are no Python, their instructions unknown."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import cast

from distflow.config.functions import load
from distflow.config.names import REWARDS

Check = Callable[[object, Mapping[str, object]], None]


def find_broken(names: Iterable[str], ground_truth: object, extra_info: Mapping[str, object]) -> str:
    """Why one of these rewards can give no verdict on the row, whatever is answered; empty where all can. Runs no
    code of the row."""
    for name in names:
        check = _check_of(name)
        try:
            if check is not None:
                check(ground_truth, extra_info)
        except ValueError as error:
            return str(error)
    return ""


@cache
def _check_of(name: str) -> Check | None:
    entry = REWARDS.get(name)
    return cast(Check, load(entry.row_check)) if entry is not None and entry.row_check else None
