"""Graphs and pipelines as Mermaid, and drawn in text."""

from distflow.graph import Pipeline, node


@node(writes=("responses", "response_ids"), role="ROLLOUT")
async def generate(prompt_ids, *, rollout): ...


@node(writes="token_level_scores", role="REWARD")
def reward_fn(responses): ...


@node(writes="old_log_probs", role="ACTOR")
def log_probs(response_ids, *, actor): ...


def train(token_level_scores, old_log_probs=None, *, actor): ...


def small():
    return (
        Pipeline("small")
        .add_node("rollout_actor", generate)
        .add_node("reward", reward_fn, ["rollout_actor"])
        .add_node("log_probs", log_probs, ["rollout_actor"])
        .add_node("actor_train", train, ["reward", "log_probs"], node_role="ACTOR")
        .build()
    )


def test_a_graph_is_drawn_with_the_fields_on_its_edges():
    assert (
        small().to_mermaid()
        == """flowchart TD
    n0["rollout_actor<br/><i>ROLLOUT · rollout</i>"]
    n1["reward<br/><i>REWARD</i>"]
    n2["log_probs<br/><i>ACTOR · actor</i>"]
    n3["actor_train<br/><i>ACTOR · actor</i>"]
    n0 -->|"responses"| n1
    n0 -->|"response_ids"| n2
    n1 -->|"token_level_scores"| n3
    n2 -->|"old_log_probs"| n3
"""
    )


def test_a_program_is_drawn_with_its_planes(config):
    assert (
        small().bind(config, ["prompt_ids"]).to_mermaid()
        == """flowchart TD
    subgraph rollout["rollout loop"]
        n0["rollout_actor<br/><i>ROLLOUT · rollout</i>"]
        n1["reward<br/><i>REWARD</i>"]
    end
    subgraph training["training loop"]
        n2["log_probs<br/><i>ACTOR · actor</i>"]
        n3["actor_train<br/><i>ACTOR · actor</i>"]
    end
    n0 -->|"responses"| n1
    n0 ==>|"response_ids"| n2
    n1 ==>|"token_level_scores"| n3
    n2 -->|"old_log_probs"| n3
"""
    )


def test_edges_that_follow_from_the_columns_are_drawn(config):
    pipeline = (
        Pipeline("p")
        .add_node("train", train)
        .add_node("reward", reward_fn)
        .add_node("log_probs", log_probs)
    )
    bound_pipeline = pipeline.build().bind(config, ["responses", "response_ids"])
    edges = [line.strip() for line in bound_pipeline.to_mermaid().splitlines() if "|" in line]
    assert edges == ['n0 ==>|"token_level_scores"| n2', 'n1 -->|"old_log_probs"| n2']


def test_edges_that_follow_from_the_columns_are_drawn_before_bind():
    graph = Pipeline("p").add_node("reward", reward_fn).add_node("train", train).build()
    assert 'n0 -->|"token_level_scores"| n1' in graph.to_mermaid()


def test_ids_cannot_break_the_drawing():
    hostile = 'end"]; click n0 "javascript:x" <script>&#35;'
    text = Pipeline("p").add_node(hostile, lambda ctx: None).build().to_mermaid()
    label = text.splitlines()[1]
    assert label.count('"') == 2 and "<script>" not in label
    assert "#quot;" in label and "#lt;script#gt;" in label and "#amp;#35;" in label


def test_a_program_as_plain_data_tells_what_each_node_is_and_reads(config):
    nodes = {node["name"]: node for node in small().bind(config, ["prompt_ids"]).to_json()}
    assert {name: (node["plane"], node["role"]) for name, node in nodes.items()} == {
        "rollout_actor": ("rollout", "ROLLOUT"),
        "reward": ("rollout", "REWARD"),
        "log_probs": ("training", "ACTOR"),
        "actor_train": ("training", "ACTOR"),
    }
    assert set(nodes["actor_train"]["deps"]) == {"reward", "log_probs"}
    assert nodes["actor_train"]["reads"] == ["token_level_scores", "old_log_probs"]
    assert nodes["actor_train"]["phase"] == "train_step" and nodes["log_probs"]["engines"] == (
        "actor",
    )


def test_a_program_as_text(config):
    assert (
        small().bind(config, ["prompt_ids"]).to_text()
        == """\
rollout loop
  rollout_actor  (ROLLOUT · rollout)
  reward  (REWARD)
      responses  ◀ rollout_actor
training loop
  log_probs  (ACTOR · actor)
      response_ids  ◀ rollout_actor
  actor_train  (ACTOR · actor)
      token_level_scores  ◀ reward
      old_log_probs  ◀ log_probs
"""
    )
