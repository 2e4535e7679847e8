"""Which step a denoiser's forward pass is: from the scheduler, the pipeline, or the user."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from .._errors import InvalidArgument, shown
from .._fork import new_lock
from .._recipe import integer, real
from .place import Place
from .steps import Run


_lock = new_lock()


class Clock:
    """Tells the step and sigma of a forward pass of one denoiser, in its scheduler's terms.

    scheduler: of diffusers, or what has `timesteps` and, where it counts, `step_index`; or None.
    runs: of all schedulers, by id, shared by the denoisers that one scheduler runs in turn.
    """

    def __init__(self, scheduler: Any = None, runs: dict[int, Run] | None = None) -> None:
        self._source: Callable[[], Any] = lambda: scheduler
        self._runs = {} if runs is None else runs

    @classmethod
    def of(cls, model: Any, name: str, scheduler: Any, runs: dict[int, Run]) -> Clock:
        """The clock of a pipeline's denoiser of that name. scheduler: given instead.

        A pipeline is asked at each pass: its scheduler may be replaced meanwhile.
        """
        clock = cls(scheduler, runs)
        if scheduler is None and not isinstance(model, torch.nn.Module):
            clock._source = lambda: _scheduler_of(model, name)
        return clock

    @property
    def scheduler(self) -> Any:
        """The denoiser's scheduler at this time, or None."""
        return self._source()

    def moment(
        self,
        model: torch.nn.Module,
        args: tuple,
        kwargs: dict,
        context: Any,
        given: Place | None = None,
    ) -> Place:
        """A Place without a layer. context: diffusers' CacheContext of the call, or None. given:
        what goes before all that, by Attachment.at()."""
        place = self._scheduled(model, args, kwargs)
        if context is not None:
            said = {
                "branch": context.name,
                "step": context.step_index,
                "steps": context.num_inference_steps,
                "sigma": None if context.sigma is None else float(context.sigma),
            }
            place = dataclasses.replace(place, **{k: x for k, x in said.items() if x is not None})
        if given is not None:
            said = {
                name: getattr(given, name)
                for name in ("branch", "step", "steps", "sigma")
                if getattr(given, name) is not None
            }
            place = dataclasses.replace(place, **said)
        return place

    def _scheduled(self, model: torch.nn.Module, args: tuple, kwargs: dict) -> Place:
        scheduler = self.scheduler
        timesteps = getattr(scheduler, "timesteps", None)
        if timesteps is None or len(timesteps) == 0:
            return Place()
        with _lock:
            run = self._runs.get(id(scheduler))
            if run is None or not run.of(scheduler):  # a new list of timesteps begins a new run
                run = self._runs[id(scheduler)] = Run(scheduler)
            found = run.place(model, args, kwargs)
        if found is None:
            return Place() if run.lost else Place(steps=len(timesteps))
        step, begin = found
        return Place(step=step, sigma=run.sigma(step), steps=len(timesteps), begin=begin)


def _scheduler_of(pipeline: Any, name: str) -> Any:
    """The scheduler of a pipeline's denoiser: the one that has its name, or its name's beginning,
    as prior_scheduler is that of prior_prior; else the pipeline's own."""
    words = name.split("_")
    for count in range(len(words), 0, -1):
        named = getattr(pipeline, "_".join((*words[:count], "scheduler")), None)
        if named is not None:
            return named
    return getattr(pipeline, "scheduler", None)


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
