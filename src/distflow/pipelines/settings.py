"""The fields of a spec that need nothing but the config and the number of rows."""

import math
from collections.abc import Mapping
from functools import partial
from typing import TypedDict

import torch

from distflow.algorithms.objective import PolicyObjective
from distflow.config import Config
from distflow.flow.data_plan import DataPlan
from distflow.graph import Program
from distflow.pipelines.data_plan import data_plan
from distflow.pipelines.devices import choose_device, refuse_offload_here
from distflow.pipelines.factories import compute_dtype, engine_dtype, make_factories, shares_weights
from distflow.pipelines.models import check_layouts, model_sizes
from distflow.pipelines.objectives import is_anchored, loss_terms
from distflow.planning.cluster import plan_ray
from distflow.planning.plan import Plan, plan_local
from distflow.planning.scheduling import program_parts
from distflow.runtime.checks.mismatch import Tolerance
from distflow.runtime.spec import Factory


class Settings(TypedDict):
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


def spec_settings(config: Config, program: Program, num_rows: Mapping[str, int]) -> Settings:
    """num_rows: by domain, as `data_plan` takes them. Raises UserError naming the key."""
    exact, shares = compute_dtype(config) is torch.float32, shares_weights(config)
    data = data_plan(config, num_rows)
    return {
        "plan": _plan(config, program),
        "data": data,
        "factories": make_factories(config, program.engines, program.services, data.total_steps),
        "weight_dtype": engine_dtype(config),
        "shares_weights": shares,
        "sends_weights": not (shares and config.actor_rollout_ref.model.lora_rank > 0),
        "tolerance": Tolerance.of(exact),
        "ratio_limit": math.inf if not is_anchored(config) else 1e-4 if exact else 0.05,
        "loss_terms": loss_terms(config) if _trains_by_policy_loss(program) else (),
    }


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


def _trains_by_policy_loss(program: Program) -> bool:
    """Whether a node of it is what `train_actor` makes: only that one reports the terms of its loss."""
    updates = [node.fn for node in program.learning if isinstance(node.fn, partial)]
    return any(isinstance(fn.keywords.get("objective"), PolicyObjective) for fn in updates)
