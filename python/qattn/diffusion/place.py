"""Where in a sampler an attention call is: the layer, the denoising step, its noise, the branch.

Whatever runs a model for qattn (qattn.diffusion.attach(), ComfyUI's override) keeps the place of
the call that is under way; schedules, tables of static scales and observers read it. No torch here.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Optional


@dataclasses.dataclass(frozen=True)
class Place:
    """One attention call's place. What nobody knows is None, and an unknown layer is "".

    Places are compared and hashed by value; dataclasses.replace() makes changed ones.
    """

    #: the module that computes the attention, as model.named_modules() names it; of a pipeline's
    #: further denoisers with their own name in front, "transformer_2.blocks.0.attn1"
    layer: str = ""
    #: index in the scheduler's list of timesteps, from 0; image-to-image starts at a later one
    step: int | None = None
    #: the scheduler's sigma at that step
    sigma: float | None = None
    #: "cond" or "uncond" where a pipeline runs them one after the other and says which
    branch: str | None = None
    #: length of the scheduler's list of timesteps
    steps: int | None = None
    #: the first step of this run, 0 but for image-to-image
    begin: int = 0


#: What is called before each attention: (place, q, k, v), torch tensors (B, S, H, D) as the model
#: made them, k and v with their own S and H. It must not change them.
OnAttention = Callable[[Place, Any, Any, Any], None]

#: What gives static scales for a place: None (dynamic ones), or arguments of qattn.attention() by
#: name, on the operands' device: "q_scale", "k_scale", "v_scale", float32 of shape (1), (heads) or
#: (B, heads); of other shapes with "q_granularity" and the like; "saturated", which counts codes
#: that were clipped; "smooth_k"; "made_for", `scales_for` of qattn.attention(): other scales are
#: refused. Of these a recipe takes what it has a use for: "int8" none for v.
Scales = Callable[[Place], Optional[dict[str, Any]]]

_current: contextvars.ContextVar[Place] = contextvars.ContextVar("qattn_place", default=Place())


def current_place() -> Place:
    """The place of the attention call under way in this thread; Place() outside of any."""
    return _current.get()


@contextlib.contextmanager
def placed(place: Place) -> Iterator[Place]:
    """Inside, current_place() is `place`; afterwards what it was."""
    token = _current.set(place)
    try:
        yield place
    finally:
        _current.reset(token)
