"""Which step a denoiser's forward pass is: from the scheduler, the pipeline, or the user."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch

from .._errors import InvalidArgument, shown
from .._recipe import integer, real
from .place import Place


class Clock:
    """Tells the step and sigma of a forward pass, in a scheduler's terms.

    scheduler: of diffusers, or what has `timesteps` and, where it counts, `step_index`; or None.
    """

    def __init__(self, scheduler: Any = None) -> None:
        self.scheduler = scheduler
        self.given: Place | None = None  # by Attachment.at()
        self._timesteps: Any = None  # of the run under way: a new list begins a new run
        self._begin = 0

    def moment(self, model: torch.nn.Module, args: tuple, kwargs: dict, context: Any) -> Place:
        """A Place without a layer. context: diffusers' CacheContext of the call, or None."""
        place = self._scheduled(model, args, kwargs)
        if context is not None:
            said = {
                "branch": context.name,
                "step": context.step_index,
                "steps": context.num_inference_steps,
                "sigma": None if context.sigma is None else float(context.sigma),
            }
            place = dataclasses.replace(place, **{k: x for k, x in said.items() if x is not None})
        if self.given is not None:
            said = {
                name: getattr(self.given, name)
                for name in ("branch", "step", "steps", "sigma")
                if getattr(self.given, name) is not None
            }
            place = dataclasses.replace(place, **said)
        return place

    def _scheduled(self, model: torch.nn.Module, args: tuple, kwargs: dict) -> Place:
        timesteps = getattr(self.scheduler, "timesteps", None)
        if timesteps is None or len(timesteps) == 0:
            return Place()
        fresh = timesteps is not self._timesteps
        step = self._step(timesteps, model, args, kwargs)
        if step is None:
            return Place(steps=len(timesteps))
        begin = getattr(self.scheduler, "begin_index", None)
        if fresh:
            self._timesteps, self._begin = timesteps, step
        if begin is not None:
            self._begin = int(begin)
        sigma = _sigma(self.scheduler, timesteps, step)
        return Place(step=step, sigma=sigma, steps=len(timesteps), begin=self._begin)

    def _step(self, timesteps: Any, model: torch.nn.Module, args: tuple, kwargs: dict) -> Any:
        """Schedulers count the steps that were done, which is the index of the one under way."""
        step = getattr(self.scheduler, "step_index", None)
        if step is None and not hasattr(self.scheduler, "step_index"):
            step = getattr(self.scheduler, "counter", None)  # PNDM's
        if step is None:  # before a run's first step, and schedulers that do not count
            step = getattr(self.scheduler, "begin_index", None)
        if step is None:
            step = _index_of(_timestep(model, args, kwargs), timesteps, self.scheduler)
        return int(step) if step is not None and 0 <= int(step) < len(timesteps) else None


def given_place(step: Any, steps: Any, sigma: Any, branch: Any) -> Place:
    """What a loop of the user's own says, checked."""
    if step is not None and integer("step", step) < 0:
        raise InvalidArgument(f"step: {step} is negative; the first step is 0")
    if steps is not None and integer("steps", steps) < 1:
        raise InvalidArgument(f"steps: {steps} is not a number of steps, 1 or more")
    if step is not None and steps is not None and step >= steps:
        raise InvalidArgument(f"step: {step} is not below steps, {steps}")
    if branch is not None and not isinstance(branch, str):
        raise InvalidArgument(f"branch: {shown(branch)} is not a name")
    return Place("", step, None if sigma is None else real("sigma", sigma), branch, steps)


def _timestep(model: torch.nn.Module, args: tuple, kwargs: dict) -> float | None:
    """The timestep that a forward pass was called with. Waits for a GPU where it lies there."""
    try:
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return None
    for name in ("timestep", "timesteps", "t"):
        value = given.get(name)
        if isinstance(value, torch.Tensor) and value.numel() > 0:
            return float(value.max())  # of several tokens' the noisy ones'
        if isinstance(value, (int, float)):
            return float(value)
    return None


def _index_of(value: float | None, timesteps: Any, scheduler: Any) -> int | None:
    """The entry that a model's timestep is; models may take it as a share of the training's."""
    if value is None:
        return None
    config = getattr(scheduler, "config", {})
    train = config.get("num_train_timesteps", 1000) if hasattr(config, "get") else 1000
    listed = torch.as_tensor(timesteps).detach().to("cpu", torch.float64)
    found = set()
    for unit in (1.0, 1.0 / train):
        away = (listed * unit - value).abs()
        nearest = int(away.argmin())
        # Models take timesteps in 16 bits, too: 2^-8 of the value, if no other one is as near.
        if away[nearest] <= max(abs(value) * 2**-8, 1e-6 * unit) and (
            away[nearest] == 0 or int((away <= 4 * away[nearest]).sum()) == 1
        ):
            found.add(nearest)
    return found.pop() if len(found) == 1 else None  # 1.0 may be the first step or the last


def _sigma(scheduler: Any, timesteps: Any, step: int) -> float | None:
    sigmas = getattr(scheduler, "sigmas", None)
    if sigmas is not None and len(sigmas) in (len(timesteps), len(timesteps) + 1):
        return float(sigmas[step])
    products = getattr(scheduler, "alphas_cumprod", None)
    if products is None:
        return None
    t = int(timesteps[step])
    if not 0 <= t < len(products):
        return None
    alpha = float(products[t])
    return ((1 - alpha) / alpha) ** 0.5 if alpha > 0 else None
