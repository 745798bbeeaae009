"""Values that user code, judges, reward models, environments and servers hand in: the one rule for
their numbers, and their plain form."""

import math
from decimal import Decimal
from numbers import Integral, Real

LARGEST_NUMBER = float.fromhex("0x1.fffffep127")
"""Of float32."""


def finite_number(value: object, said: str = "it returned", where: str = "") -> float:
    """The float of a number or bool of Python, NumPy or torch, or a Decimal. Raises
    ValueError unless it is finite in float32.

    Scores are stored as float64, but models and losses compute in float32; and sums, differences
    and squares of numbers in its range are finite in float64. said, where: around the value in
    messages.
    """
    if not isinstance(value, Real) and callable(item := getattr(value, "item", None)):
        shape = tuple(getattr(value, "shape", ()))
        if math.prod(shape) != 1:
            raise ValueError(
                f"{said} a {type(value).__name__} of shape {shape}{where}, which is not a number"
            )
        value = item()

    if not isinstance(value, Real | Decimal):
        raise ValueError(f"{said} {value!r:.80}{where}, which is not a number")

    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{said}{where} a number that is too large for a float") from None

    if not math.isfinite(number):
        raise ValueError(f"{said} {number}{where}, which is not finite")
    if abs(number) > LARGEST_NUMBER:
        raise ValueError(
            f"{said} {number:g}{where}, which is beyond {LARGEST_NUMBER:.4g}, the largest number "
            "of float32, in which losses are computed"
        )

    return number


def plain_value(value: object) -> object:
    """A number, bool or array of NumPy or torch, a Fraction and a Decimal as Python's own; anything
    else unchanged."""
    if value is None or isinstance(value, bool | str):
        return value

    try:
        if isinstance(value, Integral):
            return int(value)
        if isinstance(value, Real | Decimal):
            return float(value)
        if hasattr(value, "shape") and callable(tolist := getattr(value, "tolist", None)):
            return tolist()
    # too large, sparse, on a device that is gone
    except (OverflowError, RuntimeError, TypeError, ValueError):
        pass

    return value
