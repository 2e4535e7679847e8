"""Schedules of qattn.diffusion: rules by step, sigma and layer, and where steps come from."""

import pytest
import torch
from cases import nrmse

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
from diffusion_models import build, dit, flux, pixart, run, sd3

import qattn
import qattn.diffusion as qd
from qattn.diffusion import Place, Rule, Schedule
from qattn.diffusion.moment import Clock


class Steps:
    """A scheduler as Clock reads it."""

    def __init__(self, step=None, begin=None):
        self.timesteps = torch.tensor([900.0, 700.0, 400.0, 100.0])
        self.sigmas = torch.tensor([9.0, 7.0, 4.0, 1.0, 0.0])
        self.step_index, self.begin_index = step, begin


def loop(model, inputs, scheduler, first=0):
    """A sampler's loop around a denoiser."""
    scheduler.step_index = None
    for i in range(first, 4):
        run(model, {**inputs, "timestep": scheduler.timesteps[i].expand(1)})
        scheduler.step_index = i + 1


@pytest.mark.parametrize("rules, expected", [
    ([Rule("bf16", last=1)], {"int8_full": (0, 1, 2), "bf16": (3,)}),
    ([Rule("bf16", first=1), Rule("torch", last=2)],
     {"bf16": (0,), "int8_full": (1,), "torch": (2, 3)}),
    ([Rule("bf16", sigma=(4, 8))], {"int8_full": (0, 3), "bf16": (1, 2)}),
    ([Rule("bf16", sigma=(4, 8), last=2), Rule("f16", last=3)],
     {"int8_full": (0,), "f16": (1, 3), "bf16": (2,)}),
], ids=["last", "first and last", "sigma", "first match wins"])  # fmt: skip
def test_rules_by_step(rules, expected):
    model, inputs = build(sd3)
    with qd.attach(model, Schedule("int8_full", *rules), scheduler=Steps()) as attached:
        loop(model, inputs, attached.clock.scheduler)
    for layer in attached.report().layers:
        assert layer.steps == expected and sum(layer.calls.values()) == 4


def test_rules_by_layer():
    model, inputs = build(pixart)
    schedule = Schedule("int8_full", Rule("torch", layers="*.attn2"),
                        Rule("bf16", layers=("transformer_blocks.1.*",)))  # fmt: skip
    native = run(model, inputs)
    with qd.attach(model, schedule) as attached:
        assert nrmse(run(model, inputs), native) < 1e-3
    assert {x.layer[19:]: x.calls for x in attached.report().layers} == {
        "0.attn1": {"int8_full": 1}, "0.attn2": {"torch": 1},
        "1.attn1": {"bf16": 1}, "1.attn2": {"torch": 1},
    }  # fmt: skip
    table = str(attached.report())
    assert "transformer_blocks.0.attn2  torch" in table and table.endswith(
        "4 reached, 0 not reached, 0 did not run"
    )
    with pytest.raises(qattn.InvalidArgument, match="'\\*.attn7' matches no layer"):
        qd.attach(model, Schedule("int8_full", Rule("bf16", layers="*.attn7")))


def test_image_to_image_starts_later():
    model, inputs = build(sd3)
    seen = []
    schedule = Schedule("int8_full", Rule("bf16", first=1))
    with qd.attach(model, schedule, scheduler=Steps(begin=2),
                   on_attention=lambda place, *_: seen.append(place)) as attached:  # fmt: skip
        loop(model, inputs, attached.clock.scheduler, first=2)
    assert attached.report().layers[0].steps == {"bf16": (2,), "int8_full": (3,)}
    assert seen[0] == Place("transformer_blocks.0.attn", 2, 4.0, None, 4, 2)


def test_steps_of_schedulers_that_do_not_count():
    """DDIM's step is found by its timestep, its sigma from the products of its alphas."""
    model, inputs = build(dit)
    scheduler = diffusers.DDIMScheduler()
    scheduler.set_timesteps(4)
    seen = []
    with qd.attach(model, "f32", scheduler=scheduler,
                   on_attention=lambda place, *_: seen.append(place)):  # fmt: skip
        for t in scheduler.timesteps:
            run(model, {**inputs, "timestep": t.expand(1)})
    assert [x.step for x in seen[::2]] == [0, 1, 2, 3] and seen[0].steps == 4
    alpha = float(scheduler.alphas_cumprod[750])
    assert seen[0].sigma == pytest.approx(((1 - alpha) / alpha) ** 0.5)


@pytest.mark.parametrize("value, step", [
    (750.0, 1), (0.75, 1), (1000.0, 0), (torch.tensor([500.0, 0.0]), 2), (1.0, None), (3.0, None),
    (torch.tensor(0.5).bfloat16(), 2), (torch.tensor(749.0).bfloat16(), 1),
], ids=str)  # fmt: skip
def test_timesteps_tell_the_first_step(value, step):
    """As a scheduler lists them or as shares of the training's; not where both could be."""
    scheduler = Steps()
    scheduler.timesteps = torch.tensor([1000.0, 750.0, 500.0, 1.0])
    model = torch.nn.Identity()
    model.forward = lambda x, timestep: x
    place = Clock(scheduler).moment(model, (0,), {"timestep": value}, None)
    assert (place.step, place.steps) == (step, 4)


def test_a_loop_of_one_s_own():
    model, inputs = build(flux)
    schedule = Schedule("int8_full", Rule("bf16", last=2), Rule("f16", sigma=(8, 9)))
    with qd.attach(model, schedule) as attached:
        with pytest.raises(qattn.InvalidArgument, match=r"step is not known.*attached.at\(step"):
            run(model, inputs)
        with attached.at(step=1), pytest.raises(qattn.InvalidArgument, match="number of steps"):
            run(model, inputs)
        with attached.at(step=1, steps=4), pytest.raises(qattn.InvalidArgument, match="sigma is"):
            run(model, inputs)
        for step in range(4):
            with attached.at(step=step, steps=4, sigma=9 - 2 * step):
                run(model, inputs)
        for wrong in ({"step": -1}, {"step": 4, "steps": 4}, {"steps": 0}, {"sigma": "1"}):
            with pytest.raises(qattn.InvalidArgument), attached.at(**wrong):
                pass
    steps = {"f16": (0,), "int8_full": (1,), "bf16": (2, 3)}
    assert [x.steps for x in attached.report().layers] == [steps, steps]


def test_rules_are_checked():
    for wrong in ({"first": 0}, {"last": -1}, {"last": 2.5}, {"sigma": 3}, {"sigma": (2, 1)},
                  {"layers": ()}, {"layers": 7}, {}, {"recipe": "int7", "last": 1}):  # fmt: skip
        with pytest.raises(qattn.InvalidArgument):
            Rule(**{"recipe": "bf16", **wrong})
    with pytest.raises(qattn.InvalidArgument, match="Rule"):
        Schedule("int8_full", "bf16")
    with pytest.raises(qattn.InvalidArgument, match="name of the layer is not known"):
        Schedule("f32", Rule("bf16", layers="*")).recipe_at(Place())
