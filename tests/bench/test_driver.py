"""bench/bench.py run: on the CPU, and on the GPU kernels in the emulator (QATTN_BENCH_LIBRARY)."""

import contextlib
import io
import itertools
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import bench as driver  # noqa: E402
from qbench import candidates, choices, errors, kv, provenance, run, shapes, timing  # noqa: E402
from qbench import cpu as cpu_shapes  # noqa: E402
from qbench.record import Record  # noqa: E402

BENCH = [sys.executable, str(ROOT / "bench" / "bench.py")]


def bench(*arguments):
    """bench.py in this process, which has torch already: as if a process of its own had ended."""
    command, before, threads = [*BENCH, *map(str, arguments)], sys.argv, torch.get_num_threads()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            sys.argv = command[1:]
            status = driver.main() or 0
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
            print("" if isinstance(stop.code, int) else stop.code, file=err)
        finally:
            sys.argv = before
            torch.set_num_threads(threads)
    return subprocess.CompletedProcess(command, status, out.getvalue(), err.getvalue())


@pytest.fixture
def library():
    path = os.environ.get("QATTN_BENCH_LIBRARY")
    if not path:
        pytest.fail("QATTN_BENCH_LIBRARY should name libattention_bench_emulated.so")
    return path


# ---- Shapes --------------------------------------------------------------------------------------


def test_flop_by_hand():
    assert shapes.parse_custom("2,4,2,3,5,8").flop() == 4 * 2 * 4 * 8 * 15
    # Two queries over four keys see 3 and 4 of 8 pairs; by the rule of halves 8 - 2.
    assert shapes.parse_custom("1,1,1,2,4,8,causal").flop() == 4 * 8 * 6
    assert shapes.parse_custom("1,1,1,6,6,8,causal").flop() == 4 * 8 * 18
    # A narrower V: 8 channels of scores, 6 of the output.
    narrow = shapes.parse_custom("2,4,2,3,5,8,6")
    assert narrow.flop() == 2 * 2 * 4 * (8 + 6) * 15 and narrow.elements_kv() == 2 * 2 * 5 * 14
    assert "D8/6 full" in narrow.name


def test_groups_are_what_they_say():
    every = [s for group in shapes.GROUPS.values() for s in group]
    assert len({s.name for s in every}) == len(every)
    for group, members in shapes.GROUPS.items():
        assert all(s.group == group for s in members)
    mha = shapes.GROUPS["mha"]
    assert sorted({s.keys for s in mha}) == [1024 << n for n in range(6)]
    assert all(s.batch * s.keys == 16384 for s in mha if s.keys <= 16384)
    assert {(s.heads_q, s.heads_kv) for s in shapes.GROUPS["gqa"]} == {(32, 8), (64, 8)}
    assert [s.keys for s in shapes.GROUPS["video"]] == [17776, 32760, 75600]
    assert all(s.queries == 1 for s in shapes.GROUPS["decode"])


@pytest.mark.parametrize(
    "text", ["1,2,3", "1,3,2,4,4,8", "1,1,1,8,4,8,causal", "1,1,1,4,4,x", "1,1,1,4,4,8,0", ""]
)
def test_bad_shapes_are_refused(text):
    with pytest.raises(ValueError, match="shape"):
        shapes.parse_custom(text)


def test_selection():
    assert [s.keys for s in shapes.select(["mha"], ["D64", "causal", "Q1024 "])] == [1024]
    for groups, only in ((["nothing"], []), (["mha"], ["D13"]), ([], [])):
        with pytest.raises(ValueError):
            shapes.select(groups, only)


# ---- Timing --------------------------------------------------------------------------------------


class CountingClock:
    def __init__(self):
        self.order = []

    def milliseconds(self, call):
        self.order.append(call)
        return float(len(self.order))


def test_candidates_take_turns():
    clock = CountingClock()
    times = timing.interleaved(clock, {"a": "first", "b": "second"}, seconds=1e9, rounds=4)
    rounds = [clock.order[i : i + 2] for i in range(0, 10, 2)]  # the first one warms up
    assert all(sorted(x) == ["first", "second"] for x in rounds) and len(clock.order) == 10
    for key, call in (("a", "first"), ("b", "second")):
        assert times[key] == [i + 1.0 for i, x in enumerate(clock.order) if x == call and i >= 2]


@pytest.mark.parametrize("count", range(1, 19))
def test_rounds_have_orders_of_their_own(count):
    """From six candidates on nobody follows whom it followed in two rounds before, nor itself."""
    rounds = list(itertools.islice(timing.orders(range(count)), 20))
    assert all(sorted(order) == list(range(count)) for order in rounds)
    assert rounds == list(itertools.islice(timing.orders(range(count)), 20))
    flat = [key for order in rounds for key in order]
    if count < 6:
        return
    for i, key in enumerate(flat[1:], 1):
        earlier = range(max(1, (i // count - 2) * count), i)
        assert flat[i - 1] != key
        assert flat[i - 1] not in [flat[j - 1] for j in earlier if flat[j] == key]


def test_rounds_fit_into_the_time():
    class Slow(CountingClock):
        def milliseconds(self, call):
            time.sleep(0.02)
            return 20.0

    assert len(timing.interleaved(Slow(), {"a": 0}, seconds=0.15, rounds=50)["a"]) in (4, 5, 6)
    assert len(timing.interleaved(Slow(), {"a": 0}, 0, 50)["a"]) == timing.MIN_ROUNDS


def test_long_turns_count_from_their_middle():
    class Real(CountingClock):
        def milliseconds(self, call):
            call()
            time.sleep(0.002)
            return 2.0 if call in calls else 10.0  # a call, or a batch of five

    done = []
    calls = [lambda: done.append("a"), lambda: done.append("b")]
    turns = timing.LongTurns(Real(), 0.1)
    begin = time.monotonic()
    times = timing.interleaved(Real(), dict(zip("ab", calls)), 0.0, 50, turns)
    assert {x for values in times.values() for x in values} == {2.0}
    assert len(done) >= 5 * 2 * len(times["a"])  # those of the first halves are no times
    for name, call in zip("ab", calls):
        assert len(turns.spans[call]) == timing.MIN_ROUNDS and len(times[name]) >= 3
        for first, last in turns.spans[call]:
            assert begin + 0.05 <= first < last
    # A candidate's turns are whole, though one may end a round and begin the next.
    changes = sum(x != y for x, y in zip(done, done[1:]))
    assert 1 + timing.MIN_ROUNDS <= changes <= 2 * (1 + timing.MIN_ROUNDS) - 1


def test_summary_by_hand():
    assert timing.summary([4.0, 1.0, 2.0, 3.0, 10.0]) == {
        "median_ms": 3.0, "min_ms": 1.0, "spread": pytest.approx(2 / 3), "rounds": 5,
    }  # fmt: skip


# ---- Provenance ----------------------------------------------------------------------------------


def test_clocks_are_sampled():
    lines = r"printf '1980, 3201, 600.5, 51\n1755, 3201, [N/A], 53\n'"
    with provenance.Sampler("0", ["sh", "-c", lines + "; exec sleep 60"]) as sampler:
        deadline = time.monotonic() + 20
        while len(sampler.samples) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sampler.summary() == {
            "sm_mhz": {"median": 1867.5, "min": 1755, "max": 1980},
            "memory_mhz": {"median": 3201, "min": 3201, "max": 3201},
            "power_w": {"median": 600.5, "min": 600.5, "max": 600.5},
            "celsius": {"median": 52, "min": 51, "max": 53},
        }
        assert sampler.summary([(time.monotonic(), math.inf)]) == {}
    assert sampler.process.returncode is not None
    with provenance.Sampler("0", ["/no/such/program"]) as sampler:
        assert sampler.summary() == {}


# ---- Whole runs ----------------------------------------------------------------------------------


def test_choices_of_plans_on_the_emulated_gpu(library, tmp_path):
    path = tmp_path / "record.json"
    asked = ["", "+splits=2", "+pack=1", "+splits=3+pack=2", "+pack=3", "+split=2", "+splits=",
             "+splits=2+splits=3", "+splits=99999999999", "+splits=129"]  # fmt: skip
    done = bench(
        "run", "--device", "emulated", "--library", library, "--no-errors", "-o", path,
        "--shape", "1,8,2,1,400,64", "--rounds", 3, "--commit", "abc",
        "--recipes", ",".join("int8_full" + word for word in asked),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    cells = {(c["candidate"], c["step"]): c for c in Record.load(path).cells}

    def choice(name):
        cell = cells[name, "kernel"]
        assert cell["nrmse"] < 3e-2
        return cell["pack_gqa"], cell["splits"]

    assert choice("int8_full")[0] == 4  # all heads of a KV head
    assert choice("int8_full+splits=2") == (4, 2)
    assert choice("int8_full+pack=1")[0] == 1
    assert choice("int8_full+splits=3+pack=2") == (2, 3)
    assert "packs other heads" in cells["int8_full+pack=3", "e2e"]["refused"]
    assert "+split=2 behind" in cells["int8_full+split=2", "e2e"]["refused"]
    for word in ("splits=", "splits=2", "splits=99999999999", "splits=129"):
        name = "splits=2+splits=3" if word == "splits=2" else word
        assert f"+{word} behind" in cells[f"int8_full+{name}", "e2e"]["refused"]
    rows = choices.rows(Record.load(path))
    assert len(rows) == 1 and rows[0][:2] == ["1 of 400, B 1, 8/2", "int8_full"]


def cells_of(asked, library, folder, dim="64"):
    """{(candidate, step): cell} of a small shape on the emulated GPU."""
    path = folder / "record.json"
    done = bench(
        "run", "--device", "emulated", "--library", library, "--no-errors", "-o", path,
        "--shape", f"1,2,1,130,100,{dim}", "--rounds", 3, "--commit", "abc",
        "--recipes", ",".join(asked),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return {(c["candidate"], c["step"]): c for c in Record.load(path).cells}


def test_consumers_and_smoothing_on_the_emulated_gpu(library, tmp_path):
    asked = ["int8_full", "int8_full+consumers=3", "int8_full+consumers=4", "bf16+consumers=3",
             "int8_full+no_smooth_k", "int8_fp8+shared_p=1"]  # fmt: skip
    cells = cells_of(asked, library, tmp_path)
    for recipe in (asked[0], asked[1], asked[4]):
        assert cells[recipe, "kernel"]["nrmse"] < 3e-2, recipe
    for recipe in (asked[2], asked[3]):
        assert "has other consumers" in cells[recipe, "e2e"]["refused"], recipe
    # D 64 has no such kernel.
    assert "has P in the other place" in cells[asked[5], "e2e"]["refused"]
    assert {(asked[0], "quantise"), (asked[4], "quantise")} <= set(cells)


def test_cells_tell_which_variant_ran(library, tmp_path):
    asked = ["f16", "int8_full+consumers=2+no_q", "int8_full+consumers=3+q"]
    cells = cells_of(asked, library, tmp_path)
    f16, two, three = (cells[name, "e2e"] for name in asked)
    for cell in (f16, two, three):
        assert cell["tile_keys"] in (64, 128, 192, 256) and cell["shared_p"] == 0
    assert (two["consumers"], three["consumers"]) == (2, 3)
    assert [c["q_codes_in_kernel"] for c in (f16, two, three)] == [False, False, True]
    assert "q_codes_in_kernel" not in cells["torch", "e2e"]


def test_cells_tell_where_p_lies(library, tmp_path):
    asked = ["int8_full", "int8_full+shared_p=0", "bf16", "bf16+shared_p=1"]
    cells = cells_of(asked, library, tmp_path, dim="128")
    whole, alone = cells["int8_full", "e2e"], cells["int8_full", "kernel"]
    assert whole["q_codes_in_kernel"] and whole["shared_p"] == 0
    # The attention kernels alone find Q's codes made.
    assert alone["shared_p"] == 1 and "q_codes_in_kernel" not in alone
    assert "has P in the other place" in cells[asked[1], "e2e"]["refused"]
    assert [cells[name, "e2e"]["shared_p"] for name in asked[2:]] == [0, 1]
    assert cells[asked[2], "e2e"]["nrmse"] == cells[asked[3], "e2e"]["nrmse"]


def test_other_builds_take_turns(library, tmp_path):
    path = tmp_path / "record.json"
    done = bench(
        "run", "--device", "emulated", "--library", library, "--against", f"old-1.0={library}",
        "--no-errors", "-o", path, "--shape", "1,2,1,130,100,64", "--rounds", 3, "--commit", "abc",
        "--recipes", "int8_full,f16,int8_full+beside",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    cells = Record.load(path).cells
    assert list(dict.fromkeys(c["candidate"] for c in cells)) == [
        "torch", "int8_full", "int8_full@old-1.0", "f16", "f16@old-1.0", "int8_full+beside",
        "int8_full+beside@old-1.0",
    ]  # fmt: skip
    own, other = (
        {c["step"]: c for c in cells if c["candidate"] == name}
        for name in ("int8_full", "int8_full@old-1.0")
    )
    assert own.keys() == other.keys() == {"e2e", "quantise", "kernel"}
    assert own["e2e"]["nrmse"] == other["e2e"]["nrmse"] < 3e-2
    assert {c["io"] for c in cells if c["candidate"].startswith("f16")} == {"f16"}


def test_a_narrower_v_on_the_emulated_gpu(library, tmp_path):
    cells = cells_of(["int8_full", "bf16"], library, tmp_path, dim="192,128")
    assert cells["int8_full", "kernel"]["nrmse"] < 3e-2 and cells["bf16", "e2e"]["nrmse"] < 1e-2
    assert cells["int8_full", "kernel"]["bytes_kv"] == 100 * (192 + 128)
    assert cells["int8_full", "kernel"]["shape"]["dim_v"] == 128


def test_a_run_on_the_emulated_gpu(library, tmp_path):
    path = tmp_path / "record.json"
    done = bench(
        "run", "--device", "emulated", "--library", library, "--no-errors", "-o", path,
        "--shape", "1,2,1,130,200,64,causal", "--rounds", 3, "--commit", "abc",
        "--recipes", "f16,bf16+q,bf16+no_q,int8_full,int8_full+q,int8_full+no_q,int8_full+beside,"
        "bf16+beside,f32",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    record = Record.load(path)
    assert record.provenance["commit"] == "abc"
    cells = {(c["candidate"], c["step"]): c for c in record.cells}
    assert set(cells) == {
        ("torch", "e2e"), ("f16", "e2e"), ("bf16+q", "e2e"), ("f32", "e2e"), ("int8_full+q", "e2e"),
        ("bf16+no_q", "e2e"), ("int8_full+no_q", "e2e"), ("int8_full+beside", "e2e"),
        ("bf16+beside", "e2e"),
        *(("int8_full", step) for step in ("e2e", "quantise", "kernel")),
    }  # fmt: skip
    # The reasons of every kernel.
    assert cells["f32", "e2e"]["refused"].count("_prefill: ") == 4
    assert "no codes of Q" in cells["bf16+q", "e2e"]["refused"]
    assert "never makes codes of Q" in cells["bf16+no_q", "e2e"]["refused"]
    full = cells["int8_full", "kernel"]
    assert cells["int8_full+q", "e2e"]["nrmse"] == full["nrmse"]
    assert cells["int8_full+no_q", "e2e"]["nrmse"] == full["nrmse"]
    beside = cells["int8_full+beside", "e2e"]
    assert beside["nrmse"] == full["nrmse"] and beside["codes_beside"]
    assert "no codes beside attention" in cells["bf16+beside", "e2e"]["refused"]
    assert full["kernel"] == "sm90a_prefill" and "kernel" not in cells["torch", "e2e"]
    assert full["rounds"] == 3 and full["min_ms"] <= full["median_ms"]
    assert 5e-3 < full["nrmse"] < 3e-2 and cells["f16", "e2e"]["nrmse"] < 1.5e-3
    assert cells["f16", "e2e"]["io"] == "f16" and full["io"] == "bf16"
    # One byte an element of K and V as codes, two as they came.
    assert full["bytes_kv"] == 2 * 200 * 64 and cells["int8_full", "e2e"]["bytes_kv"] == 51200
    flop = 4 * 2 * 64 * (130 * 200 - 130 * 130 / 2)
    assert full["tflops"] == pytest.approx(flop / full["median_ms"] / 1e9)


def test_a_run_on_the_cpu(tmp_path):
    path = tmp_path / "record.json"
    done = subprocess.run(
        [*BENCH, "run", "--device", "cpu", "--threads", "1", "--no-errors", "-o", path, "--rounds",
         "3", "--shape", "1,4,2,1,300,64", "--recipes", "f32,int8_full,mxfp8"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    record = Record.load(path)
    cells = {(c["candidate"], c["io"], c["step"]): c for c in record.cells}
    assert cells["f32", "f32", "e2e"]["nrmse"] < 1e-6
    assert 1e-3 < cells["int8_full", "f32", "cached"]["nrmse"] < 3e-2
    # Codes and one float32 scale a token.
    assert cells["int8_full", "bf16", "cached"]["bytes_kv"] == 2 * 2 * 300 * (64 + 4)
    assert ("mxfp8", "bf16", "cached") not in cells
    assert record.provenance["read_gb_per_s"] > 0 and record.provenance["threads"] == 1


def test_what_the_time_limit_leaves_out_is_told(tmp_path):
    path = tmp_path / "record.json"
    done = bench(
        "run", "--device", "cpu", "--threads", 1, "--no-errors", "-o", path, "--seconds", 1e-6,
        "--shape", "1,1,1,8,8,64", "--recipes", "f32",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cells = Record.load(path).cells
    assert len(cells) == 3 and all("time limit" in c["refused"] for c in cells)


@pytest.mark.parametrize("text", ["x.so", "a=", "=x.so", "a b=x.so", "a=LIBRARY,a=LIBRARY"])
def test_bad_builds_are_refused(text, library, tmp_path):
    given = [("--against", word) for word in text.replace("LIBRARY", library).split(",")]
    done = bench(
        "run", "--device", "emulated", "--library", library, "-o", tmp_path / "record.json",
        "--shape", "1,1,1,8,8,64", *(word for pair in given for word in pair),
    )  # fmt: skip
    assert done.returncode == 1 and "is not NAME=LIBRARY" in done.stderr, done.stderr


@pytest.mark.parametrize(("arguments", "says"), [
    (("--device", "emulated"), "no shape"),
    (("--device", "emulated", "--shape", "1,1,1,8,8,64"), "library"),
    (("--device", "cpu", "--library", "x.so"), "library"),
    (("--device", "cpu", "--against", "a=x.so"), "library, against"),
    (("--device", "cpu", "--beside", "x.py"), "beside"),
    (("--device", "emulated", "--beside", "x.txt", "--library", "LIBRARY", "--shape",
      "1,1,1,8,8,64"), "is no Python file"),
    (("--device", "emulated", "--threads", "2", "--library", "x.so"), "threads"),
    (("--device", "cpu", "--shapes", "cpux"), "shapes"),
    (("--device", "cpu", "--only", "D13"), "no shape"),
    (("--device", "cpu", "--rounds", "1"), "rounds"),
])  # fmt: skip
def test_bad_calls_are_refused(arguments, says, library, tmp_path):
    arguments = [library if x == "LIBRARY" else x for x in arguments]
    done = bench("run", "-o", tmp_path / "record.json", *arguments)
    assert done.returncode == 1 and says in done.stderr, done.stderr
    assert not (tmp_path / "record.json").exists()


# ---- Errors --------------------------------------------------------------------------------------


class Fake:
    """A machine of one candidate that returns what `make(tensors, call number)` says."""

    device = "cpu"

    def __init__(self, make):
        self.make, self.clock, self.calls = make, timing.WallClock(), 0

    def candidate(self, name, io, shape, tensors):
        def call():
            self.calls += 1
            self.out = self.make(tensors, self.calls)

        return candidates.Candidate(name, io, {"e2e": call}, lambda: self.out)

    def synchronize(self):
        pass


def attend(tensors, _):
    return torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in tensors)
    ).transpose(1, 2)


def with_one(out, bad):
    """One number of a row that is in no sample."""
    out[1, 5, 0, 3] = bad
    return out


NO_CLOCKS = provenance.NoSampler()
WRONG = {
    "NaN": lambda t, n: torch.full_like(t[0], float("nan")),
    "NaN or Inf in 1 of 64 rows": lambda t, n: with_one(attend(t, n), float("nan")),
    "Inf in 1 of": lambda t, n: with_one(attend(t, n), -float("inf")),
    "NRMSE": lambda t, n: torch.zeros_like(t[0]),
    "differ": lambda t, n: attend(t, n) * (1 + 0.01 * n),
    "broken": lambda t, n: (_ for _ in ()).throw(RuntimeError("broken")),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_results_have_no_speed(fault):
    shape = shapes.parse_custom("2,2,2,16,16,8")
    (cell,) = run.measure_shape(Fake(WRONG[fault]), shape, [("int8", "f32")], 1, 3, NO_CLOCKS)
    assert fault in cell["failed"] and not cell.measured
    assert Record({}, [cell]).failures()


def test_right_results_have_one():
    shape = shapes.parse_custom("2,4,4,16,16,8")
    (cell,) = run.measure_shape(Fake(attend), shape, [("int8", "f32")], 1, 3, NO_CLOCKS)
    assert cell.measured and cell["nrmse"] < 1e-6
    (cell,) = run.measure_shape(Fake(attend), shape, [("int8", "f32")], 1, 3, NO_CLOCKS, 0.02)
    assert cell.measured and cell["rounds"] >= 3


def test_errors_on_every_family(library):
    machine = candidates.Emulated(library)
    names = machine.names(["f16", "int8_full", "f32"])
    found = errors.family_errors(machine, names, (64,), lambda d: errors.error_shape(d, 48, 160))
    assert len(found) == len(errors.FAMILIES) * len(names)
    error = {(x["family"], x["candidate"]): x.get("nrmse") for x in found}
    for family in errors.FAMILIES:
        assert error[family, "torch"] < 5e-2 and error[family, "f32"] is None
        assert error[family, "f16"] < error[family, "int8_full"] < 0.4
    assert all("f32" in x["refused"] for x in found if x["candidate"] == "f32")
    # The same distribution, only hard or easy: families are not all one.
    assert len({round(x, 4) for (_, c), x in error.items() if c == "int8_full"}) > 5


def test_exact_rows_against_torch():
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, 16, dtype=torch.float64) for n in (5, 9, 9))
    rows = torch.tensor([0, 3, 4])
    mask = torch.ones(5, 9, dtype=torch.bool).tril(4)
    for causal in (False, True):
        want = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask if causal else None
        )[0, rows]
        assert torch.allclose(errors.exact_rows(q, k, v, rows, causal), want, atol=1e-12)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [("--rounds", 2, "rounds: at least 3"), ("--tokens", "64,0", "tokens: 64,0, but lengths")],
)
def test_kv_refuses(tmp_path, option, value, words):
    path = tmp_path / "kv.json"
    done = bench("kv", option, value, "-o", path)
    assert done.returncode == 1 and words in done.stderr
    assert not path.exists()


@pytest.fixture
def others(tmp_path):
    """A file for --beside: an implementation that has calls for bfloat16 alone."""
    path = tmp_path / "others.py"
    path.write_text(
        "import torch\n"
        "NAMES, VERSIONS = ('sums',), 'sums 1.0'\n"
        "def make(name, q, k, v, causal):\n"
        "    if k.dtype != torch.bfloat16: raise ValueError('no bf16')\n"
        "    return {'e2e': k.sum}, lambda: q\n"
    )
    return path


def test_cpu_times_others_where_they_have_calls(tmp_path, others):
    path = tmp_path / "cpu.json"
    options = ["--only", "1 of 1024, D 128", "--seconds", 0.1, "--rounds", 3, "--beside", others]
    done = bench("cpu", *options, "-o", path)
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert record["provenance"]["beside"] == "sums 1.0"
    has = {run["case"]["io"]: "sums" in run["times"] for run in record["runs"]}
    assert has == {"bf16": True, "f32": False}
    head, *rows = (line for line in cpu_shapes.table(record["runs"]) if "---" not in line)
    assert head.endswith("| auto | sums |")
    assert {row.count("|") for row in rows} == {head.count("|")}


def test_kv_measures_every_cache_and_says_what_it_refuses(tmp_path, others):
    path = tmp_path / "kv.json"
    options = ["--tokens", "300,2784", "--seconds", 1, "--rounds", 3, "--threads", 1]
    done = bench("kv", *options, "--commit", "abc", "--beside", others, "-o", path)
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert record["provenance"]["commit"] == "abc" and record["provenance"]["threads"] == 1
    short, long = record["runs"]
    *_, budget = short["rows"]
    assert "holds from 2769" in budget["refused"]
    for row in [*short["rows"][:-1], *long["rows"]]:
        assert row["nrmse"] <= kv.WRONG
        assert min(row[call]["median_ms"] for call in kv.CALLS) > 0
    assert 2.9 < long["rows"][-1]["average_bits"] <= 3
    sizes = [row["bytes"] for row in long["rows"][:-1]]
    assert sizes == sorted(sizes, reverse=True)
    assert f"| {budget['cache']} | refused: {budget['refused']} |" in done.stdout
    assert short["beside"]["sums"]["median_ms"] > 0 and "ms (sums)" in done.stdout
    assert {row.count("|") for row in done.stdout.splitlines() if row.startswith("|")} == {10}
