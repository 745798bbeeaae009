"""`distflow doctor --device`: finds problems of a first run on an accelerator. Each check compares
the device with the CPU, or a config's needs with the device's resources, and reports in one line
what it found and what to do.
"""

import asyncio
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, PreTrainedModel

from distflow.config import Config
from distflow.config.derived_settings import is_sharded, offload_keys
from distflow.config.keys.reward import scoring_models
from distflow.data.batch import Batch
from distflow.data.sample import Segment
from distflow.errors import TrustError, UserError, first_line
from distflow.launch.configured_models import (
    Source,
    critic_source,
    policy_adapter,
    policy_limits,
    policy_source,
    scoring_source,
)
from distflow.launch.devices import accelerator
from distflow.launch.rollout_engines import engine_dtype, shares_weights
from distflow.launch.select_pipeline import bind
from distflow.models.loading import ModelSource, load_model, load_tokenizer
from distflow.models.sharding import empty_model
from distflow.planning.model_memory import cache_in_advance, frozen_bytes, trained_bytes
from distflow.rollout.conformance import Finding
from distflow.rollout.embedded import EmbeddedEngine
from distflow.rollout.engine import GenerateRequest, SamplingParams, Stream
from distflow.scheduling.group_states import Version
from distflow.training.torch_engine import TorchScorer

OK = "ok"
WARNING = "warning"
FAILED = "failed"
LEFT_OUT = "left out"
"""Outcomes; after a failed check a run would be wrong or impossible."""
EXACT: Final = 1e-4
"""Limit for float32 against the CPU. Sums in another order differ by 1e-6; products rounded to TF32
by 1e-3."""
_DRIVER: Final = Path("/proc/driver/nvidia/version")
_LENGTHS: Final = ((5, 9), (1, 14), (12, 1), (8, 30), (3, 64), (40, 33))

Result = tuple[str, str]
"""The outcome, and its figures or what to do."""


@dataclass(frozen=True)
class Subject:
    """The device, the config to run on it, and a folder with tiny models, of which `policy` is
    compared on both sides. tokenizer: of these."""

    config: Config
    device: torch.device
    folder: Path
    tokenizer: str

    @cached_property
    def models(self) -> dict[str, PreTrainedModel]:
        return {
            device: load_model(self.folder / "policy", device=device)
            for device in ("cpu", self.device.type)
        }

    @cached_property
    def batch(self) -> Batch:
        """A batch of random tokens."""
        draws = torch.Generator().manual_seed(0)
        prompts, responses = torch.tensor(_LENGTHS).unbind(1)
        batch = Batch(prompts, responses)
        vocabulary = self.models["cpu"].config.vocab_size
        for name, lengths in (("prompt_ids", prompts), ("response_ids", responses)):
            batch[name] = torch.randint(vocabulary, (int(lengths.sum()),), generator=draws)
        return batch

    def log_probs(self, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """The trainer's log-probs."""
        scorer = TorchScorer(self.models[device], compute_dtype=dtype)
        return scorer.forward(self.batch, ("log_probs",)).flat("log_probs").double()

    @cached_property
    def expected(self) -> tuple[Tensor, Tensor]:
        """Log-probs on the CPU, in float32 and in bfloat16."""
        return self.log_probs("cpu"), self.log_probs("cpu", torch.bfloat16)


class Check(NamedTuple):
    """advice: what to do if it fails."""

    run: Callable[[Subject], Result]
    advice: str


def try_check(name: str, check: Check, subject: Subject) -> Finding:
    try:
        outcome, text = check.run(subject)
    except (RuntimeError, UserError, TrustError) as error:  # torch's errors are RuntimeErrors
        outcome = FAILED
        text = f"{type(error).__name__}: {first_line(error)}"
    return Finding(name, outcome, f"{text}: {check.advice}" if outcome == FAILED else text)


def find_device(wanted: str) -> Finding:
    """The device of `trainer.device`; "left out" if it is the CPU and there is no other."""
    found = accelerator()
    driver = _nvidia_driver()
    if found is None and driver:
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        text = (
            f"there is the NVIDIA driver {driver}, but torch {torch.__version__}, {built}, finds "
            "no device: install"
        )
        advice = (
            " a build for a CUDA that the driver knows (nvidia-smi shows it), or look at "
            "CUDA_VISIBLE_DEVICES"
        )
        return Finding("device", FAILED, text + advice)
    if wanted not in ("auto", "cpu", found):
        has = f"only {found}" if found else "no accelerator"
        text = f"trainer.device={wanted}, but torch finds {has} here: set trainer.device=auto"
        return Finding("device", FAILED, text)
    if found is None:
        return Finding(
            "device", LEFT_OUT, "torch finds no accelerator here: runs compute on the CPU"
        )
    if wanted == "cpu":
        return Finding(
            "device", LEFT_OUT, f"trainer.device=cpu: the {found} device here would not be used"
        )
    name, (free, total) = (
        torch.get_device_module(found).get_device_name(),
        torch.accelerator.get_memory_info(),
    )
    text = (
        f"{found}: {name}, {_gib(free)} of {_gib(total)} GiB "
        f"free{driver and f', NVIDIA driver {driver}'}"
    )
    return Finding("device", OK, text)


def _nvidia_driver() -> str:
    """The driver's version; "" if there is none."""
    number = re.search(r"\s(\d+\.\d[\d.]*)\s", _DRIVER.read_text() if _DRIVER.is_file() else "")
    return number[1] if number else ""


def _build(subject: Subject) -> Result:
    text = f"torch {torch.__version__}"
    if subject.device.type != "cuda" or torch.version.hip:
        return OK, text
    major, minor = torch.cuda.get_device_capability()
    kernels = " ".join(torch.cuda.get_arch_list())
    wanted = 10 * major + minor
    has = [(kind, int(number)) for kind, number in re.findall(r"(sm|compute)_(\d+)", kernels)]
    # Kernels run on later minor versions; code of a "compute" version is translated for every later
    # device.
    fits = any(
        number <= wanted and (kind == "compute" or number // 10 == major) for kind, number in has
    )
    text += f" for CUDA {torch.version.cuda}, the device is sm_{wanted}"
    return (OK, text) if fits else (FAILED, f"{text}, and torch has kernels for {kernels}")


def _count(subject: Subject) -> Result:
    found = torch.accelerator.device_count()
    trainer = subject.config.trainer
    text = f"{found} here, {trainer.n_gpus_per_node} on each machine in the config"
    return FAILED if trainer.nnodes == 1 and trainer.n_gpus_per_node > found else OK, text


def _kernels(subject: Subject) -> Result:
    draws = torch.Generator().manual_seed(0)
    x, y = (torch.randn(shape, generator=draws) for shape in ((64, 96), (96, 48)))
    index = torch.randint(64, (200,), generator=draws)

    def results(x: Tensor, y: Tensor, index: Tensor) -> dict[str, Tensor]:
        return {
            "product": x @ y,
            "softmax": x.softmax(-1),
            "silu": torch.nn.functional.silu(x),
            "cumulative sum": x.cumsum(-1),
            "sort": x.sort(-1, descending=True).values,
            "index_put": torch.zeros_like(x).index_put((index,), x[index], accumulate=True),
            "integers": (index * -7046029254386353131) >> 30,
        }

    found = results(x.to(subject.device), y.to(subject.device), index.to(subject.device))
    exact = results(x.double(), y.double(), index)
    errors = {name: _largest(found[name].cpu().double(), exact[name].double()) for name in exact}
    worst = max(errors, key=lambda name: errors[name])
    text = (
        f"{worst} differs by {errors[worst]:.0e} from float64 on the CPU, the limit is {EXACT:.0e}"
    )
    return OK if errors[worst] <= EXACT else FAILED, text


def _copies(subject: Subject) -> Result:
    """Tests copies to the device, as in `device_transfer.send`, and back."""
    host = torch.randint(256, (2**26,), dtype=torch.uint8).pin_memory()
    there = torch.empty_like(host, device=subject.device)
    back = torch.empty_like(host, pin_memory=True)
    rates = []
    for target, source in 2 * ((there, host), (back, there)):  # the first of each initialises
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()
        rates.append(host.nbytes / (time.perf_counter() - start) / 1e9)
    if not torch.equal(host, back):
        return FAILED, "what came back is not what was copied"
    return OK, f"{rates[2]:.1f} GB/s to the device, {rates[3]:.1f} GB/s back, pinned"


def _dtype(subject: Subject, dtype: torch.dtype) -> Result:
    one = torch.ones(2, 2, device=subject.device)
    with torch.autocast(one.device.type, dtype=dtype, enabled=dtype != torch.float32):
        computed = (one @ one).dtype
    if computed != dtype:
        return FAILED, f"products under autocast are in {computed}"
    error, limit = _error(subject, dtype)
    return (
        OK if error <= limit else FAILED,
        f"they differ by {error:.1e} from float32 on the CPU (limit {limit:.1e})",
    )


def _attention(subject: Subject, kind: SDPBackend) -> Result:
    """Tests one of the attention implementations among which torch chooses. `overrideable` is that
    of accelerators other than CUDA."""
    found = []
    dtypes = (torch.float32, torch.bfloat16)
    for dtype in (
        () if kind is SDPBackend.OVERRIDEABLE and subject.device.type == "cuda" else dtypes
    ):
        try:
            # on why it is not for this device
            with sdpa_kernel([kind]), warnings.catch_warnings(action="ignore"):
                error, limit = _error(subject, dtype)
        except RuntimeError as refusal:
            if not re.search("No (available kernel|viable backend)", str(refusal)):
                raise
            continue
        found.append(f"{dtype} {error:.1e} (limit {limit:.1e})")
        if not error <= limit:
            return FAILED, f"log-probs differ by {found[-1]}, and torch may choose it by itself"
    return (
        (OK, f"log-probs differ by {', '.join(found)}")
        if found
        else (LEFT_OUT, "not for this device")
    )


def _error(subject: Subject, dtype: torch.dtype) -> tuple[float, float]:
    """Error of log-probs against float32 on the CPU, and its limit: of the maximum in float32, the
    mean in bfloat16."""
    found, (exact, rounded) = subject.log_probs(subject.device.type, dtype), subject.expected
    if dtype == torch.float32:
        return _largest(found, exact), EXACT
    return _mean_error(found, exact), 2 * _mean_error(rounded, exact) + 1e-3


def _generated(subject: Subject, device: str, enforce_eager: bool) -> tuple[list[Segment], int]:
    """Responses of the embedded engine, and the number of recorded graphs."""
    model = subject.models[device]
    tokenizer = load_tokenizer(subject.tokenizer)
    engine = EmbeddedEngine(
        model, tokenizer, version=Version(0, 0), max_num_seqs=4, enforce_eager=enforce_eager
    )

    async def generate() -> list[Segment]:
        async with engine:
            request = GenerateRequest(
                (5, 6, 7), (0, 1, 2, 3), SamplingParams(32), Stream(1, "check", 0, 0)
            )
            return list(await engine.generate(request))

    return asyncio.run(generate()), engine.num_graphs


def _decode(subject: Subject) -> Result:
    return _same_responses(
        *(_generated(subject, device, True)[0] for device in (subject.device.type, "cpu"))
    )


def _graphs(subject: Subject) -> Result:
    if subject.device.type != "cuda":
        return LEFT_OUT, f"{subject.device.type} has none"
    (replayed, number), (plain, _) = (_generated(subject, "cuda", eager) for eager in (False, True))
    if not number:
        return FAILED, "no decode step could be captured"
    outcome, text = _same_responses(replayed, plain)
    return outcome, f"{number} captured, {text}"


def _same_responses(found: list[Segment], expected: list[Segment]) -> Result:
    if [each.token_ids for each in found] != [each.token_ids for each in expected]:
        return FAILED, "other tokens are drawn than they should be"
    one, other = (
        torch.tensor([n for each in side for n in each.rollout_log_probs])
        for side in (found, expected)
    )
    error = _largest(one, other)
    text = f"the same tokens, log-probs differ by {error:.1e}, the limit is {EXACT:.0e}"
    return OK if error <= EXACT else FAILED, text


def _memory(subject: Subject) -> Result:
    config = subject.config
    if not config.actor_rollout_ref.model.path:
        return (
            LEFT_OUT,
            "there is no model: name a config, and actor_rollout_ref.model.path, after --device",
        )
    if config.trainer.allocation or config.trainer.devices:
        return (
            LEFT_OUT,
            "trainer.allocation and trainer.devices place models on different devices: not counted",
        )
    torch.accelerator.empty_cache()
    free, _ = torch.accelerator.get_memory_info()
    parts = resident_bytes(config)
    token_bytes = kv_bytes_of_token(config)
    total = sum(parts.values())
    length = config.data.max_prompt_length + config.data.max_response_length
    listed = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())
    text = f"{listed}: {_gib(total)} of {_gib(free)} GiB free, without activations"
    if offloads := offload_keys(config):
        text += f" and before offloading ({', '.join(offloads)})"
    if total + length * token_bytes > free:
        return WARNING if offloads else FAILED, text
    trained = parts["gradients"] + parts["optimizer"]
    rollout = config.actor_rollout_ref.rollout
    context = policy_limits(config).context
    kept = cache_in_advance(config, free - (total - trained), token_bytes, context) or 0.0
    kept *= not rollout.free_cache_engine
    if total + kept > free and not offloads:
        text += (
            f"; the embedded engine, which generates first, keeps {_gib(kept)} for keys and values"
        )
        return FAILED, f"{text}: set actor_rollout_ref.rollout.free_cache_engine=true, or"
    fitting = int((free - total) // (length * token_bytes))
    wanted = rollout.max_num_seqs
    text += (
        f"; in the rest fit keys and values of {fitting} responses of {length} tokens with their "
        "prompts"
    )
    return (
        (OK, text)
        if fitting >= wanted
        else (WARNING, f"{text}, and max_num_seqs={wanted}: others wait")
    )


def resident_bytes(config: Config) -> dict[str, float]:
    """Memory on one device while the pipeline's models are trained, without activations, keys and
    values."""
    engines = bind(config).engines
    trainer = config.trainer
    settings = config.actor_rollout_ref
    adapt = policy_adapter(config)
    policy = _empty(policy_source(config))
    whole = policy.num_parameters()
    models = scoring_models(config.reward_model)
    actor = policy if adapt is None else adapt(policy)
    num_trained = sum(p.numel() for p in actor.parameters() if p.requires_grad)
    num_weights = sum(p.numel() for p in actor.parameters())
    parts = trained_bytes(num_weights, num_trained, settings.actor.optim.optimizer)
    if "critic" in engines:
        number = _empty(critic_source(config)).num_parameters()
        own = trained_bytes(number, number, config.critic.optim.optimizer)
        parts = {name: size + own[name] for name, size in parts.items()}
    if "ref" in engines and adapt is None:
        parts["reference"] = frozen_bytes(config, "ref", whole)
    ranks = trainer.nnodes * trainer.n_gpus_per_node if is_sharded(config) else 1
    found = {name: size / ranks for name, size in parts.items()}
    if "rollout" in engines and not shares_weights(config):
        found["rollout engine"] = float(engine_dtype(config).itemsize * whole)
    for name in engines & {*models}:
        size = frozen_bytes(config, name, _empty(scoring_source(config, name)[1]).num_parameters())
        size /= 1 if models[name].is_whole_judge else ranks
        found["reward models"] = found.get("reward models", 0.0) + size
    return found


def _empty(source: Source) -> PreTrainedModel:
    """A model without memory. A critic's head of one number is counted like a language model's."""
    return empty_model(AutoModelForCausalLM, ModelSource(**source).config())


def kv_bytes_of_token(config: Config) -> int:
    """Bytes of one token's keys and values in the rollout engine."""
    model = ModelSource(**policy_source(config)).config().get_text_config()
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    return int(2 * model.num_hidden_layers * heads * head_dim * engine_dtype(config).itemsize)


def _largest(found: Tensor, exact: Tensor) -> float:
    """The largest error, relative if the exact number is beyond 1; infinite for NaN."""
    error = ((found - exact).abs() / exact.abs().clamp(min=1)).max()
    return float(error.nan_to_num(nan=torch.inf))


def _mean_error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).abs().mean().nan_to_num(nan=torch.inf))


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}" if size >= 2**30 / 20 else f"{size / 2**30:.4f}"


_OTHER_TORCH: Final = "install another build of torch; if that does not help, test the device"
CHECKS: Final[dict[str, Check]] = {
    "build of torch": Check(
        _build, "install a build of torch for this device (https://pytorch.org/get-started)"
    ),
    "devices": Check(_count, "lower trainer.n_gpus_per_node, or look at CUDA_VISIBLE_DEVICES"),
    "kernels": Check(
        _kernels, f"unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE if it is set; else {_OTHER_TORCH}"
    ),
    "copies": Check(_copies, _OTHER_TORCH),
    **{
        f"log-probs, {name}": Check(
            partial(_dtype, dtype=dtype), f"do not train in {name} here; {_OTHER_TORCH}"
        )
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    },
    **{
        f"attention, {name.lower().removesuffix('_attention')}": Check(
            partial(_attention, kind=kind), _OTHER_TORCH
        )
        for name, kind in SDPBackend.__members__.items()
        if name != "ERROR"
    },
    "decode steps": Check(_decode, "set actor_rollout_ref.rollout.name=hf"),
    "CUDA graphs": Check(_graphs, "set actor_rollout_ref.rollout.enforce_eager=true"),
    "memory of the config": Check(
        _memory,
        (
            "set actor_rollout_ref.model.lora_rank, actor.strategy=fsdp over more devices, or a "
            "smaller model"
        ),
    ),
}
"""The checks by name, in order, except those of whole runs."""
