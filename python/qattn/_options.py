"""Options of a call as the extension has them, made once for calls that repeat."""

from __future__ import annotations

import atexit
import functools
from typing import Any

from . import _qattn

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


atexit.register(made_options.cache_clear)  # or nanobind says that its objects leaked
