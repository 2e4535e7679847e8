"""attach(): qattn in the attention layers of a model or pipeline, and a report of what it reached.

Hooks on modules keep the name of the layer that runs. Attention is caught in two places: diffusers'
dispatcher, by the registered backend, and torch.nn.functional.scaled_dot_product_attention, which
many models call themselves and torch's native backend, too. What catches it there leaves calls
outside of an attached model's forward() to torch.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from .._errors import InvalidArgument, Unsupported, shown
from .._fork import new_lock
from .._recipe import Recipe, boolean
from .attend import Runner
from .moment import Clock, given_place
from .place import OnAttention, Place, Scales
from .report import Report
from .schedule import TORCH, Schedule, as_schedule

#: a pipeline's components that are denoisers; the first one's layers have no prefix
_DENOISERS = ("transformer", "unet", "prior", "prior_prior", "decoder", "controlnet")
_COMPILED = (
    "{}: is compiled by torch.compile, whose graphs do not ask for the step; without attach() "
    "qattn.diffusion.register() and set_attention_backend('qattn') take it"
)


class _Pass:
    """A forward pass of an attached model that is under way: the modules entered, the innermost
    last, each with the number of attention calls that it made."""

    def __init__(self, denoiser: _Denoiser, moment: Place, outer: _Pass | None) -> None:
        self.denoiser = denoiser
        self.moment = moment
        self.outer = outer
        self.entered: list[list[Any]] = []

    def place(self) -> Place:
        return dataclasses.replace(self.moment, layer=self.entered[-1][0])

    def run(self, *args: Any, **kwargs: Any) -> Any:
        out = self.denoiser.attachment.runner(self.place(), *args, **kwargs)
        self.entered[-1][1] += 1
        return out

    def leave(self, name: str) -> int | None:
        """How many attention calls the module of that name made; it and what is in it are left.
        None where it was not entered, since another's hook refused to."""
        if all(row[0] != name for row in self.entered):
            return None
        calls, left = 0, None
        while left != name:
            left, own = self.entered.pop()
            calls += own
        if self.entered:
            self.entered[-1][1] += calls
        return calls


_pass: contextvars.ContextVar[_Pass | None] = contextvars.ContextVar("qattn_pass", default=None)


def pass_under_way() -> _Pass | None:
    """The forward pass of an attached model that this thread is in."""
    return _pass.get()


def attach(
    model: Any,
    schedule: Schedule | str | Recipe = "auto",
    *,
    scheduler: Any = None,
    scales: Scales | None = None,
    on_attention: OnAttention | None = None,
    strict: bool = True,
) -> Attachment:
    """Runs the attention layers of a model by a schedule, until detach() or the end of a `with`.

        with qattn.diffusion.attach(pipeline, Schedule("int8_full", Rule("bf16", last=5))) as run:
            image = pipeline(prompt).images[0]
        print(run.report())

    model: a diffusers pipeline, of which the denoisers are taken (transformer, transformer_2, unet,
    ...), or any torch.nn.Module. schedule: a Schedule, or a recipe for all calls. scheduler: where
    steps and sigmas come from; a pipeline's own by default. scales, on_attention: see
    qattn.diffusion.Scales and OnAttention.
    strict: a layer of attention that runs without an attention call that was seen raises
    Unsupported; with False report() tells.

    For inference, in eager mode. Raises InvalidArgument for a model that is attached already, a
    glob of layers that matches none; Unsupported for modules compiled by torch.compile.
    """
    return Attachment(model, as_schedule(schedule), scheduler, scales, on_attention,
                      boolean("strict", strict))  # fmt: skip


class Attachment:
    """What attach() returns: a context manager, with report(), at() and detach()."""

    def __init__(
        self,
        model: Any,
        schedule: Schedule,
        scheduler: Any,
        scales: Scales | None,
        on_attention: OnAttention | None,
        strict: bool,
    ) -> None:
        self.runner = Runner(schedule, scales, on_attention)
        self.strict = strict
        self.clock = Clock(getattr(model, "scheduler", None) if scheduler is None else scheduler)
        self._undo = contextlib.ExitStack()
        self._denoisers = [_Denoiser(self, prefix, m) for prefix, m in _denoisers_of(model)]
        for denoiser in self._denoisers:
            denoiser.check()
        schedule.check_layers([name for d in self._denoisers for name in d.kinds])
        with contextlib.ExitStack() as undo:
            undo.enter_context(_patched())
            for denoiser in self._denoisers:
                denoiser.install(undo)
            self._undo = undo.pop_all()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def detach(self) -> None:
        """Leaves the model as it was before attach(). The report stays."""
        self._undo.close()

    @contextlib.contextmanager
    def at(
        self,
        step: int | None = None,
        steps: int | None = None,
        sigma: float | None = None,
        branch: str | None = None,
    ) -> Iterator[None]:
        """Says where a loop of your own is; what is given goes before what a scheduler says.

        step: from 0, of `steps` in all. Raises InvalidArgument for a step out of range.
        """
        before, self.clock.given = self.clock.given, given_place(step, steps, sigma, branch)
        try:
            yield
        finally:
            self.clock.given = before

    def report(self) -> Report:
        """Which attention layers were reached since attach(), by what and how often."""
        counts = self.runner.counts
        layers = {name: kind for d in self._denoisers for name, kind in d.layers.items()}
        layers |= {name: d.kinds[name] for d in self._denoisers for name in d.kinds
                   if name in counts.calls}  # fmt: skip
        forwards = {k: n for d in self._denoisers for k, n in d.forwards.items()}
        missed = {k: n for d in self._denoisers for k, n in d.missed.items()}
        return Report(tuple(
            counts.of_layer(name, kind, forwards.get(name, 0), missed.get(name, 0))
            for name, kind in layers.items()
            # a layer that left its attention to a layer inside of it
            if name in counts.calls or name in missed or name not in forwards
        ))  # fmt: skip


class _Denoiser:
    """One attached model: its hooks, its attention layers, what was seen of them."""

    def __init__(self, attachment: Attachment, prefix: str, model: torch.nn.Module) -> None:
        self.attachment = attachment
        self.model = model
        self.modules: dict[str, torch.nn.Module] = {}
        self.forwards: dict[str, int] = {}
        self.missed: dict[str, int] = {}
        self._branches: Any = None  # what diffusers' pipelines say of a call
        for name, module in model.named_modules():
            full = ".".join(x for x in (prefix, name) if x)
            self.modules[full or type(model).__name__] = module
        #: classes of modules by name, and those of the layers that are known to attend
        self.kinds = {name: type(module).__name__ for name, module in self.modules.items()}
        known = _attention_classes()
        self.layers = {n: self.kinds[n] for n, m in self.modules.items() if isinstance(m, known)}

    def check(self) -> None:
        if hasattr(self.model, "_qattn_attached"):
            raise InvalidArgument(f"model: this {type(self.model).__name__} is attached already")
        self._check_compiled()

    def _check_compiled(self) -> None:
        for name, module in self.modules.items():
            if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
                raise Unsupported(_COMPILED.format(name))

    def install(self, undo: contextlib.ExitStack) -> None:
        self.model.__dict__["_qattn_attached"] = True
        undo.callback(self.model.__dict__.pop, "_qattn_attached")
        if "diffusers" in sys.modules:
            self._install_diffusers(undo)
        for name, module in self.modules.items():
            own = type(module).__module__.split(".")[0] not in ("torch", "diffusers")
            if module is self.model or name in self.layers or own or any(module.children()):
                before, after = self._hooks(name, module)
                handle = module.register_forward_pre_hook(before, with_kwargs=True)
                undo.callback(handle.remove)
                undo.callback(module.register_forward_hook(after, always_call=True).remove)

    def _install_diffusers(self, undo: contextlib.ExitStack) -> None:
        """Processors that ask the dispatcher get the backend; the branch comes by a hook."""
        from . import backend

        member = backend.member()
        for module in self.modules.values():
            processor = getattr(module, "processor", None)
            if hasattr(processor, "_attention_backend"):
                undo.callback(_restore, processor, dict(processor.__dict__))
                processor._attention_backend = member
        if hasattr(self.model, "cache_context"):
            self._branches = backend.Branches(self.model)
            undo.callback(self._branches.close)

    def _hooks(self, name: str, module: torch.nn.Module) -> tuple[Any, Any]:
        """Hooks that keep the name of a module while it runs; the model's begin and end a pass."""
        root = module is self.model

        def enter(_: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            if root:
                self._check_compiled()  # it may have been since attach()
                context = None if self._branches is None else self._branches.context
                moment = self.attachment.clock.moment(module, args, kwargs, context)
                _pass.set(_Pass(self, moment, _pass.get()))
            now = _pass.get()
            if now is not None and now.denoiser is self:
                now.entered.append([name, 0])

        def leave(_: torch.nn.Module, args: tuple, output: Any) -> None:
            now = _pass.get()
            if now is None or now.denoiser is not self:
                return
            calls = now.leave(name)
            if root:
                _pass.set(now.outer)
            # Without an output an error passes by.
            if output is not None and calls is not None and name in self.layers:
                self._ran(dataclasses.replace(now.moment, layer=name), module, calls)

        return enter, leave

    def _ran(self, place: Place, module: torch.nn.Module, calls: int) -> None:
        """Counts a forward() of an attention layer, and refuses one whose attention nobody saw."""
        name, attachment = place.layer, self.attachment
        self.forwards[name] = self.forwards.get(name, 0) + 1
        if calls:
            return
        self.missed[name] = self.missed.get(name, 0) + 1
        if not attachment.strict or attachment.runner.schedule.recipe_at(place) == TORCH:
            return
        how = type(getattr(module, "processor", module)).__name__
        if isinstance(module, torch.nn.MultiheadAttention):
            how += "; torch.backends.mha.set_fastpath_enabled(False) and need_weights=False help"
        raise Unsupported(
            f"{name}: this {type(module).__name__} ran without a call of attention that qattn sees "
            f"({how}); Rule('torch', layers={name!r}) leaves it as it is, strict=False all such"
        )


def _attention_classes() -> tuple[type, ...]:
    """Classes whose forward() is an attention."""
    found: list[type] = [torch.nn.MultiheadAttention]
    if "diffusers" in sys.modules:
        from diffusers.models.attention import AttentionModuleMixin
        from diffusers.models.attention_processor import Attention, MochiAttention

        found += [AttentionModuleMixin, Attention, MochiAttention]
    return tuple(found)


def _denoisers_of(model: Any) -> list[tuple[str, torch.nn.Module]]:
    """[(prefix of names, model)]: the model itself, or those of a pipeline."""
    if isinstance(model, torch.nn.Module):
        return [("", model)]
    parts = getattr(model, "__dict__", {}).items()
    found = [
        (name, part)
        for kind in _DENOISERS
        for name, part in parts
        if re.fullmatch(rf"{kind}(_\d+)?", name) and isinstance(part, torch.nn.Module)
    ]
    if not found:
        raise InvalidArgument(
            f"model: {shown(model)} is neither a torch.nn.Module nor a pipeline with one named "
            f"{', '.join(_DENOISERS)}"
        )
    return [("" if i == 0 else name, part) for i, (name, part) in enumerate(found)]


def _restore(thing: Any, attributes: dict[str, Any]) -> None:
    """Gives a processor the backend that it had, or none of its own."""
    if "_attention_backend" in attributes:
        thing._attention_backend = attributes["_attention_backend"]
    else:
        del thing._attention_backend


_lock = new_lock()
_patches = 0  # how many attachments want torch's function caught
_before: Any = None  # what stood in torch.nn.functional


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    """Inside, calls of torch's function in an attached model's forward() are caught."""
    global _patches, _before
    with _lock:
        if F.scaled_dot_product_attention is not _caught:
            _before = F.scaled_dot_product_attention
            F.scaled_dot_product_attention = _caught
        _patches += 1
    try:
        yield
    finally:
        with _lock:
            _patches -= 1
            # Where somebody else has put a function over ours since, it stays, and calls ours.
            if _patches == 0 and F.scaled_dot_product_attention is _caught:
                F.scaled_dot_product_attention = _before


def _caught(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention, by the schedule in an attached model."""
    now = None if torch.compiler.is_compiling() else _pass.get()
    if now is None:
        return _before(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                       enable_gqa=enable_gqa)  # fmt: skip
    rank = query.dim()
    if rank > 4 or min(rank, key.dim(), value.dim()) < 2:
        raise Unsupported(f"query: rank {rank} in an attached model; 2 to 4 are known")
    heads = [x[(None,) * (4 - x.dim())].transpose(1, 2) for x in (query, key, value)]
    if attn_mask is not None and attn_mask.dim() == 2:  # (L, S) here, never (B, S)
        attn_mask = attn_mask[None, None]
    out = now.run(*heads, attn_mask, dropout_p, is_causal, scale, enable_gqa).transpose(1, 2)
    return out[(0,) * (4 - rank)]
