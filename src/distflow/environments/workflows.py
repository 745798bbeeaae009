"""Defines workflows, and loads the one that a config names."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
    Prompt,
    begin_agents,
)
from distflow.errors import UserError, blaming, hint
from distflow.import_target import load, split_name, users_code

KEY = "actor_rollout_ref.rollout.workflow"
REWARD = "reward_fn"
"""The parameter of a workflow that calls the run's reward functions."""
_LIMITS: dict[str, tuple[type, ...]] = {
    "max_turns": (int,),
    "max_calls": (int,),
    "max_characters": (int,),
    "timeout_s": (int, float),
}
"""Options of built-in workflows that are numbers above 0, with their types."""

Run = Callable[..., Awaitable[object]]
F = TypeVar("F", bound=Callable[..., Awaitable[object]])


@dataclass(frozen=True)
class Row:
    """A data row, as passed to a workflow."""

    prompt: Prompt
    """For `chat.ask`."""
    ground_truth: object = None
    """The column of the answer."""
    domain: str = "default"
    extra_info: Mapping[str, object] = field(default_factory=dict)
    """All other columns."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """All columns, by their names in the data."""

    def __getitem__(self, name: str) -> object:
        """Raises TypeError, which says how to write it."""
        attribute = name if name in vars(self) else f"columns[{name!r}]"
        raise TypeError(f"a row is no mapping: write row.{attribute}")


def row_of(row: PromptRow, prompt_key: str, answer_key: str) -> Row:
    """The row that a workflow receives, and may change. prompt_key, answer_key: their columns in
    the data."""
    extra = deepcopy(dict[str, Any](row.extra_info or {}))
    truth = deepcopy(row.ground_truth)
    text = prompt_of(row.prompt_text, extra)
    messages = extra.pop(PROMPT_CHAT, None)
    columns = {prompt_key: messages or row.prompt_text, answer_key: truth, **extra}
    return Row(Prompt(text, row.prompt_ids, messages or ()), truth, row.domain, extra, columns)


class Rewarded(Protocol):
    """The result of the run's reward functions for a reply."""

    @property
    def accuracy(self) -> float:
        """1 is correct, whatever the score; 0 without a score."""
        ...

    @property
    def score(self) -> float | None:
        """None if a reward function failed."""
        ...

    def discounted(self, factor: float) -> "Rewarded":
        """The result with this factor on the score."""
        ...


RewardFn = Callable[[Any], Awaitable[Rewarded]]


def workflow(function: F) -> F:
    """Marks an async function `f(chat, row, *, option=...)`, or `f(agents, row, ...)`, as a
    workflow. Raises UserError for any other."""
    _check_is_workflow(f"@workflow: {getattr(function, '__name__', function)}", function)
    return function


@dataclass(frozen=True)
class Workflow:
    """A workflow that is ready to run."""

    name: str
    run: Run
    scores: bool
    """Whether it calls the run's reward functions."""
    has_agents: bool = False
    """Whether it takes the chats of several agents."""
    is_tried: bool = True
    """Whether an episode is tried before the run."""

    def __call__(
        self, talk: Chat | Agents, row: Row, reward_fn: RewardFn | None
    ) -> Awaitable[object]:
        if self.scores:
            return self.run(talk, row, **{REWARD: reward_fn})
        return self.run(talk, row)

    def talk(self, chat: Chat, agents: Mapping[str, Agent]) -> Chat | Agents:
        """The workflow's first argument. chat: the first conversation of the episode."""
        return begin_agents(chat, agents) if agents else chat

    def check_agents(self, declared: Mapping[str, object]) -> "Workflow":
        """Raises UserError if the config declares agents but this takes one chat, or vice versa."""
        if declared and not self.has_agents:
            raise UserError(
                f"{AGENTS_KEY}: the workflow '{self.name}' has one chat: write async def "
                f"{self.name}(agents, row), or remove the agents"
            )
        if self.has_agents and not declared:
            raise UserError(
                f"{KEY}: '{self.name}' takes agents: declare them, e.g. {AGENTS_KEY}={{solver: "
                "{}}"
            )

        return self


def load_workflow(name: str, options: Mapping[str, object]) -> Workflow:
    """The workflow that a config names, with its options: built in, a function, or a class
    instantiated with them. Raises UserError."""
    target = name
    if name in WORKFLOWS:
        target = WORKFLOWS[name].target
        _check_limits(options)

    if ":" not in target:
        raise UserError(
            f"{KEY}={name}: no built-in workflow has that name{hint(name, WORKFLOWS)}. Built-in "
            f"workflows: {', '.join(WORKFLOWS)}. To use your own, write module:function or "
            "file.py:function"
        )

    with blaming(KEY):
        found: Any = load(target)
    return make_workflow(split_name(target)[1], found, options)


def _check_limits(options: Mapping[str, object]) -> None:
    for name, types in _LIMITS.items():
        value: Any = options.get(name)
        if name in options and not (type(value) in types and value > 0):
            raise UserError(f"{KEY}_kwargs.{name}={value!r}: set a number above 0")


def make_workflow(name: str, found: Any, options: Mapping[str, object]) -> Workflow:
    """The workflow of a function, of a class, instantiated with the options, or of an object in
    AReaL's form. Raises UserError."""
    if isinstance(found, type):
        return _workflow_of_class(name, found, options)
    if _is_areals(found):
        _check_options(name, [], options)
        return Workflow(name, ArealWorkflow(found), scores=False)

    _check_is_workflow(f"{KEY}: '{name}'", found)
    parameters = inspect.signature(found).parameters
    own = list(parameters.values())[2:]  # without the chat and the row
    _check_options(name, [each for each in own if each.name != REWARD], options)
    run = functools.partial(found, **options)

    return Workflow(name, run, REWARD in parameters, has_agents="agents" in parameters)


def _workflow_of_class(name: str, found: Any, options: Mapping[str, object]) -> Workflow:
    parameters = list(inspect.signature(found).parameters.values())
    if not _is_areals(found):
        parameters = [each for each in parameters if each.name != REWARD]
    _check_options(name, parameters, options)
    with users_code(f"{KEY}: '{name}' cannot be constructed:"):
        run = found(**options)
    if _is_areals(run):
        return Workflow(name, ArealWorkflow(run), scores=False)

    _check_is_workflow(f"{KEY}: an instance of '{name}'", run)
    of_call = inspect.signature(run).parameters
    scores = bool(getattr(run, "uses_reward_fn", REWARD in of_call))
    return Workflow(name, run, scores, has_agents="agents" in of_call)


def _check_is_workflow(what: str, found: object) -> None:
    """Raises UserError for anything but a workflow in our own form."""
    if not callable(found):
        raise UserError(
            f"{what} is {found!r:.60}, which cannot be called: name an async function f(chat, "
            "row), or an object with an async arun_episode(engine, data)"
        )
    if _is_areals(found):
        raise UserError(f"{what} is a workflow of AReaL, which needs no decorator")

    of_instances = type(found).__call__
    if not (inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(of_instances)):
        raise UserError(f"{what} is no async function: write `async def f(chat, row)`")

    first_two = list(inspect.signature(found).parameters)[:2]
    if first_two not in (["chat", "row"], ["agents", "row"]):
        raise UserError(
            f"{what} must take `chat` and `row` first, or `agents` and `row`: async def f(chat, "
            "row, *, option=...)"
        )


def _is_areals(found: object) -> bool:
    return any(inspect.iscoroutinefunction(getattr(found, name, None)) for name in AREALS_METHODS)


def _check_options(
    name: str, parameters: Sequence[inspect.Parameter], options: Mapping[str, object]
) -> None:
    """Raises UserError for `workflow_kwargs` that do not fit. parameters: those of the function
    that may be options."""
    signature = inspect.Signature(parameters)
    try:
        signature.bind(**options)
    except TypeError as error:
        known = ", ".join(signature.parameters) or "none"
        raise UserError(f"{KEY}_kwargs: '{name}': {error}; its options are {known}") from None
