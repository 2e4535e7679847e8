"""SageAttention3's recipe, simulated beside ours.

Needs numpy only. One head, float64 but for what the recipe rounds. Formats are recipe_sim's.

Taken from the paper (arXiv 2505.11594) and from what its public kernel for GeForce Blackwell does:
- Q, K, V and P are e2m1 codes with one e4m3 scale, amax / 6, for 16 elements along the contraction.
  There is no scale of the tensor above them. A group whose scale rounds to 0 is 0.
- K loses its mean over the sequence. Q loses the mean of each block of 128 queries; that mean times
  K, with K as it came less its own mean, joins the scores.
- Tiles of 128 keys go from the last to the first. Row sums take P before rounding.
- P has two levels. `paper`: the maximum of a row in a tile becomes 448 * 6, then groups of 16 are
  coded as above. `kernel`: 448 * 6 is the running maximum of the row, and codes are made with the
  group's scale before that is rounded to e4m3.

Assumed, each in its favour: all that lies between is exact. The public code rounds Q and K less
their means, and the mean of Q times K, to the input's 16 bits, and exponentials are the GPU's.
Sequences are whole tiles here, so that padding does not matter.
"""

import numpy as np
from recipe_sim import block_means, e2m1, e4m3

GROUP, BLOCK, TILE = 16, 128, 128
LEVELS = 448 * 6
FORMS = ("paper", "kernel")


def coded(x, rounded_first=True):
    """Groups of 16 along the last axis. rounded_first: codes are made with the scale in e4m3."""
    g = x.reshape(*x.shape[:-1], -1, GROUP)
    exact = np.abs(g).max(-1, keepdims=True) / 6
    scale = e4m3(exact)
    by = scale if rounded_first else exact
    return (e2m1(np.divide(g, by, out=np.zeros_like(g), where=by > 0)) * scale).reshape(x.shape)


def attention(q, k, v, causal=False, form="paper"):
    """q (n, D), k (S, D), v (S, Dv) float64; S a multiple of 128. Returns (n, Dv)."""
    if form not in FORMS or len(k) % TILE != 0:
        raise ValueError(f"form: {form} of {FORMS}; {len(k)} keys: a multiple of {TILE}")
    k = k - k.mean(0)
    mean = block_means(q, BLOCK)
    s = (coded(q - mean) @ coded(k).T + mean @ k.T) / np.sqrt(q.shape[1])
    if causal:  # bottom right
        s = np.where(np.arange(len(k)) > np.arange(len(q))[:, None] + len(k) - len(q), -np.inf, s)
    v = coded(v.T).T
    n = len(q)
    # The least finite maximum: a tile of which a row sees nothing weighs nothing.
    m, l, o = np.full((n, 1), -1e300), np.zeros((n, 1)), np.zeros((n, v.shape[1]))
    for j in range(len(k) - TILE, -1, -TILE):
        x = s[:, j : j + TILE]
        top = np.maximum(m, x.max(1, keepdims=True))
        a, p = np.exp(m - top), LEVELS * np.exp(x - top)
        if form == "paper":
            row = p.max(1, keepdims=True) / LEVELS
            rounded = coded(np.divide(p, row, out=np.zeros_like(p), where=row > 0)) * row
        else:
            rounded = coded(p, rounded_first=False)
        o, l, m = o * a + rounded @ v[j : j + TILE], l * a + p.sum(1, keepdims=True), top
    return o / l
