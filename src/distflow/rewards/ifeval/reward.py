"""`ifeval`: does the response follow the machine-checkable instructions of its prompt?

Zhou et al. 2023, arXiv:2311.07911; as google-research's `evaluation_lib.py`, strict and loose.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from distflow.observe.files import JSON
from distflow.rewards.ifeval.checks import INSTRUCTIONS, follows
from distflow.rewards.known_solutions import decoded
from distflow.rewards.score import Case

IDS, KWARGS = "instruction_id_list", "kwargs"
_EXAMPLE = {
    IDS: ["punctuation:no_comma", "length_constraints:number_words"],
    KWARGS: [{}, {"num_words": 3, "relation": "at least"}],
}
CASES = (
    Case("one two three", None, True, _EXAMPLE),
    Case("one, two", None, False, _EXAMPLE),
    Case("", None, False, _EXAMPLE),
    Case('{"a": 1}', {IDS: ["detectable_format:json_format"], KWARGS: [{}]}, True),
    Case("a: 1", {IDS: ["detectable_format:json_format"], KWARGS: [{}]}, False),
)


def compute_score(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Mapping[str, object] | None = None
) -> dict[str, JSON]:
    """1.0 if the response follows all instructions, else 0.0 (the paper's prompt-level strict accuracy).

    ground_truth: a mapping with `instruction_id_list` and `kwargs`, or JSON of one; else the row's columns of these
    names. `followed` in the result says of each instruction whether it was followed.
    Raises ValueError for an instruction that is unknown, or has invalid arguments.
    """
    return _follow_all([solution_str], _instructions(ground_truth, extra_info))


def compute_loose_score(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Mapping[str, object] | None = None
) -> dict[str, JSON]:
    """As `compute_score`, but an instruction also counts as followed if the response without its first line, its last
    line, both, or asterisks follows it (prompt-level loose accuracy)."""
    return _follow_all(_variants(solution_str), _instructions(ground_truth, extra_info))


def compute_share(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Mapping[str, object] | None = None
) -> dict[str, JSON]:
    """The share of instructions that are followed (instruction-level strict accuracy); a response is still correct
    (`acc`) only if it follows all."""
    reward_result = _follow_all([solution_str], _instructions(ground_truth, extra_info))
    followed = reward_result["followed"]
    assert isinstance(followed, dict)
    return {**reward_result, "score": sum(map(bool, followed.values())) / len(followed)}


def check_row(ground_truth: object, extra_info: Mapping[str, object]) -> None:
    """Raises ValueError if no response to the row can be scored."""
    _instructions(ground_truth, extra_info)


def _follow_all(variants: list[str], instructions: list[tuple[str, dict[str, Any]]]) -> dict[str, JSON]:
    followed: dict[str, JSON] = {}
    for name, arguments in instructions:
        found = any(follows(text, name, arguments) for text in variants)
        repeats = sum(other.partition("#")[0] == name for other in followed)
        followed[f"{name}#{repeats + 1}" if repeats else name] = found
    score = float(all(followed.values()))
    return {"score": score, "acc": score, "followed": followed}


def _variants(response: str) -> list[str]:
    lines = response.split("\n")
    variants = [response, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return list(dict.fromkeys([*variants, *(text.replace("*", "") for text in variants)]))


def _instructions(ground_truth: object, row: Mapping[str, object] | None) -> list[tuple[str, dict[str, Any]]]:
    """(name, arguments) of each. Raises ValueError."""
    given = decoded(ground_truth)
    source = given if isinstance(given, Mapping) and IDS in given else row or {}
    names, kwargs = decoded(source.get(IDS)), decoded(source.get(KWARGS))
    if not isinstance(names, list | tuple) or not isinstance(kwargs, list | tuple) or not names:
        raise ValueError(f"'ifeval' needs a row with a list '{IDS}' and a list '{KWARGS}', or both in its ground truth")
    if len(names) != len(kwargs):
        raise ValueError(f"{len(names)} entries in '{IDS}' and {len(kwargs)} in '{KWARGS}'")
    return [(name, _arguments(name, given)) for name, given in zip(_known(names), kwargs, strict=True)]


def _known(names: Iterable[object]) -> list[str]:
    for name in names:
        if not isinstance(name, str) or name not in INSTRUCTIONS:
            raise ValueError(f"no instruction of IFEval is called {name!r:.80} ('{IDS}')")
    return [str(name) for name in names]


def _arguments(name: str, given: object) -> dict[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"'{KWARGS}' holds {given!r:.80}, and no mapping, for {name}")
    try:
        return INSTRUCTIONS[name].read(given or {})
    except ValueError as error:
        raise ValueError(f"{name} in '{KWARGS}': {error}") from error
