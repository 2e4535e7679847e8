"""The 4-bit recipes beside SageAttention3's, simulated (tools/sim/sageattention3.py), on the same
inputs. bench/bench.py fp4 measures more of them; docs/tables/fp4-errors.md has its tables."""

from pathlib import Path

import numpy as np
import pytest
import recipe_sim
import sageattention3

import qattn

KEYS, QUERIES, SEEDS = 512, 128, 4
DATA = Path(__file__).resolve().parents[2] / "data" / "minilm_qkv.safetensors"


def relative(out, ref):
    return np.linalg.norm(out - ref) / np.linalg.norm(ref)


def rounded(head):
    """Q, K and V in f16, the same numbers in float64, and attention of these."""
    given = [x.astype(np.float16) for x in head]
    exact = [x.astype(np.float64) for x in given]
    return given, exact, recipe_sim.exact(*exact)[0]


def ours(heads, **options):
    """The library's nvfp4: mean NRMSE over heads."""
    found = []
    for given, _, ref in heads:
        operands = (x[None, :, None] for x in given)
        out = qattn.attention(*operands, recipe="nvfp4", out_dtype="float32", **options)
        found.append(relative(out[0, :, 0], ref))
    return np.mean(found)


def theirs(heads):
    """The better form of SageAttention3's."""
    found = [
        [relative(sageattention3.attention(*exact, form=f), ref) for f in sageattention3.FORMS]
        for _, exact, ref in heads
    ]
    return np.mean(found, axis=0).min()


def encoder_heads(layer):
    load_file = pytest.importorskip("safetensors.numpy").load_file
    tensors = load_file(DATA)
    q, k, v = (tensors[f"layer{layer}.{x}"][0] for x in "qkv")
    return [rounded(head) for head in zip(q[:, :QUERIES], k, v)]


@pytest.mark.parametrize("dim", [64, 128])
def test_normal_inputs(dim):
    """Q is smoothed, as SageAttention3's; without, within 2 %, what draws differ by."""
    draws = (np.random.default_rng((s, dim)) for s in range(SEEDS))
    heads = [rounded(recipe_sim.family("N(0,1)", rng, KEYS, dim, QUERIES)) for rng in draws]
    bound = theirs(heads)
    assert 0.1 < bound < 0.25  # is this attention in 4 bits?
    assert ours(heads) <= bound
    assert ours(heads, smooth_q=False) <= 1.02 * bound


@pytest.mark.parametrize("layer", range(6))
def test_tensors_of_a_model(layer):
    heads = encoder_heads(layer)
    bound = theirs(heads)
    assert 0.02 < bound < 0.25
    assert ours(heads, q_granularity=("group", 16)) <= bound
    assert ours(heads) <= 1.02 * bound  # on average below: docs/tables/fp4-errors.md


def test_blocks_of_smooth_q():
    """Formats of groups: 64 queries by default. Fewer take more of Q's mean away."""
    heads = encoder_heads(1)
    default, off, of_16, of_64, of_256 = (
        ours(heads, **options)
        for options in (
            {},
            {"smooth_q": False},
            *({"q_granularity": ("group", n)} for n in (16, 64, 256)),
        )
    )
    assert default == of_64
    assert of_16 < 0.95 * of_64 and of_64 < of_256 < 0.95 * off


def test_smooth_q_is_chosen():
    """For 64 queries or more of numbers; at most 64 means a sequence."""
    rng = np.random.default_rng(1)

    def plan(queries, **options):
        q, k = (rng.standard_normal((1, n, 1, 32), np.float32) for n in (queries, 64))
        return qattn.explain(q, k, k, **({"recipe": "nvfp4_qk"} | options))

    assert "smooth_q=off" in plan(63) and "smooth_q=on" in plan(64)
    assert "smooth_q=off" in plan(64, recipe="int8")
    assert "group/64" in plan(4096) and "group/128" in plan(4097)
    assert "group/16" in plan(4097, q_granularity=("group", 16))
    # What a packed sequence gives does not depend on its neighbours.
    q, starts = rng.standard_normal((128, 1, 32), np.float32), np.array([0, 30, 128], np.int32)
    text = qattn.explain(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts, recipe="nvfp4")
    assert "smooth_q=off" in text


def test_simulation_rounds_as_it_says():
    """Codes of a group by hand: the scale 3 / 6 is e4m3; 0.1 has the scale 7 / 6, 1.125 in e4m3."""
    x = np.zeros((1, 32))
    x[0, :4], x[0, 16:18] = [3, 1.1, -0.2, 0.12], [7, 0.1]
    want = np.zeros((1, 32))
    want[0, :4], want[0, 16:18] = [3, 1, -0.25, 0], [6.75, 0]
    np.testing.assert_array_equal(sageattention3.coded(x), want)


def test_simulation_of_exact_inputs():
    """Equal keys: Q's mean and K's leave nothing to round, and the result is V's mean."""
    q = np.tile(np.arange(32.0), (128, 1))
    k, v = np.tile(np.arange(32.0), (256, 1)), np.tile([6.0, -3.0, 0.75, 1.5], (256, 8))
    for form in sageattention3.FORMS:
        for causal in (False, True):
            out = sageattention3.attention(q, k, v, causal, form)
            np.testing.assert_allclose(out, v[:128], rtol=1e-12)
    with pytest.raises(ValueError, match="255 keys"):
        sageattention3.attention(q, k[:255], v[:255])
