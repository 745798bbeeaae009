"""Runs whose domains choose their rows of one file by tags, and validation by tag."""

import json
from pathlib import Path
from typing import Any

import pytest

from distflow.errors import UserError
from distflow.observe.run_reader import read_metrics, read_samples
from tests.e2e.runs import Playground
from tests.sparse_params import one_fast_in

# All responses to rows of one tag are right, a third of the others.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(extra_info.get("tag") == "aime" or sum(map(ord, solution_str)) % 3 == 0)
"""
TAGS = ("gsm", "mbpp", "aime", "gsm", "apps", "gsm")
DOMAINS = "{math: {tags: [gsm, aime], weight: 3}, code: {tags: [mbpp, apps]}}"


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    ground = Playground(tmp_path_factory.mktemp("tags"))
    ground.write_reward(REWARD)
    rows = [
        {"prompt": f"{'ab' * (i % 3 + 1)}{i}=", "answer": "7", "tag": TAGS[i % 6]}
        for i in range(18)
    ]
    ground.write_rows(rows)

    return ground


def write(ground: Playground, name: str, rows: list[Any]) -> Path:
    path = ground.folder / name
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def given(ground: Playground, *more: str) -> tuple[str, ...]:
    validated = (f"data.val_files={ground.folder}/rows.jsonl", "data.allow_overlap=true")
    return ("data.tag_key=tag", f"data.domains={DOMAINS}", *validated, *more)


def test_one_file_feeds_domains_by_the_tags_of_its_rows(ground):
    _, spec = ground.spec("grpo", *given(ground, "data.domains.math.train_max_samples=7"))
    assert [(domain.name, domain.num_rows) for domain in spec.data.domains] == [
        ("math", 7),
        ("code", 6),
    ]
    assert [(row.domain, row.tag) for row in spec.rows[:3]] == [
        ("math", "gsm"),
        ("math", "aime"),
        ("math", "gsm"),
    ]
    assert {(row.domain, row.tag) for row in spec.rows[7:]} == {("code", "mbpp"), ("code", "apps")}
    assert [(chosen.name, len(chosen.rows)) for chosen in spec.validation] == [
        ("math", 12),
        ("code", 6),
    ]
    assert spec.rows[0].origin.endswith("rows.jsonl:1") and spec.rows[0].extra_info == {
        "tag": "gsm"
    }


def test_accuracy_is_reported_by_tag(ground):
    own = write(
        ground, "own.jsonl", [{"prompt": f"{i}=", "answer": "7", "tag": "gsm"} for i in range(4)]
    )
    more = (
        "trainer.total_training_steps=2",
        "trainer.test_freq=1",
        "trainer.save_freq=1",
        "trust.check_freq=1",
    )
    extra = f"data.domains.other={{train_files: {own}, val_files: {own}}}"
    settings = given(ground, *more, extra, "actor_rollout_ref.rollout.val_kwargs.n=2")
    run = ground.run("grpo", *settings, name="whole")
    last = [dict(record.values) for record in read_metrics(run.folder) if record.kind == "val"][-1]
    means = {
        name.split("/", 1)[1][:-5]
        for name in last
        if name.endswith("/mean") and name.startswith("val_correct")
    }
    assert means == {
        "all",
        "math",
        "code",
        "other",
        "gsm",
        "aime",
        "mbpp",
        "apps",
        "math/gsm",
        "other/gsm",
    }
    file = {
        row["prompt"]: row["tag"] for row in map(json.loads, (ground.folder / "rows.jsonl").open())
    }
    rows = [row for row in read_samples(run.folder, 2, "val") if row["kind"] == "greedy"]
    right = [row["acc"] for row in rows if file.get(row["prompt"], "gsm") == "gsm"]
    assert len(right) == 13 and last["val_correct/gsm/mean"] == pytest.approx(sum(right) / 13)
    assert {"val_correct/gsm/pass@2", "val_correct/math/gsm/mean@2"} <= set(last)
    assert not [note for note in run.notes("warning") if "sampled policy" not in note]


BAD = {
    "no domain has it": (
        {"prompt": "5", "answer": "5", "tag": "gms"},
        r"bad.jsonl:2: no domain has the tag 'gms' .*did you mean 'gsm'.* data.domains.NAME.tags",
    ),
    "none": (
        {"prompt": "5", "answer": "5"},
        r"bad.jsonl:2: the tag \(column 'tag', data.tag_key\) is missing",
    ),
    "a list": ({"prompt": "5", "answer": "5", "tag": ["gsm"]}, r"bad.jsonl:2: the tag .* is list"),
}


@pytest.mark.parametrize("name", one_fast_in(3, BAD))
def test_a_row_without_a_domain_is_told_with_its_file_and_line(ground, name):
    row, said = BAD[name]
    good = [{"prompt": f"{i}", "answer": "5", "tag": tag} for i, tag in enumerate(TAGS)]
    path = write(
        ground, "bad.jsonl", [good[0], row, *good[1:], "{not json", {"prompt": 5, "tag": "mbpp"}]
    )
    bad = (f"data.train_files={path}", f"data.val_files={path}")
    with pytest.raises(UserError, match=said):
        ground.spec("grpo", *given(ground, *bad))
    run = ground.run(
        "grpo",
        *given(ground, *bad, "data.bad_rows=skip", "trainer.total_training_steps=1"),
        name="skips",
    )
    assert not [note for note in run.notes("warning") if "sampled policy" not in note]
