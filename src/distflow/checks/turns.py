"""Check: where a user's node or a workflow calls the engine, the policy's tokens are those that it
drew for the sample."""

import torch

from distflow.checks.check import NOT_APPLICABLE, Wrong, check, check_same, check_tokens
from distflow.checks.recorded_step import RecordedStep
from distflow.checks.samples import Sample, conversations_of

COLUMNS = {
    "rollout_log_probs": "rollout_log_probs",
    "versions": "versions",
    "action_values": "values",
    "top_ids": "top_ids",
    "top_log_probs": "top_log_probs",
}
"""Columns of the engine's numbers, with the names that a generation gives them."""


@check(
    "turns",
    "if a user's node calls the engine, the policy's tokens are those that the engine generated "
    "for the sample, with their log-probs and versions",
    needs="samples that this process generated",
    limit="equal",
)
def check_turns(recorded: RecordedStep) -> str | None:
    if recorded.is_ours("responses") or not recorded.is_written("rollout_log_probs"):
        return NOT_APPLICABLE

    asked = [sample for sample in recorded.samples if recorded.requests(sample)]
    for sample in asked:
        _check_sample(recorded, sample)
    if asked:
        return None

    return "no request of this process to the engine is for its samples"


def _check_sample(recorded: RecordedStep, sample: Sample) -> None:
    uid = sample["uid"]
    of_policy = sample["versions"] >= 0
    drawn = torch.zeros(len(of_policy)).bool()
    kept = recorded.num_used(sample)
    firsts = [talk.first for talk in conversations_of(sample)]
    images = dict(zip(firsts, sample.get("images", ()), strict=False))

    for turn in recorded.turns(sample):
        tokens = slice(turn.start, turn.end)
        number = turn.end - turn.start
        drawn[tokens] = True
        seen = images.get(turn.conversation.first, [])
        check_same(sample, "images", seen, list(turn.request.images), "the engine's request")

        used = slice(turn.start, turn.start + kept.get(turn.conversation.name, number))
        if bool(of_policy[used.stop : turn.end].any()):
            raise Wrong(
                f"sample {uid} is trained on tokens from {used.stop} on, which its workflow did "
                "not use"
            )

        given = (~of_policy[used]).nonzero()
        if len(given) and number == len(turn.generation.token_ids):
            token = turn.start + int(given[0])
            raise Wrong(
                f"token {token} of sample {uid} counts as given, but the engine drew it for the "
                "sample"
            )

        for column, name in COLUMNS.items():
            if column not in sample:
                continue

            expected = sample[column].clone()
            numbers = getattr(turn.generation, name)[:number]
            drawn_here = torch.tensor(numbers, dtype=expected.dtype)
            expected[tokens] = drawn_here.view_as(expected[tokens])
            wrong = sample[column] != expected
            wrong[~of_policy] = False
            check_tokens(sample, column, expected, wrong, " by the engine")

    others = (of_policy & ~drawn).nonzero()
    if len(others):
        raise Wrong(
            f"token {int(others[0])} of sample {uid} counts as the policy's, but no request for "
            "this sample drew it after the tokens before it: it was given, tokenised again, or "
            "drawn for another sample or prompt"
        )
