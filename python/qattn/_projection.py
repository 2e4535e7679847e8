"""The output projection: its shapes, and the second of the two steps that it takes on a GPU."""

from __future__ import annotations

import sys
from typing import Any

from ._errors import InvalidArgument
from ._interop import is_torch

two_steps_text = (
    "projection: in two steps, torch's linear behind attention on the call's stream, since the "
    "library links no cuBLAS; O is written in out's dtype between them\n"
)


def multiplies_behind(q: Any) -> bool:
    """Does torch multiply by the weight? Else the library does, or says why not."""
    return is_torch(q) and q.device.type != "cpu"


def projected_shape(rows: tuple[int, ...], weight: tuple[int, ...]) -> tuple[int, ...]:
    """(B, Sq, E) or (T, E) from (B, Hq, Sq) or (Hq, T); wrong ranks are left to the validator."""
    features = weight[0] if len(weight) == 2 else 0
    return (*rows[:-2], *rows[-1:], features)


def check_bias(bias: Any) -> None:
    """The library's rule where it cannot look; waits for the stream."""
    bad = (~bias.isfinite()).nonzero()
    if len(bad):
        at = int(bad[0])
        raise InvalidArgument(f"bias: value {float(bias[at])} at ({at}) is not finite")


def linear(heads: Any, weight: Any, bias: Any, out: Any) -> Any:
    """torch's linear of (..., tokens, heads, channels), into `out` if it is given."""
    made = sys.modules["torch"].nn.functional.linear(heads.flatten(-2), weight, bias)
    return made if out is None else out.copy_(made)
