"""The operator torch.ops.qattn.attention, and attention(), which checks and calls it.

The operator means what torch's scaled_dot_product_attention means, and besides takes sinks, a
softcap and a window. What torch.compile, torch.export and autocast have to know of it stands here.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _attention
from ._errors import InvalidArgument, Unsupported, shown
from ._interop import check_mask_dtype, unit_stride
from ._recipe import Recipe
from ._torch_tensors import as_mask, check_memory, check_tensor, is_causal_bias_of

_library = torch.library.Library("qattn", "DEF")
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
    "Tensor? sinks=None, str recipe='auto', bool is_causal=False, bool enable_gqa=False, "
    "float? scale=None, float softcap=0.0, SymInt window_left=-1) -> Tensor",
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
) -> torch.Tensor:
    """qattn.torch.sdpa() with further options, which the caller has checked for their types.

    sinks: (H) logits that join the denominator only. softcap: 0 is off. window_left: query i sees
    no keys before i + S - L - window_left (with is_causal L = S); -1 is unlimited.
    """
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
        check_tensor(name, x)
    return torch.ops.qattn.attention(
        query,
        key,
        value,
        attn_mask,
        sinks,
        _recipe_text(recipe),
        is_causal,
        enable_gqa,
        scale,
        softcap,
        window_left,
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


def _recipe_of(text: str) -> str | Recipe:
    parts = text.rsplit(",", 3)
    return Recipe(*parts) if len(parts) == 4 else text


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
) -> torch.Tensor:
    if attn_mask is not None and min(query.dim(), key.dim()) >= 2:
        attn_mask, is_causal = _plain_mask(attn_mask, query, key, is_causal)
    tensors = {"query": query, "key": key, "value": value, "attn_mask": attn_mask, "sinks": sinks}
    for name, x in tensors.items():
        if x is not None:
            check_memory(name, x)
    query, key, value, mask, out = _operands(query, key, value, attn_mask, enable_gqa)
    query, key, value = (
        _unit_stride(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    length, keys = query.shape[-2], key.shape[-2]
    window = None if window_left == -1 else (window_left, -1)
    if is_causal:
        if mask is not None:
            raise InvalidArgument("attn_mask: excludes is_causal=True, as in torch")
        if window is not None and length != keys:
            raise InvalidArgument(
                f"window_left: needs as many keys as queries if is_causal, not {keys} and {length}"
            )
        # Only keys j < L can be seen; then L >= S, and the bottom-right rule j <= i + S - L + right
        # of qattn says j <= i for right = L - S.
        key, value = key[..., :length, :], value[..., :length, :]
        window = (window_left, length - key.shape[-2])
    options = {
        "recipe": _recipe_of(recipe),
        "layout": "bhsd",
        "window": window,
        "scale": scale,
        "softcap": softcap,
        "sinks": sinks,
    }
    if query.dim() < 3 or query.shape[-3] > 0:  # without heads there is nothing to attend with
        _run(query, key, value, mask, out, options)
    return out


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


def _refuse_gradients(operator: str, names: str) -> None:
    """Where one of the inputs wants a gradient, the operator raises; before torch 2.5, which calls
    setup_context for every call, whoever asks for that gradient."""

    def refuse(*_: Any, **__: Any) -> None:
        raise InvalidArgument(
            f"{names}: requires a gradient, which qattn does not compute; detach it, or call "
            "inside torch.no_grad()"
        )

    early = tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 5)
    torch.library.register_autograd(
        operator, refuse, setup_context=refuse if early else None, lib=_library
    )


# attention() names the tensor; callers of torch.ops end here.
_refuse_gradients("qattn::attention", "query, key, value, attn_mask or sinks")


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
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
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
    out: torch.Tensor,
    options: dict,
) -> None:
    """Fills `out`. Further batch dimensions are walked, so that no view has to be copied flat."""
    if query.dim() > 4:
        for i in range(query.shape[0]):
            _run(query[i], key[i], value[i], None if mask is None else mask[i], out[i], options)
        return
    while query.dim() < 4:
        query, key, value, out = (x.unsqueeze(0) for x in (query, key, value, out))
        mask = None if mask is None else mask.unsqueeze(0)
    with torch.no_grad():
        try:
            _attention.attention(query, key, value, mask=mask, out=out, **options)
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
