"""Registry of advantage estimators and policy losses by name, built-in or user-defined.

The module of a built-in is imported when it is first looked up.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeVar, cast, get_type_hints

from distflow import builtin_names as names
from distflow.builtin_names import Entry
from distflow.config.compose.typed_values import Mismatch, can_convert, convert
from distflow.errors import hint
from distflow.graph.fields import find_field
from distflow.graph.node_roles import NodeRole, Scope
from distflow.graph.node_spec import node
from distflow.import_target import (
    is_ours,
    load,
    load_module,
    own_name,
    required_parameters,
    shown_name,
    split_name,
)

_NO_DEFAULT = inspect.Parameter.empty
Fn = TypeVar("Fn", bound=Callable[..., object])

# The signature of verl's and siiRL's policy losses; the first four parameters distinguish it from
# ours.
SCALAR_LOSS_PARAMETERS = ("old_log_prob", "log_prob", "advantages", "response_mask")
SCALAR_LOSS_ARGUMENTS = (*SCALAR_LOSS_PARAMETERS, "loss_agg_mode", "config", "rollout_is_weights")


# The built-in estimators as an enum: `AdvantageEstimator.GRPO`.
# mypy wants the names spelled out; the files of the estimators have them
AdvantageEstimator = Enum(  # type: ignore[misc]
    "AdvantageEstimator", {name.upper(): name for name in names.ESTIMATORS}
)


@dataclass(frozen=True)
class AdvEstimator:
    """An estimator. `fn` is a node function that a pipeline can run. scope: a function without a
    declared one may compare all samples that it receives.
    """

    name: str
    fn: Callable[..., object]
    scope: Scope = "global"

    def __post_init__(self) -> None:
        declares = node(scope=self.scope, role=NodeRole.ADVANTAGE, writes=("advantages", "returns"))
        object.__setattr__(self, "fn", declares(self.fn))

    @property
    def options(self) -> dict[str, object]:
        return _options(self.fn)


@dataclass(frozen=True)
class PolicyLoss:
    """A registered loss, described by the names of its parameters.

    reads, optional: required and optional batch columns; `log_probs` comes from the engine.
    options: its options and their defaults. returns_scalar: whether it has verl's and siiRL's
    signature, returning a scalar. check, selects, every_row: see `register_policy_loss`.
    """

    name: str
    fn: Callable[..., object]
    reads: tuple[str, ...]
    optional: tuple[str, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)
    returns_scalar: bool = False
    check: Callable[..., None] | None = None
    selects: Callable[..., object] | None = None
    every_row: bool = False

    @property
    def takes_weights(self) -> bool:
        """Whether correction weights reach it: a loss with verl's signature must have a parameter
        for them."""
        parameters = inspect.signature(self.fn).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return not self.returns_scalar or takes_all or "rollout_is_weights" in parameters

    @property
    def selection_options(self) -> dict[str, object]:
        """Options of `selects` and their defaults; a config sets them together with those of the
        loss."""
        if self.selects is None:
            return {}
        return _options(self.selects)

    def call_options(self, settings: Mapping[str, object]) -> dict[str, object]:
        """The options of the call itself. Raises ValueError for an option that is unknown, missing,
        of the wrong type, or invalid."""
        check_options(
            f"policy loss '{self.name}'", settings, [*self.options, *self.selection_options]
        )
        settings = converted(f"policy loss '{self.name}'", settings, self.fn, self.selects)
        own = {name: value for name, value in settings.items() if name in self.options}

        missing = [
            name
            for name, default in self.options.items()
            if default is _NO_DEFAULT and name not in own
        ]
        if missing:
            raise ValueError(
                f"policy loss '{self.name}' has no default for its option '{missing[0]}': give it "
                f"one in {shown_name(self.fn)}, or set "
                f"actor_rollout_ref.actor.policy_loss_kwargs.{missing[0]}"
            )

        if self.check is not None:
            parameters = inspect.signature(self.check).parameters
            values = {**self.options, **self.selection_options, **settings}
            self.check(**{name: value for name, value in values.items() if name in parameters})

        return own

    def for_selection(self, settings: Mapping[str, object]) -> dict[str, object]:
        """The options that `selects` takes. Raises ValueError for one of the wrong type."""
        values = converted(f"policy loss '{self.name}'", settings, self.selects)
        return {name: value for name, value in values.items() if name in self.selection_options}


@dataclass(frozen=True)
class PreferenceLoss:
    """A registered loss over pairs of responses. Its positional parameters are what it reads (see
    `algorithms/losses/preference.py`), its keyword-only ones are options.
    """

    name: str
    fn: Callable[..., object]

    def __post_init__(self) -> None:
        unknown = [name for name in self.reads if name not in PREFERENCE_VALUES]
        if unknown or "chosen" not in self.reads or "rejected" not in self.reads:
            wrong = f"there is no '{unknown[0]}'" if unknown else "it compares no two responses"
            raise ValueError(
                f"preference loss '{self.name}' ({shown_name(self.fn)}) cannot be called: {wrong}. "
                f"Write def loss(chosen, rejected, ..., *, options), with parameters among "
                f"{', '.join(PREFERENCE_VALUES)}"
            )

    @property
    def reads(self) -> tuple[str, ...]:
        parameters = inspect.signature(self.fn).parameters.values()
        return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)

    @property
    def has_reference(self) -> bool:
        return any(name.startswith("ref_") for name in self.reads)

    def call_options(self, settings: Mapping[str, object]) -> dict[str, object]:
        """All options with their values. Raises ValueError for one that is unknown or of the wrong
        type."""
        what = f"preference loss '{self.name}' (algorithm.preference_loss_kwargs)"
        known = _options(self.fn)
        check_options(what, settings, known)
        return {**known, **converted(what, settings, self.fn)}


PREFERENCE_VALUES = (
    "chosen",
    "rejected",
    "ref_chosen",
    "ref_rejected",
    "chosen_tokens",
    "rejected_tokens",
    "nll",
)
"""What a preference loss may read."""

Registered = TypeVar("Registered", AdvEstimator, PolicyLoss, PreferenceLoss)


class Registry(dict[str, Registered]):
    """Entries by name: the user's, and the built-in ones of `table` that were looked up."""

    def __init__(
        self,
        what: str,
        table: Mapping[str, Entry],
        decorator: str,
        make: Callable[[str, Callable[..., object]], Registered],
    ) -> None:
        """make: builds the entry of a plain function."""
        super().__init__()
        self._what = what
        self._table = table
        self._decorator = decorator
        self._make: Callable[[str, Callable[..., object]], Registered] = make

    def known(self, name: str) -> Registered | None:
        """The entry of that name. Imports the module of a built-in, so that it is registered before
        a custom one. Registers the function that "file.py:function" or "module:function" names.
        Raises ValueError if that fails.
        """
        if name in self._table:
            load_module(split_name(self._table[name].target)[0])
        elif ":" in name:
            self[name] = self.read(name, load(name))
        return self.get(name)

    def read(self, name: str, found: object) -> Registered:
        """The entry for a function (from its decorator if it has one) or an unpickled entry, under
        that name. Raises ValueError if the function cannot be called."""
        entry = next((entry for entry in self.values() if entry.fn is found), None)
        if entry is None and not isinstance(found, AdvEstimator | PolicyLoss | PreferenceLoss):
            if not callable(found) or isinstance(found, type):
                raise ValueError(f"{self._what} '{name}' is {found!r:.80}: give a function")
            entry = self._make(name, found)
        return replace(cast(Registered, entry or found), name=own_name(name))

    def find(self, name: str) -> Registered:
        """The entry of that name. Raises ValueError with the nearest name."""
        if (found := self.known(name)) is None:
            raise ValueError(
                f"{self._what} '{name}' is unknown; use file.py:function, or register it with "
                f"{self._decorator} in a module of "
                f"trainer.imports{hint(name, [*self._table, *self])}"
            )

        return found

    def add(self, name: str, entry: Registered) -> None:
        """Register an entry; warn if it replaces another."""
        if (old := self.known(name)) is not None:
            warnings.warn(f"{self._what} '{name}' of {old.fn.__module__} is replaced", stacklevel=3)
        self[name] = entry
        names.REGISTERED.update({name} - self._table.keys())

    def own(self, name: str) -> Registered | None:
        """The user's entry of that name, if registered."""
        entry = self.get(name)
        is_own = entry is not None and not is_ours(entry.fn)
        return entry if is_own else None


def register_adv_est(
    name: str | Enum,
    scope: Scope = "group",
) -> Callable[[Fn], Fn]:
    """Register an advantage estimator
    `(token_level_rewards, response_mask, ...) -> (advantages, returns)`.

    Parameters are fields of the batch, keyword-only ones are options; `**kwargs` is accepted.
    token_level_rewards, response_mask and both results are `(bs, response_length)`; group_index and
    valid are `(bs,)`. scope: which samples it must see together ("sample", "group", "global").
    Registering a name again replaces the function, with a warning.
    """
    key = str(name.value) if isinstance(name, Enum) else name

    def register(fn: Fn) -> Fn:
        ADV_ESTIMATORS.add(key, AdvEstimator(key, fn, scope))
        return fn

    return register


def register_policy_loss(
    name: str,
    *,
    check: Callable[..., None] | None = None,
    selects: Callable[..., object] | None = None,
    every_row: bool = False,
) -> Callable[[Fn], Fn]:
    """Register a policy loss, of either signature:

    - ours:
      `(log_probs, advantages, loss_mask, ..., *, options) -> (per-token loss (bs, response_length),
      statistics)`; parameters are fields of the batch, statistics are named per-token tensors;
    - verl's and siiRL's:
      `(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
      rollout_is_weights) -> (pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower)`, scalars.

    check: called before the start with the options that it names; raises ValueError for an invalid
    one. selects: a node function that marks tokens of the whole step before its first update, as
    the column `selected_tokens` (see `algorithms/methods/clip_cov.py`). every_row: means over
    sequences count rows without a token.

    Registering a name again replaces the function, with a warning. Raises ValueError if the
    signature fits neither."""

    def register(fn: Fn) -> Fn:
        loss = read_policy_loss(name, fn)
        POLICY_LOSSES.add(name, replace(loss, check=check, selects=selects, every_row=every_row))
        return fn

    return register


def register_preference_loss(name: str) -> Callable[[Fn], Fn]:
    """Register a loss over pairs, `(chosen, rejected, ..., *, options) -> (losses, rewards of the
    chosen responses, rewards of the rejected ones)`, each `(pairs,)`.

    `algorithms/losses/preference.py` says what its parameters may be; one that begins with `ref_`
    makes the run keep a reference.

    Registering a name again replaces the function, with a warning. Raises ValueError for other
    parameters."""

    def register(fn: Fn) -> Fn:
        PREFERENCE_LOSSES.add(name, PreferenceLoss(name, fn))
        return fn

    return register


def is_decoupled(name: str) -> bool:
    """Whether the loss reads the log-probs of a proximal policy; False for unknown names."""
    loss = POLICY_LOSSES.known(name)
    return loss is not None and "prox_log_probs" in loss.reads


def takes_weights(name: str) -> bool:
    """Whether correction weights reach the loss; False for unknown names."""
    loss = POLICY_LOSSES.known(name)
    return loss is not None and loss.takes_weights


def describe_estimator(name: str, options: Mapping[str, object] | None = None) -> str:
    """The estimator's name and options (by default, the defaults) in one line."""
    estimator = find_adv_est(name)
    known = estimator.options
    values = known | {key: value for key, value in (options or {}).items() if key in known}
    shown = ", ".join(f"{key}={value}" for key, value in values.items())
    return f"{shown_name(estimator.fn) if ':' in name else name}({shown})"


def check_options(what: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError for an option that `what` does not take, with the nearest known one."""
    known = list(known)
    for key in options:
        if key not in known:
            raise ValueError(
                f"{what} takes no option '{key}'{hint(key, known) or '; it takes none'}"
            )


def converted(
    what: str, options: Mapping[str, object], *functions: Callable[..., object] | None
) -> dict[str, object]:
    """The options as the types of the functions' parameters. Raises ValueError for a value of
    another type."""
    types = {name: kind for fn in functions for name, kind in _types(fn).items()}
    values = dict(options)
    for name, value in options.items():
        try:
            if can_convert(types.get(name)):
                values[name] = convert(value, types[name])
            else:
                values[name] = value
        except Mismatch as error:
            advice = f"; {error.advice}" if error.advice else ""
            raise ValueError(f"option '{name}' of {what} {error.what}{advice}") from None

    return values


def read_policy_loss(name: str, fn: Callable[..., object]) -> PolicyLoss:
    """Reads the signature. Raises ValueError if it is neither ours nor verl's, or cannot be
    called."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        raise _refused_loss(name, fn, "its parameters cannot be read") from None

    if inspect.iscoroutinefunction(fn):
        raise _refused_loss(
            name, fn, "it is async, but losses are called synchronously; write a plain def"
        )
    if by_position := [p.name for p in parameters.values() if p.kind is p.POSITIONAL_ONLY]:
        raise _refused_loss(name, fn, f"'{by_position[0]}' cannot be passed by name; remove the /")
    if all(wanted in parameters for wanted in SCALAR_LOSS_PARAMETERS):
        if extra := [each for each in required_parameters(fn) if each not in SCALAR_LOSS_ARGUMENTS]:
            raise _refused_loss(name, fn, f"there is no value for '{extra[0]}'; add a default")

        return PolicyLoss(
            name,
            fn,
            reads=("advantages", "loss_mask"),
            optional=("old_log_probs",),
            returns_scalar=True,
        )

    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for wanted in ("log_probs", "loss_mask"):
        if wanted not in parameters and not open_ended:
            raise _refused_loss(name, fn, f"it takes no {wanted}")

    for p in parameters.values():
        if p.kind is p.KEYWORD_ONLY and find_field(p.name) is not None:
            raise _refused_loss(
                name, fn, f"'{p.name}' is a column of the batch: put it before the *"
            )

    fields = [
        p
        for p in parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "log_probs"
    ]
    return PolicyLoss(
        name,
        fn,
        reads=tuple(p.name for p in fields if p.default is p.empty),
        optional=tuple(p.name for p in fields if p.default is not p.empty),
        options=_options(fn),
    )


def _refused_loss(name: str, fn: Callable[..., object], why: str) -> ValueError:
    return ValueError(
        f"policy loss '{name}' ({shown_name(fn)}) cannot be called: {why}. Write def "
        "loss(log_probs, advantages, loss_mask, other_columns, *, options), which returns (loss "
        f"per token, statistics by name), or verl's def loss({', '.join(SCALAR_LOSS_ARGUMENTS)})"
    )


def _options(fn: Callable[..., object]) -> dict[str, object]:
    parameters = inspect.signature(fn).parameters.values()
    return {
        p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "reduce"
    }


def _types(fn: Callable[..., object] | None) -> dict[str, object]:
    """The types of a function's parameters; empty if they cannot be read."""
    try:
        return {} if fn is None else get_type_hints(fn)
    except (NameError, TypeError):
        return {}


ADV_ESTIMATORS: Registry[AdvEstimator] = Registry(
    "advantage estimator", names.ESTIMATORS, "register_adv_est", AdvEstimator
)
POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    "policy loss", names.POLICY_LOSSES, "register_policy_loss", read_policy_loss
)
PREFERENCE_LOSSES: Registry[PreferenceLoss] = Registry(
    "preference loss", names.PREFERENCE_LOSSES, "register_preference_loss", PreferenceLoss
)
find_adv_est = ADV_ESTIMATORS.find
find_policy_loss = POLICY_LOSSES.find
find_preference_loss = PREFERENCE_LOSSES.find
