"""Recipes of the Tinker cookbook, unchanged, as the table in docs/tinker.md lists them. `make
test-tinker` installs it."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

pytest.importorskip("tinker_cookbook", reason="wants the Tinker cookbook: make test-tinker")

from tests.patience import wait_until  # noqa: E402
from tests.source_trees import SOURCE  # noqa: E402
from tests.tinker.cookbook import MODEL, write_kitchen  # noqa: E402
from tests.tinker.server import Served, tinker_server  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.by_hand]

PAGE = SOURCE.parents[1] / "docs" / "tinker.md"
LASTS_S = 180
STUDENT = f"model_name={MODEL}"
RL = "loss_fn=importance_sampling"
NO_TESTS = "eval_every=0"
SMALL_RL = "group_size=2 batch_size=2 max_tokens=8 max_steps=1"
SMALL_SDFT = "groups_per_batch=4 max_tokens=8 max_steps=2 max_context_length=2048"
SMALL_STUDENT = "groups_per_batch=16 group_size=4 max_tokens=8 max_steps=8 learning_rate=3e-3"


@dataclass(frozen=True)
class Recipe:
    """Its command line, and what its metrics show."""

    arguments: str
    num_steps: int
    metric: str = ""
    """What moves; empty where a few steps show nothing."""
    rises: bool = False


RECIPES = {
    "sl_loop": Recipe(
        f"{STUDENT} max_steps=8 batch_size=32 learning_rate=1e-2", 8, "train_mean_nll"
    ),
    "sl_basic": Recipe(f"{STUDENT} max_steps=3 learning_rate=1e-2", 3, "train_mean_nll"),
    "chat_sl.train": Recipe(
        f"{STUDENT} max_steps=5 batch_size=16 learning_rate=1e-2", 5, "train_mean_nll"
    ),
    "prompt_distillation.train": Recipe(
        f"{STUDENT} file_path=chats.jsonl max_steps=5 batch_size=16 learning_rate=1e-2",
        5,
        "train_mean_nll",
    ),
    "preference.dpo.train": Recipe(
        f"{STUDENT} max_steps=5 batch_size=8 learning_rate=1e-3", 5, "dpo_loss"
    ),
    "distillation.off_policy_reasoning": Recipe(
        f"{STUDENT} batch_size=8 max_steps=5 buffer_size=16 max_prompts=64 learning_rate=1e-2",
        5,
        "train_mean_nll",
    ),
    "rl_loop": Recipe(f"{STUDENT} {RL} max_steps=2 batch_size=4 group_size=4 max_tokens=8", 2),
    "rl_basic": Recipe(f"{STUDENT} max_steps=1 max_tokens=8", 1),
    "distillation.on_policy_multi_teacher": Recipe(
        f"deepmath_teacher_model={MODEL} tulu3_teacher_model={MODEL} max_tokens=8 max_steps=1 "
        "deepmath_groups_per_batch=4 tulu3_groups_per_batch=4",
        1,
    ),
    "multiplayer_rl.guess_number.train": Recipe(f"{STUDENT} {SMALL_RL} {NO_TESTS}", 1),
    "multiplayer_rl.twenty_questions.train": Recipe(f"{STUDENT} {SMALL_RL} {NO_TESTS}", 1),
    "multiplayer_rl.text_arena.train": Recipe(
        f"{STUDENT} batch_size=4 num_train_datapoints=8 num_test_datapoints=2 max_tokens=8 "
        f"max_steps=1 {NO_TESTS}",
        1,
    ),
    "preference.shorter.train": Recipe(f"{STUDENT} {SMALL_RL} {NO_TESTS}", 1),
    "rubric.train": Recipe(
        f"{RL} grader_llm_name={MODEL} groups_per_batch=4 max_tokens=8 max_steps=1 {NO_TESTS} "
        "train_jsonl_path=rubric.jsonl test_jsonl_path=rubric.jsonl",
        1,
    ),
    "sdft.train": Recipe(f"{STUDENT} {SMALL_SDFT} {NO_TESTS}", 2),
}
WITH_CHROMA = {
    "search_tool.train": Recipe(
        f"{STUDENT} {SMALL_RL} chroma_host=127.0.0.1 chroma_port={{port}}", 1
    )
}
AFTER_SL = {
    "math_rl.train": Recipe(
        f"{RL} load_checkpoint_path={{state}} max_steps=8 group_size=8 groups_per_batch=16 "
        "learning_rate=3e-3 renderer_name=qwen3_5_disable_thinking",
        8,
        "env/all/reward/total",
        rises=True,
    ),
    "distillation.on_policy_distillation": Recipe(
        f"teacher_checkpoint={{sampler}} {SMALL_STUDENT} renderer_name=qwen3_5_disable_thinking "
        f"{STUDENT}",
        8,
        "teacher_kl",
    ),
}
"""Of these the student, or the teacher, is what `sl_loop` trained."""


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kitchen")
    write_kitchen(folder)
    return folder


@pytest.fixture(scope="module")
def served(kitchen: Path) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(kitchen)
        with tinker_server(Path("."), name=MODEL) as found:
            yield found


def run(served: Served, kitchen: Path, name: str, recipe: Recipe) -> Path:
    """The recipe's log, with its last step's metrics checked."""
    log = kitchen / "logs" / name
    environment = {
        **os.environ,
        "TINKER_BASE_URL": served.url,
        "TINKER_API_KEY": served.key,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(kitchen / "cache"),
        "OMP_NUM_THREADS": "1",
        # of `search_tool`: its data lie in the home, and its embeddings are never asked for
        "HOME": str(kitchen),
        "GCP_VERTEXAI_PROJECT_NUMBER": "0",
        "GCP_VERTEXAI_REGION": "none",
    }
    module = f"tinker_cookbook.recipes.{name}"
    command = [sys.executable, "-m", module, f"log_path={log}", *recipe.arguments.split()]
    done = subprocess.run(
        command,
        cwd=kitchen,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LASTS_S,
    )
    assert done.returncode == 0, done.stdout[-3000:]

    rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    steps = {row["step"] for row in rows if "step" in row}
    assert len(steps) >= recipe.num_steps
    if recipe.metric:
        curve = [row[recipe.metric] for row in rows if recipe.metric in row]
        gained = curve[-1] - curve[0] if recipe.rises else curve[0] - curve[-1]
        assert gained > 0, curve
    return log


@pytest.mark.parametrize("name", [each for each in RECIPES if each != "sl_loop"])
def test_a_recipe_runs(served: Served, kitchen: Path, name: str) -> None:
    run(served, kitchen, name, RECIPES[name])


def answers(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def chroma_port(kitchen: Path) -> Iterator[int]:
    """Of a real server with one document."""
    chroma = pytest.importorskip("chromadb")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    folder = kitchen / "chroma"
    chroma.PersistentClient(str(folder)).create_collection("wiki_embeddings").add(
        ids=["one"], embeddings=[[0.1] * 768], documents=["One is a number."]
    )

    command = [Path(sys.executable).with_name("chroma"), "run", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--path", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: answers(port), "Chroma answers")
            yield port
        finally:
            server.terminate()


def test_a_recipe_with_a_tool_runs(served: Served, kitchen: Path, chroma_port: int) -> None:
    for name, recipe in WITH_CHROMA.items():
        arguments = recipe.arguments.format(port=chroma_port)
        run(served, kitchen, name, replace(recipe, arguments=arguments))


def test_recipes_go_on_from_what_another_trained(served: Served, kitchen: Path) -> None:
    log = run(served, kitchen, "sl_loop", RECIPES["sl_loop"])
    saved = json.loads((log / "checkpoints.jsonl").read_text().splitlines()[-1])
    for name, recipe in AFTER_SL.items():
        arguments = recipe.arguments.format(
            state=saved["state_path"], sampler=saved["sampler_path"]
        )
        run(served, kitchen, name, replace(recipe, arguments=arguments))


def test_the_table_lists_these_recipes() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| yes \|([^|]*)\|", PAGE.read_text(), re.MULTILINE)
    tested = {**RECIPES, **WITH_CHROMA, **AFTER_SL}
    assert {name for name, _ in rows} == tested.keys()
    assert {name for name, learns in rows if learns.strip()} == {
        name for name, recipe in tested.items() if recipe.metric
    }
