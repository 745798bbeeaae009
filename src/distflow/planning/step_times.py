"""Seconds of the parts of a step, by a roofline: work over a share of what the device computes or
moves per second.

The shares are what such work reaches on GPUs: 40 % of the peak in training (Llama 3,
arXiv:2407.21783, reports 38 to 43 %), 60 % of the memory's bandwidth in decoding, 70 % of a link.
The `Rates` of a measured run replace them, and add rewards and the rest of a step, which take no
time without. Validation and checkpoints never do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, inf

from distflow.builtin_names import ROLLOUT_ENGINES
from distflow.config import Config
from distflow.config.derived_settings import (
    is_one_process,
    is_rl,
    is_sharded,
    optimizer_steps_a_step,
)
from distflow.config.keys.distill import teachers_of
from distflow.graph import BoundNode
from distflow.planning.devices import Device
from distflow.planning.lengths import Lengths
from distflow.planning.measured_rates import Rates
from distflow.planning.memory import cached_tokens
from distflow.planning.model_memory import (
    adapter_weights,
    itemsize_of,
    micro_tokens,
    running_responses,
    samples_per_prompt,
    samples_per_step,
    shards_of,
    shares_storage,
    sizes_of,
    steps_under_way,
    trainer_keys,
)
from distflow.planning.model_shapes import ModelShape
from distflow.planning.plan import Plan

COMPUTING = 0.4
"""Share of the peak of matrix products."""
FLOAT32 = 0.07
"""Of a GPU's bfloat16 rate: float32 products run on half of its units at most, without TF32 far
fewer."""
DECODING = 0.6
"""Share of the bandwidth of a device's memory."""
SENDING = 0.7
"""Share of a link's bandwidth."""
HOST_LINK = 25e9
"""Bytes per second between a GPU and its host's memory."""
HOST_COPY = 10e9
"""Bytes per second to Ray's store."""
SHARED_FILES = 4e9
"""Bytes per second to or from files in memory."""
DISK_FILES = 2e9
"""Bytes per second to or from files on an SSD."""
HASHING = 4e9
"""Bytes per second of sent and of received buckets, by SHA-256 on a few cores."""
LAYER_ON_GPU = 8e-6
LAYER_ON_CPU = 60e-6
"""Seconds of a layer in a decode step, however little it computes."""
_SLICES = 16
"""Into which the time of the longest response is cut."""


@dataclass(frozen=True)
class StepTimes:
    config: Config
    plan: Plan
    shapes: Mapping[str, ModelShape]
    """The model of each role."""
    device: Device
    """What each worker has of it."""
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
        slow = self.itemsize == 4 and not self.device.is_cpu
        return self.device.flops * COMPUTING * (FLOAT32 if slow else 1.0)

    @property
    def overlaps(self) -> bool:
        """Whether generation runs beside training: on other devices, or on a CPU by threads of its
        own."""
        if not is_rl(self.config) or self.config.async_.max_staleness == 0:
            return False
        on_threads = self.device.is_cpu and is_one_process(self.config)
        return on_threads or bool(self.plan.generating_only)

    # Generation

    @cached_property
    def cache_slots(self) -> float:
        """Responses of the mean length for which an engine's cache has room."""
        tokens = cached_tokens(self.plan, self.config, self.shapes, self.device)
        if tokens is None:
            return inf
        return max(1.0, tokens / self.lengths.sequence)

    def generate(self) -> float:
        """The responses of a step on all engines: prompts, then decoding at full concurrency, then
        ever fewer. The responses of all steps that may be under way run together, so with
        staleness these steps share the time in which only the longest responses are left."""
        steps = steps_under_way(self.config)
        engines = sizes_of(self.plan, "rollout").data
        responses = ceil(steps * self.samples / engines)
        running = min(running_responses(self.config, engines), responses, self.cache_slots)
        lengths = self.lengths
        prompts = ceil(steps * self.config.data.train_batch_size / engines)
        seconds = self.prefill(prompts * lengths.prompt)
        full = max(0.0, (responses - running) * lengths.response / running)
        seconds += full * self.decode_step(running, lengths.sequence)
        width = lengths.end / _SLICES

        for place in range(_SLICES):
            position = (place + 0.5) * width
            active = max(1.0, running * lengths.running(position))
            seconds += width * self.decode_step(active, lengths.prompt + position)

        return seconds / steps

    def prefill(self, tokens: float) -> float:
        """Of so many tokens of prompts on one engine."""
        prompt = self.lengths.prompt
        computed = self.shapes["rollout"].forward_flops(tokens, prompt / 2, tokens / prompt)
        tensor = sizes_of(self.plan, "rollout").tensor
        return self.rates.generate * computed / (self.flops * tensor)

    def decode_step(self, active: float, context: float) -> float:
        """One token for each active response of an engine."""
        shape = self.shapes["rollout"]
        tensor = sizes_of(self.plan, "rollout").tensor

        read: float = shape.layers * shape.layer_weights + shape.head_weights
        if shape.experts:
            touched = min(1.0, active * shape.active_experts / shape.experts)
            read -= shape.layers * shape.expert_weights * shape.experts * (1 - touched)

        read += active * context * shape.kv_elements
        moved = self.itemsize * read / (self.device.bandwidth * DECODING)
        computed = shape.forward_flops(active, context, active) / self.flops
        fixed = shape.layers * (LAYER_ON_CPU if self.device.is_cpu else LAYER_ON_GPU)

        seconds = max(moved, computed) / tensor + fixed
        if tensor > 1:
            reduced = 2 * shape.layers * active * shape.hidden * self.itemsize
            seconds += reduced / self._link("rollout", tensor)

        return self.rates.generate * seconds

    def rewards(self) -> float:
        """What scoring adds to a step: after the last token, or if it runs beside training, where
        it is the slowest."""
        groups = self.config.data.train_batch_size
        workers = self.config.reward.num_workers
        if not self.rates.score:
            return 0.0

        calls = ceil(samples_per_prompt(self.config) / workers)  # of a group, one after another
        score = min(self.rates.score, self.config.reward.timeout_s * calls)
        if self.overlaps:
            return max(0.0, groups * score / workers - self.generate())

        ends_before = 1 - self.lengths.running(self.lengths.end - 1)
        late = 1 - ends_before ** samples_per_prompt(self.config)
        return replace(self.rates, score=score).rewards(groups, workers, late)

    # Training

    def rest(self) -> float:
        """Of a step, outside of its other parts."""
        return self.rates.rest * self.samples / sizes_of(self.plan, "actor").data

    def node(self, node: BoundNode) -> float:
        """A node of the training loop: of its engines; the rest takes no time here."""
        return sum(self.engine(role, node.phase.startswith("train")) for role in node.engines)

    def engine(self, role: str, updates: bool) -> float:
        """A pass of a role over the samples of a step; updates: forward and backward, with the
        optimizer's steps."""
        if not updates:
            return self.rates.forward * self._passes(role, updates)
        return self.rates.update * (self._passes(role, updates) + self._optimizer(role))

    def _passes(self, role: str, updates: bool) -> float:
        """Computing, or where it is slower, the sharded weights that it waits for."""
        shape = self.shapes[role]
        sizes = sizes_of(self.plan, role)
        settings = self.config.actor_rollout_ref

        samples = self.samples
        times = 1
        if updates:
            times = 3
            if settings.model.enable_gradient_checkpointing:
                times = 4
            if is_rl(self.config) or role == "critic":
                samples *= trainer_keys(self.config, role).ppo_epochs

        tokens = samples * self.lengths.sequence
        logits = 0.0
        if role in ("actor", "ref", *teachers_of(self.config.distill)):
            logits = samples * self.lengths.response

        flops = times * shape.forward_flops(tokens, self.lengths.sequence / 2, logits)
        seconds = flops / (self.flops * sizes.num_devices)
        if is_sharded(self.config) and shards_of(self.plan, self.config, role) > 1:
            fullest = micro_tokens(self.config, role, sizes, self.device.kind)
            micro_batches = ceil(tokens / sizes.tokens / fullest)
            # Gathered weights and scattered float32 gradients overlap with computing.
            a_weight = 2 * self.itemsize + 4 if updates else self.itemsize
            others = (shape.parameters - shape.layers * shape.layer_weights) / sizes.tensor
            gathered = shape.layers * shape.computed_weights(sizes.tensor, sizes.expert) + others
            sent = micro_batches * a_weight * gathered
            seconds = max(seconds, sent / self._link(role))

        passes = 2 if updates else 1
        states = shape.layers * tokens * shape.hidden * self.itemsize * passes
        if sizes.tensor > 1:
            seconds += 4 * states / sizes.tokens / self._link(role, sizes.tensor)
        if sizes.context > 1:  # keys and values of whole rows, and their gradients
            gathered = passes * tokens * shape.kv_elements * self.itemsize / sizes.tensor
            neighbours = sizes.context * sizes.tensor
            seconds += gathered / sizes.data / self._link(role, neighbours)
        if shape.experts and sizes.expert > 1:  # to the experts of a token and back
            share = (1 - 1 / sizes.expert) / sizes.num_devices
            seconds += 2 * states * shape.active_experts * share / self._link(role, sizes.expert)

        return seconds

    def _optimizer(self, role: str) -> float:
        """All optimizer steps of a step: weights, gradients and moments are read, all but gradients
        written."""
        shape = self.shapes[role]
        sizes = sizes_of(self.plan, role)
        settings = trainer_keys(self.config, role)
        lora_rank = self.config.actor_rollout_ref.model.lora_rank

        trained = float(shape.parameters)
        if lora_rank and role == "actor":
            trained = adapter_weights(shape, lora_rank)

        parts = shards_of(self.plan, self.config, role)
        seconds = 28 * trained / parts / (self.device.bandwidth * DECODING)
        if settings.fsdp_config.optimizer_offload and not self.device.is_cpu:
            seconds += 16 * trained / parts / HOST_LINK
        if sizes.data > 1 and parts == sizes.tensor:  # whole weights: gradients are summed once
            seconds += 8 * trained / self._link(role)

        steps = optimizer_steps_a_step(self.config, "critic" if role == "critic" else "actor")

        return seconds * steps

    def _link(self, role: str, neighbours: int | None = None) -> float:
        """Bytes per second between the ranks of a role, or between so many neighbours; over the
        network if they span machines."""
        layout = self.plan.layout(role)
        if layout is None:
            return SENDING * self.device.link

        ranks = layout.ranks[:neighbours]
        return SENDING * (self.device.network if self._spans(ranks) else self.device.link)

    def _spans(self, ranks: tuple[int, ...]) -> bool:
        """Whether they are on several machines."""
        return len({self.plan.ranks[rank].node for rank in ranks}) > 1

    # Weight sync

    @property
    def sync_bytes(self) -> float:
        """Of one weight sync, to all engines."""
        if not self.plan.generates or "actor" not in self.shapes:
            return 0.0

        here = not self.plan.generating_only
        if here and shares_storage(self.config, self.config.actor_rollout_ref.model.dtype):
            return 0.0
        engines = sizes_of(self.plan, "rollout").data

        return self.shapes["rollout"].parameters * self.itemsize * engines

    def sync(self) -> float:
        """Until all engines have the weights, which they receive at the same time. Buckets are sent
        while earlier ones are received, except to a server, which reads files that are complete."""
        if not self.sync_bytes:
            return 0.0

        weights = self.shapes["rollout"].parameters
        moved = weights * self.itemsize
        seconds = moved * self._carried_byte()
        parts = shards_of(self.plan, self.config, "actor")
        if parts > 1:
            seconds += moved / self._link("actor")
        fsdp = self.config.actor_rollout_ref.actor.fsdp_config
        if (fsdp.param_offload or fsdp.offload_policy) and not self.device.is_cpu:
            seconds += 4 * weights / parts / HOST_LINK
        return self.rates.sync * seconds

    def _carried_byte(self) -> float:
        """Seconds that one byte takes from the trainer to the engines."""
        settings = self.config.actor_rollout_ref
        in_server = ROLLOUT_ENGINES[settings.rollout.name].in_server
        to_host = 0.0 if self.device.is_cpu else 1 / HOST_LINK
        served = 2 / SHARED_FILES + to_host if in_server else 0.0

        if not self.plan.generating_only:
            if in_server:
                return to_host + served
            # float32 is read, a copy written
            return (1 + 4 / self.itemsize) / (self.device.bandwidth * DECODING)

        network = 0.0
        if self._spans(tuple(range(len(self.plan.ranks)))):
            network = 1 / (SENDING * self.device.network)
        mode = settings.actor.weight_update_mode
        if mode == "collective":
            return max(network or 1 / (SENDING * self.device.link), served)

        stored = 1 / (DISK_FILES if mode == "disk" else HOST_COPY)
        sent = to_host + 1 / HASHING + stored
        return max(sent, stored + network + 1 / HASHING + (served or to_host))
