"""A pipeline given as data, as a YAML file holds it; errors name the entry."""

import pytest
import yaml

from distflow.graph import NodeRole, NodeType, PipelineError, pipeline_from_config

PROGRAM = """
- id: rollout_actor
  func: graph_yaml_nodes:generate
  type: MODEL_INFERENCE
  role: ROLLOUT
- id: reward
  func: graph_yaml_nodes.length_penalised
  role: reward
  deps: [rollout_actor]
  options: {penalty: 0.5}
- id: fence
  type: BARRIER_SYNC
  deps: [reward]
- id: old
  func: graph_yaml_nodes:old
  type: MODEL_TRAIN
  role: ACTOR
  deps: [fence]
  only_forward_compute: true
  retry_limit: 1
  scope: sample
  writes: [prox_log_probs]
  phase: proximal
  validates: true
- id: values
  func: graph_yaml_nodes:plain
  type: MODEL_INFERENCE
  engine: critic
- id: last
  func: graph_yaml_nodes:plain
  plane: training
"""

MODULE = """
from distflow.graph import node

@node(writes=("responses", "response_ids"))
async def generate(prompt_ids, *, rollout): ...

def length_penalised(responses, *, penalty: float): ...

@node(writes="old_log_probs")
def old(input_ids, *, actor): ...

def plain(prompt_ids): ...
"""


@pytest.fixture
def entries(tmp_path, monkeypatch):
    (tmp_path / "graph_yaml_nodes.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return yaml.safe_load(PROGRAM)


def test_a_program_in_yaml(entries, config):
    graph = pipeline_from_config("mine", entries)
    assert graph.graph_id == "mine"
    assert graph.get_topological_sort() == [
        "rollout_actor",
        "reward",
        "fence",
        "old",
        "values",
        "last",
    ]
    old = graph.get_node("old")
    assert (old.node_type, old.node_role) == (NodeType.MODEL_TRAIN, NodeRole.ACTOR)
    assert old.only_forward_compute and old.retry_limit == 1 and old.scope == "sample"
    pipeline = graph.bind(config, ["prompt_ids"])
    assert pipeline.node("reward").options == {"penalty": 0.5}
    assert [n.plane for n in pipeline.nodes] == ["rollout"] * 2 + ["training"] * 4
    old = pipeline.node("old")
    assert (old.contract.writes, old.phase, old.validates) == (
        ("prox_log_probs",),
        "proximal",
        True,
    )
    assert pipeline.node("values").engines == ("critic",)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"id": "rollout_actor"}, "node 'rollout_actor' exists already"),
        ({"options": [1]}, "entry 2 of the nodes ('reward'): options must be a mapping"),
        ({"options": {"func": 1}}, "entry 2 of the nodes ('reward'): 'func' is not an option"),
        ({"options": {1: 2}}, "entry 2 of the nodes ('reward'): names of options must be str"),
        ({"options": {"penalti": 1}}, "did you mean 'penalty'?"),
        (
            {"role": "REWAARD"},
            "node 'reward': node_role: 'REWAARD' is not a NodeRole; did you mean 'REWARD'?",
        ),
        ({"type": "COMPUTER"}, "did you mean 'COMPUTE'?"),
        ({"func": "graph_yaml_nodes:length_penalized"}, "did you mean 'length_penalised'?"),
        ({"func": None}, "node 'reward' has no func"),
        ({"deps": "rollout_actor"}, "node 'reward': deps must be a list"),
        ({"deps": ["rollout"]}, "did you mean 'rollout_actor'?"),
    ],
)
def test_what_is_wrong_with_an_entry(entries, change, said):
    entries[1] = {**entries[1], **change}
    with pytest.raises(PipelineError) as caught:
        pipeline_from_config("mine", entries)
    assert said in str(caught.value)


def test_a_program_without_entries():
    with pytest.raises(PipelineError, match="no nodes"):
        pipeline_from_config("mine", [])
