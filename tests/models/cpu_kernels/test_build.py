"""Native code is compiled once for a machine, where nobody else can write; without it torch
decodes, and says so."""

import os
import platform
from pathlib import Path

import pytest
import torch
from threadpoolctl import threadpool_info

from distflow.models.cached_decoder import DecoderView
from distflow.models.cpu_kernels import build
from distflow.models.cpu_kernels.build import NotNative, library
from distflow.models.cpu_kernels.decode_step import NativeStep
from tests.models.cpu_kernels.test_decode_step import (
    all_in_bfloat16_differs_by,
    decoded,
    exact,
    far,
    make,
    packed_by_autocast,
    some_rows,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own, and code that takes a second to compile: which instructions it has hangs
    on other flags."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "FLAGS", tuple(flag.replace("-O3", "-O1") for flag in build.FLAGS))
    build.outcome.cache_clear()
    yield tmp_path / "cache/distflow"
    build.outcome.cache_clear()


def made(cache: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}


compiles = pytest.mark.skipif(
    not build.is_there(), reason="wants a C compiler (Debian: apt-get install gcc)"
)


@compiles
def test_it_is_compiled_once_where_nobody_else_can_write(cache):
    library()
    first = made(cache)
    assert [Path(name).suffix for name in first] == [".so"]
    assert cache.stat().st_mode & 0o077 == 0
    build.outcome.cache_clear()
    library()
    assert made(cache) == first
    assert build.name() == Path(*first).stem


@compiles
@pytest.mark.slow
def test_other_flags_make_other_code(cache, monkeypatch):
    library()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    build.outcome.cache_clear()
    library()
    assert len(made(cache)) == 2


@compiles
def test_it_computes_on_the_threads_of_torch():
    model = make()
    decoded(DecoderView(model, native=True), *some_rows(5))
    assert len([pool for pool in threadpool_info() if pool["user_api"] == "openmp"]) == 1


@compiles
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="wants an x86-64 processor")
@pytest.mark.parametrize("flag", ["-mno-amx-bf16", "-mno-avx512bf16", "-mno-avx512f", "-mno-avx"])
def test_processors_that_know_less(flag, monkeypatch):
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, flag))
    model = make(hidden_size=80, intermediate_size=100, head_dim=20)

    for count in (1, 9, 61):
        ids, starts = some_rows(count)
        expected = exact(model, ids, starts)
        by_torch = far(decoded(DecoderView(model), ids, starts), expected)
        view = DecoderView(model, native=True)
        assert view._native is not None
        assert far(decoded(view, ids, starts), expected) <= 3 * by_torch + 1e-6
        trained = packed_by_autocast(model, ids, starts)
        rounded = decoded(
            DecoderView(model, native=True, compute_dtype=torch.bfloat16), ids, starts
        )
        assert (rounded - trained).abs().mean() < all_in_bfloat16_differs_by(
            model, trained, ids, starts
        ) / 20


def a_compiler(folder: Path, script: str) -> str:
    folder.mkdir()
    (folder / "cc").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "cc").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_without_a_compiler_torch_decodes_and_says_so(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    model = make()
    view = DecoderView(model, native=True)
    assert view._native is None
    assert "decoded by torch, several times slower: there is no C compiler" in caplog.text
    assert build.name() == "torch"
    ids, starts = some_rows(3)
    assert torch.equal(decoded(view, ids, starts), decoded(DecoderView(model), ids, starts))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'cc: no such flag' >&2; exit 1", "failed: cc: no such flag"),
        (
            '[ "$1" = --version ] && exit; while [ "$1" != -o ]; do shift; done; echo junk > "$2"',
            "cannot be loaded",
        ),
    ],
)
def test_a_compiler_that_cannot(script, said, monkeypatch, tmp_path, cache):
    monkeypatch.setenv("PATH", a_compiler(tmp_path / "bin", script))
    with pytest.raises(NotNative, match=said):
        NativeStep(make())


def test_a_compiler_that_hangs(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", a_compiler(tmp_path / "bin", "exec sleep 20"))
    monkeypatch.setattr(build, "LONGEST_S", 0.5)
    with pytest.raises(NotNative, match="0.5 seconds"):
        library()


@compiles
def test_what_others_can_write_to_is_not_loaded(cache):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(NotNative, match="chmod 700"):
        library()
    assert not made(cache)


@compiles
def test_no_place_for_a_cache(cache):
    cache.parent.mkdir()
    cache.write_text("a file")
    with pytest.raises(NotNative, match="cache .*: File exists"):
        library()
