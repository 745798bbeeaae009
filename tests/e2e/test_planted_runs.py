"""Faults outside of the steps, planted one at a time into real runs: in what a resume restores, in
a validation, and in the rows as they are read. The checks name each, and say nothing where there
is none."""

import json
import random
from builtins import range as every
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file, save_file

from distflow.data import encode_rows, sources
from distflow.data.dataset_columns import RawRow
from distflow.errors import TrustError, UserError
from distflow.launch import one_process_launcher, run_start
from distflow.launch.one_process_launcher import launch_local
from distflow.observe.run_reader import read_events
from distflow.rewards import router
from distflow.rewards.reward_results import VALIDATION, counted_for
from distflow.rollout.embedded import scheduler
from distflow.runtime import validation, validation_loss, validation_results
from distflow.runtime.checkpoint.files import describe, read_manifest, write_manifest
from distflow.runtime.compiled_node import Step
from distflow.runtime.resources import Resources
from distflow.runtime.spec import LaunchOptions
from distflow.scheduling.group_states import CountsError
from distflow.training import torch_engine
from distflow.training.torch_engine import TorchTrainEngine
from tests.e2e.runs import Playground
from tests.sparse_params import one_fast_in

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]
KL = ("grpo", "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.optim.lr=1e-2")
PPO = (
    "ppo",
    "actor_rollout_ref.rollout.n=1",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.target_kl=0.01",
    "algorithm.kl_ctrl.horizon=50",
)
AHEAD = ("grpo", "async.max_staleness=2")
BINARY = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(map(ord, solution_str)) % 3 == 0)
"""
ROLES = ("user", "assistant")
WEIGHT = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    ground = Playground(tmp_path_factory.mktemp("run"))
    ground.write_reward(BINARY)
    held_out = [
        {"prompt": f"c{i}=", "answer": str(i), "data_source": "xy"[i % 2]} for i in range(5)
    ]
    (ground.folder / "held_out.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in held_out)
    )

    return ground


def saved(ground: Playground, config: tuple[str, ...]) -> Path:
    """A checkpoint after two steps of such a run."""
    name = f"base-{'-'.join(config)}".replace("/", "-")
    if not (ground.folder / name).exists():
        preset, *overrides = config
        ground.run(
            preset,
            *overrides,
            "trainer.save_freq=2",
            "trainer.total_training_steps=4",
            name=name,
        )

    return ground.folder / name / "checkpoints" / "step-000002"


def resume(ground: Playground, config: tuple[str, ...], checkpoint: Path, name: str) -> list[str]:
    """Resumes for two steps; the checks that passed."""
    preset, *overrides = config
    steps = ("trainer.total_training_steps=4", f"trainer.resume_mode={checkpoint}")
    run = ground.run(preset, *overrides, *steps, name=name)
    assert run.notes("warning") == run.notes("finding") == []

    return [
        name
        for event in read_events(run.folder)
        if event.kind == "checks"
        for name in event.fields["passed"]
    ]


def after_load(change: Callable[[TorchTrainEngine], object]) -> Plant:
    def plant(patch: Patch) -> None:
        original = TorchTrainEngine.load_state

        def planted(self: TorchTrainEngine, state: Any) -> None:
            original(self, state)
            with torch.no_grad():
                change(self)

        patch.setattr(TorchTrainEngine, "load_state", planted)

    return plant


def weight(rule: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    def change(engine: TorchTrainEngine) -> None:
        parameter = dict(engine.model.named_parameters())[WEIGHT]
        parameter.copy_(rule(parameter.clone()))

    return after_load(change)


def anew(weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.init.normal_(
        torch.empty_like(weight), generator=torch.Generator().manual_seed(1)
    )


def without_moment(patch: Patch) -> None:
    original = torch_engine.load_optimizer_state

    def planted(
        optimizer: Any, parameters: Any, tensors: dict[str, torch.Tensor], meta: Any
    ) -> None:
        gone = f"exp_avg/{WEIGHT}"
        original(optimizer, parameters, {**tensors, gone: torch.zeros_like(tensors[gone])}, meta)

    patch.setattr(torch_engine, "load_optimizer_state", planted)


def step_counts_lost(engine: TorchTrainEngine) -> None:
    for entries in engine.optimizer.state.values():
        entries["step"].zero_()


def moments_lost_later(patch: Patch) -> None:
    """Between the start and the first update."""
    load, call, engines = TorchTrainEngine.load_state, Step.__call__, list[TorchTrainEngine]()

    def loaded(self: TorchTrainEngine, state: Any) -> None:
        load(self, state)
        engines.append(self)

    def planted(self: Step, batch: Any, ctx: Any) -> Any:
        if self.node.node_id == "reference_log_prob":
            for entries in engines[0].optimizer.state.values():
                entries["exp_avg_sq"].zero_()
        return call(self, batch, ctx)

    patch.setattr(TorchTrainEngine, "load_state", loaded)
    patch.setattr(Step, "__call__", planted)


def restored(change: Callable[[Resources, dict[str, Any]], dict[str, Any]]) -> Plant:
    def plant(patch: Patch) -> None:
        original = one_process_launcher.restore

        def planted(checkpoint: Any, resources: Resources) -> dict[str, Any]:
            return change(resources, original(checkpoint, resources))

        patch.setattr(one_process_launcher, "restore", planted)

    return plant


def newest_reference(resources: Resources, state: dict[str, Any]) -> dict[str, Any]:
    resources.ref.model.load_state_dict(resources.actor.model.state_dict())  # type: ignore[union-attr]
    return state


def generators_not_set(patch: Patch) -> None:
    patch.setattr(one_process_launcher, "set_generators", lambda *_: random.seed(4))


def snapshot(change: Callable[[dict[str, Any]], object]) -> Plant:
    def plant(patch: Patch) -> None:
        original = run_start.Coordinator

        def planted(plan: Any, ledger: Any, start: Any) -> Any:
            change(start)
            return original(plan, ledger, start)

        patch.setattr(run_start, "Coordinator", planted)

    return plant


def off_by_a_row(start: dict[str, Any]) -> None:
    start["issued"], start["consumed"] = start["issued"] + 1, start["consumed"] + 1


def queue_lost(start: dict[str, Any]) -> None:
    start["issued"] = start["issued"] - len(start["live"])
    start["live"] = []


def another_queue(patch: Patch) -> None:
    original = one_process_launcher.load_queued

    def planted(checkpoint: Any) -> Any:
        queued = original(checkpoint)
        assert queued
        for group in queued.values():
            group.data["scores"] = 1 - group.data["scores"]
        return queued

    patch.setattr(one_process_launcher, "load_queued", planted)


RESUME_FAULTS: dict[str, tuple[Plant, str, tuple[str, ...]]] = {
    "a moment not restored": (without_moment, rf"actor exp_avg {WEIGHT} \(1 in all\)", KL),
    "a transposed weight": (weight(lambda w: w.T), f"actor weight {WEIGHT}", KL),
    "an initialised weight": (weight(anew), f"actor weight {WEIGHT}", PPO),
    "a weight cast to bfloat16 and back": (
        weight(lambda w: w.bfloat16().float()),
        f"actor weight {WEIGHT}",
        KL,
    ),
    "a scheduler that begins anew": (
        after_load(lambda engine: setattr(engine, "num_steps", 0)),
        "actor number of optimizer steps",
        KL,
    ),
    "step counts of the optimizer lost": (after_load(step_counts_lost), "actor step ", KL),
    "moments lost before the first update": (
        moments_lost_later,
        r"step 3 found \(resume\): actor exp_avg_sq",
        KL,
    ),
    "the newest weights as the reference": (restored(newest_reference), "ref weight", KL),
    "random streams not set": (generators_not_set, r"random stream random", KL),
    "the state of nodes lost": (restored(lambda resources, state: {}), "state of node", PPO),
    "a data position off by a row": (snapshot(off_by_a_row), "the ledger counts|data position", KL),
    "a queue that is lost": (snapshot(queue_lost), "the ledger counts|data position", AHEAD),
    "other groups in the queue": (another_queue, "queued group", AHEAD),
}


@pytest.mark.parametrize("name", one_fast_in(99, RESUME_FAULTS))
def test_what_a_resume_does_not_restore_is_named(ground, monkeypatch, name):
    plant, seen, config = RESUME_FAULTS[name]
    checkpoint = saved(ground, config)
    plant(monkeypatch)
    with pytest.raises((TrustError, CountsError), match=seen):
        resume(ground, config, checkpoint, f"fault-{list(RESUME_FAULTS).index(name)}")


@pytest.mark.slow
@pytest.mark.parametrize("config", [PPO, KL, AHEAD], ids=["ppo", "grpo", "ahead"])
def test_a_healthy_resume_passes(ground, config):
    assert "resume" in resume(
        ground, config, saved(ground, config), f"healthy-{config[0]}-{len(config)}"
    )


def test_a_damaged_checkpoint_with_fitting_checksums_is_told(ground, tmp_path):
    source = saved(ground, KL)
    forged = tmp_path / "step-000002"
    forged.mkdir()
    for path in source.iterdir():
        (forged / path.name).write_bytes(path.read_bytes())
    tensors = load_file(forged / "actor.safetensors")
    tensors[f"optimizer.exp_avg_sq/{WEIGHT}"][0, 0] *= 2
    save_file(tensors, forged / "actor.safetensors")
    manifest = read_manifest(forged)
    files = {**manifest.files, "actor.safetensors": describe(forged / "actor.safetensors")}
    write_manifest(forged, replace(manifest, files=files))
    with pytest.raises(TrustError, match=f"actor exp_avg_sq {WEIGHT} "):
        resume(ground, KL, forged, "forged")


@pytest.mark.slow
def test_a_checkpoint_without_hashes_is_not_compared(ground):
    checkpoint = saved(ground, (*KL, "trust.check_freq=0"))
    preset, *overrides = KL
    steps = (
        "trainer.total_training_steps=4",
        f"trainer.resume_mode={checkpoint}",
        "trust.check_freq=5",
    )
    _, spec = ground.spec(preset, *overrides, *steps, name="unhashed")
    launch_local(spec, LaunchOptions(allow_change=("trust.check_freq",)))
    first = next(
        event.fields for event in read_events(ground.folder / "unhashed") if event.kind == "checks"
    )
    assert first["not_checked"] == {"resume": "all: the checkpoint has no hashes"}


def asked_with(change: Callable[[Any], Any]) -> Plant:
    """Other parameters of the samples than those of the config."""

    def planted(original: Any) -> Any:
        return lambda group, row, params, seed: original(group, row, change(params), seed)

    return lambda patch: replaced(validation, "Group", planted)(patch)


def otherwise_asked(change: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[[Any], Any]:
    """change: of row and sampling parameters."""
    return lambda original: (
        lambda group, row, params, seed: original(group, *change(row, params), seed)
    )


def next_sample(original: Any) -> Any:
    async def planted(self: Any, samples: Any) -> Any:
        found = await original(self, samples)
        return found[1:] + found[:1]

    return planted


def cut(original: Any) -> Any:
    return lambda domain, text, *more: original(
        domain, text[:-1] if counted_for.get() == VALIDATION else text, *more
    )


def older_versions(original: Any) -> Any:
    return lambda batch: [
        {**row, "versions": [v - 1 for v in row["versions"]]} for row in original(batch)
    ]


def replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Plant:
    return lambda patch: patch.setattr(owner, name, wrap(getattr(owner, name)))


def all_right(original: Any) -> Any:
    return lambda self: {
        name: 1.0 if name.endswith("/mean") else value for name, value in original(self).items()
    }


def numbers(rule: Callable[[list[int]], list[int]]) -> Plant:
    """Another choice of the prompts that are asked."""
    planted = lambda *bounds: rule(list(every(*bounds)))  # noqa: E731
    return lambda patch: patch.setattr(validation, "range", planted, raising=False)


VALIDATION_FAULTS: dict[str, tuple[Plant, str]] = {
    "greedy and sampled swapped": (
        asked_with(lambda params: replace(params, greedy=not params.greedy)),
        r"sample 0 of row 0 of 'val' \(greedy\) was generated by .*greedy=False",
    ),
    "prompts without their first token": (
        replaced(
            validation,
            "Group",
            otherwise_asked(lambda r, p: (replace(r, prompt_ids=r.prompt_ids[1:]), p)),
        ),
        "was generated from different tokens than its prompt's",
    ),
    "the last prompt left out": (
        numbers(lambda rows: rows[:-1]),
        "row 4 of 'val' .* was requested 0 times",
    ),
    "the first prompt twice": (
        numbers(lambda rows: [*rows, rows[0]]),
        "row 0 of 'val' .* was requested 2 times",
    ),
    "wrong counts as right": (
        replaced(validation, "is_right", lambda original: lambda accuracy: not original(accuracy)),
        r"val_correct/\S+ is reported as",
    ),
    "a mean over prompts that are right": (
        replaced(validation_results.ValidationResults, "metrics", all_right),
        r"val_correct/\S+/mean is reported as 1, but .* by the recorded scores",
    ),
    "scores of the next sample": (
        replaced(router.RewardRouter, "__call__", next_sample),
        r"'val' \(sampled\) has the accuracy of another",
    ),
    "nothing that ends them": (
        asked_with(lambda params: replace(params, stop_token_ids=())),
        "stop_token_ids=\\(\\)",
    ),
    "samples alike": (
        replaced(
            scheduler, "sample_key", lambda original: lambda stream, sample: original(stream, 0)
        ),
        r"\(sampled\) .* has a duplicate",
    ),
    "a text that is cut before it is scored": (
        replaced(router, "call_arguments", cut),
        "the accuracy of another",
    ),
    "tokens of older weights": (
        replaced(validation, "sample_rows", older_versions),
        r"is of weight version \[-1\], and 0 is the newest",
    ),
}


def validating(ground: Playground) -> tuple[str, ...]:
    kwargs = "actor_rollout_ref.rollout.val_kwargs"
    files = (
        f"data.val_files={ground.folder}/held_out.jsonl",
        "trainer.val_before_train=true",
        "trainer.test_freq=1",
    )

    return (
        "grpo",
        *files,
        f"{kwargs}.n=3",
        f"{kwargs}.temperature=1.0",
        "trainer.total_training_steps=1",
    )


@pytest.mark.parametrize("name", one_fast_in(99, VALIDATION_FAULTS))
def test_a_wrong_validation_is_named(ground, monkeypatch, name):
    plant, seen = VALIDATION_FAULTS[name]
    plant(monkeypatch)
    preset, *overrides = validating(ground)

    with pytest.raises(TrustError, match=rf"step 0 found \(validation\): .*({seen})"):
        ground.run(preset, *overrides, name=f"validation-{list(VALIDATION_FAULTS).index(name)}")


def without_ends(original: Any) -> Any:
    def planted(samples: Any) -> Any:
        batch = original.from_samples(samples)
        batch["response_mask"] = batch["response_mask"] * (batch["response_ids"] != 2)
        return batch

    return SimpleNamespace(from_samples=planted)


def over_all(original: Any) -> Any:
    def planted(*given: Any) -> Any:
        metrics, rows = original(*given)
        means = [row["loss"] / row["tokens"] for row in rows]
        return {"sft/val_loss": sum(means) / len(means)}, rows

    return planted


def without_last(original: Any) -> Any:
    return lambda sets, *models: original(
        [replace(each, rows=each.rows[:-1]) for each in sets], *models
    )


LOSS_FAULTS: dict[str, tuple[Plant, str]] = {
    "end tokens left out": (
        replaced(validation_loss, "Batch", without_ends),
        r"\(loss\) counts 6 tokens, but the response has 7",
    ),
    "a mean of means": (
        replaced(validation, "validation_loss", over_all),
        "sft/val_loss is reported as",
    ),
    "a row left out": (
        replaced(validation, "validation_loss", without_last),
        r"row 5 .* \(loss\) was requested 0 times",
    ),
}
RL_ONLY = (
    "reward.functions",
    "reward.num_workers",
    "custom_reward_function.path",
    "actor_rollout_ref.rollout.n",
)


def fine_tuned(ground: Playground, rows: list[dict[str, Any]], name: str) -> list[str]:
    """Trains on some of the rows, and validates on the others; the checks that passed."""
    for part, own in (("train", rows[:8]), ("val", rows[8:])):
        (ground.folder / f"{name}-{part}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in own)
        )

    files = [f"data.{part}_files={ground.folder}/{name}-{part}.jsonl" for part in ("train", "val")]
    lengths = (
        "data.max_prompt_length=60",
        "data.max_response_length=60",
        "trainer.total_training_steps=1",
    )
    away = (f"~{key}" for key in RL_ONLY)
    run = ground.run("sft", *files, *lengths, *away, "trainer.test_freq=1", name=name)
    assert run.notes("warning") == run.notes("finding") == []

    return [
        name
        for event in read_events(run.folder)
        if event.kind == "checks"
        for name in event.fields["passed"]
    ]


PAIRS = [{"prompt": f"q{i}=", "response": f"is {i}" + "!" * (i % 3)} for i in every(14)]
TALKS = [
    {
        "messages": [
            {"role": role, "content": f"{role[0]}{i} {i + turn}"}
            for turn in (1, 2)
            for role in ROLES
        ]
    }
    for i in every(12)
]


@pytest.mark.parametrize("name", one_fast_in(3, LOSS_FAULTS))
def test_a_wrong_validation_loss_is_named(ground, monkeypatch, name):
    plant, seen = LOSS_FAULTS[name]
    plant(monkeypatch)
    with pytest.raises(TrustError, match=rf"step 1 found \(validation\): .*({seen})"):
        fine_tuned(ground, PAIRS, f"loss-{list(LOSS_FAULTS).index(name)}")


def of_the_next(original: Any) -> Any:
    def planted(rows: Any, *more: Any) -> Any:
        found = original(rows, *more)
        return dict(
            zip(found, [*list(found.values())[1:], next(iter(found.values()))], strict=True)
        )

    return planted


def begun_late(original: Any) -> Any:
    def planted(*arguments: Any) -> Any:
        ids, spans = original(*arguments)
        return ids, [(start + (number > 0), end) for number, (start, end) in enumerate(spans)]

    return planted


TEXT_FAULTS: dict[str, tuple[Plant, list[dict[str, Any]], str]] = {
    "responses of the next row": (
        replaced(encode_rows, "_response_ids", of_the_next),
        PAIRS,
        "the response of ",
    ),
    "turns that begin a token late": (
        replaced(encode_rows, "encode_turns", begun_late),
        TALKS,
        "a turn of the assistant",
    ),
}


@pytest.mark.parametrize("name", one_fast_in(2, TEXT_FAULTS))
def test_texts_to_learn_that_are_not_the_files_are_named(ground, monkeypatch, name):
    plant, rows, seen = TEXT_FAULTS[name]
    plant(monkeypatch)
    with pytest.raises(TrustError, match=rf"found \(data\): ({seen})"):
        fine_tuned(ground, rows, f"text-{list(TEXT_FAULTS).index(name)}")


@pytest.mark.slow
def test_validation_prompts_that_are_trained_on_are_told(ground):
    rows = [json.loads(line) for line in (ground.folder / "rows.jsonl").read_text().splitlines()]
    both = ground.folder / "both.jsonl"
    both.write_text(
        "".join(
            json.dumps(row) + "\n" for row in ({"prompt": "new", "answer": "1"}, rows[3], rows[5])
        )
    )
    files = (f"data.val_files={both}", "trainer.total_training_steps=1")
    (told,) = ground.run("grpo", *files, name="overlap").notes("warning")
    assert told.startswith("2 of 3 validation prompts are trained on, the first in ")
    assert f"{both}:2 and " in told and "rows.jsonl:4" in told
    assert (
        ground.run("grpo", *files, "data.allow_overlap=true", name="meant").notes("warning") == []
    )
    with pytest.raises(UserError, match="data.allow_overlap"):
        ground.spec("grpo", "data.allow_overlap=true")


def changed_rows(change: Callable[[list[RawRow]], list[RawRow]]) -> Plant:
    def plant(patch: Patch) -> None:
        original = sources.read_rows

        def planted(*arguments: Any) -> Iterator[RawRow]:
            yield from change(list(original(*arguments)))

        patch.setattr(sources, "read_rows", planted)

    return plant


def answers_of_the_next(rows: list[RawRow]) -> list[RawRow]:
    return [
        replace(row, answer=other.answer)
        for row, other in zip(rows, rows[1:] + rows[:1], strict=True)
    ]


DATA_FAULTS: dict[str, tuple[Callable[[list[RawRow]], list[RawRow]], str]] = {
    "ground truths of the next row": (
        answers_of_the_next,
        r"ground truth of \S*rows.* is .* in the file",
    ),
    "prompts cut": (
        lambda rows: [replace(row, prompt=row.prompt[:-1]) for row in rows],
        "the prompt of ",
    ),
    "a row twice": (lambda rows: [*rows, replace(rows[0])], "is used twice"),
    "the last of twenty ground truths": (
        lambda rows: [*rows[:-1], replace(rows[-1], answer="0")],
        r"ground truth of \S*rows.* is '0'",
    ),
}


FILES = ("jsonl", "parquet")


@pytest.fixture(scope="module", params=one_fast_in(2, FILES))
def rows_file(request, ground):
    rows = [
        {"prompt": f"a{i}\n=", "answer": f"é{i}", "hint": f"h{i}", "data_source": "xy"[i % 2]}
        for i in every(20)
    ]
    path = ground.folder / f"rows-{request.param}.{request.param}"

    if request.param == "jsonl":
        path.write_text("\n" + "".join(json.dumps(row) + "\n\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)

    return path


def read_again(ground: Playground, path: Path, name: str) -> Any:
    files = (
        f"data.train_files={path}",
        "data.num_loader_workers=0",
        "trainer.total_training_steps=1",
    )
    run = ground.run("grpo", *files, name=f"{name}-{path.suffix[1:]}")
    return next(event.fields for event in read_events(run.folder) if event.kind == "checks")


@pytest.mark.parametrize(
    ("rows_file", "name"),
    [
        *one_fast_in(2, [(kind, "ground truths of the next row") for kind in FILES], unpack=True),
        *(pytest.param(FILES[0], name, marks=pytest.mark.slow) for name in [*DATA_FAULTS][1:]),
    ],
    indirect=["rows_file"],
)
def test_rows_that_are_not_the_files_are_named(ground, monkeypatch, rows_file, name):
    change, seen = DATA_FAULTS[name]
    changed_rows(change)(monkeypatch)
    with pytest.raises(TrustError, match=rf"found \(data\): .*({seen})"):
        read_again(ground, rows_file, f"data-{list(DATA_FAULTS).index(name)}")


def test_a_file_that_is_named_twice_may_repeat_its_rows(ground):
    path = ground.folder / "named-twice.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"c{i}", "answer": "1"}) + "\n" for i in every(8))
    )
    files = f"data.train_files=[{path}, {path}]"
    run = ground.run("grpo", files, "trainer.total_training_steps=1", name="named-twice")
    checks = next(event.fields for event in read_events(run.folder) if event.kind == "checks")
    assert "data" in checks["passed"]


def test_rows_without_a_second_reader_are_said_not_to_be_checked(ground):
    (ground.folder / "made.py").write_text(
        "def rows():\n    return [{'prompt': f'd{i}', 'answer': '1'} for i in range(8)]"
    )
    source = f"{ground.folder}/made.py:rows"
    run = ground.run(
        "grpo", f"data.train_files={source}", "trainer.total_training_steps=1", name="made"
    )
    unproven = next(
        event.fields["not_checked"] for event in read_events(run.folder) if event.kind == "checks"
    )
    assert unproven == {"data": f"not read a second time: '{source}'"}
