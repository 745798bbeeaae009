"""The memory that each worker of a plan needs, by role, purpose and phase of a step: arithmetic
over the shape of each model and the keys of the config, in the amounts in which the engines
allocate.

Trained weights are float32 with float32 gradients and moments, whatever the models compute in.
Activations are those of the fullest micro-batch. KV cache is that of as many responses as run at
once, all of the greatest length; on a GPU, what the embedded engine or a server takes in advance,
whatever it needs.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

from distflow.builtin_names import ROLLOUT_ENGINES
from distflow.config import Config
from distflow.config.derived_settings import is_rl, is_sharded
from distflow.config.keys.reward import scoring_models
from distflow.planning.known_models_and_devices import Device, ModelShape
from distflow.planning.plan_of_ranks_and_layouts import Plan, RankPlan, Sizes

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
_BUCKET = 2**28  # as runtime/weight_sync/sender.py
_CHUNK = {"cpu": 2**25, "gpu": 2**27}  # logits, as models/log_probs.py
_MICRO = {"cpu": 4096, "gpu": 16384}  # tokens, as training/torch_engine.py
_TRAINED: tuple[Phase, ...] = ("forward", "update")
_CACHE_SHARE = 0.5  # as rollout/embedded/cuda_decode_steps_and_graphs.py
_MOMENTS = {"adamw": 8, "adamw_8bit": 2, "sgd": 0}  # bytes per trained weight
_SERVER_SHARES = {"vllm": ("gpu_memory_utilization", 0.92), "sglang": ("mem_fraction_static", 0.9)}
"""The server's option for the share of a GPU that it takes when it starts, and its default: vLLM's
of all memory with its activations, SGLang's of the free memory (by default about so much, more or
less by device)."""


@dataclass(frozen=True)
class MemoryItem:
    """Bytes on each device of one purpose. on_host: in the memory of the machine beside a GPU.
    in_server: taken as a whole by a server's process, which loses nothing to fragments."""

    role: str
    what: str
    num_bytes: float
    phases: tuple[Phase, ...] = PHASES
    on_host: bool = False
    in_server: bool = False

    @property
    def when(self) -> str:
        return "always" if self.phases == PHASES else ", ".join(self.phases)


@dataclass(frozen=True)
class WorkerMemory:
    """ranks: workers that all need the same."""

    ranks: tuple[int, ...]
    items: tuple[MemoryItem, ...]

    def bytes_in(self, phase: Phase, on_host: bool = False) -> float:
        return sum(
            item.num_bytes
            for item in self.items
            if phase in item.phases and item.on_host is on_host
        )

    @property
    def peak_phase(self) -> Phase:
        return max(PHASES, key=self.bytes_in)

    @property
    def peak(self) -> float:
        return self.bytes_in(self.peak_phase)

    def usable(self, phase: Phase, memory: float) -> float:
        """How much of a device's memory may be full in a phase: what a server takes, and a share of
        the rest."""
        taken = sum(
            item.num_bytes for item in self.items if item.in_server and phase in item.phases
        )
        return USABLE * memory + (1 - USABLE) * min(taken, memory)

    def largest(self, phase: Phase) -> MemoryItem:
        """What takes most on the device."""
        here = [item for item in self.items if phase in item.phases and not item.on_host]
        return max(here, key=lambda item: item.num_bytes)


def worker_memory(
    plan: Plan,
    config: Config,
    shapes: Mapping[str, ModelShape],
    device: Device,
    libraries: float | None = None,
) -> tuple[WorkerMemory, ...]:
    """Of every rank, those with the same needs together. shapes: the model of each role (`rollout`:
    the actor's). libraries: bytes of a process without its models, if they were measured."""
    alike: dict[tuple[object, ...], list[RankPlan]] = defaultdict(list)
    for rank in plan.ranks:
        alike[rank.engines, rank.training_nodes, bool(rank.rollout_group)].append(rank)
    found = []
    for ranks in alike.values():
        own = _Needs(plan, ranks[0], config, shapes, device)
        process = (
            PROCESS_BYTES["cpu" if device.is_cpu else "gpu"] if libraries is None else libraries
        )
        items = [
            MemoryItem("process", "libraries", process),
            *(item for item in own.items() if item.num_bytes),
        ]
        items += _freed_memory(items) if device.is_cpu else ()
        found.append(WorkerMemory(tuple(rank.rank for rank in ranks), tuple(items)))
    return tuple(found)


def cached_tokens(
    plan: Plan, config: Config, shapes: Mapping[str, ModelShape], device: Device
) -> float | None:
    """Tokens whose keys and values fit into what an engine takes in advance: at least one sequence
    of the greatest length; None if engines take what they need."""
    generating = [rank for rank in plan.ranks if "rollout" in rank.engines]
    if not generating:
        return None
    needs = _Needs(plan, generating[0], config, shapes, device)
    taken = needs.taken_in_advance()
    longest = config.data.max_prompt_length + config.data.max_response_length
    return None if taken is None else max(taken / needs.token_bytes, float(longest))


def _freed_memory(items: Sequence[MemoryItem]) -> Iterator[MemoryItem]:
    """Freed memory that a process on a CPU keeps (`keep_freed_memory`): that of an update is still
    there when the next step generates, and holds its cache only if that is small enough to find
    room among what is left."""
    freed = sum(
        item.num_bytes
        for item in items
        if "update" in item.phases and "generate" not in item.phases
    )
    cache = sum(item.num_bytes for item in items if item.what == "KV cache")
    if 2 * cache > freed > 0:  # while it grows, old and new exist
        yield MemoryItem("process", "freed memory that is kept", freed, ("generate",))


def sizes_of(plan: Plan, role: str) -> Sizes:
    """The sizes of a role's model; one rank without layouts has all of it."""
    layout = plan.layout(role)
    return Sizes() if layout is None else layout.sizes


def shards_of(plan: Plan, config: Config, role: str) -> int:
    """On how many ranks one copy of a role's weights lies."""
    layout = plan.layout(role)
    if layout is None:
        return 1
    if role == "rollout":
        return layout.sizes.tensor
    if _is_whole_judge(config, role):
        return 1
    own = (layout.shard or layout.sizes.data) if is_sharded(config) else 1
    return own * layout.sizes.tensor * layout.sizes.pipeline


def shares_storage(config: Config, dtype: str) -> bool:
    """Whether the rollout engine may compute on the trainer's storage: weights are whole, both use
    the stored dtype, and nothing is generated while the trainer updates them. dtype: that the
    models compute in."""
    in_server = ROLLOUT_ENGINES[config.actor_rollout_ref.rollout.name].in_server
    if in_server or dtype != "float32" or is_sharded(config):
        return False
    return not is_rl(config) or config.async_.max_staleness == 0


def _is_whole_judge(config: Config, role: str) -> bool:
    model = scoring_models(config.reward_model).get(role)
    return model is not None and model.is_whole_judge


def trained_bytes(weights: float, trained: float, optimizer: str) -> dict[str, float]:
    """Of a model with so many weights, of which so many are trained, and that are all stored in
    float32."""
    return {
        "weights": 4 * weights,
        "gradients": 4 * trained,
        "optimizer": _MOMENTS[optimizer] * trained,
    }


def frozen_bytes(config: Config, role: str, weights: float) -> float:
    """Of a reference, reward model or judge. A rollout engine computes with a whole judge's
    weights."""
    return weights * (itemsize_of(config) if _is_whole_judge(config, role) else 4)


def with_server_share(config: Config, share: float) -> tuple[str, object]:
    """The key, with the new value, that has the rollout's server take this share of a GPU."""
    rollout = config.actor_rollout_ref.rollout
    options: Any = rollout.engine_kwargs.get(rollout.name) or {}
    own = {rollout.name: {**options, _SERVER_SHARES[rollout.name][0]: share}}
    return "actor_rollout_ref.rollout.engine_kwargs", {**rollout.engine_kwargs, **own}


def cache_in_advance(
    config: Config, free: float, token_bytes: float, context: int | None
) -> float | None:
    """Bytes of keys and values that the embedded engine takes on a GPU when it first generates, and
    keeps; None for engines that take what they need. free: at that time."""
    rollout = config.actor_rollout_ref.rollout
    data = config.data
    if rollout.name != "embedded" or rollout.batch_invariant:
        return None
    longest = context or data.max_prompt_length + data.max_response_length
    return min(_CACHE_SHARE * free, 2 * rollout.max_num_seqs * longest * token_bytes)


def micro_tokens(config: Config, role: str, ranks: int, is_cpu: bool) -> int:
    """Tokens of a role's micro-batches if all samples have the greatest length."""
    settings = config.actor_rollout_ref
    data = config.data
    limit = settings.actor.ppo_max_token_len_per_gpu
    if role == "critic":
        limit = config.critic.ppo_max_token_len_per_gpu or limit
    elif role == "ref":
        limit = settings.ref.log_prob_max_token_len_per_gpu or limit
    longest = data.max_prompt_length + data.max_response_length
    batch = (
        settings.actor.ppo_mini_batch_size if role in ("actor", "critic") else data.train_batch_size
    )
    if role == "critic":
        batch = config.critic.ppo_mini_batch_size or batch
    tokens = -(-batch * samples_per_prompt(config) // ranks) * longest
    micro_batches = ceil(tokens / (limit or _MICRO["cpu" if is_cpu else "gpu"]))
    return max(longest, ceil(tokens / micro_batches))  # packing evens them out


def samples_per_prompt(config: Config) -> int:
    return config.actor_rollout_ref.rollout.n if is_rl(config) else 1


def samples_per_step(config: Config) -> int:
    return config.data.train_batch_size * samples_per_prompt(config)


def itemsize_of(config: Config) -> int:
    """Bytes of a number that the models compute with."""
    return 4 if config.actor_rollout_ref.model.dtype == "float32" else 2


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

    @property
    def kind(self) -> str:
        return "cpu" if self.device.is_cpu else "gpu"

    def items(self) -> Iterator[MemoryItem]:
        others = [*self._beside_rollout()]
        # it has its own devices
        if "rollout" in self.rank.engines and not self.config.actor_rollout_ref.rollout.url:
            yield from self._rollout(others)
        yield from others
        if self._sends_elsewhere():
            yield MemoryItem(
                "actor", "buckets in flight", 2 * _BUCKET, ("sync",), on_host=not self.device.is_cpu
            )

    def _beside_rollout(self) -> Iterator[MemoryItem]:
        for role in (role for role in self.rank.engines if role != "rollout"):
            yield from self._trained(role) if role in ("actor", "critic") else self._frozen(role)

    def _sends_elsewhere(self) -> bool:
        alone = any(
            "rollout" in rank.engines and not rank.training_nodes for rank in self.plan.ranks
        )
        return alone and ("actor" in self.rank.engines or "rollout" in self.rank.engines)

    def _parameters(self, role: str) -> float:
        """Of the whole model; a critic's head has one row."""
        shape = self.shapes[role]
        headless = role == "critic" and not shape.tied
        return shape.parameters - shape.head_weights * headless

    def _trained(self, role: str) -> Iterator[MemoryItem]:
        settings = self.config.actor_rollout_ref
        own = self.config.critic if role == "critic" else settings.actor
        parts = shards_of(self.plan, self.config, role)
        weights = self._parameters(role)
        trained = float(weights)
        if settings.model.lora_rank and role == "actor":
            trained = adapter_weights(self.shapes[role], settings.model.lora_rank)
            weights += trained
        fsdp = own.fsdp_config
        is_gpu = not self.device.is_cpu
        all_on_host = is_gpu and fsdp.offload_policy
        weights_off = is_gpu and fsdp.param_offload and not all_on_host
        moments_off = is_gpu and fsdp.optimizer_offload and not all_on_host
        used: tuple[Phase, ...] = (
            ("forward", "update", "optimizer", "sync") if weights_off else PHASES
        )
        held = {
            what: size / parts
            for what, size in trained_bytes(weights, trained, own.optim.optimizer).items()
        }
        yield MemoryItem(role, "weights", held["weights"], used, all_on_host)
        if weights_off:
            yield MemoryItem(role, "weights", held["weights"], ("generate",), on_host=True)
        yield MemoryItem(role, "gradients", held["gradients"], ("update", "optimizer"), all_on_host)
        moments = held["optimizer"]
        while_stepping: tuple[Phase, ...] = ("optimizer",) if moments_off else PHASES
        yield MemoryItem(role, "optimizer", moments, while_stepping, all_on_host)
        if moments_off:
            others = tuple(phase for phase in PHASES if phase != "optimizer")
            yield MemoryItem(role, "optimizer", moments, others, on_host=True)
        if is_gpu and not all_on_host:  # AdamW updates all tensors of a kind at once
            yield MemoryItem(role, "optimizer temporaries", 4 * trained / parts, ("optimizer",))
        yield from self._computing(role, parts)
        yield from self._passes(role, ("update",), trains=True)
        yield from self._passes(role, ("forward",), trains=False)

    def _frozen(self, role: str) -> Iterator[MemoryItem]:
        """A reference, a reward model or a judge."""
        parts = shards_of(self.plan, self.config, role)
        if role == "ref":
            if self.config.actor_rollout_ref.model.lora_rank:
                return  # the policy with its adapter switched off
            is_off = self.config.actor_rollout_ref.ref.fsdp_config.param_offload
        else:
            is_off = scoring_models(self.config.reward_model)[role].param_offload
        on_host = is_off and not self.device.is_cpu
        yield MemoryItem(
            role,
            "weights",
            frozen_bytes(self.config, role, self._parameters(role)) / parts,
            PHASES,
            on_host,
        )
        if not _is_whole_judge(self.config, role):
            yield from self._computing(role, parts)
        yield from self._passes(role, ("forward",), trains=False)

    def _computing(self, role: str, parts: int) -> Iterator[MemoryItem]:
        """Copies of weights that exist while they compute: gathered layers, or casts by
        autocast."""
        shape = self.shapes[role]
        phases = _TRAINED if role in ("actor", "critic") else _TRAINED[:1]
        if is_sharded(self.config) and parts > 1:
            layer = shape.attention_weights + shape.expert_weights * max(shape.experts, 1)
            gathered = 2 * layer + shape.head_weights * (2 - shape.tied)
            yield MemoryItem(
                role,
                "gathered layers",
                self.itemsize * gathered / sizes_of(self.plan, role).tensor,
                phases,
            )
        elif self.itemsize == 2:
            yield MemoryItem(role, "weights cast to bfloat16", 2 * self._parameters(role), phases)

    def _passes(self, role: str, phases: tuple[Phase, ...], trains: bool) -> Iterator[MemoryItem]:
        """Activations and logits of the fullest micro-batch."""
        shape = self.shapes[role]
        sizes = sizes_of(self.plan, role)
        tokens = micro_tokens(self.config, role, sizes.data, self.device.is_cpu)
        checkpointed = self.config.actor_rollout_ref.model.enable_gradient_checkpointing
        per_token = activation_bytes(shape, self.itemsize, sizes.tensor, trains, checkpointed)
        yield MemoryItem(role, "activations", per_token * tokens, phases)
        if role in ("actor", "ref"):
            rows = min(tokens, max(1, _CHUNK[self.kind] // shape.vocabulary))
            heated = self.config.actor_rollout_ref.rollout.temperature != 1.0
            copies = 4 + (2 if self.itemsize == 2 else 0) + 4 * heated
            yield MemoryItem(role, "logits", copies * rows * shape.vocabulary, phases)

    def _rollout(self, others: Sequence[MemoryItem]) -> Iterator[MemoryItem]:
        """others: what the worker needs besides."""
        config = self.config
        settings = self.config.actor_rollout_ref.rollout
        shape = self.shapes["rollout"]
        own = sizes_of(self.plan, "rollout")
        data = config.data
        in_turns = config.async_.max_staleness == 0
        trains = bool(self.rank.training_nodes)
        freed = trains and settings.free_cache_engine and in_turns
        kept: tuple[Phase, ...] = ("generate", "sync") if freed else PHASES
        on_cpu = self.device.is_cpu
        in_server = self._in_server
        by_torch = self._by_torch
        itemsize = self._engine_itemsize
        weights = self._engine_weights
        yield MemoryItem("rollout", "weights", weights, kept, in_server=in_server)
        if on_cpu and settings.name == "embedded" and not (by_torch and itemsize == 4):
            # `cpu_kernels/weight_layout.py`
            matrices = self.itemsize * (shape.active_weights + shape.head_weights)
            yield MemoryItem(
                "rollout", "packed weights", matrices, ("generate",) if freed else PHASES
            )
        running = running_responses(config, own.data)
        longest = data.max_prompt_length + data.max_response_length
        token = self.token_bytes
        taken = self._taken_beside(others)
        # or nothing could start
        cache = running * longest * token if taken is None else max(taken, longest * token)
        # The embedded engine's cache shrinks to nothing when a step's groups are complete, unless
        # taken in advance.
        idle = trains and in_turns and settings.name == "embedded" and (freed or taken is None)
        yield MemoryItem(
            "rollout", "KV cache", cache, ("generate",) if idle else kept, in_server=in_server
        )
        if not in_server:
            yield MemoryItem(
                "rollout", "logits", 4 * 3 * running * shape.vocabulary / own.tensor, ("generate",)
            )

    @property
    def _in_server(self) -> bool:
        """Whether the rollout's server takes a share of a GPU."""
        return (
            self.config.actor_rollout_ref.rollout.name in _SERVER_SHARES and not self.device.is_cpu
        )

    @property
    def _by_torch(self) -> bool:
        settings = self.config.actor_rollout_ref.rollout
        return settings.name != "embedded" or settings.enforce_eager or settings.batch_invariant

    @property
    def _engine_itemsize(self) -> int:
        """Bytes of the rollout engine's numbers: on a CPU native code casts float32 weights, see
        `engine_dtype` of the launcher."""
        casts = self.device.is_cpu and not self._by_torch and not is_sharded(self.config)
        return 4 if casts else self.itemsize

    @property
    def _engine_weights(self) -> float:
        """Bytes of the rollout engine's own weights."""
        shared = self.rank.training_nodes and shares_storage(
            self.config, self.config.actor_rollout_ref.model.dtype
        )
        tensor = sizes_of(self.plan, "rollout").tensor
        return 0.0 if shared else self._engine_itemsize * self.shapes["rollout"].parameters / tensor

    @property
    def token_bytes(self) -> float:
        """Keys and values of a token on one device. Where native code casts the weights, keys are
        in float32 and values are not."""
        shape = self.shapes["rollout"]
        parts = min(sizes_of(self.plan, "rollout").tensor, shape.kv_heads)
        return shape.kv_elements * (self._engine_itemsize + self.itemsize) / 2 / parts

    def taken_in_advance(self) -> float | None:
        """Bytes of keys and values that the engine takes when it starts; None if it takes what it
        needs."""
        if self.config.actor_rollout_ref.rollout.url:  # of devices that the plan does not have
            return None
        return self._taken_beside([*self._beside_rollout()])

    def _taken_beside(self, others: Sequence[MemoryItem]) -> float | None:
        weights = self._engine_weights
        if self._in_server:
            return self._server_bytes(others) - weights
        if self.device.is_cpu:
            return None
        free = self._free_at_start(others) - weights
        return cache_in_advance(self.config, free, self.token_bytes, self.shapes["rollout"].context)

    def _free_at_start(self, others: Sequence[MemoryItem]) -> float:
        """On the device before the first step, when there are no moments yet."""
        there = (
            i.num_bytes
            for i in others
            if "generate" in i.phases and not i.on_host and i.what != "optimizer"
        )
        return self.device.memory - PROCESS_BYTES["gpu"] - sum(there)

    def _server_bytes(self, others: Sequence[MemoryItem]) -> float:
        """What the rollout's server takes on each of its devices when it starts."""
        rollout = self.config.actor_rollout_ref.rollout
        (option, default), options = (
            _SERVER_SHARES[rollout.name],
            rollout.engine_kwargs.get(rollout.name),
        )
        given = options.get(option) if isinstance(options, dict) else None
        share = given if isinstance(given, int | float) else default
        return share * (
            self.device.memory if rollout.name == "vllm" else self._free_at_start(others)
        )


def running_responses(config: Config, engines: int) -> int:
    """The most responses that an engine generates at once: of so many steps as may be under way."""
    groups = config.data.train_batch_size * (
        config.async_.max_staleness + 1 if is_rl(config) else 1
    )
    groups = min(groups, config.async_.max_concurrent_rollouts or groups)
    wanted = -(-groups * samples_per_prompt(config) // engines)
    return min(config.actor_rollout_ref.rollout.max_num_seqs, wanted)


def adapter_weights(shape: ModelShape, rank: int) -> float:
    """Of LoRA on all matrices of the layers."""
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    ends = (
        2 * (shape.hidden + queries)
        + 2 * (shape.hidden + keys)
        + 3 * (shape.hidden + shape.intermediate)
    )
    return rank * shape.layers * ends


def activation_bytes(
    shape: ModelShape, itemsize: int, tensor: int, trains: bool, checkpointed: bool
) -> float:
    """Of one token: what the backward pass needs of all layers; with checkpointing each layer's
    input, and all of one layer; without a backward pass what one layer holds at a time. Norms and
    the residual stream are not divided by tensor parallelism, and are float32."""
    hidden = shape.hidden
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    inner = shape.intermediate * shape.active_experts
    # inputs of norms, normalised, and (here in one type) scaled
    streams = 4 * hidden * (4 if itemsize == 2 else 6)
    products = (
        itemsize
        * (2 * queries + 2 * keys + 4 * inner + (2 * hidden if itemsize == 2 else 0))
        / tensor
    )
    layer = streams + products
    if not trains:
        return 4 * hidden * 3 + products
    return 4 * hidden * shape.layers + layer if checkpointed else layer * shape.layers
