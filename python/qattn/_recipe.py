"""Recipes, granularities and other options, in the extension's terms."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, Union

import numpy as np

from . import _qattn
from ._errors import InvalidArgument, shown

#: name, (name, block) or (name, block, warp)
Granularity = Union[str, tuple[str, int], tuple[str, int, int]]


_BOOLS = (bool, np.bool_)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """In which format each operand is multiplied; `str(recipe)` is its name.

    "none" stands for 16 bits like the input. dataclasses.replace() makes variants, such as
    replace(qattn.recipe("fp8"), qk="e4m3fnuz").
    """

    name: str
    qk: str  #: codes of Q and K
    p: str  #: codes of P
    v: str  #: codes of V

    def __str__(self) -> str:
        return self.name


def recipe(name: str) -> Recipe:
    """The recipe called `name` ("auto" included). Raises InvalidArgument with the list of names."""
    if not isinstance(name, str):
        raise InvalidArgument(f"recipe: {shown(name)} is neither a name nor a qattn.Recipe")
    return _recipe_named(name)


@functools.lru_cache(maxsize=64)
def _recipe_named(name: str) -> Recipe:
    return Recipe(*_qattn.recipe(name))


def recipes() -> tuple[Recipe, ...]:
    """Every named recipe except "auto", in the order of docs/NUMERICS.md."""
    return tuple(Recipe(*row) for row in _qattn.recipes())


def as_recipe(value: str | Recipe) -> Recipe:
    return value if isinstance(value, Recipe) else recipe(value)


@dataclasses.dataclass(frozen=True)
class MadeFor:
    """What static scales were made for, as `scales_for` of attention() and quantize() takes it.

    A recipe says in which formats they are. The rest says of which rows: less their means, rotated.
    None is as recipes choose for static scales: k less its mean (smooth_k), and nothing else.
    """

    recipe: str | Recipe
    smooth_k: bool | None = None
    smooth_q: bool | None = None
    smooth_v: bool | None = None
    rotate: bool | None = None


def made_for(value: str | Recipe | MadeFor | None) -> tuple | None:
    """What static scales were made for, in the extension's terms; None: nobody knows."""
    if value is None:
        return None
    told = value if isinstance(value, MadeFor) else MadeFor(value)
    r = as_recipe(told.recipe)
    names = ("smooth_k", "smooth_q", "smooth_v", "rotate")
    toggles = (toggle(f"scales_for: {name}", getattr(told, name)) for name in names)
    return (r.name, r.qk, r.p, r.v), (*toggles, None)


def integer(name: str, value: Any) -> int:
    """An option that must be an integer of 64 bits."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{name}: {shown(value)} is not an integer") from None
    if isinstance(value, _BOOLS) or not -(2**63) <= number < 2**63:
        raise InvalidArgument(f"{name}: {shown(value)} is not an integer of 64 bits")
    return number


def real(name: str, value: Any) -> float:
    """An option that must be a real number."""
    try:
        if isinstance(value, (str, bytes, *_BOOLS)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(f"{name}: {shown(value)} is not a real number") from None


def boolean(name: str, value: Any) -> bool:
    if isinstance(value, _BOOLS):
        return bool(value)
    raise InvalidArgument(f"{name}: {shown(value)} is neither True nor False")


def toggle(name: str, value: Any) -> bool | None:
    """True, False, or None for the recipe's own choice."""
    return None if value is None else boolean(name, value)


def scaling(name: str, value: Granularity | None) -> tuple[str, int, int]:
    """(granularity, block, warp), with "automatic" and 0 for what is not given."""
    if value is None:
        return "automatic", 0, 0
    parts = (value,) if isinstance(value, str) else value
    if not isinstance(parts, tuple) or not 1 <= len(parts) <= 3 or not isinstance(parts[0], str):
        raise InvalidArgument(
            f"{name}: {shown(value)} is not a name, (name, block) or (name, block, warp)"
        )
    sizes = [integer(name, part) for part in parts[1:]] + [0, 0]
    return parts[0], sizes[0], sizes[1]


def block_pair(value: Any) -> tuple[int, int]:
    """Tokens a block of the block mask: (queries, keys); None: there is no such mask."""
    if value is None:
        return 0, 0
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InvalidArgument(f"block_mask_size: {shown(value)} is not a pair (queries, keys)")
    return integer("block_mask_size", value[0]), integer("block_mask_size", value[1])


def window_pair(value: Any) -> tuple[int, int]:
    """(left, right); -1 is unlimited."""
    if value is None:
        return -1, -1
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InvalidArgument(
            f"window: {shown(value)} is not a pair (left, right); -1 is unlimited"
        )
    return integer("window_left", value[0]), integer("window_right", value[1])
