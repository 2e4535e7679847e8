"""The operator torch.ops.qattn.attention, and attention(), which checks and calls it.

The operator means what torch's scaled_dot_product_attention means, and besides takes sinks, a
softcap and a window. What torch.compile, torch.export and autocast have to know of it stands here.
"""

from __future__ import annotations

import atexit
import functools
from typing import Any

import numpy as np
import torch

from .. import _qattn
from .._errors import InvalidArgument, Unsupported, shown
from .._interop import (
    add_torch_output,
    check_mask_dtype,
    device_of,
    new_torch_output,
    small_entry,
    stream_of,
    torch_entry,
    torch_operands,
    unit_stride,
    workspace_of,
)
from .._options import made_options
from .._recipe import Recipe, as_recipe
from .._torch_tensors import (
    are_known,
    as_mask,
    check_memory,
    check_tensor,
    is_causal_bias_of,
    refuse_tangent,
)
from ._library import check_backward
from ._library import library as _library

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
    "Tensor? sinks=None, str recipe='auto', bool is_causal=False, bool enable_gqa=False, "
    "float? scale=None, float softcap=0.0, SymInt window_left=-1, str backward='forward') "
    "-> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    sinks: torch.Tensor | None = None,
    recipe: str | Recipe = "auto",
    is_causal: bool = False,
    enable_gqa: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    window_left: int = -1,
    backward: str = "forward",
) -> torch.Tensor:
    """qattn.torch.sdpa() with further options, which the caller has checked for their types.

    sinks: (H) logits that join the denominator only. softcap: 0 is off. window_left: query i sees
    no keys before i + S - L - window_left (with is_causal L = S); -1 is unlimited.
    """
    if type(recipe) is not str:
        recipe = _recipe_text(recipe)
    if type(backward) is not str or backward != "forward":
        check_backward(backward)
    options = (recipe, is_causal, enable_gqa, scale, softcap, window_left)
    if attn_mask is None and _nobody_looks(query, key, value, sinks):
        return _computed(query, key, value, None, sinks, *options)
    tensors = {"query": query, "key": key, "value": value, "attn_mask": attn_mask, "sinks": sinks}
    for name, x in tensors.items():
        if x is None and name in ("attn_mask", "sinks"):
            continue
        if not isinstance(x, torch.Tensor):
            raise InvalidArgument(f"{name}: is a {type(x).__name__}, not a torch tensor")
        if name == "attn_mask" and min(query.dim(), key.dim()) >= 2:
            attn_mask, is_causal = _plain_mask(x, query, key, is_causal)
            if attn_mask is None:
                continue
            x = attn_mask
        check_tensor(name, x, differentiable=True)
    return torch.ops.qattn.attention(
        query, key, value, attn_mask, sinks, recipe, is_causal, *options[2:], backward
    )


def _nobody_looks(*tensors: torch.Tensor | None) -> bool:
    """May the operator be left out, which costs a small call more than its kernels?

    It is for those who see operators: compilers, tracers, profilers, modes, autocast and
    transformations, whose tensors are not known as plain ones.
    """
    if torch.compiler.is_compiling() or not are_known(tensors):
        return False
    own = torch._C
    return not (
        own._len_torch_dispatch_stack()
        or own._len_torch_function_stack()
        or own._get_tracing_state() is not None
        or own._is_any_autocast_enabled()
        or own._autograd._profiler_enabled()
    )


def _plain_mask(
    mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor | None, bool]:
    """(attn_mask, is_causal) without torch's causal biases."""
    lengths = query.shape[-2], key.shape[-2]
    if not is_causal and is_causal_bias_of(mask, *lengths):
        return None, True
    return as_mask("attn_mask", mask, lengths, query.device), is_causal


def _recipe_text(recipe: str | Recipe) -> str:
    """A recipe as an operator's argument: its name, or "name,qk,p,v" of the caller's own."""
    if isinstance(recipe, Recipe):
        return f"{recipe.name},{recipe.qk},{recipe.p},{recipe.v}"
    if not isinstance(recipe, str):
        raise InvalidArgument(f"recipe: {shown(recipe)} is neither a name nor a qattn.Recipe")
    return recipe


@functools.lru_cache(maxsize=64)
def _recipe_tuple(text: str) -> tuple[str, str, str, str]:
    parts = text.rsplit(",", 3)
    made = Recipe(*parts) if len(parts) == 4 else as_recipe(text)
    return made.name, made.qk, made.p, made.v


@functools.lru_cache(maxsize=256)
def _options(recipe: str, window: tuple[int, int], softcap: float, scale: float | None) -> Any:
    """The extension's options, by the recipe as _recipe_text() has it."""
    return made_options(_recipe_tuple(recipe), "bhsd", False, window, softcap, scale)


atexit.register(_options.cache_clear)  # as that of made_options


@torch.library.impl(_library, "attention", "CPU")
@torch.library.impl(_library, "attention", "CUDA")
def _compute(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    recipe: str = "auto",
    is_causal: bool = False,
    enable_gqa: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    window_left: int = -1,
    backward: str = "forward",
) -> torch.Tensor:
    check_backward(backward)
    if attn_mask is not None and min(query.dim(), key.dim()) >= 2:
        attn_mask, is_causal = _plain_mask(attn_mask, query, key, is_causal)
    tensors = {"query": query, "key": key, "value": value, "attn_mask": attn_mask, "sinks": sinks}
    for name, x in tensors.items():
        if x is not None:
            check_memory(name, x)
    options = (recipe, is_causal, enable_gqa, scale, softcap, window_left)
    return _computed(query, key, value, attn_mask, sinks, *options)


def _computed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    recipe: str,
    is_causal: bool,
    enable_gqa: bool,
    scale: float | None,
    softcap: float,
    window_left: int,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """The operator on tensors that check_memory() has let pass; fills `lse`, if given."""
    mask = attn_mask
    tensors = None if mask is not None else _ready(query, key, value, enable_gqa)
    if tensors is not None:
        out = new_torch_output(tensors, query)
        add_torch_output(tensors, out)
    else:
        query, key, value, mask, out = _operands(query, key, value, attn_mask, enable_gqa)
        query, key, value = (
            _unit_stride(name, x) for name, x in (("query", query), ("key", key), ("value", value))
        )
    window = (window_left, -1)
    if is_causal:
        length, keys = query.shape[-2], key.shape[-2]
        if mask is not None:
            raise InvalidArgument("attn_mask: excludes is_causal=True, as in torch")
        if window_left != -1 and length != keys:
            raise InvalidArgument(
                f"window_left: needs as many keys as queries if is_causal, not {keys} and {length}"
            )
        # Only keys j < L can be seen; then L >= S, and the bottom-right rule j <= i + S - L + right
        # of qattn says j <= i for right = L - S.
        if keys > length:
            key, value = key[..., :length, :], value[..., :length, :]
            tensors = None
        window = (window_left, max(length - keys, 0))
    options = _options(recipe, window, softcap, scale)
    if tensors is not None:
        _enqueue(tensors, query, None, sinks, lse, options)
    elif query.dim() < 3 or query.shape[-3] > 0:  # without heads there is nothing to attend with
        _run(query, key, value, mask, sinks, out, lse, options)
    return out


def _ready(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> dict[str, tuple] | None:
    """The operands' entries if the call may be made as it is: so it is mostly, and to see it takes
    less than to check it. None: it may not, or it has no heads."""
    tensors = torch_operands(query, key, value)
    if tensors is None:
        return None
    heads, own = tensors["q"][2][1], tensors["k"][2][1]
    if tensors["v"][2][1] != own or own == 0 or heads == 0:
        return None
    return tensors if heads == own or (enable_gqa and heads % own == 0) else None


@torch.library.register_fake("qattn::attention", lib=_library)
def _fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    recipe: str = "auto",
    is_causal: bool = False,
    enable_gqa: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    window_left: int = -1,
    backward: str = "forward",
) -> torch.Tensor:
    return _operands(query, key, value, attn_mask, enable_gqa)[-1]


def _register_autocast(device: str, key: str) -> None:
    @torch.library.impl(_library, "attention", key)
    def autocast(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *options: Any,
    ) -> torch.Tensor:
        """Casts what torch casts for its own attention: all but float64, to autocast's dtype."""
        dtype = torch.get_autocast_dtype(device)

        def cast(x: torch.Tensor | None) -> torch.Tensor | None:
            if x is None or not x.is_floating_point() or x.dtype == torch.float64:
                return x
            return x.to(dtype)

        with torch.autocast(device, enabled=False):
            tensors = (cast(x) for x in (query, key, value, attn_mask))
            return torch.ops.qattn.attention(*tensors, *options)


_register_autocast("cpu", "AutocastCPU")
_register_autocast("cuda", "AutocastCUDA")


def below_autograd(operator: Any, keyset: Any, arguments: Any) -> Any:
    """The operator's own result, for an Autograd kernel that has nothing to add."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


def _refuse_gradients(operator: str, name: str) -> None:
    """Where its first argument, `name`, wants a derivative, the operator raises."""

    def refuse(keyset: Any, x: torch.Tensor, *options: Any) -> Any:
        refuse_tangent(name, x)
        if x.requires_grad and torch.is_grad_enabled():
            raise InvalidArgument(
                f"{name}: requires a gradient, which qattn does not compute; detach it, or call "
                "inside torch.no_grad()"
            )
        return below_autograd(getattr(torch.ops.qattn, operator).default, keyset, (x, *options))

    _library.impl(operator, refuse, "Autograd", with_keyset=True)


def _operands(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    enable_gqa: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """query, key, value and mask with equal leading dimensions, and memory for the output."""
    _check_tensors(query, key, value, mask)
    query, key, value = _aligned(query, key, value, enable_gqa)
    if mask is not None:
        mask = _broadcast_mask(mask, (*query.shape[:-1], key.shape[-2]))
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return query, key, value, mask, out


def _check_tensors(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> None:
    """What torch checks of each tensor by itself."""
    tensors = {"query": query, "key": key, "value": value}
    if mask is not None:
        tensors["attn_mask"] = mask
    for name, x in tensors.items():
        if x.dim() < 2:
            raise InvalidArgument(f"{name}: rank {x.dim()} should be at least 2")
    dtype = query.dtype
    if dtype not in _FLOATS:
        raise InvalidArgument(f"query: dtype {dtype} is not float32, float16 or bfloat16")
    for name, x in (("key", key), ("value", value)):
        if x.dtype != dtype:
            raise InvalidArgument(f"{name}: dtype {x.dtype} differs from query's {dtype}")
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, dtype):
        own = str(dtype).removeprefix("torch.")
        check_mask_dtype("attn_mask", mask, ("float32",) + (() if own == "float32" else (own,)))


def _unit_stride(name: str, x: torch.Tensor) -> torch.Tensor:
    """Rows that are dense: on the CPU by a copy, on a GPU the caller is told."""
    if x.device.type != "cpu":
        unit_stride(name, x)
        return x
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _aligned(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operands with equal leading dimensions (views of stride 0 where torch broadcasts).

    Heads stay as they are where qattn groups them by itself: enable_gqa, and one KV head for all.
    """
    grouped = enable_gqa
    if enable_gqa:
        _check_gqa(query, key, value)
    elif min(query.dim(), key.dim(), value.dim()) >= 3:
        grouped = key.shape[-3] == 1 and value.shape[-3] == 1
    operands = {"query": query, "key": key, "value": value}
    cut = -3 if grouped else -2  # the dimensions from here on are not broadcast
    if query.shape[:cut] == key.shape[:cut] == value.shape[:cut]:
        return query, key, value  # torch.broadcast_shapes takes longer than a small attention
    lead: tuple[int, ...] = ()
    for name, x in operands.items():
        try:
            lead = tuple(torch.broadcast_shapes(lead, x.shape[:cut]))
        except RuntimeError:
            raise InvalidArgument(
                f"{name}: shape {tuple(x.shape)} does not broadcast with query's "
                f"{tuple(query.shape)}" + ("" if enable_gqa else " (enable_gqa is False)")
            ) from None
    query, key, value = (x.expand(*lead, *x.shape[cut:]) for x in operands.values())
    return query, key, value


def _check_gqa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < 3:
            raise InvalidArgument(f"{name}: rank {x.dim()} has no heads, which enable_gqa needs")
        heads = x.shape[-3]
        if heads == 0 or query.shape[-3] % heads != 0:
            raise InvalidArgument(
                f"{name}: {heads} heads do not divide query's {query.shape[-3]} heads"
            )
    if key.shape[-3] != value.shape[-3]:
        raise Unsupported(
            f"value: {value.shape[-3]} heads differ from key's {key.shape[-3]} (enable_gqa)"
        )


def _broadcast_mask(mask: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    try:
        return mask.expand(shape)
    except RuntimeError:
        raise InvalidArgument(
            f"attn_mask: shape {tuple(mask.shape)} does not broadcast to {shape}"
        ) from None


def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    options: Any,
) -> None:
    """Fills `out` and `lse`. Further batch dimensions are walked, so that no view has to be copied
    flat."""
    if query.dim() > 4:
        for i in range(query.shape[0]):
            own, own_lse = (None if x is None else x[i] for x in (mask, lse))
            _run(query[i], key[i], value[i], own, sinks, out[i], own_lse, options)
        return
    while query.dim() < 4:
        query, key, value, out = (x.unsqueeze(0) for x in (query, key, value, out))
        mask, lse = (None if x is None else x.unsqueeze(0) for x in (mask, lse))
    operands = {"q": query, "k": key, "v": value, "out": out}
    tensors = {name: torch_entry(x) for name, x in operands.items()}
    _enqueue(tensors, query, mask, sinks, lse, options)


def _enqueue(
    tensors: dict[str, tuple],
    query: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    lse: torch.Tensor | None,
    options: Any,
) -> None:
    """One call of the extension with the entries of query, key, value and out, and the others."""
    if mask is not None:
        tensors["mask"] = torch_entry(mask)
    if sinks is not None:
        tensors["sinks"] = small_entry("sinks", sinks, np.float32, device_of(query))
    if lse is not None:
        tensors["lse"] = torch_entry(lse)
    stream, allocate = 0, None
    if not query.is_cpu:
        stream, allocate = stream_of(query), workspace_of(query)
    try:
        _qattn.attention(tensors, options, stream, allocate)
    except InvalidArgument as error:
        raise InvalidArgument(_with_way_out(str(error))) from None


def _with_way_out(text: str) -> str:
    """What attention() refuses, and who takes heads that are too long for it."""
    rule = "longer heads have no kernel here"
    return text.replace(
        rule,
        f"{rule}, torch.nn.functional.scaled_dot_product_attention takes them (in transformers "
        'attn_implementation="sdpa")',
    )
