#!/usr/bin/env python3
"""Samples side by side, of what `fashion_dit.py evaluate` wrote: RESULT.json and RESULT.png.

    python tools/eval/dit_sheet.py RESULT.json -o docs/images/fashion-dit.png

The first row is float32's; behind each other row is how far it is from that, enlarged. Needs
matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

#: (recipe, policy) of the rows, beside float32's
SHOWN = (("torch", ""), ("int8_full", "table"), ("fp8", "table"))
ENLARGED = 16
_FRAME = 2  # pixels, right of and below each image
_LABEL = 1.5  # inches
_DPI = 100


def rows_of(result: Path, shown: tuple = SHOWN) -> list[tuple[str, np.ndarray]]:
    """[(what it is, grey pixels)]. Raises ValueError where the result has no such row."""
    from matplotlib.image import imread

    ways = [tuple(way) for way in json.loads(result.read_text())["sheet"]]
    whole = np.rint(imread(result.with_suffix(".png")) * 255).astype(int)
    high = len(whole) // len(ways)
    if missing := [way for way in (("float32", ""), *shown) if way not in ways]:
        raise ValueError(f"{result}: the sheet has no row of {missing}")
    by_way = {way: whole[i * high : (i + 1) * high] for i, way in enumerate(ways)}
    exact = by_way["float32", ""]
    frame = np.arange(high) >= high - _FRAME
    framed = frame[:, None] | np.tile(frame, exact.shape[1] // high)
    made = [("float32", exact)]
    for recipe, policy in shown:
        name = "torch, bf16" if recipe == "torch" else f"{recipe}, {policy}"
        apart = np.minimum(ENLARGED * np.abs(by_way[recipe, policy] - exact), 255)
        apart[framed] = 255
        made += [(name, by_way[recipe, policy]), (f"difference x {ENLARGED}", apart)]
    return made


def draw(rows: list[tuple[str, np.ndarray]], out: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    high, wide = rows[0][1].shape
    size = (_LABEL + wide / _DPI, len(rows) * high / _DPI)
    figure = plt.figure(figsize=size, dpi=_DPI)
    for number, (name, pixels) in enumerate(rows):
        top = len(rows) - number
        figure.figimage(pixels, _LABEL * _DPI, (top - 1) * high, cmap="gray", vmin=0, vmax=255)
        figure.text((_LABEL - 0.1) / size[0], (top - 0.5) / len(rows), name, ha="right",
                    va="center", fontsize=10)  # fmt: skip
    figure.savefig(out, metadata={"Software": None})
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    asked = parser.parse_args(arguments)
    draw(rows_of(asked.result), asked.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
