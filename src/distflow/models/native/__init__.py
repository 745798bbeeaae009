"""Native code for a CPU: C, compiled where it runs (`build.py`), and the Python that calls it. Without a compiler torch
does it all.

`step.py`, `packing.py`: a decode step (`decode.c`). `draw.py`: a draw (`draw.c`). `attend.py`: attention over packed
sequences (`attend.c`). `layer.py`: the rest of a layer in float32 (`before.c`, `after.c`). `between.py`: what stands
between torch's products in a larger one, or in bfloat16 (`between.c`). The headers are what these share.
"""
