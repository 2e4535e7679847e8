"""Which models of transformers can run under an implementation of qattn's: the doors.

transformers refuses "sdpa" in models that do not dispatch through its attention interface, and
checks nothing for another name: such a model would run its own attention with masks made for
another. So whatever sets an implementation asks here, and what cannot be right is refused by name.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask

from .._errors import Unsupported
from ._code import built, code_of

_models: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
#: what masks are made of for configurations of a class: "whole", never None where a causal mask was
#: asked for, or "eager", numbers to add. Others are torch's.
_forms: dict[type, str] = {}
_local = threading.local()
_Models = tuple[PreTrainedModel, ...]
_WAY_OUT = "use 'eager' for it"
# What a layer's code does to numbers that it adds, and would do wrongly to truth values.
_ON_NUMBERS = frozenset({"finfo", "logical_not", "masked_fill", "masked_fill_", "pad"})
_KNOWN: set[str] = set()  #: arguments of the attention function


def knows(names: Iterable[str]) -> None:
    """Says which arguments the attention function takes."""
    _KNOWN.update(names)


def is_ours(name: Any) -> bool:
    return isinstance(name, str) and hasattr(AttentionInterface().get(name), "qattn_recipe")


def mask(*args: Any, **options: Any) -> torch.Tensor | None:
    """The mask of an implementation of ours, in the form that the model's code takes."""
    form = _forms.get(type(options.get("config")))
    if form == "eager":
        return eager_mask(*args, **options)
    if form == "whole":
        options["allow_is_causal_skip"] = False
    made = sdpa_mask(*args, **options)
    if made is not None and not torch.compiler.is_compiling():
        _local.made = [x for x in getattr(_local, "made", ()) if x() is not None][-7:]
        _local.made.append(weakref.ref(made))
    return made


def reached(module: torch.nn.Module, given: torch.Tensor | None) -> None:
    """An attention layer has come to qattn. Refuses a mask that the layer's own attention would
    read otherwise: truth values that nobody made for qattn, or what became of those that it did."""
    if torch.compiler.is_compiling():
        return
    _local.calls = getattr(_local, "calls", 0) + 1
    model, is_mixed = getattr(module, "qattn_model", (None, False))
    if model is None or given is None:
        return
    made = [x for ref in getattr(_local, "made", ()) if (x := ref()) is not None]
    if any(_is_part_or_copy(given, x) for x in made):
        return
    changed = any(x.shape[-2] == given.shape[-2] and x.device == given.device for x in made)
    if changed or (is_mixed and given.dtype == torch.bool):
        raise Unsupported(
            f"attention_mask: of a {type(module).__name__} in {model} is not the one that was made "
            f"for qattn; {_WAY_OUT}"
        )


def _is_part_or_copy(given: torch.Tensor, made: torch.Tensor) -> bool:
    if given.untyped_storage()._cdata == made.untyped_storage()._cdata:
        return True
    alike = given.shape == made.shape and given.dtype == made.dtype
    return alike and given.device == made.device and torch.equal(given, made)


def _with_parts(*configs: PreTrainedConfig) -> list[PreTrainedConfig]:
    """The configurations and those inside them, one time each."""
    waiting, found = list(configs), {}
    while waiting:
        config = waiting.pop()
        if id(config) not in found and isinstance(config, PreTrainedConfig):
            found[id(config)] = config
            waiting += [getattr(config, key, None) for key in config.sub_configs]
    return list(found.values())


# ---- What a model does ---------------------------------------------------------------------------


def _runs(model: PreTrainedModel) -> bool:
    return is_ours(getattr(model.config, "_attn_implementation", None))


def _layers(model: PreTrainedModel) -> Iterator[tuple[torch.nn.Module, _Models]]:
    """Modules under an implementation of ours, and the models around each, innermost last."""
    waiting: list[tuple[torch.nn.Module, _Models]] = [(model, ())]
    while waiting:
        module, owners = waiting.pop()
        if isinstance(module, PreTrainedModel):
            owners = (*owners, module)
        if _runs(owners[-1]):
            yield module, owners
        waiting += [(child, owners) for child in module.children()]


def check(model: PreTrainedModel, is_part: bool = False) -> None:
    """Refuses a model that would be wrong with the implementations that its configurations name,
    and says how layers and masks are to be read. is_part: what is around it is not built yet."""
    found = [(module, owners, code_of(type(module))) for module, owners in _layers(model)]
    dispatching = [(m, owners) for m, owners, code in found if code.dispatches]
    makers = {owners[-1] for _, owners, code in found if code.makes_masks}
    alone = [m for m, _, code in found if code.computes and not code.dispatches]
    for module, owners, _ in found:
        _check_table(model, type(module), owners[-1].config._attn_implementation)
    for module, _ in dispatching:
        _check_layer(model, type(module))
    if makers and not dispatching and not is_part:
        kind = type(alone[0] if alone else model)
        _refuse(model, kind, "computes attention itself, with masks made for another")
    _choose_forms(found)
    for _, owners in dispatching:
        _check_around(model, owners)
    if not is_part:
        for module, owners in dispatching:
            _describe(module, owners)


def _check_layer(model: PreTrainedModel, kind: type) -> None:
    code = code_of(kind)
    if code.lists_implementations:
        _refuse(model, kind, "tells implementations apart and does not know this one")
    for name in sorted(code.passed - _KNOWN):
        _refuse(model, kind, f"passes {name}, which qattn does not know")


def _check_around(model: PreTrainedModel, owners: _Models) -> None:
    """Refuses a model without torch's attention that hands masks of its own to one that has it:
    "eager" adds them to scores, whatever they are, and others read them as truth values."""
    inner = owners[-1]
    if not inner._supports_sdpa or _forms.get(type(inner.config)) == "eager":
        return
    for outer in owners[:-1]:
        masks = code_of(type(outer)).own_masks
        if masks and not outer._supports_sdpa:
            why = f"hands its {type(inner).__name__} masks of its own ({', '.join(sorted(masks))})"
            _refuse(model, type(outer), f"{why}, which 'eager' alone reads as numbers")


def _choose_forms(found: list[tuple[torch.nn.Module, _Models, Any]]) -> None:
    """transformers leaves a causal mask out where layers say is_causal: some never do, and some
    code expects that for torch's attention alone. And where torch's attention is not supported,
    layers may work on masks as numbers, or compute attention themselves."""
    for owner in {owners[-1] for _, owners, code in found if code.makes_masks}:
        inside = [(m, owners[-1] is owner, c) for m, owners, c in found if owner in owners]
        if not owner._supports_sdpa and any(
            code.names & _ON_NUMBERS if code.dispatches else code.computes
            for module, _, code in inside
            if not isinstance(module, PreTrainedModel)
        ):
            _forms.update((type(x), "eager") for x in _with_parts(owner.config))
            continue
        causal: dict[type, bool] = {}
        for module, is_own, code in inside:
            if is_own and code.dispatches:
                kind = type(module)
                causal[kind] = causal.get(kind, False) or bool(getattr(module, "is_causal", True))
        if any(c.makes_causal_masks for _, is_own, c in inside if is_own) and (
            not all(causal.values()) or code_of(type(owner)).asks_for_sdpa
        ):
            for x in _with_parts(owner.config):
                _forms.setdefault(type(x), "whole")


def _describe(module: torch.nn.Module, owners: _Models) -> None:
    """Leaves with a layer what its calls do not say.

    qattn_is_causal = False: transformers has no torch attention for the model, whose own reads no
    is_causal, and nothing around the layer hides the future: then it is a default without meaning.
    qattn_model: (name, does another model hand it masks?) where masks might not arrive as made.
    """
    vars(module).pop("qattn_is_causal", None)
    vars(module).pop("qattn_model", None)
    around = [code_of(type(x)) for x in (*owners, module)]
    by_torch = owners[-1]._supports_sdpa
    if not by_torch and not any(x.hides_future for x in around):
        module.qattn_is_causal = False  # type: ignore[assignment]
    if not all(x._supports_sdpa for x in owners) and _forms.get(type(owners[-1].config)) != "eager":
        module.qattn_model = (type(owners[0]).__name__, by_torch)  # type: ignore[assignment]


def _refuse(model: PreTrainedModel, kind: type, why: str) -> None:
    where = "" if kind is type(model) else f": its {kind.__name__}"
    raise Unsupported(f"attn_implementation: {type(model).__name__}{where} {why}; {_WAY_OUT}")


def _check_table(model: PreTrainedModel, kind: type, name: str) -> None:
    for table, classes in code_of(kind).tables():
        if name not in classes:
            _refuse(model, kind, f"takes attention from {table}, which has no {name!r}")


# ---- Doors ---------------------------------------------------------------------------------------


def guard() -> None:
    """Puts the checks behind every door of transformers, once."""
    if hasattr(PreTrainedModel.post_init, "qattn_guard"):
        return
    for owner, name, made in (
        (PreTrainedModel, "post_init", _post_init),
        (PreTrainedModel, "get_correct_attn_implementation", _get_correct),
        (PreTrainedModel, "set_attn_implementation", _set_implementation),
    ):
        wrapper = made(getattr(owner, name))
        wrapper.qattn_guard = True
        setattr(owner, name, wrapper)
    old = PreTrainedConfig._attn_implementation
    PreTrainedConfig._attn_implementation = property(old.fget, _set_config(old.fset), old.fdel)


def _post_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def post_init(self: PreTrainedModel) -> None:
        original(self)
        _models.add(self)
        _approve(self, is_part=_inside_another(self))

    return post_init


def _inside_another(model: PreTrainedModel) -> bool:
    """Does another model's constructor build this one?"""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            if isinstance(owner, PreTrainedModel) and owner is not model:
                return True
        frame = frame.f_back
    return False


def _approve(model: PreTrainedModel, is_part: bool = False) -> None:
    if any(_runs(m) for m in model.modules() if isinstance(m, PreTrainedModel)):
        check(model, is_part)
        _watch(model)


def _approve_around(model: PreTrainedModel, is_part: bool = False) -> None:
    """And the models that it is in."""
    _approve(model, is_part)
    for other in list(_models):
        if other is not model and any(x is model for x in other.modules()):
            _approve(other, _inside_another(other))


def _get_correct(original: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(original)
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, *args: Any, **options: Any
    ) -> str:
        if is_ours(requested_attention):
            for kind in built(type(self), PreTrainedModel):  # before a table has a KeyError
                _check_table(self, kind, str(requested_attention))
        return original(self, requested_attention, *args, **options)

    return get_correct_attn_implementation


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """All that the model and the models in it have, one time each."""
    return _with_parts(*(m.config for m in model.modules() if isinstance(m, PreTrainedModel)))


def _names(asked: Any) -> Iterator[Any]:
    if isinstance(asked, dict):
        for x in asked.values():
            yield from _names(x)
    else:
        yield asked


def _restoring(configs: list[PreTrainedConfig], change: Callable[[], None]) -> None:
    """Makes a change of implementations, or leaves all as it was."""
    before = [(c, c._attn_implementation_internal) for c in configs]
    try:
        change()
    except BaseException:
        for config, name in before:
            config._attn_implementation_internal = name
        raise


def _set_implementation(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def set_attn_implementation(
        self: PreTrainedModel, attn_implementation: Any, *args: Any, **options: Any
    ) -> None:
        def change() -> None:
            original(self, attn_implementation, *args, **options)
            if not any(is_ours(c._attn_implementation) for c in _configs(self)):
                _refuse(self, type(self), "cannot change its attention once it is built")
            _approve_around(self)

        if any(is_ours(name) for name in _names(attn_implementation)):
            _restoring(_configs(self), change)
        else:
            original(self, attn_implementation, *args, **options)

    return set_attn_implementation


def _set_config(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def setter(self: PreTrainedConfig, value: Any) -> None:
        def change() -> None:
            original(self, value)
            for model in users:
                _approve_around(model, _inside_another(model))

        users = []
        if any(is_ours(name) for name in _names(value)):
            users = [m for m in list(_models) if getattr(m, "config", None) is self]
        if users:
            _restoring([c for m in users for c in _configs(m)], change)
        else:
            original(self, value)

    return setter


# ---- The first forward ---------------------------------------------------------------------------


def _watch(model: PreTrainedModel) -> None:
    """Has the model say after its first forward if no layer came to qattn."""
    for module in model.modules():
        _unwatch(module)
    model.register_forward_pre_hook(_before)
    model.register_forward_hook(_after)


def _unwatch(module: torch.nn.Module) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if hook in (_before, _after):
                del hooks[key]


def _before(model: torch.nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        if any(_runs(m) for m in model.modules() if isinstance(m, PreTrainedModel)):
            check(model)  # also a part of a model that does not call post_init()
        _local.before = getattr(_local, "calls", 0)


def _after(model: torch.nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    _unwatch(model)
    if getattr(_local, "calls", 0) != getattr(_local, "before", -1) or not any(
        _runs(m) for m in model.modules() if isinstance(m, PreTrainedModel)
    ):
        return
    if any(getattr(m, "_compiled_call_impl", None) for m in model.modules()) or any(
        isinstance(m, torch._dynamo.OptimizedModule) for m in model.modules()
    ):
        return  # layers inside a graph do not count themselves
    warnings.warn(
        f"attn_implementation: no layer of {type(model).__name__} came to qattn in its first "
        "forward pass; its own code computed whatever attention it has",
        stacklevel=2,
    )
