"""Which entry of a scheduler's list of timesteps a denoiser's call is, and its noise.

Schedulers say it in three ways: most have `step_index`, PNDM counts from the start of the run, and
DDIM, DDPM and others say nothing, so that the timestep that the model gets and the calls before
decide. What the scheduler says is held against that timestep: another scheduler may run the model.
Where they disagree, or several entries are possible, the step is unknown.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch

#: names of the timestep in the forward() of denoisers
_NAMES = ("timestep", "timesteps", "t", "timestep_ratio", "time", "r")
#: how far a value may be from its entry, by the type that it comes in: it is cast, and divided
_ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10}
_EXACT = 1e-5
#: calls at one step that are taken without looking whether the model has gone on: two branches
_BRANCHES = 2


class Run:
    """One list of timesteps of a scheduler, while a denoiser goes through it."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.timesteps = scheduler.timesteps
        listed = torch.as_tensor(self.timesteps).detach().to("cpu", torch.float64).flatten()
        self._listed: list[float] = listed.tolist()
        #: timesteps as models take them
        self._forms = _forms(scheduler, listed)
        self._lost = _never_set(scheduler)
        #: steps that the last call may have been, each with the step at which the run began
        self._possible: dict[int, int] | None = None
        self._value: float | None = None  # the timestep that was read last
        self._same = False  # whether it was the one before, too
        self._sure = False  # whether it would be in the list if it were of this scheduler
        self._counted: int | None = None  # what the scheduler counted at the last call
        self._early = False  # whether there were calls before it counted
        self._calls = 0  # at that count
        self._agreed = 0  # counts that a timestep has agreed with

    def of(self, scheduler: Any) -> bool:
        """Is it that scheduler's list?"""
        return scheduler is self.scheduler and scheduler.timesteps is self.timesteps

    @property
    def lost(self) -> bool:
        """Does another scheduler run the model, or was the list never set?"""
        return self._lost

    def place(self, model: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[int, int] | None:
        """(step, first step of the run) of a call of the model; None: not known."""
        if self._lost:
            return None
        given = _timestep(model, args, kwargs)
        if hasattr(self.scheduler, "step_index"):
            self._by_index(given)
        elif hasattr(self.scheduler, "counter"):
            self._by_counter(self._read(given))
        else:
            self._by_value(self._read(given))
        self._lost = self._possible == {}
        if self._possible is None or len(self._possible) != 1:
            return None
        return next(iter(self._possible.items()))

    def _read(self, given: Any) -> set[int] | None:
        """The entries that a timestep may be; None: it tells nothing. Waits for its GPU."""
        before, self._value = self._value, _number(given)
        value = self._value
        self._same = value is not None and value == before
        if value is None:
            return None
        kind = given.dtype if isinstance(given, torch.Tensor) else None
        whole = isinstance(given, int) or (kind is not None and not kind.is_floating_point)
        found = []
        for form in self._forms[: 1 if whole else None]:  # shares are no whole numbers
            away = (form - value).abs()
            exact = kind not in _ROUNDING and bool((away == 0).any())
            within = 0 if exact else abs(value) * _ROUNDING.get(kind, _EXACT) + 1e-9
            found.append(set((away <= within).nonzero().flatten().tolist()))
        # In 16 bits a share is near many entries, and being near another's proves nothing.
        self._sure = kind not in _ROUNDING or (bool(found[0]) and abs(value) > 1)
        return set().union(*found) or None

    def _by_index(self, given: Any) -> None:
        """Most schedulers: `step_index` counts the steps done, which is the step under way."""
        index, begin = self.scheduler.step_index, getattr(self.scheduler, "begin_index", None)
        if index is None and begin is None:  # nothing was done since the list was set
            found = self._read(given)
            if self._early and not self._same and self._value is not None:
                self._possible = {}  # the model goes on, and the scheduler does not
                return
            self._early = True
            # Some make the list of training themselves, and are not known to run by it.
            known = found is not None and not _is_of_training(self.scheduler)
            self._possible = {i: i for i in self._first(found)} if known else None
            return
        index = int(begin if index is None else index)
        if not 0 <= index < len(self._listed):
            self._possible = {}
            return
        self._calls = self._calls + 1 if index == self._counted else 1
        if self._must_read(given, index):
            found = self._read(given)
            elsewhere = found is not None and index not in found
            # The model goes on, and the scheduler does not; or the timestep is another entry's.
            stands = index == self._counted and self._value is not None and not self._same
            if (elsewhere and self._sure) or (stands and (found is None or elsewhere)):
                self._possible = {}
                return
            self._agreed += index != self._counted and found is not None
        if begin is None:
            begin = self._begin(index)
        self._counted, self._possible = index, {index: int(begin)}

    def _begin(self, index: int) -> int:
        """Where the run began, of a scheduler that was not told."""
        if self._counted is not None and self._possible:
            return next(iter(self._possible.values()))
        # It does not count until the first step is done.
        return index - 1 if self._early and index > 0 else index

    def _must_read(self, given: Any, index: int) -> bool:
        """A timestep on a GPU is read until the scheduler is known to run the model."""
        if not isinstance(given, torch.Tensor) or given.device.type == "cpu":
            return True
        known = self._counted is not None and index in (self._counted, self._counted + 1)
        return self._agreed < 2 or self._calls > _BRANCHES or not known

    def _first(self, found: set[int]) -> set[int]:
        """Of entries of one timestep, the one that a scheduler begins with that was not told: the
        second, as diffusers' index_for_timestep() has it."""
        if len(found) > 1 and len({self._listed[i] for i in found}) == 1:
            if hasattr(self.scheduler, "index_for_timestep"):
                return {sorted(found)[1]}
        return found

    def _by_counter(self, found: set[int] | None) -> None:
        """PNDM: `counter` is the number of steps done in this run, wherever it began."""
        done = int(self.scheduler.counter)
        if found is None:
            if self._value is not None:  # a timestep that is not in the list
                self._possible = {}
            return
        begins = {i - done for i in found if i >= done}
        if self._possible is not None:
            begins &= set(self._possible.values())
        self._possible = {begin + done: begin for begin in begins}

    def _by_value(self, found: set[int] | None) -> None:
        """By the timesteps alone: each call is at the step of the call before, or at the next."""
        before = self._possible
        if found is None:
            if self._value is not None:  # a timestep that is not in the list
                self._possible = {}
            return
        if before is None:
            self._possible = {i: i for i in found}
            return
        if self._same:
            self._possible = {i: begin for i, begin in before.items() if i in found}
            return
        self._possible = {
            after: begin
            for i, begin in before.items()
            for after in self._after(i)
            if after in found
        }
        if not self._possible:  # the same list once more
            self._possible = {i: i for i in set(before.values()) & found}

    def _after(self, step: int) -> set[int]:
        """The steps that may follow: the next; of RePaint, which adds noise again without a call of
        the model, also the one after such a stretch."""
        after = {step + 1}
        if hasattr(self.scheduler, "undo_step"):
            i = step + 1
            while i < len(self._listed) and self._listed[i] > self._listed[i - 1]:
                i += 1
            after.add(i)
        return after

    def sigma(self, step: int) -> float | None:
        """The scheduler's noise level at that step: infinite where its betas leave no signal."""
        sigmas, count = getattr(self.scheduler, "sigmas", None), len(self._listed)
        between = getattr(self.scheduler, "sigmas_interpol", None)
        if between is not None:  # KDPM2: each other call is between two entries
            if step % 2 == 0:
                return float(sigmas[step])
            return float(between[step - 1 if hasattr(self.scheduler, "sigmas_up") else step])
        if sigmas is not None and len(sigmas) in (count, count + 1):
            return float(sigmas[step])
        products = getattr(self.scheduler, "alphas_cumprod", None)
        t = self._listed[step]
        if products is None or t != int(t) or not 0 <= t < len(products):
            return None
        alpha = float(products[int(t)])
        return ((1 - alpha) / alpha) ** 0.5 if alpha > 0 else math.inf


def _forms(scheduler: Any, listed: torch.Tensor) -> list[torch.Tensor]:
    """Timesteps as models take them: as listed, as a share of the training's, as what is left of 1;
    of ScoreSdeVe as sigmas."""
    forms, train = [listed], _train_steps(scheduler)
    if not hasattr(scheduler, "config"):  # another's than diffusers'
        train = 1000
    if train is not None and listed.max() > 2:
        forms += [listed / train, 1 - listed / train]
    sigmas = getattr(scheduler, "sigmas", None)
    if hasattr(scheduler, "set_sigmas") and sigmas is not None and len(sigmas) == len(listed):
        forms.append(torch.as_tensor(sigmas).detach().to("cpu", torch.float64))
    return forms


def _never_set(scheduler: Any) -> bool:
    """Is the list the one of training that schedulers have before set_timesteps()?"""
    if getattr(scheduler, "custom_timesteps", False):
        return False
    # Some have the number only once it was set.
    unset = None if _is_of_training(scheduler) else 0
    return getattr(scheduler, "num_inference_steps", unset) is None


def _train_steps(scheduler: Any) -> int | None:
    config = getattr(scheduler, "config", {})
    return config.get("num_train_timesteps") if hasattr(config, "get") else None


def _is_of_training(scheduler: Any) -> bool:
    """Is the list as long as that of training?"""
    train = _train_steps(scheduler)
    return train is not None and len(scheduler.timesteps) >= train


def _timestep(model: torch.nn.Module, args: tuple, kwargs: dict) -> Any:
    """The timestep that a forward pass was called with, or None."""
    try:
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return None
    more = given.get("kwargs")
    if isinstance(more, dict):
        given = {**more, **given}
    for name in _NAMES:
        value = given.get(name)
        if isinstance(value, torch.Tensor) and value.numel() > 0 and not value.is_complex():
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return value
    return None


def _number(given: Any) -> float | None:
    """A timestep as a number; of several tokens' the noisy ones'."""
    if given is None:
        return None
    value = float(given.max()) if isinstance(given, torch.Tensor) else float(given)
    return value if math.isfinite(value) else None
