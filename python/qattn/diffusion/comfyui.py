"""ComfyUI: a function for transformer_options["optimized_attention_override"].

    override = qattn.diffusion.comfyui.override(Schedule("int8_full", Rule("bf16", last=5)))
    model = model.clone()
    options = model.model_options.setdefault("transformer_options", {})
    options["optimized_attention_override"] = override

ComfyUI is not imported: its attention functions hand their arguments over.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .._errors import InvalidArgument, Unsupported, shown
from .._recipe import Recipe, boolean, integer
from .attend import Runner
from .place import OnAttention, Place, Scales
from .report import Report
from .schedule import Schedule, as_schedule

#: what ComfyUI's own function computed where a model asked for no low precision
COMFYUI = "comfyui"


def override(
    schedule: Schedule | str | Recipe = "auto",
    *,
    scales: Scales | None = None,
    on_attention: OnAttention | None = None,
) -> Override:
    """What ComfyUI calls in place of its attention function: override(func, *args, **kwargs).

    Sigma, step and branch come from transformer_options; a step is an entry of "sample_sigmas". A
    layer is named by its block, "double_block.3" or "input.4.0", and has no name where a model
    tells none. Arguments that it does not know are refused with Unsupported.
    """
    return Override(Runner(as_schedule(schedule), scales, on_attention))


class Override:
    """The function that override() returns; report() says what it computed."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._read: list[Any] = []  # the last tensors and their numbers: reading waits for a GPU

    def __call__(self, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attention as ComfyUI's functions compute it.

        q, k, v: (B, N, heads * D), or (B, heads, N, D) with skip_reshape=True. mask: bool or added,
        broadcasts to (B, heads, N, keys) after a dimension for heads is put in. Returns
        (B, N, heads * D), or (B, heads, N, D) with skip_output_reshape=True.
        """
        call = _Call(*args, **kwargs)
        place = self._place(call.options)
        if call.low_precision_attention is False:
            out = func(*args, **kwargs)
            self.runner.count(place, COMFYUI)
            return out
        out = self.runner(place, *call.operands(), call.whole_mask(), scale=call.scale,
                          enable_gqa=call.enable_gqa)  # fmt: skip
        return out.transpose(1, 2) if call.skip_output_reshape else out.flatten(2)

    def __deepcopy__(self, memo: object) -> Override:
        """Itself, as of a function: ComfyUI copies the options of a model."""
        return self

    def report(self) -> Report:
        """The layers that were reached, by what and how often. Others ComfyUI does not tell."""
        counts = self.runner.counts
        return Report(tuple(
            counts.of_layer(name, "block", sum(calls.values()), 0)
            for name, calls in counts.calls.items()
        ))  # fmt: skip

    def _place(self, options: dict[str, Any]) -> Place:
        block, index = options.get("block"), options.get("block_index")
        layer = "" if block is None else ".".join(str(x) for x in (*block, *_known(index)))
        # 0 is the conditional branch; a call may hold both.
        kinds = set(options.get("cond_or_uncond") or ())
        branch = {frozenset({0}): "cond", frozenset({1}): "uncond"}.get(frozenset(kinds))
        sigma = self._number(options.get("sigmas"))
        schedule = self._numbers(options.get("sample_sigmas"))
        step = None
        if sigma is not None and schedule is not None:
            step = _step_of(sigma, schedule)
        steps = None if schedule is None else len(schedule) - 1
        return Place(layer, step, sigma, branch, steps)

    def _number(self, sigmas: Any) -> float | None:
        numbers = self._numbers(sigmas)
        return None if numbers is None else max(numbers)

    def _numbers(self, sigmas: Any) -> list[float] | None:
        """A tensor's numbers, read once for all the layers that get the same tensor."""
        if sigmas is None:
            return None
        if not isinstance(sigmas, torch.Tensor):
            raise InvalidArgument(f"sigmas: {shown(sigmas)} is not a torch tensor")
        # Inference tensors count no versions; ComfyUI makes a new one for each step.
        version = None if sigmas.is_inference() else sigmas._version
        kept = self._read = [row for row in self._read if row[0]() is not None][-3:]
        if sigmas.device.type != "cpu":
            for tensor, read, numbers in kept:
                if tensor() is sigmas and read == version:
                    return numbers
        numbers = [float(x) for x in sigmas.flatten().tolist()] or None
        kept.append((weakref.ref(sigmas), version, numbers))
        return numbers


class _Call:
    """The arguments of ComfyUI's attention functions."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        attn_precision: Any = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        *unknown: Any,
        transformer_options: dict[str, Any] | None = None,
        low_precision_attention: bool | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        _inside_attn_wrapper: bool = True,
        **others: Any,
    ) -> None:
        for x in unknown:
            raise Unsupported(f"{shown(x)}: qattn does not know a ninth argument of an attention")
        for name, value in others.items():
            if value is not None:
                raise Unsupported(f"{name}: qattn does not know this argument of an attention")
        if attn_precision not in (None, torch.float32):
            raise Unsupported(
                f"attn_precision: {attn_precision}; scores are float32 in every recipe of qattn"
            )
        self.heads = integer("heads", heads)
        self.skip_reshape = boolean("skip_reshape", skip_reshape)
        self.skip_output_reshape = boolean("skip_output_reshape", skip_output_reshape)
        self.enable_gqa = boolean("enable_gqa", enable_gqa)
        self.low_precision_attention = low_precision_attention
        self.q, self.k, self.v, self.mask, self.scale = q, k, v, mask, scale
        self.options = transformer_options or {}

    def operands(self) -> tuple[torch.Tensor, ...]:
        """q, k and v as views (B, N, H, D)."""
        rank, made = 4 if self.skip_reshape else 3, []
        for name, x in (("q", self.q), ("k", self.k), ("v", self.v)):
            if not isinstance(x, torch.Tensor) or x.dim() != rank:
                shape = "(B, heads, N, D)" if self.skip_reshape else "(B, N, heads * D)"
                raise InvalidArgument(f"{name}: {shown(x)} is not a torch tensor {shape}")
            made.append(x.transpose(1, 2) if self.skip_reshape else self._split(name, x))
        if made[0].shape[2] != self.heads:
            raise InvalidArgument(f"heads: {self.heads}, but q has {made[0].shape[2]}")
        return tuple(made)

    def _split(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """With enable_gqa k and v may have fewer heads, all of q's size."""
        size = self.q.shape[-1] // max(self.heads, 1)
        if size == 0 or self.q.shape[-1] % self.heads or x.shape[-1] % size:
            raise InvalidArgument(
                f"{name}: {x.shape[-1]} channels are not heads of {size}, for {self.heads} heads"
            )
        return x.unflatten(-1, (-1, size))

    def whole_mask(self) -> torch.Tensor | None:
        """The mask as (B or 1, heads or 1, N, keys); ComfyUI leaves out leading dimensions."""
        mask = self.mask
        if mask is None:
            return None
        if not isinstance(mask, torch.Tensor) or not 2 <= mask.dim() <= 4:
            raise InvalidArgument(f"mask: {shown(mask)} is not a torch tensor of rank 2 to 4")
        if mask.dim() == 2:
            mask = mask[None]
        return mask[:, None] if mask.dim() == 3 else mask


def _known(index: Any) -> tuple[Any, ...]:
    return () if index is None else (index,)


def _step_of(sigma: float, schedule: list[float]) -> int | None:
    """The entry of the sampler's list under way. Solvers of second order also ask between two: the
    step is the earlier one. None for lists that rise and fall, and sigmas before the first."""
    steps = schedule[:-1]
    pairs = list(zip(steps, steps[1:]))
    falls, rises = (all(p) for p in ([a >= b for a, b in pairs], [a <= b for a, b in pairs]))
    if falls and schedule[-1] <= schedule[0]:
        reached = [i for i, s in enumerate(steps) if s >= sigma * (1 - 1e-5)]
    elif rises:  # backwards, from an image to its noise
        reached = [i for i, s in enumerate(steps) if s <= sigma * (1 + 1e-5)]
    else:
        return None
    if not reached or steps.count(steps[reached[-1]]) > 1:  # of equal ones nobody tells which
        return None
    return reached[-1]
