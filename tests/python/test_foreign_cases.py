"""Kinds of attention that ONNX and ggml test, by both doors: tools/eval/foreign_cases.py.

Inputs are N(0,1), of which a recipe's bound is. A neighbour of each call, one key or one option
away, is outside of all bounds: so a case that takes the one for the other would be seen.
"""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from cases import loose, normal, nrmse

import qattn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools" / "eval"), str(ROOT / "bench")]
import foreign_cases as tool  # noqa: E402
import ggml_cases as ggml  # noqa: E402
from qbench import foreign_cases as table  # noqa: E402


def operands(queries=5, keys=9, heads=4, kv_heads=2, dim=16, dim_v=16, kv=np.float32):
    return (
        normal(2, heads, queries, dim, seed=1),
        normal(2, kv_heads, keys, dim, seed=2).astype(kv),
        normal(2, kv_heads, keys, dim_v, seed=3).astype(kv),
    )


def call(options=None, **shape):
    return tool.Call(*operands(**shape), **(options or {}))


def tokens(queries, keys):
    """q, k, v as views of (B, S, H * D), ONNX's three dimensions."""
    return [
        normal(2, length, heads * 16, seed=n).reshape(2, length, heads, 16).swapaxes(1, 2)
        for n, (length, heads) in enumerate([(queries, 4), (keys, 2), (keys, 2)])
    ]


LENGTHS = np.array([9, 6])
HIDDEN = np.where(np.arange(9) < 6, np.float32(0), np.float32(-np.inf))
#: name: (call, what its neighbour has otherwise)
KINDS = {
    "upper left": (call({"causal": True}), {"offset": 1}),
    "upper left, mask": (call({"causal": True, "mask": HIDDEN}), {"mask": None, "offset": 4}),
    "upper left behind past keys": (call({"causal": True, "offset": 4}), {"offset": 3}),
    "in the middle of keys": (call({"causal": True, "offset": 2}), {"offset": 1}),
    "lengths": (call({"lengths": LENGTHS}), {"lengths": LENGTHS - 1}),
    "lengths, causal": (call({"lengths": LENGTHS, "causal": True}), {"causal": False}),
    "lengths below queries": (
        call({"lengths": np.array([9, 3]), "causal": True}), {"lengths": np.array([9, 4])}
    ),
    "lengths, window, mask": (
        call({"lengths": LENGTHS, "causal": True, "window": (2, -1), "mask": HIDDEN}),
        {"window": (1, -1)},
    ),
    "window, upper left": (call({"causal": True, "window": (2, -1)}), {"window": (1, -1)}),
    "window of both sides": (call({"window": (1, 2)}, keys=5), {"window": (1, 1)}),
    "three dimensions": (
        tool.Call(*tokens(5, 9), causal=True, layout="bshd"), {"causal": False}
    ),
    "softcap": (call({"softcap": 2.0}), {"softcap": 3.0}),
    "other V": (call({"causal": True}, dim_v=40), {"offset": 1}),
    "f16 k and v, sinks": (
        call({"sinks": np.array([3, -3, 1, 0], np.float32)}, kv=np.float16), {"sinks": None}
    ),
    "slopes": (
        call({"slopes": ggml.slopes(4), "causal": True, "offset": 4}),
        {"slopes": 2 * ggml.slopes(4)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_kind(name):
    asked, otherwise = KINDS[name]
    row = tool.Row(name)
    row.add(asked)
    line = row.as_json()
    assert all(line[door] == "right" for door in tool.DOORS), line
    neighbour = tool.reference(dataclasses.replace(asked, **otherwise))
    assert nrmse(neighbour, tool.reference(asked)) > loose("int8_full", "float32")


@pytest.mark.parametrize("name", [name for name, (x, _) in KINDS.items() if x.layout == "bhsd"])
def test_both_references_agree(name):
    """The library's own, of one mask, against the tool's."""
    asked = KINDS[name][0]
    k, v = (x.astype(np.float32) for x in (asked.k, asked.v))
    mask = tool.joined_mask(dataclasses.replace(asked, slopes=None))
    if asked.slopes is not None:
        mask = np.where(mask, -asked.slopes[:, None, None] * abs(asked.places), -np.inf)
        mask = mask.astype(np.float32)
    options = {"softcap": asked.softcap or None, "sinks": asked.sinks, "mask": mask}
    want = qattn.reference_attention(asked.q, k, v, layout="bhsd", **options)
    assert nrmse(tool.reference(asked), want) < 1e-6


def test_verdicts_record_and_page(tmp_path, monkeypatch, capsys):
    asked = call({"causal": True})
    right, refused, wrong = (tool.Row(x) for x in ("right", "refused", "wrong"))
    right.add(asked)
    refused.add(call(dim_v=520))
    monkeypatch.setattr(tool, "by_torch", lambda *given: tool.by_attention(*given) + 1)
    wrong.add(asked, label="keys 9")
    made = tool.record([right, refused, wrong], {"of another kind": 7}, {"onnx": "1"}, "abc")
    counts = made["totals"]["torch"]["int8"]
    assert [counts[x] for x in tool.VERDICTS] == [1, 1, 1] and 0 < counts["largest"] < 0.02
    tool.save(made, tmp_path / "record.json")
    assert json.loads((tmp_path / "record.json").read_text()) == made
    assert tool.show(made) == 1
    text = capsys.readouterr().out
    assert "torch int8 keys 9: NRMSE" in text and "not run: 7 of another kind" in text
    monkeypatch.setattr(table, "tool_record", lambda name: (made, made["provenance"]))
    page = "\n".join(table.section())
    assert "| torch | int8 | 1 | 1 | 1 |" in page and "| wrong | 1 |" in page
    assert "head_dim 520" in page and "7 of another kind" in page


def test_a_query_without_keys_gives_nothing():
    asked = call({"lengths": np.array([9, 3]), "causal": True})
    assert not tool.reference(asked)[1, :, :2].any()

    def reckon():
        return np.where(np.arange(5)[:, None] < 1, 0.0, tool.reference(asked))

    assert tool.judged("attention", asked, "f32", reckon, None).why.startswith("a query that sees")


def test_grid():
    every = list(ggml.kinds())
    assert len({x.name for x in every}) == len(every)
    own = [x for x in every if x.types[0] not in ggml.QUANTISED]
    count = sum(len(list(ggml.shapes(x, 0, True))) for x in own)
    assert count == 2808  # llama.cpp's, each precision once
    for n, kind in enumerate(own):
        each = list(ggml.shapes(kind, n, False))
        assert {x.queries for x in each} == set(ggml.QUERIES)
        if kind.heads[1] == 1:
            assert {x.keys for x in each} == set(ggml.KEYS)
