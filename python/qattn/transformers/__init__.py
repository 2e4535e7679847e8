"""qattn as an attention implementation of Hugging Face transformers.

    import qattn.transformers
    qattn.transformers.register(recipe="int8_full")
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="qattn").eval()
    with torch.no_grad():
        model.generate(**inputs)

For inference on CPUs and CUDA GPUs, in eval mode and without gradients. Needs transformers 5.
QattnCache keeps keys and values in 2 to 16 bits, and decode steps read them as they lie.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from .._errors import InvalidArgument, Unsupported, shown
from .._recipe import Recipe, as_recipe, real
from ..torch._ops import attention
from .._torch_tensors import as_mask, check_tensor
from ..torch._library import check_backward
from ._cache import Features, QattnCache
from ._in_cache import InCache
from ._models import guard, is_ours, knows, mask, reached

__all__ = ["QattnCache", "register"]

# Models hand down whatever their forward() was given. These say nothing about the attention.
_WITHOUT_EFFECT = frozenset({
    "cache_position", "deterministic", "logits_to_keep", "num_items_in_batch",
    "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "use_cache",
})  # fmt: skip
# Packed sequences: the mask keeps them apart, where there is one.
_PACKED = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})


def register(
    name: str = "qattn", recipe: str | Recipe = "auto", *, backward: str = "forward"
) -> None:
    """Makes `attn_implementation=name` run qattn with that recipe, in every model.

    backward: where gradients come from, as in qattn.torch.sdpa(). Several recipes can be registered
    under several names; the same name again replaces its recipe.
    Raises InvalidArgument for a recipe that does not exist and for names of transformers' own.
    """
    chosen = as_recipe(recipe)
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"name: {shown(name)} is not a name")
    if name == "eager" or (AttentionInterface().get(name) is not None and not is_ours(name)):
        raise InvalidArgument(f"name: {name!r} is an implementation of transformers or another's")
    AttentionInterface.register(name, _forward(chosen, check_backward(backward)))
    AttentionMaskInterface.register(name, mask)
    guard()


def _forward(recipe: Recipe, backward: str) -> Callable[..., tuple[torch.Tensor, None]]:
    """The function that transformers calls in each attention layer."""

    def forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        reached(module, attention_mask)
        _check(module, dropout, attention_mask, others)
        length = query.shape[2]
        if attention_mask is not None:
            lengths = length, key.shape[2]
            attention_mask = as_mask("attention_mask", attention_mask, lengths, query.device)
            check_tensor("attention_mask", attention_mask, differentiable=True)
        if is_causal is None:
            is_causal = getattr(module, "qattn_is_causal", getattr(module, "is_causal", True))
        # As for "sdpa": a mask says everything, and one query sees all keys of the cache.
        causal = bool(is_causal) and attention_mask is None and length > 1
        cached = key if isinstance(key, InCache) else None
        if cached is not None:
            asked = _cache_features(
                scaling, softcap, sliding_window, s_aux, position_bias,
                hidden=causal or attention_mask is not None or length == 1,
            )  # fmt: skip
            if not cached.cache.is_prompt(cached.layer):
                out = cached.cache.attend(cached.layer, query, attention_mask, asked)
                return out.transpose(1, 2).contiguous(), None
            key, value = cached.cache.take_prompt(cached.layer)
        window = -1
        if sliding_window is not None and attention_mask is None:
            window = _window_left(int(sliding_window), length, key.shape[2], causal)
        if position_bias is not None:
            attention_mask = _biased(position_bias, attention_mask, causal, length, key.shape[2])
            causal = False
        out = attention(
            query,
            key,
            value,
            attention_mask,
            sinks=s_aux,
            recipe=recipe,
            is_causal=causal,
            enable_gqa=key.shape[1] != query.shape[1],
            scale=None if scaling is None else real("scaling", scaling),
            softcap=0.0 if softcap is None else real("softcap", softcap),
            window_left=window,
            backward=backward,
        )
        if cached is not None:
            cached.cache.store_prompt(cached.layer, query, attention_mask, asked)
        return out.transpose(1, 2).contiguous(), None

    forward.qattn_recipe = recipe  # type: ignore[attr-defined]
    knows({*inspect.signature(forward).parameters, *_WITHOUT_EFFECT, *_PACKED, "output_attentions"})
    return forward


def _check(
    module: torch.nn.Module, dropout: float, mask: torch.Tensor | None, others: dict[str, Any]
) -> None:
    """Refuses what the caller asked for and would not get."""
    if real("dropout", dropout) > 0.0:
        raise Unsupported(f"dropout: {dropout}; qattn has none; configure 0, or call model.eval()")
    for name, value in others.items():
        if value is None or value is False or name in _WITHOUT_EFFECT:
            continue
        if name in _PACKED:
            if mask is None:
                raise Unsupported(f"{name}: packed sequences need a mask in qattn")
        elif name == "output_attentions":
            raise Unsupported("output_attentions: qattn never has the probabilities; use 'eager'")
        else:
            layer = type(module).__name__
            raise Unsupported(f"{name}: qattn does not know this argument of {layer}")


def _cache_features(
    scaling: float | None,
    softcap: float | None,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    *,
    hidden: bool,
) -> Features:
    """What a QattnCache is asked for. hidden: the mask or causality says what a query sees."""
    if position_bias is not None:
        raise Unsupported("position_bias: decode over a QattnCache takes no bias")
    if not hidden:
        raise Unsupported("is_causal: several queries that see each other, with a QattnCache")
    return Features(
        None if scaling is None else real("scaling", scaling),
        None if softcap is None else real("softcap", softcap),
        None if sliding_window is None else int(sliding_window),
        sinks,
    )


def _window_left(window: int, length: int, keys: int, causal: bool) -> int:
    """How far a query looks back where a layer has a window and transformers made no mask for it.

    transformers counts the query itself among the `window` keys.
    """
    if keys <= window:
        return -1
    if length == 1 or (causal and length == keys):
        return window - 1
    raise Unsupported(
        f"sliding_window: {window} without a mask, for {length} queries and {keys} keys"
    )


def _biased(
    bias: torch.Tensor, mask: torch.Tensor | None, causal: bool, length: int, keys: int
) -> torch.Tensor:
    """An additive mask of a model's position bias and what the layer's mask or is_causal hides."""
    if causal:
        mask = torch.ones(length, keys, dtype=torch.bool, device=bias.device).tril()
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, -torch.inf)
    return bias + mask
