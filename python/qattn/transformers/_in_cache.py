"""What stands for keys and values that lie in a QattnCache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._errors import Unsupported

if TYPE_CHECKING:
    from ._cache import QattnCache


class InCache(torch.Tensor):
    """Stands for the keys or values of one layer: shape (B, Hkv, past + new, D), no memory.

    Attention functions other than qattn's would compute with it, so every operation on it raises
    Unsupported; its shape, dtype and device can be asked for.
    """

    cache: QattnCache
    layer: int

    @staticmethod
    def __new__(cls, cache: QattnCache, layer: int, new: torch.Tensor, length: int) -> InCache:
        shape = (*new.shape[:2], length, new.shape[3])
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=new.dtype, device=new.device)
        made.cache, made.layer = cache, layer
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"InCache(layer={self.layer}, shape={tuple(self.shape)})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise Unsupported(
            f"{func}: keys and values lie in a QattnCache, which only attention registered by "
            "qattn.transformers.register() reads; set attn_implementation to its name"
        )
