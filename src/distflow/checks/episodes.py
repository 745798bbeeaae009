"""Check: an episode was trained on as it happened, according to events at the boundaries of our
code: what was said, what the user's process received and returned, and which text was scored."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from operator import eq
from typing import Any, NamedTuple

import torch

from distflow.builtin_names import PROMPT_CHAT, ROLLOUT_ENGINES
from distflow.checks.check import NOT_APPLICABLE, Wrong, check, check_tokens
from distflow.checks.recorded_step import RecordedStep, RecordedTurn
from distflow.checks.samples import Conversation, Sample, conversations_of, index_of
from distflow.config.keys.rollout import AgentConfig, RolloutConfig

MOST = 16
PAID_LIMIT = 1e-12
"""Relative: rewards of turns are multiples of a unit."""
QUESTION = "a question of the checks"
REPLY = "a reply of the checks"


class Said(NamedTuple):
    """What a workflow said in one turn (see `on_event`), and the position of the reply in the
    sample."""

    name: str
    """Of the conversation."""
    templated: bool
    said: Any
    tools: Sequence[Mapping[str, Any]]
    drawn: tuple[int, ...]
    place: RecordedTurn


@check(
    "episodes",
    "the tokens before each turn equal the workflow's messages, rendered again; an environment was "
    "reset with its row's options and its group's seed and received each reply; observations and "
    "results of tools were passed on unchanged; each turn has the reward that was paid for it, at "
    "most the tokens that were asked for, and ends at a stop; an agent begins with its system "
    "prompt; the scored texts are those that the workflow passed",
    needs="a workflow other than AReaL's, and samples that this process generated; for tokens a "
    "fast tokenizer",
    limit=f"equal, {MOST} samples",
)
def check_episodes(recorded: RecordedStep) -> str | None:
    rollout = recorded.config.actor_rollout_ref.rollout
    if rollout.workflow is None:
        return NOT_APPLICABLE
    is_any_known = False
    for sample in recorded.some_samples(MOST):
        turns = _turns_of(recorded, sample)
        if turns is None:
            continue
        is_any_known = True
        _check_given(recorded, sample, turns)
        _check_numbers(sample, turns)
        _check_scored_text(recorded, sample)
        _check_replies(recorded, sample)
        if sample["reward_errors"] is not None or not bool(sample["valid"]):
            continue
        _check_paid(recorded, sample, turns)
        workflow = _workflow_of(rollout, sample["domain"])
        if workflow == "environment":
            _check_environment(recorded, sample, turns)
        elif workflow == "tools":
            _check_tools(recorded, sample, turns)
    return None if is_any_known else "no episode's events are known"


def _events(recorded: RecordedStep, sample: Sample) -> list[tuple[Any, ...]]:
    """The episode's events without those of untrained agents' conversations, which are in no
    sample."""
    record = recorded.record_of(sample)
    events = record.events.get(index_of(sample), []) if record is not None else []
    return _of_trained(recorded, events)


def _of_trained(recorded: RecordedStep, events: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    agents = recorded.config.actor_rollout_ref.rollout.agents
    if not agents:
        return [*events]
    found = list[tuple[Any, ...]]()
    for event in events:
        if event[0] in ("turn", "limit", "paid", "forked"):
            name = event[1].split(".")[0]
            agent = agents[name if name in agents else next(iter(agents))]
            if not agent.trainable:
                continue
        found.append(event)
    return found


def _turns_of(recorded: RecordedStep, sample: Sample) -> list[Said] | None:
    """The turns of the sample in chronological order, as far as they had an effect; None if its
    events are not known."""
    drawn = [event[1:] for event in _events(recorded, sample) if event[0] == "turn" and event[-1]]
    if not drawn:
        return None
    kept = recorded.num_used(sample)
    places: dict[str, list[RecordedTurn]] = {}
    for turn in recorded.turns(sample):
        name = turn.conversation.name
        end = turn.start + kept[name] if name in kept else turn.end
        places.setdefault(name, []).append(turn._replace(end=end))
    if Counter(each[0] for each in drawn) != {name: len(own) for name, own in places.items()}:
        return None
    left = {name: iter(own) for name, own in places.items()}
    # as many as it has
    return [Said(*each, next(left[each[0]])) for each in drawn]  # type: ignore[call-arg]


def _check_numbers(sample: Sample, turns: Sequence[Said]) -> None:
    if "turn_index" not in sample:
        return
    wanted = torch.full_like(sample["turn_index"], -1)
    for number, turn in enumerate(sorted(turns, key=lambda turn: turn.place.start)):
        wanted[turn.place.start : turn.place.end] = number
    wrong = sample["turn_index"] != wanted
    check_tokens(sample, "turn_index", wanted, wrong, ", the number of its turn")


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


def _check_given(recorded: RecordedStep, sample: Sample, turns: Sequence[Said]) -> None:
    begun = {event[1]: event[2:] for event in _events(recorded, sample) if event[0] == "forked"}
    # its calls contain the whole history
    is_agent = recorded.config.actor_rollout_ref.rollout.workflow == "agent"
    for talk in conversations_of(sample):
        same, history = begun.get(talk.name, ((), []))
        if tuple(talk.ids[: len(same)]) != tuple(same):
            raise Wrong(
                f"conversation {talk.name} of sample {sample['uid']} does not begin with what it "
                "forked from"
            )
        own = [turn for turn in turns if turn.name == talk.name]
        _check_talk(recorded, sample, talk, own, len(same), [] if same or is_agent else history)


def _check_talk(
    recorded: RecordedStep,
    sample: Sample,
    talk: Conversation,
    turns: Sequence[Said],
    before: int,
    history: Sequence[Mapping[str, Any]],
) -> None:
    """before: tokens that the conversation forked from. history: messages before the first turn."""
    for turn in turns:
        start = turn.place.start - talk.first
        told = _rendered(recorded, sample, turn, talk.ids[:before], history)
        if told is not None and talk.ids[before:start] != told:
            decode = recorded.run.resources.tokenizer.decode
            raise Wrong(
                f"the tokens before token {turn.place.start} of sample {sample['uid']} are "
                f"{decode(talk.ids[before:start])!r:.200}, but of what its workflow said they are "
                f"{decode(told)!r:.200}: the chat template was filled wrongly, or something else "
                "was said"
            )
        before = turn.place.end - talk.first
        history = []


def _rendered(
    recorded: RecordedStep,
    sample: Sample,
    turn: Said,
    before: Sequence[int],
    history: Sequence[Mapping[str, Any]],
) -> list[int] | None:
    """The tokens of what was said after the tokens `before` (none at the beginning); None if they
    cannot be known."""
    tokenizer: Any = recorded.run.resources.tokenizer
    said = turn.said
    is_prompt = not before and hasattr(said, "token_ids")  # of a data row
    if is_prompt and not turn.tools and not history:
        return list(said.token_ids)
    if is_prompt:
        said = list(said.messages) or str(said)
    if isinstance(said, list | tuple) and said and type(said[0]) is int:
        return list(said)
    if isinstance(said, str) and not turn.templated:
        text = "".join(str(message.get("content", "")) for message in history) + said
        return _continued(tokenizer, text, begins=not before)
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    messages = [messages] if isinstance(messages, Mapping) else list(messages)
    options = _template_options(recorded, sample)

    def render(messages: Sequence[Mapping[str, Any]], prompts: bool) -> str:
        given = {"tools": list(turn.tools) or None, "add_generation_prompt": prompts, **options}
        copies = [dict(message) for message in messages]
        return str(tokenizer.apply_chat_template(copies, tokenize=False, **given))

    if not before:
        text = render([*history, *messages], True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not tokenizer.is_fast:
        return None
    asked = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": REPLY}]
    tail = _behind(tokenizer, render([*asked, *messages], True))
    closing = _behind(tokenizer, render(asked, False))
    stops = recorded.run.resources.stop_token_ids
    if before[-1] not in stops:
        return tail
    same = sum(takewhile(bool, map(eq, tail, closing)))
    end = next((i + 1 for i in range(same) if tail[i] in stops), 0)
    # some templates write the end of a turn only at the beginning of the next
    return tail[end or int(tail[:1] == [before[-1]]) :]


def _continued(tokenizer: Any, text: str, begins: bool) -> list[int]:
    """The tokens of a text without a template, at the beginning or after others."""
    if begins:
        return list(tokenizer(text, verbose=False)["input_ids"])
    for first in ("\n", "x", ""):
        start = tokenizer.encode(first, add_special_tokens=False)
        whole: list[int] = tokenizer.encode(first + text, add_special_tokens=False)
        if whole[: len(start)] == start:
            return whole[len(start) :]
    raise AssertionError("the empty text begins every other")


def _template_options(recorded: RecordedStep, sample: Sample) -> dict[str, Any]:
    data = recorded.config.data
    domain = data.domains.get(sample["domain"])
    thinks = data.enable_thinking
    if domain is not None and domain.enable_thinking is not None:
        thinks = domain.enable_thinking
    return {"enable_thinking": thinks, **data.apply_chat_template_kwargs}


def _behind(tokenizer: Any, text: str) -> list[int]:
    """The tokens after the reply in a text."""
    start = text.index(REPLY) + len(REPLY)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    return [token for token, (first, _) in pairs if first >= start]


def _check_scored_text(recorded: RecordedStep, sample: Sample) -> None:
    """Check that the scored texts of the group are those that its episodes passed."""
    record = recorded.record_of(sample)
    if record is None or "reward_baselines" in sample:
        return
    if not all("solution_str" in given for _, given, _ in record.scored):
        return
    decode = recorded.run.resources.tokenizer.decode
    passed = set[str]()
    for events in record.events.values():
        last: tuple[int, ...] = ()
        for kind, *values in _of_trained(recorded, events):
            if kind == "turn" and values[-1]:
                last = values[-1]
            elif kind == "judged":
                text = values[0]
                passed.add(
                    str(decode(list(last), skip_special_tokens=True) if text is None else text)
                )
    scored = {str(given["solution_str"]) for _, given, _ in record.scored}
    if passed != scored:
        text = sorted(passed ^ scored)[0]
        what = "scored, but no episode passed it"
        if text in passed:
            what = "passed for a score, but was never scored"
        raise Wrong(f"the text {text[:80]!r} of the group of sample {sample['uid']} was {what}")


def _check_replies(recorded: RecordedStep, sample: Sample) -> None:
    """A reply has at most the tokens that its call and its agent allow, and does not go on after a
    stop of one of them; an agent begins with its system prompt."""
    rollout = recorded.config.actor_rollout_ref.rollout
    for kind, name, *values in _events(recorded, sample):
        agent = _agent(rollout, name) if kind in ("forked", "limit") else None
        if kind == "forked" and agent is not None and (name in rollout.agents or not name):
            prompt = agent.system_prompt
            wanted = [{"role": "system", "content": prompt}] if prompt else []
            if values[1] != wanted:
                raise Wrong(
                    f"the agent '{name or next(iter(rollout.agents))}' of sample {sample['uid']} "
                    f"began with {values[1]!r:.160}, but by its settings with {wanted!r:.160}"
                )
        if kind == "limit":
            _check_reply(recorded, sample, agent, *values)


def _check_reply(
    recorded: RecordedStep,
    sample: Sample,
    agent: AgentConfig | None,
    asked: int | None,
    stops: Sequence[str | int],
    ids: Sequence[int],
) -> None:
    """asked: the most tokens by the call. stops: of the call."""
    limits = [asked, None if agent is None else agent.max_tokens]
    most = min((each for each in limits if each is not None), default=math.inf)
    who = f"a reply of sample {sample['uid']}"
    if len(ids) > most:
        raise Wrong(
            f"{who} has {len(ids)} tokens, but the workflow asked for at most {most}, or its agent "
            "has this limit (max_tokens)"
        )
    if ROLLOUT_ENGINES[recorded.config.actor_rollout_ref.rollout.name].in_server:
        return
    text = recorded.run.resources.tokenizer.decode(list(ids[:-1]))
    own_stops = agent.stop if agent is not None else ()
    for stop in (*stops, *recorded.sampling(sample).stop, *own_stops):
        if stop in (text if isinstance(stop, str) else ids[:-1]):
            raise Wrong(f"{who} goes on after {stop!r}, which should end it: {text!r:.80}")


def _agent(rollout: RolloutConfig, name: str) -> AgentConfig | None:
    """The agent that has the conversation of this name."""
    return rollout.agents.get(name.partition(".")[0], next(iter(rollout.agents.values()), None))


def _workflow_of(rollout: RolloutConfig, domain: str) -> str:
    name = rollout.workflow or ""
    if name != "by_domain":
        return name
    options = rollout.workflow_kwargs
    entry: Any = options.get(domain, options.get("default", ""))
    return str(entry["workflow"] if isinstance(entry, Mapping) else entry)


def _called(
    recorded: RecordedStep, sample: Sample, method: str
) -> list[tuple[Mapping[str, Any], Any]]:
    """Arguments and results of the calls of a method of the user's process."""
    found = list[tuple[Mapping[str, Any], Any]]()
    for kind, name, *values in _events(recorded, sample):
        if (kind, name) == ("called", method):
            found.append((values[0], values[1]))
    return found


def _check_environment(recorded: RecordedStep, sample: Sample, turns: Sequence[Said]) -> None:
    who = f"the environment of sample {sample['uid']}"
    ((given, first),) = _called(recorded, sample, "reset")
    _check_reset(recorded, sample, who, given)
    steps = _called(recorded, sample, "step")
    decode = recorded.run.resources.tokenizer.decode
    replies = [decode(list(turn.drawn), skip_special_tokens=True) for turn in turns]
    taken = [given["text"] for given, _ in steps]
    is_cut = sample["finish_reason"] in ("length", "context")  # a truncated reply is not an action
    if taken != replies[: len(taken)] or len(taken) not in (len(replies), len(replies) - is_cut):
        raise Wrong(
            f"{who} was given the actions {taken!r:.200}, but the policy's replies are "
            f"{replies!r:.200}"
        )
    observations = [str(first), *(str(step[0]) for _, step in steps)]
    for number, (turn, observation) in enumerate(zip(turns, observations, strict=False)):
        text = turn.said if isinstance(turn.said, str) else turn.said[-1]["content"]
        is_behind_prompt = number == 0 and text.endswith(observation)
        if text != observation and not is_behind_prompt:
            raise Wrong(
                f"{who} returned {observation!r:.120}, but the policy was told {text!r:.120}"
            )
    ends = [step[2] for _, step in steps]
    if any(ends[:-1]) or (ends and not ends[-1] and sample["finish_reason"] == "stop"):
        raise Wrong(
            f"the episode of sample {sample['uid']} continues after its end, or stops before it"
        )
    paid = [step[1] for _, step in steps]
    events = _events(recorded, sample)
    scores = [event[2] for event in events if event[0] == "paid"]
    returned = [event[2] for event in events if event[0] == "returned"]
    if scores != paid or not all(abs(float(each) - math.fsum(paid)) < 1e-6 for each in returned):
        raise Wrong(
            f"{who} returned the rewards {paid}, but its turns got {scores}, and the episode "
            f"{returned}"
        )


def _check_reset(
    recorded: RecordedStep, sample: Sample, who: str, given: Mapping[str, Any]
) -> None:
    """An environment gets its row's options, and the seed of its group's other episodes."""
    record = recorded.records[int(sample["group_index"])]
    row = recorded.run.row(record.prompt_group.row)
    extra = {name: value for name, value in (row.extra_info or {}).items() if name != PROMPT_CHAT}
    seeds = set[Any]()
    for events in record.events.values():
        for event in events:
            if event[:2] == ("called", "reset"):
                seeds.add(event[2]["seed"])
    if isinstance(extra.get("seed"), int):
        seeds.add(extra["seed"])
    if len(seeds) > 1 or given["options"] != {**extra, "ground_truth": row.ground_truth}:
        raise Wrong(
            f"{who} was reset with {dict(given)!r:.200}, but its row has {extra!r:.200}, and its "
            f"group {seeds}"
        )


def _check_tools(recorded: RecordedStep, sample: Sample, turns: Sequence[Said]) -> None:
    """What answered each call, in their order; answers to the last reply may not fit. Some do not
    come from a tool's process (errors, the sandbox's)."""
    who = f"in sample {sample['uid']}"
    told = [str(message["content"]) for turn in turns[1:] for message in turn.said]
    answers = list[tuple[str, str]]()
    for kind, name, *texts in _events(recorded, sample):
        if kind == "answered":
            answers.append((name, texts[0]))
    for (name, text), found in zip(answers, told, strict=False):
        if text != found:
            raise Wrong(
                f"a call of tool {name} was answered {text!r:.120} {who}, which was told "
                f"{found!r:.120}"
            )
    left = _called(recorded, sample, "call")
    for text in told:
        if left and left[0][1][0] == text:
            left = left[1:]
    if left and sample["finish_reason"] not in ("length", "context"):
        given, (text, *_) = left[0]
        raise Wrong(f"tool {given['name']} returned {text!r:.120} {who}, which was not told so")
