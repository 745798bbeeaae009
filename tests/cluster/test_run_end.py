"""Over a real Ray: where a metric ends a run, and what is saved by epochs, is the same on all
ranks."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from distflow.cluster.ray_launcher import launch_ray
from distflow.observe.run_reader import read_events, read_metrics
from distflow.runtime.checkpoint.checkpoint_store import CheckpointStore
from distflow.training.engine import TrainState
from tests.e2e.runs import Playground, Run

pytestmark = pytest.mark.slow
KEYS = (
    "trust.check_rewards=false",
    "actor_rollout_ref.rollout.n=2",
    "trainer.total_epochs=3",
    "trainer.keep_last=9",
)


@pytest.fixture(scope="module")
def ground(tmp_path_factory, on_ray):
    """Nine steps of four prompts."""
    return Playground(tmp_path_factory.mktemp("runs"), num_rows=12)


@pytest.mark.parametrize(
    "layout",
    [
        ("trainer.n_gpus_per_node=2",),
        (
            "trainer.allocation='embedded[rollout]:d1+fsdp[actor]:d2'",
            "async.max_staleness=2",
            "actor_rollout_ref.actor.strategy=fsdp",
        ),
    ],
    ids=["two that do all", "three that share the work and the weights, η = 2"],
)
def test_all_ranks_end_at_the_step_with_the_value(ground, layout, tmp_path):
    keys = (
        *KEYS,
        "trainer.launcher=ray",
        "trainer.save_freq_epochs=1",
        *layout,
        f"data.val_files={ground.folder}/rows.jsonl",
    )
    keys += (
        "trainer.save_hf_model=true",
        "trainer.test_freq_epochs=1",
        "trainer.stop_when=actor/lr < 0.0007",
    )

    folders = []
    for name in (tmp_path.name, tmp_path.name):  # the second start finds the run done
        config, spec = ground.spec("grpo", *keys, name=name)
        run = Run(ground.folder / name, config, launch_ray(spec))
        folders.append(run.folder)
        rates = [step["actor/lr"] for step in run.metrics()]
        assert (
            rates[-1] < 0.0007 <= rates[-2]
            and run.outcome.steps == len(rates) == 5
            and not run.outcome.stopped
        )

    validated = [record.step for record in read_metrics(run.folder) if record.kind == "val"]
    assert validated == [3, 5], "an epoch, and the end"
    assert sorted(path.name[-1] for path in (run.folder / "checkpoints").glob("step-*")) == [
        "3",
        "5",
    ]

    for step in (3, 5):
        loaded = AutoModelForCausalLM.from_pretrained(
            run.folder / "huggingface" / f"step-{step:06d}"
        ).state_dict()
        saved = TrainState(
            CheckpointStore(run.folder / "checkpoints").load(step).load("actor")
        ).trained_weights()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items()) and saved

    ends = [event for event in read_events(run.folder) if event.kind == "end"]
    assert [end.fields["status"] for end in ends] == ["finished"] and "actor/lr is " in str(
        ends[0].fields["why"]
    )
