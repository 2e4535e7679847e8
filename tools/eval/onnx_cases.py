#!/usr/bin/env python3
"""The cases of ONNX's operator Attention, opset 23 to 25, as the wheel `onnx` generates them.

    python tools/eval/onnx_cases.py [--json FILE] [--only REGEX]

Each case that asks for no product of Q and K runs by both doors in four recipes: f32 within the
case's own tolerance of the expected output (in bfloat16 ONNX's runner allows two units), the others
within the recipe's bound of float64. The record names expected outputs that float64 itself, in
their format, would miss. A case's further outputs, the keys and values so far, are not attention's.
Exits with 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from typing import Any

if __name__ == "__main__":  # cases are small; before what reads it is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
from foreign_cases import Call, Row, main, record, reference  # noqa: E402

INPUTS = "Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"
SCORES = 3  #: the place of the product of Q and K among the outputs
BF16 = 2.0**-6  #: what ONNX's runner takes for a relative tolerance there, at least


def generated() -> tuple[str, list[Any]]:
    """(onnx's version, its cases of Attention, those left out that repeat one in other nodes)."""
    try:
        import onnx
        from onnx.backend.test.case.node import collect_testcases
    except ImportError:
        sys.exit("needs the package onnx, 1.20 or later: pip install 'onnx>=1.20'")
    np.random.seed(0)  # some of the cases draw from it as it stands
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        found = collect_testcases("Attention")
    return onnx.__version__, [x for x in found if not x.name.endswith("_expanded") and single(x)]


def single(case: Any) -> bool:
    nodes = case.model.graph.node
    return len(nodes) == 1 and nodes[0].op_type == "Attention"


def gives_scores(case: Any) -> bool:
    outputs = case.model.graph.node[0].output
    return len(outputs) > SCORES and outputs[SCORES] != ""


def attributes(case: Any) -> dict[str, Any]:
    from onnx import helper

    return {x.name: helper.get_attribute_value(x) for x in case.model.graph.node[0].attribute}


def heads_apart(x: np.ndarray, heads: int | None) -> np.ndarray:
    """(B, H, S, D) of (B, S, H * D); others as they are."""
    if x.ndim == 4:
        return x
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def padded(mask: np.ndarray, keys: int) -> np.ndarray:
    """Keys that a mask does not reach are hidden."""
    missing = keys - mask.shape[-1]
    if missing <= 0:
        return mask
    hidden = False if mask.dtype == bool else -np.inf
    return np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, missing)], constant_values=hidden)


def call_of(case: Any) -> Call:
    """ONNX's words in ours. Its causal is top left; behind past keys it goes on where they end, and
    with lengths each sequence's last query stands at its last key."""
    names = [x for x in case.model.graph.node[0].input]
    given = iter(case.data_sets[0][0])
    tensors = {name: next(given) for name, own in zip(INPUTS, names) if own}
    said = attributes(case)
    kv_heads = said.get("kv_num_heads")
    q = heads_apart(tensors["Q"], said.get("q_num_heads"))
    k, v = (heads_apart(tensors[x], kv_heads) for x in ("K", "V"))
    offset = 0
    if "past_key" in tensors:
        offset = tensors["past_key"].shape[2]
        k = np.concatenate([tensors["past_key"], k], axis=2)
        v = np.concatenate([tensors["past_value"], v], axis=2)
    mask = tensors.get("attn_mask")
    return Call(
        q, k, v,
        scale=said.get("scale"),
        softcap=said.get("softcap", 0.0),
        mask=None if mask is None else padded(mask, k.shape[2]),
        causal=bool(said.get("is_causal", 0)),
        window=(said.get("left_window_size", -1), said.get("right_window_size", -1)),
        offset=offset,
        lengths=tensors.get("nonpad_kv_seqlen"),
        layout="bhsd" if tensors["Q"].ndim == 4 else "bshd",
    )  # fmt: skip


def away(case: Any, expected: np.ndarray, out: np.ndarray) -> str:
    """What ONNX's tolerance says against an output, or nothing."""
    rtol = max(case.rtol, BF16) if expected.dtype.name == "bfloat16" else case.rtol
    expected = expected.astype(np.float64)
    over = np.abs(out - expected) - (case.atol + rtol * np.abs(expected))
    count = int((over > 0).sum())
    return f"{count} of {out.size} numbers are outside of rtol {rtol:g}" if count else ""


def run(asked: argparse.Namespace) -> dict[str, Any]:
    version, found = generated()
    rows, differing = [], []
    for case in found:
        name = case.name.removeprefix("test_attention_")
        if gives_scores(case) or not re.search(asked.only, name):
            continue
        call, row = call_of(case), Row(name)
        expected = heads_apart(case.data_sets[0][1][0], attributes(case).get("q_num_heads"))
        row.add(call, lambda out, c=case, y=expected: away(c, y, out))
        rows.append(row)
        exact = reference(call).astype(expected.dtype).astype(np.float64)
        if away(case, expected, exact):
            differing.append(name)
    not_run = {"with the product of Q and K as an output": sum(map(gives_scores, found))}
    return record(rows, not_run, {"onnx": version, "differing": differing}, asked.commit)


if __name__ == "__main__":
    sys.exit(main(__doc__, run))
