"""Runs side by side, before they start: which devices each gets, and what is refused."""

from pathlib import Path

import pytest
import yaml

from distflow.config.compose.typed_values import nested
from distflow.errors import UserError
from distflow.launch.plan_concurrent_runs import PlannedRun, plan_runs
from tests.e2e.runs import Playground

ALONE = ("trainer.launcher=local", "trainer.nnodes=1")
RAY = (
    "trainer.launcher=ray",
    "trainer.nnodes=2",
    "trainer.n_gpus_per_node=2",
    "trainer.device=cpu",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A config for a small model, and one for a larger."""
    folder = tmp_path_factory.mktemp("several")
    return {
        "small": config_file(Playground(folder / "small")),
        "large": config_file(Playground(folder / "large", hidden_size=96)),
    }


def config_file(ground: Playground) -> str:
    values = {
        key: yaml.safe_load(value)
        for key, _, value in (o.partition("=") for o in ground.overrides("run"))
    }
    values["actor_rollout_ref.actor.optim.lr"] = 1e-3
    file = ground.folder / f"{ground.folder.name}.yaml"
    file.write_text(yaml.safe_dump({"defaults": ["grpo", "_self_"], **nested(values)}))

    return str(file)


def planned(
    files: dict[str, str], *words: str, large: tuple[str, ...] = ()
) -> tuple[list[PlannedRun], list[str]]:
    said: list[str] = []
    own = {"small": (), "large": large}
    commands = {name: (file, *RAY, *words, *own[name]) for name, file in files.items()}
    return plan_runs(commands, said.append), said


def nodes(run: PlannedRun) -> list[int]:
    return [rank.node for rank in run.plan.ranks]


def test_the_larger_model_gets_more_devices_unless_they_are_shared_evenly(files):
    (small, large), said = planned(files)
    assert (nodes(small), nodes(large)) == ([0], [0, 1, 1])
    assert large.words[-1] == "trainer.devices=[[0, 2, 3]]"
    assert said[1].startswith("large: trainer.devices=[[0, 2, 3]] (machine 0, 1), models of ")
    assert str(Path(files["large"]).parent / "run") in said[1]
    (small, large), _ = planned(files, "dag.apportion_strategy=even")
    assert (nodes(small), nodes(large)) == ([1, 1], [0, 0])
    (small, large), _ = planned(files, large=("dag.model_sizes={actor: 1, ref: 1}",))
    assert (nodes(small), nodes(large)) == ([0, 1, 1], [0]), (
        "the sizes that a config says itself count"
    )


def test_without_ray_each_run_gets_its_number_of_processes(files):
    (small, large), said = planned(files, *ALONE, "trainer.n_gpus_per_node=3")
    assert (small.devices, large.devices) == ((2,), (0, 1)), "the larger is placed first"
    assert (small.words[-1], large.words[-1]) == (
        "trainer.n_gpus_per_node=1",
        "trainer.n_gpus_per_node=2",
    )
    assert [len(run.plan.ranks) for run in (small, large)] == [1, 2]
    assert said[1].startswith("large: trainer.n_gpus_per_node=2 (machine 0), models of ")


def test_the_policies_of_a_graph_are_placed_like_parts(files):
    model_b = Path(files["large"]).parent / "model"
    policies = f"dag.policies={{large: {{model: {{path: {model_b}}}}}}}"
    planned = plan_runs({"both": (files["small"], *RAY, policies)}, lambda line: None)
    assert [run.name for run in planned] == ["both-actor", "both-large"]
    assert [run.words[-1] for run in planned] == [
        "trainer.devices=[[1]]",
        "trainer.devices=[[0, 2, 3]]",
    ]
    folder = Path(files["small"]).parent / "run"
    own = ["dag.policy=large", f"trainer.default_local_dir='{folder}-large'"]
    assert list(planned[1].words[-3:-1]) == own


@pytest.mark.parametrize(
    ("words", "of_large", "said"),
    [
        (
            ("trainer.default_local_dir=runs/same",),
            (),
            "small and large .*runs/same: ",
        ),
        (
            ("trainer.launcher=slurm",),
            (),
            "small: .*trainer.launcher=local or ray",
        ),
        (
            (),
            ("trainer.launcher=local", "trainer.nnodes=1"),
            r"trainer\.launcher .* ray in small .* local in large",
        ),
        ((*ALONE, "trainer.n_gpus_per_node=1"), (), "2 independent parts, .* 1 device"),
        ((), ("trainer.nnodes=3",), r"trainer\.nnodes .* 2 in small .* 3 in large"),
        (
            (),
            ("dag.apportion_strategy=even",),
            r"dag\.apportion_strategy .* param_aware in small .* even in large",
        ),
        (
            (),
            ("trainer.allocation='embedded:d2|torch:d2'",),
            "large: several configs .* remove trainer.allocation",
        ),
        ((), ("trainer.devices=[[0]]",), "large: several configs .* trainer.devices"),
        (
            ("trainer.nnodes=1", "trainer.n_gpus_per_node=1"),
            (),
            "2 independent parts, .* 1 device",
        ),
        ((), ("data.train_files=nowhere.jsonl",), "large: 1 problem "),
        (
            (),
            ("critic.optim.lr=1",),
            "large: .*'grpo_training_pipeline'",
        ),
        ((), ("dag.pipeline=nowhere:at_all",), "large: dag.pipeline: .*nowhere"),
    ],
)
def test_what_cannot_be_side_by_side_is_refused(files, words, of_large, said):
    with pytest.raises(UserError, match=said):
        planned(files, *words, large=of_large)
