"""attach() and whoever else stands between a model and torch's attention, in any order."""

import contextlib
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
from cases import nrmse
from diffusers.hooks import LayerSkipConfig, apply_layer_skip
from diffusers.hooks.smoothed_energy_guidance_utils import (
    SmoothedEnergyGuidanceConfig,
    _apply_smoothed_energy_guidance_hook,
)
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.models.cache_utils import CacheMixin
from diffusion_models import build, pixart, qwen, rand, run, wan

import qattn
import qattn.diffusion as qd
from qattn.diffusion import Rule, Schedule

SDPA = F.scaled_dot_product_attention
TIGHT = 2e-6


def state_of_torch():
    return (
        F.scaled_dot_product_attention, F.multi_head_attention_forward, CacheMixin.cache_context,
        dict(_AttentionBackendRegistry._backends), _AttentionBackendRegistry._active_backend,
        torch.overrides._len_torch_function_stack(),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_stays():
    before = state_of_torch()
    yield
    assert state_of_torch() == before


class Net(torch.nn.Module):
    """Inner: what stands around its call of attention, within its forward()."""

    def __init__(self, inner=contextlib.nullcontext):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with self.inner():
            return F.scaled_dot_product_attention(x, x, x)


def is_attention(func, how):
    """The ways to know torch's function."""
    return {
        "as it stands": func is F.scaled_dot_product_attention,
        "kept": func is SDPA,
        "by its name": getattr(func, "__name__", "") == "scaled_dot_product_attention",
        "in a table": {SDPA: True}.get(func, False),
    }[how]


def mode(how, answers=True):
    class Mode(torch.overrides.TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            if is_attention(func, how):
                Mode.seen += 1
                if answers:
                    return args[2]
            return func(*args, **(kwargs or {}))

    return Mode


WAYS = ("as it stands", "kept", "by its name", "in a table")


@pytest.mark.parametrize("where", ["inside", "around the call", "around attach", "across"])
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("recipe", ["torch", "f32", "int8_full"])
def test_modes_are_asked(recipe, how, where):
    x = rand(1, 2, 30, 32)
    plain = SDPA(x, x, x)
    for answers in (True, False):
        kind = mode(how, answers)
        net = Net(kind if where == "inside" else contextlib.nullcontext)
        with contextlib.ExitStack() as around:
            if where == "around attach":
                around.enter_context(kind())
            attached = qd.attach(net, recipe)
            if where in ("around the call", "across"):
                around.enter_context(kind())
            out = net(x)
            if where == "across":
                attached.detach()
                assert torch.equal(net(x), x if answers else plain)
        attached.detach()
        assert kind.seen == (2 if where == "across" else 1)
        if answers:
            assert torch.equal(out, x)
        else:
            assert nrmse(out, SDPA(x, x, x)) < (TIGHT if recipe != "int8_full" else 0.02)
            assert [r.calls for r in attached.report().layers] == [{recipe: 1}]


def subclass(answers):
    class Own(torch.Tensor):
        seen = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is F.scaled_dot_product_attention:
                Own.seen += 1
                if answers:
                    return args[2].as_subclass(torch.Tensor)
            return super().__torch_function__(func, types, args, kwargs or {})

    return Own


@pytest.mark.parametrize("operand", ["query", "key", "value", "attn_mask"])
@pytest.mark.parametrize("recipe", ["torch", "f32"])
def test_tensors_with_a_function_of_their_own_are_asked(recipe, operand):
    class Calls(torch.nn.Module):
        def forward(self, **operands):
            return F.scaled_dot_product_attention(
                *(operands[n] for n in ("query", "key", "value", "attn_mask"))
            )

    x = rand(1, 2, 30, 32)
    for answers in (True, False):
        kind = subclass(answers)
        operands = {"query": x, "key": x, "value": x, "attn_mask": torch.zeros(30, 30)}
        operands[operand] = operands[operand].as_subclass(kind)
        with qd.attach(Calls(), recipe) as attached, mode("kept", answers=False)():
            out = attached._denoisers[0].model(**operands)
        assert kind.seen == 1
        calls = [r.calls for r in attached.report().layers]
        if answers:
            assert torch.equal(out, x) and calls == []
        else:
            assert nrmse(out.as_subclass(torch.Tensor), SDPA(x, x, x)) < TIGHT
            assert calls == [{recipe: 1}]


def test_causal_biases_are_masks_still():
    from torch.nn.attention.bias import causal_lower_right

    class Causal(torch.nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k, causal_lower_right(20, 30))

    q, k = rand(1, 2, 20, 32), rand(1, 2, 30, 32, seed=2)
    want = Causal()(q, k)
    with qd.attach(Causal(), "f32") as attached:
        assert nrmse(attached._denoisers[0].model(q, k), want) < TIGHT
    assert attached.report().layers[0].calls == {"f32": 1}


@pytest.mark.parametrize("order", ["before", "after", "after and gone", "before and gone"])
@pytest.mark.parametrize("calls_on", [True, False])
def test_patches_of_torchs_function_stay(order, calls_on, monkeypatch):
    """As SageAttention is put in; what stands in torch is never changed by attach() or detach()."""
    x, seen = rand(1, 2, 30, 32), []

    def patch(q, k, v, *args, **kwargs):
        seen.append(1)
        return SDPA(q, k, v, *args, **kwargs) if calls_on else v

    net = Net()
    with monkeypatch.context() as patches:
        if order.startswith("before"):
            patches.setattr(F, "scaled_dot_product_attention", patch)
        attached = qd.attach(net, "f32")
        if order.startswith("after"):
            patches.setattr(F, "scaled_dot_product_attention", patch)
        if order.endswith("gone"):
            patches.undo()
        out = net(x)
        stands = F.scaled_dot_product_attention
        attached.detach()
        assert F.scaled_dot_product_attention is stands
    gone = order.endswith("gone")
    assert len(seen) == (not gone)
    if gone or calls_on:
        assert nrmse(out, SDPA(x, x, x)) < TIGHT
        assert attached.report().layers[0].calls == {"f32": 1}
    else:
        assert torch.equal(out, x) and attached.report().layers == ()


@pytest.mark.parametrize("recipe", ["torch", "f32"])
def test_dispatch_modes_see_torchs_operators_or_are_named(recipe):
    class Mode(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Mode.seen += "attention" in str(func) or "softmax" in str(func)
            return func(*args, **(kwargs or {}))

    net, x = Net(), rand(1, 2, 30, 32)
    with qd.attach(net, recipe), Mode():
        if recipe == "torch":
            assert torch.equal(net(x), SDPA(x, x, x)) and Mode.seen
        else:
            with pytest.raises(qattn.Unsupported, match="Net: a TorchDispatchMode .Mode. stands"):
                net(x)


SCORES = {"skip_attention": False, "skip_attention_scores": True, "skip_ff": False}


@pytest.mark.parametrize("make, skips", [
    (qwen, SCORES), (pixart, SCORES), (pixart, {"skip_ff": False}), (pixart, {}), (wan, {}),
    (pixart, {"skip_attention": False}), (qwen, {"skip_attention": False}),
], ids=["qwen scores", "scores", "attention", "blocks", "wan blocks", "feed-forward",
        "qwen feed-forward"])  # fmt: skip
@pytest.mark.parametrize("late", [False, True], ids=["before attach", "after"])
def test_skipped_layers_of_diffusers_are_skipped(make, skips, late):
    model, inputs = build(make)
    whole = run(model, inputs)
    blocks = "blocks" if make is wan else "transformer_blocks"
    config = LayerSkipConfig(indices=[0], fqn=blocks, **skips)
    with contextlib.ExitStack() as stack:
        if late:
            stack.enter_context(attached := qd.attach(model, "f32"))
        apply_layer_skip(model, config)
        if not late:
            want = run(model, inputs)
            stack.enter_context(attached := qd.attach(model, "f32"))
        got = run(model, inputs)
    want = run(model, inputs)
    assert nrmse(got, want) < TIGHT and nrmse(whole, want) > 1e-4
    report = attached.report()
    assert not report.unreached
    answered = {x.layer for x in report.layers if x.answered}
    if skips == {}:
        assert not answered and len(report.idle) == 2
    elif skips is SCORES or skips.get("skip_attention", True):
        assert answered == {f"{blocks}.0.attn" + ("" if make is qwen else "1")}
        assert "another's answer" in str(report)
    else:
        assert not answered and len(report.reached) == len(report.layers)


def test_smoothed_energy_guidance_is_kept():
    model, inputs = build(wan)
    config = SmoothedEnergyGuidanceConfig(indices=[0], fqn="blocks")
    _apply_smoothed_energy_guidance_hook(model, config, blur_sigma=1.0)
    want = run(model, inputs)
    with qd.attach(model, "f32") as attached:
        assert nrmse(run(model, inputs), want) < TIGHT
    assert len(attached.report().reached) == 4


@pytest.mark.parametrize("when", ["before attach", "after", "after, and gone"])
def test_backends_that_others_have_put_in_run(when, monkeypatch):
    """Wrappers in diffusers' registry are asked as outside of attach()."""
    model, inputs = build(wan)
    backends, native = _AttentionBackendRegistry._backends, AttentionBackendName.NATIVE
    own, seen = backends[native], []

    def wrapped(under):
        def backend(*args, **kwargs):
            seen.append(1)
            return 2 * under(*args, **kwargs)

        return backend

    want = run(model, inputs)
    with monkeypatch.context() as patches:
        patches.setitem(backends, native, wrapped(own))
        doubled = run(model, inputs)
        seen.clear()
        if when != "before attach":
            patches.undo()
        attached = qd.attach(model, "f32")
        if when != "before attach":
            patches.setitem(backends, native, wrapped(backends[native]))
        if when == "after, and gone":
            patches.undo()
        got = run(model, inputs)
        gone = when == "after, and gone"
        assert nrmse(got, want if gone else doubled) < TIGHT and len(seen) == (0 if gone else 4)
        attached.detach()
        assert nrmse(run(model, inputs), want if gone else doubled) == 0
    # Where theirs stood over ours at detach(), ours stays in it and passes calls on.
    assert torch.equal(run(model, inputs), want)
    backends[native] = own


def test_other_backends_of_diffusers_are_replaced():
    """A backend whose kernels are its own is what attach() is in the place of."""
    model, inputs = build(wan)
    want = run(model, inputs)
    model.set_attention_backend("flex")
    try:
        with qd.attach(model, Schedule("f32", Rule("torch", layers="*.attn2"))) as attached:
            assert nrmse(run(model, inputs), want) < TIGHT
    finally:  # diffusers sets it for all models
        _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)
    assert {tuple(x.calls.items()) for x in attached.report().layers} == {
        (("f32", 1),), (("torch", 1),),
    }  # fmt: skip


@pytest.mark.parametrize("fast", [True, False])
def test_torchs_own_layers(fast):
    """MultiheadAttention is written in Python: a mode sees it whole, and what it calls must still
    be caught."""
    model = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2
    ).eval()
    x, padding = rand(2, 9, 16), torch.arange(9) >= torch.tensor([[9], [5]])
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        with torch.no_grad():
            want = model(x, src_key_padding_mask=padding)
            kind = mode("by its name", answers=False)
            for around in (contextlib.nullcontext(), kind()):
                with qd.attach(model, "f32") as attached, around:
                    got = model(x, src_key_padding_mask=padding)
                assert nrmse(got[~padding], want[~padding]) < TIGHT
                assert [x.calls for x in attached.report().layers] == [{"f32": 1}] * 2
            attention = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
            with qd.attach(attention, "f32"), pytest.raises(
                qattn.Unsupported, match="need_weights=False helps"
            ):
                attention(x, x, x)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_devices_as_modes():
    """torch keeps its device at the foot of the stack of modes and insists on it."""

    class Makes(Net):
        def forward(self, x):
            with torch.device("cpu"):
                y = super().forward(x)
            return y + torch.zeros(1)

    net, x = Makes(), rand(1, 2, 30, 32)
    with qd.attach(net, "f32") as attached:
        for _ in range(2):
            with torch.device("cpu"), torch.device("meta"), torch.device("cpu"):
                assert nrmse(net(x), SDPA(x, x, x)) < TIGHT
            torch.set_default_device("cpu")
            try:
                net(x)
            finally:
                torch.set_default_device(None)
    assert attached.report().layers[0].calls == {"f32": 4}


def test_observers_may_call_attention():
    net, x, errors = Net(), rand(1, 2, 30, 32), []

    def observe(place, q, k, v):
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        errors.append(nrmse(F.scaled_dot_product_attention(q, k, v), SDPA(x, x, x)))

    with qd.attach(net, "int8_full", on_attention=observe) as attached:
        net(x)
    assert errors == [0.0] and attached.report().layers[0].calls == {"int8_full": 1}


def test_what_is_compiled_in_a_model_is_refused():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend="eager")

    class Compiled(torch.nn.Module):
        def forward(self, x):
            return compiled(x)

    model, x = Compiled(), rand(1, 2, 30, 32)
    want = model(x)
    with qd.attach(model, "int8_full") as attached:
        try:
            got = model(x)
        except (qattn.Unsupported, torch._dynamo.exc.TorchDynamoException) as error:
            assert "compile" in str(error)
        else:  # as a call that torch.compile left out
            assert attached.report().layers[0].calls == {"int8_full": 1}
            assert nrmse(got, want) < 0.02
    torch._dynamo.reset()
    assert torch.equal(model(x), want)


def test_threads_have_modes_of_their_own():
    """A pass in one thread catches nothing in another, and two passes at once are two."""
    x = rand(1, 2, 64, 32)
    want = SDPA(x, x, x)
    inside, done = threading.Event(), threading.Event()

    class Waits(Net):
        def forward(self, x):
            inside.set()
            assert done.wait(20)
            return super().forward(x)

    waits, other, results = Waits(), Net(), {}
    with qd.attach(waits, "nvfp4") as one, qd.attach(other, "f32") as two:
        thread = threading.Thread(target=lambda: results.update(waits=waits(x)))
        thread.start()
        assert inside.wait(20)
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), want)
        assert nrmse(other(x), want) < TIGHT
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), want)
        done.set()
        thread.join()
    assert nrmse(results["waits"], want) > 0.01
    assert [r.report().layers[0].calls for r in (one, two)] == [{"nvfp4": 1}, {"f32": 1}]
