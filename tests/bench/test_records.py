"""bench/bench.py compare, render and plot: what is made of records."""

import copy
import json
import math
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from qbench import (  # noqa: E402
    choices,
    counters,
    decode,
    host,
    kv,
    model,
    plot,
    render,
    roofline,
    shapes,
    smoothing,
    summary,
    variants,
    wheel,
)
from qbench.compare import compare  # noqa: E402
from qbench.record import Record, committed, make_cell  # noqa: E402
from qbench.shapes import parse_custom  # noqa: E402

sys.path.insert(0, str(ROOT / "tools" / "sim"))
import recipe_sim  # noqa: E402

BENCH = [sys.executable, str(ROOT / "bench" / "bench.py")]
SHAPE = parse_custom("1,1,1,1024,1024,64")
PROVENANCE = {"gpu": "G", "date": "today", "commit": "abc", "torch": "2"}


def record(name="record", errors=(), **times):
    """Times in ms by candidate; a text is why there is none."""
    cells = []
    for candidate, x in times.items():
        facts = {"refused": x} if isinstance(x, str) else {"median_ms": x, "tflops": 1 / x}
        facts["quantises"] = "int8" in candidate
        cells.append(make_cell(SHAPE, candidate.replace("_", " "), "bf16", "e2e", **facts))
    made = Record(dict(PROVENANCE), cells, errors)
    made.name = name
    return made


def error(nrmse, family="sink"):
    return {"family": family, "dim": 64, "candidate": "int8", "io": "bf16", "nrmse": nrmse}


def compared(tmp_path, a, b, *options):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, x in zip(paths, (a, b)):
        x.save(path)
    command = [*BENCH, "compare", *map(str, paths), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_record_survives_its_file(tmp_path):
    before = committed()[-1]
    before.save(tmp_path / before.name)
    after = Record.load(tmp_path / before.name)
    assert after.cells == before.cells and after.provenance == before.provenance
    (tmp_path / "other.json").write_text('{"schema": 1}')
    with pytest.raises(ValueError, match="no record"):
        Record.load(tmp_path / "other.json")


# ---- compare -------------------------------------------------------------------------------------


def test_changes_are_sorted_worst_first():
    a = record(x=1.0, y=2.0, z=1.0, gone=1.0, left=1.0, errors=[error(1e-2)])
    b = record(x=1.5, y=1.0, z=1.0, gone="no kernel", new=1.0, errors=[error(1.2e-2)])
    changes, missing = compare(a, b)
    assert [c.what.split(" | ")[1] for c in changes] == ["gone", "x", "int8", "z", "y"]
    assert [c.ratio for c in changes] == [math.inf, 1.5, pytest.approx(1.2), 1.0, 0.5]
    assert "no kernel" in str(changes[0])
    assert len(missing) == 2 and "left" in missing[0] and "new" in missing[1]


def test_times_relative_to_a_candidate():
    """Everything 20 % slower, for clocks, is no change; x alone is."""
    a = record(torch_cudnn=1.0, x=2.0, y=4.0)
    b = record(torch_cudnn=1.2, x=3.0, y=4.8)
    changes, _ = compare(a, b, "torch cudnn")
    assert [c.ratio for c in changes] == [pytest.approx(1.25), 1.0, pytest.approx(1.0)]
    with pytest.raises(ValueError, match="relative-to"):
        compare(a, b, "torch flash")


@pytest.mark.parametrize(("after", "options", "status"), [
    (1.0, (), 0),
    (1.05, (), 0),
    (1.2, (), 1),
    (1.2, ("--fail", "0.3"), 0),
    (1.05, ("--fail", "0.04", "--noise", "0.01"), 1),
    (0.2, (), 0),
    ("no kernel", ("--fail", "1000"), 1),
])  # fmt: skip
def test_exit_status_of_compare(after, options, status, tmp_path):
    done = compared(tmp_path, record(x=1.0), record(x=after), *options)
    assert done.returncode == status, done.stdout + done.stderr


def test_noise_is_not_printed(tmp_path):
    done = compared(tmp_path, record(aa=1.0, bb=1.0), record(aa=1.02, bb=1.05))
    assert "bb" in done.stdout and "aa" not in done.stdout and "1 of 2 within" in done.stdout
    everything = compared(tmp_path, record(aa=1.0, bb=1.0), record(aa=1.02, bb=1.05), "--all")
    assert "aa" in everything.stdout
    bad = compared(tmp_path, record(x=1.0), record(x=1.0), "--noise", "0.5")
    assert bad.returncode == 1 and "noise" in bad.stderr
    assert compared(tmp_path, record(x=1.0), record(y=1.0)).returncode == 1


# ---- render --------------------------------------------------------------------------------------


def test_the_page_shows_every_outcome():
    x = record(torch_flash=2.0, int8=1.0, fp8="no FP8 here", errors=[error(1.25e-2)])
    x.cells.append(make_cell(SHAPE, "f16", "f16", "e2e", failed="the result has NaN"))
    text = "\n".join(render.record_section(x))
    assert "| torch flash | 500 GFLOP/s (1.00x) |" in text
    assert "| int8 e2e | 1000 GFLOP/s (2.00x) |" in text
    assert "refused: fp8 (1 of them): no FP8 here" in text
    assert "failed: f16 (1 of them): the result has NaN" in text
    assert "| int8, bf16 | 1.2e-02 |" in text or "| int8, bf16 | 1.3e-02 |" in text


def test_check_notices_another_record(monkeypatch, tmp_path):
    monkeypatch.setattr(render, "FOLDER", tmp_path / "tables")
    page = tmp_path / "PERFORMANCE.md"
    page.write_text(summary.filled(summary.PAGE.read_text()).replace("1.00x", "1.01x", 1))
    monkeypatch.setattr(render, "MIXED", (page,))
    assert render.run(type("Args", (), {"check": True})) == 1
    render.run(type("Args", (), {"check": False}))
    assert render.run(type("Args", (), {"check": True})) == 0
    stale = tmp_path / "tables" / "cpu.md"
    stale.write_text(stale.read_text().replace("(1.00x)", "(1.01x)", 1))
    assert render.run(type("Args", (), {"check": True})) == 1
    render.run(type("Args", (), {"check": False}))
    assert render.run(type("Args", (), {"check": True})) == 0


def test_the_page_is_within_columns():
    pages = "\n".join(map(render.page, render.PAGES))
    free = [line for line in pages.splitlines() if line[:1] not in ("|", "#", "!")]
    assert max(len(line) for line in free) <= 100
    assert render.within_columns("| " + "x " * 60) == ["| " + "x " * 60]


def test_roofline_shows_codes_and_records_before_them():
    row = {"recipe": "bf16", "unit": "bf16", "heads_q": 32, "heads_kv": 8, "queries": 1}
    row |= {"keys": 4096, "d": 128, "seconds": 1e-3, "products": 1e-4, "softmax": 1e-5}
    row |= {"memory": 5e-4}
    x = {"provenance": PROVENANCE | {"cpu": "C"}, "threads": 2, "read": 1e10}
    x["isas"] = [{"isa": "amx", "peaks": {"bf16": 1e12}, "attention": [row]}]
    before = "\n".join(roofline.lines_of("r.json", x))
    assert "| amx, bf16 | decode, 4096 keys, heads 32/8 | 67 | 10 % | 1 % | 50 % | memory" in before
    assert "s8:" not in before
    x["isas"][0]["attention"] = [row | {"kv": "bf16"}]
    assert "\n".join(roofline.lines_of("r.json", x)) == before
    x["isas"][0]["attention"].append(row | {"recipe": "int8_full", "unit": "integer", "kv": "s8"})
    after = "\n".join(roofline.lines_of("r.json", x))
    assert "| amx, int8_full | decode, 4096 keys, heads 32/8, K and V in s8 | 67 |" in after
    assert "(K and V in s8: codes" in after


def test_roofline_says_what_is_missing():
    row = {"recipe": "f32", "queries": 1, "kv": "s8"}
    isas = [{"isa": name, "attention": [row]} for name in ("avx2", "scalar", "amx", "neon_i8mm")]
    assert roofline.absent({"isas": isas, "loops": 2}) == []
    only = "\n".join(roofline.absent({"isas": isas[:1]}))
    for text in ("NEON", "no Arm machine", "this CPU has none", "Plain C++", "peak of AVX2 in s8"):
        assert text in only
    isas[2]["attention"] = [row | {"kv": "bf16"}]
    (amx,) = roofline.absent({"isas": isas, "loops": 2})
    assert "AMX" in amx and "8-bit" in amx


def test_every_roofline_says_where_neon_is():
    lines = roofline.section()
    tables = sum(line.startswith("## Roofline") for line in lines)
    assert tables >= 2 and sum("NEON" in line for line in lines) == tables


@pytest.mark.parametrize("cuda", [False, True])
def test_the_page_shows_the_wheel_if_there_is_a_record(monkeypatch, tmp_path, cuda):
    monkeypatch.setattr(wheel, "RESULTS", tmp_path)
    assert wheel.section() == [] and "## The wheel" not in render.page("wheel")
    pytest.importorskip("qattn")
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "packaging"))
    import check_wheel

    monkeypatch.setattr(check_wheel, "has_cuda_library", lambda: cuda)  # asks for an installation
    made = check_wheel.record(Path(__file__), "abc-dirty", (0.12345, 0.0204))
    (tmp_path / ("wheel-cuda.json" if cuda else "wheel.json")).write_text(json.dumps(made))
    (line,) = (x for x in wheel.section() if x and not x.startswith("#"))
    assert "\n".join(render.within_columns(line)) in render.page("wheel")
    size = f"{Path(__file__).stat().st_size / 1e6:.2f} MB"
    library = ("with" if cuda else "without") + " libqattn_cuda"
    for told in ("commit abc-dirty", size, library, "takes 0.123 s, 0.020 s where"):
        assert told in line
    assert f"Python {platform.python_version()}" in line


def test_the_import_limit_is_for_the_fastest(monkeypatch):
    pytest.importorskip("qattn")
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "packaging"))
    import check_wheel

    monkeypatch.setattr(check_wheel, "seconds", lambda before="": [0.9, 0.29, 0.8])
    assert check_wheel.check_import_time() == (0.8, 0.8)
    monkeypatch.setattr(check_wheel, "seconds", lambda before="": [0.31] * 3)
    with pytest.raises(AssertionError, match="import qattn takes 0.310 s"):
        check_wheel.check_import_time()


# ---- plot ----------------------------------------------------------------------------------------


def sweep_record(machine="NVIDIA H200"):
    """The committed sweep of multi-head attention, whatever else its record has."""
    record = next(r for r in committed() if r.machine == machine)
    record.cells = [c for c in record.cells if c.shape.group == "mha"]
    record.errors = []
    return record


def test_plots_are_the_same_twice_and_differ_with_the_record():
    pytest.importorskip("matplotlib")
    first = sweep_record()
    other = copy.deepcopy(first)
    for cell in other.cells:
        if cell["candidate"] == "int8_full" and "tflops" in cell:
            cell["tflops"] *= 1.01
            cell["median_ms"] /= 1.01
    drawn = [
        {name: plot.encode(draw()) for name, (_, draw) in plot.figures(x).items()}
        for x in (first, first, other)
    ]
    assert drawn[0] and drawn[0] == drawn[1]
    for name, svg in drawn[0].items():
        assert drawn[2][name] != svg, name
        assert b"<dc:date>" not in svg


def test_points_of_the_pareto_plot_by_hand():
    shape = parse_custom("1,1,1,1024,1024,64")
    shape = type(shape)(**{**vars(shape), "group": "mha"})
    cells = [
        make_cell(shape, name, "bf16", "e2e", median_ms=ms, tflops=1, nrmse=e)
        for name, ms, e in (
            ("torch cudnn", 1.0, 2e-3),
            ("bf16", 2.0, 2e-3),
            ("int8_full", 0.5, 1e-2),
        )
    ]
    x = Record(dict(PROVENANCE), cells, name="r.json")
    (points,) = plot.pareto_points(x).values()
    assert points == [
        ("torch cudnn", "e2e", 1.0, 2e-3),
        ("bf16", "e2e", 0.5, 2e-3),
        ("int8_full", "e2e", 2.0, 1e-2),
    ]
    assert [p[0] for p in plot.front(points)] == ["torch cudnn", "int8_full"]
    x.errors = [error(0.5, "sink") | {"candidate": "bf16"}]
    assert plot.pareto_points(x) == {"sink": [("bf16", "e2e", 0.5, 0.5)]}


def whole_record():
    """The committed sweep, with made-up numbers for what it lacks."""
    x = sweep_record()
    x.errors = [
        {"family": family, "dim": 128, "candidate": name, "io": "bf16", "nrmse": e * (i + 1)}
        for i, family in enumerate(recipe_sim.FAMILIES)
        for name, e in (("torch cudnn", 2e-3), ("bf16", 2e-3), ("int8_full", 1e-2))
    ]
    for group in ("gqa", "llm", "video", "decode"):
        for n, shape in enumerate(shapes.GROUPS[group]):
            times = {"torch flash": 2.0, "torch cudnn": 1.0 + n, "int8_full": 0.8, "bf16": 2.5}
            x.cells += [
                make_cell(shape, name, "bf16", "e2e", median_ms=ms, tflops=1 / ms)
                for name, ms in times.items()
            ]
    return x


def test_plots_of_a_whole_record():
    pytest.importorskip("matplotlib")
    x = whole_record()
    figures = plot.figures(x)
    drawn = {name.rsplit("-", 1)[1]: draw() for name, (_, draw) in figures.items()}
    assert set(drawn) == {"speed", "speedup", "models", "pareto"}
    titles = [a.get_title() for a in drawn["pareto"].axes if a.get_visible()]
    assert titles == recipe_sim.FAMILIES
    # Over the faster back end: flash where cuDNN takes longer.
    lines = {line.get_label(): line for line in drawn["models"].axes[0].lines}
    n = len(shapes.GROUPS["gqa"])
    assert list(lines["int8_full e2e"].get_xdata()[:n]) == pytest.approx(
        [min(2.0, 1.0 + i) / 0.8 for i in range(n)]
    )
    text = "\n".join(render.record_section(x))
    for group in ("gqa", "llm", "video", "decode"):
        assert f"### {render.TITLES[group]}" in text
    assert "512 of 16K" in text and "| int8_full, bf16 | 1.0e-02 | 2.0e-02 |" in text


def test_pictures_are_those_that_pages_show():
    drawn = set(plot.drawings())
    assert {p.name for p in plot.PLOTS.iterdir()} == {f"{name}.svg" for name in drawn}
    assert set(plot.SHOWN) < drawn < set(plot.drawings(everything=True))
    guide = ROOT / "docs" / "guide" / "diffusion-quality.md"
    text = "".join(p.read_text() for p in (summary.README, summary.PAGE, guide))
    for name in drawn:
        assert f"plots/{name}.svg)" in text, name


# ---- summary -------------------------------------------------------------------------------------


def test_each_candidate_is_beside_the_cudnn_of_its_own_record(monkeypatch):
    name = "variants-h100-lost-mass.json"
    x = Record.load(summary.RESULTS / name)
    step = {
        (c["candidate"], c["step"]): c["median_ms"]
        for c in x.cells
        if c.measured and c.shape.keys == 4096 and c.shape.dim == 128 and not c.shape.causal
    }
    ratio = step["torch cudnn", "e2e"] / step["int8_full", "e2e"]
    assert summary.gpu_points()["int8_full"]["e2e", 4096] == pytest.approx(ratio)
    row = next(line for line in summary.speed_and_error() if line.startswith("| `int8_full`"))
    assert f"| {ratio:.2f}x |" in row


def test_a_page_keeps_what_is_around_its_tables():
    text = "before\n<!-- table: machines -->\nold\n<!-- end of table -->\nafter\n"
    made = summary.filled(text)
    assert made.startswith("before\n<!-- table: machines -->\n| machine |")
    assert made.endswith("<!-- end of table -->\nafter\n") and "old" not in made
    assert summary.filled(made) == made
    with pytest.raises(ValueError, match="no table is called x"):
        summary.filled("<!-- table: x -->\n<!-- end of table -->")


# ---- model ---------------------------------------------------------------------------------------


def predicted(**changes):
    shape = {k: v for k, v in vars(SHAPE).items() if k != "group"}
    row = {"shape": shape, "recipe": "int8", "kernel": "sm80_prefill", "step": "kernel"}
    row |= {"predicted_ms": 0.5, "limit": "special", "clocks_a_tile": {"tensor": 1, "special": 2}}
    return row | changes


def test_predictions_meet_their_own_measurement():
    x = record()
    for step, ms in (("e2e", 3.0), ("kernel", 1.0)):
        x.cells.append(make_cell(SHAPE, "int8", "bf16", step, median_ms=ms, kernel="sm80_prefill"))
    assert model.find(predicted(), x) == 1.0
    assert model.text_of(predicted(), x) == "500 us special; 2.00x"
    other_shape = predicted()["shape"] | {"causal": True}
    for other in ({"kernel": "sm90a_prefill"}, {"recipe": "fp8"}, {"shape": other_shape}):
        assert model.find(predicted(**other), x) is None
    assert model.text_of(predicted(recipe="fp8"), x) == "500 us special"
    del x.cells[1]["kernel"]  # of before kernels were named
    assert model.find(predicted(), x) == 1.0


def test_the_committed_model_has_measurements():
    ((name, data),) = model.models()
    gpu = sweep_record(data["machine"]["name"])
    assert name == "model-h200.json"
    found = [model.find(row, gpu) for row in data["rows"]]
    assert any(found)
    # A bound that a measurement undercuts is none: the counts or the rates would be wrong.
    for row, ms in zip(data["rows"], found):
        assert ms is None or ms >= row["predicted_ms"], row


def test_decode_tables_by_hand():
    shape = {"batch": 2, "heads_q": 8, "heads_kv": 2, "d": 64, "tokens": 1024}
    row = shape | {"cache": "kv4", "us": 20.0, "gb_per_s": 1500.0, "bytes": 278_528}
    run = {"read_gb_per_s": 3000.0, "torch_us": {"cudnn": 50.0}, "rows": [row]}
    text = "\n".join(decode.tables([run]))
    assert "B 2, 1024 tokens, heads 8/2, D 64; a plain read 3000 GB/s" in text
    assert "| kv4 | 4.25 | 20 us | 50 % | 2.50x | - | - |" in text
    row["mass_us"] = 20.5
    row["debias_us"] = 20.2
    text = "\n".join(decode.tables([run]))
    head = "|  | bits in all | a call | of the read | beside cudnn | mass costs | debias costs |"
    assert head in text
    assert "| kv4 | 4.25 | 20 us | 50 % | 2.50x | +2.5 % | +1.0 % |" in text


def test_smoothing_by_hand():
    ms = {"mean of sequences": 0.2, "no mean": 0.15, "attention": 1.0, smoothing.CORRECTION: 0.07}
    times = {name: {"median_ms": x} for name, x in ms.items()}
    lines = smoothing.tables([{"batch": 2, "tokens": 512, "times": times}])
    assert lines[-1] == "| B 2, 512 | 200 us | 150 us | 1000 us | 50 us | 70 us |"


def test_ratios_beside_cudnn_by_hand():
    shape = parse_custom("1,8,8,1024,1024,128")

    def cell(name, step, ms):
        return make_cell(shape, name, "bf16", step, median_ms=ms)

    cells = [cell("torch flash", "e2e", 8.0), cell("torch cudnn", "e2e", 6.0)]
    cells += [cell("fp8", "e2e", 4.0), cell("fp8", "quantise", 1.0), cell("fp8", "kernel", 3.0)]
    lines = render.ratio_table(cells, render.CUDNN)
    assert lines[2:] == ["| fp8 e2e | 1.50x |", "| fp8 kernel | 2.00x |"]
    assert render.ratio_table(cells[:1] + cells[2:], render.CUDNN) == []


def test_counters_by_hand():
    names = [counters.TIME, counters.CYCLES, *counters.BUSY.values()]
    stall = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio".format
    names += [stall("selected"), stall("wait"), stall("short_scoreboard"), "launch__grid_size"]
    values = ["2,500.0", "9", "50", "40", "30", "20", "10", "1", "3", "1", "8"]
    line = ",".join(f'"{x}"' for x in ["Kernel Name", *names])
    units = ",".join('"us"' for _ in range(len(names) + 1))
    launch = ",".join(f'"{x}"' for x in ["entry<Sm90Attention>", *values])
    text = f"==PROF== Connected\n{line}\n{units}\n{launch}\n"
    shape = parse_custom("1,32,32,16384,16384,128,causal")
    (row,) = counters.rows_of(text, [("fp8", shape)])
    assert row["kernel"] == "entry<Sm90Attention>" and "launch__grid_size" not in row["counters"]
    assert counters.stalls(row["counters"]) == [(0.75, "wait"), (0.25, "short_scoreboard")]
    table = "\n".join(counters.table([row]))
    told = "| fp8, causal, D 128, S 16384 | 2 us | 50 % | 40 % | 30 % | 20 % | 10 % |"
    assert f"{told} wait 75%, short scoreboard 25% |" in table
    with pytest.raises(ValueError, match="ncu saw 1 attention kernels of 2"):
        counters.rows_of(text, [("fp8", shape)] * 2)
    with pytest.raises(ValueError, match="ncu saw 0 attention kernels of 1"):
        counters.rows_of("==PROF== nothing\n", [("fp8", shape)])


def test_kv_tables_by_hand():
    row = {"cache": "4 bits", "bytes": 8_000_000, "average_bits": 4.25}
    row |= {"decode": {"median_ms": 2.0}, "mass": {"median_ms": 2.1}, "debias": {"median_ms": 1.9}}
    beside = {"enable_gqa": {"median_ms": 44.0}, "packed": {"median_ms": 5.0}}
    rows = [row, {"cache": "3.0 bits in all", "refused": "too few"}]
    one = {"tokens": 4096, "torch": beside, "rows": rows}
    text = "\n".join(kv.tables({"runs": [one]}))
    assert "4096 tokens; torch bf16: 44 ms (enable_gqa), 5 ms (packed):" in text
    assert "| 4 bits | 4.25 | 2 ms | 22.0x | 2.5x | 4.0 GB/s | +5.0 % | -5.0 % |" in text
    assert "| 3.0 bits in all | refused: too few |  |" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_choices_by_hand():
    def cell(name, step, ms, **facts):
        return make_cell(shapes.GROUPS["few"][1], name, "bf16", step, median_ms=ms, **facts)

    cells = [
        cell("torch cudnn", "e2e", 0.001),
        cell("int8_full", "e2e", 0.040, pack_gqa=4, splits=8),
        cell("int8_full", "kernel", 0.020, pack_gqa=4, splits=8),
        cell("int8_full+splits=16", "kernel", 0.015, pack_gqa=4, splits=16),
        cell("bf16", "e2e", 0.030, pack_gqa=4, splits=8),
        cell("bf16+pack=1", "e2e", 0.031, pack_gqa=1, splits=2),
        make_cell(shapes.GROUPS["few"][2], "f32", "f32", "e2e", refused="no kernel"),
    ]
    name = "1 of 1024, B 1, 32/8"
    assert choices.rows(Record({}, cells)) == [
        [name, "int8_full", "4 x 8, 20.0 us", "4 x 16, 15.0 us", "25 %"],
        [name, "bf16", "4 x 8, 30.0 us", "4 x 8, 30.0 us", "0 %"],
        ["1 of 4096, B 1, 32/8", "f32", "-", "-", "-"],
    ]


def test_variants_by_hand():
    def cell(name, step, ms, shape=shapes.GROUPS["mha"][0]):
        return make_cell(shape, name, "bf16", step, median_ms=ms)

    cells = [
        cell("torch cudnn", "e2e", 1.0),
        *(cell("int8_full", step, ms) for step, ms in (("e2e", 0.9), ("quantise", 0.2))),
        cell("int8_full", "kernel", 0.6),
        cell("int8_full@abc", "e2e", 1.0),
        cell("int8_full@abc", "kernel", 0.5),
        cell("int8_full+beside", "e2e", 0.75),
        cell("fp8@abc", "kernel", 0.4),
        make_cell(shapes.GROUPS["mha"][2], "int8_full", "bf16", "e2e", refused="no time"),
    ]
    lines = variants.table(cells)
    assert lines[0].startswith("|  | S ") and lines[0].count("|") == 4
    assert [line.split(" | ")[:2] for line in lines[2:]] == [
        ["| int8_full e2e", "0.900"],
        ["| int8_full kernel", "0.600"],
        ["| int8_full@abc e2e", "1.000 (1.111)"],
        ["| int8_full@abc kernel", "0.500 (0.833)"],
        ["| int8_full+beside e2e", "0.750 (0.833)"],
        ["| fp8@abc kernel", "0.400"],
    ]


def test_the_committed_decode_record_is_consistent():
    record = json.loads((decode.RESULTS / decode.NAME).read_text())
    for run in record["runs"]:
        assert run["torch_us"] or run["torch_refused"]
        for row in run["rows"]:
            assert row["nrmse"] <= 2e-3
            assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["us"] * 1e-3)
            assert row["gb_per_s"] <= run["read_gb_per_s"]


def test_the_committed_host_record_is_consistent():
    record = json.loads((host.RESULTS / host.NAME).read_text())
    for times in record["python"]["this"].values():
        own = [x for name, x in times.items() if name.startswith("sdpa ")]
        assert len(own) == len(host.RECIPES)
        # A call of several kernels takes longer than one launch, or it did not run.
        assert all(x > times["torch add_"] > 0 for x in own)
    for row in record["cpp"].values():
        assert row["attention_us"] >= 0.9 * row["run_us"] > 0  # a workspace more


def test_the_committed_kv_records_are_consistent():
    paths = sorted(kv.RESULTS.glob("kv-cpu-*.json"))
    assert paths
    for path in paths:
        record = json.loads(path.read_text())
        assert {"cpu", "isa", "threads", "commit", "read_gb_per_s"} <= record["provenance"].keys()
        for one in record["runs"]:
            assert [row["cache"] for row in one["rows"]] == list(kv.CACHES)
            assert all(x["rounds"] >= 10 for x in one["torch"].values())
            for row in one["rows"]:
                assert row["nrmse"] <= kv.WRONG
                assert all(row[call]["rounds"] >= 10 for call in kv.CALLS)
                rate = row["bytes"] / row["decode"]["median_ms"] / 1e6
                assert rate <= record["provenance"]["read_gb_per_s"]
                # Mass and debias are work besides: less time would be another call's caches.
                for call in kv.CALLS:
                    assert row[call]["median_ms"] >= 0.93 * row["decode"]["median_ms"], (row, call)
