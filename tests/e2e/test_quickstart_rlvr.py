"""Sums and small functions that the package carries: no task is in two data sets, and the tests say
what is right."""

import importlib.util
from pathlib import Path

import pytest

from distflow.config import load_config
from distflow.data.sources import BUILTIN_FOLDER
from distflow.launch.data_sources import train_sources, validation_sources
from distflow.models.loading import load_tokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_functions.py"
NAMES = ("sft", "rl", "val", "long")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_functions", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_script_writes_the_data_that_are_committed(script, tmp_path):
    script.write_data(tmp_path)
    for name in NAMES:
        file = f"functions-{name}.jsonl"
        assert (tmp_path / file).read_bytes() == (BUILTIN_FOLDER / file).read_bytes()


@pytest.mark.parametrize("preset", ["quickstart_rlvr_sft", "quickstart_rlvr"])
def test_no_row_of_the_presets_is_too_long(preset, tmp_path):
    config = load_config(preset).config
    tokenizer = load_tokenizer("builtin:tiny-arithmetic")
    judged = preset == "quickstart_rlvr"
    sources = [*train_sources(config, judged), *validation_sources(config, judged)]
    assert len(sources) == (5 if judged else 1)
    for source in sources:
        assert len(source.encode(source.read(tmp_path), tokenizer).report.lines()) == 1
