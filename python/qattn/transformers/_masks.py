"""What attention masks of transformers say to a QattnCache. Masks lie in host memory here."""

from __future__ import annotations

import torch

from .._errors import Unsupported


def alive_of(mask: torch.Tensor | None, batch: int, new: int) -> torch.Tensor:
    """(B, new): which of the newest tokens any query sees."""
    if mask is None:
        return torch.ones(batch, new, dtype=torch.bool)
    if mask.dtype != torch.bool:
        raise Unsupported(f"attention_mask: {mask.dtype}; with a QattnCache it should be bool")
    return mask[..., mask.shape[-1] - new :].flatten(1, -2).any(1).expand(batch, new)


def visible(
    length: int, queries: int, sliding_window: int | None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """(queries, length): what causality and a window let the newest queries see."""
    rows = torch.arange(length - queries, length, device=device)
    behind = rows[:, None] - torch.arange(length, device=device)
    return (behind >= 0) & (behind < (sliding_window or length))


def check_mask(
    mask: torch.Tensor | None, alive: torch.Tensor, new: int, sliding_window: int | None
) -> None:
    """Refuses a mask that says something else than the cache will do.

    mask: bool (B or 1, any, new, length) or None, alive: (B, length).
    """
    length = alive.shape[1]
    if mask is None:
        if not bool(alive.all()):
            raise Unsupported(
                "attention_mask: absent, but an earlier one hid tokens from the cache"
            )
        return
    if sliding_window is not None and sliding_window < length:
        ranks = alive.cumsum(1)
        first = alive.to(torch.uint8).argmax(1, keepdim=True)
        holes = alive & (ranks != torch.arange(1, length + 1) - first)
        if bool(holes.any()):
            raise Unsupported(
                f"attention_mask: hides tokens between others, and the window of {sliding_window} "
                "counts them; a QattnCache does not hold them"
            )
    expected = visible(length, new, sliding_window) & alive[:, None, None]
    own = alive[:, None, length - new :, None]
    if mask.shape[-2:] != (new, length) or bool(((mask != expected) & own).any()):
        raise Unsupported(
            "attention_mask: is not causal with tokens hidden and a sliding window as before; "
            "a QattnCache cannot attend by it"
        )
    if bool((mask & ~own).any()):
        raise Unsupported(
            "attention_mask: hides a token behind the prompt that itself sees others; padding of "
            "a QattnCache stands on the left"
        )
