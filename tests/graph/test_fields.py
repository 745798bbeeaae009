"""All forms in which a node's function can be given, and what is said when it is not there."""

import functools

import pytest

from distflow.graph import Pipeline, PipelineError, node

MODULE = """
from distflow.graph import node

def score(responses): return "score"

async def slow(ctx): ...

class Rewards:
    made = 0
    def __init__(self): type(self).made += 1
    def method(self, responses): return ("method", self.made)
    @staticmethod
    def static(responses): return "static"
    @classmethod
    def of_class(cls, responses): return "class"

class Needy:
    def __init__(self, weight): ...
    def method(self, responses): ...

class Callable:
    @node(writes="returns", role="REWARD")
    def __call__(self, responses): return "called"

instance = Callable()
number = 3
"""


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    package = tmp_path / "graph_test_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "my_rewards.py").write_text(MODULE)
    (package / "broken.py").write_text("def f(:\n")
    (package / "needs.py").write_text("import not_there_at_all\n")
    (package / "half.py").write_text("from os import no_such_name\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    return "graph_test_pkg.my_rewards"


def function_of(func):
    return Pipeline("p").add_node("reward", func).build().get_node("reward").fn


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        (":score", "score"),
        (".score", "score"),
        (":Rewards.static", "static"),
        (":Rewards.of_class", "class"),
        (":instance", "called"),
    ],
)
def test_paths(rewards, path, answer):
    assert function_of(rewards + path)("x") == answer


def test_plain_method_gets_one_instance(rewards):
    fn = function_of(f"{rewards}:Rewards.method")
    assert fn("x") == fn("x")


def test_callables():
    def score(responses): ...

    class Judge:
        def reward_fn(self, responses): ...

    reward_fn = Judge()
    assert function_of(score) is score
    assert function_of(reward_fn.reward_fn) == reward_fn.reward_fn
    partial = functools.partial(score)
    assert function_of(partial) is partial


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "graph_test_pkgs.my_rewards:score",
            "there is no module 'graph_test_pkgs'",
        ),
        ("graph_test_pkg.my_rewards:scor", "did you mean 'score'?"),
        ("graph_test_pkg.my_rewards.scor", "the module has no 'scor'; did you mean 'score'?"),
        (
            "graph_test_pkg.my_rewards:Rewards.methd",
            "'Rewards' has no 'methd'; did you mean 'method'?",
        ),
        ("graph_test_pkg.my_rewards:Needy.method", "Needy needs weight to be constructed"),
        ("graph_test_pkg.my_rewards:Rewards", "is a class"),
        ("graph_test_pkg.my_rewards:number", "cannot be called"),
        ("graph_test_pkg.broken:f", "cannot be imported"),
        ("graph_test_pkg.half:f", "cannot be imported"),
        ("graph_test_pkg.needs:f", "needs the module 'not_there_at_all', which is not installed"),
        ("score", "names no function"),
        (":score", "names no function"),
        ("graph_test_pkg:", "names no function"),
    ],
)
def test_what_is_not_there(rewards, path, said):
    with pytest.raises(PipelineError) as caught:
        function_of(path)
    assert "node 'reward'" in str(caught.value) and said in str(caught.value)


def test_what_the_decorator_said_is_found_behind_wrappers(rewards):
    @node(writes="returns", role="CRITIC")
    def plain(responses, *, scale): ...

    @functools.wraps(plain)
    def wrapped(*args, **kwargs): ...

    graph = (
        Pipeline("p")
        .add_node("partial", functools.partial(plain, scale=2))
        .add_node("wrapped", wrapped, ["partial"])
        .add_node("instance", f"{rewards}:instance", ["wrapped"])
        .build()
    )
    assert [n.spec.writes for n in graph.nodes.values()] == [("returns",)] * 3
    assert [n.node_role.name for n in graph.nodes.values()] == ["CRITIC", "CRITIC", "REWARD"]


def test_builtins_are_refused():
    with pytest.raises(PipelineError, match="node 'reward'.*cannot be inspected"):
        function_of(max)


def test_async_functions_are_told(rewards, config):
    class AsyncCall:
        async def __call__(self, ctx): ...

    graph = Pipeline("p").add_node("a", f"{rewards}:slow").add_node("b", AsyncCall()).build()
    assert [n.contract.is_async for n in graph.bind(config, []).nodes] == [True, True]
