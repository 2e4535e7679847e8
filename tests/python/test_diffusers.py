"""qattn.diffusion in tiny random models of diffusers, on the CPU."""

import contextlib
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from cases import nrmse

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    dispatch_attention_fn,
)
from diffusion_models import (
    build, dit, flux, operands, pixart, qwen, rand, run, sana, sd3, sd3_pipeline, unet, wan,
    wan_pipeline,
)  # fmt: skip

import qattn
import qattn.diffusion as qd
from qattn.diffusion import Place, Rule, Schedule, attend
from qattn.diffusion.passes import pass_under_way

TIGHT = 2e-6
#: of one call of int8_full; docs/tables/recipe-errors.md has 1.5 % on random inputs
CALL = 0.02
#: (model, does it ask diffusers' dispatcher, layers, bound of int8_full in the model's output, four
#: times what was measured: the residual stream outweighs the attention)
FAMILIES = [
    (flux, True, 2, 4e-4), (wan, True, 4, 2e-3), (qwen, True, 2, 6e-4), (sd3, False, 2, 4e-4),
    (pixart, False, 4, 1e-3), (dit, False, 2, 1e-3), (unet, False, 8, 1e-3),
]  # fmt: skip
IDS = [row[0].__name__ for row in FAMILIES]


@pytest.fixture(autouse=True)
def nothing_stays():
    """What a test attaches and registers is gone after it."""
    function = F.scaled_dot_product_attention
    yield
    assert F.scaled_dot_product_attention is function
    _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)


@pytest.mark.parametrize("make, dispatched, layers, bound", FAMILIES, ids=IDS)
def test_families_are_reached(make, dispatched, layers, bound, monkeypatch):
    """Every attention layer runs qattn, within its recipe's error, and detach() undoes it all."""
    model, inputs = build(make)
    own, worst = attend.attend, {"f32": 0.0, "int8_full": 0.0}

    def beside_torch(recipe, scales, *args):
        out = own(recipe, scales, *args)
        worst[recipe] = max(worst[recipe], nrmse(out, own("torch", None, *args)))
        return out

    monkeypatch.setattr(attend, "attend", beside_torch)
    state = [(dict(m.__dict__), dict(vars(m).get("processor", m).__dict__))
             for m in model.modules()]  # fmt: skip
    native = run(model, inputs)
    errors = []
    for recipe in ("f32", "int8_full"):
        with qd.attach(model, recipe) as attached:
            errors.append(nrmse(run(model, inputs), native))
        report = attached.report()
        assert len(report.reached) == len(report.layers) == layers and not report.unreached
        assert all(x.calls == {recipe: 1} and x.forwards == 1 for x in report.layers)
        assert torch.equal(run(model, inputs), native)
    assert errors[0] < TIGHT < errors[1] < bound
    assert worst["f32"] < TIGHT and 1e-3 < worst["int8_full"] < CALL
    assert [(m.__dict__.keys(), vars(m).get("processor", m).__dict__.keys())
            for m in model.modules()] == [(a.keys(), b.keys()) for a, b in state]  # fmt: skip
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("make, dispatched, layers, bound", FAMILIES, ids=IDS)
def test_set_attention_backend(make, dispatched, layers, bound):
    """The registered backend reaches the dispatcher's models alone; that is why attach() is."""
    qd.register(schedule="int8_full")
    model, inputs = build(make)
    native = run(model, inputs)
    model.set_attention_backend("qattn")
    out = run(model, inputs)
    if dispatched:
        assert TIGHT < nrmse(out, native) < bound
    else:
        assert torch.equal(out, native)


@pytest.mark.parametrize("make, text, mask", [
    (qwen, "encoder_hidden_states", "encoder_hidden_states_mask"),
    (pixart, "encoder_hidden_states", "encoder_attention_mask"),
], ids=["qwen", "pixart"])  # fmt: skip
def test_masks_are_honoured(make, text, mask):
    """Tokens that a mask hides may hold anything, and without the mask they would show."""
    model, inputs = build(make)
    hidden = inputs[mask] == 0
    assert hidden.any()
    other = {**inputs, text: torch.where(hidden[..., None], 10.0, inputs[text])}
    open_ = {**inputs, mask: torch.ones_like(inputs[mask])}
    with qd.attach(model, "int8_full"):
        out, moved, dropped = (run(model, x) for x in (inputs, other, open_))
    native = run(model, inputs)
    assert torch.equal(moved, out)
    assert 10 * nrmse(out, native) < nrmse(dropped, native)


def dispatch(q, k, v, backend="qattn", **options):
    return dispatch_attention_fn(q, k, v, backend=backend, **options)


@pytest.mark.parametrize("kind", ["B Sk", "B 1 1 Sk", "added B Sk", "added", "whole", "rank 3"])
def test_forms_of_masks(kind):
    qd.register(schedule="f32")
    q, k, v = operands()
    seen = torch.arange(12) < torch.tensor([[12], [7]])
    mask = {
        "B Sk": seen,
        "B 1 1 Sk": seen[:, None, None],
        "added B Sk": torch.where(seen, 0.0, -torch.inf),
        "added": rand(2, 4, 10, 12),
        "whole": rand(2, 1, 10, 12) > 0,
        "rank 3": rand(4, 10, 12),
    }[kind]
    out, native = (dispatch(q, k, v, x, attn_mask=mask) for x in ("qattn", "native"))
    torch.testing.assert_close(out, native)
    assert nrmse(dispatch(q, k, v), native) > 0.05


def test_square_masks_of_torch_are_no_padding():
    """(L, S) where L is the batch, too: torch's function means queries and keys by it."""

    class Model(torch.nn.Module):
        def forward(self, q, mask):
            return F.scaled_dot_product_attention(q, q, q, mask)

    q, mask = rand(3, 2, 3, 16), torch.ones(3, 3, dtype=torch.bool).tril()
    with qd.attach(Model(), "f32") as attached:
        torch.testing.assert_close(
            attached._denoisers[0].model(q, mask), F.scaled_dot_product_attention(q, q, q, mask)
        )
    assert [x.layer for x in attached.report().reached] == ["Model"]


def test_no_argument_is_ignored():
    qd.register(schedule="f32")
    q, k, v = operands()
    for options in ({"scale": 0.7}, {"is_causal": True}):
        out, native = (dispatch(q, k, v, x, **options) for x in ("qattn", "native"))
        torch.testing.assert_close(out, native)
        assert nrmse(dispatch(q, k, v), native) > 0.01
    q, k, v = operands(kv_heads=2)
    out, native = (dispatch(q, k, v, x, enable_gqa=True) for x in ("qattn", "native"))
    torch.testing.assert_close(out, native)
    out, lse = dispatch(q, k, v, enable_gqa=True, attention_kwargs={"return_lse": True})
    torch.testing.assert_close(out, native)
    scores = torch.einsum("bshd,bthd->bhst", q, k.repeat_interleave(2, 2)) / 4
    torch.testing.assert_close(lse, scores.logsumexp(-1).transpose(1, 2))


@pytest.mark.parametrize("options, kind, words", [
    ({"dropout_p": 0.1}, qattn.Unsupported, "dropout_p"),
    ({"parallel_config": object()}, qattn.Unsupported, "_parallel_config"),
    ({"attention_kwargs": {"window_size": (3, 3)}}, qattn.Unsupported, "window_size"),
    ({"is_causal": True, "attn_mask": torch.ones(10, 12).bool()}, qattn.InvalidArgument,
     "attn_mask"),
    ({"attn_mask": torch.ones(2, 12, dtype=torch.long)}, qattn.InvalidArgument, "attn_mask"),
    ({"attn_mask": torch.ones(2, 11).bool()}, qattn.InvalidArgument, "attn_mask"),
], ids=["dropout", "parallel", "unknown", "causal", "integers", "shape"])  # fmt: skip
def test_refused_by_the_backend(options, kind, words):
    qd.register(schedule="int8_full")
    with pytest.raises(kind, match=words):
        dispatch(*operands(), **options)


def test_heads_and_gradients_are_refused():
    qd.register(schedule="int8_full")
    q, k, v = operands(kv_heads=2)
    with pytest.raises(qattn.InvalidArgument, match="enable_gqa is False"):
        dispatch(q, k, v)
    with pytest.raises(qattn.InvalidArgument, match="requires a gradient"):
        dispatch(q.requires_grad_(), k, v, enable_gqa=True)
    model, inputs = build(sd3)
    with qd.attach(model, "int8_full"), pytest.raises(
        qattn.InvalidArgument, match="transformer_blocks.0.attn: query: requires a gradient"
    ):
        model(**inputs)
    assert qd.current_place() == Place()


def test_registration():
    with pytest.raises(qattn.InvalidArgument, match="int7"):
        qd.register(schedule="int7")
    for name in ("native", "flash", "", "Qattn", 7):
        with pytest.raises(qattn.InvalidArgument, match="name"):
            qd.register(name)
    qd.register("qattn_other", "nvfp4")
    qd.register("qattn", "f32")
    assert AttentionBackendName("qattn_other") is AttentionBackendName.QATTN_OTHER
    fine, coarse = (dispatch(*operands(), x) for x in ("qattn", "qattn_other"))
    assert nrmse(coarse, fine) > 0.02
    qd.register("qattn", Schedule("f32", Rule("bf16", last=1)))
    with pytest.raises(qattn.InvalidArgument, match=r"step is not known; .*attach\(pipeline"):
        dispatch(*operands())


def test_compile_of_the_backend():
    torch._dynamo.reset()
    qd.register(schedule="int8_full")
    q, k, v = operands()
    compiled = torch.compile(lambda q, k, v, m: dispatch(q, k, v, attn_mask=m), fullgraph=True,
                             backend="aot_eager")  # fmt: skip
    mask = torch.ones(2, 12, dtype=torch.bool)
    torch.testing.assert_close(compiled(q, k, v, mask), dispatch(q, k, v, attn_mask=mask))


def test_compiled_models_are_refused_by_attach():
    model = torch.nn.TransformerEncoderLayer(16, 1, 16, batch_first=True).eval()
    with pytest.raises(qattn.Unsupported, match="torch.compile"):
        qd.attach(torch.compile(model))
    with qd.attach(model, "f32", strict=False):
        model.self_attn.compile(backend="aot_eager")
        with torch.no_grad(), pytest.raises(qattn.Unsupported, match="self_attn: is compiled"):
            model(rand(1, 8, 16))


def test_layers_without_flash_attention_are_refused():
    """Attention by products and a softmax, as processors without "2_0" compute it."""
    from diffusers.models.attention_processor import AttnProcessor

    model, inputs = build(dit)
    model.transformer_blocks[1].attn1.set_processor(AttnProcessor())
    with qd.attach(model, "f32"), pytest.raises(
        qattn.Unsupported, match="transformer_blocks.1.attn1: .*AttnProcessor"
    ):
        run(model, inputs)


@pytest.mark.parametrize("make", [flux, pixart], ids=["flux", "pixart"])
def test_16_bit_models(make):
    """bfloat16 operands and masks; torch.autocast casts for qattn what it casts for torch."""
    model, inputs = build(make)
    float32 = run(model, inputs)
    with torch.autocast("cpu", torch.bfloat16), qd.attach(model, "int8_full"):
        assert nrmse(run(model, inputs).float(), float32) < 0.02
    model.bfloat16()
    inputs = {k: x.bfloat16() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
              for k, x in inputs.items()}  # fmt: skip
    with qd.attach(model, "int8_full") as attached:
        assert nrmse(run(model, inputs).float(), float32) < 0.02
    assert not attached.report().unreached


def test_layers_that_attend_by_other_means():
    """Sana's attn1 is linear attention: no call of an attention function is seen."""
    model, inputs = build(sana)
    with qd.attach(model, "f32"), pytest.raises(
        qattn.Unsupported, match="attn1: this Attention ran without .*SanaLinearAttnProcessor"
    ):
        run(model, inputs)
    schedule = Schedule("f32", Rule("torch", layers="*.attn1"))
    for options in ({"strict": False}, {"schedule": schedule}):
        with qd.attach(model, **{"schedule": "f32", **options}) as attached:
            assert "2 did not run" in str(attached.report())
            run(model, inputs)
        report = attached.report()
        assert [x.layer for x in report.unreached] == ["transformer_blocks.0.attn1"]
        assert [x.layer for x in report.reached] == ["transformer_blocks.0.attn2"]
        assert "NOT REACHED (Attention)" in str(report)


def test_reports_say_what_auto_is():
    model, inputs = build(dit)
    with qd.attach(model) as attached:
        run(model, inputs)
    q = rand(1, 64, 2, 32)
    for layer in attached.report().layers:
        (name,) = layer.calls
        assert f"\nrecipe: {name} " in qattn.explain(q, q, q)


def test_attached_twice_is_refused_and_others_are_left_alone():
    model, _ = build(flux)
    outside = rand(1, 2, 8, 16)
    expected = F.scaled_dot_product_attention(outside, outside, outside)
    other, other_inputs = build(sd3)
    native = run(other, other_inputs)
    with qd.attach(model, "nvfp4"):
        with pytest.raises(qattn.InvalidArgument, match="attached already"):
            qd.attach(model)
        assert torch.equal(F.scaled_dot_product_attention(outside, outside, outside), expected)
        assert torch.equal(run(other, other_inputs), native)
        with qd.attach(other, "f32"):
            assert nrmse(run(other, other_inputs), native) < TIGHT
        assert torch.equal(run(other, other_inputs), native)
    with pytest.raises(qattn.InvalidArgument, match="neither a torch.nn.Module nor a pipeline"):
        qd.attach(7)


def test_static_scales_and_observers():
    """Scales that are the tensors' own maxima compute the same codes' error; places name layers."""
    model, inputs = build(flux)
    native = run(model, inputs)
    largest, places = {}, []

    def observe(place, q, k, v):
        assert qd.current_place() == place
        assert q.shape == (1, 76, 2, 32) and k.shape == v.shape == q.shape
        largest[place.layer] = [x.abs().amax(dim=(0, 1, 3)) / 127 for x in (q, k, v)]

    with qd.attach(model, "int8_full", on_attention=observe):
        dynamic = run(model, inputs)
    assert set(largest) == {"transformer_blocks.0.attn", "single_transformer_blocks.0.attn"}

    def scales(place):
        places.append(place.layer)
        return dict(zip(("q_scale", "k_scale", "v_scale"), largest[place.layer]))

    for recipe in ("int8_full", "int8"):  # int8 has no use for V's
        with qd.attach(model, recipe, scales=scales):
            static = run(model, inputs)
        assert 1e-6 < nrmse(static, native) < 3 * nrmse(dynamic, native)
        assert not torch.equal(static, dynamic)
    assert len(places) == 4
    with qd.attach(model, "bf16", scales=scales) as attached:
        run(model, inputs)
    assert attached.report().layers[0].calls == {"bf16": 1}
    clipped = torch.zeros(3, dtype=torch.int64)

    def tight(place):
        q, k, v = largest[place.layer]
        return {"q_scale": q / 2, "k_scale": k.expand(1, -1), "v_scale": v.max()[None],
                "smooth_k": False, "saturated": clipped}  # fmt: skip

    with qd.attach(model, "int8_full", scales=tight):
        run(model, inputs)
    assert clipped[0] > 0 and clipped[1:].tolist() == [0, 0]
    with qd.attach(model, "int8", scales=lambda place: {"k_max": 1}), pytest.raises(
        qattn.InvalidArgument, match="k_scale"
    ):
        run(model, inputs)


def sample(pipeline, inputs):
    noise = torch.Generator().manual_seed(0)
    return pipeline(**inputs, num_inference_steps=4, generator=noise, output_type="latent",
                    return_dict=False)[0]  # fmt: skip


@pytest.mark.parametrize("make, branches, bound", [
    (wan_pipeline, ["cond", "uncond"], 8e-3), (sd3_pipeline, [None], 1e-3),
], ids=["wan", "sd3"])  # fmt: skip
def test_pipelines(make, branches, bound):
    """Late steps in 16 bits; step, sigma and branch come from the pipeline."""
    pipeline, inputs = make()
    native = sample(pipeline, inputs)
    places = {}
    schedule = Schedule("int8_full", Rule("bf16", last=1))
    for _ in range(2):  # the scheduler begins anew
        with qd.attach(pipeline, schedule, on_attention=lambda place, *_: places.setdefault(
            (place.step, place.branch), place)) as attached:  # fmt: skip
            assert TIGHT < nrmse(sample(pipeline, inputs), native) < bound
    for layer in attached.report().reached:
        assert layer.steps == {"int8_full": (0, 1, 2), "bf16": (3,)}
        assert layer.calls == {"int8_full": 3 * len(branches), "bf16": len(branches)}
    assert len(attached.report().reached) == len(attached.report().layers)
    assert list(places) == [(step, branch) for step in range(4) for branch in branches]
    sigmas = pipeline.scheduler.sigmas.tolist()
    assert all(place.sigma == sigmas[step] and place.steps == 4
               for (step, _), place in places.items())  # fmt: skip


def test_two_denoisers_have_names_of_their_own():
    pipeline, _ = wan_pipeline()
    pipeline.transformer_2 = build(wan)[0]
    with qd.attach(pipeline, Schedule("f32", Rule("bf16", layers="transformer_2.*"))) as attached:
        _, inputs = build(wan)
        run(pipeline.transformer, inputs)
        run(pipeline.transformer_2, inputs)
    calls = {x.layer: x.calls for x in attached.report().layers}
    assert calls["blocks.0.attn1"] == {"f32": 1}
    assert calls["transformer_2.blocks.0.attn1"] == {"bf16": 1} and len(calls) == 8


def test_import_needs_neither_torch_nor_diffusers():
    code = "import sys, qattn.diffusion as q; q.Schedule('int8', q.Rule('bf16', last=2)); " \
           "assert not {'torch', 'diffusers'} & set(sys.modules)"  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_error_ends_the_pass():
    model, inputs = build(flux)
    with qd.attach(model, "f32"):
        with contextlib.suppress(RuntimeError):
            run(model, {**inputs, "encoder_hidden_states": rand(1, 12, 31)})
        assert pass_under_way() is None
        run(model, inputs)
