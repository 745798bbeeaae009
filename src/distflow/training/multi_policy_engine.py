"""Several policies in one run, for the agents of its episodes: each has its own model and train
engine, which computes its agents' conversations and takes its own optimizer steps."""

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from distflow.data.batch import Batch
from distflow.training.engine import MODEL_PREFIX, LossFn, TrainState
from distflow.training.torch_engine import TorchScorer, TorchTrainEngine


class PolicyModels(nn.Module):
    """The models of the policies. The name of a weight begins with its policy's name and a dot."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._modules |= models  # not in an attribute, whose name could be that of a policy
        self.config = next(iter(models.values())).config  # all have the same vocabulary


def models_of(model: nn.Module) -> dict[str, nn.Module]:
    """The models of several policies by name; a single policy's model has the name ""."""
    if isinstance(model, PolicyModels):
        return dict(model.named_children())
    return {"": model}


class PolicyScorer(TorchScorer):
    """The scorer of one of several policies. Outputs for other policies' conversations are 0, and
    not computed.

    policies: of each agent, in the order of the config; the first agent's conversation has no name.
    """

    def __init__(
        self, model: nn.Module, *, policy: str, policies: Mapping[str, str], **options: Any
    ) -> None:
        super().__init__(model, **options)
        self.policy = policy
        self._policies = policies

    def compute(
        self, micro: Batch, outputs: tuple[str, ...], heat: float | Tensor | None = None
    ) -> dict[str, Tensor]:
        conversations, places = self._cut(micro)
        heat = self.temperature_of(micro) if heat is None else heat
        if isinstance(heat, Tensor):
            heat = heat[places.to(heat.device)]

        places = places.to(self.device)
        size = int(micro.lengths("response").sum())
        found = super().compute(conversations, outputs, heat)
        return {
            name: flat.new_zeros(size).index_put((places,), flat) for name, flat in found.items()
        }

    def _cut(self, batch: Batch) -> tuple[Batch, Tensor]:
        """The policy's conversations as samples, and where their response tokens are in the flat
        columns of `batch`. Except in an episode's first conversation, the first token, which is
        given, serves as the prompt."""
        response = batch.flat("response_ids")
        num_prompt_tokens = batch.lengths("prompt").tolist()

        begin = 0  # of the sample's response
        prompt_end = 0
        prompts = [response[:0]]
        places = [torch.zeros(0, dtype=torch.int64)]
        for row, length in enumerate(batch.lengths("response").tolist()):
            prompt_start = prompt_end
            prompt_end += num_prompt_tokens[row]

            for number, (name, start, end) in enumerate(_conversations(batch, row, length)):
                if start == end or not self._is_own(name):
                    continue

                first = begin + start
                if number == 0:
                    prompts.append(batch.flat("prompt_ids")[prompt_start:prompt_end])
                    places.append(torch.arange(first, begin + end))
                else:
                    prompts.append(response[first : first + 1])
                    places.append(torch.arange(first + 1, begin + end))

            begin += length

        cut = Batch(_lengths(prompts[1:]), _lengths(places[1:]))
        cut["prompt_ids"] = torch.cat(prompts)
        place = torch.cat(places)
        cut["response_ids"] = response[place.to(response.device)]

        return cut, place

    def _is_own(self, name: str) -> bool:
        """Whether the policy speaks in conversations of this name."""
        first_policy = next(iter(self._policies.values()))
        return self._policies.get(name.partition(".")[0], first_policy) == self.policy


def _conversations(batch: Batch, row: int, length: int) -> Iterator[tuple[str, int, int]]:
    """The name, start and end of each conversation in a response of so many tokens."""
    name = ""
    start = 0
    if "forks" in batch:
        for next_name, next_start in batch["forks"][row]:
            yield name, start, next_start
            name = next_name
            start = next_start

    yield name, start, length


def _lengths(parts: Sequence[Tensor]) -> Tensor:
    return torch.tensor([len(part) for part in parts], dtype=torch.int64)


class PolicyTrainer(PolicyScorer, TorchTrainEngine):
    """The trainer of one of several policies; see `PolicyScorer`."""

    def own(self, batch: Batch) -> Batch:
        """The samples with a `loss_mask` of only the policy's own tokens."""
        own = batch.only(batch.names)
        is_own = torch.zeros(int(batch.lengths("response").sum()))
        is_own[self._cut(batch)[1]] = 1.0
        own["loss_mask"] = batch.flat("loss_mask") * is_own
        return own


class MultiPolicyScorer:
    """Scores by several policies. engines: by policy name."""

    def __init__(self, engines: Mapping[str, PolicyScorer]) -> None:
        self._scorers = engines
        self.model = PolicyModels({name: engine.model for name, engine in engines.items()})
        self.compute_dtype = next(iter(engines.values())).compute_dtype

    def forward(self, batch: Batch, outputs: tuple[str, ...]) -> Batch:
        """The outputs of each token from the policy of its conversation."""
        scored, *others = [engine.forward(batch, outputs) for engine in self._scorers.values()]
        for name in outputs:
            scored[name] = torch.stack([each.flat(name) for each in (scored, *others)]).sum(dim=0)
        return scored


class MultiPolicyTrainer(MultiPolicyScorer):
    """A `TrainEngine` for several policies. engines: by policy name. agents: one of each policy."""

    def __init__(self, engines: Mapping[str, PolicyTrainer], agents: Mapping[str, str]) -> None:
        super().__init__(engines)
        self.engines = engines
        self.agents = agents

    @property
    def optimizer(self) -> SimpleNamespace:
        """Only the `state` of all optimizers."""
        state: dict[Any, Any] = {}
        for engine in self.engines.values():
            state |= engine.optimizer.state
        return SimpleNamespace(state=state)

    @property
    def num_steps(self) -> int:
        return sum(engine.num_steps for engine in self.engines.values())

    def train_step(self, batch: Batch, loss_fn: LossFn) -> dict[str, float]:
        """One optimizer step for each policy, on its own tokens; metrics are named POLICY/..."""
        metrics = dict[str, float]()
        for policy, engine in self.engines.items():
            for name, value in engine.train_step(engine.own(batch), loss_fn).items():
                metrics[f"{policy}/{name}"] = value

        return metrics

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for policy, engine in self.engines.items():
            yield from ((f"{policy}.{name}", weight) for name, weight in engine.weights())

    def state(self) -> TrainState:
        tensors = dict[str, Tensor]()
        meta = dict[str, Any]()
        for policy, engine in self.engines.items():
            own = engine.state()
            for name, tensor in own.tensors.items():
                kind, weight = _split(name)
                tensors[f"{kind}{policy}.{weight}"] = tensor
            meta[policy] = own.meta

        return TrainState(tensors, meta)

    def load_state(self, state: TrainState) -> None:
        """Raises ValueError, with nothing changed, for the state of other policies, and what the
        engines raise."""
        if state.meta.keys() != self.engines.keys():
            saved, own = (", ".join(names) for names in (state.meta, self.engines))
            raise ValueError(f"the state is of the policies {saved}, and this run trains {own}")

        for policy, engine in self.engines.items():
            engine.load_state(
                TrainState(tensors_of_policy(state.tensors, policy), state.meta[policy])
            )

    def offload(self, weights: bool = True, moments: bool = True) -> None:
        for engine in self.engines.values():
            engine.offload(weights, moments)

    def onload(self) -> None:
        for engine in self.engines.values():
            engine.onload()


def tensors_of_policy(tensors: Mapping[str, Tensor], policy: str) -> dict[str, Tensor]:
    """The tensors of one policy from those of `MultiPolicyTrainer.state`, by its own engine's
    names."""
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        kind, weight = _split(name)
        if weight.startswith(f"{policy}."):
            found[kind + weight.removeprefix(f"{policy}.")] = tensor
    return found


def _split(name: str) -> tuple[str, str]:
    """Split the name of a tensor of a `TrainState` into its prefix and the weight's name."""
    if name.startswith(MODEL_PREFIX):
        return MODEL_PREFIX, name.removeprefix(MODEL_PREFIX)
    entry, _, weight = name.partition("/")
    return f"{entry}/", weight
