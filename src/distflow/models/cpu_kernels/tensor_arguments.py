"""Arguments for the C functions of this folder."""

import ctypes

from torch import Tensor

ADDRESS, COUNT = ctypes.c_void_p, ctypes.c_int64


class Norm(ctypes.Structure):
    _fields_ = [("weight", ADDRESS), ("of_weight", ADDRESS), ("size", COUNT), ("epsilon", ctypes.c_float)]


def norm_of(weight: Tensor | None, of_weight: Tensor | None, epsilon: float) -> Norm:
    return Norm(address(weight), address(of_weight), 0 if weight is None else len(weight), epsilon)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
