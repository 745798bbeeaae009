"""The built-in names that a config may choose from, one table per kind: what each is, where it is,
and what must be known before it is loaded. Advantage estimators and policy losses are read from the
text of the files that register them, the others from `builtin_names.toml`. Loads nothing.

target: "module:attribute", loaded when the name is used; empty if it is not implemented yet.
"""

import ast
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from distflow.method_files import ALGORITHMS, MethodFile


@dataclass(frozen=True)
class Entry:
    """A built-in of a kind without further properties."""

    description: str
    target: str = ""


@dataclass(frozen=True)
class Algorithm(Entry):
    """An advantage estimator or a policy loss, described by its parameters."""

    reads: frozenset[str] = frozenset()
    """The columns that it must have: parameters without a default."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Its options, and their defaults as text."""


@dataclass(frozen=True)
class Estimator(Algorithm):
    """An advantage estimator."""

    @property
    def needs_group(self) -> bool:
        return "group_index" in self.reads

    @property
    def needs_critic(self) -> bool:
        return "values" in self.reads

    @property
    def needs_greedy(self) -> bool:
        """Its baseline is the reward of a greedy response."""
        return "reward_baselines" in self.reads

    @property
    def is_over_turns(self) -> bool:
        """The turns of an episode have separate advantages."""
        return not self.reads.isdisjoint(("turn_index", "turn_order"))

    @property
    def reads_parts(self) -> bool:
        """It reads the parts of the reward, not their sum."""
        return "reward_parts" in self.reads


@dataclass(frozen=True)
class PolicyLoss(Algorithm):
    """A policy loss."""

    clips_ratio: bool = False
    """It clips a ratio by the actor's bounds; those of `DivergenceBound` bound a divergence."""


@dataclass(frozen=True)
class Reward(Entry):
    """A reward function."""

    needs_answer: bool = False
    """It compares with the row's answer, so every row must have one."""
    scores_own_answer: bool = False
    """The row's own answer, in a box, must score 1."""
    row_check: str = ""
    """A function that is called with a row's answer and columns, and raises ValueError if the
    reward cannot score any response to it."""
    executes_response: bool = False
    """It runs the response's code in the sandbox."""
    prepare: str = ""
    """"module:function" that loads something too large to load twice, with the options of the
    part; one process holds it and scores for all domains with the same."""
    reads_messages: bool = False
    """It receives the prompt's chat messages."""


@dataclass(frozen=True)
class BuiltinPipeline(Entry):
    """A pipeline."""

    has_critic: bool = False
    """It trains a critic."""
    generates: bool = True
    """It generates its training data."""
    by_estimator: bool = False
    """It trains a critic if an estimator of the run or of a domain reads values."""
    has_teacher: bool = False
    """It needs a teacher, which other pipelines that generate may have."""
    reads_pairs: bool = False
    """Its rows are pairs of responses."""
    reads_labels: bool = False
    """Its rows are responses with a label, or pairs of them."""
    is_online: bool = False
    """It makes its pairs of the responses of a group."""
    trains_scores: bool = False
    """It trains a reward model."""
    workflow_type: str = ""
    """The value of `algorithm.workflow_type` that selects it."""
    oversample_factor: str = ""
    """The key that says how many times the groups of a step may run, instead of
    `algorithm.filter_groups.oversampling`."""


@dataclass(frozen=True)
class WorkflowEntry(Entry):
    """A workflow. Functions are written "module:function"."""

    nodes: str = ""
    """Adds the nodes that its episodes need after their scores, to a pipeline and by its config."""
    unit_tokens: str = ""
    """Tells by the config how many tokens an action has. Only replies of such a workflow are
    divided into actions and chunks."""
    rules: str = ""
    """A tuple of rules (see `config/rules`) of its options, which are read if the config has
    options of a workflow."""
    draws_numbers: str = ""
    """Tells by its options whether a head of `NUMBER_HEADS` draws the replies, whose entropy may be
    below 0."""
    ends_by_time: bool = False
    """Whether truncated episodes ran out of time, and not of tokens."""


@dataclass(frozen=True)
class TrainEngineEntry(Entry):
    """A train engine. sizes: the letters of trainer.allocation that may be above 1 with it."""

    sizes: str = "d"


@dataclass(frozen=True)
class RolloutEngineEntry(Entry):
    """A rollout engine. sizes: as for a train engine. in_server: it computes in a server, to which
    weights are sent. draws_by_stream: it draws with the sample's own random stream, which a check
    repeats. reports_truncated: its
    log-probs with top_p, min_p and repetition_penalty are those of the distribution that it then
    samples from. serves_adapters: beside the base weights, in a server that the run starts.
    size_option: an option of its server for several devices, if its size in an allocation is always
    1."""

    sizes: str = "d"
    in_server: bool = False
    draws_by_stream: bool = True
    reports_truncated: bool = True
    serves_adapters: bool = False
    size_option: str = ""


@dataclass(frozen=True)
class Tracker(Entry):
    """A tracker. package: must be installed; the extra of the tracker's name includes it. One
    without a target is always written."""

    package: str = ""


_TABLES: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text("utf-8")
)
Kind = TypeVar("Kind", bound=Entry)


def _entries(table: str, kind: type[Kind]) -> dict[str, Kind]:
    made: dict[str, Kind] = {}
    for name, entry in _TABLES[table].items():
        values: dict[str, Any] = {
            field: tuple(v) if isinstance(v, list) else v for field, v in entry.items()
        }
        made[name] = kind(**values)

    return made


def _files_of_algorithms() -> dict[str, MethodFile]:
    return {
        f"distflow.algorithms.{path.parent.name}.{path.stem}": MethodFile.of(path)
        for path in sorted(ALGORITHMS.glob("*/*.py"))
    }


def read_algorithms(
    files: Mapping[str, MethodFile],
) -> tuple[dict[str, Estimator], dict[str, PolicyLoss]]:
    """The estimators and losses that files register. files: by the names of their modules."""
    functions = {name: node for file in files.values() for name, node in file.functions.items()}
    estimators: dict[str, Estimator] = {}
    losses: dict[str, PolicyLoss] = {}

    for module, file in files.items():
        for part in file.parts:
            function = functions.get(part.function)
            if function is None:  # of a module that is not among the files
                continue

            options = _options(function)
            if part.selects in functions:
                options |= _options(functions[part.selects])
            target = f"{module}:{part.attribute}"
            described = _first_sentence(function), target, _required(function), options

            if part.decorator == "register_adv_est":
                estimators[part.name] = Estimator(*described)
            elif part.decorator == "register_policy_loss":
                kinds = {each.arg: each.annotation for each in function.args.kwonlyargs}
                bound = kinds.get("clip_ratio_high")
                clips = bound is not None and ast.unparse(bound) != "DivergenceBound"
                losses[part.name] = PolicyLoss(*described, clips_ratio=clips)

    return estimators, losses


def _options(function: ast.FunctionDef) -> dict[str, str]:
    arguments = function.args
    return {
        option.arg: ast.unparse(default) if default else ""
        for option, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if option.arg != "reduce"
    }


def _required(function: ast.FunctionDef) -> frozenset[str]:
    columns = function.args.args
    num_required = len(columns) - len(function.args.defaults)
    return frozenset(column.arg for column in columns[:num_required])


def _first_sentence(function: ast.FunctionDef) -> str:
    """The first paragraph of its docstring, up to what it says of shapes or returns."""
    text = " ".join((ast.get_docstring(function) or function.name).partition("\n\n")[0].split())
    return re.split(r"; (?:all|returns|ties)|\.(?: |$)", text)[0]


ESTIMATORS, POLICY_LOSSES = read_algorithms(_files_of_algorithms())
PREFERENCE_LOSSES = _entries("PREFERENCE_LOSSES", Entry)
REWARDS = _entries("REWARDS", Reward)
PIPELINES = _entries("PIPELINES", BuiltinPipeline)
TRAIN_ENGINES = _entries("TRAIN_ENGINES", TrainEngineEntry)
ROLLOUT_ENGINES = _entries("ROLLOUT_ENGINES", RolloutEngineEntry)
TRACKERS = _entries("TRACKERS", Tracker)
LAUNCHERS = _entries("LAUNCHERS", Entry)
MODELS = _entries("MODELS", Entry)
NUMBER_HEADS = _entries("NUMBER_HEADS", Entry)
WORKFLOWS = _entries("WORKFLOWS", WorkflowEntry)

REGISTERED: set[str] = set()
"""User estimators and losses that this process has registered."""

# Statistics of a rejection mask, as in verl: of each token, or the sum, mean or maximum over a
# sequence's tokens.
ROLLOUT_RS = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    "seq_max_k2",
    "seq_max_k3",
)

LOSS_AGG_MODES = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)

VALUE_LOSSES = ("mse", "huber")

_PLAIN_KL_TYPES = ("kl", "abs", "mse", "low_var_kl")
KL_TYPES = (*_PLAIN_KL_TYPES, *(f"{name}+" for name in _PLAIN_KL_TYPES))
NO_FULL_KL = (
    "'full' would need the whole distributions of policy and reference, and only the log-probs of "
    "sampled tokens are kept; low_var_kl is an unbiased estimate of the same KL"
)

CUSTOM_REWARD = "custom"
JUDGE = "judge"
PROMPT_MESSAGES = "prompt_messages"
"""The column, among a row's others, in which a reward that reads messages finds those of the
prompt."""
PROMPT_CHAT = "prompt_chat"
"""The one in which a user's reward finds them if the prompt is a chat."""

WHOLE_SCORE = ("score", "seq_reward")
"""Names of the whole score, including penalties, in a group filter; the second as in verl."""
FILTER_METRICS = ("acc", *WHOLE_SCORE)

KV_ON_UPDATE = ("keep", "recompute", "abort")

WEIGHT_UPDATE_MODES = ("store", "disk", "collective")

SEVERAL_PROCESSES = "distflow.cluster.local_processes_launcher:launch_processes"
"""Starts the processes of the launcher `local`, if there are several."""
GPUS_OF_CLUSTER = "distflow.cluster.ray_launcher:gpus_of_machines"
"""Counts the GPUs available to workers of the launcher `ray`."""
SEVERAL_RUNS = {
    "local": "distflow.cluster.concurrent_run_processes:launch_several",
    "ray": "distflow.cluster.ray_launcher:launch_several_ray",
}
"""Functions that start several concurrent runs, by launcher."""

HUB_DATA = re.compile(r"[\w.-]+/[\w.-]+(?::[\w.-]*){0,2}")
"""The id of a data set on the hub, with its configuration and split."""

TEMPLATE_PARAMETERS = (
    "conversation",
    "messages",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "sanitize_control_tokens",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)
"""Parameters that the call of a chat template sets itself; further arguments may not have these
names."""

OPTIMIZERS = ("adamw", "adamw_8bit", "sgd")
SCHEDULERS = ("constant", "constant_with_warmup", "linear_with_warmup", "cosine_with_warmup")
DTYPES = ("bfloat16", "float32")


def is_own(reward: str) -> bool:
    """Whether a reward function is the user's."""
    return reward not in REWARDS or reward == CUSTOM_REWARD


def not_there_yet(table: Mapping[str, Entry]) -> tuple[str, ...]:
    """The names of a table that have no target."""
    return tuple(name for name, entry in table.items() if not entry.target)
