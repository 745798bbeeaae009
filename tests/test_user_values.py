"""The rule for numbers that are handed in, for every kind of number; and the plain form of values
beside them."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from distflow.user_values import LARGEST_NUMBER, finite_number, plain_value


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (True, 1.0),
        (-3, -3.0),
        (1e6 + 0.01, 1e6 + 0.01),
        (Fraction(1, 4), 0.25),
        (Decimal("0.25"), 0.25),
        (np.float32(0.5), 0.5),
        (np.float64(16777217.0), 16777217.0),
        (np.int64(2**53), 2.0**53),
        (np.bool_(True), 1.0),
        (np.array([[0.5]]), 0.5),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor([True]), 1.0),
        (LARGEST_NUMBER, LARGEST_NUMBER),
        (-LARGEST_NUMBER, -LARGEST_NUMBER),
    ],
)
def test_numbers_of_every_kind(value, wanted):
    found = finite_number(value)
    assert type(found) is float and found == wanted


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (np.float32(np.inf), "inf"),
        (torch.tensor(math.nan), "nan"),
        (1e39, r"1e\+39"),
        (-1e39, r"-1e\+39"),
        (10**39, r"1e\+39"),
        (10**400, "too large"),
        (Fraction(10**400), "too large"),
        (np.ones(2), r"\(2,\)"),
        (torch.ones(0), r"\(0,\)"),
        ("1.0", "'1.0'"),
        (None, "None"),
        (1j, "1j"),
        ([1.0], r"\[1.0\]"),
    ],
)
def test_anything_else_is_named(value, says):
    with pytest.raises(ValueError, match=rf"{says}.*'acc'|'acc'.*{says}"):
        finite_number(value, where=" as 'acc'")


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (np.int64(7), 7),
        (np.float32(0.5), 0.5),
        (np.bool_(False), False),
        (np.array([1, 2]), [1, 2]),
        (torch.tensor(3), 3),
        (torch.ones(1, 2, requires_grad=True), [[1.0, 1.0]]),
        (Fraction(1, 4), 0.25),
        (Decimal("0.25"), 0.25),
        (None, None),
        ("text", "text"),
    ],
)
def test_plain_forms(value, wanted):
    found = plain_value(value)
    assert found == wanted and type(found) is type(wanted)
