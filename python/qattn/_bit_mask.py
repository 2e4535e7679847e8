"""BitMask: boolean masks of one bit an element."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._errors import InvalidArgument
from ._interop import check_array, dtype_name, is_cuda_array, is_torch


class BitMask:
    """A boolean mask of attention() in bits, an eighth of a bool mask's memory.

    bits: uint8 array or tensor (..., ceil(Sk / 8)) that broadcasts like a mask in all dimensions
    but the last: key 8 n + i is the i-th lowest bit of a row's byte n, 1 = may look, as
    numpy.packbits(mask, axis=-1, bitorder="little") makes them. Bits behind Sk are not looked at.
    It is used where it is, never copied. Raises InvalidArgument for other dtypes.
    """

    def __init__(self, bits: Any) -> None:
        check_array("bits", bits)
        if dtype_name(bits) != "uint8":
            raise InvalidArgument(f"bits: dtype {dtype_name(bits)} is not uint8")
        self.bits = bits

    @classmethod
    def pack(cls, mask: Any) -> BitMask:
        """The bits of a bool array or tensor (..., Sk), on its device; a new array."""
        check_array("mask", mask)
        if is_cuda_array(mask) or dtype_name(mask) != "bool" or mask.ndim == 0:
            raise InvalidArgument("mask: is no bool array or tensor with a dimension of keys")
        if not is_torch(mask):
            return cls(np.packbits(mask, axis=-1, bitorder="little"))
        import torch

        whole = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.shape[-1] % 8))
        weights = 1 << torch.arange(8, dtype=torch.uint8, device=mask.device)
        return cls((whole.unflatten(-1, (-1, 8)) * weights).sum(-1, dtype=torch.uint8))
