"""Nodes without a function: a data set and a workflow that a graph names, as if their keys were in
the config."""

import gzip
import json

import pytest

from distflow.config import load_config
from distflow.errors import UserError
from distflow.launch.make_spec import make_spec
from tests.cluster.distance import distance
from tests.e2e.runs import Playground, Run
from tests.environments.test_training import Games

GRAPHS = """
from distflow import NodeType
from distflow.graph import Pipeline
from distflow.pipelines import nodes


def path(pipeline, rollout, reward=nodes.compute_reward, **own):
    name = own.get("policy", "own")
    pipeline.add_node(f"{name}_rollout", deps=[f"{name}_load"], **rollout, **own)
    pipeline.add_node(f"{name}_reward", reward, **own)
    pipeline.add_node(f"{name}_log_prob", nodes.compute_old_log_prob, only_forward_compute=True, **own)
    pipeline.add_node(f"{name}_advantages", nodes.compute_advantage, plane="training", **own)
    return pipeline.add_node(f"{name}_train", nodes.train_actor, **own)


def load(pipeline, name, **keys):
    return pipeline.add_node(f"{name}_load", node_type=NodeType.DATA_LOAD, **keys)


def loaded():
    keys = {"train_files": "FOLDER/own.jsonl", "prompt_key": "q", "answer_key": "a"}
    return path(load(Pipeline("loaded"), "own", **keys), {"func": nodes.generate}).build()


def named():
    return path(load(Pipeline("named"), "own"), {"func": nodes.generate}).build()


def streamed():
    keys = {"train_files": "FOLDER/*.gz", "prompt_key": "q", "answer_key": "a", "shuffle": False}
    return path(load(Pipeline("streamed"), "own", **keys), {"func": nodes.generate}).build()


def two():
    pipeline = load(Pipeline("two"), "actor", policy="actor", train_files="FOLDER/own.jsonl", prompt_key="q")
    pipeline = load(pipeline, "b", policy="b", train_files="FOLDER/rows.jsonl", lazy=False)
    path(pipeline, {"func": nodes.generate}, policy="actor")
    return path(pipeline, {"func": nodes.generate}, policy="b").build()


def played():
    game = {"node_type": "ENV_INTERACT", "env": "FOLDER/game.py:Game", "max_turns": 2}
    return path(load(Pipeline("played"), "own"), game, nodes.take_scores).build()


def asked():
    return path(load(Pipeline("asked"), "own"), {"func": nodes.run_workflow}, nodes.take_scores).build()


def unknown():
    return path(load(Pipeline("unknown"), "own", train_file="rows.jsonl"), {"func": nodes.generate}).build()


def unreadable():
    return path(load(Pipeline("unreadable"), "own", train_files=3), {"func": nodes.generate}).build()


def twice():
    pipeline = load(load(Pipeline("twice"), "own", train_files="a.jsonl"), "other", train_files="b.jsonl")
    return path(pipeline, {"func": nodes.generate}).build()
"""  # noqa: E501
GAME = """
class Game:
    def reset(self, *, seed=None, options=None):
        self.turns = 0
        return "go", {}

    def step(self, action):
        self.turns += 1
        return "more", sum(map(ord, action)) % 7 / 6, self.turns == 2, False, {}
"""
SPY = """
import os

from distflow.launch.data_sources import DataSource


def noting(kind, do, rows_of):
    def done(self, given, *more):
        with open("FOLDER/read.txt", "a") as file:
            file.writelines(f"{os.getpid()} {kind} {row.origin}\\n" for row in rows_of(given))
        return do(self, given, *more)

    return done


DataSource.encode = noting("encoded", DataSource.encode, lambda given: given[0])
"""
LENGTH = ("trainer.total_training_steps=4", "trainer.save_freq=4")
NO_KL = "actor_rollout_ref.actor.use_kl_loss=false"
OWN = ("data.prompt_key=q", "data.answer_key=a")
NUM_ROWS = 400


"""The rows of the canary's fixed prompts, which each process that generates reads."""


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    ground = Playground(tmp_path_factory.mktemp("nodes"))
    rows = [
        json.dumps({"q": f"{'ab' * (i % 4 + 1)}{i}=", "a": "7"}) + "\n" for i in range(NUM_ROWS)
    ]
    (ground.folder / "own.jsonl").write_text("".join(rows))
    whole = gzip.compress("".join(rows).encode())
    (ground.folder / "broken.jsonl.gz").write_bytes(
        gzip.compress("".join(rows[:300]).encode()) + whole[:-40]
    )
    for name, text in (("graphs", GRAPHS), ("game", GAME), ("spy", SPY)):
        (ground.folder / f"{name}.py").write_text(text.replace("FOLDER", str(ground.folder)))
    return ground


def keys(ground: Playground, graph: str, *more: str) -> tuple[str, ...]:
    return (f"dag.pipeline={ground.folder}/graphs.py:{graph}", NO_KL, *LENGTH, *more)


def run(ground: Playground, graph: str, *more: str, name: str) -> Run:
    return ground.run("grpo", "data.train_files=[]", *keys(ground, graph, *more), name=name)


def refused(ground: Playground, graph: str, *more: str) -> None:
    make_spec(
        load_config("grpo", ground.overrides("never", *keys(ground, graph, *more))),
        say=lambda line: None,
    )


@pytest.mark.parametrize(
    ("graph", "more", "said"),
    [
        (
            "unknown",
            (),
            r"'own_load' .*data\.train_file, .*'data\.train_files'",
        ),
        ("unreadable", (), "'own_load' names data.train_files, which "),
        (
            "twice",
            ("data.train_files=[]",),
            r"'other_load' .*data\.train_files=\['b\.jsonl'\], .*\['a\.jsonl'\]",
        ),
        (
            "loaded",
            ("data.train_files=x.jsonl",),
            r"\['x\.jsonl'\] \(command line\): ",
        ),
        (
            "loaded",
            ("data.train_files=[]", "data.prompt_key=x"),
            r"data\.prompt_key='q', .*'x'",
        ),
    ],
)
def test_keys_that_no_run_can_have_are_refused_with_the_node(ground, graph, more, said):
    with pytest.raises(UserError, match=said):
        refused(ground, graph, *more)


def test_each_path_may_have_a_data_set_of_its_own(ground):
    for policy, file, lazy in (("actor", "own", True), ("b", "rows", False)):
        more = (
            "dag.policies={b: {actor.optim.lr: 1e-2}}",
            f"dag.policy={policy}",
            "data.train_files=[]",
        )
        spec = make_spec(
            load_config("grpo", ground.overrides("two", *keys(ground, "two", *more))),
            say=lambda line: None,
        )
        assert spec.config.data.train_files == (f"{ground.folder}/{file}.jsonl",)
        assert spec.config.data.lazy is lazy and spec.data.num_rows == (NUM_ROWS if lazy else 12)


@pytest.mark.slow
def test_a_run_on_the_data_of_a_node_is_that_of_a_config_that_names_them(ground):
    node = run(ground, "loaded", name="by_node")
    assert node.config.data.train_files == (), "the node names them"
    config = ground.run(
        "grpo",
        f"data.train_files={ground.folder}/own.jsonl",
        *keys(ground, "named", *OWN),
        name="by_config",
    )
    assert distance(node.weights(4), config.weights(4)) == 0


@pytest.mark.slow
def test_a_node_that_interacts_with_an_environment_plays_the_episodes_of_that_workflow(ground):
    options = (
        f"actor_rollout_ref.rollout.workflow_kwargs={{env: '{ground.folder}/game.py:Game', "
        f"max_turns: 2}}"
    )
    games = Games(ground.folder / "games")
    node = games.run("grpo", *keys(ground, "played", "data.max_response_length=40"), name="played")
    workflow = ("actor_rollout_ref.rollout.workflow=environment", options)
    config = games.run(
        "grpo", *keys(ground, "asked", *workflow, "data.max_response_length=40"), name="asked"
    )
    assert distance(node.weights(4), config.weights(4)) == 0
    assert all(record["episodes/turns"] > 1 for record in node.metrics())
