"""One attention call of a model: its recipe is looked up, it is computed, it is counted."""

from __future__ import annotations

import re
from typing import Any

import torch

from .. import _attention, _ordinary
from .._errors import InvalidArgument, QattnError, Unsupported, shown
from .._fork import new_lock
from .._recipe import MadeFor, Recipe, as_recipe, boolean, real
from .._torch_tensors import as_mask, check_memory, check_tensor
from ..torch import _ops as _torch_ops
from ..torch import _check_dropout
from .place import OnAttention, Place, Scales, placed
from .report import Counts
from .schedule import TORCH, Schedule, name_of

#: torch's own function, whatever stands in torch.nn.functional at the time
torch_attention = torch._C._nn.scaled_dot_product_attention

_SCALE_KEYS = frozenset({
    "q_scale", "k_scale", "v_scale", "q_granularity", "k_granularity", "v_granularity",
    "saturated", "smooth_k", "k_mean", "made_for",
})  # fmt: skip


class Runner:
    """A schedule, what observes and scales, and what was counted."""

    def __init__(
        self,
        schedule: Schedule,
        scales: Scales | None = None,
        on_attention: OnAttention | None = None,
    ) -> None:
        self.schedule = schedule
        self.scales = scales
        self.on_attention = on_attention
        self.counts = Counts()
        self._lock = new_lock()
        self._auto: dict[tuple[Any, ...], str] = {}

    def __call__(
        self,
        place: Place,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
    ) -> Any:
        """Attention of (B, S, H, D), by the schedule's recipe for that place."""
        recipe = self.schedule.recipe_at(place)
        try:
            out = self._run(
                place, recipe, query, key, value, attn_mask, dropout_p, is_causal, scale,
                enable_gqa, return_lse,
            )  # fmt: skip
        except (InvalidArgument, Unsupported) as error:
            if not place.layer:
                raise
            way = f"Rule('torch', layers={place.layer!r}) leaves this layer to torch"
            raise type(error)(f"{place.layer}: {error} ({way})") from None
        if not torch.compiler.is_compiling():
            self.count(place, self._chosen(recipe, query, key, value))
        return out

    def _chosen(self, recipe: str | Recipe, *operands: torch.Tensor) -> str:
        """A recipe's name; of "auto" what it is for q, k and v (B, S, H, D)."""
        if name_of(recipe) != "auto":
            return name_of(recipe)
        key = operands[0].device, *((x.dtype, x.shape[1:]) for x in operands)
        if key not in self._auto:
            alike = [x.new_empty(x.shape[-1]).expand(1, *x.shape[1:]) for x in operands]
            found = re.search(r"^recipe: (\S+)", _attention.explain(*alike), re.MULTILINE)
            self._auto[key] = found[1] if found else "auto"
        return self._auto[key]

    def count(self, place: Place, name: str) -> None:
        """Says that a call was computed by what has that name."""
        with self._lock:
            self.counts.add(place, name)

    def _run(
        self,
        place: Place,
        recipe: str | Recipe,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *options: Any,
    ) -> Any:
        scales = None
        if self.on_attention is not None or self.scales is not None:
            if torch.compiler.is_compiling():
                raise Unsupported("torch.compile: observers and static scales are not in a graph")
            with placed(place):
                if self.on_attention is not None:
                    self.on_attention(place, query, key, value)
                if self.scales is not None and recipe != TORCH:
                    scales = self.scales(place)
        return attend(recipe, scales, query, key, value, *options)


def attend(
    recipe: str | Recipe,
    scales: dict[str, Any] | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Any:
    """Attention as diffusers' backends compute it, by a recipe or by torch.

    query (B, Sq, H, D), key and value (B, Sk, Hkv, D), of any strides whose last one is 1.
    attn_mask: bool (True = may look) or added, of shape (B, Sk) or what broadcasts to
    (B, H, Sq, Sk). is_causal: query i sees keys j <= i, as in torch. scales: static scales, by the
    names of qattn.attention(), and of these what the recipe has a use for.
    Returns (B, Sq, H, D), with return_lse also the LSE (B, Sq, H) in float32.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor) or x.dim() != 4:
            raise InvalidArgument(f"{name}: should be a torch tensor (B, S, H, D)")
    _check_dropout(dropout_p)
    is_causal = boolean("is_causal", is_causal)
    enable_gqa = boolean("enable_gqa", enable_gqa)
    return_lse = boolean("return_lse", return_lse)
    if is_causal and attn_mask is not None:
        raise InvalidArgument("attn_mask: excludes is_causal=True, as in torch")
    if scale is not None:
        scale = real("scale", scale)
    plain = attn_mask is None and scales is None and not (is_causal or return_lse)
    if plain and recipe != TORCH:
        out = _ordinary_call(recipe, query, key, value, scale)
        if out is not None:
            return out
    mask = _key_padding(attn_mask, query.shape[0], key.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if recipe == TORCH:
        if return_lse:
            raise Unsupported("return_lse: torch's own attention has none; give another recipe")
        out = torch_attention(q, k, v, mask, dropout_p, is_causal, scale=scale,
                              enable_gqa=enable_gqa)  # fmt: skip
        return out.transpose(1, 2)
    if torch.compiler.is_compiling():
        if return_lse or scales is not None:
            raise Unsupported("return_lse: torch.compile takes the output alone")
        out = _torch_ops.attention(q, k, v, mask, recipe=recipe, is_causal=is_causal,
                                   enable_gqa=enable_gqa, scale=scale)  # fmt: skip
        return out.transpose(1, 2)
    out, lse = _compute(
        q, k, v, mask, is_causal, enable_gqa, return_lse,
        {"recipe": recipe, "scale": scale, **_static(scales, recipe, q, k, v)},
    )  # fmt: skip
    return (out, lse.transpose(1, 2)) if return_lse else out


def _ordinary_call(
    recipe: str | Recipe,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
) -> torch.Tensor | None:
    """Attention of (B, S, H, D) by the short way of qattn.attention(); None: it does not take it,
    or torch would change the operands first."""
    heads = query.shape[2]
    if key.shape[2] != heads or value.shape[2] != heads or torch._C._is_any_autocast_enabled():
        return None
    try:
        return _ordinary.attend(query, key, value, {"recipe": recipe, "scale": scale})
    except QattnError as error:
        raise type(error)(_torch_ops._with_way_out(str(error))) from None


def _key_padding(mask: Any, batch: int, keys: int) -> Any:
    """(B, Sk) says which keys there are, as diffusers' native backend reads it."""
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and tuple(mask.shape) == (batch, keys):
        return mask[:, None, None, :]
    return mask


def _compute(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Any,
    is_causal: bool,
    enable_gqa: bool,
    return_lse: bool,
    options: dict[str, Any],
) -> tuple[torch.Tensor, Any]:
    """Attention of views (B, H, S, D), into memory (B, S, H, D)."""
    q, k, v, mask = _as_autocast(q, k, v, mask)
    length, keys = q.shape[2], k.shape[2]
    mask = as_mask("attn_mask", mask, (length, keys), q.device)
    for name, x in (("query", q), ("key", k), ("value", v), ("attn_mask", mask)):
        if x is not None:
            check_tensor(name, x)
            check_memory(name, x)
    _torch_ops._check_tensors(q, k, v, mask)
    q, k, v = _torch_ops._aligned(q, k, v, enable_gqa)
    if mask is not None:
        mask = _torch_ops._broadcast_mask(mask, (*q.shape[:-1], keys))
    q, k, v = (_torch_ops._unit_stride(n, x) for n, x in (("query", q), ("key", k), ("value", v)))
    window = None
    if is_causal:  # as in _torch_ops: keys past the queries are seen by nobody
        k, v = k[:, :, :length], v[:, :, :length]
        window = (-1, length - k.shape[2])
    out = q.new_empty((q.shape[0], length, q.shape[1], v.shape[-1]))
    with torch.no_grad():
        try:
            made = _attention.attention(
                q, k, v, layout="bhsd", mask=mask, window=window, return_lse=return_lse,
                out=out.transpose(1, 2), **options,
            )  # fmt: skip
        except QattnError as error:
            raise type(error)(_torch_ops._with_way_out(str(error))) from None
    return out, made[1] if return_lse else None


def _as_autocast(*tensors: Any) -> tuple[Any, ...]:
    """What torch.autocast makes of the operands of an attention."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype)
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64
        else x
        for x in tensors
    )


def _static(scales: Any, recipe: str | Recipe, *operands: torch.Tensor) -> dict[str, Any]:
    """Arguments of qattn.attention() for static scales, without those of operands in 16 bits.

    operands: q, k and v, (B, H, S, D).
    """
    if scales is None:
        return {}
    if not isinstance(scales, dict) or not _SCALE_KEYS.issuperset(scales):
        raise InvalidArgument(f"scales: should give a dict of {', '.join(sorted(_SCALE_KEYS))}")
    codes = as_recipe(recipe)
    formats = {"q": codes.qk, "k": codes.qk, "v": codes.v}
    used: dict[str, Any] = {}
    for (role, code), x in zip(formats.items(), operands):
        if code in ("f32", "f16", "bf16", "none") and codes.name != "auto":
            continue
        used |= _one_static(role, code, x, scales)
    if used:
        made_for = scales.get("made_for")
        if made_for is not None and not isinstance(made_for, MadeFor):
            made_for = MadeFor(made_for, scales.get("smooth_k"))
        used["scales_for"] = made_for
        used |= {name: scales[name] for name in ("saturated", "smooth_k") if name in scales}
    if "k_scale" in used and (mean := scales.get("k_mean")) is not None:
        used["k_mean"] = mean.expand(operands[1].shape[0], -1, -1)
    return used


def _one_static(role: str, code: str, x: torch.Tensor, scales: dict[str, Any]) -> dict[str, Any]:
    names = f"{role}_scale", f"{role}_granularity"
    scale, granularity = (scales.get(name) for name in names)
    if scale is None:
        return {}
    if not isinstance(scale, torch.Tensor):
        raise InvalidArgument(f"{names[0]}: {shown(scale)} is not a torch tensor")
    if granularity is None:
        granularity = "per_head"
        if scale.dim() == 1 and scale.numel() == 1:
            granularity = "per_tensor"
        elif scale.dim() == 1:
            scale = scale.expand(x.shape[0], -1)
        if role == "v" and code == "s8":  # kernels take these a token; one stands for all of them
            granularity = "per_token"
            scale = scale.reshape(*scale.shape, *(1,) * (3 - scale.dim())).expand(*x.shape[:3])
    return dict(zip(names, (scale, granularity)))
