"""qattn.diffusion.calibrate(): maxima, their file, scales by policy, clipped codes."""

import json
import re

import numpy as np
import pytest
import torch
from cases import array, normal, nrmse

import qattn
import qattn.diffusion
from qattn.diffusion import Calibration, Maxima, Place, calibrate

SIGMAS = (80.0, 8.0, 0.8, 0.08)
#: how much larger operands are at each step; neither sigma nor monotone
GROWTH = (1.0, 3.0, 0.5, 2.0)


def operands(step, seed=0, heads=4, kv_heads=2):
    """q, k, v (B, S, H, D) of one layer at one step; K has an offset, and heads differ."""
    size = GROWTH[step]
    q = normal(2, 60, heads, 32, seed=seed) * size * np.arange(1, heads + 1)[:, None] / heads
    k = normal(2, 90, kv_heads, 32, seed=seed + 1) * size
    v = normal(2, 90, kv_heads, 32, seed=seed + 2) * size
    offset = normal(1, 1, kv_heads, 32, seed=9) * 4
    return [x.astype(np.float32) for x in (q, k + offset, v)]


def runner(seeds=(0,), layers=("block.0.attn",), convert=lambda x: x):
    """What calibrate() takes: a sampler's attention calls."""

    def run(on_attention):
        for seed in seeds:
            for step, sigma in enumerate(SIGMAS):
                for layer in layers:
                    on_attention(Place(layer, step, sigma), *map(convert, operands(step, seed)))

    return run


def found(**options):
    return calibrate(runner(**options), model="net")


def by_hand(q, k=(1, 1, 1), v=(1, 1, 1), sigmas=(4.0, 2.0, 1.0)):
    """A calibration of one layer "a" with one head and these maxima."""
    q, k, v = (np.asarray(x, np.float32)[:, None] for x in (q, k, v))
    return Calibration("net", sigmas, {"a": Maxima(q, k, k / 2, v)})


def place(step=None, sigma=None, layer="a", **more):
    return Place(layer, step, sigma, **more)


# ---- What is collected ---------------------------------------------------------------------------


@pytest.mark.parametrize("convert", [lambda x: x, torch.from_numpy], ids=["numpy", "torch"])
def test_maxima_are_those_of_all_runs(convert):
    made = calibrate(runner((0, 5), convert=convert), model="net", k_means=True)
    maxima = made.layers["block.0.attn"]
    assert made.sigmas == SIGMAS and made.steps == 4 and made.model == "net"
    for step in range(4):
        both = [operands(step, seed) for seed in (0, 5)]
        q, k, v = (np.stack(x) for x in zip(*both))  # (runs, B, S, H, D)
        mean = k.mean(2, keepdims=True)
        axes = (0, 1, 2, 4)
        np.testing.assert_array_equal(maxima.q[step], np.abs(q).max(axes))
        np.testing.assert_array_equal(maxima.k[step], np.abs(k).max(axes))
        np.testing.assert_array_equal(maxima.v[step], np.abs(v).max(axes))
        np.testing.assert_allclose(maxima.k_centred[step], np.abs(k - mean).max(axes), rtol=1e-5)
        np.testing.assert_allclose(maxima.k_mean[step], mean.mean((0, 1, 2)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_and_views_are_taken(dtype):
    q = torch.randn(2, 4, 60, 32).to(dtype).transpose(1, 2)
    made = calibrate(lambda on: on(place(0), q, q, q), model="net")
    np.testing.assert_array_equal(made.layers["a"].q[0], array(q.abs().amax((0, 1, 3))))
    assert made.sigmas is None


def test_layers_and_steps_that_were_not_seen():
    def run(on_attention):
        on_attention(place(0, layer="a"), *operands(0))  # which tells not that there are four
        on_attention(place(2, layer="b", steps=4), *operands(2))

    made = calibrate(run, model="net")
    assert made.steps == 4
    assert made.layers["a"].seen.tolist() == [True, False, False, False]
    assert made.layers["b"].seen.tolist() == [False, False, True, False]
    with pytest.raises(qattn.InvalidArgument, match="step: step 2 of a was not calibrated"):
        made.scales("int8").values(place(2))


def test_a_place_with_a_sigma_alone_finds_its_step():
    made = calibrate(
        lambda on: [on(place(sigma=s), *operands(i)) for i, s in enumerate(SIGMAS)],
        model="net",
        sigmas=SIGMAS,
    )
    np.testing.assert_array_equal(made.layers["a"].q, found().layers["block.0.attn"].q)


@pytest.mark.parametrize(
    "calls, says",
    [
        ([(place(layer=""), 4)], "place: has no layer"),
        ([(place(), 4)], "place: a has no step"),
        ([(place(1, steps=20), 4)], "place: a runs in 20 steps, and 4 are calibrated"),
        ([(place(4), 4)], "place: a is at step 4, and the schedule has 4 sigmas"),
        ([(place(1, 7.0), 4)], "place: a is at step 1 with sigma 7, whose sigma is 8"),
        ([(place(sigma=3.0), 4)], "place: sigma 3 of a is not in `sigmas`"),
        ([(place(0), 4), (place(1), 8)], "q: a has 8 heads, and had 4 before"),
        ([], "layers: there are none"),
    ],
)
def test_refusals_of_runs(calls, says):
    def run(on_attention):
        for where, heads in calls:
            on_attention(where, *operands(0, heads=heads))

    with pytest.raises(qattn.InvalidArgument, match=re.escape(says)):
        calibrate(run, model="net", sigmas=SIGMAS)


def test_places_that_change_their_schedule():
    def run(*places):
        return lambda on: [on(x, *operands(0)) for x in places]

    with pytest.raises(qattn.InvalidArgument, match="runs in 6 steps, and 4 are calibrated"):
        calibrate(run(place(0, steps=4), place(0, steps=6)), model="net")
    with pytest.raises(qattn.InvalidArgument, match="at step 0 with sigma 3, whose sigma is 5"):
        calibrate(run(place(0), place(0, 5.0), place(0, 3.0)), model="net")
    assert calibrate(run(place(0), place(0, 5.0)), model="net").sigmas == (5.0,)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_values_are_named_by_layer_and_step(bad):
    q, k, v = operands(1)
    k[1, 3, 1, 5] = bad
    with pytest.raises(qattn.InvalidArgument, match="k: a holds NaN or Inf at step 1"):
        calibrate(lambda on: on(place(1), q, k, v), model="net")


def test_sigmas_that_nothing_tells():
    calls = [(0, 80.0), (2, 0.8)]
    with pytest.raises(qattn.InvalidArgument, match="sigmas: nothing tells that of step 1"):
        calibrate(lambda on: [on(place(*c), *operands(c[0])) for c in calls], model="net")


@pytest.mark.parametrize(
    "sigmas, says",
    [
        ([80, 8, 0], "step 2 has 0.0, which is not positive; leave out the final 0"),
        ([1, float("nan")], "step 1 has nan"),
        ([1, 3, 2], "rise and fall"),
        ([], "is empty"),
        ("abc", "'abc' is not a list of numbers"),
    ],
)
def test_sigmas_that_are_none(sigmas, says):
    with pytest.raises(qattn.InvalidArgument, match=re.escape(f"sigmas: {says}")):
        calibrate(runner(), model="net", sigmas=sigmas)


# ---- The file ------------------------------------------------------------------------------------


@pytest.mark.parametrize("k_means", [False, True])
def test_file_round_trip(tmp_path, k_means):
    layers = ("block.0.attn", "a", "0.x")
    made = calibrate(runner(layers=layers), model="some/net", k_means=k_means)
    made.save(tmp_path / "net.safetensors")
    back = Calibration.load(tmp_path / "net.safetensors", model="some/net", sigmas=SIGMAS)
    assert (back.model, back.sigmas, tuple(back.layers)) == ("some/net", SIGMAS, layers)
    for name, maxima in made.layers.items():
        for kind in ("q", "k", "k_centred", "v", "k_mean"):
            np.testing.assert_array_equal(getattr(maxima, kind), getattr(back.layers[name], kind))


def test_file_without_sigmas_and_with_gaps(tmp_path):
    made = calibrate(lambda on: on(place(1), *operands(1)), model="net")
    made.save(tmp_path / "net.safetensors")
    back = Calibration.load(tmp_path / "net.safetensors")
    assert back.sigmas is None and back.layers["a"].seen.tolist() == [False, True]
    with pytest.raises(qattn.InvalidArgument, match="sigmas: are asked for, and .* has none"):
        Calibration.load(tmp_path / "net.safetensors", sigmas=SIGMAS)


def test_a_file_of_something_else_is_refused(tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / "net.safetensors"
    found().save(path)
    with pytest.raises(qattn.InvalidArgument, match="model: 'other' is asked for, and .* 'net'"):
        Calibration.load(path, model="other")
    with pytest.raises(qattn.InvalidArgument, match="sigmas: step 1 is asked for with 7, .* 8"):
        Calibration.load(path, sigmas=(80, 7, 0.8, 0.08))
    with pytest.raises(qattn.InvalidArgument, match="sigmas: 3 steps are asked for, and .* has 4"):
        Calibration.load(path, sigmas=(80, 8, 0.8))
    with pytest.raises(FileNotFoundError):
        Calibration.load(tmp_path / "none.safetensors")
    path.write_bytes(b"nonsense")
    with pytest.raises(qattn.InvalidArgument, match="is no .safetensors file"):
        Calibration.load(path)
    save_file({"a.q": np.ones((1, 1), np.float32)}, path)
    with pytest.raises(qattn.InvalidArgument, match="format and version"):
        Calibration.load(path)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"a.v": None}, "missing 1 required positional argument: 'v'"),
        ({"b.q": np.ones((3, 1))}, "tensor b.q belongs to no layer"),
        ({"a.q": np.ones((2, 1))}, "layers: have [2, 3] steps"),
        ({"a.k": np.ones((2, 1))}, "a.k: shape (2, 1) does not fit (3, 1)"),
        ({"a.v": np.ones((3, 2))}, "a.v: shape (3, 2) does not fit (3, 1)"),
        ({"a.q": -np.ones((3, 1))}, "a.q: has a maximum that is negative, NaN or Inf"),
        ({"a.v": np.full((3, 1), np.nan)}, "a.v: has a maximum that is negative, NaN or Inf"),
        ({"sigmas": "[1, 3, 2]"}, "sigmas: rise and fall"),
        ({"sigmas": "nonsense"}, "Expecting value"),
        ({"layers": None}, "'layers'"),
    ],
)
def test_spoilt_files_are_refused(tmp_path, change, says):
    from safetensors.numpy import save_file

    tensors = {f"a.{kind}": np.ones((3, 1), np.float32) for kind in ("q", "k", "k_centred", "v")}
    metadata = {"format": "qattn.diffusion.calibration", "version": "1", "model": "net",
                "sigmas": "[4, 2, 1]", "layers": json.dumps(["a"])}  # fmt: skip
    for name, value in change.items():
        part = tensors if "." in name else metadata
        part.pop(name, None)
        if value is not None:
            part[name] = value.astype(np.float32) if part is tensors else value
    save_file(tensors, tmp_path / "a.safetensors", metadata)
    with pytest.raises(qattn.InvalidArgument, match=re.escape(says)):
        Calibration.load(tmp_path / "a.safetensors")


# ---- Scales by policy ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step, sigma, q",
    [
        (0, None, 8.0),
        (2, None, 6.0),
        (None, 4.0, 8.0),
        (None, 2.0, 2.0),
        (None, 2.0 * 2**0.5, 5.0),  # half way between 4 and 2 in log sigma
        (None, 2.0 ** (1 / 4), 5.0),  # a quarter of the way from 1 to 2: 6 + (2 - 6) / 4
        (1, 4.0, 8.0),  # the sigma decides: another schedule may be sampled
        (None, 4.0 * (1 + 1e-6), 8.0),  # a rounding of the outermost one
    ],
)
def test_a_table_is_interpolated_in_log_sigma(step, sigma, q):
    scales = by_hand(q=(8, 2, 6)).scales("int8_full", margin=1.25)
    made = scales.values(place(step, sigma))
    assert set(made) == {"q_scale", "k_scale", "v_scale"}
    assert made["q_scale"] == pytest.approx([1.25 * q / 127], rel=1e-6)
    assert made["k_scale"] == pytest.approx([1.25 * 0.5 / 127], rel=1e-6)
    assert made["q_scale"].dtype == np.float32


def test_steps_of_one_sigma_are_one():
    scales = by_hand(q=(8, 2, 6), sigmas=(4.0, 4.0, 1.0)).scales("int8", margin=1)
    assert scales.values(place(1))["q_scale"] == pytest.approx([8 / 127])
    assert scales.values(place(sigma=2.0))["q_scale"] == pytest.approx([7 / 127])


def test_unseen_sigmas_are_refused_or_extrapolated():
    made = by_hand(q=(8, 2, 6), k=(2, 4, 8))
    refusing = made.scales("int8", margin=1)
    with pytest.raises(qattn.InvalidArgument, match="sigma: 0.5 of a is beyond .* 1 to 4"):
        refusing.values(place(sigma=0.5))
    with pytest.raises(qattn.InvalidArgument, match="sigma: 9 of a is beyond"):
        refusing.values(place(sigma=9.0))
    further = made.scales("int8", margin=1, unseen="extrapolate", smooth_k=False)
    # One halving beyond 1: the line through 2 and 6 goes on to 10; of K from 4 and 8 to 12.
    below = further.values(place(sigma=0.5))
    assert below["q_scale"] == pytest.approx([10 / 127])
    assert below["k_scale"] == pytest.approx([12 / 127])
    # Beyond 4: 14 for Q. K falls towards it, and keeps the outermost one's.
    above = further.values(place(sigma=8.0))
    assert above["q_scale"] == pytest.approx([14 / 127])
    assert above["k_scale"] == pytest.approx([2 / 127])


def test_refusals_of_places():
    scales = by_hand(q=(8, 2, 6)).scales("int8")
    for where, says in (
        (place(3), "step: step 3 of a was not calibrated"),
        (place(1, steps=20), "step: 1 of 20 of a, and 3 steps were calibrated"),
        (place(), "place: a has neither step nor sigma"),
        (place(sigma=0.0), "sigma: 0.0 of a is not positive"),
        (place(0, layer="b"), "layer: 'b' was not calibrated in 'net'"),
    ):
        with pytest.raises(qattn.InvalidArgument, match=re.escape(says)):
            scales.values(where)


def test_one_maximum_has_no_unseen_step():
    scales = by_hand(q=(8, 2, 6)).scales("int8", policy="max", margin=1)
    for where in (place(1), place(sigma=1e-3), place(), place(17, steps=50)):
        assert scales.values(where)["q_scale"] == pytest.approx([8 / 127])


def test_the_law_is_that_of_scheduled_scale():
    made = by_hand(q=(8, 2, 6))
    for reference, largest in ((None, 2), (0, 8)):
        scales = made.scales("int8", policy="law", margin=1, reference=reference)
        at = 1 if reference is None else reference
        for step, sigma in enumerate(made.sigmas):
            wanted = qattn.scheduled_scale(largest / 127, made.sigmas, at, step)
            assert scales.values(place(step))["q_scale"] == pytest.approx([wanted], rel=1e-6)
            assert scales.values(place(sigma=sigma))["q_scale"] == pytest.approx([wanted], rel=1e-6)
    without = by_hand(q=(8, 2, 6), sigmas=None)
    with pytest.raises(qattn.InvalidArgument, match="policy: law needs sigmas"):
        without.scales("int8", policy="law")
    assert without.scales("int8", margin=1).values(place(1))["q_scale"] == pytest.approx([2 / 127])
    with pytest.raises(qattn.InvalidArgument, match="place: a tells no step"):
        without.scales("int8").values(place(sigma=2.0))


@pytest.mark.parametrize(
    "options, says",
    [
        ({"policy": "sigma"}, "policy: 'sigma' is not one of table, max, law"),
        ({"unseen": "clamp"}, "unseen: 'clamp' is not one of refuse, extrapolate"),
        ({"policy": "max", "unseen": "extrapolate"}, "unseen: belongs to policy table"),
        ({"reference": 1}, "reference: belongs to policy law, not to table"),
        ({"margin": 0}, "margin: 0.0 is not positive"),
        ({"margin": float("inf")}, "margin: inf is not positive"),
        ({"policy": "law", "reference": 3}, "reference: step 3 is not one of 3"),
        ({"recipe": "bf16"}, "recipe: bf16 has no codes"),
        ({"recipe": "auto"}, "recipe: auto has no codes"),
        ({"recipe": "mxfp8"}, "recipe: mxfp8 has q in mxfp8, whose scales belong to groups"),
        ({"recipe": "nvfp4_qk"}, "recipe: nvfp4_qk has q in nvfp4"),
    ],
)
def test_refusals_of_scales(options, says):
    with pytest.raises(qattn.InvalidArgument, match=re.escape(says)):
        by_hand(q=(8, 2, 6)).scales(**{"recipe": "int8", **options})


@pytest.mark.parametrize(
    "recipe, q, v", [("int8", 127, None), ("int8_fp8", 127, 448), ("fp8", 448, 448)]
)
def test_scales_fit_the_formats(recipe, q, v):
    made = by_hand(q=(8, 2, 6)).scales(recipe, margin=1).values(place(0))
    assert made["q_scale"] == pytest.approx([8 / q])
    assert made["k_scale"] == pytest.approx([0.5 / q])
    assert ("v_scale" in made) == (v is not None)
    if v:
        assert made["v_scale"] == pytest.approx([1 / v])


def test_values_that_are_all_zero_have_a_scale():
    made = by_hand(q=(0, 2, 6)).scales("int8").values(place(0))
    assert made["q_scale"].tolist() == [2.0**-126]


# ---- In attention --------------------------------------------------------------------------------

RECIPES = ["int8", "int8_full", "int8_fp8", "fp8"]


def dynamic(recipe):
    """One scale a head, but from the values: what a table can be as good as."""
    codes = qattn.recipe(recipe)
    roles = "qk" if codes.v == "none" else "qkv"
    return {f"{role}_granularity": "per_head" for role in roles} | {"balance_k": False}


def at(step):
    return place(step, SIGMAS[step], layer="block.0.attn")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_table_is_as_good_as_dynamic_scales(recipe):
    """On other inputs of the same steps; one maximum and the law are worse where steps differ."""
    made = found(seeds=range(4))
    errors = {}
    for policy in ("dynamic", "table", "max", "law"):
        for step in range(4):
            q, k, v = operands(step, seed=70)
            options = dynamic(recipe)
            if policy != "dynamic":
                options = made.scales(recipe, policy=policy).arguments(at(step), q, k, v)
            out = qattn.attention(q, k, v, recipe=recipe, **options)
            errors.setdefault(policy, []).append(nrmse(out, qattn.reference_attention(q, k, v)))
    # The margin of 1.1, and the largest of eight heads instead of one's own: 1.27.
    for table, exact in zip(errors["table"], errors["dynamic"]):
        assert table < 1.35 * exact
    if recipe.startswith("int8"):
        assert errors["max"][0] > 1.25 * errors["table"][0]
    assert max(errors["law"]) > 8 * max(errors["table"])


@pytest.mark.parametrize("recipe", ["int8", "int8_full", "fp8"])
def test_a_mean_of_the_table_is_as_good_as_the_calls_own(recipe):
    """K's offset is 4: without a mean its codes are spent on that."""
    made = calibrate(runner(seeds=range(4)), model="net", k_means=True)
    own, table = (made.scales(recipe, k_mean=mean) for mean in ("own", "table"))
    for step in range(4):
        given = operands(step, seed=70)
        exact = qattn.reference_attention(*given)
        errors = {}
        for name, scales in (("own", own), ("table", table)):
            for convert in (lambda x: x, torch.from_numpy):
                q, k, v = map(convert, given)
                options = scales.arguments(at(step), q, k, v)
                assert ("k_mean" in options) == (name == "table")
                out = array(qattn.attention(q, k, v, recipe=recipe, **options))
                errors.setdefault(name, []).append(nrmse(out, exact))
        assert errors["table"][0] == errors["table"][1]
        assert errors["table"][0] < 1.1 * errors["own"][0]
    nearest = table.values(place(None, SIGMAS[1] * 1.2, layer="block.0.attn"))["k_mean"]
    np.testing.assert_array_equal(nearest, table.values(at(1))["k_mean"])
    mean = made.scales(recipe, policy="max", k_mean="table").values(at(0))["k_mean"]
    np.testing.assert_allclose(mean, made.layers["block.0.attn"].k_mean.mean(0), rtol=1e-6)


def test_means_that_are_not_there_are_refused():
    with pytest.raises(qattn.InvalidArgument, match="k_mean: of no table"):
        found().scales("int8", k_mean="table")
    kept = calibrate(runner(), model="net", k_means=True)
    with pytest.raises(qattn.InvalidArgument, match="smooth_k is off"):
        kept.scales("int8", k_mean="table", smooth_k=False)
    with pytest.raises(qattn.InvalidArgument, match="k_mean: 'none' is not one of own, table"):
        kept.scales("int8", k_mean="none")


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_torch_and_numpy_agree_in_both_layouts(layout):
    made = found().scales("int8_full")
    given = operands(1)
    if layout == "bhsd":
        given = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in given]
    outputs = []
    for convert in (lambda x: x, torch.from_numpy):
        q, k, v = map(convert, given)
        options = made.arguments(at(1), q, k, v, layout=layout)
        outputs.append(
            array(qattn.attention(q, k, v, recipe="int8_full", layout=layout, **options))
        )
    np.testing.assert_array_equal(*outputs)


def test_the_provider_gives_what_attention_takes():
    scales = found().scales("int8_full")
    q, k, v = map(torch.from_numpy, operands(2))
    made = scales(at(2))
    assert set(made) == {"q_scale", "k_scale", "v_scale", "saturated", "made_for"}
    wanted = scales.arguments(at(2), q, k, v)
    for role in "qkv":
        assert made[f"{role}_scale"].shape == (q.shape[2] if role == "q" else k.shape[2],)
        own = wanted[f"{role}_scale"]
        torch.testing.assert_close(made[f"{role}_scale"], own[0, :, 0] if role == "v" else own[0])
    # s8 values have a scale a token in every kernel, which costs no memory here.
    assert wanted["v_granularity"] == "per_token" and wanted["v_scale"].stride() == (0, 1, 0)
    assert wanted["v_scale"].shape == (2, 2, 90) and wanted["q_granularity"] == "per_head"
    assert found().scales("int8", smooth_k=False)(at(2))["smooth_k"] is False


def test_other_heads_than_calibrated_are_refused():
    scales = found().scales("int8")
    with pytest.raises(qattn.InvalidArgument, match="q: has 8 heads, and block.0.attn was .* 4"):
        scales.arguments(at(0), *operands(0, heads=8))
    with pytest.raises(qattn.InvalidArgument, match="k: has 4 heads, and block.0.attn was .* 2"):
        scales.arguments(at(0), *operands(0, kv_heads=4))
    assert scales.clipped() == []


def test_k_is_scaled_as_it_is_smoothed():
    """K has an offset: its scale less the mean clips where the mean stays."""
    made = found()
    q, k, v = operands(0)
    for smooth_k in (True, False):
        scales = made.scales("int8", smooth_k=smooth_k)
        qattn.attention(q, k, v, recipe="int8", **scales.arguments(at(0), q, k, v))
        assert [x.total for x in scales.clipped()] == [0]
    wrong = {**made.scales("int8").arguments(at(0), q, k, v), "smooth_k": False}
    with pytest.raises(qattn.InvalidArgument, match="k less its mean; the call has k with its"):
        qattn.attention(q, k, v, recipe="int8", **wrong)
    qattn.attention(q, k, v, recipe="int8", **{**wrong, "scales_for": None})
    assert wrong["saturated"][1] > 1000


@pytest.mark.parametrize("inference", [False, True])
def test_clipped_codes_are_counted_by_layer_and_step(inference):
    scales = found().scales("int8_full", margin=0.5)
    expected = {}
    with torch.inference_mode(inference):
        for call, step in enumerate((0, 1, 1, 3)):
            q, k, v = map(torch.from_numpy, operands(step, seed=call))
            options = scales.arguments(at(step), q, k, v)
            qattn.attention(q, k, v, recipe="int8_full", **options)
            # By hand: codes beyond 127 after rounding. K is less its mean.
            values = (q, k - k.mean(1, keepdim=True), v)
            for i, (role, x) in enumerate(zip("qkv", values)):
                wide = options[f"{role}_scale"].reshape(2, x.shape[2], -1).mT[..., None]
                clipped = int(((x / wide).round().abs() > 127).sum())
                expected.setdefault(step, [0, 0, 0])[i] += clipped
    rows = scales.clipped()
    assert [(x.layer, x.step, x.calls) for x in rows] == [
        ("block.0.attn", 0, 1), ("block.0.attn", 1, 2), ("block.0.attn", 3, 1)
    ]  # fmt: skip
    for row in rows:
        assert min(row.q, row.k, row.v) > 0 and row.total == row.q + row.k + row.v
        # A rounding on the edge is 1 of thousands.
        np.testing.assert_allclose((row.q, row.k, row.v), expected[row.step], rtol=0.02)


def test_a_margin_leaves_room():
    """Inputs a tenth larger than calibration's are clipped without a margin, and not with it."""
    made = found()
    q, k, v = (x * np.float32(1.09) for x in operands(1))
    totals = []
    for margin in (1.0, 1.1, 2.0):
        scales = made.scales("int8_full", margin=margin)
        out = qattn.attention(q, k, v, recipe="int8_full", **scales.arguments(at(1), q, k, v))
        totals.append((scales.clipped()[0].total, nrmse(out, qattn.reference_attention(q, k, v))))
    assert totals[0][0] > 0 and totals[1][0] == totals[2][0] == 0
    assert totals[1][1] < totals[2][1]  # room costs bits


# ---- With the hooks on a model -------------------------------------------------------------------


class Layer(torch.nn.Module):
    """x + self-attention of x, two heads of 32."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(64, 192)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (2, 32)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return x + out.transpose(1, 2).flatten(2)


def test_calibrated_through_attach():
    attach = qattn.diffusion.attach
    torch.manual_seed(0)
    net = torch.nn.Sequential(Layer(), Layer())

    def sample(run, seed):
        generator, x = torch.Generator().manual_seed(seed), torch.zeros(1, 50, 64)
        with torch.inference_mode():
            for step, sigma in enumerate((8.0, 2.0, 0.5)):
                with run.at(step=step, steps=3, sigma=sigma):
                    noise = torch.randn(x.shape, generator=generator) * sigma
                    x = net(x + noise) / (1 + sigma)
        return x

    def observe(on_attention):
        with attach(net, "torch", on_attention=on_attention) as run:
            sample(run, 1), sample(run, 2)

    made = calibrate(observe, model="net")
    assert made.sigmas == (8.0, 2.0, 0.5) and tuple(made.layers) == ("0", "1")
    scales = made.scales("int8_full")
    outputs = []
    for recipe, given in (("torch", None), ("int8_full", None), ("int8_full", scales)):
        with attach(net, recipe, scales=given) as run:
            outputs.append(sample(run, 3))
    exact, dynamic, static = outputs
    assert nrmse(static, exact) < 1.5 * nrmse(dynamic, exact)
    assert not torch.equal(static, dynamic)
    rows = [(x.layer, x.step, x.calls) for x in scales.clipped()]
    assert sorted(rows) == [(layer, step, 1) for layer in "01" for step in range(3)]
