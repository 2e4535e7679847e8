"""The attention backend "qattn" of diffusers, and diffusers' word on the branch of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from diffusers.hooks.hooks import CacheContext
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from .._errors import InvalidArgument, Unsupported, shown
from .._recipe import Recipe
from .attachment import pass_under_way
from .attend import Runner, attend
from .place import Place
from .schedule import Schedule, as_schedule

NAME = "qattn"
_registered: dict[str, Any] = {}  # our names: members of diffusers' enumeration


class _Everything(frozenset):
    """The names of arguments that a backend takes. diffusers drops others before the call without
    a word; here they arrive, and are refused."""

    def __contains__(self, name: object) -> bool:
        return True


def register(name: str = NAME, schedule: Schedule | str | Recipe = "auto") -> None:
    """Makes `name` an attention backend of diffusers: model.set_attention_backend(name).

    schedule: a recipe, or a Schedule. Steps, sigmas and names of layers are known only inside of
    qattn.diffusion.attach(), which has a schedule of its own; here rules that ask for them refuse
    the call. Models that do not use diffusers' dispatcher (SD3, PixArt, DiT, UNets) are not reached
    by set_attention_backend(), which says nothing; attach() reaches them.
    torch.compile(fullgraph=True) takes the backend where the schedule has no rules.
    The same name again replaces its schedule. Raises InvalidArgument for recipes that there are
    not, and for names of diffusers' own.
    """
    runner = Runner(as_schedule(schedule))
    if not isinstance(name, str) or not name or name != name.lower():
        raise InvalidArgument(f"name: {shown(name)} is not a name in lower case")
    if name in AttentionBackendName._value2member_map_ and name not in _registered:
        raise InvalidArgument(f"name: {name!r} is a backend of diffusers or another's")
    member = _registered.get(name) or _new_member(name)
    _registered[name] = member
    _AttentionBackendRegistry.register(member)(_backend(runner))
    _AttentionBackendRegistry._supported_arg_names[member] = _Everything(
        _AttentionBackendRegistry._supported_arg_names[member]
    )


def member() -> Any:
    """The member of diffusers' enumeration that attach() gives to processors."""
    if NAME not in _registered:
        register()
    return _registered[NAME]


def _new_member(name: str) -> Any:
    """Enumerations are closed; this is what other backends do to join."""
    kind = AttentionBackendName
    made = str.__new__(kind, name)
    made._name_, made._value_ = name.upper(), name
    made._sort_order_ = len(kind._member_names_)
    made.__objclass__ = kind
    kind._member_names_.append(made._name_)
    kind._member_map_[made._name_] = made
    kind._value2member_map_[name] = made
    type.__setattr__(kind, made._name_, made)
    return made


def _backend(runner: Runner) -> Any:
    def qattn_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
        **others: Any,
    ) -> Any:
        """(B, S, H, D) in and out, as diffusers' dispatcher calls its backends."""
        if _parallel_config is not None:
            raise Unsupported(
                "_parallel_config: the backend 'qattn' takes no context parallelism; call "
                "disable_parallelism() or choose another backend"
            )
        for name, given in others.items():
            if given is not None:
                raise Unsupported(f"{name}: qattn does not know this argument of an attention")
        options = attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse
        if torch.compiler.is_compiling():
            if runner.schedule.rules:
                raise Unsupported(
                    "torch.compile: a graph does not know step and layer, which the rules of the "
                    "schedule may ask for; register one recipe"
                )
            return attend(runner.schedule.default, None, query, key, value, *options)
        now = pass_under_way()
        if now is not None:
            return now.run(query, key, value, *options)
        return runner(Place(), query, key, value, *options)

    return qattn_attention


class Branches:
    """What a pipeline says of the call under way by the model's cache_context(), to cache hooks."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.context: CacheContext | None = None
        self._model = model
        self._method = model.cache_context
        model.__dict__["cache_context"] = self._listening

    @contextlib.contextmanager
    def _listening(self, name: str, **said: Any) -> Iterator[Any]:
        before, self.context = self.context, CacheContext(name, **said)
        try:
            with self._method(name, **said) as given:
                yield given
        finally:
            self.context = before

    def close(self) -> None:
        """Leaves the model's method as it was."""
        self._model.__dict__.pop("cache_context", None)
