"""Policies that an engine serves in place of the trainer's, planted into a run from one of its
steps on: every hash and every receipt stays right, as it would if another process lost, mixed up or
rescaled what it was sent."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from distflow.checks.checker import Checker
from distflow.rollout.embedded.engine import EmbeddedEngine
from distflow.rollout.embedded.prefix_cache import PrefixCache
from distflow.rollout.embedded.prompt_cache import PromptCache
from distflow.rollout.hf_engine import HFEngine

BEGIN = 6
"""The number, from 0, of the step whose update is the first that is served otherwise."""
Serve = Callable[["Seen", str, Tensor], Tensor]
"""What stands in place of a weight of the policy: by its history, its name, its present value."""


class Seen:
    """A policy's weights at the start, at the step where a fault begins, and one version ago; for
    an adapter that is applied unmerged those of the adapter, at the start all 0 in effect."""

    def __init__(self) -> None:
        self.first: dict[str, Tensor] = {}
        self.begun: dict[str, Tensor] = {}
        self.before: dict[str, Tensor] = {}
        self._now: tuple[object, dict[str, Tensor]] = (None, {})

    def see(self, version: object, own: dict[str, Tensor], begun: bool) -> None:
        if version == self._now[0]:
            return

        copied = {name: tensor.clone() for name, tensor in own.items()}
        self.first = self.first or copied
        self.before = self._now[1] or copied
        self.begun = self.begun if self.begun and begun else copied
        self._now = version, copied


class Late:
    """Whether the fault has begun, and how often it happened."""

    def __init__(self, patch: pytest.MonkeyPatch, begin: int = BEGIN) -> None:
        self.begun = False
        self.times = 0
        self.taken = -1
        original = Checker.step_taken

        def step_taken(checker: Checker, step: int, *more: Any) -> None:
            self.taken = step
            self.begun = self.begun or step >= begin
            original(checker, step, *more)

        patch.setattr(Checker, "step_taken", step_taken)


def serve(patch: pytest.MonkeyPatch, other: Serve) -> Late:
    """Engines compute with `other` weights whenever they generate, and hold the right ones when
    they are asked."""
    late, histories = Late(patch), dict[int, Seen]()

    @contextmanager
    def served(engine: Any, model: nn.Module) -> Iterator[None]:
        seen = histories.setdefault(id(engine), Seen())
        own = _policy(model)
        seen.see(engine.version, own, late.begun)
        if not late.begun:
            yield
            return

        right = {name: tensor.clone() for name, tensor in own.items()}
        _put(own, {name: other(seen, name, tensor) for name, tensor in right.items()})
        late.times += 1

        try:
            yield
        finally:
            _put(own, right)

    step = EmbeddedEngine.step
    generate = HFEngine._generate

    def embedded(self: EmbeddedEngine) -> None:
        with served(self, self.model):
            step(self)

    def by_transformers(self: HFEngine, *asked: Any) -> Any:
        with served(self, self.model):
            return generate(self, *asked)

    patch.setattr(EmbeddedEngine, "step", embedded)
    patch.setattr(HFEngine, "_generate", by_transformers)
    return late


def _policy(model: nn.Module) -> dict[str, Tensor]:
    """The weights that training changes: of an adapter its second factor, with which its effect
    grows in proportion."""
    own = {name: parameter.data for name, parameter in model.named_parameters()}
    return {name: tensor for name, tensor in own.items() if "lora_B" in name} or own


@torch.no_grad()
def _put(own: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, tensor in own.items():
        if not torch.equal(tensor, values[name]):
            tensor.copy_(values[name])


def scaled(factor: float, part: str = "") -> Serve:
    """The adapter times a factor, in the layers whose names hold `part`. Merged weights of the
    start are the base."""

    def other(seen: Seen, name: str, now: Tensor) -> Tensor:
        return seen.first[name] + factor * (now - seen.first[name]) if part in name else now

    return other


def as_it_began(seen: Seen, name: str, now: Tensor) -> Tensor:
    return seen.begun[name]


def of_the_version_before(seen: Seen, name: str, now: Tensor) -> Tensor:
    return seen.before[name] if "layers.1." in name else now


def serve_old_kv(patch: pytest.MonkeyPatch) -> Late:
    """Keys and values of a prompt are those of the weights that met it first."""
    late = Late(patch)
    original = PromptCache.rows
    generate = HFEngine._generate
    kept: dict[tuple[int, tuple[int, ...]], DynamicCache] = {}

    def rows(self: PromptCache, version: object, *rest: Any) -> Any:
        late.times += late.begun
        return original(self, "any" if late.begun else version, *rest)

    def by_transformers(self: HFEngine, call: Any) -> Any:
        if not late.begun:
            return generate(self, call)

        late.times += 1
        model = self.model

        (request,) = [pending.request for pending in call]
        place = (len(request.samples), tuple(request.prompt_ids))
        if place not in kept:
            prompt = torch.tensor([request.prompt_ids[:-1]] * len(request.samples))
            with torch.no_grad():
                kept[place] = model(input_ids=prompt, use_cache=True).past_key_values

        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(
                model,
                "generate",
                partial(model.generate, past_key_values=copy.deepcopy(kept[place])),
            )
            return generate(self, call)

    patch.setattr(PromptCache, "clear", lambda self: None)
    patch.setattr(PromptCache, "rows", rows)
    patch.setattr(HFEngine, "_generate", by_transformers)
    return late


def serve_old_prefixes(patch: pytest.MonkeyPatch) -> Late:
    """What turns of episodes left in the prefix cache is found after weight updates."""
    late = Late(patch)
    find = PrefixCache.find
    add = PrefixCache.add
    clear = PrefixCache.clear

    def found(self: PrefixCache[Any], root: Any, tokens: tuple[int, ...]) -> list[Any]:
        blocks = find(self, ("any",) if late.begun else root, tokens)
        late.times += bool(blocks) and late.begun
        return blocks

    patch.setattr(PrefixCache, "find", found)
    patch.setattr(
        PrefixCache,
        "add",
        lambda self, root, *rest: add(self, ("any",) if late.begun else root, *rest),
    )
    patch.setattr(PrefixCache, "clear", lambda self: None if late.begun else clear(self))

    return late
