"""What the code of a model's modules does about attention, read from its bytecode.

Flags such as `_supports_sdpa` are False in models that dispatch and absent in code of users, so
that the code itself is asked: who calls the attention interface, who computes attention without
it, who makes masks for the implementation that a configuration names.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

_MODELS = "transformers.models."
_MASKS = frozenset({"transformers.masking_utils", "transformers.modeling_attn_mask_utils"})
# Of that module, what makes no mask of queries by keys, or makes it for no implementation.
_NO_MASKS = frozenset({"create_recurrent_attention_mask", "find_packed_sequence_indices"})
_PRODUCTS = frozenset({"baddbmm", "bmm", "einsum", "matmul", "@"})
_SQUARES = frozenset({"eye", "tril", "triu"})
_SELF_CONTAINED = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})


class Code:
    """What one class, or a function of its module, refers to."""

    def __init__(self) -> None:
        self.names: set[str] = set()  #: of globals and attributes; "@" for the operator
        self.constants: set[Any] = set()
        self.globals: dict[str, Any] = {}
        self.reads_is_causal = False
        self.own_masks: set[str] = set()  #: functions that make masks of tokens by tokens

    def add(self, function: types.FunctionType) -> None:
        for code in _parts(function.__code__):
            if "mask" in function.__name__ and _SQUARES.intersection(code.co_names):
                self.own_masks.add(function.__name__)
            self.names.update(code.co_names)
            self.constants.update(x for x in code.co_consts if isinstance(x, (str, tuple)))
            for step in dis.get_instructions(code):
                if step.argrepr == "@" or step.opname == "BINARY_MATRIX_MULTIPLY":
                    self.names.add("@")
                if step.opname.startswith("LOAD") and step.argval == "is_causal":
                    self.reads_is_causal |= step.opname in ("LOAD_ATTR", "LOAD_CONST")
            for name in code.co_names:
                if name in function.__globals__:
                    self.globals[name] = function.__globals__[name]

    @property
    def dispatches(self) -> bool:
        return any(isinstance(x, AttentionInterface) for x in self.globals.values())

    @property
    def computes(self) -> bool:
        """Scores, their softmax and its product, or a function of torch that does all that."""
        softmax = any(x.lower().endswith("softmax") and "log" not in x for x in self.names)
        return bool(self.names & _SELF_CONTAINED) or (softmax and bool(self.names & _PRODUCTS))

    @property
    def makes_masks(self) -> bool:
        return any(
            isinstance(x, AttentionMaskInterface)
            or (getattr(x, "__module__", None) in _MASKS and name not in _NO_MASKS)
            for name, x in self.globals.items()
        )

    @property
    def makes_causal_masks(self) -> bool:
        return self.makes_masks and any("causal" in x or "generate" in x for x in self.globals)

    @property
    def asks_for_sdpa(self) -> bool:
        """Is another than torch's attention treated otherwise?"""
        return "sdpa" in self.constants and "_attn_implementation" in self.names

    @property
    def lists_implementations(self) -> bool:
        """Does an implementation that is in none of its lists get something else?"""
        return "_attn_implementation" in self.names and any(
            isinstance(x, tuple) and "sdpa" in x for x in self.constants
        )

    @property
    def passed(self) -> set[str]:
        """Arguments by name of its calls of attention."""
        calls = [x for x in self.constants if isinstance(x, tuple) and "scaling" in x]
        return {name for x in calls for name in x if isinstance(name, str)}

    @property
    def hides_future(self) -> bool:
        """Does it speak of causality, other than by what torch's attention is told?"""
        return (
            self.reads_is_causal
            or "is_causal" in self.passed
            or any(
                "causal" in x.lower() or x in ("tril", "triu") for x in self.names - {"is_causal"}
            )
        )

    def tables(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Its tables of attention classes by implementation."""
        for name, x in self.globals.items():
            if isinstance(x, dict) and "eager" in x and inspect.isclass(x["eager"]):
                yield name, x


def _parts(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            yield from _parts(x)


def _is_foreign(thing: Any) -> bool:
    """Is it of torch or of transformers itself, and no model's own?"""
    module = f"{getattr(thing, '__module__', None)}."
    return module.startswith(("torch.", "transformers.")) and not module.startswith(_MODELS)


def _methods(cls: type) -> Iterator[types.FunctionType]:
    """Functions that instances have; those that others replace only where these call super()."""
    hidden: set[str] = set()
    for owner in cls.__mro__:
        if owner is object or _is_foreign(owner):
            continue
        for name, x in vars(owner).items():
            x = getattr(x, "__func__", x)
            x = x.fget if isinstance(x, property) else x
            if name in hidden or not callable(x) or inspect.isclass(x):
                continue
            x = inspect.unwrap(x)
            if not isinstance(x, types.FunctionType):
                continue
            if not any("super" in part.co_names for part in _parts(x.__code__)):
                hidden.add(name)
            yield x


@functools.lru_cache(maxsize=None)
def code_of(cls: type) -> Code:
    """Of a class's own methods and of the functions of models that they call."""
    found, waiting, seen = Code(), list(_methods(cls)), set()
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        found.add(function)
        for name in {name for part in _parts(function.__code__) for name in part.co_names}:
            x = function.__globals__.get(name)
            x = inspect.unwrap(x) if callable(x) and not inspect.isclass(x) else None
            if isinstance(x, types.FunctionType) and not _is_foreign(x):
                waiting.append(x)
    return found


def built(cls: type, inside: type) -> Iterator[type]:
    """The class and the classes of modules that its constructors name, but for whole models
    (`inside`), which answer for themselves."""
    waiting, seen = [cls], set()
    while waiting:
        kind = waiting.pop()
        if kind in seen:
            continue
        seen.add(kind)
        yield kind
        for x in code_of(kind).globals.values():
            if inspect.isclass(x) and issubclass(x, torch.nn.Module) and not _is_foreign(x):
                if not issubclass(x, inside):
                    waiting.append(x)
