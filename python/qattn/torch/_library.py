"""The namespace of torch.ops.qattn, in which other files define operators; what several take."""

from __future__ import annotations

from typing import Any

import torch

from .._errors import InvalidArgument, shown

library = torch.library.Library("qattn", "DEF")

#: what a backward is made from: the forward's own O and LSE, or those of torch's attention
BACKWARDS = ("forward", "16bit")


def check_backward(backward: Any) -> str:
    if not isinstance(backward, str) or backward not in BACKWARDS:
        raise InvalidArgument(f"backward: {shown(backward)} is not one of {', '.join(BACKWARDS)}")
    return backward
