"""Training rows that are read when they are asked for, against those that are all read at the
start."""

import json
import pickle
from fractions import Fraction
from typing import Any

import pytest

from distflow.config import preset_config
from distflow.config.keys.schema import with_values
from distflow.data.encoded_prompts import PromptRows, UnusableRow
from distflow.errors import UserError
from distflow.launch.plan_data import data_plan
from distflow.runtime.spec import Spec
from tests.e2e.runs import Playground

CODE = ("reward.functions={default: [code]}", "custom_reward_function.path=null")
LONG = {"prompt": "x" * 40, "answer": "7"}


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    return Playground(tmp_path_factory.mktemp("lazy"), num_rows=300)


def spec_of(
    ground: Playground, rows: list[dict[str, Any]], *overrides: str, preset: str = "grpo"
) -> Spec:
    file = ground.folder / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ground.spec(preset, f"data.train_files={file}", *overrides)[1]


def good(count: int) -> list[dict[str, Any]]:
    tests = ["assert f(1) == 2"]
    return [
        {"prompt": f"{i}=", "answer": tests, "data_source": "ab"[i % 2], "level": i}
        for i in range(count)
    ]


@pytest.mark.parametrize(
    "more",
    [(), ("data.prompt_format=chat", "data.max_prompt_length=64"), ("data.train_max_samples=280",)],
)
def test_rows_fingerprint_and_plan_are_those_of_all(ground, more):
    _, spec = ground.spec("grpo", *more)
    _, lazy = ground.spec("grpo", "data.lazy=true", *more)
    assert lazy.data == spec.data and len(lazy.rows) == len(spec.rows) == lazy.data.num_rows
    order = [299, 3, 256, 255, 0] if "280" not in str(more) else [279, 3, 256, 0]
    assert [lazy.rows[i] for i in order] == [spec.rows[i] for i in order] and type(
        lazy.rows
    ) is not type(spec.rows)
    assert isinstance(lazy.rows, PromptRows)
    assert list(lazy.rows.some([7, 270, 7, 260])) == [spec.rows[i] for i in (7, 270, 7, 260)], (
        "rows that are read together"
    )
    again = pickle.loads(pickle.dumps(lazy.rows))
    assert again[270] == spec.rows[270] and again.fingerprint() == lazy.facts["data_fingerprint"]  # type: ignore[attr-defined]


def test_domains_have_their_rows_in_their_order(ground):
    files = {name: ground.folder / f"{name}.jsonl" for name in ("sums", "words")}
    for number, (name, file) in enumerate(files.items()):
        rows = [{"prompt": f"{name[0]}{i}=", "answer": "7"} for i in range(270 + number)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    domains = (
        "data.domains={"
        + ", ".join(f"{name}: {{train_files: {file}}}" for name, file in files.items())
        + "}"
    )
    (_, spec), (_, lazy) = (
        ground.spec("grpo", "data.train_files=[]", domains, *more)
        for more in ((), ("data.lazy=true",))
    )
    assert lazy.data == spec.data and [each.num_rows for each in lazy.data.domains] == [270, 271]
    assert list(lazy.rows) == list(spec.rows)


@pytest.mark.parametrize(
    ("row", "overrides", "reason"),
    [
        (LONG, (), "overlong"),
        ({"answer": "7"}, ("data.bad_rows=skip",), "bad_row"),
        ({"prompt": "a", "answer": ["assert f(1) =="]}, CODE, "broken_tests"),
    ],
)
def test_a_row_that_is_left_out_says_why_when_its_turn_comes(ground, row, overrides, reason):
    rows = [{**each, "data_source": "a"} for each in (*good(300), row)]
    lazy = spec_of(ground, rows, "data.lazy=true", *overrides).rows
    with pytest.raises(UnusableRow) as raised:
        lazy[300]
    assert raised.value.reason == reason
    assert [each.index for each in lazy[298:]] == [298, 299], "a slice has what is usable"
    assert len(spec_of(ground, rows, *overrides).rows) == 300, (
        "as it is left out where all rows are read"
    )


@pytest.mark.parametrize(
    ("row", "overrides", "message"),
    [
        ({"answer": "7"}, (), r"own.jsonl:301"),
        (LONG, ("data.filter_overlong_prompts=false",), r"own\.jsonl:301: .* 40 tokens"),
        (
            {"prompt": "a", "answer": "7", "data_source": "cut"},
            (),
            "domain .*'cut'",
        ),
        (
            {"prompt": "a", "answer": ["assert f(1) =="]},
            (*CODE, "data.broken_tests=error"),
            ":301",
        ),
    ],
)
def test_a_row_that_ends_a_run_names_itself(ground, row, overrides, message):
    lazy = spec_of(ground, [*good(300), row], "data.lazy=true", *overrides).rows
    with pytest.raises(UserError, match=message) as raised:
        lazy[300]
    assert not isinstance(raised.value, UnusableRow)


def test_what_is_wrong_with_all_rows_is_found_before_the_start(ground):
    with pytest.raises(UserError, match="data.prompt_key"):
        spec_of(
            ground, [{"question": "a", "answer": "7"}] * 270, "data.lazy=true", "data.bad_rows=skip"
        )

    with pytest.raises(UserError, match="none of 256 .*max_prompt_length"):
        spec_of(ground, [LONG] * 270, "data.lazy=true")
    tags = ("data.tag_key=level", "data.domains={one: {tags: ['1']}}")
    tagged = [{**row, "level": "1"} for row in good(300)]
    with pytest.raises(UserError, match=r"(?s)data\.lazy.*data\.lazy=false"):
        spec_of(ground, tagged, "data.lazy=true", *tags)

    with pytest.raises(UserError, match=r"data\.domains\.two\.tags: .*data\.train_files .* tag 3"):
        more = "data.domains={one: {tags: ['1']}, two: {tags: ['3']}}"
        spec_of(ground, tagged, "data.tag_key=level", more)


def test_no_sample_can_be_older_than_the_run_is_long(ground):
    """A bound that no step can reach costs nothing."""
    _, spec = ground.spec("grpo", "async.max_staleness=1000000", "trainer.total_training_steps=2")
    assert spec.data.max_staleness == spec.data.total_steps == 2


def test_the_margin_of_a_simulators_capacity_is_that_of_its_own_pipeline():
    more = {"actor_rollout_ref.model.path": "model", "embodied_sampling.oversample_factor": 1.5}
    config = with_values(preset_config("embodied_srpo"), more)
    assert data_plan(config, {"": 40}).oversampling == Fraction(1, 2)
    assert (
        data_plan(
            with_values(config, {"embodied_sampling.oversample_factor": 1.0}), {"": 40}
        ).oversampling
        == 0
    )
    other = with_values(preset_config("grpo"), {"algorithm.filter_groups.oversampling": 0.25})
    assert data_plan(other, {"": 40}).oversampling == Fraction(1, 4)
