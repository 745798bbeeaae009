"""`exact_match`: is the final answer the ground truth, character by character (white space apart)?"""

from distflow.rewards.extracted_answers import marked_answer
from distflow.rewards.score import Case

CASES = (
    Case("Paris", "Paris", True),
    Case(r"It is \boxed{Paris}", " Paris ", True),
    Case("Paris, I think", "Paris", False),
    Case("", "Paris", False),
)


def compute_score(data_source: str, solution_str: str, ground_truth: object, extra_info: object = None) -> float:
    """1.0 or 0.0. The answer is the last box, else what follows the last `####`, else the whole response.

    ground_truth: str or a number, or a list of accepted ones. Raises ValueError if there is none.
    """
    golds = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not golds or any(gold is None or isinstance(gold, dict) for gold in golds):
        raise ValueError(
            f"the ground truth is {ground_truth!r}: 'exact_match' needs a str or a number (data.answer_key)"
        )
    return float(_answer(solution_str) in {_answer(str(gold)) for gold in golds})


def _answer(text: str) -> str:
    marked = marked_answer(text)
    return " ".join((text if marked is None else marked).split())
