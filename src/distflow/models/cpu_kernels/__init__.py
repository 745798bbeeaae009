"""Native CPU kernels: C, compiled on the machine (`build.py`), and the Python that calls it.
Without a compiler torch computes everything.

`decode_step.py` calls `decode.c` and `draw.c`, with weights packed by `weight_layout.py`;
`training_layer.py` calls `packed_attention.c`, `before_attention.c`, `after_attention.c` and
`residual_norm_rotation_gate.c`.
"""
