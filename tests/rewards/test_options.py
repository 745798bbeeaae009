"""Options of a part reach its function; those that it does not take are refused before anything is
judged."""

import asyncio

import pytest

from distflow.config.compose.typed_values import Mismatch
from distflow.config.keys.reward import RewardPart, parse_functions
from distflow.config.keys.schema import schema_keys
from distflow.data.sample import Sample, Segment
from distflow.errors import UserError
from distflow.rewards.router import RewardRouter
from tests.rewards.routers import make_router

SETTINGS = {"timeout_s": 20.0, "num_workers": 1, "max_response_length": 100}


def judged(functions: dict, response: str) -> dict[str, float]:
    sample = Sample(
        "0-0", 0, [Segment("prompt", (1,)), Segment("environment", (1,))], response=response
    )

    async def ask(router: RewardRouter) -> dict[str, float]:
        (judgement,) = await router([sample])
        assert judgement.reward_result.value == sum(
            judgement.scores()[part.name] * part.weight for part in router.functions_of("default")
        )
        return judgement.scores()

    with make_router(functions, **SETTINGS) as router:
        return asyncio.run(ask(router))


def test_options_from_the_config_to_the_function(tmp_path):
    (tmp_path / "own.py").write_text(
        "async def compute_score(solution_str, base=1.0, word='x', strict=False):\n"
        "    return base * solution_str.count(word) + 100 * strict\n"
    )
    own = f"{tmp_path / 'own.py'}:compute_score"
    plain = {
        "default": [
            {"name": "repetition", "weight": -0.5, "options": {"n": 1}},
            {"name": "length", "options": {"at_most": 3, "slope": 4, "unit": "words"}},
            {"name": own, "options": {"base": 2, "word": "b", "strict": True}},
            "format",
        ]
    }
    functions = parse_functions(plain)
    assert schema_keys()["reward.functions"].spec.plain(functions) == plain
    assert (
        functions["default"][0] == RewardPart("repetition", -0.5, {"n": 1})
        and functions["default"][3].options == {}
    )

    # five words, three distinct ones; two words more than three, of four that may be
    assert judged(functions, "a b a b c") == {
        "repetition": 1 - 3 / 5,
        "length": 0.5,
        own: 104.0,
        "format": 0.0,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"m": 3}, "option 'm'.* n, unit"),
        ({"n": "3"}, "'n' .* 3, not '3'"),
        ({"n": True}, "'n' .* 3, not True"),
        ({"solution_str": "a"}, "takes no option 'solution_str'"),
    ],
)
def test_options_that_the_function_does_not_take(options, message):
    with pytest.raises(UserError, match=message):
        make_router({"default": [RewardPart("repetition", 1.0, options)]}, **SETTINGS)


def test_a_part_may_have_other_options_in_another_domain():
    parts = {
        domain: [RewardPart("repetition", 1.0, {"n": n})] for domain, n in (("a", 1), ("b", 2))
    }
    with make_router(parts, **SETTINGS) as router:
        for domain, share in (("a", 1 - 2 / 4), ("b", 1 - 2 / 3)):
            segments = [Segment("prompt", (1,)), Segment("environment", (1,))]
            sample = Sample("0-0", 0, segments, domain=domain, response="x y x y")
            assert asyncio.run(router([sample]))[0].reward_result.value == pytest.approx(share)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"name": "length", "options": [1]}, "options of 'length' that are no mapping"),
        ({"name": "length", "options": {"at_most": [1]}}, "an option 'at_most' of 'length'"),
        ({"name": "length", "option": {}}, "neither a name nor"),
        ({"options": {}}, "neither a name nor"),
    ],
)
def test_options_that_are_none(part, message):
    with pytest.raises(Mismatch) as refused:
        parse_functions({"default": [part]})
    assert message in refused.value.what
