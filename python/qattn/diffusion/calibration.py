"""calibrate(): the largest |Q|, |K| and |V| of each layer, head and step; a file keeps them.

    def run(on_attention):
        with qattn.diffusion.attach(pipeline, "torch", on_attention=on_attention):
            for prompt in prompts:
                pipeline(prompt)

    found = qattn.diffusion.calibrate(run, model="some/model")
    found.save("some-model.safetensors")
    scales = found.scales("int8_full")        # what attach(..., scales=scales) takes

K is also looked at less its mean, which is what a recipe that smooths K makes codes of.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .._errors import InvalidArgument, Unsupported, shown
from .._interop import check_array, is_cuda_array, is_torch
from .._recipe import Recipe, boolean, real
from .place import OnAttention, Place
from .scales import StaticScales

_FORMAT, _VERSION = "qattn.diffusion.calibration", "1"
#: of a layer's tensors in a file, in the order of Maxima's fields
_KINDS = ("q", "k", "k_centred", "v", "k_mean")
#: how far two sigmas of one step may be apart: schedulers reckon in float32, and some round
_SAME_SIGMA = 1e-3


@dataclasses.dataclass(frozen=True, eq=False)
class Maxima:
    """One layer's: float32, a row a step. A row of a step that the layer did not see is NaN."""

    q: np.ndarray  #: (steps, Hq), max |Q|
    k: np.ndarray  #: (steps, Hkv), max |K|
    k_centred: np.ndarray  #: (steps, Hkv), max |K - mean of K over the tokens|
    v: np.ndarray  #: (steps, Hkv), max |V|
    k_mean: np.ndarray | None = None  #: (steps, Hkv, D), K's mean over tokens and calls, if kept

    @property
    def seen(self) -> np.ndarray:
        """(steps) bool: at which steps the layer was called."""
        return ~np.isnan(self.q[:, 0])


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """What calibrate() found. save() and Calibration.load() keep it in a .safetensors file."""

    model: str  #: the name that calibrate() was given
    #: noise at each step, positive and never rising or never falling, infinite where a schedule
    #: leaves no signal; None: steps are numbers only
    sigmas: tuple[float, ...] | None
    layers: dict[str, Maxima]  #: by the layer's name, in the order of first calls

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise InvalidArgument(f"model: {shown(self.model)} is not a name")
        if self.sigmas is not None:
            object.__setattr__(self, "sigmas", checked_sigmas(self.sigmas))
        if not self.layers:
            raise InvalidArgument("layers: there are none; no attention was seen")
        steps = {len(x.q) for x in self.layers.values()}
        if self.sigmas is not None:
            steps.add(len(self.sigmas))
        if len(steps) != 1:
            raise InvalidArgument(f"layers: have {sorted(steps)} steps, and should have one number")
        for name, maxima in self.layers.items():
            _check_maxima(name, maxima)

    @property
    def steps(self) -> int:
        """How many steps the schedule has."""
        return len(next(iter(self.layers.values())).q)

    def scales(
        self,
        recipe: str | Recipe,
        *,
        policy: str = "table",
        margin: float = 1.1,
        unseen: str = "refuse",
        reference: int | None = None,
        smooth_k: bool = True,
        k_mean: str = "own",
        device: Any = "cpu",
    ) -> StaticScales:
        """Static scales for a recipe whose formats have free scales (s8, e4m3, ...).

        A scale is `margin * m / qmax`, one a head, and m comes from the maxima by `policy`:
        "table": of the step. Between the steps' sigmas m is interpolated, linearly in log sigma.
        "max": the largest of all steps; it has no unseen step.
        "law": `m(reference) * sigma / sigma(reference)`, the proportion of
          qattn.scheduled_scale(). Networks normalise, and their operands do not follow sigma:
          measured, it costs dozens of decibels (docs/tables/diffusion.md). It is here to compare.
        margin: room for what calibration did not see; positive. What exceeds it is clipped, and
        StaticScales.clipped() tells.
        unseen: what "table" alone does with a sigma beyond the calibrated ones: "refuse", or
        "extrapolate": the line through the two outermost steps in log sigma, and no less than the
        outermost one's m. A step without a sigma must be a calibrated one.
        reference: the step of "law" alone, by default the middle one.
        smooth_k: whether attention() will take off K's mean, as recipes do unless told otherwise;
        smooth_q, smooth_v and rotate change operands in ways that were not calibrated.
        k_mean: what smooth_k takes off: "own", the mean of the call's keys, which a GPU must read
        K once more for; or "table", the mean that calibrate(k_means=True) kept, the nearest step's.
        K's maxima were taken less its own mean: `margin` has to cover the difference.
        device: where the tensors of StaticScales.__call__() lie.

        Raises InvalidArgument for a policy or a recipe that cannot be, such as "auto", "bf16" and
        mxfp8, whose scales belong to groups.
        """
        return StaticScales(
            self,
            recipe,
            policy=policy,
            margin=margin,
            unseen=unseen,
            reference=reference,
            smooth_k=boolean("smooth_k", smooth_k),
            k_mean=k_mean,
            device=device,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a .safetensors file: tensors "LAYER.q", ".k", ".k_centred", ".v" and where they
        were kept ".k_mean", float32, as Maxima has them, and the model's name and its sigmas as
        metadata. Raises Unsupported without the package safetensors, OSError."""
        tensors = {
            f"{name}.{kind}": np.ascontiguousarray(x, np.float32)
            for name, maxima in self.layers.items()
            for kind in _KINDS
            if (x := getattr(maxima, kind)) is not None
        }
        metadata = {
            "format": _FORMAT,
            "version": _VERSION,
            "model": self.model,
            "sigmas": json.dumps(self.sigmas),
            "layers": json.dumps(list(self.layers)),
        }
        data = _safetensors().numpy.save(tensors, metadata)
        with open(path, "wb") as file:
            file.write(data)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        model: str | None = None,
        sigmas: Iterable[float] | None = None,
    ) -> Calibration:
        """What save() wrote. model, sigmas: what the file must be of.

        Raises InvalidArgument for a file that is no calibration or of another model or schedule,
        FileNotFoundError, Unsupported without the package safetensors.
        """
        safetensors = _safetensors()
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                metadata = file.metadata() or {}
        except safetensors.SafetensorError as error:
            raise InvalidArgument(f"{path}: is no .safetensors file: {error}") from None
        found = _from_file(str(path), metadata, tensors)
        if model is not None and model != found.model:
            raise InvalidArgument(
                f"model: {shown(model)} is asked for, and {path} is of {shown(found.model)}"
            )
        if sigmas is not None:
            _check_same_sigmas(str(path), checked_sigmas(sigmas), found.sigmas)
        return found


def calibrate(
    run: Callable[[OnAttention], object],
    *,
    model: str,
    sigmas: Iterable[float] | None = None,
    k_means: bool = False,
) -> Calibration:
    """The largest |Q|, |K| and |V| of every layer, head and step that `run` came by.

    run: called once with an observer `on_attention(place, q, k, v)`, which it brings before each
    attention, by qattn.diffusion.attach() or by hand; it samples as often as it likes, in 16 or 32
    bits. q: (B, S, H, D), k and v: (B, Sk, Hkv, D), torch tensors on any device or numpy arrays;
    place: a Place with layer, and step or sigma. On GPUs nothing waits until all runs are done.
    model: a name, kept for load(). sigmas: the noise at each step, without the final 0 that
    schedulers append; by default what the places say, in the order of steps. k_means: keep K's
    mean too, D numbers a head and step.

    Branches of guidance count together, and so do keys that masks hide.
    Raises InvalidArgument for NaN or Inf, by layer and step; for places without step and sigma, or
    whose sigma is not that of the step; for a layer whose heads change.
    """
    collector = Collector(sigmas, k_means=k_means)
    run(collector)
    return collector.result(model)


@dataclasses.dataclass
class _Seen:
    """One layer at one step, while runs go on: arrays of the framework of q."""

    maxima: dict[str, Any]
    k_mean: Any  # the sum of means, or None
    calls: int = 1


class Collector:
    """The observer that calibrate() hands to `run`; result() is what it saw."""

    def __init__(self, sigmas: Iterable[float] | None = None, *, k_means: bool = False) -> None:
        self._sigmas = None if sigmas is None else checked_sigmas(sigmas)
        self._k_means = boolean("k_means", k_means)
        self._told: dict[int, float | None] = {}  # sigmas of the places, by step
        self._steps = 0  # at least so many
        self._all_steps: int | None = None  # as places tell it
        self._seen: dict[str, dict[int, _Seen]] = {}

    def __call__(self, place: Place, q: Any, k: Any, v: Any) -> None:
        """Looks at one attention's operands, in layout (B, S, H, D)."""
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_array(name, x)
            if is_cuda_array(x):
                raise Unsupported(f"{name}: is a {type(x).__name__}; on GPUs give torch tensors")
            if len(x.shape) != 4 or 0 in x.shape:
                raise InvalidArgument(f"{name}: shape {tuple(x.shape)} is not (B, S, H, D)")
        step = self._step_of(place)
        centred, mean = _centred(k)
        maxima = {"q": _largest(q), "k": _largest(k), "k_centred": centred, "v": _largest(v)}
        steps = self._seen.setdefault(place.layer, {})
        self._check_heads(place.layer, next(iter(steps.values()), None), maxima, mean)
        seen = steps.get(step)
        mean = mean if self._k_means else None
        if seen is None:
            steps[step] = _Seen(maxima, mean)
            return
        for kind, x in maxima.items():
            seen.maxima[kind] = _larger(seen.maxima[kind], x)
        seen.calls += 1
        if mean is not None:
            seen.k_mean = seen.k_mean + mean

    def _step_of(self, place: Place) -> int:
        if not place.layer:
            raise InvalidArgument("place: has no layer")
        step, sigma = place.step, place.sigma
        if step is None:
            step = self._step_at(place)
        known = self._sigmas[step] if self._sigmas and 0 <= step < len(self._sigmas) else None
        if step < 0 or (self._sigmas is not None and known is None):
            raise InvalidArgument(
                f"place: {place.layer} is at step {step}, and the schedule has "
                f"{len(self._sigmas or ())} sigmas"
            )
        self._check_steps(place)
        if known is None:
            known = self._told.get(step)
            self._told[step] = known = sigma if known is None else known
        if sigma is not None and known is not None and not same_sigma(sigma, known):
            raise InvalidArgument(
                f"place: {place.layer} is at step {step} with sigma {sigma:g}, whose sigma is "
                f"{known:g}; a schedule is calibrated at a time"
            )
        self._steps = max(self._steps, step + 1)
        return step

    def _check_steps(self, place: Place) -> None:
        """Refuses a run of another number of steps, whose numbers mean other noise."""
        if place.steps is None:
            return
        own = len(self._sigmas) if self._sigmas is not None else self._all_steps
        if own is not None and place.steps != own:
            raise InvalidArgument(
                f"place: {place.layer} runs in {place.steps} steps, and {own} are calibrated; a "
                "schedule is calibrated at a time"
            )
        self._all_steps = place.steps

    def _step_at(self, place: Place) -> int:
        """The step of a place that tells its sigma alone."""
        if place.sigma is None or self._sigmas is None:
            raise InvalidArgument(
                f"place: {place.layer} has no step, which only a sigma of known `sigmas` replaces"
            )
        for step, sigma in enumerate(self._sigmas):
            if same_sigma(place.sigma, sigma):
                return step
        raise InvalidArgument(f"place: sigma {place.sigma:g} of {place.layer} is not in `sigmas`")

    @staticmethod
    def _check_heads(layer: str, first: _Seen | None, maxima: dict[str, Any], mean: Any) -> None:
        if first is None:
            return
        for kind, x in maxima.items():
            had = first.maxima[kind].shape[0]
            if x.shape[0] != had:
                raise InvalidArgument(
                    f"{kind[0]}: {layer} has {x.shape[0]} heads, and had {had} before"
                )
        if first.k_mean is not None and first.k_mean.shape != mean.shape:
            raise InvalidArgument(
                f"k: {layer} has head dimension {mean.shape[1]}, and had {first.k_mean.shape[1]}"
            )

    def result(self, model: str) -> Calibration:
        """What was seen so far. Raises InvalidArgument for NaN or Inf, by layer and step."""
        steps = len(self._sigmas) if self._sigmas is not None else self._count()
        return Calibration(
            model,
            self._sigmas if self._sigmas is not None else self._told_sigmas(),
            {layer: _maxima(layer, seen, steps) for layer, seen in self._seen.items()},
        )

    def _count(self) -> int:
        return max(self._steps, self._all_steps or 0)

    def _told_sigmas(self) -> tuple[float, ...] | None:
        told = [self._told.get(step) for step in range(self._count())]
        known = [x for x in told if x is not None]
        if not known:
            return None
        if len(known) < len(told):
            raise InvalidArgument(
                f"sigmas: nothing tells that of step {told.index(None)}; give them to calibrate()"
            )
        return tuple(known)


def checked_sigmas(sigmas: Iterable[float]) -> tuple[float, ...]:
    """A schedule's sigmas as numbers: positive, never rising or never falling. Infinite ones are
    of steps of nothing but noise, as zero-SNR betas begin with."""
    if hasattr(sigmas, "tolist"):
        sigmas = sigmas.tolist()
    if isinstance(sigmas, str) or not isinstance(sigmas, Iterable):
        raise InvalidArgument(f"sigmas: {shown(sigmas)} is not a list of numbers")
    levels = tuple(real("sigmas", x) for x in sigmas)
    if not levels:
        raise InvalidArgument("sigmas: is empty")
    for step, sigma in enumerate(levels):
        if not sigma > 0:
            last = sigma == 0 and step == len(levels) - 1
            hint = "; leave out the final 0, at which nothing is evaluated" if last else ""
            raise InvalidArgument(f"sigmas: step {step} has {sigma}, which is not positive{hint}")
    pairs = list(zip(levels, levels[1:]))
    if any(a < b for a, b in pairs) and any(a > b for a, b in pairs):
        raise InvalidArgument("sigmas: rise and fall; a schedule does one of them")
    return levels


def same_sigma(a: float, b: float) -> bool:
    """Is it the same step's noise, but for rounding?"""
    return a == b or abs(a - b) <= _SAME_SIGMA * min(abs(a), abs(b))


def _largest(x: Any) -> Any:
    """(H) float32: max |x| of (B, S, H, D). Two reductions, and no copy."""
    if is_torch(x):
        x, axes = x.detach(), (0, 1, 3)
        return x.amax(axes).float().maximum(-x.amin(axes).float())
    high, low = (f((0, 1, 3)).astype(np.float32) for f in (x.max, x.min))
    return np.maximum(high, -low)


def _centred(k: Any) -> tuple[Any, Any]:
    """(Hkv): max |K - mean|, the mean being each batch entry's and channel's over the tokens; and
    (Hkv, D): the mean over the batch of these means."""
    if is_torch(k):
        import torch

        k = k.detach()
        mean = k.mean(1, dtype=torch.float32)
        high, low = k.amax(1).float() - mean, mean - k.amin(1).float()
        return high.maximum(low).amax((0, 2)), mean.mean(0)
    with np.errstate(invalid="ignore"):  # Inf - Inf; result() names it
        mean = k.mean(1, dtype=np.float32)
        high, low = k.max(1).astype(np.float32) - mean, mean - k.min(1).astype(np.float32)
        return np.maximum(high, low).max((0, 2)), mean.mean(0)


def _larger(a: Any, b: Any) -> Any:
    return a.maximum(b) if is_torch(a) else np.maximum(a, b)


def _on_host(x: Any) -> np.ndarray:
    return x.cpu().numpy() if is_torch(x) else np.asarray(x)


def _maxima(layer: str, seen: dict[int, _Seen], steps: int) -> Maxima:
    """Rows of all steps of what was seen at some."""
    made: dict[str, np.ndarray] = {}
    for step, one in seen.items():
        found = {kind: _on_host(x) for kind, x in one.maxima.items()}
        for kind in ("q", "k", "v"):
            if not np.isfinite(found[kind]).all():
                raise InvalidArgument(f"{kind}: {layer} holds NaN or Inf at step {step}")
        if one.k_mean is not None:
            found["k_mean"] = _on_host(one.k_mean) / np.float32(one.calls)
        for kind, x in found.items():
            made.setdefault(kind, np.full((steps, *x.shape), np.nan, np.float32))[step] = x
    return Maxima(**made)


def _check_maxima(layer: str, maxima: Maxima) -> None:
    """Shapes and values: what a file may hold."""
    steps, heads = maxima.q.shape if maxima.q.ndim == 2 else (0, 0)
    if not steps or not heads:
        raise InvalidArgument(f"{layer}.q: shape {maxima.q.shape} is not (steps, heads)")
    for kind in ("k", "k_centred", "v"):
        x = getattr(maxima, kind)
        if x.shape != maxima.k.shape or x.shape != (steps, x.shape[-1]) or x.shape[-1] == 0:
            raise InvalidArgument(f"{layer}.{kind}: shape {x.shape} does not fit {maxima.q.shape}")
    if heads % maxima.k.shape[1]:
        raise InvalidArgument(f"{layer}.k: {maxima.k.shape[1]} heads do not divide q's {heads}")
    if maxima.k_mean is not None and maxima.k_mean.shape[:2] != maxima.k.shape:
        raise InvalidArgument(f"{layer}.k_mean: shape {maxima.k_mean.shape} does not fit k's")
    for kind in ("q", "k", "k_centred", "v"):
        seen = getattr(maxima, kind)[maxima.seen]
        if not (np.isfinite(seen) & (seen >= 0)).all():
            raise InvalidArgument(f"{layer}.{kind}: has a maximum that is negative, NaN or Inf")
    if not maxima.seen.any():
        raise InvalidArgument(f"{layer}: was seen at no step")


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError:
        raise Unsupported(
            "safetensors: is not installed, and calibrations are kept in its format"
        ) from None
    return safetensors


def _from_file(path: str, metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> Calibration:
    kind = metadata.get("format"), metadata.get("version")
    if kind != (_FORMAT, _VERSION):
        raise InvalidArgument(f"{path}: format and version {kind} are not {(_FORMAT, _VERSION)}")
    try:
        sigmas = json.loads(metadata["sigmas"])
        names = json.loads(metadata["layers"])
        layers = {
            name: Maxima(
                **{x: tensors.pop(key) for x in _KINDS if (key := f"{name}.{x}") in tensors}
            )
            for name in names
        }
        found = Calibration(metadata["model"], sigmas, layers)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{path}: {error}") from None
    if tensors:
        raise InvalidArgument(f"{path}: tensor {next(iter(tensors))} belongs to no layer")
    return found


def _check_same_sigmas(path: str, asked: Sequence[float], found: Sequence[float] | None) -> None:
    if found is None:
        raise InvalidArgument(f"sigmas: are asked for, and {path} has none")
    if len(asked) != len(found):
        raise InvalidArgument(
            f"sigmas: {len(asked)} steps are asked for, and {path} has {len(found)}"
        )
    for step, (a, b) in enumerate(zip(asked, found)):
        if not same_sigma(a, b):
            raise InvalidArgument(
                f"sigmas: step {step} is asked for with {a:g}, and in {path} has {b:g}"
            )
