"""Defines workflows, and loads the one that a config names. Built in are those scored by the run's
reward functions: a single turn, several turns with feedback, a solver and a checker; and one that
gives each domain its own."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from distflow.builtin_names import PROMPT_CHAT, WORKFLOWS
from distflow.data.encoded_prompts import PromptRow
from distflow.data.messages import prompt_of
from distflow.environments.areal_workflows import METHODS as AREALS_METHODS
from distflow.environments.areal_workflows import ArealWorkflow
from distflow.environments.chat import (
    AGENTS_KEY,
    Agent,
    Agents,
    Chat,
    ChatError,
    Prompt,
    begin_agents,
)
from distflow.errors import UserError, blaming, hint
from distflow.import_target import load, split_name, users_code

KEY = "actor_rollout_ref.rollout.workflow"
RIGHT = 1.0 - 1e-6
REWARD = "reward_fn"
"""The parameter of a workflow that calls the run's reward functions."""
_LIMITS = dict.fromkeys(("max_turns", "max_calls", "max_characters"), (int,)) | {
    "timeout_s": (int, float)
}
"""Options of built-in workflows that are numbers above 0, with their types."""

Run = Callable[..., Awaitable[object]]
F = TypeVar("F", bound=Callable[..., Awaitable[object]])


@dataclass(frozen=True)
class Row:
    """A data row, as passed to a workflow. prompt: for `chat.ask`. ground_truth: the column of the
    answer. extra_info: all other columns. columns: all, by their names in the data."""

    prompt: Prompt
    ground_truth: object = None
    domain: str = "default"
    extra_info: Mapping[str, object] = field(default_factory=dict)
    columns: Mapping[str, object] = field(default_factory=dict)

    def __getitem__(self, name: str) -> object:
        """Raises TypeError, which says how to write it."""
        raise TypeError(
            f"a row is no mapping: write row.{name if name in vars(self) else f'columns[{name!r}]'}"
        )


def row_of(row: PromptRow, prompt_key: str, answer_key: str) -> Row:
    """The row that a workflow receives, and may change. prompt_key, answer_key: their columns in
    the data."""
    extra, truth = deepcopy((dict[str, Any](row.extra_info or {}), row.ground_truth))
    text = prompt_of(row.prompt_text, extra)
    messages = extra.pop(PROMPT_CHAT, None)
    columns = {prompt_key: messages or row.prompt_text, answer_key: truth, **extra}
    return Row(Prompt(text, row.prompt_ids, messages or ()), truth, row.domain, extra, columns)


class Rewarded(Protocol):
    """The result of the run's reward functions for a reply. accuracy: 1 is correct, whatever the
    score; 0 without one. score: None if a reward function failed."""

    @property
    def accuracy(self) -> float: ...
    @property
    def score(self) -> float | None: ...

    def discounted(self, factor: float) -> "Rewarded":
        """The result with this factor on the score."""
        ...


RewardFn = Callable[[Any], Awaitable[Rewarded]]


def workflow(function: F) -> F:
    """Marks an async function `f(chat, row, *, option=...)`, or `f(agents, row, ...)`, as a
    workflow. Raises UserError for any other."""
    if fault := _fault(function):
        raise UserError(f"@workflow: {getattr(function, '__name__', function)} {fault}")
    return function


@dataclass(frozen=True)
class Workflow:
    """A workflow that is ready to run. scores: whether it calls the run's reward functions.
    has_agents: whether it takes the chats of several agents. is_tried: whether an episode is tried
    before the run. num_rows: samples that an episode returns; with several, `run` takes a list of
    chats and returns a list of results."""

    name: str
    run: Run
    scores: bool
    has_agents: bool = False
    is_tried: bool = True
    num_rows: int = 1

    def __call__(
        self, chats: Chat | list[Chat] | Agents, row: Row, reward_fn: RewardFn | None
    ) -> Awaitable[object]:
        return self.run(chats, row, **({REWARD: reward_fn} if self.scores else {}))

    def chats(self, chats: list[Chat], agents: Mapping[str, Agent]) -> Chat | list[Chat] | Agents:
        """The workflow's first argument. chats: the first conversation of each of the episode's
        samples."""
        if self.num_rows > 1:
            return chats
        return begin_agents(chats[0], agents) if agents else chats[0]

    def results(self, returned: Any) -> list[Any]:
        """The result of each of the episode's samples."""
        return list(returned) if self.num_rows > 1 else [returned]

    def check_agents(self, declared: Mapping[str, object]) -> "Workflow":
        """Raises UserError if the config declares agents but this takes one chat, or vice versa."""
        if declared and not self.has_agents:
            raise UserError(
                f"{AGENTS_KEY}: the workflow '{self.name}' has one chat: write async def "
                f"{self.name}(agents, row), "
                "or remove the agents"
            )
        if self.has_agents and not declared:
            raise UserError(
                f"{KEY}: '{self.name}' takes agents: declare them, e.g. {AGENTS_KEY}={{solver: "
                f"{{}}}}"
            )
        return self


def load_workflow(name: str, options: Mapping[str, object]) -> Workflow:
    """The workflow that a config names, with its options: built in, a function, or a class
    instantiated with them. Raises UserError."""
    target = WORKFLOWS[name].target if name in WORKFLOWS else name
    if ":" not in target:
        raise UserError(
            f"{KEY}={name}: no built-in workflow has that name{hint(name, WORKFLOWS)}. Built-in "
            "workflows: "
            f"{', '.join(WORKFLOWS)}. To use your own, write module:function or file.py:function"
        )
    for limit, value in options.items() if name in WORKFLOWS else ():
        if limit in _LIMITS and not (type(value) in _LIMITS[limit] and value > 0):  # type: ignore[operator]
            raise UserError(f"{KEY}_kwargs.{limit}={value!r}: set a number above 0")
    with blaming(KEY):
        found: Any = load(target)
    return make_workflow(split_name(target)[1], found, options)


def make_workflow(name: str, found: Any, options: Mapping[str, object]) -> Workflow:
    """The workflow of a function, of a class, instantiated with the options, or of an object in
    AReaL's form. Raises UserError."""
    is_class = isinstance(found, type)
    is_made = _is_areals(found) and not isinstance(found, type)
    if not is_class and not is_made and (fault := _fault(found)):
        raise UserError(f"{KEY}: '{name}' {fault}")
    _check_options(name, found, options, skipped=0 if is_class else 2)
    run: Any = found if is_made else functools.partial(found, **options)
    if is_class:
        with users_code(f"{KEY}: '{name}' cannot be constructed:"):
            run = found(**options)
    if _is_areals(run):
        areals = ArealWorkflow(run)
        return Workflow(name, areals, scores=False, num_rows=areals.num_rows)
    if is_class and (fault := _fault(run)):
        raise UserError(f"{KEY}: an instance of '{name}' {fault}")
    parameters = inspect.signature(run if is_class else found).parameters
    scores = bool(getattr(run, "uses_reward_fn", REWARD in parameters))
    return Workflow(name, run, scores, has_agents="agents" in parameters)


class ByDomain:
    """The workflow `by_domain`: each domain has its own workflow.

    workflows: domain → the name of its workflow, or {workflow: NAME, **options}; `default` is for
    all other domains."""

    def __init__(self, **workflows: Any) -> None:
        """Raises UserError for a workflow that cannot be used, or that takes agents."""
        self._own = dict[str, Workflow]()
        for domain, entry in workflows.items():
            options = dict(entry) if isinstance(entry, Mapping) else {"workflow": entry}
            if "workflow" not in options:
                raise UserError(
                    f"{KEY}_kwargs.{domain}: name the workflow: {{workflow: NAME, OPTION: VALUE}}"
                )
            own = self._own[domain] = load_workflow(
                str(options.pop("workflow")), options
            ).check_agents({})
            if own.num_rows > 1:
                raise UserError(
                    f"{KEY}_kwargs.{domain}: '{own.name}' returns {own.num_rows} samples; set "
                    "n_samples=1"
                )
        if not workflows:
            raise UserError(
                f"{KEY}=by_domain: name a workflow for each domain: {KEY}_kwargs={{math: "
                f"single_turn}}"
            )
        self.uses_reward_fn = any(each.scores for each in self._own.values())

    async def __call__(self, chat: Chat, row: Row, reward_fn: RewardFn | None = None) -> object:
        """Raises ChatError, an error of the episode, for a domain without a workflow."""
        own = self._own.get(row.domain, self._own.get("default"))
        if own is None:
            raise ChatError(
                f"the domain '{row.domain}' has no workflow: add it to {KEY}_kwargs, or add default"
            )
        return await own(chat, row, reward_fn)


def _fault(function: object) -> str:
    """Why it is not a workflow; empty if it is one."""
    if not callable(function):
        return (
            f"is {function!r:.60}, which cannot be called: name an async function f(chat, row), or "
            "an object with an "
            "async arun_episode(engine, data)"
        )
    if _is_areals(function):
        return "is a workflow of AReaL, which needs no decorator"
    if not (
        inspect.iscoroutinefunction(function)
        or inspect.iscoroutinefunction(type(function).__call__)
    ):
        return "is no async function: write `async def f(chat, row)`"
    if list(inspect.signature(function).parameters)[:2] not in (["chat", "row"], ["agents", "row"]):
        return (
            "must take `chat` and `row` first, or `agents` and `row`: async def f(chat, row, *, "
            "option=...)"
        )
    return ""


def _is_areals(found: object) -> bool:
    return any(inspect.iscoroutinefunction(getattr(found, name, None)) for name in AREALS_METHODS)


def _check_options(name: str, function: Any, options: Mapping[str, object], skipped: int) -> None:
    """Raises UserError for `workflow_kwargs` that do not fit. skipped: number of parameters that
    are not options."""
    is_made = _is_areals(function) and not isinstance(function, type)
    parameters = [] if is_made else list(inspect.signature(function).parameters.values())[skipped:]
    ours = () if _is_areals(function) else (REWARD,)
    own = [
        p
        for p in parameters
        if p.name not in ours and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    known = [p.name for p in own]
    unknown = (
        []
        if any(p.kind is p.VAR_KEYWORD for p in parameters)
        else [key for key in options if key not in known]
    )
    if unknown:
        raise UserError(
            f"{KEY}_kwargs.{unknown[0]}: '{name}' has no such option{hint(unknown[0], known)}; it "
            "has "
            f"{', '.join(known) or 'none'}"
        )
    if missing := [p.name for p in own if p.default is p.empty and p.name not in options]:
        raise UserError(f"{KEY}_kwargs: '{name}' needs {', '.join(missing)}")


@workflow
async def single_turn(chat: Chat, row: Row, reward_fn: RewardFn) -> Rewarded:
    """One prompt and one response, as without a workflow."""
    return await reward_fn(await chat.ask(row.prompt))


@workflow
async def multi_turn(
    chat: Chat,
    row: Row,
    reward_fn: RewardFn,
    *,
    max_turns: int = 3,
    feedback: str = "That is not correct. Try again.",
    turn_discount: float = 1.0,
) -> Rewarded:
    """Ask until the answer is right, at most `max_turns` times, with feedback after a wrong one.

    turn_discount: a factor on the score for each turn after the first.
    """
    rewarded = await reward_fn(await chat.ask(row.prompt))
    while rewarded.accuracy < RIGHT and chat.finish_reason == "stop":
        if chat.turns >= max_turns:
            chat.finish_reason = "max_turns"
            break
        reply = await chat.ask(feedback)
        if not reply.token_ids:
            break
        rewarded = await reward_fn(reply)
    return rewarded.discounted(
        turn_discount ** (sum(segment.owner == "policy" for segment in chat.segments) - 1)
    )


@workflow
async def solver_checker(
    agents: Agents,
    row: Row,
    reward_fn: RewardFn,
    *,
    question: str = "{prompt}\n{response}\nIs this response correct? Answer yes or no.",
    yes: str = "yes",
) -> Rewarded | dict[str, float]:
    """The agent `solver` responds to the prompt, and `checker` says whether the response is
    correct. The solver's score is that of the reward functions, and the checker's is 1 if it agrees
    with their accuracy, else 0.

    yes: the checker's reply contains it, in any case, if it finds the response correct.
    """
    reply = await agents["solver"].ask(row.prompt)
    rewarded = await reward_fn(reply)
    if rewarded.score is None:
        return rewarded
    said = [str(message["content"]) for message in row.prompt.messages]
    asked = question.format(prompt=said[-1] if said else row.prompt, response=reply.text)
    is_found_right = yes.lower() in (await agents["checker"].ask(asked)).text.lower()
    agrees = float(is_found_right == (rewarded.accuracy >= RIGHT))
    return {"solver": rewarded.score, "checker": agrees, "acc": rewarded.accuracy}
