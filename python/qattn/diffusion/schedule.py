"""Precision by step and layer: which recipe an attention call gets. No torch here."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Iterable
from typing import Any

from .._errors import InvalidArgument, shown
from .._recipe import Recipe, as_recipe, integer, real
from .place import Place

#: the recipe that is none of qattn's: torch's own scaled_dot_product_attention, as the model asks
TORCH = "torch"

_WAYS = {
    "step": (
        "attach(pipeline, ...) and attach(model, ..., scheduler=scheduler) take it from the "
        "scheduler, and a loop of your own gives it by `with attached.at(step=3, steps=20):`"
    ),
    "sigma": (
        "attach(pipeline, ...) and attach(model, ..., scheduler=scheduler) take it from the "
        "scheduler, and a loop of your own gives it by `with attached.at(sigma=0.5):`"
    ),
    "layer": "qattn.diffusion.attach(model, ...) gives layers their names",
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """A recipe, and the calls that it is for: those that meet every condition that is given.

    recipe: a name of qattn.recipes(), a qattn.Recipe, "auto", or "torch", which leaves the call to
    torch's own scaled_dot_product_attention.
    first, last: the first or last so many steps of a run. A step is an entry of the scheduler's
    list of timesteps; schedulers of second order have two for each step that they are asked for.
    sigma: (low, high), the scheduler's noise levels from low to high, both included.
    layers: a glob of layers' names, or several: "blocks.0.*", ("*.attn2", "proj_attn").
    Raises InvalidArgument for conditions that cannot be.
    """

    recipe: str | Recipe
    first: int | None = None
    last: int | None = None
    sigma: tuple[float, float] | None = None
    layers: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_recipe(self.recipe)
        for name in ("first", "last"):
            value = getattr(self, name)
            if value is not None and integer(name, value) < 1:
                raise InvalidArgument(f"{name}: {value} is not a number of steps, 1 or more")
        if self.sigma is not None:
            object.__setattr__(self, "sigma", _range(self.sigma))
        if self.layers is not None:
            object.__setattr__(self, "layers", _globs(self.layers))
        if all(getattr(self, f.name) is None for f in dataclasses.fields(self)[1:]):
            raise InvalidArgument(
                f"Rule: {name_of(self.recipe)!r} without a condition is for every call; give it as "
                "Schedule's default"
            )

    def matches(self, place: Place) -> bool:
        """Is it for a call at that place? InvalidArgument where the place lacks what it asks."""
        if self.layers is not None:
            self._need("layer", place.layer or None, place)
            if not any(fnmatch.fnmatchcase(place.layer, glob) for glob in self.layers):
                return False
        if self.sigma is not None:
            self._need("sigma", place.sigma, place)
            if not self.sigma[0] <= place.sigma <= self.sigma[1]:  # type: ignore[operator]
                return False
        if self.first is not None:
            self._need("step", place.step, place)
            if place.step - place.begin >= self.first:  # type: ignore[operator]
                return False
        if self.last is not None:
            self._need("step", place.step, place)
            self._need("step", place.steps, place)
            if place.step < place.steps - self.last:  # type: ignore[operator]
                return False
        return True

    def _need(self, what: str, value: Any, place: Place) -> None:
        if value is None:
            name = {"layer": "name of the layer"}.get(what, what)
            if what == "step" and place.step is not None:
                name = "number of steps"
            where = f" in layer {place.layer!r}" if place.layer else ""
            raise InvalidArgument(f"{self}: the {name} is not known{where}; {_WAYS[what]}")

    def __str__(self) -> str:
        fields = dataclasses.fields(self)[1:]
        values = [(f.name, getattr(self, f.name)) for f in fields]
        given = [f"{name}={value!r}" for name, value in values if value is not None]
        return f"Rule({', '.join([repr(name_of(self.recipe)), *given])})"


class Schedule:
    """Which recipe each attention call of a sampler gets: that of the first rule that matches.

        Schedule("int8_full", Rule("bf16", last=5))                # late steps in 16 bits
        Schedule("int8_full", Rule("torch", layers="*.attn2"), Rule("bf16", first=2))

    Where no rule matches, it is the default.

    default: a recipe as Rule takes it. rules: in the order in which they are asked.
    """

    def __init__(self, default: str | Recipe = "auto", *rules: Rule) -> None:
        check_recipe(default)
        for rule in rules:
            if not isinstance(rule, Rule):
                raise InvalidArgument(f"rules: {shown(rule)} is not a qattn.diffusion.Rule")
        self.default = default
        self.rules = rules

    def recipe_at(self, place: Place) -> str | Recipe:
        """The recipe of a call at that place.

        Raises InvalidArgument where a rule that is reached asks for what the place does not say.
        """
        for rule in self.rules:
            if rule.matches(place):
                return rule.recipe
        return self.default

    def check_layers(self, names: Iterable[str]) -> None:
        """Refuses a glob that none of a model's names matches: it would be without effect."""
        names = list(names)
        for rule in self.rules:
            for glob in rule.layers or ():
                if not any(fnmatch.fnmatchcase(name, glob) for name in names):
                    raise InvalidArgument(f"{rule}: {glob!r} matches no layer of the model")

    def __repr__(self) -> str:
        return f"Schedule({', '.join([repr(name_of(self.default)), *map(str, self.rules)])})"


def as_schedule(value: Any) -> Schedule:
    """A Schedule, or a recipe as the schedule of one recipe."""
    return value if isinstance(value, Schedule) else Schedule(value)


def name_of(recipe: str | Recipe) -> str:
    """What reports call a recipe."""
    return str(recipe)


def check_recipe(recipe: Any) -> None:
    """InvalidArgument for what is neither a recipe nor "torch"."""
    if recipe != TORCH:
        as_recipe(recipe)


def _range(value: Any) -> tuple[float, float]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InvalidArgument(f"sigma: {shown(value)} is not a pair (low, high)")
    low, high = (real("sigma", x) for x in value)
    if math.isnan(low) or math.isnan(high) or low > high:
        raise InvalidArgument(f"sigma: ({low}, {high}) is no range from low to high")
    return low, high


def _globs(value: Any) -> tuple[str, ...]:
    globs = (value,) if isinstance(value, str) else value
    if not isinstance(globs, (tuple, list)) or not globs:
        raise InvalidArgument(f"layers: {shown(value)} is neither a glob nor several")
    for glob in globs:
        if not isinstance(glob, str) or not glob:
            raise InvalidArgument(f"layers: {shown(glob)} is not a glob of names")
    return tuple(globs)
