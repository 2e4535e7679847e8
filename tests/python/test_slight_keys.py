"""Keys under biases that leave them no weight, though not below -4096: those without weight leave
the others their codes, those with weight keep theirs. On CPUs; on GPUs tests/emulated and tests/gpu
ask for the same."""

import numpy as np
import pytest

qattn = pytest.importorskip("qattn")

RECIPES = ["int8", "int8_full", "int8_fp8", "fp8", "mxfp8", "nvfp4"]
KEYS, PLAIN = 256, 100
KEYS_BY_BIAS = {-100: 2, -300: 10, -1000: 30, -4000: 60}  # how loud keys may be


def reference(q, k, v, bias):
    scores = (
        np.einsum("bhqd,bhkd->bhqk", q, k, dtype=np.float64) / np.sqrt(q.shape[-1])
        + bias
    )
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqk,bhkd->bhqd", p / p.sum(-1, keepdims=True), v)


def nrmse(x, y):
    return np.sqrt(np.mean((x - y) ** 2) / np.mean(np.square(y)))


def tensors(seed=10):
    rng = np.random.default_rng(seed)
    return [
        rng.standard_normal((1, 2, n, 64)).astype(np.float32) for n in (40, KEYS, KEYS)
    ]


def error(q, k, v, bias, recipe):
    got = qattn.attention(q, k, v, layout="bhsd", recipe=recipe, mask=bias)
    return nrmse(got, reference(q, k, v, bias))


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("low", KEYS_BY_BIAS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_keys_without_weight_leave_the_others_their_codes(recipe, low, by_row):
    q, k, v = tensors()
    bias = np.zeros((1, 1, 40 if by_row else 1, KEYS), np.float32)
    bias[..., PLAIN:] = low
    if by_row:  # the last rows see a part of the others, too
        bias[..., 20:, :10] = low
    alone = error(q, k[:, :, :PLAIN], v[:, :, :PLAIN], bias[..., :PLAIN], recipe)
    loud = KEYS_BY_BIAS[low]
    k[:, :, PLAIN:] += loud * np.random.default_rng(1).standard_normal((1, 2, 1, 64))
    v[:, :, PLAIN:] += 30
    assert error(q, k, v, bias, recipe) < 1.3 * alone


@pytest.mark.parametrize(
    "case", ["scores make up for it", "a row sees no others", "a row's best"]
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_keys_with_weight_keep_it(recipe, case):
    """The same bits as where another row sees them without a bias; else they would be clipped."""
    q, k, v = tensors()
    bias = np.zeros((1, 1, 40, KEYS), np.float32)
    bias[..., PLAIN:] = -100
    v[:, :, PLAIN:] += 30
    if case == "scores make up for it":  # q and these keys have a part in common
        q[..., 0], k[..., 0], k[:, :, PLAIN:, 0] = 20, 0, 40
    elif case == "a row sees no others":
        bias[..., 7:9, :PLAIN] = -np.inf
    else:  # that others, whom scales are of, are worse still
        bias[..., 7:9, :PLAIN] = -300
    got = qattn.attention(q, k, v, layout="bhsd", recipe=recipe, mask=bias)
    bias[:, :, 0] = 0  # one row sees all plainly
    seen = qattn.attention(q, k, v, layout="bhsd", recipe=recipe, mask=bias)
    assert np.array_equal(got[:, :, 1:], seen[:, :, 1:])
