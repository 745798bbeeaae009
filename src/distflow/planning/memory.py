"""The memory that each worker of a plan needs, by role, purpose and phase of a step.

Trained weights are float32 with float32 gradients and moments, whatever the models compute in.
Activations are those of the fullest micro-batch. KV cache is that of as many responses as run at
once, all of the greatest length; on a GPU, what the embedded engine or a server takes in advance,
whatever it needs.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from distflow.config import Config
from distflow.config.derived_settings import frozen_models, is_own_reference, is_sharded
from distflow.config.keys.distill import teachers_of
from distflow.planning.devices import Device
from distflow.planning.model_memory import (
    SERVER_SHARES,
    activation_bytes,
    adapter_weights,
    cache_in_advance,
    frozen_bytes,
    is_judge,
    itemsize_of,
    longest_sequence,
    micro_tokens,
    running_responses,
    server_share,
    shards_of,
    shares_storage,
    sizes_of,
    trained_bytes,
    trainer_keys,
)
from distflow.planning.model_shapes import ModelShape
from distflow.planning.plan import Plan, RankPlan

Phase = Literal["generate", "forward", "update", "optimizer", "sync"]
PHASES: tuple[Phase, ...] = ("generate", "forward", "update", "optimizer", "sync")
"""forward: log-probs and values. update: forward and backward passes of micro-batches. optimizer:
its step."""

PROCESS_BYTES = {"cpu": 600e6, "gpu": 700e6}
"""A process with torch and transformers before it has a model, resident on a CPU; the context of a
CUDA process."""
USABLE = 0.94
"""Share of a device's memory that fills up before an allocation fails: the rest is lost to
fragments."""
BUCKET_BYTES = 2**28
"""Of weights in flight, as in runtime/weight_sync/sender.py."""
CHUNK_LOGITS = {"cpu": 2**25, "gpu": 2**27}
"""Logits that exist at once, as in models/log_probs.py."""


@dataclass(frozen=True)
class MemoryItem:
    """What one purpose takes on each device."""

    role: str
    what: str
    num_bytes: float
    phases: tuple[Phase, ...] = PHASES
    on_host: bool = False
    """In the memory of the machine beside a GPU."""
    in_server: bool = False
    """Taken as a whole by a server's process, which loses nothing to fragments."""

    @property
    def when(self) -> str:
        if self.phases == PHASES:
            return "always"
        return ", ".join(self.phases)


@dataclass(frozen=True)
class WorkerMemory:
    ranks: tuple[int, ...]
    """Workers that all need the same."""
    items: tuple[MemoryItem, ...]

    def bytes_in(self, phase: Phase) -> float:
        """On the device."""
        return sum(item.num_bytes for item in self._there(phase))

    def _there(self, phase: Phase) -> Iterator[MemoryItem]:
        for item in self.items:
            if phase in item.phases and not item.on_host:
                yield item

    @property
    def peak_phase(self) -> Phase:
        return max(PHASES, key=self.bytes_in)

    @property
    def peak(self) -> float:
        return self.bytes_in(self.peak_phase)

    def usable(self, phase: Phase, memory: float) -> float:
        """How much of a device's memory may be full in a phase: what a server takes, and a share of
        the rest."""
        taken = sum(item.num_bytes for item in self._there(phase) if item.in_server)
        return USABLE * memory + (1 - USABLE) * min(taken, memory)

    def largest(self, phase: Phase) -> MemoryItem:
        """What takes most on the device."""
        return max(self._there(phase), key=lambda item: item.num_bytes)


def worker_memory(
    plan: Plan,
    config: Config,
    shapes: Mapping[str, ModelShape],
    device: Device,
    libraries: float | None = None,
) -> tuple[WorkerMemory, ...]:
    """Of every rank, those with the same needs together. shapes: the model of each role (`rollout`:
    the actor's). libraries: bytes of a process without its models, if they were measured."""
    if libraries is None:
        libraries = PROCESS_BYTES[device.kind]
    alike: dict[tuple[object, ...], list[RankPlan]] = defaultdict(list)
    for rank in plan.ranks:
        alike[rank.engines, rank.training_nodes, bool(rank.rollout_group)].append(rank)

    found = []
    for ranks in alike.values():
        items = [MemoryItem("process", "libraries", libraries)]
        for item in _Needs(plan, ranks[0], config, shapes, device).items():
            if item.num_bytes:
                items.append(item)
        found.append(WorkerMemory(tuple(rank.rank for rank in ranks), tuple(items)))

    return tuple(found)


def cached_tokens(
    plan: Plan, config: Config, shapes: Mapping[str, ModelShape], device: Device
) -> float | None:
    """Tokens whose keys and values fit into what an engine takes in advance: at least one sequence
    of the greatest length; None if engines take what they need."""
    # The devices of a server at an address are not in the plan.
    if not plan.generates or config.actor_rollout_ref.rollout.url:
        return None

    generating = next(rank for rank in plan.ranks if "rollout" in rank.engines)
    needs = _Needs(plan, generating, config, shapes, device)
    taken = needs.taken_in_advance([*needs.beside_rollout()])
    if taken is None:
        return None

    return max(taken / needs.token_bytes, float(longest_sequence(config)))


@dataclass(frozen=True)
class _Needs:
    """What one worker needs."""

    plan: Plan
    rank: RankPlan
    config: Config
    shapes: Mapping[str, ModelShape]
    device: Device

    @property
    def itemsize(self) -> int:
        return itemsize_of(self.config)

    def items(self) -> Iterator[MemoryItem]:
        beside = [*self.beside_rollout()]
        yield from beside
        generates = "rollout" in self.rank.engines
        if generates and not self.config.actor_rollout_ref.rollout.url:
            yield from self._rollout(beside)

        if self.plan.generating_only and (generates or "actor" in self.rank.engines):
            on_host = not self.device.is_cpu
            yield MemoryItem("actor", "buckets in flight", 2 * BUCKET_BYTES, ("sync",), on_host)

    def beside_rollout(self) -> Iterator[MemoryItem]:
        for role in self.rank.engines:
            if role in ("actor", "critic"):
                yield from self._trained(role)
            elif role != "rollout":
                yield from self._frozen(role)

    def _parameters(self, role: str) -> float:
        """Of the whole model; a critic's head has one row."""
        shape = self.shapes[role]
        if role == "critic" and not shape.tied:
            return shape.parameters - shape.head_weights
        return shape.parameters

    def _trained(self, role: str) -> Iterator[MemoryItem]:
        settings = self.config.actor_rollout_ref
        own = trainer_keys(self.config, role)
        parts = shards_of(self.plan, self.config, role)

        weights = self._parameters(role)
        trained = weights
        if settings.model.lora_rank and role == "actor":
            trained = adapter_weights(self.shapes[role], settings.model.lora_rank)
            weights += trained

        amounts = trained_bytes(weights / parts, trained / parts, own.optim.optimizer)
        fsdp = own.fsdp_config
        is_gpu = not self.device.is_cpu

        all_on_host = is_gpu and fsdp.offload_policy
        if is_gpu and fsdp.param_offload and not all_on_host:
            while_training: tuple[Phase, ...] = ("forward", "update", "optimizer", "sync")
            yield MemoryItem(role, "weights", amounts["weights"], while_training)
            yield MemoryItem(role, "weights", amounts["weights"], ("generate",), on_host=True)
        else:
            yield MemoryItem(role, "weights", amounts["weights"], PHASES, all_on_host)

        updating: tuple[Phase, ...] = ("update", "optimizer")
        yield MemoryItem(role, "gradients", amounts["gradients"], updating, all_on_host)
        moments = amounts["optimizer"]

        if is_gpu and fsdp.optimizer_offload and not all_on_host:
            others = tuple(phase for phase in PHASES if phase != "optimizer")
            yield MemoryItem(role, "optimizer", moments, ("optimizer",))
            yield MemoryItem(role, "optimizer", moments, others, on_host=True)
        else:
            yield MemoryItem(role, "optimizer", moments, PHASES, all_on_host)

        if is_gpu and not all_on_host:  # AdamW updates all tensors of a kind at once
            yield MemoryItem(role, "optimizer temporaries", 4 * trained / parts, ("optimizer",))
        yield from self._computing(role, parts, ("forward", "update"))
        yield from self._passes(role, "update")
        yield from self._passes(role, "forward")

    def _frozen(self, role: str) -> Iterator[MemoryItem]:
        """A reference, a reward model, a judge or a teacher."""
        settings = self.config.actor_rollout_ref
        if role == "ref":
            if is_own_reference(self.config):
                return
            is_off = settings.ref.fsdp_config.param_offload
        else:
            is_off = frozen_models(self.config)[role].param_offload

        parts = shards_of(self.plan, self.config, role)
        weights = frozen_bytes(self.config, role, self._parameters(role)) / parts
        yield MemoryItem(role, "weights", weights, PHASES, is_off and not self.device.is_cpu)
        if not is_judge(self.config, role):
            yield from self._computing(role, parts, ("forward",))
        yield from self._passes(role, "forward")

    def _computing(self, role: str, parts: int, phases: tuple[Phase, ...]) -> Iterator[MemoryItem]:
        """Copies of weights that exist while they compute: gathered layers, or casts by
        autocast."""
        shape = self.shapes[role]
        if is_sharded(self.config) and parts > 1:
            sizes = sizes_of(self.plan, role)
            gathered = 2 * shape.computed_weights(sizes.tensor, sizes.expert)
            gathered += shape.head_weights * (2 - shape.tied) / sizes.tensor
            yield MemoryItem(role, "gathered layers", self.itemsize * gathered, phases)
        elif self.itemsize == 2:
            yield MemoryItem(role, "weights cast to bfloat16", 2 * self._parameters(role), phases)

    def _passes(self, role: str, phase: Phase) -> Iterator[MemoryItem]:
        """Activations and logits of the fullest micro-batch."""
        shape = self.shapes[role]
        sizes = sizes_of(self.plan, role)
        settings = self.config.actor_rollout_ref
        tokens = micro_tokens(self.config, role, sizes, self.device.kind)
        per_token = activation_bytes(
            shape,
            self.itemsize,
            sizes.tensor,
            trains=phase == "update",
            checkpointed=settings.model.enable_gradient_checkpointing,
        )
        yield MemoryItem(role, "activations", per_token * tokens, (phase,))
        if sizes.context > 1:
            yield MemoryItem(role, "keys and values", self._gathered(role, tokens, phase), (phase,))

        if role in ("actor", "ref", *teachers_of(self.config.distill)):
            rows = CHUNK_LOGITS[self.device.kind] // shape.vocabulary
            copies = 4 if self.itemsize == 4 else 6
            if settings.rollout.temperature != 1.0:
                copies += 4
            size = copies * min(tokens, max(1, rows)) * shape.vocabulary
            yield MemoryItem(role, "logits", size, (phase,))

    def _gathered(self, role: str, tokens: int, phase: Phase) -> float:
        """Bytes of a whole row's keys and values, which ranks with so many own tokens gather. Not
        in 16 bits on a GPU, attention also has masks, which all layers share."""
        shape = self.shapes[role]
        sizes = sizes_of(self.plan, role)
        has_masks = self.device.is_cpu or self.itemsize == 4
        itemsize = 4 if has_masks else self.itemsize
        keeps_all = phase == "update"
        if self.config.actor_rollout_ref.model.enable_gradient_checkpointing:
            keeps_all = False

        found = itemsize * shape.kv_elements / sizes.tensor * tokens * sizes.context
        if not keeps_all:
            found /= shape.layers
        if has_masks:
            found += 4 * tokens * longest_sequence(self.config)
        return found

    def _rollout(self, beside: Sequence[MemoryItem]) -> Iterator[MemoryItem]:
        """beside: what the worker needs besides."""
        settings = self.config.actor_rollout_ref.rollout
        shape = self.shapes["rollout"]
        own = sizes_of(self.plan, "rollout")
        trains_between = bool(self.rank.training_nodes) and self.config.async_.max_staleness == 0
        freed = trains_between and settings.free_cache_engine
        kept: tuple[Phase, ...] = ("generate", "sync") if freed else PHASES
        generating: tuple[Phase, ...] = ("generate",)
        in_server = self._in_server
        yield MemoryItem("rollout", "weights", self._engine_weights, kept, in_server=in_server)

        reads_as_stored = self._by_torch and self._engine_itemsize == 4
        if self.device.is_cpu and settings.name == "embedded" and not reads_as_stored:
            # See `cpu_kernels/weight_layout.py`.
            matrices = self.itemsize * (shape.active_weights + shape.head_weights)
            yield MemoryItem("rollout", "packed weights", matrices, generating if freed else PHASES)

        running = running_responses(self.config, own.data)
        longest = self.token_bytes * longest_sequence(self.config)

        taken = self.taken_in_advance(beside)
        cache = running * longest if taken is None else max(taken, longest)

        # The embedded engine's cache shrinks to nothing when a step's groups are complete, unless
        # it was taken in advance.
        shrinks = trains_between and settings.name == "embedded" and (freed or taken is None)
        phases = generating if shrinks else kept
        yield MemoryItem("rollout", "KV cache", cache, phases, in_server=in_server)

        if not in_server:
            logits = 4 * 3 * running * shape.vocabulary / own.tensor
            yield MemoryItem("rollout", "logits", logits, generating)

    @property
    def _in_server(self) -> bool:
        """Whether the rollout's server takes a share of a GPU."""
        name = self.config.actor_rollout_ref.rollout.name
        return name in SERVER_SHARES and not self.device.is_cpu

    @property
    def _by_torch(self) -> bool:
        settings = self.config.actor_rollout_ref.rollout
        return settings.name != "embedded" or settings.enforce_eager

    @property
    def _engine_itemsize(self) -> int:
        """Bytes of the rollout engine's numbers: on a CPU native code casts float32 weights, see
        `engine_dtype` of the launcher."""
        casts = self.device.is_cpu and not self._by_torch and not is_sharded(self.config)
        return 4 if casts else self.itemsize

    @property
    def _engine_weights(self) -> float:
        """Bytes of the rollout engine's own weights."""
        dtype = self.config.actor_rollout_ref.model.dtype
        if self.rank.training_nodes and shares_storage(self.config, dtype):
            return 0.0
        weights = self.shapes["rollout"].parameters / sizes_of(self.plan, "rollout").tensor
        return self._engine_itemsize * weights

    @property
    def token_bytes(self) -> float:
        """Keys and values of a token on one device. Where native code casts the weights, keys are
        in float32 and values are not."""
        shape = self.shapes["rollout"]
        parts = min(sizes_of(self.plan, "rollout").tensor, shape.kv_heads)
        return shape.kv_elements * (self._engine_itemsize + self.itemsize) / 2 / parts

    def taken_in_advance(self, beside: Sequence[MemoryItem]) -> float | None:
        """Bytes of keys and values that the engine takes when it starts; None if it takes what it
        needs. beside: what the worker needs besides."""
        if self.device.is_cpu:
            return None

        free = self.device.memory - PROCESS_BYTES["gpu"]
        for item in beside:
            # There are no moments before the first step.
            if "generate" in item.phases and not item.on_host and item.what != "optimizer":
                free -= item.num_bytes

        if self._in_server:
            of_all = self.config.actor_rollout_ref.rollout.name == "vllm"
            share = server_share(self.config)
            return share * (self.device.memory if of_all else free) - self._engine_weights

        free -= self._engine_weights
        return cache_in_advance(self.config, free, self.token_bytes, self.shapes["rollout"].context)
