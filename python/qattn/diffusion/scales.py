"""StaticScales: scales of Q, K and V from what calibrate() found, by a place in the sampler."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _qattn
from .._errors import InvalidArgument, shown
from .._interop import FORMATS, check_array, is_torch
from .._quantize import quantize
from .._recipe import MadeFor, Recipe, as_recipe, integer, real
from .place import Place

if TYPE_CHECKING:
    from .calibration import Calibration, Maxima

POLICIES = ("table", "max", "law")
UNSEEN = ("refuse", "extrapolate")
MEANS = ("own", "table")
_ROLES = ("q", "k", "v")
#: of scales, by the rule of dynamic ones
_SMALLEST = 2.0**-126
#: sigmas beyond the outermost by this much are it: schedulers reckon in float32
_ROUNDING = 1e-3


@dataclasses.dataclass(frozen=True)
class Clipped:
    """Codes that static scales clipped in the calls of one layer at one step."""

    layer: str
    step: int | None  #: as the places told it
    calls: int
    q: int
    k: int
    v: int

    @property
    def total(self) -> int:
        return self.q + self.k + self.v


class StaticScales:
    """What Calibration.scales() returns: scales by place, and counts of the codes they clipped.

    scales(place) is for qattn.diffusion.attach(scales=...); arguments() is for qattn.attention().
    Both hand a counter to the call, and say what the scales were made for, as qattn.MadeFor: calls
    whose codes are of another format, or of K with or less its mean where the scales are not, are
    refused. One object serves one thread at a time.
    """

    def __init__(
        self,
        calibration: Calibration,
        recipe: str | Recipe,
        *,
        policy: str,
        margin: float,
        unseen: str,
        reference: int | None,
        smooth_k: bool,
        k_mean: str,
        device: Any,
    ) -> None:
        for name, value, known in (
            ("policy", policy, POLICIES), ("unseen", unseen, UNSEEN), ("k_mean", k_mean, MEANS)
        ):  # fmt: skip
            if value not in known:
                raise InvalidArgument(f"{name}: {shown(value)} is not one of {', '.join(known)}")
        if unseen != "refuse" and policy != "table":
            raise InvalidArgument(f"unseen: belongs to policy table, and {policy} has no such step")
        if reference is not None and policy != "law":
            raise InvalidArgument(f"reference: belongs to policy law, not to {policy}")
        if k_mean == "table":
            if not smooth_k:
                raise InvalidArgument("k_mean: is of a table, but smooth_k is off")
            if any(maxima.k_mean is None for maxima in calibration.layers.values()):
                raise InvalidArgument("k_mean: of no table; calibrate with k_means=True")
        self.calibration, self.k_mean = calibration, k_mean
        self.recipe = as_recipe(recipe)
        self.policy, self.unseen, self.smooth_k = policy, unseen, smooth_k
        self.margin = real("margin", margin)
        if not 0 < self.margin < math.inf:
            raise InvalidArgument(f"margin: {self.margin} is not positive and finite")
        self.made_for = MadeFor(self.recipe, smooth_k)
        self._units = _units(self.recipe)
        self._device = device
        self._reference = (calibration.steps - 1) // 2
        if reference is not None:
            self._reference = integer("reference", reference)
        if not 0 <= self._reference < calibration.steps:
            raise InvalidArgument(
                f"reference: step {self._reference} is not one of {calibration.steps}"
            )
        if policy == "law" and calibration.sigmas is None:
            raise InvalidArgument("policy: law needs sigmas, and this calibration has none")
        if policy == "law" and math.isinf(calibration.sigmas[self._reference]):
            raise InvalidArgument(
                f"reference: step {self._reference} has an infinite sigma; give another"
            )
        self._made: dict[Any, dict[str, Any]] = {}
        #: by layer and step, then by where the call's tensors lie
        self._counters: dict[tuple[str, int | None], dict[str, _Counter]] = {}

    def values(self, place: Place) -> dict[str, np.ndarray]:
        """ "q_scale" (Hq), "k_scale" (Hkv) and, where V becomes codes, "v_scale" (Hkv), float32;
        with k_mean "table" also "k_mean" (Hkv, D), of the calibrated step that is nearest.

        Raises InvalidArgument for a layer that was not calibrated, for a step or sigma that was
        not unless `unseen` allows it, and for a place that tells neither.
        """
        maxima = self.calibration.layers.get(place.layer)
        if maxima is None:
            raise InvalidArgument(
                f"layer: {shown(place.layer)} was not calibrated in {shown(self.calibration.model)}"
            )
        result = {}
        for role, unit in self._units.items():
            kind = "k_centred" if role == "k" and self.smooth_k else role
            rows = getattr(maxima, kind).astype(np.float64)
            largest = self._largest(place, rows, maxima.seen)
            scale = np.maximum(self.margin * largest * unit, _SMALLEST)
            result[f"{role}_scale"] = scale.astype(np.float32)
        if self.k_mean == "table":
            result["k_mean"] = self._mean_at(place, maxima)
        return result

    def _mean_at(self, place: Place, maxima: Maxima) -> np.ndarray:
        """K's mean: any vector leaves the result as it is, so that a near one serves."""
        assert maxima.k_mean is not None
        means, sigmas = maxima.k_mean[maxima.seen], self.calibration.sigmas
        step, steps = self._step_of(place), np.flatnonzero(maxima.seen)
        if self.policy == "max" or (step is None and place.sigma is None):
            return means.mean(0, dtype=np.float32)
        if step is not None:
            return means[np.abs(steps - step).argmin()]
        levels = np.asarray(sigmas)[maxima.seen]
        if math.isinf(place.sigma):  # type: ignore[arg-type]
            return means[levels.argmax()]
        return means[np.abs(np.log(levels) - math.log(place.sigma)).argmin()]

    def __call__(self, place: Place) -> dict[str, Any]:
        """values() as torch tensors on `device`, and "saturated", the counter of that layer and
        step: what qattn.diffusion.Scales is to give."""
        made, counter = self._in_torch(place, self._device)
        told = {} if self.smooth_k else {"smooth_k": False}
        return {**made, "saturated": counter.next(), "made_for": self.made_for, **told}

    def arguments(
        self, place: Place, q: Any, k: Any, v: Any, *, layout: str = "bshd"
    ) -> dict[str, Any]:
        """Arguments of qattn.attention() for these operands, beside recipe and layout: scales of
        shape (B, H) where q lies, of v in s8 (B, Hkv, Sk) as GPU kernels want it, granularities,
        scales_for, smooth_k, k_mean (B, Hkv, D) if it is of the table, and the counter `saturated`.

        q: (B, S, Hq, D), k and v: (B, Sk, Hkv, D), or with layout "bhsd" dimensions 1 and 2
        swapped. Raises what values() does, and InvalidArgument for other heads than calibrated.
        """
        heads = 1 if layout == "bhsd" else 2
        for name, x in zip(_ROLES, (q, k, v)):
            check_array(name, x)
            if len(x.shape) != 4:
                raise InvalidArgument(f"{name}: shape {tuple(x.shape)} has not 4 dimensions")
        if is_torch(q):
            made, counter = self._in_torch(place, q.device)
        else:
            made = self._kept(place, "numpy", lambda x: x)
            counter = self._counter(place, "numpy", lambda: np.zeros(3, np.int64))
        result: dict[str, Any] = {"smooth_k": self.smooth_k, "scales_for": self.made_for}
        for role, x in zip(_ROLES, (q, k, v)):
            if (scale := made.get(f"{role}_scale")) is None:
                continue
            if x.shape[heads] != scale.shape[0]:
                raise InvalidArgument(
                    f"{role}: has {x.shape[heads]} heads, and {place.layer} was calibrated with "
                    f"{scale.shape[0]}"
                )
            # Kernels take s8 values with a scale a token. One number stands for all tokens.
            tokens = role == "v" and self.recipe.v == "s8"
            shape = (x.shape[0], scale.shape[0], *((x.shape[3 - heads],) if tokens else ()))
            if tokens:
                scale = scale[:, None]
            wide = scale.expand(shape) if is_torch(scale) else np.broadcast_to(scale, shape)
            result[f"{role}_scale"] = wide
            result[f"{role}_granularity"] = "per_token" if tokens else "per_head"
        if (mean := made.get("k_mean")) is not None:
            expand = mean.expand if is_torch(mean) else lambda to: np.broadcast_to(mean, to)
            result["k_mean"] = expand((k.shape[0], *mean.shape))
        return {**result, "saturated": counter.next()}

    def clipped(self) -> list[Clipped]:
        """Clipped codes of all calls so far, a row a layer and step, in the order of first calls.
        Waits for the GPU where counters lie there."""
        result = []
        for (layer, step), counters in self._counters.items():
            q, k, v = (sum(x) for x in zip(*(c.read() for c in counters.values())))
            if calls := sum(c.calls for c in counters.values()):
                result.append(Clipped(layer, step, calls, q, k, v))
        return result

    def _largest(self, place: Place, rows: np.ndarray, seen: np.ndarray) -> np.ndarray:
        """(heads): the maxima that the policy has for a place; rows: (steps, heads)."""
        if self.policy == "max":
            return rows[seen].max(0)
        sigmas, step = self.calibration.sigmas, self._step_of(place)
        if sigmas is None:
            if step is None:
                raise InvalidArgument(
                    f"place: {place.layer} tells no step, and the calibration has no sigmas"
                )
            if not seen[step]:
                raise InvalidArgument(_not_seen(place, "step", step))
            return rows[step]
        sigma = place.sigma
        if sigma is None:
            if step is None:
                raise InvalidArgument(f"place: {place.layer} has neither step nor sigma")
            sigma = sigmas[step]
        if not sigma > 0:
            raise InvalidArgument(f"sigma: {sigma} of {place.layer} is not positive")
        if self.policy == "law":
            if math.isinf(sigma):
                raise InvalidArgument(
                    f"sigma: of {place.layer} is infinite, which policy 'law' has no scale for"
                )
            if not seen[self._reference]:
                raise InvalidArgument(_not_seen(place, "reference step", self._reference))
            # The library's own function of document 003, whose two steps are these.
            pair = [sigmas[self._reference], sigma]
            return rows[self._reference] * _qattn.scheduled_scale(1.0, pair, 0, 1)
        return self._between(place, rows[seen], np.asarray(sigmas)[seen], sigma)

    def _step_of(self, place: Place) -> int | None:
        """The calibrated step that a place without sigma means; None: it tells no step."""
        step, steps = place.step, self.calibration.steps
        if step is None or (place.sigma is not None and self.calibration.sigmas is not None):
            return None
        if place.steps is not None and place.steps != steps:
            raise InvalidArgument(
                f"step: {step} of {place.steps} of {place.layer}, and {steps} steps were "
                "calibrated; another number of steps needs places with a sigma"
            )
        if not 0 <= step < steps:
            raise InvalidArgument(_not_seen(place, "step", step))
        return step

    def _between(
        self, place: Place, rows: np.ndarray, sigmas: np.ndarray, sigma: float
    ) -> np.ndarray:
        """Rows interpolated in log sigma. Steps of one sigma are one, with the larger maxima; an
        infinite one stands for itself alone."""
        levels, which = np.unique(sigmas, return_inverse=True)
        table = np.full((len(levels), rows.shape[1]), -np.inf)
        np.maximum.at(table, which, rows)
        if math.isinf(levels[-1]) and math.isinf(sigma):
            return table[-1]
        finite = levels[~np.isinf(levels)]
        if math.isinf(sigma) or not len(finite):
            raise InvalidArgument(
                f"sigma: {sigma:g} of {place.layer} was not calibrated, and nothing lies between a "
                "finite sigma and an infinite one"
            )
        levels, table = finite, table[: len(finite)]
        x, at = np.log(levels), math.log(sigma)
        if levels[0] * (1 - _ROUNDING) <= sigma <= levels[-1] * (1 + _ROUNDING):
            at = min(max(at, x[0]), x[-1])
            right = min(int(np.searchsorted(x, at)), len(x) - 1)
            left = max(right - 1, 0)
            share = (at - x[left]) / (x[right] - x[left]) if right > left else 0.0
            return table[left] + share * (table[right] - table[left])
        if self.unseen == "refuse":
            raise InvalidArgument(
                f"sigma: {sigma:g} of {place.layer} is beyond the calibrated {levels[0]:g} to "
                f"{levels[-1]:g}, and unseen is 'refuse'"
            )
        end, inner = (0, 1) if sigma < levels[0] else (-1, -2)
        if len(x) == 1:
            return table[0]
        slope = (table[end] - table[inner]) / (x[end] - x[inner])
        return np.maximum(table[end] + slope * (at - x[end]), table[end])

    def _in_torch(self, place: Place, device: Any) -> tuple[dict[str, Any], _Counter]:
        """values() and the counter, on a device of torch."""
        import torch

        device = torch.device(device)
        with torch.inference_mode(False):  # what is made in there could not be counted up outside
            return (
                self._kept(place, str(device), lambda x: torch.from_numpy(x).to(device)),
                self._counter(
                    place, str(device), lambda: torch.zeros(3, dtype=torch.int64, device=device)
                ),
            )

    def _kept(self, place: Place, where: str, make: Any) -> dict[str, Any]:
        """values() in a place's memory, made once: a sampler comes by again."""
        key = (place.layer, place.step, place.sigma, place.steps, where)
        if key not in self._made:
            self._made[key] = {name: make(x) for name, x in self.values(place).items()}
        return self._made[key]

    def _counter(self, place: Place, where: str, zeros: Any) -> _Counter:
        counters = self._counters.setdefault((place.layer, place.step), {})
        if where not in counters:
            counters[where] = _Counter(zeros)
        return counters[where]


class _Counter:
    """The `saturated` of the calls of one layer and step. A call overwrites it, so that what it
    held is added up before the next; all on the call's own device and stream, waiting for none."""

    def __init__(self, zeros: Any) -> None:
        self._buffer, self._sum = zeros(), zeros()
        self.calls = 0

    def next(self) -> Any:
        """(3) int64 for one more call."""
        self._sum += self._buffer
        self._buffer[...] = 0
        self.calls += 1
        return self._buffer

    def read(self) -> tuple[int, int, int]:
        q, k, v = (self._sum + self._buffer).tolist()
        return q, k, v


def _not_seen(place: Place, what: str, step: int | None) -> str:
    return f"step: {what} {step} of {place.layer} was not calibrated"


def _units(recipe: Recipe) -> dict[str, float]:
    """1 / qmax of each operand that becomes codes with a free scale. Refuses other recipes."""
    formats = {"q": recipe.qk, "k": recipe.qk, "v": recipe.v}
    coded = {role: x for role, x in formats.items() if x in FORMATS and FORMATS[x][2] != "none"}
    if not coded:
        raise InvalidArgument(f"recipe: {recipe} has no codes that static scales could be of")
    for role, name in coded.items():
        if FORMATS[name][1] > 0:
            raise InvalidArgument(
                f"recipe: {recipe} has {role} in {name}, whose scales belong to groups and come "
                "from the values"
            )
    return {role: _unit(name) for role, name in coded.items()}


@functools.cache
def _unit(format_name: str) -> float:
    """The dynamic scale of values up to 1."""
    one = quantize(np.ones((1, 1, 1, 8), np.float32), format=format_name, granularity="per_head")
    return float(one.scale.item())
