"""Native kernels for a CPU: C, compiled where it runs (`build.py`), and the Python that calls it. Without a compiler
torch does it all.

`decode_step.py`: one decode step and sampling (`decode.c`, `draw.c`). `weight_layout.py`: how its weights are packed.
`layer.py`: attention over packed sequences (`attend.c`), and the rest of a layer in float32 (`before.c`, `after.c`), or
operations between torch's products in a larger layer, or in bfloat16 (`between.c`). The headers are shared.
"""
