"""Options of a call as the extension has them, made once for calls that repeat."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Mapping
from typing import Any

from . import _qattn
from ._errors import InvalidArgument, shown
from ._recipe import Recipe, block_pair, boolean, integer, made_for, real, toggle, window_pair

TOGGLES = ("smooth_k", "smooth_q", "smooth_v", "rotate", "balance_k")  # of the extension


def layout_swaps(layout: str, rank: int) -> tuple[int, ...]:
    """Order of dimensions between a layout and (B, H, S, D) or (H, T, D); its own inverse."""
    order = list(range(rank))
    if layout == "bshd" and rank >= 3:
        order[rank - 3], order[rank - 2] = order[rank - 2], order[rank - 3]
    return tuple(order)


#: The scaling of an operand whose granularity is left to the recipe.
AUTOMATIC = ("automatic", 0, 0)


# Calls of a model repeat a few. -0.0 and 0.0 are one key, and mean one thing wherever they come.
@functools.lru_cache(maxsize=256)
def made_options(
    recipe: tuple[str, str, str, str],
    layout: str,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    scale: float | None = None,
    scalings: tuple[tuple[str, int, int], ...] = (AUTOMATIC,) * 3,
    toggles: tuple[bool | None, ...] = (None,) * len(TOGGLES),
    threads: int = 0,
    validate: bool = False,
    block_mask_size: tuple[int, int] = (0, 0),
    scales_for: Any = None,
) -> Any:
    """The extension's options, which nothing changes."""
    return _qattn.options(
        recipe=recipe,
        layout=layout,
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
        scalings=scalings,
        toggles=toggles,
        threads=threads,
        validate=validate,
        block_mask_size=block_mask_size,
        scales_for=scales_for,
    )


def call_options(
    given: Mapping[str, Any], r: Recipe, scalings: tuple[tuple[str, int, int], ...]
) -> Any:
    """The extension's options of attention()'s arguments by name."""
    if not isinstance(given["layout"], str):
        raise InvalidArgument(f"layout: {shown(given['layout'])} is not a name")
    return made_options(
        (r.name, r.qk, r.p, r.v),
        given["layout"],
        boolean("causal", given["causal"]),
        window_pair(given["window"]),
        0.0 if given["softcap"] is None else real("softcap", given["softcap"]),
        None if given["scale"] is None else real("scale", given["scale"]),
        scalings,
        tuple([toggle(n, given[n]) for n in TOGGLES]),
        integer("threads", given["threads"]),
        boolean("validate", given["validate"]),
        block_pair(given["block_mask_size"]),
        made_for(given["scales_for"]),
    )


atexit.register(made_options.cache_clear)  # or nanobind says that its objects leaked
