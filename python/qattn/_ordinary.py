"""The short way of attention() for ordinary calls, which else take longer than their kernels.

Three arrays of floats in host memory, and options that are names and numbers: attend() sees whether
a call is such a one, and nothing else. What is wrong with it the extension says, as it does for all
calls; whatever is not known as ordinary goes the long way, which knows what to refuse.
"""

from __future__ import annotations

import atexit
import functools
from typing import Any

import numpy as np

from . import _qattn
from ._errors import QattnError
from ._interop import add_torch_output, is_torch, new_torch_output, torch_operands
from ._options import AUTOMATIC, TOGGLES, call_options
from ._recipe import as_recipe

#: attention()'s options that a short call may have, with their defaults
_DEFAULTS: dict[str, Any] = {
    "recipe": "auto",
    "layout": "bshd",
    "causal": False,
    "softcap": None,
    "scale": None,
    **{name: None for name in TOGGLES},
    "threads": 0,
    "validate": False,
}
#: and those of the others that are options of the extension
_OTHERS = {"window": None, "block_mask_size": None, "scales_for": None}
#: of their values: what nobody can change while _options() keeps it
_IMMUTABLE = frozenset({str, bool, int, float, type(None)})
_torch_tensors: Any = None  # that module, once a tensor of torch was seen
_NUMPY_FORMATS = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16"}


def attend(q: Any, k: Any, v: Any, given: dict[str, Any]) -> Any:
    """attention(q, k, v, **given) of an ordinary call; None: it is none."""
    kind = type(q)
    if type(k) is not kind or type(v) is not kind:
        return None
    for name, value in given.items():
        if name not in _DEFAULTS or type(value) not in _IMMUTABLE:
            return None
    if kind is np.ndarray:
        return _attend_numpy(q, k, v, given)
    return _attend_torch(q, k, v, given) if is_torch(q) else None


def _attend_numpy(q: Any, k: Any, v: Any, given: dict[str, Any]) -> Any:
    dtype = q.dtype
    own = _NUMPY_FORMATS.get(dtype)
    if own is None or k.dtype is not dtype or v.dtype is not dtype:
        return None
    if not q.ndim == k.ndim == v.ndim == 4:
        return None
    options = _options(**given)
    if options is None:
        return None
    out = np.empty((*q.shape[:3], v.shape[3]), dtype)
    tensors = {"q": (q, own), "k": (k, own), "v": (v, own), "out": (out, own)}
    _qattn.attention(tensors, options, 0, None)
    return out


def _attend_torch(q: Any, k: Any, v: Any, given: dict[str, Any]) -> Any:
    global _torch_tensors
    if _torch_tensors is None:
        from . import _torch_tensors
    own = _torch_tensors
    torch = own.torch
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return None
    if torch._C._get_tracing_state() is not None:
        return None
    if not (q.is_cpu and k.is_cpu and v.is_cpu and own.are_known((q, k, v))):
        return None
    tensors = torch_operands(q, k, v)
    options = None if tensors is None else _options(**given)
    if options is None:
        return None
    out = new_torch_output(tensors, q)
    if not own.are_known((out,)):  # a transformation of torch may make others
        return None
    add_torch_output(tensors, out)
    _qattn.attention(tensors, options, 0, None)
    return out


# typed: True, 1 and 1.0 are one key else, and not one option.
@functools.lru_cache(maxsize=256, typed=True)
def _options(**given: Any) -> Any:
    """The extension's options; None: they are wrong, or mean more than the extension knows."""
    arguments = {**_DEFAULTS, **_OTHERS, **given}
    try:
        return call_options(arguments, as_recipe(arguments["recipe"]), (AUTOMATIC,) * 3)
    except QattnError:
        return None


atexit.register(_options.cache_clear)  # as that of made_options
