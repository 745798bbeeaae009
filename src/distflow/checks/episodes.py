"""Check: an episode was trained on as it happened, according to events at the boundaries of our
code: what was said, which rewards were paid, and which text was scored."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from distflow.checks.check import NOT_APPLICABLE, Wrong, check, check_tokens
from distflow.checks.recorded_step import RecordedStep, RecordedTurn
from distflow.checks.samples import Sample, conversations_of, index_of

MOST = 16
PAID_LIMIT = 1e-12
"""Relative: rewards of turns are multiples of a unit."""


class Said(NamedTuple):
    """What a workflow said in one turn (see `on_event`), and the position of the reply in the
    sample."""

    name: str
    """Of the conversation."""
    said: Any
    drawn: tuple[int, ...]
    place: RecordedTurn


@check(
    "episodes",
    "each turn's tokens contain what the workflow said and have the reward that it paid, and the "
    "scored texts are those that it passed",
    needs="a workflow other than AReaL's, and samples that this process generated",
    limit=f"equal, {MOST} samples",
)
def check_episodes(recorded: RecordedStep) -> str | None:
    if recorded.config.actor_rollout_ref.rollout.workflow is None:
        return NOT_APPLICABLE

    is_any_known = False
    for sample in recorded.some_samples(MOST):
        turns = _turns_of(recorded, sample)
        if turns is None:
            continue

        is_any_known = True
        _check_numbers(sample, turns)
        _check_said(recorded, sample, turns)
        _check_scored_text(recorded, sample)
        if sample["reward_errors"] is None and bool(sample["valid"]):
            _check_paid(recorded, sample, turns)

    if is_any_known:
        return None
    return "no episode's events are known"


def _events(recorded: RecordedStep, sample: Sample) -> list[tuple[Any, ...]]:
    record = recorded.record_of(sample)
    events = record.events.get(index_of(sample), []) if record is not None else []
    return _of_trained(recorded, events)


def _of_trained(recorded: RecordedStep, events: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The events without those of untrained agents' conversations, which are in no sample."""
    agents = recorded.config.actor_rollout_ref.rollout.agents
    found = list[tuple[Any, ...]]()
    for event in events:
        if agents and event[0] in ("turn", "paid"):
            name = event[1].split(".")[0]
            if not agents[name if name in agents else next(iter(agents))].trainable:
                continue
        found.append(event)

    return found


def _turns_of(recorded: RecordedStep, sample: Sample) -> list[Said] | None:
    """The turns of the sample in chronological order, as far as they had an effect; None if its
    events are not known."""
    kept = recorded.num_used(sample)
    places: dict[str, list[RecordedTurn]] = {}
    for turn in recorded.turns(sample):
        name = turn.conversation.name
        if name in kept:
            turn = turn._replace(end=turn.start + kept[name])
        places.setdefault(name, []).append(turn)

    found = []
    for kind, *values in _events(recorded, sample):
        if kind != "turn" or not values[-1]:
            continue
        name, said, drawn = values
        if not places.get(name):
            return None
        found.append(Said(name, said, drawn, places[name].pop(0)))

    if any(places.values()):
        return None
    return found or None


def _check_numbers(sample: Sample, turns: Sequence[Said]) -> None:
    if "turn_index" not in sample:
        return

    wanted = torch.full_like(sample["turn_index"], -1)
    for number, turn in enumerate(sorted(turns, key=lambda turn: turn.place.start)):
        wanted[turn.place.start : turn.place.end] = number
    wrong = sample["turn_index"] != wanted
    check_tokens(sample, "turn_index", wanted, wrong, ", the number of its turn")


def _check_said(recorded: RecordedStep, sample: Sample, turns: Sequence[Said]) -> None:
    """Compares without whitespace, which chat templates change."""
    for talk in conversations_of(sample):
        before = 0
        for turn in turns:
            if turn.name != talk.name:
                continue

            tokens = tuple(talk.ids[before : turn.place.start - talk.first])
            before = turn.place.end - talk.first
            found = "".join(recorded.run.text(tokens).split())

            for text in _texts(recorded, turn.said):
                if "".join(text.split()) not in found:
                    raise Wrong(
                        f"the tokens before token {turn.place.start} of sample {sample['uid']} are "
                        f"{recorded.run.text(tokens)!r:.200}, without {text!r:.200}, which its "
                        "workflow said"
                    )


def _texts(recorded: RecordedStep, said: Any) -> list[str]:
    """The texts of the user in what was said, as the tokenizer writes them."""
    if isinstance(said, str | Mapping):
        said = [said]

    if not isinstance(said, list | tuple):
        return []

    texts = []
    for text in said:
        if isinstance(text, Mapping):
            if text.get("role") != "user":
                continue
            text = text.get("content")

        if isinstance(text, str):
            ids = recorded.run.resources.tokenizer.encode(text, add_special_tokens=False)
            texts.append(recorded.run.text(tuple(ids)))

    return texts


def _check_paid(recorded: RecordedStep, sample: Sample, turns: Sequence[Said]) -> None:
    """Each turn but the last in time, which has the rest of the score, has the reward that was paid
    for it, on its last token."""
    algorithm = recorded.config.algorithm
    if algorithm.reward_level != "token" or algorithm.agent_rewards != "shared":
        return

    expected = torch.zeros(len(sample["response_ids"]), dtype=torch.float64)
    ends = dict[str, int]()
    left = iter(turns)

    for kind, name, *values in _events(recorded, sample):
        if kind == "turn" and values[-1]:
            ends[name] = next(left).place.end
        elif kind == "paid":
            expected[ends[name] - 1] += values[0]

    found = sample["token_level_scores"].double()
    rest = turns[-1].place.end - 1
    expected[rest] = found[rest]
    limit = PAID_LIMIT * float(found.abs().sum() + 1)
    reason = ", what its turns were paid"
    wrong = (found - expected).abs() > limit
    check_tokens(sample, "token_level_scores", expected, wrong, reason)


def _check_scored_text(recorded: RecordedStep, sample: Sample) -> None:
    """Check that the scored texts of the group are those that its episodes passed."""
    record = recorded.record_of(sample)
    if record is None or "reward_baselines" in sample:
        return
    if not all("solution_str" in given for _, given, _ in record.scored):
        return

    passed = set[str]()
    for events in record.events.values():
        last: tuple[int, ...] = ()
        for kind, *values in _of_trained(recorded, events):
            if kind == "turn" and values[-1]:
                last = values[-1]
            elif kind == "judged":
                text = values[0]
                passed.add(recorded.run.text(tuple(last)) if text is None else str(text))

    scored = {str(given["solution_str"]) for _, given, _ in record.scored}
    if passed != scored:
        text = sorted(passed ^ scored)[0]
        what = "scored, but no episode passed it"
        if text in passed:
            what = "passed for a score, but was never scored"
        raise Wrong(f"the text {text[:80]!r} of the group of sample {sample['uid']} was {what}")
