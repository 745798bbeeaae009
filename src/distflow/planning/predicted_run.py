"""What a run will need and how long it will take, from its plan: memory against the device's, a
time line of one step, and the whole run.

Times are those of a roofline: work over a share of what the device computes or moves per second.
The shares are what such work reaches on GPUs: 40 % of the peak in training (Llama 3,
arXiv:2407.21783, reports 38 to 43 %), 60 % of the memory's bandwidth in decoding, 70 % of a link.
The `Rates` of a measured run replace them, and add rewards and the rest of a step, which take no
time without. Validation and checkpoints never do.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import ceil, exp, inf, isfinite
from pathlib import Path
from random import Random
from statistics import NormalDist, fmean

from distflow.builtin_names import ROLLOUT_ENGINES
from distflow.config import Config
from distflow.config.derived_settings import (
    RunLimits,
    is_one_process,
    is_rl,
    is_sharded,
    optimizer_steps_a_step,
    reward_functions,
    run_steps,
)
from distflow.errors import UserError, count_of, duration_text
from distflow.graph import BoundNode, BoundPipeline
from distflow.graph.contract_from_signature import canonical
from distflow.graph.fields import TOKEN_AXES, Axis, Field
from distflow.planning.assign_nodes_to_ranks import plan_devices
from distflow.planning.known_models_and_devices import Device, ModelShape
from distflow.planning.measured_rates import Rates
from distflow.planning.memory import (
    PHASES,
    Phase,
    WorkerMemory,
    adapter_weights,
    cached_tokens,
    itemsize_of,
    micro_tokens,
    running_responses,
    samples_per_prompt,
    samples_per_step,
    shards_of,
    shares_storage,
    sizes_of,
    worker_memory,
)
from distflow.planning.plan_of_ranks_and_layouts import Channel, Plan, dp_groups_of

COMPUTING = 0.4
DECODING = 0.6
SENDING = 0.7
"""Shares of the peak."""
_HOST_LINK = 25e9  # bytes per second between a GPU and its host's memory
# to Ray's store; to or from files in memory, and on an SSD
_HOST_COPY = 10e9
_SHARED_FILES = 4e9
_FILES = 2e9
_HASHING = 4e9  # of sent and of received buckets by SHA-256, on a few cores
# a layer's fixed time in a decode step, on a GPU and on a CPU
_LAUNCH_S = {False: 8e-6, True: 60e-6}
_SLICES = 16
_QUANTILES = 1000
_TEXT_BYTES = 4  # per token of a text
SYNC = "weight sync"
REWARDS = "rewards"
REST = "the rest of the step"
_ITEMSIZE = {"int64": 8, "float64": 8, "float32": 4, "bool": 1}


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of a prompt and of a response, and the most of a response. Responses spread
    evenly from 0 to twice the mean; if that is above `longest`, the share that the mean implies is
    cut there. values: responses of equal shares, ascending, instead; `response` is their mean."""

    prompt: float
    response: float
    longest: int
    values: tuple[float, ...] = ()

    @staticmethod
    def of(
        config: Config,
        prompt: float | None = None,
        response: float | None = None,
        spread: str | None = None,
    ) -> "Lengths":
        """Unless given, half of the limits. spread: see `length_values`. Raises UserError for
        lengths that no prompt or response can have."""
        limits = config.data.max_prompt_length, config.data.max_response_length
        for name, given, limit in zip(
            ("prompt", "response"), (prompt, response), limits, strict=True
        ):
            if given is not None and not 0 < given <= limit:
                raise UserError(
                    f"--{name}-tokens={given:g}: the mean must be above 0 and at most "
                    f"data.max_{name}_length={limit}"
                )
        mean = response or max(1.0, limits[1] / 2)
        values = length_values(spread, mean, limits[1]) if spread is not None else ()
        return Lengths(
            prompt or max(1.0, limits[0] / 2), fmean(values) if values else mean, limits[1], values
        )

    @property
    def sequence(self) -> float:
        return self.prompt + self.response

    @property
    def end(self) -> float:
        """Of the longest response of a batch."""
        return self.values[-1] if self.values else min(2 * self.response, self.longest)

    def running(self, position: float) -> float:
        """Share of the responses that have more tokens."""
        if self.values:
            return 1 - bisect_right(self.values, position) / len(self.values)
        cut = max(0.0, 2 * self.response / self.longest - 1)
        return 0.0 if position >= self.end else cut + (1 - cut) * (1 - position / self.end)

    def draw(self, random: Random) -> float:
        """The tokens of a response."""
        if self.values:
            return random.choice(self.values)
        return (
            self.longest
            if random.random() < self.running(self.end - 1e-9)
            else self.end * random.random()
        )


def length_values(text: str, mean: float, limit: int) -> tuple[float, ...]:
    """Responses of equal shares, ascending: of `lognormal:SIGMA` with this mean before it is cut at
    the limit, of `TOKENS:SHARE,...`, or of a file with one number on each line. Raises UserError
    for lengths that cannot be."""
    name, _, sigma = text.partition(":")
    try:
        if name == "lognormal":
            width = float(sigma)
            normal = NormalDist()
            places = (normal.inv_cdf((i + 0.5) / _QUANTILES) for i in range(_QUANTILES))
            weighted = [
                (min(limit, mean * exp(width * z - width**2 / 2)), float(width >= 0))
                for z in places
            ]
        elif ":" in text:
            weighted = [
                (float(part.split(":")[0]), float(part.split(":")[1])) for part in text.split(",")
            ]
        else:
            weighted = [
                (float(line), 1.0) for line in Path(text).expanduser().read_text("utf-8").split()
            ]
    except (ValueError, IndexError, OverflowError):
        raise UserError(
            f"--lengths={text}: write lognormal:SIGMA, TOKENS:SHARE,..., or a file of numbers"
        ) from None
    except OSError as error:
        raise UserError(f"--lengths={text}: the file cannot be read: {error.strerror}") from error
    total = sum(share for _, share in weighted)
    if not all(isfinite(share) and share >= 0 for _, share in weighted) or not total > 0:
        raise UserError(
            f"--lengths={text}: the shares must not be negative, and their sum must be above 0"
        )
    if not all(0 < value <= limit for value, _ in weighted):
        raise UserError(
            f"--lengths={text}: lengths must be above 0 and at most "
            f"data.max_response_length={limit}"
        )
    weighted.sort()
    ends = list(accumulate(share / total for _, share in weighted))
    chosen = (
        min(bisect_right(ends, (i + 0.5) / _QUANTILES), len(ends) - 1) for i in range(_QUANTILES)
    )
    return tuple(weighted[place][0] for place in chosen)


@dataclass(frozen=True)
class Bar:
    """Work or a wait of some ranks, in seconds since the step began. why: what a wait waits for."""

    ranks: tuple[int, ...]
    what: str
    start: float
    end: float
    why: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class PredictedRun:
    """bars: of one step, in the steady state. channel_bytes: of a step, in the order of the plan's
    channels. steps: None if the number of rows is unknown. workers: the memory of each rank.
    phases: seconds of a step by the names under which a run measures them. bytes and seconds
    throughout."""

    config: Config
    plan: Plan
    device: Device
    lengths: Lengths
    times: "StepTimes"
    workers: tuple[WorkerMemory, ...]
    bars: tuple[Bar, ...]
    channel_bytes: tuple[float, ...]
    sync_bytes: float
    steps: int | None
    phases: Mapping[str, float]

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
        parts = [part.name for parts in reward_functions(self.config).values() for part in parts]
        return (
            "the times of the judge are unknown (reward.functions names judge)"
            if "judge" in parts
            else ""
        )

    @property
    def hours(self) -> float | None:
        """None if steps or times are unknown."""
        return (
            None
            if self.steps is None or self.why_untimed
            else self.steps * self.step_seconds / 3600
        )

    @property
    def cost(self) -> float | None:
        """Money by `cost.gpu_hour`."""
        price = self.config.cost.gpu_hour
        return (
            None
            if self.hours is None or price is None
            else self.hours * len(self.plan.ranks) * price
        )

    @property
    def fullest(self) -> WorkerMemory:
        return max(self.workers, key=lambda worker: worker.peak)

    @property
    def fits(self) -> bool:
        return self._tightest[0] <= 0

    @property
    def _tightest(self) -> tuple[float, WorkerMemory, Phase]:
        """The bytes that are lacking (not above 0 if all fits), on which worker, in which phase."""
        memory = self.device.memory
        found = (
            (w.bytes_in(phase) - w.usable(phase, memory), w, phase)
            for w in self.workers
            for phase in PHASES
        )
        return max(found, key=lambda each: each[0])

    @property
    def shares_devices(self) -> bool:
        """Whether every rank that generates also trains, one after the other."""
        generating = (rank for rank in self.plan.ranks if "rollout" in rank.engines)
        return all(rank.training_nodes for rank in generating) and not self.times.overlaps

    def idle(self, ranks: Sequence[int]) -> float:
        """Share of a step in which these ranks wait."""
        waits = sum(bar.seconds for bar in self.bars if bar.ranks == tuple(ranks) and bar.why)
        return waits / self.step_seconds if self.step_seconds else 0.0

    def excess(self) -> str:
        """Why it does not fit, as a sentence."""
        _, worst, phase = self._tightest
        item = worst.largest(phase)
        usable = worst.usable(phase, self.device.memory)
        server = ", which its server takes when it starts" if item.in_server else ""
        return (
            f"rank {worst.ranks[0]} needs {worst.bytes_in(phase) / 1e9:.1f} GB in the phase "
            f"'{phase}', and each "
            f"{self.device.name} has {usable / 1e9:.1f} GB to use: most of it is "
            f"{item.what} of the {item.role} ({item.num_bytes / 1e9:.1f} GB{server})"
        )

    def line(self) -> str:
        """The prediction in one line, without what it cannot predict."""
        worst = self.fullest
        where = "" if self.device.is_cpu else f" on each {self.device.name}"
        text = (
            f"plan: at most {worst.peak / 1e9:.2f} of {self.device.memory / 1e9:.0f} GB of "
            f"memory{where}"
        )
        if worst.peak > self.device.memory / 2:
            largest = worst.largest(worst.peak_phase)
            text += (
                f" (mostly {largest.what} of the {largest.role}, in the phase '{worst.peak_phase}')"
            )
        if self.hours is not None and self.steps is not None:
            text += f", {count_of(self.steps, 'step')} about {duration_text(self.hours * 3600)}"
        return (
            text
            if self.fits
            else f"{text}: it may not fit, and `distflow plan` names a change that does"
        )


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run: of its data, of its lengths (None for half of the limits), and by
    measurement."""

    limits: RunLimits = RunLimits()
    lengths: Lengths | None = None
    rates: Rates = Rates()


def predict(
    config: Config,
    pipeline: BoundPipeline,
    shapes: Mapping[str, ModelShape],
    device: Device,
    given: RunFacts = RunFacts(),
    plan: Plan | None = None,
) -> PredictedRun:
    """The prediction of a run on devices of this kind, which need not exist here. shapes: the model
    of each role. plan: of the run; None makes one.

    Raises UserError as planning does, and for a model whose layers cannot be divided as planned.
    """
    if plan is None:
        counted = {role: shape.parameters for role, shape in shapes.items() if role != "rollout"}
        sizes = {**counted, **config.dag.model_sizes}
        plan = plan_devices(pipeline, config, "cpu" if device.is_cpu else "cuda", lambda: sizes)
        _check_divisible(plan, shapes)
    lengths = given.lengths or Lengths.of(config)
    own = share_of_device(config, plan, device)
    times = StepTimes(config, plan, shapes, own, lengths, given.rates)
    bars = _bars(times, pipeline)
    return PredictedRun(
        config,
        plan,
        own,
        lengths,
        times,
        worker_memory(plan, config, shapes, own, given.rates.libraries),
        tuple(bars),
        tuple(_channel_bytes(channel, pipeline, config, lengths) for channel in plan.channels),
        times.sync_bytes,
        run_steps(config, given.limits),
        _phases(times, pipeline, bars),
    )


def share_of_device(config: Config, plan: Plan, device: Device) -> Device:
    """What each worker has of it."""
    on_machine = 1 if is_one_process(config) else config.trainer.n_gpus_per_node
    threads = config.trainer.num_threads
    # generation has its own threads
    if is_rl(config) and is_one_process(config) and config.async_.max_staleness > 0:
        rollout = config.actor_rollout_ref.rollout.num_threads or device.cores // 2
        threads = threads or max(1, device.cores - rollout)
    elif is_one_process(config):
        threads = threads or device.threads
    return device.shared(min(on_machine, len(plan.ranks)), threads)


def _phases(times: "StepTimes", pipeline: BoundPipeline, bars: Sequence[Bar]) -> dict[str, float]:
    """By the names of `timing_s/*`. While generation runs beside training, `rollout` is what
    training waits for it."""
    found: dict[str, float] = {}
    for node in (node for node in pipeline.training_nodes if node.engines):
        found[node.phase] = found.get(node.phase, 0.0) + times.node(node)
    step = max((bar.end for bar in bars), default=0.0)
    found |= {"update_weights": times.sync(), "rest": times.rest()}
    generates = {"rollout": max(0.0, step - sum(found.values()))} if times.plan.generates else {}
    return {**generates, **found, "step": step}


def _check_divisible(plan: Plan, shapes: Mapping[str, ModelShape]) -> None:
    for layout in plan.layouts:
        shape = shapes[layout.role]
        parts = layout.sizes.tensor
        for name in ("heads", "kv_heads", "intermediate"):
            if (size := getattr(shape, name)) % parts and not (
                layout.role == "rollout" and name == "kv_heads"
            ):
                raise UserError(
                    f"the {layout.role}'s model has {name} = {size}, which its tensor size {parts} "
                    "does not divide"
                )


def _channel_bytes(
    channel: Channel, pipeline: BoundPipeline, config: Config, lengths: Lengths
) -> float:
    """Of a step: the columns that the source writes and the target reads."""
    source = pipeline.node(channel.source).contract
    target = pipeline.node(channel.target).contract
    wanted = {canonical(name) for name in (*target.reads, *target.optional)}
    columns = [pipeline.fields[name] for name in map(canonical, source.writes) if name in wanted]
    return samples_per_step(config) * sum(_column_bytes(column, lengths) for column in columns)


def _column_bytes(column: Field, lengths: Lengths) -> float:
    """Of one sample. Python values are texts of the response."""
    tokens = {
        Axis.PROMPT: lengths.prompt,
        Axis.RESPONSE: lengths.response,
        Axis.SEQUENCE: lengths.sequence,
    }
    count = tokens[column.axis] if column.axis in TOKEN_AXES else 1.0
    return (
        count * _ITEMSIZE.get(column.dtype, 4)
        if column.dtype != "object"
        else lengths.response * _TEXT_BYTES
    )


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the parts of a step."""

    config: Config
    plan: Plan
    shapes: Mapping[str, ModelShape]
    device: Device
    lengths: Lengths
    rates: Rates = Rates()

    @cached_property
    def samples(self) -> int:
        return samples_per_step(self.config)

    @cached_property
    def itemsize(self) -> int:
        return itemsize_of(self.config)

    @property
    def flops(self) -> float:
        """Per second; float32 products of a GPU run on half of its bfloat16 units at most, without
        TF32 far fewer."""
        return (
            self.device.flops
            * COMPUTING
            * (0.07 if self.itemsize == 4 and not self.device.is_cpu else 1.0)
        )

    @property
    def overlaps(self) -> bool:
        """Whether generation runs beside training: on other devices, or on a CPU by threads of its
        own."""
        beside = self._generates_elsewhere or (self.device.is_cpu and is_one_process(self.config))
        return is_rl(self.config) and self.config.async_.max_staleness > 0 and beside

    def rewards(self) -> float:
        """What scoring adds to a step: after the last token, or if it runs beside training, where
        it is the slowest."""
        groups = self.config.data.train_batch_size
        workers = self.config.reward.num_workers
        if self.overlaps:
            return max(0.0, groups * self.rates.score / workers - self.generate())
        ends_before = 1 - self.lengths.running(self.lengths.end - 1)
        return self.rates.rewards(
            groups, workers, 1 - ends_before ** samples_per_prompt(self.config)
        )

    def rest(self) -> float:
        """Of a step, outside of its other parts."""
        return self.rates.rest * self.samples / sizes_of(self.plan, "actor").data

    @cached_property
    def cache_slots(self) -> float:
        """Responses of the mean length for which an engine's cache has room."""
        tokens = cached_tokens(self.plan, self.config, self.shapes, self.device)
        return inf if tokens is None else max(1.0, tokens / self.lengths.sequence)

    def generate(self) -> float:
        """A batch of responses on all engines: prompts, then decoding at full concurrency, then
        ever fewer."""
        own = sizes_of(self.plan, "rollout")
        per_engine = ceil(self.samples / own.data)
        running = min(running_responses(self.config, own.data), per_engine, self.cache_slots)
        prompts = ceil(self.config.data.train_batch_size / own.data) * self.lengths.prompt
        full = max(0.0, (per_engine - running) * self.lengths.response / running)
        seconds = self.prefill(prompts) + full * self.decode_step(running, self.lengths.sequence)
        width = self.lengths.end / _SLICES
        for place in range(_SLICES):
            position = (place + 0.5) * width
            active = max(1.0, running * self.lengths.running(position))
            seconds += width * self.decode_step(active, self.lengths.prompt + position)
        return seconds

    def prefill(self, tokens: float) -> float:
        """Of so many tokens of prompts on one engine."""
        shape = self.shapes["rollout"]
        prompt = self.lengths.prompt
        computed = shape.forward_flops(tokens, prompt / 2, tokens / prompt)
        return self.rates.generate * computed / (self.flops * sizes_of(self.plan, "rollout").tensor)

    def decode_step(self, active: float, context: float) -> float:
        """One token for each active response of an engine."""
        shape = self.shapes["rollout"]
        tensor = sizes_of(self.plan, "rollout").tensor
        touched = min(1.0, active * shape.active_experts / shape.experts) if shape.experts else 1.0
        experts = shape.expert_weights * max(shape.experts, 1) * touched
        weights = shape.layers * (shape.attention_weights + experts) + shape.head_weights
        moved = (
            self.itemsize
            * (weights + active * context * shape.kv_elements)
            / (self.device.bandwidth * DECODING)
        )
        computed = shape.forward_flops(active, context, active) / self.flops
        reduced = (
            2
            * shape.layers
            * active
            * shape.hidden
            * self.itemsize
            / self._link(tensor > 1, "rollout")
        )
        seconds = (
            max(moved, computed) / tensor
            + (tensor > 1) * reduced
            + shape.layers * _LAUNCH_S[self.device.is_cpu]
        )
        return self.rates.generate * seconds

    def node(self, node: BoundNode) -> float:
        """A node of the training loop: of its engines; the rest takes no time here."""
        return sum(self.engine(role, node.phase.startswith("train")) for role in node.engines)

    def engine(self, role: str, updates: bool) -> float:
        """A pass of a role over the samples of a step; updates: forward and backward, with the
        optimizer's steps."""
        seconds = self._engine(role, updates) + (self._optimizer(role) if updates else 0.0)
        return seconds * (self.rates.update if updates else self.rates.forward)

    def _engine(self, role: str, updates: bool) -> float:
        shape = self.shapes[role]
        sizes = sizes_of(self.plan, role)
        own = self.config.critic if role == "critic" else self.config.actor_rollout_ref.actor
        passes = own.ppo_epochs if updates and (is_rl(self.config) or role == "critic") else 1
        checkpointed = self.config.actor_rollout_ref.model.enable_gradient_checkpointing
        tokens = self.samples * self.lengths.sequence * passes
        times = (4 if checkpointed else 3) if updates else 1
        logits = self.samples * self.lengths.response * passes if role in ("actor", "ref") else 0
        flops = times * shape.forward_flops(tokens, self.lengths.sequence / 2, logits)
        computed = flops / (self.flops * sizes.num_devices)
        micros = ceil(
            tokens / sizes.data / micro_tokens(self.config, role, sizes.data, self.device.is_cpu)
        )
        sent = self._sharding_bytes(role, updates) * micros / self._link(sizes.data > 1, role)
        reduced = (
            4 * shape.layers * tokens / sizes.data * shape.hidden * self.itemsize * (1 + updates)
        )
        return max(computed, sent) + (sizes.tensor > 1) * reduced / self._link(True, role, "tensor")

    def _sharding_bytes(self, role: str, updates: bool) -> float:
        """Gathered weights and scattered gradients of a micro-batch, which overlap with
        computing."""
        if not is_sharded(self.config) or shards_of(self.plan, self.config, role) == 1:
            return 0.0
        weights = self.shapes[role].parameters / sizes_of(self.plan, role).tensor
        return weights * (self.itemsize * (1 + updates) + 4 * updates)

    def _optimizer(self, role: str) -> float:
        """All optimizer steps of a step: weights, gradients and moments are read, all but gradients
        written."""
        shape = self.shapes[role]
        sizes = sizes_of(self.plan, role)
        trained = float(shape.parameters)
        parts = shards_of(self.plan, self.config, role)
        settings = self.config.actor_rollout_ref
        if settings.model.lora_rank and role == "actor":
            trained = adapter_weights(shape, settings.model.lora_rank)
        own = self.config.critic if role == "critic" else settings.actor
        seconds = 28 * trained / parts / (self.device.bandwidth * DECODING)
        if own.fsdp_config.optimizer_offload and not self.device.is_cpu:
            seconds += 16 * trained / parts / _HOST_LINK
        # whole weights on each: gradients are summed once
        if sizes.data > 1 and parts == sizes.tensor:
            seconds += 8 * trained / self._link(True, role)
        return seconds * optimizer_steps_a_step(
            self.config, "critic" if role == "critic" else "actor"
        )

    def _link(self, is_used: bool, role: str, axis: str = "data") -> float:
        """Bytes per second between the ranks of a role along an axis; over the network if they span
        machines."""
        layout = self.plan.layout(role)
        ranks = layout.ranks if layout is not None and is_used else ()
        if layout is not None and axis == "tensor":
            ranks = layout.ranks[: layout.sizes.tensor]
        machines = {self.plan.ranks[rank].node for rank in ranks}
        return SENDING * (self.device.network if len(machines) > 1 else self.device.link)

    @property
    def sync_bytes(self) -> float:
        """Of one weight sync, to all engines."""
        if not self.plan.generates or "actor" not in self.shapes:
            return 0.0
        if not self._generates_elsewhere and shares_storage(
            self.config, self.config.actor_rollout_ref.model.dtype
        ):
            return 0.0
        engines = sizes_of(self.plan, "rollout").data
        return self.shapes["rollout"].parameters * self.itemsize * engines

    @property
    def _generates_elsewhere(self) -> bool:
        return any(
            "rollout" in rank.engines and not rank.training_nodes for rank in self.plan.ranks
        )

    def sync(self) -> float:
        """Until all engines have the weights, which they receive at the same time. Buckets are sent
        while earlier ones are received, except to a server, which reads files that are complete."""
        if not self.sync_bytes:
            return 0.0
        moved = self.shapes["rollout"].parameters * self.itemsize
        seconds = 0.0
        if shards_of(self.plan, self.config, "actor") > 1:
            seconds += moved / self._link(True, "actor")
        fsdp = self.config.actor_rollout_ref.actor.fsdp_config
        if (fsdp.param_offload or fsdp.offload_policy) and not self.device.is_cpu:
            parts = shards_of(self.plan, self.config, "actor")
            seconds += 4 * self.shapes["rollout"].parameters / parts / _HOST_LINK
        return self.rates.sync * (seconds + moved * self._carried_byte())

    def _carried_byte(self) -> float:
        """Seconds that one byte takes from the trainer to the engines."""
        settings = self.config.actor_rollout_ref
        mode = self.config.actor_rollout_ref.actor.weight_update_mode
        to_host = 0.0 if self.device.is_cpu else 1 / _HOST_LINK
        network = 1 / (SENDING * self.device.network) if self._syncs_over_network else 0.0
        served = 2 / _SHARED_FILES + to_host
        if not self._generates_elsewhere:
            if ROLLOUT_ENGINES[settings.rollout.name].in_server:
                return to_host + served
            # float32 is read, a copy written
            return (1 + 4 / self.itemsize) / (self.device.bandwidth * DECODING)
        received = served if ROLLOUT_ENGINES[settings.rollout.name].in_server else 0.0
        if mode == "collective":
            return max(network or 1 / (SENDING * self.device.link), received)
        stored = 1 / (_FILES if mode == "disk" else _HOST_COPY)
        sent = to_host + 1 / _HASHING + stored
        return max(sent, stored + network + 1 / _HASHING + (received or to_host))

    @property
    def _syncs_over_network(self) -> bool:
        return len({rank.node for rank in self.plan.ranks}) > 1


def _bars(times: StepTimes, pipeline: BoundPipeline) -> list[Bar]:
    """A step in the steady state. Nodes begin when those before them are done and their ranks are
    free; ranks that only generate work on the next step meanwhile, if samples may be stale."""
    plan = times.plan
    training = dp_groups_of(plan)
    apart = tuple(
        rank.rank for rank in plan.ranks if "rollout" in rank.engines and not rank.training_nodes
    )
    where = apart or next(
        (g for g in training if plan.generates and "rollout" in plan.ranks[g[0]].engines), ()
    )
    bars = [] if not where else [Bar(where, "generate", 0.0, times.generate())]
    if where and (scoring := times.rewards()):
        bars.append(Bar(where, REWARDS, bars[0].end, bars[0].end + scoring))
    generating = bars[-1].end if bars else 0.0
    start = 0.0 if times.overlaps else generating
    free = dict.fromkeys(training, start)
    ends: dict[str, float] = {}
    for node in (node for node in pipeline.training_nodes if node.engines):
        ready = max(
            (ends[dep] for dep in _before(node.node_id, pipeline) if dep in ends), default=start
        )
        for group in (
            group for group in training if node.node_id in plan.ranks[group[0]].training_nodes
        ):
            begin = max(ready, free[group])
            free[group] = begin + times.node(node)
            bars.append(Bar(group, node.node_id, begin, free[group]))
            ends[node.node_id] = max(ends.get(node.node_id, 0.0), free[group])
    for group in free if times.rest() else ():
        bars.append(Bar(group, REST, free[group], free[group] + times.rest()))
        free[group] += times.rest()
    begin = max([generating, *free.values()])
    sync = times.sync()
    for ranks in dict.fromkeys((*training[:1], where)) if sync else ():
        bars.append(Bar(ranks, SYNC, begin, begin + sync))
    return _with_waits(bars, [*training, *([apart] if apart else [])], times.overlaps)


def _before(node_id: str, pipeline: BoundPipeline) -> set[str]:
    """All nodes that it depends on."""
    found: set[str] = set()
    left = [node_id]
    while left:
        new = set(pipeline.node(left.pop()).deps) - found
        found |= new
        left += new
    return found


def _with_waits(bars: list[Bar], lanes: Sequence[tuple[int, ...]], overlaps: bool) -> list[Bar]:
    """The bars, with those of what each lane waits for."""
    end = max((bar.end for bar in bars), default=0.0)
    waits = list[Bar]()
    for lane in lanes:
        at = 0.0
        for bar in [
            *sorted((b for b in bars if b.ranks == lane), key=lambda b: b.start),
            Bar(lane, "", end, end),
        ]:
            if bar.start > at + 1e-9:
                others = [
                    other
                    for other in bars
                    if other.ranks != lane and other.start < bar.start and other.end > at
                ]
                longest = max(
                    others, key=lambda o: min(o.end, bar.start) - max(o.start, at), default=None
                )
                cause = (
                    "the next step"
                    if longest is None
                    else f"{longest.what} on rank {longest.ranks[0]}"
                )
                if overlaps and longest is not None and longest.what == "generate":
                    cause = "groups: generation is slower than training"
                waits.append(Bar(lane, "wait", at, bar.start, cause))
            at = max(at, bar.end)
    return sorted([*bars, *waits], key=lambda bar: (bar.start, bar.ranks))
