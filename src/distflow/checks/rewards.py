"""Checks: a sample's scores are those that the reward functions gave for its own text, a second
call returns them again, and they are what the sample is trained on."""

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from distflow.checks.check import NOT_APPLICABLE, Wrong, check
from distflow.checks.group_records import GroupRecord
from distflow.checks.recorded_step import SCORES_LAST_REPLY, RecordedStep
from distflow.checks.samples import Sample, index_of
from distflow.config import Config
from distflow.config.derived_settings import response_limit
from distflow.config.keys.reward import RewardPart, on_error_of, scoring_models
from distflow.data.messages import prompt_of
from distflow.rewards.foreign_signatures import DOES_NOT_APPLY
from distflow.rewards.function_calls import CONVERSATION, PROMPT, call_arguments
from distflow.rewards.function_loading import FAILS
from distflow.rewards.pool.faulty_test_functions import ECHO, echo
from distflow.rewards.reward_results import RewardResult, Score
from distflow.rewards.router import Overlong

LIMIT = 1e-4
"""For accuracies, which are float32."""
SUM_LIMIT = 1e-9
MOST = 16
NOT_DETERMINISTIC = "not_deterministic"
"""Key of the state: names of reward functions that are not called again."""


@check(
    "reward_results",
    "each reward function got the sample's own text and ground truth, the sample has its score "
    "and accuracy, and a second call returns the same score",
    needs="deterministic functions of reward.functions; for batched functions only the arguments "
    "are checked",
    limit=f"equal, {MOST} samples, as far as time allows",
)
def check_reward_results(recorded: RecordedStep) -> str | None:
    if recorded.run.resources.reward_fn is None:
        return NOT_APPLICABLE
    if not recorded.is_ours("reward_parts"):
        return "no built-in node or workflow decides the scores"

    drawn = list[tuple[Sample, GroupRecord]]()
    for sample in recorded.some_samples(MOST):
        record = recorded.record_of(sample)
        failed = not sample["valid"] or sample["reward_errors"] is not None

        # a failed episode may never have requested a score
        if record is None or (failed and not recorded.is_ours("responses")):
            continue

        drawn.append((sample, record))
        for name in functions_of(recorded, sample):
            _own_score(recorded, record, sample, name)
        _own_accuracy(recorded, record, sample)

    if recorded.budget_s and drawn:
        _check_calls(recorded, *drawn[0])
    return _call_again(recorded, drawn)


def _call_again(recorded: RecordedStep, drawn: Sequence[tuple[Sample, GroupRecord]]) -> str | None:
    """Call the functions again as far as time allows. One that gives another score is not called
    any more."""
    run = recorded.run
    reward_fn = run.resources.reward_fn
    assert reward_fn is not None, "called only if there is one"
    left_out = run.state.setdefault(NOT_DETERMINISTIC, [])
    num_called = 0
    began = time.monotonic()  # so that even a busy machine has time for one call

    for sample, record in drawn:
        if time.monotonic() - began >= recorded.budget_s:
            break

        for name in functions_of(recorded, sample):
            # scored alone, a sample may get another score than in its group
            if name in left_out or name in reward_fn.pools.takes_groups:
                continue

            score = _own_score(recorded, record, sample, name)
            again = run.call_reward(name, _arguments(recorded, sample, name))
            num_called += 1
            if score is None or not isinstance(again, Score) or again.value == score:
                continue

            left_out.append(name)
            run.warn(
                f"reward function '{name}' is not deterministic: for sample {sample['uid']} the "
                f"score was {score}, and is {again.value} in a second call. Its scores cannot be "
                "checked, and are not called again from here on. If it scores a sandbox or service "
                "that fails, or a timeout, as 0, let it raise instead: reward errors are retried, "
                "then left out of the loss and counted"
            )

    if num_called:
        return None
    return "no reward function could be called again in time, or none is deterministic"


@check(
    "rewards",
    "a sample's score is the weighted sum of its own scores and the overlong penalty, or its "
    "workflow's; it is on the last token, and a turn's reward on the turn's last token",
    needs="scores of the built-in reward nodes",
    limit=f"{SUM_LIMIT:g} relative",
)
def check_rewards(recorded: RecordedStep) -> str | None:
    if not recorded.is_ours("scores"):
        is_written = recorded.is_written("scores")
        if is_written:
            return "a user's node writes the scores"
        return NOT_APPLICABLE

    for sample in recorded.samples:
        if not sample["valid"]:
            continue
        if recorded.config.algorithm.reward_level == "token":
            _check_places(sample)
        _check_total(recorded, sample)

    return None


def functions_of(recorded: RecordedStep, sample: Sample) -> dict[str, float]:
    """Names and weights of the reward functions of the sample's domain."""
    return {part.name: part.weight for part in parts_of_domain(recorded.config, sample["domain"])}


def parts_of_domain(config: Config, name: str) -> Sequence[RewardPart]:
    domain = config.data.domains.get(name)
    functions = config.reward.functions
    return (domain and domain.reward) or functions.get(name) or functions.get("default") or ()


def accuracies(record: GroupRecord, text: str) -> list[float]:
    """What the reward functions said of the correctness of a text: their `acc`, else their
    score."""
    found = list[float]()
    for _, arguments, result in record.scored:
        is_its_own = arguments.get("solution_str") == text
        if is_its_own and isinstance(result, Score) and DOES_NOT_APPLY not in result.extra:
            said: Any = result.extra.get("acc")
            found.append(float(result.value if said is None else said))

    return found


def _own_accuracy(recorded: RecordedStep, record: GroupRecord, sample: Sample) -> None:
    """Check that `acc`, by which groups are filtered and samples count as right, was given for the
    sample's text."""
    failed = not sample["valid"] or sample.get("reward_errors") is not None
    if failed or not recorded.is_ours("acc"):
        return

    found = float(sample["acc"])
    stated = accuracies(record, _arguments(recorded, sample)["solution_str"])
    if stated and not any(abs(found - own) <= LIMIT * max(abs(own), 1.0) for own in stated):
        raise Wrong(
            f"sample {sample['uid']} has the accuracy {found:g}, but of its text the reward "
            f"functions gave {', '.join(f'{own:g}' for own in stated)}: it was taken from another "
            "sample, or changed on the way into the batch"
        )


def _check_calls(recorded: RecordedStep, sample: Sample, record: GroupRecord) -> None:
    """Test calls: a failing function gives no score, and one that computes a number from its
    arguments gives the sample's, so nothing is cut, swapped, rounded or cached on the way to a
    reward function and back."""
    failed = recorded.run.call_reward(FAILS, call_arguments("", "", "", {}))
    if isinstance(failed, Score):
        raise Wrong(f"a reward function that raises must give no score, but it gave {failed.value}")

    row = recorded.run.row(record.prompt_group.row)
    text = str(sample["responses"])
    first = f" {text}{ECHO}"
    last = f"{text[::-1]}\n"

    backwards = (first + last)[::-1].replace(ECHO[::-1], ECHO)
    for said in (first + last, first + "x" + last, backwards):
        arguments = (said, row.ground_truth, row.extra_info or {})
        result = recorded.run.call_reward(FAILS, call_arguments(row.domain, *arguments))
        if isinstance(result, Score) and result.value != echo(*arguments):
            raise Wrong(
                f"a number made of the arguments of sample {sample['uid']} came back as "
                f"{result.value!r}, not {echo(*arguments)!r}: reward functions get other "
                "arguments, or give other scores"
            )


def _own_score(
    recorded: RecordedStep, record: GroupRecord, sample: Sample, name: str
) -> float | None:
    """The sample's score, None for an error. Raises Wrong if the scored text or the score is
    another sample's."""
    wanted = _arguments(recorded, sample, name)
    del wanted[PROMPT]  # a user's rollout may use a prompt other than the row's

    results = []
    for called, given, result in record.scored:
        arguments = {key: given.get(key) for key in wanted}
        arguments["extra_info"] = given.get("extra_info") or {}
        if called == name and arguments == wanted:
            results.append(result)

    if not results:
        raise Wrong(
            f"reward function '{name}' was never called with the response of sample "
            f"{sample['uid']} ({wanted['solution_str'][:80]!r}) and the ground truth "
            f"({str(wanted['ground_truth'])[:80]!r}), domain and extra_info of its row: it was "
            "scored with another's data"
        )

    # A sample with a reward error may be valid: reward.on_error can assign a score.
    score = sample["reward_parts"].get(name)
    valid = bool(sample["valid"]) and sample.get("reward_errors") is None

    scores = list[float | None]()
    for result in results:
        if isinstance(result, Score):
            scores.append(None if DOES_NOT_APPLY in result.extra else result.value)

    if valid and score not in scores:
        raise Wrong(
            f"sample {sample['uid']} has the score {score} of reward function '{name}', which gave "
            f"{_shown(results)} for its response: scores are assigned to other samples, or a "
            "failed one was counted, as a 0 say"
        )
    if not valid and sample.get("reward_errors") is None:
        raise Wrong(f"sample {sample['uid']} is marked as having no score, without a reward error")

    return score if valid else None


def _arguments(recorded: RecordedStep, sample: Sample, name: str = "") -> dict[str, Any]:
    """Arguments of a call for the sample alone, from its row and tokens. A user's node decides
    which text is scored. name: of the function."""
    row = recorded.run.row(recorded.records[int(sample["group_index"])].prompt_group.row)
    text = sample["responses"]
    if recorded.is_ours("responses"):
        text = recorded.run.text((*sample["response_ids"].tolist(),))
    extra_info = row.extra_info or {}
    reward_fn = recorded.run.resources.reward_fn
    said = sample.get("conversation")
    own = {
        PROMPT: prompt_of(row.prompt_text, extra_info),
        **call_arguments(row.domain, text, row.ground_truth, extra_info),
    }
    if said and reward_fn is not None and name in reward_fn.pools.takes_conversations:
        own[CONVERSATION] = list(said)
    return own


def _shown(results: Sequence[RewardResult]) -> str:
    return ", ".join(
        str(result.value) if isinstance(result, Score) else f"no score ({result})"
        for result in results
    )


def _expected_score(recorded: RecordedStep, sample: Sample) -> float:
    """The score that the sample's parts make, or that the built-in nodes have given it."""
    config = recorded.config
    domain = sample["domain"]

    if sample["reward_errors"] is not None:
        fallback = on_error_of(config.reward, domain)
        if isinstance(fallback, float):
            return fallback

        raise Wrong(
            f"sample {sample['uid']} has a score in spite of reward errors: "
            f"{sample['reward_errors']}"
        )

    parts = sample["reward_parts"]
    models = scoring_models(config.reward_model, domain)

    workflow = config.actor_rollout_ref.rollout.workflow
    if workflow is None and recorded.is_ours("reward_parts"):
        weights = functions_of(recorded, sample)
        for name, model in models.items():
            weights[name] = model.weight
        zone = config.reward.overlong
        overlong = Overlong(zone.buffer_tokens, zone.factor)
        length = len(sample["response_ids"])
        score = math.fsum(weight * parts.get(name, 0.0) for name, weight in weights.items())
        return score + overlong.penalty(length, response_limit(config, domain))

    returned = _returned(recorded, sample)
    if workflow in SCORES_LAST_REPLY or returned is None:
        return float(sample["scores"])

    score = returned - getattr(config.reward.limit_penalty, sample["finish_reason"], 0.0)
    if any("scores" in step.node.contract.writes for step in recorded.run.training_steps):
        for name, model in models.items():
            score += parts.get(name, math.nan) * model.weight

    return score


def _check_total(recorded: RecordedStep, sample: Sample) -> None:
    """The score on the sample's tokens is the expected one."""
    wanted = _expected_score(recorded, sample)
    found = float(sample["token_level_scores"].double().sum())
    parts = sample["reward_parts"]

    sizes = [abs(part) for part in parts.values()]
    if abs(found - wanted) > SUM_LIMIT * max([1.0, abs(wanted), *sizes]):
        raise Wrong(
            f"sample {sample['uid']} has the score {found:g}, but by its parts {dict(parts)}, or "
            f"what its workflow returned, it is {wanted:g}: something is added, left out or "
            "weighted otherwise than in reward.functions, or it is another sample's"
        )


def _returned(recorded: RecordedStep, sample: Sample) -> float | None:
    """The score that the workflow returned for the sample's episode."""
    record = recorded.record_of(sample)
    if record is not None:
        for event in record.events.get(index_of(sample), ()):
            if event[0] == "returned":
                return float(event[1])
    return None


def _check_places(sample: Sample) -> None:
    """Only the policy's last token has a score, and the last token of each turn."""
    may = torch.zeros(len(sample["response_ids"])).bool()
    drawn = (sample["response_mask"] > 0).nonzero()[:, 0]
    if len(drawn):
        may[drawn[-1]] = True

    if "turn_index" in sample:
        turn = sample["turn_index"]
        after = torch.cat([turn[1:], turn.new_full((1,), -1)])[: len(turn)]
        may |= (turn >= 0) & (turn != after)

    wrong = (sample["token_level_scores"] != 0) & ~may
    if bool(wrong.any()):
        token = int(wrong.nonzero()[0])
        raise Wrong(
            f"token_level_scores of sample {sample['uid']} is "
            f"{float(sample['token_level_scores'][token]):g} at token {token} of {len(may)}, but "
            "should be 0: a score is on the policy's last token, or on the last of a turn"
        )
