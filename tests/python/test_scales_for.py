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


def test_scales_are_of_rows_with_or_less_their_mean():
    x = 5 + np.random.default_rng(0).standard_normal((1, 20, 2, 32)).astype(np.float32)
    options = {"recipe": "int8", "k_scale": np.full((1, 2), 0.06, np.float32)}
    options["k_granularity"] = "per_head"
    for told in (None, True, False):
        for asked in (None, True, False):
            made_for = qattn.MadeFor("int8_full", smooth_k=told)
            given = {"scales_for": made_for, "smooth_k": asked, **options}
            if (told is False) == (asked is False):
                assert np.isfinite(qattn.attention(x, x, x, **given)).all()
                continue
            words = ["with its mean", "less its mean"]
            text = "k_scale: was made for recipe int8_full, k {}; the call has k {}".format(
                *(words if told is False else reversed(words))
            )
            with pytest.raises(qattn.InvalidArgument, match=f"^{text}$"):
                qattn.attention(x, x, x, **given)
    turned = qattn.MadeFor(qattn.recipe("int8"), rotate=True)
    with pytest.raises(qattn.InvalidArgument, match="k rotated; the call has k not rotated"):
        qattn.attention(x, x, x, scales_for=turned, **options)
    with pytest.raises(qattn.InvalidArgument, match="scales_for: rotate: 1 is neither"):
        qattn.attention(x, x, x, scales_for=qattn.MadeFor("int8", rotate=1), **options)


@pytest.mark.parametrize("smooth_k", [True, False])
def test_tables_say_whether_k_was_less_its_mean(calibrated, smooth_k):
    net, x, found = calibrated
    scales = found.scales("int8", smooth_k=smooth_k)
    with qd.attach(net, "int8", scales=scales) as run, run.at(step=0, steps=1):
        assert np.isfinite(np.asarray(net(x))).all()
    place = Place(next(iter(found.layers)), step=0, steps=1)
    q = np.asarray(x.flatten(2).mT.repeat(1, 1, 4).unflatten(-1, (2, 8)))
    arguments = scales.arguments(place, q, q, q)
    assert np.isfinite(qattn.attention(q, q, q, recipe="int8", **arguments)).all()
    arguments["smooth_k"] = not smooth_k
    with pytest.raises(qattn.InvalidArgument, match="k_scale: was made for recipe int8, k "):
        qattn.attention(q, q, q, recipe="int8", **arguments)


def own_scales(made_for, smooth_k):
    """What a caller's own table gives; its smooth_k is of its scales."""
    scale = torch.full((2,), 0.05)
    return {"q_scale": scale, "k_scale": scale, "smooth_k": smooth_k, "made_for": made_for}


def test_a_table_of_the_callers_own(calibrated):
    net, x, _ = calibrated
    for smooth_k in (True, False):
        with qd.attach(net, "int8", scales=lambda place: own_scales("int8_full", smooth_k)) as run:
            with run.at(step=0, steps=1):
                assert np.isfinite(np.asarray(net(x))).all()
    other = own_scales(qattn.MadeFor("int8", smooth_k=True), False)
    with qd.attach(net, "int8", scales=lambda place: other) as run, run.at(step=0, steps=1):
        with pytest.raises(qattn.InvalidArgument, match="k less its mean; the call has k with"):
            net(x)


@pytest.mark.parametrize("made_for", RECIPES)
@pytest.mark.parametrize("format", ["s8", "e4m3"])
@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_quantize_with_scales_of_every_recipe(role, format, made_for):
    x = np.random.default_rng(0).standard_normal((1, 20, 2, 32)).astype(np.float32)
    options = {"role": role, "format": format, "granularity": "per_head"}
    options |= {"static_scale": np.full((1, 2), 0.06, np.float32), "scales_for": made_for}
    made = FORMATS[made_for].v if role == "v" else FORMATS[made_for].qk
    for smooth in (False, True):
        less = role == "k"  # what a recipe does by itself
        if made == format and smooth == less:
            assert qattn.quantize(x, smooth=smooth, **options).format == format
            continue
        text = f"static_scale: was made for recipe {made_for}, {role} "
        if made != format:
            text += f"in {made}; the call has {role} in {format}$"
        with pytest.raises(qattn.InvalidArgument, match=text):
            qattn.quantize(x, smooth=smooth, **options)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("format", ["s8", "e4m3"])
def test_codes_know_their_format_and_their_mean(recipe, format):
    x = 5 + np.random.default_rng(0).standard_normal((1, 20, 2, 32)).astype(np.float32)
    k = qattn.quantize(x, format=format, smooth=True)
    options = {"recipe": recipe, "scales_for": "fp8", "return_lse": True}
    if FORMATS[recipe].qk != format:
        with pytest.raises(qattn.InvalidArgument, match=f"k: format {format} differs from"):
            qattn.attention(x, k, x, **options)
        return
    want = qattn.reference_attention(x, x, x, return_lse=True)[1]
    np.testing.assert_allclose(qattn.attention(x, k, x, **options)[1], want, atol=2)  # of 140


def test_scales_for_without_a_scale_is_refused():
    x = np.random.default_rng(0).standard_normal((1, 20, 2, 32)).astype(np.float32)
    given = {"scales_for": qattn.MadeFor("int8", smooth_k=False), "smooth_k": False}
    for recipe in ("auto", "int8", "fp8", "f32"):
        with pytest.raises(qattn.InvalidArgument, match="^scales_for: is given without q_scale"):
            qattn.attention(x, x, x, recipe=recipe, scales_for="int8")
    with pytest.raises(qattn.InvalidArgument, match="^scales_for: reference_attention.. takes"):
        qattn.reference_attention(x, x, x, scales_for="int8")
    with pytest.raises(qattn.InvalidArgument, match="^scales_for: is given without static_scale"):
        qattn.quantize(x, format="s8", scales_for="int8")
    # Of codes alone, or of one operand's static scale: taken.
    k = qattn.quantize(x, format="s8")
    assert np.isfinite(qattn.attention(x, k, x, recipe="int8", scales_for="int8")).all()
    given |= {"k_scale": np.full((1, 2), 0.05, np.float32), "k_granularity": "per_head"}
    assert np.isfinite(qattn.attention(x, x, x, recipe="int8", **given)).all()
