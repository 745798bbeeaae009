"""Weights that are gathered bucket by bucket into a real engine's own copy."""

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from distflow.errors import TrustError
from distflow.observe.writing.timing import Waits
from distflow.rollout.embedded import EmbeddedEngine
from distflow.rollout.engine_weights import stripe_hashes
from distflow.runtime.rollout_loop.loop_thread import LoopThread
from distflow.runtime.weight_sync import sender
from distflow.runtime.weight_sync.receiver import WeightReceiver
from distflow.runtime.weight_sync.same_process_weights import StreamedWeights
from distflow.runtime.weight_sync.sender import WeightSender
from distflow.scheduling.group_states import Version
from tests.rollout.drive import make_engine, make_model, prompt_of, request_of

ONE, TWO = Version(0, 1), Version(0, 2)
WITHIN_S = 60


class Serving:
    """An engine with weights of its own that is sent those of another model."""

    def __init__(self, thread: Any) -> None:
        self.model = make_model(seed=0)
        self.source = make_model(seed=1)
        self.engine: EmbeddedEngine = make_engine(self.model)
        self.thread = thread
        self.port = StreamedWeights(Waits())
        self.detach = self.port.attach(WeightReceiver(self.engine, thread, Waits()))

    def sent(self) -> list[tuple[str, Tensor]]:
        return list(self.source.named_parameters())

    @property
    def hashes(self) -> dict[str, str]:
        return stripe_hashes(self.sent())

    def push(self, version: Version) -> None:
        self.port.begin(version)
        self.port.put(self.sent()[:3])
        self.port.put(self.sent()[3:])
        self.port.commit(self.hashes)

    def generate(self) -> Any:
        return self.thread.start(self.engine.generate(request_of(prompt_of(5), max_tokens=4)))


@pytest.fixture
def serving():
    with LoopThread("test") as thread:
        made = Serving(thread)
        thread.call(made.engine.__aenter__())
        yield made
        made.detach()
        thread.call(made.engine.__aexit__(None, None, None))


def test_no_token_is_drawn_between_begin_and_commit(serving):
    serving.port.begin(ONE)
    serving.port.put(serving.sent()[:3])
    answer = serving.generate()
    with pytest.raises(TimeoutError):
        answer.result(0.3)
    serving.port.put(serving.sent()[3:])
    assert serving.engine.version == Version(0, 0)
    serving.port.commit(serving.hashes)
    assert serving.engine.version == ONE
    assert set(answer.result(WITHIN_S)[0].versions) == {1}
    assert stripe_hashes(serving.model.named_parameters()) == serving.hashes


def test_a_version_that_is_broken_off_is_not_served_and_the_next_is_whole(serving):
    serving.port.begin(ONE)
    serving.port.put(serving.sent()[:3])
    serving.push(TWO)
    assert serving.engine.version == TWO
    assert set(serving.generate().result(WITHIN_S)[0].versions) == {2}


def test_an_engine_with_a_part_of_a_version_serves_nobody(serving):
    serving.port.begin(ONE)
    serving.port.put(serving.sent()[:3])
    serving.detach()
    with pytest.raises(RuntimeError, match="only a part "):
        serving.generate().result(WITHIN_S)
    serving.port.attach(WeightReceiver(serving.engine, serving.thread, Waits()))
    serving.detach = lambda: None


@pytest.mark.parametrize("spoiled", ["sent twice", "unknown", "missing"])
def test_weights_that_do_not_fit_are_refused_with_the_reason(serving, spoiled):
    sent = serving.sent()
    buckets = {
        "sent twice": [sent, sent[:1]],
        "unknown": [[("other", sent[0][1])], sent],
        "missing": [sent[1:]],
    }
    serving.port.begin(ONE)

    with pytest.raises(TrustError, match=f"version 1: .*: {spoiled}"):
        for bucket in buckets[spoiled]:
            serving.port.put(bucket)
        serving.port.commit(serving.hashes)


class Gathers:
    """An actor whose weights are made one by one, as if gathered from ranks; `most` bytes of them
    lived at once."""

    def __init__(self, weights: list[tuple[str, Tensor]]) -> None:
        self.held = self.most = 0
        self._weights = weights
        self._lock = threading.Lock()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights:
            gathered = tensor.detach().clone()
            self._count(gathered.nbytes)
            weakref.finalize(gathered, self._count, -gathered.nbytes)
            yield name, gathered
            del gathered

    def _count(self, num_bytes: int) -> None:
        with self._lock:  # freed on the thread of the engine too
            self.held += num_bytes
            self.most = max(self.most, self.held)


def test_no_more_is_held_than_a_bucket_and_the_tensors_beside_it(serving, monkeypatch):
    largest = max(tensor.nbytes for _, tensor in serving.sent())
    whole = sum(tensor.nbytes for _, tensor in serving.sent())
    monkeypatch.setattr(sender, "BUCKET_BYTES", largest)
    actor: Any = Gathers(serving.sent())
    WeightSender(
        actor, serving.port, torch.float32, sends=True, canary=None, session=serving.thread
    ).sync(ONE)
    assert serving.engine.version == ONE and actor.held == 0
    assert actor.most <= 3 * largest < whole / 2, (
        "one bucket, the tensor that follows it, the last that was copied"
    )
