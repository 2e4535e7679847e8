"""What it costs that V's codes are 128 larger where u8 P meets them on GPUs (docs/NUMERICS.md).

Usage: python3 direct_sums.py [--seed 0] [--keys 1024 32768 131072]
Needs numpy only. Sums as u8_sum_as_float() and RowState::add_excess() make them, ended as
Epilogue::scale_rows() does, against the same codes and weights in float64. N(0,1) scores; V's
channel 0 is zeros.
"""

import argparse

import numpy as np

SHARE_UNIT, VALUE_UNIT, BIT = 2.0**90, 2.0**59, 2.0**-149
ROWS, CHANNELS, TILE = 64, 32, 128
F32 = np.float32


def fma(a, b, c):
    """a * b + c, which float64 holds but for its last bits, rounded to float32."""
    return (np.asarray(a, np.float64) * b + c).astype(F32)


def simulate(keys, rng):
    """NRMSE of the other channels; |channel 0|, in units of V's code."""
    scores = rng.standard_normal((ROWS, keys)) * np.log2(np.e)
    v = np.clip(np.rint(rng.standard_normal((keys, CHANNELS)) * 127 / 3.2), -127, 127)
    v[:, 0] = 0
    out, excess = np.zeros((ROWS, CHANNELS), F32), np.zeros((ROWS, 4), F32)
    exact, mass = np.zeros((ROWS, CHANNELS)), np.zeros(ROWS)
    reference = scores[:, -TILE:].max(1)
    lane = np.arange(TILE) % 8 // 2
    for first in range(keys - TILE, -1, -TILE):
        tile, codes = scores[:, first : first + TILE], v[first : first + TILE]
        top = tile.max(1)
        p = np.rint(2 ** (tile - top[:, None]) * 255)
        share = (2 ** (top - reference) / 255 * SHARE_UNIT).astype(F32).astype(np.float64)
        out = fma((p @ (codes + 128)) * BIT, share[:, None], out)
        for t in range(4):
            excess[:, t] = fma(p[:, lane == t].sum(1) * BIT, share, excess[:, t])
        exact += (p @ codes) * (share / SHARE_UNIT)[:, None]
        mass += p.sum(1) * share / SHARE_UNIT
    total = (excess[:, 0] + excess[:, 1]) + (excess[:, 2] + excess[:, 3])
    by = (F32(1) / mass.astype(F32)) * F32(VALUE_UNIT)
    less = total * F32(-128) * by
    got = fma(out, by[:, None].astype(np.float64), less[:, None]).astype(np.float64)
    want = exact / mass[:, None]
    error = np.linalg.norm(got[:, 1:] - want[:, 1:]) / np.linalg.norm(want[:, 1:])
    return error, np.abs(got[:, 0])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keys", type=int, nargs="+", default=[1024, 32768, 131072])
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    for keys in args.keys:
        error, zero = simulate(keys, rng)
        rms = np.sqrt(np.mean(zero**2))
        print(f"{keys} keys: NRMSE {error:.1e}; zeros: rms {rms:.1e}, largest {zero.max():.1e}")


if __name__ == "__main__":
    main()
