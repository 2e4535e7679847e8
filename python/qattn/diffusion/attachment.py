"""attach(): qattn in the attention layers of a model or pipeline, and a report of what it reached.

Hooks on modules keep the name of the layer that runs; `passes` catches the attention that it calls.
Calls outside of an attached model's own forward pass (model.forward(), single blocks, copies, other
models) stay what they were without attach().
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import re
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from .._errors import InvalidArgument, Unsupported, shown
from .._fork import new_lock
from .._recipe import Recipe, boolean
from . import passes
from .attend import Runner
from .moment import Clock, given_place
from .place import OnAttention, Place, Scales
from .report import Report
from .schedule import TORCH, Schedule, as_schedule
from .steps import Run

#: a pipeline's components that are denoisers; the first one's layers have no prefix
_DENOISERS = ("transformer", "unet", "prior", "prior_prior", "decoder", "controlnet")
_COMPILED = (
    "{}: is compiled by torch.compile, whose graphs do not ask for the step; without attach() "
    "qattn.diffusion.register() and set_attention_backend('qattn') take it"
)
#: models that are attached; copies of them are not
_attached: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
#: what Attachment.at() says in this thread, by the attachment's id
_given: contextvars.ContextVar[dict[int, Place]] = contextvars.ContextVar(
    "qattn_given", default={}
)


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
    steps and sigmas come from, for every denoiser; by default a pipeline's own, by the denoiser's
    name: prior_prior has prior_scheduler, where there is one, others have scheduler. scales,
    on_attention: see qattn.diffusion.Scales and OnAttention.
    strict: a layer of attention that runs without an attention call that was seen raises
    Unsupported; with False report() tells.

    For inference, in eager mode. The schedule is for calls of the model itself, as model(...): what
    model.forward(), single blocks and copies of the model compute is left as it was. Whoever stands
    between the model and torch's attention (a TorchFunctionMode, a tensor's __torch_function__, a
    patch of torch's function) is asked first, and what it answers is not counted.
    Raises InvalidArgument for a model that is attached already, a glob of layers that matches none;
    Unsupported for modules compiled by torch.compile.
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
        self.open = True
        self._undo = contextlib.ExitStack()
        runs: dict[int, Run] = {}
        self._denoisers = [
            _Denoiser(self, prefix, part, Clock.of(model, name, scheduler, runs))
            for name, prefix, part in _denoisers_of(model)
        ]
        for denoiser in self._denoisers:
            denoiser.check()
        schedule.check_layers([name for d in self._denoisers for name in d.kinds])
        with contextlib.ExitStack() as undo:
            undo.callback(self._close)
            for denoiser in self._denoisers:
                denoiser.install(undo)
            self._undo = undo.pop_all()

    @property
    def clock(self) -> Clock:
        """The clock of the first denoiser."""
        return self._denoisers[0].clock

    def _close(self) -> None:
        self.open = False
        passes.tidy()

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

        It is for this thread alone. step: from 0, of `steps` in all. Raises InvalidArgument for a
        step out of range.
        """
        given = given_place(step, steps, sigma, branch)
        token = _given.set({**_given.get(), id(self): given})
        try:
            yield
        finally:
            _given.reset(token)

    def given(self) -> Place | None:
        """What at() says in this thread."""
        return _given.get().get(id(self))

    def report(self) -> Report:
        """Which attention layers were reached since attach(), by what and how often."""
        counts = self.runner.counts
        layers = {name: kind for d in self._denoisers for name, kind in d.layers.items()}
        layers |= {name: d.kinds[name] for d in self._denoisers for name in d.kinds
                   if name in counts.calls}  # fmt: skip
        forwards = {k: n for d in self._denoisers for k, n in d.forwards.items()}
        missed = {k: n for d in self._denoisers for k, n in d.missed.items()}
        answered = {k: n for d in self._denoisers for k, n in d.answered.items()}
        return Report(tuple(
            counts.of_layer(name, kind, forwards.get(name, 0), missed.get(name, 0),
                            answered.get(name, 0))
            for name, kind in layers.items()
            # a layer that left its attention to a layer inside of it
            if name in counts.calls or name in missed or name in answered or name not in forwards
        ))  # fmt: skip


class _Denoiser:
    """One attached model: its hooks, its attention layers, what was seen of them."""

    def __init__(
        self, attachment: Attachment, prefix: str, model: torch.nn.Module, clock: Clock
    ) -> None:
        self.attachment = attachment
        self.model = model
        self.clock = clock
        self.modules: dict[str, torch.nn.Module] = {}
        self.forwards: dict[str, int] = {}
        self.missed: dict[str, int] = {}
        self.answered: dict[str, int] = {}
        self._lock = new_lock()
        for name, module in model.named_modules():
            full = ".".join(x for x in (prefix, name) if x)
            self.modules[full or type(model).__name__] = module
        #: classes of modules by name, and those of the layers that are known to attend
        self.kinds = {name: type(module).__name__ for name, module in self.modules.items()}
        known = _attention_classes()
        self.layers = {n: self.kinds[n] for n, m in self.modules.items() if isinstance(m, known)}

    def check(self) -> None:
        if self.model in _attached:
            raise InvalidArgument(f"model: this {type(self.model).__name__} is attached already")
        self._check_compiled()

    def _check_compiled(self) -> None:
        for name, module in self.modules.items():
            if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
                raise Unsupported(_COMPILED.format(name))

    def install(self, undo: contextlib.ExitStack) -> None:
        _attached.add(self.model)
        undo.callback(_attached.discard, self.model)
        if "diffusers" in sys.modules:
            from . import backend

            undo.enter_context(backend.watched())
        for name, module in self.modules.items():
            own = type(module).__module__.split(".")[0] not in ("torch", "diffusers")
            if module is self.model or name in self.layers or own or any(module.children()):
                before, after = _Enter(self, name, module), _Leave(self, name, module)
                handle = module.register_forward_pre_hook(before, with_kwargs=True)
                undo.callback(handle.remove)
                undo.callback(module.register_forward_hook(after, always_call=True).remove)

    def begin(self, name: str, args: tuple, kwargs: dict, frame: Any) -> None:
        """Its forward() begins, run by that frame."""
        self._check_compiled()  # it may have been since attach()
        context = None
        if "diffusers" in sys.modules:
            from . import backend

            backend.watch_new()
            context = backend.context_of(self.model)
        given = self.attachment.given()
        moment = self.clock.moment(self.model, args, kwargs, context, given)
        passes.begin(self, moment, name, frame)

    def ran(self, now: passes.Pass, module: torch.nn.Module, done: passes.Entered) -> None:
        """Counts a forward() of an attention layer, and refuses one whose attention nobody saw."""
        name, attachment = done.layer, self.attachment
        place = dataclasses.replace(now.moment, layer=name)
        answered = not done.calls and _answered(module, done)
        with self._lock:
            for counts, counted in (
                (self.forwards, True),
                (self.answered, answered),
                (self.missed, not done.calls and not answered),
            ):
                if counted:
                    counts[name] = counts.get(name, 0) + 1
        if done.calls or answered:
            return
        if not attachment.strict or attachment.runner.schedule.recipe_at(place) == TORCH:
            return
        how = type(getattr(module, "processor", module)).__name__
        if isinstance(module, torch.nn.MultiheadAttention):
            how += "; need_weights=False helps"
        raise Unsupported(
            f"{name}: this {type(module).__name__} ran without a call of attention that qattn sees "
            f"({how}); Rule('torch', layers={name!r}) leaves it as it is, strict=False all such"
        )


class _Hook:
    """A hook on a module of an attached model. A copy of it, with a copy of the model, is idle."""

    def __init__(self, denoiser: _Denoiser, name: str, module: torch.nn.Module) -> None:
        self.denoiser, self.name, self.module = denoiser, name, module

    def __deepcopy__(self, memo: object) -> Any:
        return _idle

    def __reduce__(self) -> Any:
        return _make_idle, ()


class _Enter(_Hook):
    """Notes that a module runs; the model's own begins a pass."""

    def __call__(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        if module is not self.module:  # a shallow copy of the model has its hooks, too
            return
        if module is self.denoiser.model:
            self.denoiser.begin(self.name, args, kwargs, sys._getframe(1))
            return
        now = passes.pass_under_way()
        if now is not None and now.denoiser is self.denoiser:
            now.enter(self.name)


class _Leave(_Hook):
    """Notes that a module is left; the model's own ends the pass."""

    def __call__(self, module: torch.nn.Module, args: tuple, output: Any) -> None:
        now = passes.innermost_of(self.denoiser) if module is self.module else None
        if now is None:
            return
        done = now.leave(self.name)
        if module is self.denoiser.model:
            now.end()
        # Without an output an error passes by.
        if output is not None and done is not None and self.name in self.denoiser.layers:
            self.denoiser.ran(now, module, done)


def _idle(*_: Any) -> None:
    """What copies of an attached model have as hooks."""


def _make_idle() -> Any:
    return _idle


def _answered(module: torch.nn.Module, done: passes.Entered) -> bool:
    """Did another answer for a layer that made no attention call? A cache gives back what the layer
    computed at an earlier step: its forward() was replaced, and no product was computed."""
    if "forward" not in module.__dict__:
        return False
    if not done.worked:
        return True
    if "diffusers" not in sys.modules:
        return False
    from . import backend

    return backend.skips_scores(module)


def _attention_classes() -> tuple[type, ...]:
    """Classes whose forward() is an attention."""
    found: list[type] = [torch.nn.MultiheadAttention]
    if "diffusers" in sys.modules:
        from diffusers.models.attention import AttentionModuleMixin
        from diffusers.models.attention_processor import Attention, MochiAttention

        found += [AttentionModuleMixin, Attention, MochiAttention]
    return tuple(found)


def _denoisers_of(model: Any) -> list[tuple[str, str, torch.nn.Module]]:
    """[(attribute of the pipeline, prefix of names, model)]: the model itself, or a pipeline's.
    A model of two names has the first."""
    if isinstance(model, torch.nn.Module):
        return [("", "", model)]
    parts = getattr(model, "__dict__", {}).items()
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    for kind in _DENOISERS:
        for name, part in parts:
            if re.fullmatch(rf"{kind}(_\d+)?", name) and isinstance(part, torch.nn.Module):
                found.setdefault(id(part), (name, part))
    if not found:
        raise InvalidArgument(
            f"model: {shown(model)} is neither a torch.nn.Module nor a pipeline with one named "
            f"{', '.join(_DENOISERS)}"
        )
    return [(name, name if i else "", part) for i, (name, part) in enumerate(found.values())]
