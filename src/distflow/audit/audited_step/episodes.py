"""Check: an episode was trained on as it happened, according to events at the boundaries of our
code: what was said, what the user's process received and returned, the reward of each turn, and
which text was scored."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from operator import eq
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distflow.audit.audited_step.groups_responses_and_masks import parts_of_domain
from distflow.audit.check import NOT_APPLICABLE, Sample, Wrong, check, check_tokens
from distflow.audit.recorded_step import RecordedStep, RecordedTurn, conversations_of, index_of
from distflow.builtin_names import PROMPT_CHAT, ROLLOUT_ENGINES
from distflow.config.derived_settings import response_limit
from distflow.config.keys.rollout import AgentConfig, RolloutConfig
from distflow.environments.chat import THOUGHT_TOKENS
from distflow.environments.parse_tool_calls import find_tool_calls, format_of, opens_thought
from distflow.environments.tokens_between_turns import TurnTokens
from distflow.rewards.reward_results import Score

MOST = 16
FEW = 2
_QUESTION = "a question of the audit"
_REPLY = "a reply of the audit"
MAX_TURNS = {"environment": 16, "multi_turn": 3, "single_turn": 1, "tools": 8}
"""Default of each workflow, unless `workflow_kwargs` sets it."""
FEEDBACK = "That is not correct. Try again."


class Said(NamedTuple):
    """What a workflow said in one turn (see `on_event`), and the position of the reply in the
    sample."""

    name: str
    templated: bool
    said: Any
    tools: Sequence[Mapping[str, Any]]
    drawn: tuple[int, ...]
    place: RecordedTurn


@check(
    "episodes",
    "the tokens before each turn equal the workflow's messages, rendered again by independent "
    "code; an environment was "
    "reset with its row's seed and received each reply; observations and results of tools were "
    "passed on unchanged; "
    "each turn has its own reward, at most the tokens that were asked for, and ends at a stop; an "
    "agent begins with "
    "its system prompt; all calls of tools were answered; a domain has its own workflow; the "
    "checker of "
    "`solver_checker` was asked about the solver's reply, and earns 1 if it agrees with the "
    "accuracy; a simulator "
    "began with its row's seed and executed the bins of the drawn tokens; the scored text is the "
    "reply that the "
    "workflow passed",
    needs=(
        "a workflow other than AReaL's, and samples that this process generated; for tokens a fast "
        "tokenizer"
    ),
    limit=f"equal, {MOST} samples",
)
def audit_episodes(recorded: RecordedStep) -> str | None:
    workflow = recorded.config.actor_rollout_ref.rollout.workflow
    seen = 0
    if workflow is None:
        return NOT_APPLICABLE
    for sample in recorded.some_samples(FEW if recorded.partial else MOST):
        turns = _turns_of(recorded, sample)
        if turns is None:
            continue
        seen += 1
        _check_given(recorded, sample, turns)
        if "turn_index" in sample:
            wanted = torch.full_like(sample["turn_index"], -1)
            for number, turn in enumerate(sorted(turns, key=lambda turn: turn.place.start)):
                wanted[turn.place.start : turn.place.end] = number
            check_tokens(
                sample,
                "turn_index",
                wanted,
                sample["turn_index"] != wanted,
                ", the number of its turn",
            )
        _check_scored_text(recorded, sample)
        _check_replies(recorded, sample)
        _check_room(recorded, sample, turns[-1].place)
        if sample["reward_errors"] is None and bool(sample["valid"]):
            _check_limits(recorded, sample, turns)
            name, _ = workflow_of(recorded.config.actor_rollout_ref.rollout, sample["domain"])
            if own_check := OWN_CHECKS.get(name):
                own_check(recorded, sample, turns)
    return None if seen else "no episode's events are known"


def rewards_of_turns(recorded: RecordedStep, sample: Sample, total: float) -> Tensor | None:
    """The reward of each token: each turn's on its last token, and the rest of the score on that of
    the last turn in time. None if the episode's events are not known."""
    turns = _turns_of(recorded, sample)
    if turns is None:
        return None
    rewards = torch.zeros(len(sample["response_ids"]), dtype=torch.float64)
    ends = dict[str, int]()
    end = turns[-1].place.end
    left = iter(turns)
    for kind, name, *values in _events(recorded, sample):
        if kind == "turn" and values[-1]:
            ends[name] = next(left).place.end
        elif kind == "paid" and sample["reward_errors"] is None:
            rewards[ends[name] - 1] += values[0]
    rewards[end - 1] += total - rewards.sum()
    return rewards


def _events(recorded: RecordedStep, sample: Sample) -> Sequence[tuple[Any, ...]]:
    record = recorded.record_of(sample)
    return (
        _of_trained(recorded, record.events.get(index_of(sample), ())) if record is not None else ()
    )


def _of_trained(recorded: RecordedStep, events: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The events without those of untrained agents' conversations, which are in no sample."""
    agents = recorded.config.actor_rollout_ref.rollout.agents
    trained = [name for name, agent in agents.items() if agent.trainable]

    def is_trained(conversation: str) -> bool:
        agent = conversation.split(".")[0]
        return (agent if agent in agents else next(iter(agents))) in trained

    return [
        e
        for e in events
        if not agents or e[0] not in ("turn", "limit", "paid", "forked") or is_trained(e[1])
    ]


def _turns_of(recorded: RecordedStep, sample: Sample) -> list[Said] | None:
    """The turns of the sample in chronological order, as far as they had an effect; None if its
    events are not known."""
    places: dict[str, list[RecordedTurn]] = {}
    drawn = [event[1:] for event in _events(recorded, sample) if event[0] == "turn" and event[-1]]
    if not drawn:
        return None
    kept = recorded.num_used(sample)
    for turn in recorded.turns(sample):
        name = turn.conversation.name
        end = turn.start + kept[name] if name in kept else turn.end
        places.setdefault(name, []).append(turn._replace(end=end))
    if Counter(each[0] for each in drawn) != {name: len(own) for name, own in places.items()}:
        return None
    left = {name: iter(own) for name, own in places.items()}
    # as many as it has
    return [Said(*each, next(left[each[0]])) for each in drawn]  # type: ignore[call-arg]


def _check_given(recorded: RecordedStep, sample: Sample, turns: Sequence[Said]) -> None:
    begun = {event[1]: event[2:] for event in _events(recorded, sample) if event[0] == "forked"}
    # its calls contain the whole history
    is_agent = recorded.config.actor_rollout_ref.rollout.workflow == "agent"
    for talk in conversations_of(sample):
        same, history = begun.get(talk.name, ((), []))
        history = [] if same or is_agent else history
        before = len(same)
        if tuple(talk.ids[:before]) != tuple(same):
            raise Wrong(
                f"conversation {talk.name} of sample {sample['uid']} does not begin with what it "
                "forked from"
            )
        for turn in (turn for turn in turns if turn.name == talk.name):
            start = turn.place.start - talk.first
            told = _rendered(recorded, sample, turn, talk.ids[:before], history)
            if told is not None and talk.ids[before:start] != told:
                decode = recorded.run.resources.tokenizer.decode
                raise Wrong(
                    f"the tokens before token {turn.place.start} of sample {sample['uid']} are "
                    f"{decode(talk.ids[before:start])!r:.200}, but of what its workflow said they "
                    "are "
                    f"{decode(told)!r:.200}: the chat template was filled wrongly, or something "
                    "else was said"
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
    begins = not before
    is_prompt = begins and hasattr(said, "token_ids")  # of a data row
    if is_prompt and not turn.tools and not history:
        return list(said.token_ids)
    if is_prompt:
        said = list(said.messages) or str(said)
    if isinstance(said, list | tuple) and said and type(said[0]) is int:
        return list(said)
    if isinstance(said, str) and not turn.templated:
        text = "".join(str(message.get("content", "")) for message in history) + said
        if begins:
            return list(tokenizer(text, verbose=False)["input_ids"])
        starts = [
            (tokenizer.encode(each, add_special_tokens=False), each) for each in ("\n", "x", "")
        ]
        wholes = [
            (start, tokenizer.encode(each + text, add_special_tokens=False))
            for start, each in starts
        ]
        return next(whole[len(start) :] for start, whole in wholes if whole[: len(start)] == start)
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    messages = [messages] if isinstance(messages, Mapping) else list(messages)
    data = recorded.config.data
    domain = recorded.config.data.domains.get(sample["domain"])
    thinks = (
        domain.enable_thinking
        if domain is not None and domain.enable_thinking is not None
        else None
    )
    options = {
        "enable_thinking": data.enable_thinking if thinks is None else thinks,
        **data.apply_chat_template_kwargs,
    }

    def render(messages: Sequence[Mapping[str, Any]], prompts: bool) -> str:
        given = {"tools": list(turn.tools) or None, "add_generation_prompt": prompts, **options}
        return str(
            tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, **given)
        )

    if begins:
        return list(
            tokenizer(render([*history, *messages], True), add_special_tokens=False)["input_ids"]
        )
    asked = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _REPLY}]
    if not tokenizer.is_fast:
        return None
    tail, closing = (
        _behind(tokenizer, text)
        for text in (render([*asked, *messages], True), render(asked, False))
    )
    stops = recorded.run.resources.stop_token_ids
    same = sum(takewhile(bool, map(eq, tail, closing)))
    end = next((i + 1 for i in range(same) if tail[i] in stops), 0)
    # some templates write the end of a turn only at the beginning of the next
    is_same = tail[:1] == [before[-1]]
    return tail[(end or is_same) if before[-1] in stops else 0 :]


def _behind(tokenizer: Any, text: str) -> list[int]:
    """The tokens after the reply in a text."""
    start = text.index(_REPLY) + len(_REPLY)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    return [token for token, (first, _) in pairs if first >= start]


def _check_scored_text(recorded: RecordedStep, sample: Sample) -> None:
    """Check that the scored texts of the group are those that its episodes passed."""
    record = recorded.record_of(sample)
    decode = recorded.run.resources.tokenizer.decode
    if (
        record is None
        or "reward_baselines" in sample
        or not all("solution_str" in given for _, given, _ in record.scored)
    ):
        return
    passed = set[str]()
    for events in record.events.values():
        last: tuple[int, ...] = ()
        for kind, *values in _of_trained(recorded, events):
            if kind == "turn" and values[-1]:
                last = values[-1]
            elif kind == "judged":
                text = (
                    decode(list(last), skip_special_tokens=True) if values[0] is None else values[0]
                )
                passed.add(str(text))
    scored = {str(given["solution_str"]) for _, given, _ in record.scored}
    if passed != scored:
        text = sorted(passed ^ scored)[0]
        what = (
            "passed for a score, but was never scored"
            if text in passed
            else "scored, but no episode passed it"
        )
        raise Wrong(f"the text {text[:80]!r} of the group of sample {sample['uid']} was {what}")


def _check_replies(recorded: RecordedStep, sample: Sample) -> None:
    """A reply has at most the tokens that its call and its agent allow, and does not go on after a
    stop of one of them; an agent begins with its system prompt."""
    rollout = recorded.config.actor_rollout_ref.rollout
    own_stops = recorded.sampling(sample).stop
    decode = recorded.run.resources.tokenizer.decode
    is_here = not ROLLOUT_ENGINES[rollout.name].in_server
    for kind, name, *values in (
        each for each in _events(recorded, sample) if each[0] in ("forked", "limit")
    ):
        agent = _agent(rollout, name)
        if kind == "forked" and agent is not None and (name in rollout.agents or not name):
            wanted = (
                [{"role": "system", "content": agent.system_prompt}] if agent.system_prompt else []
            )
            if values[1] != wanted:
                who = f"the agent '{name or next(iter(rollout.agents))}' of sample {sample['uid']}"
                raise Wrong(
                    f"{who} began with {values[1]!r:.160}, but by its settings with {wanted!r:.160}"
                )
        if kind == "limit":
            asked, stops, ids = values
            most = _most_tokens(rollout, name, asked)
            who = f"a reply of sample {sample['uid']}"
            text = decode(list(ids[:-1]))
            if len(ids) > most:
                what = f"has {len(ids)} tokens, but the workflow asked for at most {most}"
                raise Wrong(f"{who} {what}, or its agent has this limit (max_tokens)")
            stops = (*stops, *own_stops, *(agent.stop if agent is not None else ()))
            late = [each for each in stops if each in (text if isinstance(each, str) else ids[:-1])]
            if is_here and late:
                raise Wrong(f"{who} goes on after {late[0]!r}, which should end it: {text!r:.80}")


def _agent(rollout: RolloutConfig, name: str) -> AgentConfig | None:
    """The agent that has the conversation of this name."""
    return rollout.agents.get(name.partition(".")[0], next(iter(rollout.agents.values()), None))


def _most_tokens(rollout: RolloutConfig, name: str, asked: int | None) -> float:
    """Tokens that a reply may have by its call and its agent."""
    agent = _agent(rollout, name)
    limits = asked, None if agent is None else agent.max_tokens
    return min((each for each in limits if each is not None), default=math.inf)


def _check_room(recorded: RecordedStep, sample: Sample, last: RecordedTurn) -> None:
    """An episode of one conversation is truncated only where its response, or its context, is full.
    Not checked if a reply has as many tokens as its call or agent allows: the next message may not
    have fit."""
    rollout = recorded.config.actor_rollout_ref.rollout
    limits = [event[1:] for event in _events(recorded, sample) if event[0] == "limit"]
    if any(len(ids) >= _most_tokens(rollout, name, asked) for name, asked, _, ids in limits):
        return
    data = recorded.config.data
    most = response_limit(recorded.config, sample["domain"])
    left = min(
        most - last.end, data.max_prompt_length + most - last.end - len(sample["prompt_ids"])
    )
    is_cut = sample["finish_reason"] == last.generation.finish_reason == "length"
    if is_cut and left > 0 and not sample.get("forks"):
        raise Wrong(
            f"sample {sample['uid']} counts as truncated, but {left} more tokens fit into its "
            "response"
        )


def _check_limits(recorded: RecordedStep, sample: Sample, turns: Sequence[Said]) -> None:
    rollout = recorded.config.actor_rollout_ref.rollout
    if wrong := wrong_end(
        rollout, sample["domain"], len(turns), sample["finish_reason"], float(sample["acc"])
    ):
        raise Wrong(f"sample {sample['uid']} {wrong}")
    workflow, kwargs = workflow_of(rollout, sample["domain"])
    feedback = kwargs.get("feedback", FEEDBACK)
    if workflow == "multi_turn" and any(turn.said != feedback for turn in turns[1:]):
        raise Wrong(f"sample {sample['uid']} was told different feedback than {feedback!r}")


def workflow_of(rollout: RolloutConfig, domain: str) -> tuple[str, Mapping[str, Any]]:
    name = rollout.workflow or ""
    options = rollout.workflow_kwargs
    if name != "by_domain":
        return name, options
    entry: Any = options.get(domain, options.get("default", ""))
    return (str(entry["workflow"]), entry) if isinstance(entry, Mapping) else (str(entry), {})


def wrong_end(rollout: RolloutConfig, domain: str, turns: int, reason: str, accuracy: float) -> str:
    """Why an episode of a built-in workflow must not end so; empty if it may."""
    workflow, options = workflow_of(rollout, domain)
    most: Any = options.get("max_turns", MAX_TURNS.get(workflow, math.inf))
    if workflow in MAX_TURNS and (turns > most or (reason == "max_turns" and turns != most)):
        return f"ended ({reason}) after {turns} of {most} turns"
    if workflow == "multi_turn" and reason == "stop" and accuracy < 1 - 1e-6:
        return f"counts as ended by itself after {turns} turns, but its answer is wrong"
    return ""


def _called(
    recorded: RecordedStep, sample: Sample, method: str
) -> list[tuple[Mapping[str, Any], Any]]:
    """Arguments and results of the calls of a method of the user's process."""
    return [each[2:] for each in _events(recorded, sample) if each[:2] == ("called", method)]


def _check_environment(recorded: RecordedStep, sample: Sample, turns: Sequence[Said]) -> None:
    record = recorded.records[int(sample["group_index"])]
    who = f"the environment of sample {sample['uid']}"
    row = recorded.run.row(record.prompt_group.row)
    extra = {name: value for name, value in (row.extra_info or {}).items() if name != PROMPT_CHAT}
    ((given, first),) = _called(recorded, sample, "reset")
    seeds = set()
    for own in record.events.values():
        for call in own:
            if call[:2] == ("called", "reset"):
                seeds.add(call[2]["seed"])
    seeds |= {extra["seed"]} if isinstance(extra.get("seed"), int) else set()
    if len(seeds) > 1 or given["options"] != {**extra, "ground_truth": row.ground_truth}:
        raise Wrong(
            f"{who} was reset with {dict(given)!r:.200}, but its row has {extra!r:.200}, and its "
            f"group {seeds}"
        )
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
    for turn, observation in zip(turns, observations, strict=False):
        text = turn.said if isinstance(turn.said, str) else turn.said[-1]["content"]
        if text != observation and not (turn is turns[0] and text.endswith(observation)):
            raise Wrong(
                f"{who} returned {observation!r:.120}, but the policy was told {text!r:.120}"
            )
    if any(step[2] for _, step in steps[:-1]) or (
        steps and not steps[-1][1][2] and sample["finish_reason"] == "stop"
    ):
        raise Wrong(
            f"the episode of sample {sample['uid']} continues after its end, or stops before it"
        )
    paid = [step[1] for _, step in steps]
    scores = [each[2] for each in _events(recorded, sample) if each[0] == "paid"]
    returned = [each[2] for each in _events(recorded, sample) if each[0] == "returned"]
    if scores != paid or not all(abs(float(each) - math.fsum(paid)) < 1e-6 for each in returned):
        raise Wrong(
            f"{who} returned the rewards {paid}, but its turns got {scores}, and the episode "
            f"{returned}"
        )


def _check_tools(recorded: RecordedStep, sample: Sample, turns: Sequence[Said]) -> None:
    """What answered each call, in their order; answers to the last reply may not fit. Some do not
    come from a tool's process (errors, the sandbox's)."""
    told = [str(message["content"]) for turn in turns[1:] for message in turn.said]
    answers = []
    left = _called(recorded, sample, "call")
    who = f"in sample {sample['uid']}"
    _, options = workflow_of(recorded.config.actor_rollout_ref.rollout, sample["domain"])
    tokens = TurnTokens(recorded.run.resources.tokenizer, recorded.run.resources.stop_token_ids, {})
    form = options.get("format") or format_of(tokens.tool_template(turns[0].tools))
    for turn, after in pairwise(turns):
        in_thought = opens_thought(tokens.written(turn.place.request.prompt_ids[-THOUGHT_TOKENS:]))
        if (number := len(find_tool_calls(tokens.written(turn.drawn), form, in_thought))) != len(
            after.said
        ):
            raise Wrong(
                f"a reply has {number} calls of tools {who}, but {len(after.said)} of them were "
                "answered"
            )
    for kind, name, *texts in _events(recorded, sample):
        answers += [(name, texts[0])] if kind == "answered" else []
    for (name, text), found in zip(answers, told, strict=False):
        if text != found:
            raise Wrong(
                f"a call of tool {name} was answered {text!r:.120} {who}, which was told "
                f"{found!r:.120}"
            )
    for text in told:
        left = left[1:] if left and left[0][1][0] == text else left
    if left and sample["finish_reason"] not in ("length", "context"):
        given, (text, *_) = left[0]
        raise Wrong(f"tool {given['name']} returned {text!r:.120} {who}, which was not told so")


def _check_checker(recorded: RecordedStep, sample: Sample, turns: Sequence[Said]) -> None:
    """The checker of `solver_checker` was asked about the solver's reply, and earns 1 if its own
    agrees with the accuracy, else 0; the solver earns what the reward functions gave for that
    reply."""
    said = [turn.drawn for turn in turns if turn.name.partition(".")[0] == "checker"]
    kwargs = recorded.config.actor_rollout_ref.rollout.workflow_kwargs
    yes = str(kwargs.get("yes", "yes")).lower()
    found = sample["reward_parts"].get("checker")
    if not said or found is None:
        return
    _check_solver(
        recorded, sample, turns, "{response}" in str(kwargs.get("question", "{response}"))
    )
    text = recorded.run.resources.tokenizer.decode(list(said[-1]), skip_special_tokens=True)
    wanted = float((yes in text.lower()) == (float(sample["acc"]) >= 1 - 1e-6))
    if found != wanted:
        raise Wrong(
            f"the checker of sample {sample['uid']} earned {found:g}, but should have {wanted:g}: "
            f"it says {text!r:.80} "
            f"of a response with the accuracy {float(sample['acc']):g}"
        )


def _check_solver(
    recorded: RecordedStep, sample: Sample, turns: Sequence[Said], is_shown: bool
) -> None:
    """is_shown: whether the checker's question has the solver's reply in it."""
    # the first agent has no name there
    drawn = [turn.drawn for turn in turns if turn.name in ("", "solver")]
    asked = [turn.said for turn in turns if turn.name.partition(".")[0] == "checker"]
    record = recorded.record_of(sample)
    if not drawn or record is None:
        return
    reply = recorded.run.resources.tokenizer.decode(list(drawn[-1]), skip_special_tokens=True)
    if is_shown and isinstance(asked[-1], str) and reply not in asked[-1]:
        raise Wrong(
            f"the checker of sample {sample['uid']} was asked {asked[-1]!r:.160}, without the "
            f"reply {reply!r:.80}"
        )
    weights = {
        part.name: part.weight for part in parts_of_domain(recorded.config, sample["domain"])
    }
    given = [(name, own) for name, call, own in record.scored if call.get("solution_str") == reply]
    scores = {name: own.value for name, own in given if isinstance(own, Score)}
    wanted = sum(weight * scores.get(name, math.nan) for name, weight in weights.items())
    found = sample["reward_parts"].get("solver", wanted)
    if not recorded.config.reward.overlong.buffer_tokens and abs(found - wanted) > 1e-6 * max(
        1.0, abs(wanted)
    ):
        raise Wrong(
            f"the solver of sample {sample['uid']} earned {found:g}, but its reply has the score "
            f"{wanted:g}"
        )


def _check_simulator(recorded: RecordedStep, sample: Sample, turns: Sequence[Said]) -> None:
    # no other run imports it
    from distflow.audit.simulators.simulator_episodes import check_simulator

    check_simulator(recorded, sample, turns)


OWN_CHECKS = {
    "environment": _check_environment,
    "tools": _check_tools,
    "solver_checker": _check_checker,
    "simulator": _check_simulator,
}
"""The further contract of built-in workflows. Others have none with the user's process that is
known here."""
