"""Each kernel is compiled for an H100, which wants no device: the interpreter accepts what Triton
does not."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

TRITON = Path(__file__).parents[3] / ".triton"
HAS_TRITON = TRITON.exists() or find_spec("triton") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_TRITON, reason="wants Triton, which `make test-slow` installs"),
]

CODE = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from distflow.models.gpu_kernels import decode_step, training_layer

kernel, wide, low, constants = json.loads(sys.argv[1])
function = getattr(decode_step, kernel, None) or getattr(training_layer, kernel)
numbers = dict.fromkeys(("rows", "width", "instances", "gate_stride", "up_stride", "table_width", "num_splits"), "i32")
numbers |= dict.fromkeys(("epsilon", "scaling"), "fp32") | dict.fromkeys(("positions", "tables"), "*i64")
numbers |= dict.fromkeys(("cos", "sin", "sums", "parts", *wide), "*fp32") | dict.fromkeys(constants, "constexpr")
signature = {name: numbers.get(name, low) for name in function.arg_names}
made = compile(ASTSource(function, signature, constexprs=constants), target=GPUTarget("cuda", 90, 32))
assert len(made.asm["cubin"]) > 1000
"""  # noqa: E501
HEADS = {"HEADS": 14, "KV_HEADS": 2, "DIM": 64, "TILE": 16}
ATTENTION = {"KV_HEADS": 2, "GROUP": 7, "ROWS": 16, "HEAD_DIM": 64, "PAGE": 64, "SPLIT_PAGES": 4}
KERNELS: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    (
        "_add_norm",
        ("hidden", "total", "weight"),
        {"BLOCK": 1024, "HAS_DELTA": True, "WRITES": True},
    ),
    (
        "_add_norm_backward",
        ("outputs", "of_outputs", "of_x", "weight"),
        {"BLOCK": 1024, "HAS_ADDED": True},
    ),
    ("_silu_mul", (), {"BLOCK": 1024}),
    ("_gate_backward", (), {"BLOCK": 1024}),
    ("_attend", (), {**ATTENTION, "IS_WHOLE": True, "PRECISION": "ieee"}),
    ("_attend", ("out",), {**ATTENTION, "IS_WHOLE": False, "PRECISION": "tf32"}),
    ("_join", (), {"HEADS": 14, "HEAD_DIM": 64, "BLOCK": 4, "SPLIT": 256}),
    *(
        (name, (), {**HEADS, "HAS_NORMS": norms})
        for name in ("_split_heads", "_split_heads_backward")
        for norms in (0, 1)
    ),
]


@pytest.mark.parametrize("low", ["*bf16", "*fp32"])
@pytest.mark.parametrize(
    "kernel, wide, constants", KERNELS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_it_compiles(kernel, wide, constants, low):
    job = json.dumps([kernel, wide, low, constants])
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(TRITON))))
    done = subprocess.run(
        [sys.executable, "-c", CODE, job], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
