"""Errors of pipelines, the callable of a node's `func`, and the columns of a batch: their names, dtypes and axes.
Pipelines add their own with `register_field`."""

import functools
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeGuard

from distflow.errors import UserError
from distflow.import_target import LoadError, load_function


class PipelineError(UserError):
    """A pipeline is invalid. The message names the node, the field or option, and the nearest existing name."""


class MissingColumn(PipelineError):
    """A node reads a column that nothing writes before it."""

    def __init__(self, message: str, column: str):
        super().__init__(message)
        self.column = column


def resolve_func(func: object, where: str) -> Callable[..., object]:
    """The callable of a node's `func`; a str is a name for `load_function`.

    Raises PipelineError, beginning with `where`, if it cannot be called.
    """
    if isinstance(func, str):
        try:
            return load_function(func)
        except LoadError as err:
            raise PipelineError(f"{where}: {err}") from err
    if isinstance(func, type):
        raise PipelineError(f"{where}: func {func!r} is a class; name one of its methods or pass an instance")
    if not callable(func):
        raise PipelineError(f'{where}: func {func!r} cannot be called; pass a function or "module:function"')
    return func


def innermost(fn: Callable[..., object]) -> Callable[..., object]:
    """The function below any `functools.partial`."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def is_async(fn: Callable[..., object]) -> TypeGuard[Callable[..., Awaitable[object]]]:
    """Whether calling it gives a coroutine."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


class Axis(Enum):
    """What one entry of a column belongs to. `RESPONSE` is everything after the first prompt."""

    PROMPT = "prompt"
    RESPONSE = "response"
    SEQUENCE = "sequence"
    SAMPLE = "sample"
    OBJECT = "object"


TOKEN_AXES = (Axis.PROMPT, Axis.RESPONSE, Axis.SEQUENCE)


@dataclass(frozen=True)
class Field:
    """A column. `dtype` is torch's name of it ("float32", "int64", "bool"), or "object" for plain Python values.

    Fields are equal if name, dtype and axis are.
    """

    name: str
    dtype: str
    axis: Axis
    doc: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.dtype} per {self.axis.value}"


_STANDARD = (
    Field("uid", "object", Axis.OBJECT, "group number and sample index, e.g. '17-3'"),
    Field("prompts", "object", Axis.OBJECT, "the prompts as texts"),
    Field("responses", "object", Axis.OBJECT, "the responses as texts"),
    Field("domain", "object", Axis.OBJECT, "domain of the sample"),
    Field("agent", "object", Axis.OBJECT, "agent whose turns the sample holds, if an episode has several agents"),
    Field("ground_truth", "object", Axis.OBJECT, "what the reward function compares with"),
    Field("extra_info", "object", Axis.OBJECT, "the rest of the data set's row"),
    Field("reward_parts", "object", Axis.OBJECT, "score of each reward function by name"),
    Field("reward_extra", "object", Axis.OBJECT, "further results of reward functions for the sample"),
    Field("reward_errors", "object", Axis.OBJECT, "reward error of a sample, or None"),
    Field("finish_reason", "object", Axis.OBJECT, "stop or length"),
    Field("prompt_ids", "int64", Axis.PROMPT, "token ids of the prompt"),
    Field("response_ids", "int64", Axis.RESPONSE, "token ids after the prompt"),
    Field("input_ids", "int64", Axis.SEQUENCE, "prompt and response ids"),
    Field("attention_mask", "float32", Axis.SEQUENCE, "1 on every token"),
    Field("response_mask", "float32", Axis.RESPONSE, "1 on tokens that a policy generated"),
    Field("loss_mask", "float32", Axis.RESPONSE, "response_mask without invalid and filtered samples; losses use it"),
    Field("versions", "int64", Axis.RESPONSE, "step of the weights that generated the token; -1 if none did"),
    Field("rollout_log_probs", "float32", Axis.RESPONSE, "by the rollout engine, softmax(logits / T)"),
    Field("sampling_log_probs", "float32", Axis.RESPONSE, "by the rollout engine, after truncation and penalties"),
    Field("log_probs", "float32", Axis.RESPONSE, "by the policy that is being trained"),
    Field("entropy", "float32", Axis.RESPONSE, "of softmax(logits / T) at each response token"),
    Field("old_log_probs", "float32", Axis.RESPONSE, "by the trainer, before the update"),
    Field("prox_log_probs", "float32", Axis.RESPONSE, "by the proximal policy of decoupled PPO"),
    Field("ref_log_prob", "float32", Axis.RESPONSE, "by the frozen reference"),
    Field("values", "float32", Axis.RESPONSE, "value before each response token"),
    Field("text_scores", "float32", Axis.RESPONSE, "a reward model's score of the text that ends with the token"),
    Field("token_level_scores", "float32", Axis.RESPONSE, "score of the sample, on the last response token"),
    Field("token_level_rewards", "float32", Axis.RESPONSE, "scores minus the KL penalty, if it is on"),
    Field("advantages", "float32", Axis.RESPONSE, "advantage of each response token"),
    Field("returns", "float32", Axis.RESPONSE, "return from each response token"),
    Field("group_index", "int64", Axis.SAMPLE, "group number: the samples of one prompt share it"),
    Field("episode_index", "int64", Axis.SAMPLE, "number of the sample's episode in its group"),
    Field("scores", "float32", Axis.SAMPLE, "the reward functions' score of the sample"),
    Field("acc", "float32", Axis.SAMPLE, "accuracy by the reward function, without weights or penalties; 1 is correct"),
    Field("valid", "bool", Axis.SAMPLE, "False for a reward error"),
    Field("in_baselines", "bool", Axis.SAMPLE, "valid, and not left out of baselines by mask_type=all"),
    Field("truncated", "bool", Axis.SAMPLE, "the response ended at the length limit"),
    Field("reward_baselines", "float32", Axis.SAMPLE, "score of a greedy sample of the same prompt"),
)
STANDARD_FIELDS = {field.name: field for field in _STANDARD}

ALIASES = {"index": "group_index", "data_source": "domain"}

# Columns that are derived if no node writes them, and their sources.
DERIVED = {
    "input_ids": ("prompt_ids", "response_ids"),
    "attention_mask": ("prompt_ids", "response_ids"),
    "loss_mask": ("response_mask",),
    "in_baselines": ("valid",),
    "scores": ("token_level_scores",),
    "acc": ("scores",),
    "token_level_scores": ("scores", "response_mask"),
    "token_level_rewards": ("token_level_scores",),
}

_registered: dict[str, Field] = {}


def register_field(name: str, dtype: str = "float32", axis: Axis | str = Axis.RESPONSE, doc: str = "") -> Field:
    """Add a pipeline's own column. Raises ValueError if the name already means another column."""
    wanted = Field(name, dtype, Axis(axis), doc)
    known = find_field(name)
    if known is not None and known != wanted:
        raise ValueError(f"field '{name}' is already {known}; choose another name")
    if known is None:
        _registered[name] = wanted
    return known or wanted


def find_field(name: str) -> Field | None:
    """The field of that name (aliases resolved), standard or registered."""
    name = ALIASES.get(name, name)
    return STANDARD_FIELDS.get(name) or _registered.get(name)
