"""The weight sync of one process: whole versions only, and what arrives is what was sent."""

from typing import Any

import pytest
import torch
from torch import Tensor

from distflow.errors import TrustError
from distflow.observe.writing.timing import Waits
from distflow.rollout.engine import WeightReceipt
from distflow.rollout.engine_weights import stripe_hashes
from distflow.runtime.weight_sync.same_process_weights import LocalWeights
from distflow.scheduling.group_states import Version

ONE, TWO = Version(0, 1), Version(0, 2)


class Engine:
    """Notes the versions that it is handed; `spoil` changes what arrives."""

    def __init__(self, **receipt: Any) -> None:
        self.served: list[tuple[Version, dict[str, Tensor]]] = []
        self._receipt = receipt

    def __call__(self, version: Version, weights: Any) -> WeightReceipt:
        held = dict(weights or ())
        self.served.append((version, held))
        return WeightReceipt(
            **{"version": version, "hashes": stripe_hashes(held.items()), **self._receipt}
        )


def tensors(*names: str) -> list[tuple[str, Tensor]]:
    return [(name, torch.full((3,), float(i))) for i, name in enumerate(names)]


HASHES = stripe_hashes(tensors("a", "b") + tensors("c"))


def push(queue: LocalWeights, version: Version) -> None:
    queue.begin(version)
    queue.put(tensors("a", "b"))
    queue.put(tensors("c"))
    queue.commit(HASHES)


def port_to(receive: Any) -> LocalWeights:
    queue = LocalWeights(Waits())
    queue.attach(receive)
    return queue


def test_an_engine_gets_each_version_whole_and_once():
    engine = Engine()
    queue = port_to(engine)
    queue.begin(ONE)
    queue.put(tensors("a", "b"))
    assert engine.served == [], "nobody serves part of a version"
    queue.put(tensors("c"))
    queue.commit(HASHES)
    push(queue, TWO)
    assert [(version, list(held)) for version, held in engine.served] == [
        (ONE, ["a", "b", "c"]),
        (TWO, [*"abc"]),
    ]


def test_what_was_put_before_a_version_was_broken_off_is_no_part_of_the_next():
    engine = Engine()
    queue = port_to(engine)
    queue.begin(ONE)
    queue.put(tensors("left over"))
    push(queue, TWO)
    assert [list(held) for _, held in engine.served] == [["a", "b", "c"]]


def test_an_engine_that_refuses_holds_the_run_with_its_reason():
    def refuses(version: Version, weights: Any) -> WeightReceipt:
        raise ValueError("no tensor 'c' here")

    with pytest.raises(TrustError, match="version 1: no tensor 'c' here"):
        push(port_to(refuses), ONE)


def test_unchanged_weights_leave_the_engine_with_the_trainer_s_weights():
    engine = Engine(hashes=HASHES, version_only=True)
    port_to(engine).renumber(TWO, HASHES)
    assert engine.served == [(TWO, {})]
    others = HASHES | {"b": "of an older version"}

    with pytest.raises(TrustError, match="version 2, .* differ: b$"):
        port_to(Engine(hashes=others, version_only=True)).renumber(TWO, HASHES)


@pytest.mark.parametrize("hashes", [{}, {**stripe_hashes(tensors("a", "b")), "c": "other"}])
def test_a_tensor_that_did_not_arrive_whole_is_named(hashes):
    with pytest.raises(TrustError, match="version 1 .* different tensors: .*c$"):
        push(port_to(Engine(hashes=hashes)), ONE)


def test_a_receipt_for_another_version_is_no_receipt():
    with pytest.raises(TrustError, match="receipt .*step=7"):
        push(port_to(Engine(version=Version(0, 7), shared=True)), ONE)


def test_shared_storage_is_proven_by_the_same_hashes():
    engine = Engine(shared=True)
    push(port_to(engine), ONE)
    assert len(engine.served) == 1
    with pytest.raises(TrustError, match="version 1 .* different tensors: a, b, c"):
        push(port_to(Engine(hashes={}, shared=True)), ONE)


def test_the_wait_for_an_engine_is_recorded():
    told: list[tuple[str, str, str]] = []
    queue = LocalWeights(Waits(lambda wait, ended: told.append((wait.who, wait.what, wait.on))))
    queue.attach(Engine())
    push(queue, ONE)
    assert told == [("training", "weights of step 1", "rollout engine")]
