"""Calls outside of an attached model's own pass: what was there, and nothing that nobody asked for.

Parts of the model, copies of it, second names, passes that were broken off, other threads.
"""

import copy
import io
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
from cases import nrmse
from diffusers.training_utils import EMAModel
from diffusion_models import (
    Attention, build, flux, pixart, qwen, rand, run, sd3, sd3_pipeline, unet, wan,
    wan_pipeline,
)  # fmt: skip

import qattn
import qattn.diffusion as qd
from qattn.diffusion import Rule, Schedule
from qattn.diffusion.attachment import _attention_classes
from qattn.diffusion.passes import pass_under_way

TIGHT = 2e-6
MODELS = [flux, wan, qwen, sd3, pixart, unet]
IDS = [make.__name__ for make in MODELS]


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    assert torch.overrides._len_torch_function_stack() == 0 and pass_under_way() is None


@torch.no_grad()
def forward(model, inputs):
    return model.forward(**inputs)[0]


def recorded_block(model, inputs):
    """A block of the model, and the arguments that it is called with."""
    modules = dict(model.named_modules())
    layer = next(n for n, m in modules.items() if isinstance(m, _attention_classes()))
    block = modules[layer.rpartition(".")[0]]
    calls = []
    handle = block.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    run(model, inputs)
    handle.remove()
    return block, *calls[0]


def first(out):
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("recipe", ["torch", "f32", "nvfp4", "auto"])
@pytest.mark.parametrize("make", MODELS, ids=IDS)
def test_parts_of_a_model_are_torchs(make, recipe):
    model, inputs = build(make)
    want = run(model, inputs)
    block, args, kwargs = recorded_block(model, inputs)
    with torch.no_grad():
        part = first(block(*args, **kwargs))
    with qd.attach(model, recipe) as attached, torch.no_grad():
        assert torch.equal(forward(model, inputs), want)
        assert torch.equal(first(block(*args, **kwargs)), part)
        assert not attached.report().reached
        run(model, inputs)
        assert attached.report().reached
        assert torch.equal(forward(model, inputs), want)


@pytest.mark.parametrize("make", [wan, sd3, unet], ids=["wan", "sd3", "unet"])
@pytest.mark.parametrize("when", ["attached", "after detach"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "copy", "averaged"])
def test_copies_are_not_attached(make, how, when):
    model, inputs = build(make)
    want = run(model, inputs)
    with qd.attach(model, "nvfp4") as attached:
        own = run(model, inputs)
        if how == "pickle":
            other = pickle.loads(pickle.dumps(model))
        elif how == "torch.save":
            torch.save(model, file := io.BytesIO())
            file.seek(0)
            other = torch.load(file, weights_only=False)
        elif how == "averaged":
            other = torch.optim.swa_utils.AveragedModel(model).module
        else:
            other = getattr(copy, how)(model)
        before = str(attached.report())
        if when == "attached":
            assert torch.equal(run(other, inputs), want)
            assert str(attached.report()) == before
            if how != "copy":  # whose parts are the model's
                with qd.attach(other, "f32") as second:
                    assert nrmse(run(other, inputs), want) < TIGHT
                    assert torch.equal(run(model, inputs), own)
                assert len(second.report().reached) == len(attached.report().reached)
            assert torch.equal(run(model, inputs), own)
    assert torch.equal(run(other, inputs), want) and torch.equal(run(model, inputs), want)


def test_diffusers_ema():
    model, inputs = build(wan)
    with qd.attach(model, "nvfp4"):
        ema = EMAModel(model.parameters(), model_cls=type(model), model_config=model.config)
        ema.step(model.parameters())
        own = run(model, inputs)
        ema.copy_to(model.parameters())
        assert torch.equal(run(model, inputs), own)
    ema.copy_to((other := build(wan)[0]).parameters())
    assert torch.equal(run(other, inputs), run(model, inputs))


def test_two_names_for_one_denoiser():
    pipeline, _ = wan_pipeline()
    pipeline.transformer_2 = pipeline.transformer
    _, inputs = build(wan)
    with qd.attach(pipeline, "f32") as attached:
        run(pipeline.transformer_2, inputs)
    assert {x.layer: x.calls for x in attached.report().layers} == {
        f"blocks.{i}.attn{j}": {"f32": 1} for i in range(2) for j in (1, 2)
    }
    with pytest.raises(qattn.InvalidArgument, match="'transformer_2.*' matches no layer"):
        qd.attach(pipeline, Schedule("f32", Rule("bf16", layers="transformer_2.*")))


def test_models_that_share_a_part():
    """Each computes by its own schedule, whichever was attached first, and alone it is torch's."""
    one, inputs = build(wan)
    two, _ = build(wan)
    two.blocks[0] = one.blocks[0]
    want = run(one, inputs)
    assert torch.equal(run(two, inputs), want)
    with qd.attach(one, "nvfp4") as a, qd.attach(two, "f32") as b:
        assert nrmse(run(two, inputs), want) < TIGHT < 1e-3 < nrmse(run(one, inputs), want)
        assert nrmse(run(two, inputs), want) < TIGHT
    assert {tuple(x.calls.items()) for x in a.report().layers} == {(("nvfp4", 1),)}
    assert {tuple(x.calls.items()) for x in b.report().layers} == {(("f32", 2),)}
    assert torch.equal(run(one, inputs), want)


def test_a_part_with_a_schedule_of_its_own():
    """A part that is attached, too, is a model with a pass of its own inside of the other's."""
    model, inputs = build(wan)
    for part_first in (True, False):
        order = [(model.blocks[0], "f32"), (model, "bf16")]
        first_, second = order if part_first else order[::-1]
        with qd.attach(*first_) as a, qd.attach(*second) as b:
            run(model, inputs)
        whole, part = (b, a) if part_first else (a, b)
        assert {x.layer for x in whole.report().reached} == {"blocks.1.attn1", "blocks.1.attn2"}
        assert {x.layer: x.calls for x in part.report().reached} == {
            "attn1": {"f32": 1}, "attn2": {"f32": 1},
        }  # fmt: skip


@pytest.mark.parametrize("make", [wan_pipeline, sd3_pipeline], ids=["wan", "sd3"])
def test_pipelines_that_share_a_model(make):
    """The second has a scheduler that the first's attachment does not know. Wan's pipeline says
    itself where it is."""
    pipeline, inputs = make()
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0)
    second = type(pipeline)(**{**pipeline.components, "scheduler": scheduler})
    second.set_progress_bar_config(disable=True)

    def sample(pipeline, steps):
        return pipeline(**inputs, num_inference_steps=steps, output_type="latent")

    places = []
    with qd.attach(pipeline, "f32", on_attention=lambda p, *_: places.append(p)):
        for which, steps in ((second, 3), (pipeline, 4), (second, 3), (pipeline, 2)):
            places.clear()
            sample(which, steps)
            calls = len(places) // steps
            right = [i for i in range(steps) for _ in range(calls)]
            if which is pipeline or make is wan_pipeline:
                assert [p.step for p in places] == right
                assert {p.steps for p in places} == {steps}
            else:
                assert {p.step for p in places} == {None}
            if which is second:
                assert {p.sigma for p in places} <= {None, *second.scheduler.sigmas.tolist()}
        with pytest.raises(qattn.InvalidArgument, match="attached already"):
            qd.attach(second)
    if make is sd3_pipeline:
        with qd.attach(pipeline, Schedule("f32", Rule("bf16", last=1))), pytest.raises(
            qattn.InvalidArgument, match="step is not known"
        ):
            sample(second, 3)


class Breaks(Attention):
    error = None

    def forward(self, sample, timestep=None):
        out = super().forward(sample)
        if self.error is not None:
            raise self.error
        return out


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, ValueError])
@pytest.mark.parametrize("nested", [False, True])
def test_a_pass_that_is_broken_off(error, nested):
    """No hook is told of what is no Exception; attention afterwards is torch's all the same."""
    inner, x = Breaks(), rand(1, 4, 4, 4)
    model = torch.nn.Sequential(inner) if nested else inner
    q = rand(1, 2, 30, 32)
    want, plain = model(x), F.scaled_dot_product_attention(q, q, q)
    with qd.attach(model, "nvfp4") as attached:
        own = model(x)
        inner.error = error()
        with pytest.raises(error):
            model(x)
        inner.error = None
        calls = attached.report().layers[0].calls["nvfp4"]
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), plain)
        assert torch.equal(model.forward(x), want)
        assert attached.report().layers[0].calls["nvfp4"] == calls == 2
        assert torch.equal(model(x), own)
        inner.error = error()
        with pytest.raises(error):
            model(x)
        inner.error = None
    assert torch.equal(model(x), want)
    assert torch.equal(F.scaled_dot_product_attention(q, q, q), plain)


def test_detach_within_a_pass():
    class Detaches(torch.nn.Module):
        def forward(self, q):
            one = F.scaled_dot_product_attention(q, q, q)
            attached.detach()
            return one, F.scaled_dot_product_attention(q, q, q)

    model, q = Detaches(), rand(1, 2, 30, 32)
    plain = F.scaled_dot_product_attention(q, q, q)
    attached = qd.attach(model, "nvfp4")
    one, two = model(q)
    assert nrmse(one, plain) > 0.01 and torch.equal(two, plain)
    assert torch.equal(F.scaled_dot_product_attention(q, q, q), plain)
    attached.detach()


def test_threads_each_say_where_they_are():
    """at() is for the thread that says it."""
    model, x, places = Attention(), rand(1, 4, 4, 4), {}
    schedule = Schedule("f32", Rule("bf16", last=1))
    meet = threading.Barrier(3)

    def loop(name, steps):
        for step in range(steps):
            with attached.at(step=step, steps=steps):
                meet.wait(20)
                model(x)
                meet.wait(20)

    def observe(place, *_):
        places.setdefault(threading.current_thread().name, []).append((place.step, place.steps))

    with qd.attach(model, schedule, on_attention=observe) as attached:
        threads = [
            threading.Thread(target=loop, args=(n, 4), name=n) for n in ("a", "b")
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        for _ in range(4):
            meet.wait(20)
            with pytest.raises(qattn.InvalidArgument, match="step is not known"):
                model(x)
            meet.wait(20)
        for thread in threads:
            thread.join()
    assert places == {n: [(i, 4) for i in range(4)] for n in ("a", "b")}
    (layer,) = attached.report().layers
    assert layer.calls == {"f32": 6, "bf16": 2}


def test_branches_are_heard_in_the_thread_that_says_them():
    model, inputs = build(wan)
    places = []
    with qd.attach(model, "f32", on_attention=lambda p, *_: places.append(p.branch)):
        with model.cache_context("cond"):
            thread = threading.Thread(target=run, args=(model, inputs))
            thread.start()
            thread.join()
            run(model, inputs)
            with model.cache_context("uncond"):
                run(model, inputs)
        run(model, inputs)
    assert places[::4] == [None, "cond", "uncond", None]


def test_a_module_put_in_place_of_another():
    """It runs in the pass, under the name of what is around it."""
    model, inputs = build(wan)
    want = run(model, inputs)
    with qd.attach(model, "f32") as attached:
        model.blocks[1] = copy.deepcopy(model.blocks[0])
        model.blocks[1].load_state_dict(build(wan)[0].blocks[1].state_dict())
        assert nrmse(run(model, inputs), want) < TIGHT
    calls = {x.layer: x.calls for x in attached.report().layers if x.calls}
    assert calls == {
        "blocks.0.attn1": {"f32": 1}, "blocks.0.attn2": {"f32": 1},
        "WanTransformer3DModel": {"f32": 2},
    }  # fmt: skip


# ---- Ordinary calls, which go a shorter way ------------------------------------------------------


class Attends(torch.nn.Module):
    def forward(self, q, k, v, **options):
        return F.scaled_dot_product_attention(q, k, v, **options)


@pytest.mark.parametrize("recipe", ["f32", "int8", "int8_full", "auto"])
@pytest.mark.parametrize("rank", [3, 4])
def test_the_short_way_has_the_results_of_the_long_one(recipe, rank):
    torch.manual_seed(3)
    shapes = (2, 33, 64), (2, 70, 64), (2, 70, 32)
    q, k, v = (torch.randn((1, *shape)[4 - rank :]) for shape in shapes)
    net = Attends()
    everything = torch.ones(33, 70, dtype=torch.bool)  # a mask goes the long way
    with qd.attach(net, recipe) as run:
        short, long = net(q, k, v), net(q, k, v, attn_mask=everything)
    assert torch.equal(short, long) and short.stride() == long.stride()
    assert sum(sum(row.calls.values()) for row in run.report().layers) == 2


def test_a_refusal_of_the_short_way_names_layer_and_way_out():
    q, k = torch.randn(1, 2, 8, 64), torch.randn(1, 2, 9, 64)
    net = Attends()
    refusal = r"Attends: .*9.*layers="
    with qd.attach(net, "f32"), pytest.raises(qattn.InvalidArgument, match=refusal):
        net(q, k, k[:, :, :5])
