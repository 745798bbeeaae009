"""Whether a run fits and how long it takes, from its plan: the memory of each worker, the time line
of a step, and the whole run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from distflow.config import Config
from distflow.config.derived_settings import (
    RunLimits,
    is_one_process,
    is_rl,
    reward_functions,
    run_steps,
)
from distflow.errors import UserError, count_of, duration_text
from distflow.graph import BoundPipeline
from distflow.planning.assign_ranks import plan_devices
from distflow.planning.devices import Device
from distflow.planning.lengths import Lengths, assumed_lengths
from distflow.planning.measured_rates import Rates
from distflow.planning.memory import PHASES, Phase, WorkerMemory, worker_memory
from distflow.planning.model_memory import samples_per_step
from distflow.planning.model_shapes import ModelShape
from distflow.planning.plan import Plan
from distflow.planning.step_times import StepTimes
from distflow.planning.time_line import Bar, make_time_line

_MICRO_BATCHES = (
    "lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu, set "
    "actor_rollout_ref.model.enable_gradient_checkpointing=true, or "
)
_LESS = {
    "activations": _MICRO_BATCHES,
    "logits": _MICRO_BATCHES,
    "KV cache": (
        "lower actor_rollout_ref.rollout.max_num_seqs or a server's share "
        "(actor_rollout_ref.rollout.engine_kwargs), set "
        "actor_rollout_ref.rollout.free_cache_engine=true, or "
    ),
    "optimizer": "set actor_rollout_ref.actor.fsdp_config.optimizer_offload=true, or ",
    "weights": "set actor_rollout_ref.actor.fsdp_config.param_offload=true, or ",
}
"""What to do about the largest amount, by its name."""


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run besides its config."""

    limits: RunLimits = RunLimits()
    """Of its data and model."""
    lengths: Lengths | None = None
    """None for half of the limits."""
    rates: Rates = Rates()
    """What was measured."""


@dataclass(frozen=True)
class PredictedRun:
    config: Config
    plan: Plan
    device: Device
    """What each worker has of it."""
    times: StepTimes
    workers: tuple[WorkerMemory, ...]
    """The memory of all ranks."""
    bars: tuple[Bar, ...]
    """The time line of one step, in the steady state."""
    steps: int | None
    """None if the number of rows is unknown."""
    phases: Mapping[str, float]
    """Seconds of a step by the names under which a run measures them."""

    @property
    def lengths(self) -> Lengths:
        return self.times.lengths

    @property
    def step_seconds(self) -> float:
        return max(bar.end for bar in self.bars)

    @property
    def step_tokens(self) -> float:
        """Prompt and response tokens that a step trains on."""
        return samples_per_step(self.config) * self.lengths.sequence

    @property
    def why_untimed(self) -> str:
        """Why its times cannot be predicted; empty if they can."""
        rollout = self.config.actor_rollout_ref.rollout
        if not self.plan.generates or self.times.rates.source:
            return ""
        if rollout.workflow not in (None, "single_turn"):
            return (
                "the turns of an episode, and the times of its tools and environment, are unknown "
                f"(actor_rollout_ref.rollout.workflow={rollout.workflow})"
            )
        if rollout.url:
            return (
                "the speed of the server is unknown "
                f"(actor_rollout_ref.rollout.url={','.join(rollout.url)})"
            )

        for parts in reward_functions(self.config).values():
            if any(part.name == "judge" for part in parts):
                return "the times of the judge are unknown (reward.functions names judge)"

        return ""

    @property
    def hours(self) -> float | None:
        """None if steps or times are unknown."""
        if self.steps is None or self.why_untimed:
            return None
        return self.steps * self.step_seconds / 3600

    @property
    def cost(self) -> float | None:
        """Money by `cost.gpu_hour`."""
        price = self.config.cost.gpu_hour
        if self.hours is None or price is None:
            return None
        return self.hours * len(self.plan.ranks) * price

    @property
    def fullest(self) -> WorkerMemory:
        return max(self.workers, key=lambda worker: worker.peak)

    @property
    def fits(self) -> bool:
        worst, phase = self._tightest
        return self._lacking(worst, phase) <= 0

    def _lacking(self, worker: WorkerMemory, phase: Phase) -> float:
        """Bytes; not above 0 if all fits."""
        return worker.bytes_in(phase) - worker.usable(phase, self.device.memory)

    @cached_property
    def _tightest(self) -> tuple[WorkerMemory, Phase]:
        """Where most bytes are lacking."""
        places = product(self.workers, PHASES)
        return max(places, key=lambda place: self._lacking(*place))

    def idle(self, ranks: Sequence[int]) -> float:
        """Share of a step in which these ranks wait."""
        works = sum(bar.seconds for bar in self.bars if bar.ranks == tuple(ranks))
        if self.step_seconds:
            return 1 - works / self.step_seconds
        return 0.0

    def excess(self) -> str:
        """Why it does not fit, as a sentence."""
        worst, phase = self._tightest
        item = worst.largest(phase)
        usable = worst.usable(phase, self.device.memory)
        return (
            f"rank {worst.ranks[0]} needs {worst.bytes_in(phase) / 1e9:.1f} GB in the phase "
            f"'{phase}', and each {self.device.name} has {usable / 1e9:.1f} GB to use: most of it "
            f"is {item.what} of the {item.role} ({item.num_bytes / 1e9:.1f} GB)"
        )

    def advice(self) -> str:
        """Keys that need less of what does not fit."""
        worst, phase = self._tightest
        less = _LESS.get(worst.largest(phase).what, "")
        return f"{less}shard the weights (actor_rollout_ref.actor.strategy=fsdp) over more devices"

    def line(self) -> str:
        """The prediction in one line, without what it cannot predict."""
        worst = self.fullest
        where = ""
        if not self.device.is_cpu:
            where = f" on each {self.device.name}"

        text = (
            f"plan: at most {worst.peak / 1e9:.2f} of {self.device.memory / 1e9:.0f} GB of "
            f"memory{where}"
        )
        if worst.peak > self.device.memory / 2:
            most = worst.largest(worst.peak_phase)
            text += f" (mostly {most.what} of the {most.role}, in the phase '{worst.peak_phase}')"

        if self.hours is not None and self.steps is not None:
            text += f", {count_of(self.steps, 'step')} about {duration_text(self.hours * 3600)}"
        if not self.fits:
            text += f": it may not fit; {self.advice()}"
        return text


def predict(
    config: Config,
    pipeline: BoundPipeline,
    shapes: Mapping[str, ModelShape],
    device: Device,
    known: RunFacts = RunFacts(),
    plan: Plan | None = None,
) -> PredictedRun:
    """The prediction of a run on devices of this kind, which need not exist here. shapes: the model
    of each role. plan: of the run; None makes one.

    Raises UserError as planning does, and for a model whose layers cannot be divided as planned.
    """
    if plan is None:
        sizes: dict[str, str | float] = {
            role: shape.parameters for role, shape in shapes.items() if role != "rollout"
        }
        sizes |= config.dag.model_sizes
        plan = plan_devices(pipeline, config, "cpu" if device.is_cpu else "cuda", lambda: sizes)
        _check_divisible(plan, shapes)

    own = share_of_device(config, plan, device)
    lengths = known.lengths or assumed_lengths(config)
    times = StepTimes(config, plan, shapes, own, lengths, known.rates)
    bars = make_time_line(times, pipeline)

    return PredictedRun(
        config,
        plan,
        own,
        times,
        worker_memory(plan, config, shapes, own, known.rates.libraries),
        bars,
        run_steps(config, known.limits),
        _phases(times, pipeline, bars),
    )


def share_of_device(config: Config, plan: Plan, device: Device) -> Device:
    """What each worker has of it."""
    threads = config.trainer.num_threads
    if not is_one_process(config):
        return device.shared(min(config.trainer.n_gpus_per_node, len(plan.ranks)), threads)

    if not threads and is_rl(config) and config.async_.max_staleness > 0:
        # Generation has threads of its own.
        others = config.actor_rollout_ref.rollout.num_threads or device.cores // 2
        threads = max(1, device.cores - others)

    return device.shared(1, threads or device.threads)


def _phases(times: StepTimes, pipeline: BoundPipeline, bars: Sequence[Bar]) -> dict[str, float]:
    """By the names of `timing_s/*`. While generation runs beside training, `rollout` is what
    training waits for it."""
    found: dict[str, float] = {}
    for node in pipeline.training_nodes:
        if node.engines:
            found[node.phase] = found.get(node.phase, 0.0) + times.node(node)

    found |= {"update_weights": times.sync(), "rest": times.rest()}
    step = max((bar.end for bar in bars), default=0.0)
    if times.plan.generates:
        found["rollout"] = max(0.0, step - sum(found.values()))
    return {**found, "step": step}


def _check_divisible(plan: Plan, shapes: Mapping[str, ModelShape]) -> None:
    for layout in plan.layouts:
        shape = shapes[layout.role]
        tensor = layout.sizes.tensor
        parts = {"heads": tensor, "kv_heads": tensor, "intermediate": tensor}
        if layout.role == "rollout":
            del parts["kv_heads"]  # its engine repeats them
        elif shape.experts:
            parts["experts"] = max(tensor, layout.sizes.expert)
            del parts["intermediate"]  # experts are not divided
        elif layout.sizes.expert > 1:
            raise UserError(f"the {layout.role}'s model has no experts to divide ({layout.sizes})")

        for name, number in parts.items():
            size = getattr(shape, name)
            if size % number:
                raise UserError(
                    f"the {layout.role}'s model has {name} = {size}, which its size {number} "
                    f"({layout.sizes}) does not divide"
                )
