"""Static scales belong to the recipe that they were made for: another format's would clip most codes
or waste them, so that they are refused by name, at every door."""

import numpy as np
import pytest
import torch

import qattn
import qattn.diffusion as qd
from qattn.diffusion import Place

RECIPES = ("int8", "int8_full", "int8_fp8", "fp8")
FORMATS = {name: qattn.recipe(name) for name in RECIPES}


class Net(torch.nn.Module):
    def forward(self, sample, timestep=None):
        q = sample.flatten(2).mT.repeat(1, 1, 4).unflatten(-1, (2, 8)).transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        return out.transpose(1, 2).flatten(2)[..., :4].mT.unflatten(2, sample.shape[2:])


@pytest.fixture(scope="module")
def calibrated():
    torch.manual_seed(0)
    net, x = Net(), torch.randn(1, 4, 16, 16)

    def watch(on_attention):
        with qd.attach(net, "torch", on_attention=on_attention) as run, run.at(step=0, steps=1):
            net(x)

    return net, x, qd.calibrate(watch, model="net")


def clash(recipe, made_for):
    """The operand whose scale is of another format; None: none is."""
    own, other = FORMATS[recipe], FORMATS[made_for]
    if own.qk != other.qk:
        return "q"
    coded = [x.v for x in (own, other) if x.v in ("s8", "e4m3")]
    return "v" if len(coded) == 2 and own.v != other.v else None


@pytest.mark.parametrize("made_for", RECIPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_with_scales_of_every_other(calibrated, recipe, made_for):
    net, x, found = calibrated
    role = clash(recipe, made_for)
    text = rf"{role}_scale: was made for recipe {made_for}, .*; recipe {recipe} has "

    def attached():
        with qd.attach(net, recipe, scales=found.scales(made_for)) as run, run.at(step=0, steps=1):
            return net(x)

    def called():
        place = Place(next(iter(found.layers)), step=0, steps=1)
        q = np.asarray(x.flatten(2).mT.repeat(1, 1, 4).unflatten(-1, (2, 8)))
        arguments = found.scales(made_for).arguments(place, q, q, q)
        if recipe in ("int8", "fp8") and FORMATS[recipe].v not in ("s8", "e4m3"):
            arguments = {n: a for n, a in arguments.items() if not n.startswith("v_")}
        return qattn.attention(q, q, q, recipe=recipe, **arguments)

    for door in (attached, called):
        if role is None:
            assert np.isfinite(np.asarray(door())).all()
        else:
            with pytest.raises(qattn.InvalidArgument, match=text):
                door()


def test_scales_for_is_of_numbers_and_names_a_recipe():
    x = np.random.default_rng(0).standard_normal((1, 20, 2, 32)).astype(np.float32)
    scale = np.full((1, 2), 0.03, np.float32)
    options = {"recipe": "int8", "q_scale": scale, "q_granularity": "per_head"}
    want = qattn.attention(x, x, x, **options)
    got = qattn.attention(x, x, x, scales_for="int8_full", **options)
    np.testing.assert_array_equal(got, want)
    with pytest.raises(qattn.InvalidArgument, match="q_scale: was made for recipe fp8, q in e4m3"):
        qattn.attention(x, x, x, scales_for=qattn.recipe("fp8"), **options)
    with pytest.raises(qattn.InvalidArgument, match="recipe: .*int9"):
        qattn.attention(x, x, x, scales_for="int9", **options)
