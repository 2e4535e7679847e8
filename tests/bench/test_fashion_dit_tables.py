"""bench/bench.py render and plot on the records of tools/eval/fashion_dit.py."""

import copy
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from qbench import fashion_dit, plot, training  # noqa: E402
from qbench.record import RESULTS  # noqa: E402


@pytest.fixture
def record():
    return json.loads((RESULTS / fashion_dit.RECORD).read_text())


def distance(recipe, policy, seed, value, **more):
    facts = {"recipe": recipe, "policy": policy, "seed": seed, "distance": value}
    return facts | {"agreement": 0.9, "seconds": 2.0} | more


def small_record():
    rows = [distance("torch", "", 0, 3.0, seconds=1.0), distance("int8", "table", 0, 3.03),
            distance("torch", "", 1, 2.5), distance("float32", "", 0, 3.01)]  # fmt: skip
    paired = [
        {"recipe": r, "policy": p, "psnr": [70.0 + k for k in range(9)], "worst": [60.0] * 9,
         "final": 50.0, "final_worst": 40.0}
        for r, p in (("torch", ""), ("int8", "table"))
    ]  # fmt: skip
    attention = {"torch": 1.0, "int8 dynamic": 4.0, "int8 table": 2.0}
    timing = {"batch": 8, "layers": 3, "attention": attention}
    timing["step"] = {name: 10 * x for name, x in attention.items()}
    return {"rows": rows, "paired": paired, "timing": timing, "evaluated": {"steps": 9}}


def test_distances_by_hand():
    x = small_record()
    assert fashion_dit.torch_band(x) == (2.5, 3.0)
    lines = fashion_dit.distance_table(x)
    assert lines[2:] == [
        "| torch, bf16 | 0 | 3.0000 |  |  | 90.00% | 1.0 s |  |",
        "| torch, bf16 | 1 | 2.5000 |  |  | 90.00% | 2.0 s |  |",
        "| `int8`, table | 0 | 3.0300 | +0.0300 | +1.00% | 90.00% | 2.0 s | 0.50x |",
        "| float32 | 0 | 3.0100 | +0.0100 | +0.33% | 90.00% | 2.0 s | 0.50x |",
    ]
    del x["rows"][-1]
    assert fashion_dit.distance_table(x)[-1].startswith("| float32 | 0 | not measured |")


def test_steps_and_psnr_by_hand():
    assert fashion_dit.steps_shown(20) == [0, 5, 10, 14, 19]
    assert fashion_dit.steps_shown(2) == [0, 1]
    lines = fashion_dit.psnr_table(small_record())
    assert lines[0].startswith("|  | step 1, t 1.00 | step 3, t 0.78 |")
    told = "70.0 (60.0) | 72.0 (60.0) | 74.0 (60.0) | 76.0 (60.0) | 78.0 (60.0) | 50.0 (40.0)"
    assert lines[3] == f"| `int8`, table | {told} |"


def test_times_by_hand():
    x = small_record()
    assert fashion_dit.time_table(x)[2:] == [
        "| torch, bf16 | 1.000 ms | 1.00x | 10.0 ms | 1.00x | 30% |",
        "| `int8`, dynamic | 4.000 ms | 0.25x | 40.0 ms | 0.25x | 30% |",
        "| `int8`, table | 2.000 ms | 0.50x | 20.0 ms | 0.50x | 30% |",
    ]
    told = fashion_dit.slower_text(x)
    assert "No 8-bit recipe is as fast" in told and "`int8` takes 2.0 times as long" in told
    x["timing"]["attention"] |= {"int8 dynamic": 0.9, "int8 table": 0.8}
    assert fashion_dit.slower_text(x) == ""


def test_losses_by_hand():
    facts = {"held_out": 0.5, "spread": 0.25, "over_torch": 0.125, "apart": -0.5}
    x = {"rows": [{"attention": "int8"}] * 2, "summary": {"int8": facts}}
    assert training.loss_table(x, 3)[2:] == ["| int8 | 2 | 0.500 | 0.250 | +0.125 (-0.500) | - |"]
    assert "int8 has 2 of 3 seeds" in fashion_dit.seeds_text(x)
    x["rows"] *= 2
    assert fashion_dit.seeds_text(x) == ""


def test_the_page_says_what_was_not_measured():
    text = " ".join(" ".join(fashion_dit.section()).split())
    for told in ("The time on the machine was up before all was measured.", "detached has 2 of 3",
                 "Its loss held out is not known.", "made from the log of the run",
                 "No 8-bit recipe is as fast as torch's bf16 here.",
                 "`int8_full` takes 2.0 times as long"):  # fmt: skip
        assert told in text, told


def test_no_record_no_page(monkeypatch, tmp_path):
    monkeypatch.setattr("qbench.record.RESULTS", tmp_path)
    assert fashion_dit.section() == [] and plot.dit_drawings() == {}


def test_pictures_by_hand(record):
    pytest.importorskip("matplotlib")
    figure = plot.psnr_figure(record)
    for axis, curves in zip(figure.axes, (plot.PSNR_CURVES, plot.LESS_CURVES)):
        assert len(axis.lines) == len(axis.texts) == len(curves) <= 6
    rows = {(x["recipe"], x["policy"]): x["psnr"] for x in record["paired"]}
    less = rows["int8", "dynamic"][3] - rows["torch", ""][3]
    assert figure.axes[1].lines[0].get_ydata()[3] == pytest.approx(less)
    figure = plot.distance_figure(record)
    assert len(figure.axes[0].get_yticks()) == 8
    (band,) = figure.axes[0].patches
    low, high = fashion_dit.torch_band(record)
    assert (band.get_x(), band.get_width()) == pytest.approx((low, high - low))
    other = copy.deepcopy(record)
    other["rows"][0]["distance"] += 0.01
    drawn = [plot.encode(plot.distance_figure(x)) for x in (record, record, other)]
    assert drawn[0] == drawn[1] != drawn[2]
