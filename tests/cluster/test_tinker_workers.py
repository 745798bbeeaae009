"""`distflow serve --tinker` over Ray, with its real client: what workers train together is what one
process trains, and a worker's death is told."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from distflow.cluster.tinker_workers import tinker_workers
from distflow.config import load_config
from distflow.errors import UserError
from tests.cluster import leftovers
from tests.tinker.server import ENDS_WITHIN_S, LastingServer, Served, tinker_server

tinker = pytest.importorskip("tinker")
pytest.importorskip("peft")

IDS = [5, 9, 7, 8, 6, 10, 11]
OVER_RAY = ("trainer.launcher=ray", "trainer.device=cpu")
BOTH_DO_BOTH = (*OVER_RAY, "trainer.n_gpus_per_node=2")
ONE_SAMPLES_TWO_TRAIN = (
    *OVER_RAY,
    "trainer.n_gpus_per_node=3",
    "trainer.allocation=embedded[rollout]:d1+torch[actor]:d2",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tinker")


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    """Of one process."""
    with tinker_server(folder) as served:
        return trained_and_drawn(served)


def datum(ids: list[int]) -> Any:
    return tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)},
    )


def trained_and_drawn(served: Served) -> tuple[list[float], list[float], list[list[int]]]:
    """Losses and gradient norms of steps of two unequal requests each, of a model that is saved
    and loaded in between, and what its last version samples."""
    service = tinker.ServiceClient(base_url=served.url, api_key=served.key)
    model = service.create_lora_training_client(base_model=served.model, rank=4, seed=3).result()
    losses = []
    norms = []
    for number in range(4):
        if number == 2:
            path = model.save_state("half").result().path
            model = service.create_training_client_from_state_with_optimizer(path).result()
        passes = [
            model.forward_backward([datum(IDS), datum(IDS[:3]), datum(IDS[2:])], "cross_entropy"),
            model.forward_backward([datum(IDS[1:5])], "cross_entropy"),
        ]
        stepped = model.optim_step(tinker.types.AdamParams(learning_rate=0.01)).result()
        losses += [each.result().metrics["loss:sum"] for each in passes]
        norms.append(stepped.metrics["grad_norm"])

    sampler = model.save_weights_and_get_sampling_client().result()
    params = tinker.types.SamplingParams(max_tokens=6, temperature=1.0, seed=5)
    drawn = sampler.sample(tinker.types.ModelInput.from_ints(IDS[:2]), 4, params).result()
    service.close("success")
    return losses, norms, [list(each.tokens) for each in drawn.sequences]


def assert_equal(served: Served, expected: Any) -> None:
    losses, norms, drawn = trained_and_drawn(served)
    assert losses == pytest.approx(expected[0], rel=1e-5)
    assert norms == pytest.approx(expected[1], rel=1e-5)
    assert drawn == expected[2]


@pytest.mark.slow
def test_two_workers_train_and_one_samples_as_one_process(folder: Path, expected: Any) -> None:
    with tinker_server(folder, options=ONE_SAMPLES_TWO_TRAIN) as served:
        assert_equal(served, expected)


@pytest.mark.slow
def test_a_lost_worker_ends_the_server_and_clients_wait_for_the_next(tmp_path: Path) -> None:
    """A request that failed by it is carried out then."""
    server = LastingServer(tmp_path, options=BOTH_DO_BOTH)
    try:
        service = tinker.ServiceClient(**server.address)
        model = service.create_lora_training_client(str(tmp_path / "model"), rank=4).result()
        data = [datum(IDS), datum(IDS[:3]), datum(IDS[2:])]
        losses = []
        for _ in range(2):
            passed = model.forward_backward(data, "cross_entropy")
            model.optim_step(tinker.types.AdamParams(learning_rate=0.01)).result()
            losses.append(passed.result().metrics["loss:sum"])

        os.kill(leftovers.named("ray::TinkerWorker", server.process.pid)[0], signal.SIGKILL)
        waiting = model.forward_backward(data, "cross_entropy")
        _, said = server.process.communicate(timeout=ENDS_WITHIN_S)
        assert server.process.returncode == 2
        assert re.search(r"worker [01] has died", said)

        server.start()
        found = waiting.result(ENDS_WITHIN_S).metrics["loss:sum"]
        assert found < losses[1] < losses[0]
        model.optim_step(tinker.types.AdamParams(learning_rate=0.01)).result()
        service.close("success")
    finally:
        server.end(signal.SIGINT)


@pytest.mark.parametrize("launcher", ["local", "slurm"])
def test_workers_of_another_launcher_are_refused(tmp_path: Path, launcher: str) -> None:
    options = ["trainer.device=cpu", "trainer.n_gpus_per_node=2", f"trainer.launcher={launcher}"]
    config = load_config("grpo", options, complete=False).config
    with (
        pytest.raises(UserError, match="trainer.launcher=ray"),
        tinker_workers(config, "tiny", tmp_path, print),
    ):
        pass
