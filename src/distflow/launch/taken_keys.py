"""Rejects keys that were set and that nothing in the run takes. Each key declares the parts that
take it (`taken_by` in `config/keys`); here are the parts that a run has."""

import inspect
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from distflow.algorithms.registry import find_adv_est, find_policy_loss, is_decoupled
from distflow.builtin_names import ROLLOUT_ENGINES
from distflow.config import Config, Loaded, flatten
from distflow.config.compose.load_config import is_verls
from distflow.config.compose.setting_origins import is_preset
from distflow.config.compose.unknown_keys import parents
from distflow.config.derived_settings import (
    CUSTOM,
    algorithms,
    config_of,
    find_pipeline,
    is_one_process,
    is_own_reference,
    is_rl,
    is_sharded,
    own_losses,
    pipeline_name,
    reads_labels,
    reads_pairs,
    validates,
)
from distflow.config.keys.actor import ActorConfig
from distflow.config.keys.declare import untaken, walk
from distflow.config.keys.reward import REWARD_MODEL, scoring_models
from distflow.config.migration.tables import expand
from distflow.errors import UserError
from distflow.graph import BoundPipeline, NodeRole
from distflow.graph.node_spec import is_factory
from distflow.hub_id_or_local_path import is_local_model
from distflow.import_target import innermost, is_ours, load_function
from distflow.launch.rollout_engines import AT_ONCE, engine_parameters, shares_weights
from distflow.planning.independent_parts import pipeline_parts
from distflow.planning.plan import Plan
from distflow.scheduling.data_plan import DataPlan


def _read_reasons() -> Iterator[tuple[str, str]]:
    file = Path(__file__).with_name("why_keys_are_not_taken.toml")
    for keys, why in tomllib.loads(file.read_text("utf-8")).items():
        for key in expand(keys):
            yield key, why


_REASONS = dict(_read_reasons())
# Coefficients of loss terms that a pipeline may omit: 0 is the same as omitting it.
_COEFFICIENTS = ("algorithm.kl_ctrl.kl_coef", "actor_rollout_ref.actor.kl_loss_coef")
_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"


class InertKeys(UserError):
    """Keys that the user set and nothing takes. keys: with the reason, empty if it is not known."""

    def __init__(self, keys: Mapping[str, str], message: str):
        super().__init__(message)
        self.keys = keys


def refuse_inert_keys(loaded: Loaded, taken: "TakenKeys", pipeline: BoundPipeline) -> list[str]:
    """Raises InertKeys with the keys and where they were set. Keys of a built-in preset are not the
    user's mistake if another pipeline was chosen: they are returned, with their origins. Presets
    that spell out verl's defaults may have more keys than a pipeline takes.
    """
    set_keys = loaded.set_keys
    values = flatten(loaded.config)
    reasons = _REASONS if pipeline.rollout_nodes else {}

    inert = dict[str, str]()
    for key in taken.missing():
        origin = set_keys.get(key)
        if origin is None or is_verls(origin):
            continue
        if key in _COEFFICIENTS and values[key] == 0:
            continue

        inert[key] = f"{key} ({origin})"
        if key in reasons:
            inert[key] += f": {reasons[key]}"

    users = {key: shown for key, shown in inert.items() if not is_preset(set_keys[key])}
    if not users:
        return list(inert.values())

    more = ""
    if any(not is_ours(node.fn) for node in pipeline.nodes):
        more = "; turn a key that only your own node reads into an option of its function"
    if loaded.config.actor_rollout_ref.rollout.workflow is not None:
        more += "; a workflow calls reward functions if it has a parameter `reward_fn`"
    shown = "\n".join(f"  {line}" for line in users.values())
    raise InertKeys(
        {key: reasons.get(key, "") for key in users},
        f"keys without effect in pipeline '{pipeline.graph_id}':\n{shown}\n"
        f"Remove them, or choose a pipeline, engine, estimator or loss that uses them{more}",
    )


class TakenKeys:
    """The keys that the parts of a run take."""

    def __init__(
        self,
        config: Config,
        pipeline: BoundPipeline,
        plan: Plan,
        data: DataPlan,
    ) -> None:
        self._config = config
        self._plan = plan
        self._pipeline = pipeline
        self._saves = bool(data.saves)
        self._engines = pipeline.engines
        ours = [innermost(node.given) for node in pipeline.nodes if is_ours(node.given)]
        self._functions = {function.__name__ for function in ours}
        if "train_unscored_actor" in self._functions:
            self._functions |= {"train_actor", "compute_old_log_prob"}

    def missing(self) -> Iterator[str]:
        """The keys that nothing takes."""
        parts = self._parts()
        named = {*self._keys_by_name()}
        groups = {*self._groups_of_users()}
        mentioned = [*self._mentioned_by_users()]
        found = [*untaken(self._config, "", parts)]
        for name, group in self._config.user_groups.items():
            found += [key for key, *_ in walk(group, name)]

        for key in found:
            above = {key, *parents(key)}
            if above & named or above & groups:
                continue
            if any({*key.split(".")} <= names for names in mentioned):
                continue
            yield key

    def _parts(self) -> set[str]:
        """The names of the parts: functions of nodes, engines, services, and what follows from
        several keys."""
        config = self._config
        scoring = scoring_models(config.reward_model)
        pipeline = find_pipeline(config)
        has_own_factor = pipeline is not None and bool(pipeline.oversample_factor)
        facts = {
            pipeline_name(config): True,
            "builtin_pipeline": pipeline_name(config) != CUSTOM,
            "rl": is_rl(config),
            "responses_of_rows": not (is_rl(config) or reads_pairs(config) or reads_labels(config)),
            "preference_pairs": reads_pairs(config) or reads_labels(config),
            "labelled_responses": reads_labels(config),
            "validation": validates(config),
            "rl_validation": validates(config) and is_rl(config),
            "checkpoints": self._saves,
            "fsdp": is_sharded(config),
            "hub_model": not is_local_model(str(config.actor_rollout_ref.model.path)),
            "scoring_model": any(name in self._engines for name in scoring),
            REWARD_MODEL: REWARD_MODEL in self._engines and REWARD_MODEL in scoring,
            "judge": any(model.judge for model in scoring.values()),
            "oversampling": is_rl(config) and not has_own_factor,
            **self._facts_of_losses(),
            **self._facts_of_placement(),
        }
        present = {name for name, is_there in facts.items() if is_there}

        return {*present, *self._functions, *self._engines, *self._pipeline.services}

    def _facts_of_losses(self) -> dict[str, bool]:
        config = self._config
        actor = config.actor_rollout_ref.actor
        updates = "train_actor" in self._functions
        scores = "compute_old_log_prob" in self._functions
        sums = [
            updates and actor.loss_agg_mode == "seq-mean-token-sum-norm",
            updates and find_policy_loss(actor.policy_loss).returns_scalar,
            "train_critic" in self._functions
            and config.critic.loss_agg_mode == "seq-mean-token-sum-norm",
        ]
        decouples = is_decoupled(actor.policy_loss)

        return {
            "decoupled_loss": (updates or scores) and decouples,
            "coupled_loss": (updates or scores) and not decouples,
            "summed_loss": any(sums),
        }

    def _facts_of_placement(self) -> dict[str, bool]:
        config = self._config
        nodes = self._pipeline.rollout_nodes
        has_engine = "rollout" in self._engines
        goes_elsewhere = bool(self._plan.generating_only)
        is_sync = config.async_.max_staleness == 0
        by_others = config.trainer.launcher != "local"
        scores = any(node.node_role is NodeRole.REWARD for node in nodes)
        several = not is_one_process(config)
        parts = pipeline_parts(self._pipeline, {})

        return {
            "several_processes": several,
            "several_parts": by_others and (len(parts) > 1 or bool(config.trainer.devices)),
            "allocation": by_others and bool(config.trainer.allocation),
            "launched_elsewhere": by_others,
            "remote_rollout": goes_elsewhere,
            "rollout_in_turns": has_engine and not goes_elsewhere and is_sync,
            "concurrent_rollout": is_rl(config) and not is_sync,
            "called_in_threads": any(
                not (node.contract.is_async and is_ours(node.fn)) for node in nodes
            ),
            "scores": scores,
            "sharded_ref": is_sharded(config) and not is_own_reference(config),
        }

    def _keys_by_name(self) -> Iterator[str]:
        """The keys, and whole groups, that parts take because they have a parameter or setting of
        that name. Not all names that parts have are keys."""
        config = self._config
        for node in self._pipeline.nodes:
            yield from node.keys

        if "compute_advantage" in self._functions:
            for _, algorithm in algorithms(config):
                for name in find_adv_est(algorithm.adv_estimator).options:
                    yield f"algorithm.{name}"

        if "train_actor" in self._functions:
            for domain in (None, *own_losses(config)):
                yield from _keys_of_loss(config_of(config, domain).actor_rollout_ref.actor)

        models = scoring_models(config.reward_model)
        judges = any(name in self._engines and models[name].judge for name in models)
        if "rollout" in self._engines or judges:
            yield from _keys_of_rollout_engine(config)
        if validates(config) or config.trainer.test_freq <= 0:
            yield "trainer.test_freq"

        # Of shared weights the engine is compared only at the start: the number means on or off.
        has_own_weights = not shares_weights(config)
        if "rollout" in self._engines and (has_own_weights or config.trust.canary_freq == 0):
            yield "trust.canary_freq"

    def _groups_of_users(self) -> Iterator[str]:
        """The groups that a user's function is handed whole, and those that users registered: it
        may read any of their keys while the run runs. For a key of another group it should have an
        option."""
        for node in self._pipeline.nodes:
            if is_ours(node.fn) or not {"ctx", "config"} & {*node.contract.reserved}:
                continue
            yield from self._config.user_groups
            if node.config_key:
                yield node.config_key

    def _mentioned_by_users(self) -> Iterator[set[str]]:
        """The words of each function of the user's that is called with the config to build
        the pipeline or a node, without the underscore of `async_`."""
        own = self._config.dag.pipeline
        functions = [node.given for node in self._pipeline.nodes if is_factory(node.given)]
        if pipeline_name(self._config) == CUSTOM and isinstance(own, str):
            functions.append(load_function(own))

        for function in functions:
            if is_ours(function):
                continue
            plain = inspect.unwrap(innermost(function))
            with suppress(OSError, TypeError):
                words = re.findall(r"\w+", inspect.getsource(plain))
                yield {word.removesuffix("_") for word in words}


def _keys_of_loss(actor: ActorConfig) -> Iterator[str]:
    """The keys of the actor that its loss has options for."""
    loss = find_policy_loss(actor.policy_loss)
    if loss.returns_scalar:  # such a loss is handed the whole group
        yield _ACTOR
    for name in loss.options:
        yield f"{_ACTOR}.{name}"
    clips = {"clip_ratio_low", "clip_ratio_high"} <= loss.options.keys()
    if clips and None in (actor.clip_ratio_low, actor.clip_ratio_high):
        yield f"{_ACTOR}.clip_ratio"


def _keys_of_rollout_engine(config: Config) -> Iterator[str]:
    """The keys of the rollout that its engine has parameters for."""
    name = config.actor_rollout_ref.rollout.name
    for parameter in engine_parameters(name):
        if parameter not in AT_ONCE or config.async_.max_staleness > 0:
            yield f"{_ROLLOUT}.{parameter}"
    if ROLLOUT_ENGINES[name].in_server:
        yield f"{_ROLLOUT}.data_parallel_size"
