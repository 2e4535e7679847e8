"""tools/eval/transformers_models.py: verdicts on a few classes, and its page."""

import json
import sys
from pathlib import Path

import pytest
import transformers

import qattn.transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools" / "eval"), str(ROOT / "bench")]
import transformers_models as tool  # noqa: E402
from qbench import transformers_models as table  # noqa: E402

NAMES = {
    "LlamaForCausalLM": "right", "BloomModel": "refused", "MambaModel": "no attention",
    "DebertaModel": "not reached", "RagModel": "not made",
}  # fmt: skip


@pytest.fixture
def counted():
    """"qattn" in "f32", counted; another test's registration comes back."""
    qattn.transformers.register("qattn", recipe="f32")
    interface = transformers.AttentionInterface
    before = interface()["qattn"]
    interface.register("qattn", tool.Counted(before))
    yield interface()["qattn"]
    interface.register("qattn", before)


def row_of(name, counted):
    return tool.examine(getattr(transformers, name), counted)


def test_verdicts_and_page(counted, tmp_path, monkeypatch, capsys):
    rows = [row_of(name, counted) for name in NAMES]
    assert {x["class"]: x["verdict"] for x in rows} == NAMES
    assert rows[0]["calls"] == 4 and 0.0 < rows[0]["error"] < 1e-5 and rows[0]["sdpa"] < 1e-5
    record = {
        "schema": tool.SCHEMA,
        "provenance": {"date": "today", "commit": "abc", "transformers": "5", "torch": "2"},
        "settings": {"bound": tool.BOUND},
        "rows": rows,
    }
    path = tmp_path / "record.json"
    tool.save(record, path)
    assert json.loads(path.read_text()) == record
    assert tool.show(record) == 0 and "right: 1" in capsys.readouterr().out
    monkeypatch.setattr(table, "tool_record", lambda name: (record, record["provenance"]))
    text = "\n".join(table.section())
    assert "4 of 5 classes could be made" in text and "| right | 1 |" in text
    assert "| bloom | BloomModel | its BloomAttention computes attention itself" in text


def test_a_wrong_attention_is_seen(counted):
    real = counted.function

    def wrong(module, query, key, value, attention_mask, **options):
        return real(module, query, key, value.flip(2), attention_mask, **options)

    counted.function = wrong
    row = row_of("LlamaForCausalLM", counted)
    assert row["verdict"] == "wrong" and row["error"] > 0.01
    assert tool.show({"rows": [row]}) == 1


def test_verdict():
    row = {"class": "X", "error": 0.0, "calls": 0, "sdpa": 0.0}
    assert tool.verdict(row, [], True) == "silent"
    assert tool.verdict(row, ["no layer of X came"], True) == "not reached"
    assert tool.verdict(row, ["no layer of X came"], False) == "no attention"
    off = row | {"error": 0.1}
    assert tool.verdict(off, [], True) == "wrong"
    assert tool.verdict(off | {"sdpa": 0.1}, [], True) == "differs under sdpa too"
    assert tool.verdict(row | {"error": float("nan")}, [], True) == "wrong"
    del off["sdpa"]  # transformers refuses it
    assert tool.verdict(off, [], True) == "wrong"
