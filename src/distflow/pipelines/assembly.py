"""Assembles a run from its config: program, data, engines, rewards. The only place that knows all of them."""

import hashlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distflow.algorithms.registry import describe_estimator
from distflow.config import Config, Loaded, describe
from distflow.config.errors import UserError
from distflow.config.functions import LoadError, load_modules
from distflow.config.program import is_rl
from distflow.data.prompts import PROMPT_FIELDS, PromptSet
from distflow.flow.coordinator import DataPlan
from distflow.flow.order import total_steps
from distflow.graph import BoundNode, NodeRole, Program, inert_keys
from distflow.models.tokenizer import stop_token_ids
from distflow.pipelines.data_sets import encode, read_held_out, read_train, train_prompts, validation_set
from distflow.pipelines.engines import (
    build_engines,
    choose_device,
    compute_dtype,
    load_policy,
    load_policy_tokenizer,
    shares_weights,
)
from distflow.pipelines.keys import taken_by_engines
from distflow.pipelines.nodes import compute_reward, greedy_baseline, train_actor
from distflow.pipelines.objectives import loss_terms
from distflow.pipelines.select import select_pipeline
from distflow.planning.plan import plan_local
from distflow.rewards.router import Overlong, RewardRouter
from distflow.rollout.engine import SamplingParams
from distflow.rollout.receipts import stripe_hashes
from distflow.runtime.checks.mismatch import Tolerance
from distflow.runtime.parts import Parts

_MAX_THREADS = 1024
Say = Callable[[str], None]


def assemble(loaded: Loaded, say: Say) -> Parts:
    """Everything that can be wrong with a run is found here, the cheap things first.

    say: told one line at a time what is being loaded. Raises UserError or PipelineError.
    """
    config = loaded.config
    fix_threads(config)
    _import_user_modules(config)
    program = bind(config)
    refuse_inert_keys(program, loaded)
    run_dir = config.trainer.run_dir
    model_settings = config.actor_rollout_ref.model
    rows, held_out_rows = read_train(config, run_dir), read_held_out(config, run_dir)
    tokenizer = load_policy_tokenizer(config)
    prompts = train_prompts(config, rows, tokenizer)
    held_out = encode(config, held_out_rows, tokenizer) if held_out_rows is not None else None
    for name, found in (("train", prompts), ("validation", held_out)):
        if found is not None:
            say(f"{name} data: {', '.join(found.report.lines())}")
    rewards = _rewards(config, program, prompts, held_out)
    model = load_policy(config)
    plan = data_plan(config, len(prompts))
    sampling = _sampling(config, model, tokenizer)
    say(f"model: {model_settings.path}, {sum(p.numel() for p in model.parameters()):,} parameters")
    if is_rl(config):
        say(f"advantages: {describe_estimator(config.algorithm.adv_estimator, _estimator_options(program))}")
    exact = compute_dtype(config) is torch.float32
    engines = build_engines(config, model, program.engines, tokenizer, plan.total_steps)
    applies_adapter = shares_weights(config) and model_settings.lora_rank > 0
    return Parts(
        config=config,
        config_yaml=loaded.text,
        run_dir=run_dir,
        program=program,
        plan=plan,
        engines=engines,
        tokenizer=tokenizer,
        train_rows=prompts,
        sampling=sampling,
        validation=[validation_set(config, held_out, sampling)] if held_out is not None else [],
        rewards=rewards,
        published=tuple if applies_adapter else engines.actor.weights,
        weight_dtype=compute_dtype(config),
        shares_weights=shares_weights(config),
        tolerance=Tolerance.of(exact),
        ratio_limit=1e-4 if exact else 0.05,
        loss_terms=loss_terms(config) if _uses_policy_loss(program) else (),
        placement=plan_local(program, str(choose_device(config))).to_json(),
        facts=_facts(prompts, tokenizer, model),
        description=_description(config, prompts, held_out),
    )


def bind(config: Config) -> Program:
    """The program of a config, bound to it and to the columns that data sets have."""
    return select_pipeline(config).bind(config, PROMPT_FIELDS)


def fix_threads(config: Config) -> None:
    """Once, before any thread starts: results are bit-equal for one number of threads only."""
    threads = config.trainer.num_threads
    if threads is None:
        return
    if threads > _MAX_THREADS:
        raise UserError(f"trainer.num_threads={threads}: set it to at most the cores of this machine, {os.cpu_count()}")
    torch.set_num_threads(threads)


def data_plan(config: Config, num_rows: int) -> DataPlan:
    """What the run draws from its data. total_training_steps may cut the epochs short, or go on beyond them."""
    data, trainer, filters = config.data, config.trainer, config.algorithm.filter_groups
    steps = trainer.total_training_steps or total_steps(trainer.total_epochs, num_rows, data.train_batch_size)
    return DataPlan(
        num_rows=num_rows,
        consumer_batch=data.train_batch_size,
        group_size=config.actor_rollout_ref.rollout.n if is_rl(config) else 1,
        total_tickets=None if trainer.total_training_steps else trainer.total_epochs * num_rows,
        total_steps=steps,
        seed=data.seed,
        shuffle=data.shuffle,
        max_concurrent=config.async_.max_concurrent_rollouts,
        max_num_gen_batches=filters.max_num_gen_batches,
        when_exhausted=filters.when_exhausted,  # type: ignore[arg-type]
    )


def _import_user_modules(config: Config) -> None:
    try:
        load_modules(config.trainer.imports)
    except LoadError as err:
        raise UserError(f"trainer.imports: {err}") from err


def refuse_inert_keys(program: Program, loaded: Loaded) -> None:
    """A key that was set and that nothing in this program takes would be a silent mistake."""
    inert = inert_keys(program.takes, loaded.set_keys, taken_by_engines(program, loaded.config))
    if inert:
        shown = "\n".join(f"  {key} ({loaded.set_keys[key]})" for key in inert)
        raise UserError(
            f"keys that do nothing in program '{program.graph_id}':\n{shown}\n"
            "Take them out, or choose a program, estimator or loss that uses them"
        )


def _rewards(config: Config, program: Program, train: PromptSet, held_out: PromptSet | None) -> RewardRouter | None:
    if not any(_is_judged_by_router(node) for node in program.nodes):
        return None
    settings, custom = config.reward, config.custom_reward_function
    router = RewardRouter(
        settings.functions,
        timeout_s=settings.timeout_s,
        num_workers=settings.num_workers,
        overlong=Overlong(settings.overlong.buffer_tokens, settings.overlong.factor),
        custom=(custom.path, custom.name) if custom.path else None,
    )
    router.check_domains(train.domains)
    if held_out is not None:
        router.check_domains(held_out.domains)
    return router


def _is_judged_by_router(node: BoundNode) -> bool:
    return node.fn in (compute_reward, greedy_baseline)


def _uses_policy_loss(program: Program) -> bool:
    return any(node.fn is train_actor for node in program.nodes)


def _sampling(config: Config, model: Any, tokenizer: Any) -> SamplingParams:
    settings = config.actor_rollout_ref.rollout
    return SamplingParams(
        config.data.max_response_length,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        repetition_penalty=settings.repetition_penalty,
        stop=tuple(settings.stop),
        stop_token_ids=stop_token_ids(model, tokenizer),
    )


def _estimator_options(program: Program) -> dict[str, Any]:
    for node in program.nodes:
        if node.node_role is NodeRole.ADVANTAGE:
            return dict(node.options)
    return {}


def _description(config: Config, train: PromptSet, held_out: PromptSet | None) -> dict[str, Any]:
    """The head of the report."""
    return {
        "experiment": f"{config.trainer.project_name} / {config.trainer.experiment_name}",
        "model": str(config.actor_rollout_ref.model.path),
        "data": f"{len(train):,} prompts" + (f", {len(held_out):,} held out" if held_out is not None else ""),
        "batch": describe(config)[0],
        "command": shlex.join(sys.argv),
        "machine": f"{platform.node()}: {_cpu_name()}, {os.cpu_count()} cores",
    }


def _facts(prompts: PromptSet, tokenizer: Any, model: nn.Module) -> dict[str, Any]:
    """What a resumed run must share with its checkpoint to be the same run, and to be bit-equal.

    model: as it was loaded; the reference and an adapter's base are that model, whatever the checkpoint holds.
    """
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    weights = json.dumps(sorted(stripe_hashes(model.named_parameters()).items()))
    return {
        "data_fingerprint": prompts.fingerprint(),
        "model_fingerprint": hashlib.sha256(weights.encode()).hexdigest(),
        "tokenizer_fingerprint": hashlib.sha256(vocabulary.encode()).hexdigest(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
