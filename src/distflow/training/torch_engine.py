"""The scorer, which computes per-token outputs of a model over packed micro-batches (e.g. for the
frozen reference), and the train engine: exact gradient accumulation, one optimizer step per
mini-batch, with gradients summed and clipped over ranks, and activation checkpointing.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, TypedDict, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedTokenizerBase

from distflow.data.batch import Batch
from distflow.data.bin_packing import pack
from distflow.data.preference_pairs import encode_text, messages_of
from distflow.device_transfer import read_numbers, send
from distflow.errors import UserError
from distflow.models.context_share import CONTEXT
from distflow.models.image_inputs import ImageInputs, ImageProcessor, images_of
from distflow.models.log_probs import check_temperature
from distflow.models.lora import adapter_off, named_weights, unwrapped
from distflow.models.number_head import NumberTargets, make_head
from distflow.models.packed_forward import LIKELIEST, ModelInputs
from distflow.models.packed_layout import shared_prefixes
from distflow.models.sharding import device_of, fill, whole
from distflow.training import engine
from distflow.training.optimizer import (
    Schedule,
    load_optimizer_state,
    move_optimizer_state,
    optimizer_state,
)
from distflow.user_values import finite_number

AnyTensor = TypeVar("AnyTensor", bound=Tensor)


class ScorerOptions(TypedDict, total=False):
    """How a scorer and a train engine run their model."""

    max_tokens_per_micro_batch: int | None
    """On each rank; None chooses by the device."""
    temperature: float
    temperatures: Mapping[str, float]
    """Of domains that are not sampled at `temperature`."""
    agent_temperatures: Mapping[str, float | None]
    """Of the agents of episodes, None for that of the sample; empty if no agent has its own."""
    compute_dtype: torch.dtype | None
    """Of the matrix products (the weights' own by default), by autocast; the softmax stays in
    float32."""


@dataclass(eq=False, repr=False)
class TorchScorer:
    """Computes outputs of response tokens on one device, by the model's `packed_forward`. Its
    options are those of `ScorerOptions`, and four more."""

    model: nn.Module
    _: KW_ONLY
    max_tokens_per_micro_batch: int | None = None
    temperature: float = 1.0
    temperatures: Mapping[str, float] = field(default_factory=dict)
    agent_temperatures: Mapping[str, float | None] = field(default_factory=dict)
    compute_dtype: torch.dtype | None = None
    without_adapter: bool = False
    """Score with the LoRA adapter switched off, which makes a policy its own reference."""
    num_likeliest: int = 0
    """Of the outputs `likeliest_ids` and `likeliest_log_probs`."""
    num_tokens: int | None = None
    """The likeliest are among lower ids; None for all."""
    group: engine.Collective = field(default_factory=engine.OneRank)
    """The ranks that run the model equally often."""

    def __post_init__(self) -> None:
        self._parameter = next(self.model.parameters())
        # On a CPU the allocator reuses matrices of this few tokens: larger ones come from the
        # kernel each time, page by page, which took a tenth to a third of an update.
        by_device = 4096 if self.device.type == "cpu" else 16384
        self.max_tokens = self.max_tokens_per_micro_batch or by_device
        context = getattr(unwrapped(self.model), CONTEXT, None)
        if context is not None:
            self.max_tokens *= dist.get_world_size(context)

    @property
    def device(self) -> torch.device:
        return device_of(self._parameter)

    @torch.no_grad()
    def forward(self, batch: Batch, outputs: tuple[str, ...]) -> Batch:
        """The wanted outputs as response columns of a batch with the samples of `batch`, on the
        CPU."""
        self.model.eval()
        bins = micro_batches(batch, self.max_tokens, self.group)

        scored = list[Batch]()
        for index in bins:
            micro = batch.select(index)
            columns = Batch(micro.lengths("prompt"), micro.lengths("response"))
            for name, flat in self.compute(micro, outputs).items():
                columns[name] = flat
            scored.append(columns)

        in_order = torch.cat(bins).argsort()
        return Batch.concat(scored).to("cpu").select(in_order)

    def compute(
        self, micro: Batch, outputs: tuple[str, ...], heat: float | Tensor | None = None
    ) -> dict[str, Tensor]:
        """The wanted outputs of a micro-batch, flat `(response tokens,)`, on the model's device,
        with gradient.

        micro: on the CPU, so that shared prefixes of its samples are computed once, or on the
        device. outputs: of "log_probs", "entropy", "values", or only "text_scores"; those of
        `engine.TOP_IDS`, `(response tokens, number of ids)`, come with "log_probs". heat: the
        temperature, or that of each response token; None for that of its agent or domain. Raises
        ValueError for a sample without a prompt, and for samples without a domain if domains have
        their own temperatures.
        """
        predicts_next = outputs != ("text_scores",)
        processor = images_of(unwrapped(self.model))
        inputs = model_inputs(micro, self.device, int(predicts_next), processor)

        if heat is None:
            heat = self.temperature_of(micro)
        if isinstance(heat, Tensor):
            heat = send(heat, self.device)

        if "likeliest_ids" in outputs:
            inputs = replace(inputs, num_likeliest=self.num_likeliest, num_tokens=self.num_tokens)

        wide = [name for name in outputs if name in engine.TOP_IDS]
        if not wide:
            return self.run(inputs, outputs, heat)

        assert isinstance(inputs.targets, Tensor), "numbers are not drawn among tokens"
        ids = [inputs.targets[:, None]]
        for name in wide:
            ids.append(send(micro.flat(engine.TOP_IDS[name]), self.device))
        own = tuple(name for name in outputs if name not in wide)
        if "log_probs" not in own:
            own += ("log_probs",)

        found = self.run(replace(inputs, targets=torch.cat(ids, dim=1)), own, heat)
        split = found["log_probs"].split([each.shape[1] for each in ids], dim=1)
        found["log_probs"] = split[0][:, 0]
        for name, log_probs in zip(wide, split[1:], strict=True):
            found[name] = log_probs
        return found

    def run(
        self, inputs: ModelInputs, outputs: tuple[str, ...], heat: float | Tensor
    ) -> dict[str, Tensor]:
        """The same for sequences that are packed already."""
        model: Any = self.model  # nn.Module declares no methods
        with self._adapter(), self._autocast():
            return model.packed_forward(inputs, outputs, temperature=heat)

    def _adapter(self) -> AbstractContextManager[object]:
        if self.without_adapter:
            return adapter_off(self.model)
        return nullcontext()

    def _autocast(self) -> AbstractContextManager[object]:
        if self.compute_dtype in (None, self._parameter.dtype):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def temperature_of(self, micro: Batch) -> float | Tensor:
        """The temperature; if they differ, that of each response token: `(response tokens,)`."""
        if not (self.temperatures or self.agent_temperatures):
            return self.temperature
        if "domain" not in micro:
            raise ValueError(
                "temperatures differ by domain or agent: scored samples need their 'domain'"
            )

        of_samples = [self.temperatures.get(each, self.temperature) for each in micro["domain"]]
        of_tokens = torch.tensor(of_samples).repeat_interleave(micro.lengths("response"))
        if self.agent_temperatures:
            of_agents = torch.tensor([each or 0.0 for each in self.agent_temperatures.values()])
            speakers = micro.speakers(list(self.agent_temperatures))
            of_speakers = of_agents[speakers]
            of_tokens = torch.where(of_speakers > 0, of_speakers, of_tokens)

        check_temperature(of_tokens)
        return of_tokens


class FrozenWeights:
    """Weights that may leave the device while they are not in use: see `TrainEngine.offload`. There
    are no moments."""

    model: nn.Module

    def offload(self, weights: bool = True, moments: bool = False) -> None:
        self._home = next(self.model.parameters()).device
        self.model.to("cpu")
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    def onload(self) -> None:
        self.model.to(self._home)


@dataclass(eq=False, repr=False)
class RewardModelScorer(TorchScorer, FrozenWeights):
    """Scores texts by a reward model with its own tokenizer."""

    _: KW_ONLY
    tokenizer: PreTrainedTokenizerBase
    max_length: int | None
    """Tokens that it reads; None for all."""

    def score(self, batch: Batch) -> list[dict[str, object]]:
        """For each prompt with its response: `score`, or `error` where the model's is not finite,
        and `cut`, the number of tokens that were cut off."""
        lengths = list[int]()
        before_last = list[int]()
        last = list[int]()
        cuts = list[int]()
        for extra, prompt, response in zip(
            batch["extra_info"], batch["prompts"], batch["responses"], strict=True
        ):
            messages = messages_of(extra, prompt)
            ids, cut = encode_text(self.tokenizer, messages, response, self.max_length)
            lengths.append(len(ids))
            before_last += ids[:-1]
            last.append(ids[-1])
            cuts.append(cut)

        # Outputs are computed at the response's tokens: the last token is the response.
        num_tokens = torch.tensor(lengths, dtype=torch.int64)
        texts = Batch(num_tokens - 1, torch.ones_like(num_tokens))
        texts["prompt_ids"] = torch.tensor(before_last, dtype=torch.int64)
        texts["response_ids"] = torch.tensor(last, dtype=torch.int64)
        scores = self.forward(texts, ("text_scores",)).flat("text_scores").tolist()

        return [{**_result(score), "cut": cut} for score, cut in zip(scores, cuts, strict=True)]


@dataclass(eq=False, repr=False)
class TeacherScorer(TorchScorer, FrozenWeights):
    """Scores the policy's samples by a frozen language model with the same tokens."""

    def score(self, batch: Batch) -> Batch:
        """The columns `teacher_log_probs` and, with `num_likeliest`, `teacher_top_ids` and
        `teacher_top_log_probs`."""
        return self.forward(batch, LIKELIEST if self.num_likeliest else LIKELIEST[:1])

    def compute(
        self, micro: Batch, outputs: tuple[str, ...], heat: float | Tensor | None = None
    ) -> dict[str, Tensor]:
        names = dict(zip(LIKELIEST, _OF_TEACHER, strict=True))
        found = super().compute(micro, outputs, heat)
        return {names[name]: values for name, values in found.items()}


_OF_TEACHER = ("teacher_log_probs", "teacher_top_ids", "teacher_top_log_probs")


def _result(score: float) -> dict[str, object]:
    try:
        return {"score": finite_number(score, "the model's score is")}
    except ValueError as error:
        return {"error": str(error)}


def micro_batches(
    batch: Batch, max_tokens: int, group: engine.Collective, whole_groups: bool = False
) -> list[Tensor]:
    """Indices of each micro-batch's samples, int64; deterministic, every sample once.

    Each has at most `max_tokens` tokens (prompt and response), except that a longer sample is alone
    and never cut. Neighbours with the same prompt stay together if they fit, since their prompt is
    computed once. With `whole_groups` the samples of a prompt group always do. Every rank of
    `group` gets as many as the one that needs most, if necessary empty ones.
    """
    families = _groups(batch) if whole_groups else _families(batch, max_tokens)

    lengths = batch.lengths("sequence")
    sizes = [int(lengths[family].sum()) for family in families]
    bins = pack(sizes, max_tokens)
    most_of_a_rank = int(group.max(float(len(bins))))
    if most_of_a_rank > len(bins):
        bins = pack(sizes, max_tokens, most_of_a_rank)

    indices = list[Tensor]()
    for bin in bins:
        samples = list[int]()
        for family in bin:
            samples += families[family]
        indices.append(torch.tensor(samples, dtype=torch.int64))

    return indices


def _families(batch: Batch, max_tokens: int) -> list[list[int]]:
    """Runs of samples with the same prompt, in order; one of more than `max_tokens` is cut."""
    families: list[list[int]] = []
    lengths = batch.lengths("sequence").tolist()
    prompts = batch.flat("prompt_ids").split(batch.lengths("prompt").tolist())

    room = 0
    for i, prompt in enumerate(prompts):
        if families and lengths[i] <= room and torch.equal(prompt, prompts[i - 1]):
            families[-1].append(i)
            room -= lengths[i]
        else:
            families.append([i])
            room = max_tokens - lengths[i]

    return families


def _groups(batch: Batch) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for i, number in enumerate(batch["group_index"].tolist()):
        groups.setdefault(number, []).append(i)
    return list(groups.values())


def model_inputs(
    micro: Batch, device: torch.device, before: int = 1, processor: ImageProcessor | None = None
) -> ModelInputs:
    """Response token t of a sequence is predicted from the position before it, prompt length + t −
    1; with `before` 0 the outputs are those at the token itself. Each conversation of a sample is a
    sequence; the output of its first token, which is given, is meaningless.

    A micro-batch without tokens becomes one token that predicts nothing, with zero gradient: every
    rank must run a sharded model equally often. Shared prefixes of neighbouring samples are found
    only if the micro-batch is on the CPU: reading from another device would wait for it. processor:
    of the images of prompts, for a model that reads them. The policy's tokens of a batch with
    `action_values` stand for these numbers. Raises ValueError for a sample without a prompt:
    nothing predicts its first token.
    """
    empty = (micro.lengths("prompt") < before) & (micro.lengths("response") > 0)
    if bool(empty.any()):
        index = int(empty.nonzero()[0])
        who = micro.flat("uid")[index] if "uid" in micro else f"number {index}"

        raise ValueError(
            f"sample {who} has an empty prompt: its first token cannot be predicted; add a BOS "
            "token"
        )

    ids = micro.flat("input_ids")
    lengths = micro.conversation_lengths()
    if not ids.numel():
        ids = ids.new_zeros(1)
        lengths = torch.ones(1, dtype=torch.int64)

    positions = send(micro.response_positions(), ids.device)
    images = None
    if processor is not None:
        images = _images(micro, processor, device)

    sharing = None
    if ids.device.type == "cpu" and images is None:
        sharing = shared_prefixes(ids, lengths)

    ids, predicting, targets = (
        send(each, device) for each in (ids, positions - before, ids[positions])
    )
    fields = None
    if "action_values" in micro:
        fields = next((own for own in micro.flat("number_head") if own), None)

    if fields is not None:
        head = make_head(fields)
        values, drawn = (
            send(micro.flat(name), device) for name in ("action_values", "response_mask")
        )
        numbers = NumberTargets(
            targets, values, drawn > 0, head.normals(targets, values.roll(head.dim))
        )
        return ModelInputs(ids, lengths, predicting, numbers, sharing, images)

    return ModelInputs(ids, lengths, predicting, targets, sharing, images)


def _images(micro: Batch, processor: ImageProcessor, device: torch.device) -> ImageInputs | None:
    """The images of a micro-batch's prompts; None if there are none. A placeholder that the policy
    drew is a token like any other."""
    held = micro.flat("images") if "images" in micro else []
    if not any(held):
        return None

    is_placeholder = (micro.flat("input_ids") == processor.token_id).cpu()
    is_drawn = torch.zeros_like(is_placeholder)
    lengths = micro.conversation_lengths().tolist()

    if "response_mask" in micro:
        is_drawn[micro.response_positions()] = (micro.flat("response_mask") > 0).cpu()
    else:
        is_drawn[micro.response_positions()] = True

    for places, drawn in zip(is_placeholder.split(lengths), is_drawn.split(lengths), strict=True):
        places[drawn.cumsum(0) > 0] = False
    num_forks = map(len, micro.flat("forks")) if "forks" in micro else [0] * len(held)

    apart = list[tuple[str, ...]]()
    for own, number in zip(held, num_forks, strict=True):
        apart += map(tuple, own or [()] * (number + 1))

    return ImageInputs(tuple(apart), send(is_placeholder.nonzero()[:, 0], device))


def sum_gradients(parameters: Iterable[nn.Parameter], group: engine.Collective) -> None:
    """Sum the gradients over the ranks. Those of sharded weights were summed during the backward
    pass."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if not isinstance(parameter, DTensor):
            parameter.grad = group.sum(parameter.grad)


def clip_gradients(parameters: Collection[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale gradients down to `max_norm` if above; returns their previous norm, a scalar.

    The norm includes all shards and is the same on every rank. Nothing waits for it: if it is not
    finite, neither are the gradients, before and after, and the caller drops them.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]

    # Gradients with the same layout share one reduction.
    norms = [whole(get_total_norm(alike)) for alike in _alike(gradients)]
    norm = norms[0] if len(norms) == 1 else get_total_norm(norms)

    if max_norm is not None:
        for alike in _alike(parameters):
            clip_grads_with_norm_(alike, max_norm, norm)

    return norm


def _alike(tensors: Iterable[AnyTensor]) -> list[list[AnyTensor]]:
    """Tensors grouped by mesh and placement."""
    found: dict[object, list[AnyTensor]] = {}
    for tensor in tensors:
        layout: object = None
        if isinstance(tensor, DTensor):
            layout = (tensor.device_mesh, tensor.placements)
        found.setdefault(layout, []).append(tensor)

    return list(found.values())


def checkpoint_activations(model: nn.Module) -> None:
    """Enable activation checkpointing in training mode, in the form that works with packed forwards
    and adapters.

    Raises UserError if the family does not support it.
    """
    causal = unwrapped(model)

    # transformers renamed it in 5.x, and warns about the old name
    enable = getattr(causal, "activation_checkpointing_enable", None)
    if enable is None:
        enable = causal.gradient_checkpointing_enable

    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise UserError(f"enable_gradient_checkpointing is on, but {error}") from error


def _read_sums(shares: Sequence[engine.Sums], norm: Tensor) -> tuple[engine.Counts, float]:
    """The sums over micro-batches of each statistic, and the norm, as numbers. They are read
    together: it is the only time that a step waits for its device."""
    names = list[str]()
    values = list[Tensor | float]()
    for share in shares:
        names += share.keys()
        values += share.values()

    *numbers, norm_as_number = read_numbers([*values, norm])
    sums: engine.Counts = {"loss": 0.0}
    for name, number in zip(names, numbers, strict=True):
        sums[name] = sums.get(name, 0.0) + number
    return sums, norm_as_number


class TorchTrainEngine(TorchScorer):
    """Trains `model`, whose parameters are float32, with `optimizer` over the trainable ones.

    Losses and gradients of micro-batches add up: the loss function weighs each by the counts of the
    whole mini-batch, so the gradient does not depend on how the mini-batch was divided, over
    micro-batches or over ranks. The model's weights are whole on every rank, or sharded over the
    ranks (`models/sharding.py`); then all ranks of the mesh make the same calls, and each changes
    its own part of weights and moments.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        max_grad_norm: float | None = 1.0,
        gradient_checkpointing: bool = False,
        merge_adapter: bool = True,
        group: engine.Collective | None = None,
        **scoring: Unpack[ScorerOptions],
    ) -> None:
        """max_grad_norm: gradients above it are scaled down to it; None for no limit.
        gradient_checkpointing: keep only each layer's input, and recompute the layer in the
        backward pass. merge_adapter: whether `weights` have an adapter merged. group: the ranks
        that share the mini-batch; each sees its own part, all take the same step, bit for bit.
        Raises UserError for trainable weights that are not float32.
        """
        super().__init__(model, group=group or engine.OneRank(), **scoring)
        self.optimizer = optimizer
        self.schedule = schedule
        self.max_grad_norm = max_grad_norm
        self.merge_adapter = merge_adapter
        self.num_steps = 0
        self._device = self.device
        self._trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}

        # always, except for its buffers
        self._is_on_host = next(model.parameters()).device.type != self._device.type
        self._base_lrs = [float(group["lr"]) for group in optimizer.param_groups]

        for name, parameter in self._trainable.items():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                raise UserError(
                    f"weights that are trained must be float32 ({name} is not): load the model in "
                    "float32 and set compute_dtype to the precision wanted, or small updates would "
                    "be rounded away"
                )

        if gradient_checkpointing:
            checkpoint_activations(model)

    def train_step(self, batch: Batch, loss_fn: engine.LossFn) -> dict[str, float]:
        """One optimizer step over a mini-batch (this rank's part of it, which may be empty).

        A non-finite loss or gradient norm skips the step: weights, optimizer and schedule are
        unchanged. So does a mini-batch in which no token counts over all ranks, since momentum and
        weight decay would move weights. Returns `loss`, `grad_norm` (before clipping), `lr`,
        `skipped` (0 or 1), `empty` (1 if skipped for lack of tokens), and, unless empty, the loss
        function's own metrics.
        """
        self.model.train()
        counts = self.group.sum(loss_fn.counts(batch))
        factor = self.schedule(self.num_steps)
        lrs = [base * factor for base in self._base_lrs]
        if counts.get("tokens") == 0:
            return {"loss": 0.0, "grad_norm": 0.0, "lr": lrs[0], "skipped": 1.0, "empty": 1.0}

        whole_groups = engine.compares_samples(loss_fn)
        shares = list[engine.Sums]()
        for index in micro_batches(batch, self.max_tokens, self.group, whole_groups):
            loss_share, stats = self._loss(batch.select(index), loss_fn, counts)
            if loss_share.requires_grad:
                loss_share.backward()
            shares.append({"loss": loss_share.detach(), **stats})
            del loss_share  # and its graph, before the next one is built

        sum_gradients(self._trainable.values(), self.group)
        norm = clip_gradients(self._trainable.values(), self.max_grad_norm)
        own_sums, grad_norm = _read_sums(shares, norm)
        sums = self.group.sum(own_sums)
        loss = sums.pop("loss")
        skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
        if not skipped:
            self._step(lrs)
        self.optimizer.zero_grad(set_to_none=True)

        return {
            **loss_fn.finish(sums, counts),
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lrs[0],
            "skipped": float(skipped),
            "empty": 0.0,
        }

    def _loss(
        self, micro: Batch, loss_fn: engine.LossFn, counts: engine.Counts
    ) -> tuple[Tensor, engine.Sums]:
        """A micro-batch's share of the loss, and the loss function's statistics."""
        flat = self.compute(micro, loss_fn.outputs)
        micro = micro.to(self.device)
        padded = {name: micro.pad(values, "response") for name, values in flat.items()}
        return loss_fn(padded, micro, counts)

    def _step(self, lrs: list[float]) -> None:
        move_optimizer_state(self.optimizer, next(iter(self._trainable.values())).device)
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr
        self.optimizer.step()
        self.num_steps += 1

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights by their Hugging Face names, tied ones once, with an adapter merged, or its
        weights beside them; others are the model's own storage.

        A sharded weight is gathered when read, by all ranks together.
        """
        for name, tensor in named_weights(self.model, self.merge_adapter):
            yield name, whole(tensor)

    def state(self) -> engine.TrainState:
        """Everything that training changes: trainable weights, the optimizer's state, the number of
        steps taken.

        The tensors are live: copy or write them before the next step. Sharded ones are `DTensor`s,
        of which each rank has its part.
        """
        tensors = {engine.MODEL_PREFIX + name: p.detach() for name, p in self._trainable.items()}
        moments, meta = optimizer_state(self.optimizer, self._trainable)
        for name, tensor in moments.items():
            tensors[engine.OPTIMIZER_PREFIX + name] = tensor
        return engine.TrainState(tensors, {"num_steps": self.num_steps, "optimizer": meta})

    def load_state(self, state: engine.TrainState) -> None:
        """Resume, bit for bit, from the result of `state`. Rates and other options remain this
        engine's.

        For a sharded model, tensors have the same sharding or are whole: each rank takes its part.
        Raises ValueError, with nothing changed, if the weights' names or shapes or the optimizer
        differ.
        """
        own = self._trainable
        weights = state.trained_weights()
        different = sorted(own.keys() ^ weights.keys())
        if not different:
            different = [name for name, p in own.items() if p.shape != weights[name].shape]

        if different:
            raise ValueError(
                f"the state is of another model: {len(different)} weights differ in name or shape, "
                f"{different[0]} first; resume with the run's original model (and lora_rank)"
            )

        moments = dict[str, Tensor]()
        for name, tensor in state.tensors.items():
            if name.startswith(engine.OPTIMIZER_PREFIX):
                moments[name.removeprefix(engine.OPTIMIZER_PREFIX)] = tensor

        load_optimizer_state(self.optimizer, own, moments, state.meta["optimizer"])
        for name, parameter in own.items():
            fill(parameter, weights[name])
        self.num_steps = int(state.meta["num_steps"])

    def offload(self, weights: bool = True, moments: bool = True) -> None:
        host = torch.device("cpu")
        if weights and not self._is_on_host:
            self.model.to(host)
        if moments:
            move_optimizer_state(self.optimizer, host)
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    def onload(self) -> None:
        if not self._is_on_host:
            self.model.to(self._device)
