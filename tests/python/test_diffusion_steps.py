"""Steps and sigmas of every scheduler of the installed diffusers, at every start."""

import inspect
import math

import numpy as np
import pytest
import torch

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
from diffusion_models import Attention, rand

import qattn.diffusion as qd
from qattn.diffusion import Place
from qattn.diffusion.moment import Clock

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

STEPS = 6
#: what their constructors need
OPTIONS = {
    "AmusedScheduler": {"mask_token_id": 5},
    "VQDiffusionScheduler": {"num_vec_classes": 5},
    "RFD4ProteinaScheduler": {
        "schedule_mode": "power", "noise_mode": "1/t", "tsr_k": 1.0, "tsr_sigma": 1.0,
        "tail_steps": 1,
    },
    "HeliosScheduler": {"stages": 1, "stage_range": [0, 1]},
    "HeliosDMDScheduler": {"stages": 1, "stage_range": [0, 1]},
}  # fmt: skip
#: what their set_timesteps() needs
SETTING = {
    "SCMScheduler": {"intermediate_timesteps": None},
    "HeliosScheduler": {"stage_index": 0},
    "HeliosDMDScheduler": {"stage_index": 0},
    "RePaintScheduler": {"jump_length": 2, "jump_n_sample": 2},
}


def every_scheduler():
    """Names of what diffusers has of them."""
    found = {n: getattr(diffusers, n) for n in dir(diffusers) if n.endswith("Scheduler")}
    return sorted(n for n, x in found.items() if inspect.isclass(x))


def made(name, **options):
    try:
        scheduler = getattr(diffusers, name)(**{**OPTIONS.get(name, {}), **options})
    except ImportError as missing:
        pytest.skip(str(missing).strip().splitlines()[0])
    except TypeError:
        if not options:
            raise
        pytest.skip("has no such option")
    return scheduler


def prepared(name, steps=STEPS, **options):
    scheduler = made(name, **options)
    set_steps(scheduler, steps)
    return scheduler


def set_steps(scheduler, steps):
    scheduler.set_timesteps(steps, **SETTING.get(type(scheduler).__name__, {}))
    if hasattr(scheduler, "set_sigmas"):
        scheduler.set_sigmas(steps)


def go_on(scheduler, index):
    """One step of a sampler, of schedulers that count them."""
    if not (hasattr(scheduler, "step_index") or hasattr(scheduler, "counter")):
        return
    t, x = scheduler.timesteps[index], torch.zeros(1, 20, 2, 2)
    options = {}
    if "r_timestep" in inspect.signature(scheduler.step).parameters:
        options["r_timestep"] = torch.tensor(0.0)
    if type(scheduler).__name__ in ("HeliosDMDScheduler", "PiflowScheduler",
                                    "RFD4ProteinaScheduler"):  # fmt: skip
        scheduler._step_index = index + 1  # whose step() wants more than a sample
    else:
        scheduler.step(x, t, x, return_dict=False, **options)


class Denoiser(torch.nn.Module):
    def forward(self, sample, timestep):
        return sample


def looped(clock, scheduler, begin=0, told=True, end=None, branches=1, form=lambda t: t):
    """The places that a sampler's loop comes by, as diffusers' pipelines have it."""
    if told and hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(begin)
    model, places = Denoiser(), []
    for index in range(begin, len(scheduler.timesteps) if end is None else end):
        for _ in range(branches):
            value = form(scheduler.timesteps[index])
            places.append(clock.moment(model, (None, value), {}, None))
        if index + 1 < len(scheduler.timesteps):
            go_on(scheduler, index)
    return places


def starts(scheduler):
    if type(scheduler).__name__ in ("HeliosScheduler", "RFD4ProteinaScheduler"):  # from 0 alone
        return range(1)
    return range(0, len(scheduler.timesteps), getattr(scheduler, "order", 1) or 1)


def test_there_are_schedulers():
    names = every_scheduler()
    assert len(names) > 40
    assert {"PNDMScheduler", "DDPMScheduler", "KDPM2DiscreteScheduler"} <= set(names)


@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
@pytest.mark.parametrize("name", every_scheduler())
def test_steps_are_those_of_the_list_at_every_start(name, told):
    """told: image-to-image pipelines say set_begin_index() where a scheduler has it."""
    for begin in starts(prepared(name)):
        scheduler = prepared(name)
        count = len(scheduler.timesteps)
        places = looped(Clock(scheduler), scheduler, begin, told)
        listed = [float(t) for t in scheduler.timesteps]
        # Nobody tells which of several equal timesteps a run begins at; later calls show it.
        one = listed[begin] == 1 and 1000 in listed  # or a share of the training's 1000
        doubtful = {0} if listed.count(listed[begin]) > 1 or one else set()
        if not hasattr(scheduler, "step_index") and not hasattr(scheduler, "counter"):
            doubtful = {i for i in range(count) if len(set(listed)) < count}  # RePaint's list
        for i, place in enumerate(places):
            if place.step is None:
                assert i in doubtful, (begin, i, place)
                continue
            assert (place.step, place.steps, place.begin) == (begin + i, count, begin), (begin, i)
            sigma = expected_sigma(scheduler, begin + i)
            assert place.sigma == (sigma and pytest.approx(sigma, rel=1e-4))


def expected_sigma(scheduler, step):
    """By the list, or by the betas at the timestep; None: the scheduler has neither."""
    t, count = float(scheduler.timesteps[step]), len(scheduler.timesteps)
    sigmas = getattr(scheduler, "sigmas", None)
    if sigmas is not None and len(sigmas) in (count, count + 1):
        return float(sigmas[step])
    if not hasattr(scheduler, "alphas_cumprod"):
        return None
    products = scheduler.alphas_cumprod.double().numpy()
    noise = np.log(((1 - products) / products) ** 0.5)
    return float(np.exp(np.interp(t, np.arange(len(noise)), noise)))


@pytest.mark.parametrize("name", ["KDPM2DiscreteScheduler", "KDPM2AncestralDiscreteScheduler"])
def test_sigmas_between_two_entries(name):
    """The noise at which the model is called, as scale_model_input() has it."""
    scheduler = prepared(name)
    clock, model, x = Clock(scheduler), Denoiser(), torch.ones(1)
    for index, t in enumerate(scheduler.timesteps):
        scaled = scheduler.scale_model_input(x, t)
        place = clock.moment(model, (None, t), {}, None)
        assert place.sigma == pytest.approx(math.sqrt(1 / float(scaled) ** 2 - 1), rel=1e-3)
        go_on(scheduler, index)


@pytest.mark.parametrize("name", every_scheduler())
def test_branches_one_after_the_other_are_at_one_step(name):
    scheduler = prepared(name)
    steps = [p.step for p in looped(Clock(scheduler), scheduler, branches=3)]
    if len(set(scheduler.timesteps.tolist())) < len(steps) // 3:
        assert all(s in (None, i // 3) for i, s in enumerate(steps))
    else:
        assert steps == [i // 3 for i in range(len(steps))]


@pytest.mark.parametrize("name", every_scheduler())
def test_runs_that_follow(name):
    """A new list begins a new run, also after one that was broken off."""
    scheduler = made(name)
    clock = Clock(scheduler)
    for steps, end in ((STEPS, 3), (STEPS + 1, None), (STEPS, None)):
        set_steps(scheduler, steps)
        places = looped(clock, scheduler, end=end)
        assert all(p.step in (i, None) and p.begin == 0 for i, p in enumerate(places))
        assert places[-1].step is not None or len(set(scheduler.timesteps.tolist())) < len(places)


@pytest.mark.parametrize("name", every_scheduler())
@pytest.mark.parametrize("other", ["DDIMScheduler", "EulerDiscreteScheduler",
                                   "FlowMatchEulerDiscreteScheduler", "PNDMScheduler"])  # fmt: skip
def test_the_list_of_a_scheduler_that_does_not_run_is_not_read(name, other):
    """Whether its list was never set, or is that of a run before."""
    scheduler = made(name)
    clock = Clock(scheduler)
    for before in (False, True):
        if before:
            set_steps(scheduler, STEPS)
            looped(clock, scheduler)
        running = prepared(other, steps=9, **({"skip_prk_steps": True} if other[0] == "P" else {}))
        model, places = Denoiser(), []
        for index, t in enumerate(running.timesteps):
            places.append(clock.moment(model, (None, t), {}, None))
            go_on(running, index)
        assert {p.step for p in places[1:]} == {None}, (before, [p.step for p in places])
        listed = [] if not before else scheduler.timesteps.tolist()
        first = float(running.timesteps[0])
        near = [abs(form - first) < 0.1 for t in listed for form in (t, t / 1000, 1 - t / 1000)]
        assert places[0].step is None or any(near)


@pytest.mark.parametrize("form", [
    lambda t: t / 1000, lambda t: 1 - t / 1000, lambda t: t.float().bfloat16(),
    lambda t: (t / 1000).bfloat16(), lambda t: t.expand(2), lambda t: float(t),
    lambda t: torch.tensor([[0.0, float(t), float(t)]]),
], ids=["share", "rest", "bf16", "share in bf16", "batch", "float", "tokens"])  # fmt: skip
@pytest.mark.parametrize("name, begin", [
    ("FlowMatchEulerDiscreteScheduler", 0), ("FlowMatchEulerDiscreteScheduler", 4),
    ("DDIMScheduler", 0), ("DDIMScheduler", 4), ("EulerDiscreteScheduler", 3),
])  # fmt: skip
def test_forms_of_timesteps(name, begin, form):
    """Models take timesteps in several units and types: the step, or that it is not known."""
    scheduler = prepared(name, steps=30)
    places = looped(Clock(scheduler), scheduler, begin, form=form)
    assert all(p.step in (begin + i, None) for i, p in enumerate(places))
    assert sum(p.step is None for p in places) <= (0 if name[0] != "D" else 8)


@pytest.mark.parametrize("custom", [[900, 600, 550, 10]])
@pytest.mark.parametrize("name", every_scheduler())
def test_timesteps_of_one_s_own(name, custom):
    scheduler = made(name)
    if "timesteps" not in inspect.signature(scheduler.set_timesteps).parameters:
        pytest.skip("takes none")
    try:
        scheduler.set_timesteps(timesteps=custom)
    except (ValueError, TypeError) as error:
        pytest.skip(f"takes others: {error}")
    places = looped(Clock(scheduler), scheduler)
    assert [p.step for p in places] == list(range(len(scheduler.timesteps)))


def test_a_clock_for_each_denoiser():
    """By the denoiser's name, where the pipeline has a scheduler of that name."""

    class Pipeline:
        pass

    cases = {
        "prior_prior": "prior_scheduler", "prior": "prior_scheduler", "unet": "scheduler",
        "decoder": "decoder_scheduler", "transformer_2": "scheduler", "controlnet": "scheduler",
        "super_res_first": "super_res_scheduler",
    }  # fmt: skip
    pipeline = Pipeline()
    for scheduler in {*cases.values(), "image_noising_scheduler", "inverse_scheduler"}:
        setattr(pipeline, scheduler, scheduler)
    for denoiser, scheduler in cases.items():
        assert Clock.of(pipeline, denoiser, None, {}).scheduler == scheduler
        assert Clock.of(pipeline, denoiser, "given", {}).scheduler == "given"
    del pipeline.decoder_scheduler
    assert Clock.of(pipeline, "decoder", None, {}).scheduler == "scheduler"


def test_steps_of_a_combined_pipelines_prior():
    """As Kandinsky 2.2 combined has it: each denoiser's steps are of its own scheduler's list."""
    pipeline = type("Pipeline", (), {})()
    pipeline.unet, pipeline.prior_prior = Attention(), Attention()
    pipeline.scheduler = diffusers.DDPMScheduler()
    pipeline.prior_scheduler = diffusers.DDIMScheduler()
    places = []
    with qd.attach(pipeline, "f32", on_attention=lambda p, *_: places.append(p)):
        for model, scheduler, steps in (
            (pipeline.prior_prior, pipeline.prior_scheduler, 5),
            (pipeline.unet, pipeline.scheduler, 4),
        ):
            set_steps(scheduler, steps)
            for t in scheduler.timesteps:
                model(rand(1, 4, 4, 4), t)
    assert [(p.layer, p.step, p.steps) for p in places] == [
        *(("prior_prior", i, 5) for i in range(5)), *(("Attention", i, 4) for i in range(4)),
    ]  # fmt: skip


def test_two_denoisers_of_one_run():
    """As Wan 2.2 has them: the second takes over where the first has stopped."""
    for name in ("UniPCMultistepScheduler", "DDIMScheduler", "PNDMScheduler"):
        pipeline = type("Pipeline", (), {})()
        pipeline.transformer, pipeline.transformer_2 = Attention(), Attention()
        pipeline.scheduler = prepared(name)
        count, places = len(pipeline.scheduler.timesteps), []
        schedule = qd.Schedule("f32", qd.Rule("bf16", first=1))
        observe = lambda place, *_, to=places: to.append(place)  # noqa: E731
        with qd.attach(pipeline, schedule, on_attention=observe) as attached:
            for index, t in enumerate(pipeline.scheduler.timesteps):
                model = pipeline.transformer if index < 3 else pipeline.transformer_2
                model(rand(1, 4, 4, 4), t)
                if index + 1 < count:
                    go_on(pipeline.scheduler, index)
        assert [p.step for p in places] == list(range(count)) and {p.begin for p in places} == {0}
        assert [x.calls for x in attached.report().layers] == [
            {"bf16": 1, "f32": 2}, {"f32": count - 3},
        ]  # fmt: skip


def test_a_scheduler_that_is_replaced_while_attached():
    pipeline = type("Pipeline", (), {})()
    pipeline.unet, pipeline.scheduler = Attention(), prepared("DDIMScheduler")
    places = []
    with qd.attach(pipeline, "f32", on_attention=lambda p, *_: places.append(p)):
        for name, steps in (("DDIMScheduler", 6), ("EulerDiscreteScheduler", 8)):
            pipeline.scheduler = prepared(name, steps=steps)
            for index, t in enumerate(pipeline.scheduler.timesteps):
                pipeline.unet(rand(1, 4, 4, 4), t)
                go_on(pipeline.scheduler, index)
    assert [(p.step, p.steps) for p in places] == [
        *((i, 6) for i in range(6)), *((i, 8) for i in range(8)),
    ]  # fmt: skip


def test_calls_that_tell_no_timestep():
    """Only what the scheduler itself says is left."""
    for name, told, known in (("EulerDiscreteScheduler", True, [0, 1, 2]),
                              ("EulerDiscreteScheduler", False, [None, 1, 2]),
                              ("DDIMScheduler", True, [None] * 3),
                              ("PNDMScheduler", True, [None] * 3)):  # fmt: skip
        scheduler = prepared(name)
        places = looped(Clock(scheduler), scheduler, told=told, end=3, form=lambda _: None)
        assert [p.step for p in places] == known
        assert {p.begin for p in places} == {0}


ZERO_SNR = ("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler", "DDIMScheduler", "DDPMScheduler",
            "DDIMParallelScheduler", "DDPMParallelScheduler", "EulerDiscreteScheduler",
            "EulerAncestralDiscreteScheduler", "LCMScheduler", "TCDScheduler",
            "UniPCMultistepScheduler", "DPMSolverMultistepScheduler", "DDIMInverseScheduler",
            "DEISMultistepScheduler")  # fmt: skip


@pytest.mark.parametrize("name", ZERO_SNR)
def test_a_first_sigma_that_is_infinite(name):
    """Rules, calibration, its file and static scales, where the betas leave no signal."""
    options = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    if "rescale_betas_zero_snr" not in inspect.signature(getattr(diffusers, name)).parameters:
        pytest.skip("has no such betas")
    scheduler, net = prepared(name, 5, **options), Attention()

    def sample(**attached):
        set_steps(scheduler, 5)
        with qd.attach(net, scheduler=scheduler, **attached) as run, torch.no_grad():
            for index, t in enumerate(scheduler.timesteps):
                net(rand(1, 4, 4, 4), t)
                if index + 1 < len(scheduler.timesteps):
                    go_on(scheduler, index)
        return run

    places = []
    sample(schedule="torch", on_attention=lambda p, *_: places.append(p))
    sigmas = [p.sigma for p in places]
    assert None not in sigmas and max(sigmas) > 1000
    low = sorted(sigmas)[1]
    run = sample(schedule=qd.Schedule("f32", qd.Rule("bf16", sigma=(0, low))))
    few = tuple(i for i, s in enumerate(sigmas) if s <= low)
    assert run.report().layers[0].steps["bf16"] == few and len(few) == 2
    found = qd.calibrate(lambda on: sample(schedule="torch", on_attention=on), model="net")
    assert found.sigmas == tuple(sigmas)
    scales = found.scales("int8_full", margin=1.5)
    sample(schedule="int8_full", scales=scales)
    assert sum(x.total for x in scales.clipped()) == 0


def test_scales_beside_an_infinite_sigma(tmp_path):
    pytest.importorskip("safetensors")
    sigmas = (math.inf, 8.0, 2.0)
    x = {s: rand(1, 16, 2, 8) * (i + 1) for i, s in enumerate(sigmas)}

    def watch(on):
        for step, s in enumerate(sigmas):
            on(Place("a", step, s, None, 3), x[s], x[s], x[s])

    qd.calibrate(watch, model="net", k_means=True).save(tmp_path / "net.safetensors")
    found = qd.Calibration.load(tmp_path / "net.safetensors", sigmas=sigmas)
    assert found.sigmas == sigmas
    scales = found.scales("int8_full", margin=1.0, k_mean="table")
    for s in sigmas:
        made = scales.values(Place("a", sigma=s))
        assert made["v_scale"] * 127 == pytest.approx(x[s].abs().amax((0, 1, 3)).numpy(), rel=1e-2)
        np.testing.assert_allclose(made["k_mean"], x[s].mean((0, 1)), rtol=1e-4)
    between = scales.values(Place("a", sigma=4.0))["v_scale"]
    assert (between > scales.values(Place("a", sigma=8.0))["v_scale"]).all()
    for beyond in (9.0, 1.0):
        with pytest.raises(qd.scales.InvalidArgument, match="beyond the calibrated 2 to 8"):
            scales.values(Place("a", sigma=beyond))
    finite = qd.calibrate(lambda on: on(Place("a", 0, 2.0), x[2.0], x[2.0], x[2.0]), model="net")
    for unseen in ("refuse", "extrapolate"):
        with pytest.raises(qd.scales.InvalidArgument, match="sigma: inf of a was not calibrated"):
            finite.scales("int8_full", unseen=unseen).values(Place("a", sigma=math.inf))
    with pytest.raises(qd.scales.InvalidArgument, match="law"):
        found.scales("int8_full", policy="law").values(Place("a", sigma=math.inf))
    with pytest.raises(qd.scales.InvalidArgument, match="reference: step 0"):
        found.scales("int8_full", policy="law", reference=0)
