"""A model that a client trains: a LoRA adapter over the base that all share, with gradients that
add up until a step, and an optimizer of its own."""

import copy
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from distflow.data.bin_packing import pack
from distflow.device_transfer import send
from distflow.models.lora import ADAPTER_CONFIG, merge_adapter
from distflow.models.packed_forward import ModelInputs
from distflow.models.packed_layout import shared_prefixes
from distflow.models.row_adapters import (
    PREFIX,
    RowAdaptedLinear,
    make_row_adaptable,
    new_adapter,
    row_adapter,
    rows_with,
    write_adapter_config,
)
from distflow.observe.crash_safe_files import read_object
from distflow.tinker.losses import LOSSES, Loss, Settings
from distflow.tinker.messages import BadRequest, Datum, PassRequest
from distflow.tinker.model_memory import ModelMemory
from distflow.training.engine import Collective, OneRank
from distflow.training.optimizer import (
    load_optimizer_state,
    make_optimizer,
    move_optimizer_state,
    optimizer_state,
)
from distflow.training.torch_engine import TorchScorer, clip_gradients, sum_gradients
from distflow.untrusted_files import check_tensors, read_file

_WEIGHTS = "adapter_model.safetensors"
_MOMENTS = "optimizer.safetensors"
_GRADIENTS = "gradients.safetensors"
_STATE = "distflow.json"
_VARIANTS = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save")
_BYTES = 16
"""For each trained number: itself, its gradient and two moments."""
_MOST_RANK = 4096


@dataclass(frozen=True)
class AdapterConfig:
    """Where an adapter is, and how it starts."""

    rank: int | None
    """None for no adapter but all weights, of a copy of the base."""
    seed: int
    attention: bool
    """On the projections of attention."""
    mlp: bool
    """On all other linear layers but the output head."""
    alpha: float = 32.0
    """By default what the Tinker API scales adapters by, whatever their rank."""
    layers: Sequence[str] = ()
    """On these instead, by their whole names."""


@dataclass(frozen=True)
class StepOptions:
    """Of one step of AdamW. grad_clip_norm: 0 for no limit."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class SharedBase:
    """The base model under all adapters, and the weights of the models in memory. Used by one
    thread."""

    def __init__(
        self,
        model: PreTrainedModel,
        compute_dtype: torch.dtype | None,
        memory: ModelMemory,
        group: Collective | None = None,
    ) -> None:
        """model: is frozen. group: the workers with a copy, which sum their gradients."""
        self.memory = memory
        self.group = group or OneRank()
        self.digest = _digest(model)
        make_row_adaptable(model.requires_grad_(False))
        self.vocabulary = model.config.get_text_config().vocab_size
        self._model = model
        self._compute_dtype = compute_dtype
        self._adapters: dict[str, dict[str, nn.Parameter]] = {}
        self._copies: dict[str, PreTrainedModel] = {}
        """Of the base, by the models that train all of its weights."""

    def num_bytes(self, config: AdapterConfig) -> int:
        """Of a model's weights, their gradients and its optimizer's state."""
        if config.rank is None:
            return _BYTES * self._model.num_parameters()
        layers = _linear_layers(self._model, config).values()
        return _BYTES * config.rank * sum(each.in_features + each.out_features for each in layers)

    def add(self, name: str, config: AdapterConfig) -> None:
        """Raises BadRequest for an adapter of nothing, or of more than the layers have."""
        if config.rank is None:
            self._copies[name] = copy.deepcopy(self._model).float().requires_grad_(True)
            return

        layers = _linear_layers(self._model, config)
        if not 1 <= config.rank <= _MOST_RANK or not layers:
            raise BadRequest(
                f"lora_config of rank {config.rank} for {len(layers)} layers: a rank is 1 to "
                f"{_MOST_RANK:,}, and one of train_attn and train_mlp is on"
            )
        self._adapters[name] = new_adapter(layers.values(), config.rank, config.seed)

    def remove(self, name: str) -> None:
        self._copies.pop(name, None)
        self._adapters.pop(name, None)

    def scorer(self, name: str) -> TorchScorer:
        """Of the model's own weights, or of the base inside `rows_with` of its adapter."""
        return TorchScorer(self._copies.get(name, self._model), compute_dtype=self._compute_dtype)

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        """Of that model, by their names in files; empty if it is not in memory."""
        if name in self._copies:
            return dict(self._copies[name].named_parameters())
        return self._adapters.get(name, {})

    def write_config(self, name: str, config: AdapterConfig, folder: Path) -> None:
        """What PEFT or transformers need beside the weights."""
        if config.rank is None:
            self._copies[name].config.save_pretrained(folder)
            return

        paths = [*_linear_layers(self._model, config)]
        write_adapter_config(folder, self._model, config.rank, config.alpha, paths)


def _digest(model: nn.Module) -> str:
    """Tells base models apart, not the types of their weights."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        some = parameter.detach().flatten()[:64].bfloat16().float()
        found.update(some.cpu().numpy().tobytes())
    return found.hexdigest()


def _linear_layers(model: PreTrainedModel, config: AdapterConfig) -> dict[str, RowAdaptedLinear]:
    found = {}
    for path, module in model.named_modules():
        if not isinstance(module, RowAdaptedLinear):
            continue

        is_attention = "attn" in path or "attention" in path
        is_chosen = config.attention if is_attention else config.mlp
        if path in config.layers or is_chosen and not config.layers:
            found[path] = module
    return found


class TrainedAdapter:
    """Its methods are called by one thread."""

    def __init__(self, base: SharedBase, name: str, config: AdapterConfig) -> None:
        """Raises BadRequest."""
        self._base = base
        self._name = name
        self.config = config
        self.num_bytes = base.num_bytes(config)
        self.num_steps = 0
        base.memory.use(name, self)
        try:
            self._begin()
        except BaseException:
            base.memory.forget(name)
            raise

    def run(self, request: PassRequest) -> tuple[list[Tensor], dict[str, float]]:
        """The log-probs of each datum's targets, and metrics; unless it is `forward_only`,
        gradients of the summed loss are added. Raises BadRequest, with no gradient added."""
        self._base.memory.use(self._name, self)
        loss = LOSSES.get(request.loss)
        if loss is None:
            known = ", ".join(LOSSES)
            raise BadRequest(
                f"loss_fn is {request.loss!r:.60}; there are {known} (the formula of "
                "stable_reinforce is not published: use importance_sampling)"
            )

        settings = {**loss.settings, **request.settings}
        if unknown := sorted(settings.keys() - loss.settings.keys()):
            raise BadRequest(f"loss_fn_config.{unknown[0]} is no setting of {request.loss}")

        data = [_with_inputs(number, each, loss.inputs) for number, each in enumerate(request.data)]

        scorer = self._base.scorer(self._name)
        scorer.model.train(not request.forward_only)
        vocabulary = self._base.vocabulary
        for number, datum in enumerate(data):
            _check_tokens(number, datum, vocabulary)

        log_probs: list[Tensor] = [torch.empty(0)] * len(data)
        total = 0.0

        before = self.gradients()
        try:
            for bin in pack([len(each.token_ids) for each in data], scorer.max_tokens):
                with torch.set_grad_enabled(not request.forward_only), self._in_rows():
                    share, of_bin = _share(scorer, loss, settings, data, bin)
                for index, own in zip(bin, of_bin, strict=True):
                    log_probs[index] = own

                if share.requires_grad:
                    share.backward()
                total += float(share.detach())
        except BaseException:
            self.set_gradients(before)
            raise

        return log_probs, {"loss:sum": total}

    def _in_rows(self) -> AbstractContextManager[None]:
        """Inside, the base has this adapter; nothing changes without one."""
        if self.config.rank is None:
            return nullcontext()

        scale = self.config.alpha / self.config.rank
        return rows_with([row_adapter(self._parameters, scale)])

    def step(self, options: StepOptions) -> dict[str, float]:
        """One step of AdamW on the gradients so far, which are then forgotten. Raises BadRequest if
        there are none, or if they are not finite; then nothing is trained."""
        self._base.memory.use(self._name, self)
        own = self._parameters.values()
        among = self._base.group
        if not among.max(float(any(each.grad is not None for each in own))):
            raise BadRequest("optim_step without gradients: call forward_backward first")

        if among.size > 1:
            sum_gradients(own, among)
        norm = float(clip_gradients(list(own), options.grad_clip_norm or None))
        if not math.isfinite(norm):
            self._optimizer.zero_grad(set_to_none=True)
            raise BadRequest(f"the gradient's norm is {norm}: the step is skipped, nothing changed")

        for group in self._optimizer.param_groups:
            group["lr"] = options.learning_rate
            group["betas"] = (options.beta1, options.beta2)
            group["eps"] = options.eps
            group["weight_decay"] = options.weight_decay

        move_optimizer_state(self._optimizer, next(iter(own)).device)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1

        return {"grad_norm": norm, "learning_rate": options.learning_rate}

    def gradients(self) -> dict[str, Tensor | None]:
        """Copies of those so far."""
        self._base.memory.use(self._name, self)
        return {name: _clone(each.grad) for name, each in self._parameters.items()}

    def set_gradients(self, gradients: Mapping[str, Tensor | None]) -> None:
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name]

    def save(self, folder: Path, with_optimizer: bool, metadata: object = None) -> None:
        """Write a folder that PEFT loads too, or for all weights transformers. metadata: JSON data
        of the client."""
        self._base.memory.use(self._name, self)
        weights = {name: each.detach() for name, each in self._parameters.items()}
        save_file(_on_host(weights), folder / _file_of(self.config), {"format": "pt"})
        self._base.write_config(self._name, self.config, folder)

        config = asdict(self.config)
        state = {"config": config, "num_steps": self.num_steps, "user_metadata": metadata}
        state["base"] = self._base.digest
        if with_optimizer:
            moments, meta = optimizer_state(self._optimizer, self._parameters)
            save_file(_on_host(moments), folder / _MOMENTS)
            state["optimizer"] = meta

        (folder / _STATE).write_text(json.dumps(state))

    def load(self, folder: Path, with_optimizer: bool) -> None:
        """Take weights, and on request the optimizer's state. Raises BadRequest, with nothing
        changed, for an adapter of another form."""
        self._base.memory.use(self._name, self)
        state = read_state(folder)
        config = AdapterConfig(**state["config"])
        weights = load_file(check_tensors(folder / _file_of(config), folder))
        fits = weights.keys() == self._parameters.keys() and all(
            weights[name].shape == each.shape for name, each in self._parameters.items()
        )
        if not fits or config.alpha != self.config.alpha:
            raise BadRequest(
                "the checkpoint is of an adapter of another rank or scale, or other layers"
            )

        if state.get("base", self._base.digest) != self._base.digest:
            raise BadRequest("the checkpoint is of another base model than this server has")

        if with_optimizer and "optimizer" not in state:
            raise BadRequest("the checkpoint has no state of the optimizer: it is for sampling")

        if with_optimizer:
            moments = load_file(check_tensors(folder / _MOMENTS, folder))
            load_optimizer_state(self._optimizer, self._parameters, moments, state["optimizer"])
        else:
            self._optimizer.state.clear()

        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])

        self._optimizer.zero_grad(set_to_none=True)
        self.num_steps = int(state["num_steps"])

    def to_disk(self, folder: Path) -> None:
        """With the gradients so far."""
        self.save(folder, with_optimizer=True)
        gradients = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                gradients[name] = parameter.grad
        save_file(_on_host(gradients), folder / _GRADIENTS)
        self._end()

    def from_disk(self, folder: Path) -> None:
        self._begin()
        self.load(folder, with_optimizer=True)
        for name, gradient in load_file(folder / _GRADIENTS).items():
            self._parameters[name].grad = send(gradient, self._parameters[name].device)

    def close(self) -> None:
        if self._base.memory.forget(self._name):
            self._end()

    def _begin(self) -> None:
        self._base.add(self._name, self.config)
        self._parameters = self._base.parameters(self._name)
        self._optimizer = make_optimizer("adamw", self._parameters.values(), lr=0.0)

    def _end(self) -> None:
        self._base.remove(self._name)
        self._parameters = {}
        del self._optimizer


def read_note(folder: Path) -> dict[str, Any]:
    """What `TrainedAdapter.save` noted, or what else is in its file; empty if there is none."""
    if not (folder / _STATE).exists():
        return {}
    found: dict[str, Any] = json.loads(read_file(folder / _STATE, folder))
    return found


def read_state(folder: Path) -> dict[str, Any]:
    """What `TrainedAdapter.save` noted: `config`, `num_steps`, `user_metadata`, `base`, and
    `optimizer` if it is there. Of another folder of PEFT or transformers, such as `distflow export`
    writes, the first two. Raises BadRequest."""
    found = read_note(folder)
    if "config" not in found:
        found = {"config": asdict(_config_of(folder)), "num_steps": 0}
    return found


def with_weights(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The base with the adapter of a checkpoint merged into it, or with its weights."""
    config = AdapterConfig(**read_state(folder)["config"])
    if config.rank is not None:
        return merge_adapter(model, str(folder))

    weights = load_file(check_tensors(folder / _file_of(config), folder))
    # tied ones are there once
    model.load_state_dict(weights, strict=False)
    return model


def _file_of(config: AdapterConfig) -> str:
    return "model.safetensors" if config.rank is None else _WEIGHTS


def _config_of(folder: Path) -> AdapterConfig:
    if (folder / "config.json").exists():
        return AdapterConfig(None, 0, attention=True, mlp=True)

    given = read_object(folder / ADAPTER_CONFIG, folder)
    if given.get("peft_type") != "LORA" or any(given.get(name) for name in _VARIANTS):
        raise BadRequest(f"the checkpoint is no LoRA adapter, or has one of {', '.join(_VARIANTS)}")

    layers = set()
    for name in load_file(check_tensors(folder / _WEIGHTS, folder)):
        layers.add(name.removeprefix(PREFIX).partition(".lora_")[0])

    rank = cast(int, given["r"])
    alpha = cast(float, given["lora_alpha"])
    return AdapterConfig(rank, 0, True, True, alpha, sorted(layers))


def _share(
    scorer: TorchScorer, loss: Loss, settings: Settings, data: Sequence[Datum], bin: Sequence[int]
) -> tuple[Tensor, list[Tensor]]:
    """The summed loss of the data at these indices, and the log-probs of each one's targets."""
    passed = _forward(scorer, [data[index] for index in bin])
    total = torch.zeros((), device=scorer.device)

    for index, log_probs in zip(bin, passed, strict=True):
        inputs = {name: send(each, scorer.device) for name, each in data[index].inputs.items()}
        try:
            total = total + loss.compute(log_probs, inputs, settings)
        except ValueError as error:
            raise BadRequest(f"datum {index}: {error}") from error

    return total, [each.detach() for each in passed]


def _forward(scorer: TorchScorer, data: Sequence[Datum]) -> list[Tensor]:
    """The log-probs of each datum's targets, in their shape."""
    ids = torch.cat([each.token_ids for each in data])
    own = [each.inputs["target_tokens"] for each in data]
    columns = [each.reshape(len(each), -1) for each in own]
    widest = max(each.shape[1] for each in columns)
    targets = torch.cat([nn.functional.pad(each, (0, widest - each.shape[1])) for each in columns])
    lengths = torch.tensor([len(each.token_ids) for each in data])
    device = scorer.device
    sharing = shared_prefixes(ids, lengths)
    positions = torch.arange(len(ids))
    inputs = ModelInputs(
        send(ids, device), lengths, send(positions, device), send(targets, device), sharing
    )
    log_probs = scorer.run(inputs, ("log_probs",), 1.0)["log_probs"]

    found = list[Tensor]()
    for each, column, passed in zip(own, columns, log_probs.split(lengths.tolist()), strict=True):
        found.append(passed[:, : column.shape[1]].reshape(each.shape))
    return found


def _with_inputs(number: int, datum: Datum, wanted: Sequence[str]) -> Datum:
    inputs: Mapping[str, Tensor] = datum.inputs
    if "weights" in wanted and "weights" not in inputs:
        ones = torch.ones(datum.inputs["target_tokens"].shape)
        return Datum(datum.token_ids, {**inputs, "weights": ones})

    for name in wanted:
        if name not in inputs:
            raise BadRequest(f"datum {number}: loss_fn_inputs has no {name}")

    return datum


def _check_tokens(number: int, datum: Datum, vocabulary: int) -> None:
    for name, ids in (
        ("model_input", datum.token_ids),
        ("target_tokens", datum.inputs["target_tokens"]),
    ):
        if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise BadRequest(
                f"datum {number}: {name} has a token outside of the vocabulary of {vocabulary:,}"
            )


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def _clone(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()
