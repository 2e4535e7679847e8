"""The attention backend "qattn" of diffusers; attach() in diffusers' dispatcher and hooks.

While a model is attached, every backend in diffusers' registry is one that asks whether a pass is
under way in its thread; outside of passes it is what it was. Models and processors stay untouched.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.hooks.hooks import CacheContext
from diffusers.hooks.layer_skip import AttentionProcessorSkipHook
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.models.cache_utils import CacheMixin

from .._errors import InvalidArgument, Unsupported, shown
from .._fork import new_lock
from .._recipe import Recipe
from .attend import Runner, _key_padding, attend
from .passes import pass_under_way
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
        _refuse_unknown(_parallel_config, others)
        options = attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse
        if torch.compiler.is_compiling():
            if runner.schedule.rules:
                raise Unsupported(
                    "torch.compile: a graph does not know step and layer, which the rules of the "
                    "schedule may ask for; register one recipe"
                )
            return attend(runner.schedule.default, None, query, key, value, *options)
        return runner(Place(), query, key, value, *options)

    return qattn_attention


def _refuse_unknown(parallel_config: Any, others: dict[str, Any]) -> None:
    if parallel_config is not None:
        raise Unsupported(
            "_parallel_config: the backend 'qattn' takes no context parallelism; call "
            "disable_parallelism() or choose another backend"
        )
    for name, given in others.items():
        if given is not None:
            raise Unsupported(f"{name}: qattn does not know this argument of an attention")


def _in_pass(
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
    """What any backend does in a pass of an attached model: it calls torch's function, where modes
    of torch are asked and the pass has the last word."""
    _refuse_unknown(_parallel_config, others)
    if attn_mask is not None and not isinstance(attn_mask, torch.Tensor):
        raise Unsupported(f"attn_mask: is a {type(attn_mask).__name__}, not a torch tensor")
    if return_lse:  # of which torch's function has none
        now = pass_under_way()
        assert now is not None
        options = attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse
        return now.run(query, key, value, *options)
    mask = _key_padding(attn_mask, query.shape[0], key.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
        enable_gqa=enable_gqa,
    )  # fmt: skip
    return out.transpose(1, 2)


def _asking(own: Any) -> Any:
    """A backend of diffusers' or ours that leaves calls in a pass to it."""

    @functools.wraps(own)
    def asked(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or pass_under_way() is None:
            return own(*args, **kwargs)
        return _in_pass(*args, **kwargs)

    asked._qattn_asks = asked, own  # type: ignore[attr-defined]
    return asked


def _own_of(function: Any) -> Any:
    """What stood in the registry before _asking(), or None. Wrappers of others may have copied our
    attribute."""
    asked, own = getattr(function, "_qattn_asks", (None, None))
    return own if asked is function else None


def _is_plain(function: Any) -> bool:
    """Is it a backend as diffusers or register() made it? Another's function is left to run: where
    it calls torch's attention it is heard, else its layers are refused as not reached."""
    names = getattr(function, "__globals__", None)
    return names is vars(attention_dispatch) or names is globals()


_lock = new_lock()
_watchers = 0  # how many attached models want it
_method: Any = None  # diffusers' own CacheMixin.cache_context
#: what pipelines say of the calls under way in this thread by cache_context(), by the model's id
_said: contextvars.ContextVar[dict[int, CacheContext]] = contextvars.ContextVar(
    "qattn_said", default={}
)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Inside, calls of diffusers' dispatcher in a pass go to it, and cache_context() is heard."""
    global _watchers, _method
    with _lock:
        _watchers += 1
        if _watchers == 1:
            _method = CacheMixin.cache_context
            CacheMixin.cache_context = _listening
        watch_new()
    try:
        yield
    finally:
        with _lock:
            _watchers -= 1
            if _watchers == 0:
                # Where somebody else has put something over ours since, it stays, and calls ours.
                if CacheMixin.cache_context is _listening:
                    CacheMixin.cache_context = _method
                backends = _AttentionBackendRegistry._backends
                for name, function in backends.items():
                    backends[name] = _own_of(function) or function


def watch_new() -> None:
    """Takes in backends that were registered since, or put back."""
    with _lock:
        backends = _AttentionBackendRegistry._backends
        for name, function in backends.items() if _watchers else ():
            if _own_of(function) is None and _is_plain(function):
                backends[name] = _asking(function)


@contextlib.contextmanager
def _listening(model: Any, name: str, **said: Any) -> Iterator[Any]:
    """diffusers' cache_context(), whose words are kept for the clock."""
    token = _said.set({**_said.get(), id(model): CacheContext(name, **said)})
    try:
        with _method(model, name, **said) as given:
            yield given
    finally:
        _said.reset(token)


def context_of(model: torch.nn.Module) -> CacheContext | None:
    """What a pipeline says of the call under way of that model, in this thread."""
    return _said.get().get(id(model))


def skips_scores(module: torch.nn.Module) -> bool:
    """Does a hook of diffusers give V back in place of the layer's attention?"""
    hooks = getattr(getattr(module, "_diffusers_hook", None), "hooks", {})
    return any(
        isinstance(x, AttentionProcessorSkipHook) and x.skip_attention_scores
        for x in hooks.values()
    )
