"""From a config to the spec of a run. Whatever can be wrong with a run is found here, the cheap things first."""

import hashlib
import json
import math
import os
import platform
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import torch
from transformers import PreTrainedTokenizerBase

from distflow.algorithms.objective import PolicyObjective
from distflow.algorithms.registry import describe_estimator
from distflow.config import Config, Loaded, Room, describe, fit_to, with_changes
from distflow.config.by_domain import response_limit, reward_functions, validates
from distflow.config.changes import changes
from distflow.config.domain_algorithm import algorithms
from distflow.config.errors import UserError, hint
from distflow.config.functions import LoadError, load_modules
from distflow.config.names import CUSTOM_REWARD, REWARDS
from distflow.config.program import CUSTOM, is_rl, is_sharded, program_name
from distflow.config.trainer import TrainerConfig
from distflow.config.watch import peek, watch
from distflow.data.encoded import EncodedRows, write_encoded
from distflow.data.prompts import PromptSet
from distflow.data.rows import TEMPLATE_KWARGS_COLUMN
from distflow.data.sources import forget_rows
from distflow.flow.data_plan import DataPlan, DomainPlan
from distflow.flow.order import total_steps
from distflow.graph import NodeRole, Program
from distflow.observe.claim import claimed
from distflow.pipelines.data_sets import DataSource, held_out_sources, train_sources
from distflow.pipelines.factories import (
    check_layouts,
    choose_device,
    compute_dtype,
    load_policy_tokenizer,
    make_factories,
    model_sizes,
    planes_threads,
    policy_context,
    refuse_offload_here,
    shares_weights,
)
from distflow.pipelines.inert import refuse_inert_keys
from distflow.pipelines.nodes.by_domain import options_of
from distflow.pipelines.objectives import is_anchored, loss_terms
from distflow.pipelines.run_models import with_models_of_runs
from distflow.pipelines.select import bound, generates, select_pipeline
from distflow.pipelines.travel import check_importable, check_pickles
from distflow.planning.agreement import follow_allocation
from distflow.planning.cluster import plan_ray
from distflow.planning.plan import Plan, check_plan, plan_local
from distflow.planning.scheduling import program_parts
from distflow.rewards.fingerprint import fingerprint_target
from distflow.rewards.functions import target_of
from distflow.rewards.router import check_domains
from distflow.rollout.engine import SamplingParams
from distflow.runtime.blame import is_ours
from distflow.runtime.checks.mismatch import Tolerance
from distflow.runtime.disk import writing_to
from distflow.runtime.residence import Offloads
from distflow.runtime.spec import Factory, RunOptions, Spec, ValidationSet, WorkerNeeds

_MAX_THREADS = 1024
_NUM_LOOKED_AT = 100  # rows
Say = Callable[[str], None]


def make_spec(loaded: Loaded, say: Say) -> Spec:
    """say: told one line at a time what is being loaded. Raises UserError or PipelineError."""
    loaded = _follow_program(follow_allocation(loaded))
    reading = read_config(loaded)
    with claimed(loaded.config.trainer.run_dir):  # first: rows from Python code are kept there; it may be somebody's
        loaded = with_models_of_runs(loaded, say)
        if loaded.config.trainer.resume_mode == "never":
            forget_rows(loaded.config.trainer.run_dir)
        loaded, reading, data = _fitted_to_files(loaded, reading)
        for line in _told(loaded, reading, data):
            say(line)
        with writing_to(loaded.config.trainer.run_dir):
            spec = _spec(loaded, reading.program, data)
    check_plan(spec.plan, reading.program)
    check_pickles(spec)
    return spec


@dataclass(frozen=True)
class Reading:
    """What the config alone says. unused: keys of a preset that the program does not take, as they are shown."""

    program: Program
    unused: list[str]
    train: list[DataSource]
    held_out: list[DataSource]


@dataclass(frozen=True)
class Data:
    """What the files hold, as tokens; held out by the domain that has the files, "" where none has."""

    tokenizer: PreTrainedTokenizerBase
    train: PromptSet
    held_out: dict[str, PromptSet]


def _read_data(config: Config, reading: Reading) -> Data:
    """All files are read before anything is loaded. What validates comes first: `eval` trains on nothing else."""
    run_dir = config.trainer.run_dir
    held_out_rows = [source.read(run_dir) for source in reading.held_out]
    rows = [source.read(run_dir) for source in reading.train]
    tokenizer = load_policy_tokenizer(config)
    encoded = [source.encode(own, tokenizer) for source, own in zip(reading.held_out, held_out_rows, strict=True)]
    held_out = {source.domain: prompts for source, prompts in zip(reading.held_out, encoded, strict=True)}
    train = [source.encode(own, tokenizer) for source, own in zip(reading.train, rows, strict=True)]
    return Data(tokenizer, PromptSet.joined(train), held_out)


def fit_to_files(loaded: Loaded) -> Loaded:
    """The config that a run would have, made to fit its model and data. Starts none. Raises as `make_spec` does."""
    loaded = _follow_program(loaded)
    return _fitted_to_files(loaded, read_config(loaded))[0]


def _fitted_to_files(loaded: Loaded, reading: Reading) -> tuple[Loaded, Reading, Data]:
    context = policy_context(loaded.config)
    loaded, reading = _fitted(loaded, reading, Room(context=context))
    data = _read_data(loaded.config, reading)
    loaded, reading = _fitted(loaded, reading, Room(len(data.train), context))
    return loaded, reading, data


def _fitted(loaded: Loaded, reading: Reading, room: Room) -> tuple[Loaded, Reading]:
    """The config in that room, read again where it became another. Raises ConfigError where something does not fit."""
    fitted = fit_to(loaded, room)
    return (loaded, reading) if fitted is loaded else (fitted, read_config(fitted))


def _told(loaded: Loaded, reading: Reading, data: Data) -> Iterator[str]:
    """What the run starts from. Raises UserError for a domain that nothing judges."""
    config = loaded.config
    named = {"train": data.train}
    named |= {f"validation{' ' if name else ''}{name}": found for name, found in data.held_out.items()}
    for name, found in named.items():
        yield f"{name} data: {', '.join(found.report.lines())}"
        if len(found.domains) > 1 and config.data.domains:
            yield "by domain: " + ", ".join(f"{own} {rows:,}" for own, rows in _num_rows(config, found).items())
        if "judge" in reading.program.services:
            check_domains(reward_functions(config), found.domains)
    yield from (f"made to fit: {fitted}" for fitted in loaded.fitted)
    if reading.unused:
        yield f"not used by the program '{reading.program.graph_id}': {', '.join(reading.unused)}"
    yield from _notes(loaded, reading, data)
    if is_rl(config):
        for domain, algorithm in algorithms(config):
            of = "" if domain is None else f" of '{domain}'"
            options = _estimator_options(reading.program, domain)
            yield f"advantages{of}: {describe_estimator(algorithm.adv_estimator, options)}"


def _notes(loaded: Loaded, reading: Reading, data: Data) -> Iterator[str]:
    """What runs, and is probably not what was meant."""
    config, cores = loaded.config, os.cpu_count() or 1
    trainer, rollout = planes_threads(config)
    if (trainer or 0) + (rollout or 0) > cores:
        beside = f" beside actor_rollout_ref.rollout.num_threads={rollout}" if rollout else ""
        yield (
            f"note: trainer.num_threads={trainer}{beside}, and this machine has {cores} cores: threads will "
            "wait for one another"
        )
    staleness = config.async_.max_staleness if is_rl(config) else 0
    if staleness and not _weighs_staleness(config):
        yield (
            f"note: answers are up to {staleness} steps old, and are trained on as if the policy of today had given "
            "them: actor_rollout_ref.actor.policy_loss=decoupled weighs them"
        )
    is_default = loaded.origin("data.prompt_format") == "default"
    has_template = bool(getattr(data.tokenizer, "chat_template", None))
    if is_default and has_template and is_rl(config) and not data.train.has_messages:
        yield (
            "note: the model has a chat template, and prompts go to it as plain text: an instruction-tuned model wants "
            "data.prompt_format=chat"
        )
    is_text = config.data.prompt_format == "text" and not data.train.has_messages
    for name in (config.data.tools_key, TEMPLATE_KWARGS_COLUMN) if is_text else ():
        if any(name in (row.extra_info or {}) for row in data.train[:_NUM_LOOKED_AT]):
            yield (
                f"note: rows have the column '{name}', which only a chat template is handed, and prompts are plain "
                "text: see data.prompt_format"
            )
    known = {domain for found in (data.train, *data.held_out.values()) for domain in found.domains}
    for key, named in (("reward.domains", config.reward.domains), ("algorithm.domains", config.algorithm.domains)):
        for name in sorted(set(named) - known):
            yield f"note: {key} has settings of '{name}', and no row is of that domain{hint(name, known)}"
    if "judge" in reading.program.services and all(row.ground_truth is None for row in data.train):
        yield (
            f"note: no row has the column '{config.data.answer_key}' (data.answer_key): the reward is called with "
            "ground_truth=None"
        )


def _weighs_staleness(config: Config) -> bool:
    """Whether the loss knows of the policy that drew the tokens."""
    algorithm, loss = config.algorithm, config.actor_rollout_ref.actor.policy_loss
    corrects = algorithm.rollout_correction.level or algorithm.recompute_old_log_probs == "false"
    return bool(corrects) or loss == "decoupled"


def read_config(loaded: Loaded) -> Reading:
    """Bind the program, and read every key that the run uses. Raises UserError for one that was set and is not read.

    The rest of a spec is made twice, here to see what it reads, before any file is opened.
    """
    config, reads = watch(loaded.config)
    fix_threads(config)
    import_user_modules(config)
    program = bind(config)
    judged = "judge" in program.services
    train, held_out = train_sources(config, judged), held_out_sources(config, judged)
    _run_options(config, program, _settings(config, program, num_rows={source.domain: 1 for source in train})["plan"])
    _validation_params(config, _sampling(config))
    for source in train:
        _sampling(config, source.domain)
    unused = refuse_inert_keys(loaded, reads, program)
    check_importable(loaded.config)
    return Reading(program, unused, train, held_out)


def _follow_program(loaded: Loaded) -> Loaded:
    """The config of a program of the user's that generates nothing says so. Raises ConfigError where other keys do not
    go with that."""
    config = loaded.config
    if program_name(config) != CUSTOM or config.dag.generates is not None:
        return loaded
    import_user_modules(config)
    if generates(bind(config)):
        return loaded
    return with_changes(loaded, [("dag.generates", False, "no node of the program samples or judges answers")])


def bind(config: Config) -> Program:
    """The program of a config, bound to it and to the columns that data sets have. Raises PipelineError."""
    return bound(select_pipeline(config), config)


def rebuild(config: Config) -> Program:
    """The same on a worker, which has its threads to set and the user's modules to import first."""
    fix_threads(config)
    import_user_modules(config)
    return bind(config)


def fix_threads(config: Config) -> None:
    """Once, before any thread starts: results are bit-equal for one number of threads only. Raises UserError for more
    than can be meant."""
    trainer, rollout = planes_threads(config)
    for key, threads in (("trainer", trainer), ("actor_rollout_ref.rollout", rollout)):
        if (threads or 0) > _MAX_THREADS:
            most = f"set it to at most the cores of this machine, {os.cpu_count()}"
            raise UserError(f"{key}.num_threads={threads}: {most}")
    if trainer is not None:
        torch.set_num_threads(trainer)


def import_user_modules(config: Config) -> None:
    """Those of `trainer.imports`, which register estimators, losses, columns."""
    try:
        load_modules(config.trainer.imports)
    except LoadError as err:
        raise UserError(f"trainer.imports: {err}") from err


def _spec(loaded: Loaded, program: Program, data: Data) -> Spec:
    config, run_dir = loaded.config, loaded.config.trainer.run_dir
    sampling, settings = _sampling(config), _settings(config, program, _num_rows(config, data.train))
    return Spec(
        config=config,
        text=loaded.text,
        options=_run_options(config, program, settings["plan"]),
        program=partial(rebuild, config),
        rows=EncodedRows(write_encoded(data.train, run_dir, "train")),
        validation=_validation(config, data.held_out),
        sampling=sampling,
        sampling_of={name: _sampling(config, name) for name in config.data.domains},
        facts={**_facts(data.train, data.tokenizer), **_reward_facts(config), **_rollout_facts(config)},
        description=_description(loaded, data.train, data.held_out),
        **settings,
    )


def _plan(config: Config, program: Program) -> Plan:
    device = choose_device(config)
    if config.trainer.launcher == "local":
        return plan_local(program, str(device))
    refuse_offload_here(config, device)
    is_shared_out = not config.trainer.allocation and len(program_parts(program, {})) > 1
    sizes = model_sizes(config, program.engines) if is_shared_out else {}
    plan = plan_ray(program, config, str(device), sizes)
    check_layouts(config, plan.layouts)
    return plan


class _Settings(TypedDict):
    """Fields of the spec that need nothing but the config and the number of rows."""

    plan: Plan
    data: DataPlan
    factories: Mapping[str, Factory]
    weight_dtype: torch.dtype
    shares_weights: bool
    sends_weights: bool
    tolerance: Tolerance
    ratio_limit: float
    loss_terms: tuple[str, ...]


def _num_rows(config: Config, prompts: PromptSet) -> dict[str, int]:
    """By domain in the order of the rows, or of the one source, ""."""
    if not config.data.domains:
        return {"": len(prompts)}
    return dict(Counter(row.domain for row in prompts))


def _settings(config: Config, program: Program, num_rows: Mapping[str, int]) -> _Settings:
    exact, shares = compute_dtype(config) is torch.float32, shares_weights(config)
    data = data_plan(config, num_rows)
    return {
        "plan": _plan(config, program),
        "data": data,
        "factories": make_factories(config, program.engines, program.services, data.total_steps),
        "weight_dtype": compute_dtype(config),
        "shares_weights": shares,
        "sends_weights": not (shares and config.actor_rollout_ref.model.lora_rank > 0),
        "tolerance": Tolerance.of(exact),
        "ratio_limit": math.inf if not is_anchored(config) else 1e-4 if exact else 0.05,
        "loss_terms": loss_terms(config) if _trains_by_policy_loss(program) else (),
    }


def _trains_by_policy_loss(program: Program) -> bool:
    """Whether a node of it is what `train_actor` makes: only that one reports the terms of its loss."""
    updates = [node.fn for node in program.learning if isinstance(node.fn, partial)]
    return any(isinstance(fn.keywords.get("objective"), PolicyObjective) for fn in updates)


def data_plan(config: Config, rows: Mapping[str, int]) -> DataPlan:
    """What the run draws from its data. total_training_steps may cut the epochs short, or go on beyond them. Of domains
    an epoch is as many groups as there are rows in all.

    rows: how many there are by domain, in their order, "" of one source.
    """
    data, trainer = config.data, config.trainer
    steps, epochs, num_rows = trainer.total_training_steps, trainer.total_epochs, sum(rows.values())
    plan = DataPlan(
        num_rows=num_rows,
        consumer_batch=data.train_batch_size,
        group_size=config.actor_rollout_ref.rollout.n if is_rl(config) else 1,
        total_tickets=None if steps or data.domains else epochs * num_rows,
        total_steps=steps or total_steps(epochs, num_rows, data.train_batch_size),
        seed=data.seed if data.shuffle else 0,
        shuffle=data.shuffle,
        max_concurrent=config.async_.max_concurrent_rollouts,
        domains=tuple(DomainPlan(name, rows[name], data.domains[name].weight) for name in rows if name),
    )
    if not is_rl(config):
        return plan
    filters = config.algorithm.filter_groups
    return replace(
        plan,
        max_staleness=config.async_.max_staleness,
        max_num_gen_batches=filters.max_num_gen_batches,
        when_exhausted="continue" if filters.when_exhausted == "continue" else "error",
    )


def _run_options(config: Config, program: Program, plan: Plan) -> RunOptions:
    trainer, trust = config.trainer, config.trust
    goes_elsewhere = any("rollout" in rank.engines and not rank.learning for rank in plan.ranks)
    has_val = validates(config)
    return RunOptions(
        seed=trainer.seed,
        update_frequency=config.actor_rollout_ref.actor.model_update_frequency if "rollout" in program.engines else 1,
        weight_update_mode=(config if goes_elsewhere else peek(config)).actor_rollout_ref.actor.weight_update_mode,
        val_before_train=trainer.val_before_train,
        # Off is always understood; a frequency means something only where there is something to validate on.
        test_freq=trainer.test_freq if has_val or peek(trainer).test_freq <= 0 else 0,
        save_freq=trainer.save_freq,
        keep_last=trainer.keep_last if trainer.save_freq > 0 else None,
        keep_best=trainer.keep_best_metric if trainer.keep_best else None,
        save_groups=trainer.save_groups,
        save_groups_last=trainer.save_groups_last,
        logger=trainer.logger,
        launcher=trainer.launcher,
        resume=trainer.resume_mode,
        run_dir=trainer.run_dir,
        project=trainer.project_name,
        experiment=trainer.experiment_name,
        enable_perf=config.dag.enable_perf,
        worker=_worker_needs(trainer if trainer.launcher == "ray" else peek(trainer)),
        max_held_mb=(trainer if trainer.launcher == "ray" else peek(trainer)).max_held_mb,
        peers_timeout_s=(trainer if trainer.launcher == "ray" else peek(trainer)).peers_timeout_s,
        timeout_s=config.reward.timeout_s if _has_deadline(program) else peek(config).reward.timeout_s,
        engine_timeout_s=(config if "rollout" in program.engines else peek(config)).actor_rollout_ref.rollout.timeout_s,
        canary_freq=_canary_freq(config, program),
        audit_freq=trust.audit_freq,
        on_mismatch=trust.on_mismatch if "rollout" in program.engines else "warn",
        certify=trust.certify_rewards if "judge" in program.services else False,
        max_error_share=(config if _is_judged(program) else peek(config)).reward.max_error_share,
        max_skipped=trust.max_skipped_updates,
        unmoved_after=trust.unmoved_after,
        offloads=_offloads(config, program) if is_sharded(config) else {},
    )


def _worker_needs(trainer: TrainerConfig) -> WorkerNeeds:
    env = {name: str(value) for name, value in trainer.worker_env.items()}
    return WorkerNeeds(trainer.worker_cpus, trainer.worker_memory_mb, env)


def _offloads(config: Config, program: Program) -> dict[str, Offloads]:
    """Of what is trained, by role. What stays on the host always is not moved."""
    settings = {"actor": config.actor_rollout_ref.actor.fsdp_config, "critic": config.critic.fsdp_config}
    found = {
        role: Offloads(weights=own.param_offload, moments=own.optimizer_offload)
        for role, own in settings.items()
        if role in program.engines
    }
    return {role: own for role, own in found.items() if own.weights or own.moments}


def _has_deadline(program: Program) -> bool:
    return any(not (node.contract.is_async and is_ours(node)) for node in program.experience)


def _is_judged(program: Program) -> bool:
    return any(node.node_role is NodeRole.REWARD for node in program.experience)


def _canary_freq(config: Config, program: Program) -> int:
    """On shared weights the engine is compared at the start only, so that the number means nothing beyond on or off."""
    if "rollout" not in program.engines:
        return 0
    plain = peek(config).trust.canary_freq
    return 1 if plain > 0 and shares_weights(config) else config.trust.canary_freq


def _sampling(config: Config, domain: str = "") -> SamplingParams:
    """The temperature is one for all: the trainer scores by it."""
    own = config.data.domains.get(domain)
    longest = response_limit(config, domain)
    if not is_rl(config):
        return SamplingParams(longest)
    settings = config.actor_rollout_ref.rollout

    def chosen(name: str) -> Any:
        value = getattr(own, name, None)
        return getattr(settings, name) if value is None else value

    return SamplingParams(
        longest,
        temperature=settings.temperature,
        top_p=chosen("top_p"),
        top_k=chosen("top_k"),
        min_p=chosen("min_p"),
        repetition_penalty=chosen("repetition_penalty"),
        stop=tuple(chosen("stop")),
    )


def _validation(config: Config, held_out: Mapping[str, PromptSet]) -> tuple[ValidationSet, ...]:
    """One set, or one for each domain that has some, under its name."""
    sets = []
    for domain, prompts in held_out.items():
        rows = EncodedRows(write_encoded(prompts, config.trainer.run_dir, f"val-{domain}" if domain else "val"))
        sets.append(ValidationSet(domain or "val", rows, *_validation_params(config, _sampling(config, domain))))
    return tuple(sets)


def _validation_params(
    config: Config, sampling: SamplingParams
) -> tuple[SamplingParams | None, SamplingParams | None, int]:
    """How `rollout.val_kwargs` wants held-out prompts answered: greedily, by sampling, how often."""
    if not validates(config) or not is_rl(config):
        return None, None, 0
    settings = config.actor_rollout_ref.rollout.val_kwargs
    greedy = SamplingParams(sampling.max_tokens, greedy=True, stop=sampling.stop) if settings.greedy else None
    if settings.n == 0:
        return greedy, None, 0
    sampled = SamplingParams(
        sampling.max_tokens, settings.temperature, settings.top_p, settings.top_k, stop=sampling.stop
    )
    return greedy, sampled, settings.n


def _estimator_options(program: Program, domain: str | None) -> dict[str, object]:
    for node in program.nodes:
        if node.node_role is NodeRole.ADVANTAGE:
            return options_of(node, domain)
    return {}


def _description(loaded: Loaded, train: PromptSet, held_out: Mapping[str, PromptSet]) -> dict[str, object]:
    """The head of the report, and what it says about the config."""
    config, (preset, changed) = loaded.config, changes(loaded)
    num_held_out = sum(map(len, held_out.values()))
    return {
        "experiment": f"{config.trainer.project_name} / {config.trainer.experiment_name}",
        "model": str(config.actor_rollout_ref.model.path),
        "data": f"{len(train):,} prompts" + (f", {num_held_out:,} held out" if held_out else ""),
        "batch": describe(config)[0],
        "command": shlex.join(sys.argv),
        "machine": f"{platform.node()}: {_cpu_name()}, {os.cpu_count()} cores",
        "preset": preset,
        "changed": changed,
    }


def _facts(prompts: PromptSet, tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """What a resumed run must share with its checkpoint to be the same run, and to be bit-equal."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    return {
        "data_fingerprint": prompts.fingerprint(),
        "tokenizer_fingerprint": hashlib.sha256(vocabulary.encode()).hexdigest(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
    }


def _rollout_facts(config: Config) -> dict[str, object]:
    """What is a plane of its own has threads of its own."""
    threads = planes_threads(config)[1]
    return {} if threads is None else {"rollout_threads": threads}


def _reward_facts(config: Config) -> dict[str, object]:
    """The code of the user's reward functions, which may change on resume, and is then told."""
    custom = config.custom_reward_function
    names = {part.name for parts in reward_functions(config).values() for part in parts}
    own = sorted(name for name in names if name == CUSTOM_REWARD or name not in REWARDS)
    path = (custom.path, custom.name) if custom.path else None
    return {f"code_of_reward_{name}": fingerprint_target(target_of(name, path)) for name in own}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
