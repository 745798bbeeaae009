"""What the sample queue knows of a dp group: its shares of a step, and the mini-batches that it
trains on."""

from pathlib import Path

from distflow.runtime.dp_groups import DpGroupShares, queue_dp_group
from tests.e2e.runs import Playground

RAY = ("trainer.launcher=ray", "trainer.n_gpus_per_node=2", "trainer.seed=3")
PASSES = (
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "critic.ppo_mini_batch_size=4",
    "critic.ppo_epochs=3",
)


def test_mini_batches_of_all_passes_are_those_of_what_the_team_trains(tmp_path: Path) -> None:
    playground = Playground(tmp_path)
    _, spec = playground.spec("ppo", *RAY, *PASSES, name="together")
    assert queue_dp_group(spec, (0, 1)) == DpGroupShares((0, 1), mini_batch=2, seed=3, epochs=2)
    apart = "trainer.allocation='embedded:d1|torch[actor]:d1|torch[ref]:d1+torch[critic]:d1'"
    _, spec = playground.spec(
        "ppo", *RAY, *PASSES, "actor_rollout_ref.actor.use_kl_loss=true", apart, name="apart"
    )
    assert queue_dp_group(spec, (0,)) == DpGroupShares((0,), mini_batch=2, seed=3, epochs=2)
    assert queue_dp_group(spec, (1,)) == DpGroupShares((0,), mini_batch=4, seed=3, epochs=3)
