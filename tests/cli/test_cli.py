"""The qattn program from outside: exit statuses, JSON, refusals, files.

Needs numpy and pytest; the program's path is in the environment variable QATTN_CLI.
"""

import json
import os
import re
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

PROGRAM = os.environ.get("QATTN_CLI")
MODEL = PROGRAM and str(Path(PROGRAM).with_name("qattn_model"))  # it comes with the tests
DATA = Path(__file__).resolve().parents[2] / "data" / "minilm_qkv.safetensors"
pytestmark = pytest.mark.skipif(not PROGRAM, reason="QATTN_CLI is not set")

RECIPES = [
    "f32", "f16", "bf16", "int8", "int8_fp8", "int8_full", "fp8", "mxfp8", "nvfp4_qk", "nvfp4",
]


def qattn(*arguments, program=PROGRAM, **kwargs):
    command = [program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **kwargs)


def result_json(*arguments, program=PROGRAM):
    done = qattn(*arguments, "--json", program=program)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refused(*arguments, status=2, says=(), program=PROGRAM):
    """The program exits with `status`, prints no result and names every text in `says`."""
    done = qattn(*arguments, program=program)
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    for text in says:
        assert text in done.stderr, done.stderr
    return done


def softmax_attention(q, k, v, causal=False):
    """float64, bhsd, Hq a multiple of Hkv."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if causal:
        i, j = np.indices(s.shape[-2:])
        s = np.where(j <= i + s.shape[-1] - s.shape[-2], s, -np.inf)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    return p @ v / total, (np.log(total) + top)[..., 0]


def nrmse(out, reference):
    return np.linalg.norm(out - reference) / np.linalg.norm(reference)


def to_bf16(x):
    """Codes of float32 values, rounded half to even."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        begin = len(data)
        data += array.tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [begin, len(data)],
        }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 4, 70, 64), dtype=np.float32)
    k = rng.standard_normal((1, 2, 90, 64), dtype=np.float32)
    v = rng.standard_normal((1, 2, 90, 64), dtype=np.float32)
    return q, k, v


@pytest.fixture
def files(tmp_path, tensors):
    """--q, --k, --v and the directory that they are in."""
    arguments = []
    for name, tensor in zip("qkv", tensors):
        np.save(tmp_path / f"{name}.npy", tensor)
        arguments += [f"--{name}", tmp_path / f"{name}.npy"]
    return arguments


def test_usage_errors_exit_with_2():
    assert qattn("--help").returncode == 0
    assert qattn("compare", "--help").returncode == 0
    assert qattn("--version").returncode == 0
    for arguments in ((), ("nonsense",), ("compare",), ("info", "--nonsense")):
        assert qattn(*arguments).returncode == 2


def test_info():
    info = result_json("info")
    assert {"version", "cpu", "isa", "cores", "threads", "recipes", "formats"} <= info.keys()
    assert set(RECIPES) <= {row["recipe"] for row in info["recipes"]}
    assert {"s8", "e4m3", "nvfp4"} <= {row["format"] for row in info["formats"]}
    text = qattn("info")
    assert text.returncode == 0 and "int8_full" in text.stdout


def test_info_with_a_forced_instruction_set():
    environment = dict(os.environ, QATTN_CPU_ISA="scalar")
    done = qattn("info", "--json", env=environment)
    assert done.returncode == 0 and json.loads(done.stdout)["isa"] == "scalar"
    environment["QATTN_CPU_ISA"] = "nonsense"
    done = qattn("info", env=environment)
    assert done.returncode == 2 and "nonsense" in done.stderr


def test_explain():
    shape = "1,32,8,4096,4096,128"
    explained = result_json("explain", "--recipe", "int8_full", "--shape", shape, "--causal")
    assert explained["possible"] and explained["kernel"] and explained["shape"] == shape
    assert qattn("explain", "--shape", shape).stdout.strip()
    refused("explain", "--shape", "1,2,3", says=["--shape 1,2,3", "B,Hq,Hkv,Sq,Sk,D"])
    refused("explain", "--shape", "1,2,x,4,5,6", says=["--shape"])
    refused("explain", "--shape", "1,2,2,0,5,64", says=["--shape", "positive"])
    refused("explain", "--recipe", "int9", "--shape", shape, says=["int9", "int8_full"])
    refused("explain", "--shape", "1,3,2,64,64,64", says=["3", "2"])
    refused("explain", "--shape", "1,2,2,64,64,600", says=["head_dim 600", "from 1 to 576"])
    gpu = ("--device", "sm_120", "--shape", "1,2,2,64,64,288")
    refused("explain", *gpu, says=["q: head_dim 288 is not from 1 to 256 as on GPUs", "CPUs"])
    refused("explain", "--shape", shape, "--scale", "inf", says=["--scale: inf is not finite"])
    window = ("--shape", "1,2,2,64,64,64", "--window", "1")
    refused("explain", *window, says=["--window 1", "left,right"])


def test_another_backend_is_not_possible_here(files):
    refused("compare", *files, "--backend", "cuda", status=3, says=["cuda", "cpu"])
    assert qattn("compare", *files, "--backend", "nonsense").returncode == 2


def test_compare_every_recipe(files):
    report = result_json("compare", *files)
    keys = {"recipe", "nrmse", "max_abs_err", "cosine", "worst_row_cosine", "ms", "speedup_vs_f32",
            "output_rows", "nan_rows", "reference_nan_rows"}
    assert [row["recipe"] for row in report["results"] if row.keys() != keys] == []
    measured = {row["recipe"]: row for row in report["results"]}
    skipped = {row["recipe"] for row in report["skipped"]}
    assert set(RECIPES) <= measured.keys() | skipped
    assert report["reference_rows"] == 70
    assert measured["f32"]["nrmse"] < 1e-5 and measured["f32"]["speedup_vs_f32"] == 1
    assert measured["int8_full"]["nrmse"] < 3e-2
    assert measured["int8_full"]["worst_row_cosine"] > 0.99


def test_compare_options(files):
    report = result_json(
        "compare", *files, "--recipe", "int8_full,f16,f16", "--causal", "--ref-rows", "8",
        "--threads", "1", "--runs", "1", "--window", "-1,0", "--softcap", "30", "--scale", "0.1",
    )
    assert [row["recipe"] for row in report["results"]] == ["int8_full", "f16"]
    assert report["reference_rows"] == 8
    assert report["results"][1]["nrmse"] < 2e-3


def test_compare_in_bshd_gives_the_same_errors(tmp_path, tensors, files):
    swapped = []
    for name, tensor in zip("qkv", tensors):
        np.save(tmp_path / f"{name}_bshd.npy", np.ascontiguousarray(tensor.swapaxes(1, 2)))
        swapped += [f"--{name}", tmp_path / f"{name}_bshd.npy"]
    options = ("--recipe", "int8_full", "--runs", "1")
    bhsd = result_json("compare", *files, *options)["results"][0]
    bshd = result_json("compare", *swapped, *options, "--layout", "bshd")["results"][0]
    assert bshd["nrmse"] == pytest.approx(bhsd["nrmse"], rel=1e-9)


@pytest.mark.skipif(not DATA.exists(), reason="no captured data")
def test_compare_reads_safetensors():
    operands = [f"--{name}={DATA}:layer0.{name}" for name in "qkv"]
    report = result_json("compare", *operands, "--recipe", "f32,int8_full", "--runs", "1")
    assert report["results"][0]["nrmse"] < 1e-5
    done = refused("compare", f"--q={DATA}:layer9.q", *operands[1:], says=["q:", "layer9.q"])
    assert "layer0.q" in done.stderr


@pytest.mark.parametrize("causal", [False, True])
def test_attention_against_numpy(tmp_path, tensors, files, causal):
    flag = ["--causal"] if causal else []
    report = result_json(
        "attention", *files, "--recipe", "f32", "-o", tmp_path / "o.npy",
        "--lse", tmp_path / "lse.npy", *flag,
    )
    out, lse = np.load(tmp_path / "o.npy"), np.load(tmp_path / "lse.npy")
    expected_out, expected_lse = softmax_attention(*tensors, causal)
    assert out.dtype == np.float32 and report["out"]["shape"] == list(out.shape)
    assert nrmse(out, expected_out) < 1e-5
    assert np.abs(lse - expected_lse).max() < 1e-4
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "k.npy", "lse.npy", "o.npy", "q.npy", "v.npy",
    ]


def test_attention_on_bf16_inputs(tmp_path, tensors):
    for name, tensor in zip("qkv", tensors):
        np.save(tmp_path / f"{name}.npy", to_bf16(tensor))
    write_safetensors(
        tmp_path / "x.safetensors",
        {name: ("BF16", to_bf16(tensor)) for name, tensor in zip("qkv", tensors)},
    )
    npy = [f"--{name}={tmp_path / name}.npy" for name in "qkv"]
    stored = [f"--{name}={tmp_path / 'x.safetensors'}:{name}" for name in "qkv"]
    out = tmp_path / "o.npy"
    refused("attention", *npy, "-o", out, says=["q:", "--bf16"])
    outputs = []
    for operands in ([*npy, "--bf16"], stored):
        done = qattn("attention", *operands, "--recipe", "f32", "-o", out)
        assert done.returncode == 0, done.stderr
        codes = np.load(out)
        assert codes.dtype == np.uint16
        outputs.append((codes.astype(np.uint32) << 16).view(np.float32))
    assert np.array_equal(*outputs)
    assert nrmse(outputs[0], softmax_attention(*tensors)[0]) < 1e-2
    done = qattn("attention", *stored, "--output-format", "f16", "-o", out)
    assert done.returncode == 0 and np.load(out).dtype == np.float16


def test_refused_attention_leaves_no_file(tmp_path, files):
    out = tmp_path / "o.npy"
    before = sorted(tmp_path.iterdir())
    np_int = tmp_path.parent / f"{tmp_path.name}_int.npy"
    np.save(np_int, np.zeros((1, 2, 90, 64), np.int32))
    k_short = tmp_path.parent / f"{tmp_path.name}_short.npy"
    np.save(k_short, np.zeros((1, 2, 90, 32), np.float32))
    flat = tmp_path.parent / f"{tmp_path.name}_flat.npy"
    np.save(flat, np.zeros((90, 64), np.float32))
    q, k, v = files[:2], files[2:4], files[4:]
    refused("attention", *q, "--k", k_short, *v, "-o", out, says=["k", "32", "64"])
    refused("attention", *q, "--k", np_int, *v, "-o", out, says=["k", "s32"])
    refused("attention", "--q", flat, *k, *v, "-o", out, says=["q", "2 dimensions", "4"])
    refused("attention", *q, *k, "--v", tmp_path / "absent.npy", "-o", out, says=["v", "no such"])
    refused("attention", *files, "-o", tmp_path / "none" / "o.npy", says=["none", "directory"])
    refused("attention", *files, "-o", tmp_path / "o.txt", says=["o.txt", ".npy"])
    refused("attention", *files, "-o", out, "--lse", out, says=["two outputs"])
    refused("attention", *files, "-o", out, "--recipe", "int7", says=["int7"])
    refused("attention", *files, "-o", out, "--scale", "nan", says=["scale"])
    refused("attention", *files, "-o", out, "--softcap", "-1", says=["softcap"])
    refused("attention", *files, "-o", out, "--threads", "-1", says=["threads"])
    assert sorted(tmp_path.iterdir()) == before


def test_hostile_files_are_refused(tmp_path, files):
    whole = (tmp_path / "q.npy").read_bytes()
    hostile = tmp_path / "hostile.npy"
    arguments = ("compare", "--q", hostile, *files[2:])
    for contents in (b"", whole[:50], whole[:-1], whole + b"x", whole.replace(b"<f4", b"<c8"),
                     whole.replace(b"(1, 4", b"(9, 4"), b"\x1b[31m" + whole):
        hostile.write_bytes(contents)
        done = refused(*arguments, says=["q:", "hostile.npy"])
        assert "\x1b" not in done.stderr


def test_quantize_matches_its_formula(tmp_path, tensors):
    x = tensors[1]
    np.save(tmp_path / "x.npy", x)
    outputs = ("-o", tmp_path / "codes.npy", "--scale", tmp_path / "scale.npy")
    report = result_json(
        "quantize", tmp_path / "x.npy", "--format", "s8", "--granularity", "per_token", *outputs
    )
    codes, scale = np.load(tmp_path / "codes.npy"), np.load(tmp_path / "scale.npy")
    assert codes.dtype == np.int8 and codes.shape == x.shape and scale.shape == x.shape[:3]
    expected = np.abs(x).max(-1) * np.float32(1 / 127)
    assert np.allclose(scale, expected, rtol=1e-6, atol=0)
    error = nrmse(codes * scale[..., None], x)
    assert report["relative_rms_error"] == pytest.approx(error, rel=1e-3)
    assert report["scales"] == scale.size and report["saturated"] == 0


def test_quantize_per_block_mean_and_second_level(tmp_path, tensors):
    np.save(tmp_path / "x.npy", tensors[1] + 5)
    common = ("quantize", tmp_path / "x.npy", "-o", tmp_path / "codes.npy",
              "--scale", tmp_path / "scale.npy")
    plain = result_json(*common, "--granularity", "per_block", "--block", "64")
    assert plain["scale_shape"] == [1, 2, 2]
    smooth = result_json(*common, "--granularity", "per_block", "--block", "64", "--smooth",
                         "--mean", tmp_path / "mean.npy")
    assert np.allclose(np.load(tmp_path / "mean.npy"), (tensors[1] + 5).mean(2), atol=1e-5)
    assert smooth["relative_rms_error"] < plain["relative_rms_error"]
    nvfp4 = result_json(*common, "--format", "nvfp4", "--global", tmp_path / "global.npy")
    assert np.load(tmp_path / "codes.npy").shape == (1, 2, 90, 32)
    assert nvfp4["relative_rms_error"] < 0.2
    refused(*common, "--format", "nvfp4", says=["--global"])
    refused(*common, "--smooth", says=["--mean"])
    refused(*common, "--format", "s9", says=["s9"])
    refused(*common, "--granularity", "per_mood", says=["per_mood"])


def test_quantize_counts_saturated_codes(tmp_path, tensors):
    np.save(tmp_path / "x.npy", tensors[1])
    np.save(tmp_path / "small.npy", np.full((1, 2), 0.5 / 127, np.float32))
    report = result_json(
        "quantize", tmp_path / "x.npy", "--granularity", "per_head", "-o", tmp_path / "codes.npy",
        "--scale", tmp_path / "scale.npy", "--static-scale", tmp_path / "small.npy",
    )
    for bad in (0.0, -1.0, np.inf, np.nan):
        np.save(tmp_path / "bad.npy", np.array([[0.1, bad]], np.float32))
        refused("quantize", tmp_path / "x.npy", "--granularity", "per_head", "-o",
                tmp_path / "none.npy", "--scale", tmp_path / "none_scale.npy", "--static-scale",
                tmp_path / "bad.npy", says=["static_scale: value", "at (0, 1)", "positive"])
    assert not (tmp_path / "none.npy").exists()
    beyond = np.count_nonzero(np.rint(np.abs(tensors[1]) / np.float32(0.5 / 127)) > 127)
    assert report["saturated"] == pytest.approx(beyond, abs=2)


@pytest.mark.parametrize("made", ["s8", "e4m3"])
@pytest.mark.parametrize("asked", ["s8", "e4m3"])
def test_files_of_scales_say_what_they_were_made_for(tmp_path, tensors, made, asked):
    np.save(tmp_path / "x.npy", tensors[1])
    quantize = ("quantize", tmp_path / "x.npy", "--granularity", "per_head")
    told, plain = tmp_path / "scale.safetensors", tmp_path / "scale.npy"
    for path in (told, plain):
        result_json(*quantize, "--format", made, "-o", tmp_path / "codes.npy", "--scale", path)
    header = read_header(told)
    assert header["__metadata__"] == {"format": "qattn.scale", "version": "1", "codes": made,
                                      "role": "k", "smooth": "off", "rotate": "off"}
    assert told.read_bytes().endswith(np.load(plain).tobytes())
    used = (*quantize, "--format", asked, "-o", tmp_path / "n.npy", "--scale", tmp_path / "s.npy")
    scale = ("--static-scale", f"{told}:scale")
    if made == asked:
        assert result_json(*used, *scale)["saturated"] == 0
        assert np.array_equal(np.load(tmp_path / "s.npy"), np.load(plain))
        refused(*used, *scale, "--smooth", "--mean", tmp_path / "mean.npy",
                says=["static_scale: was made for k with its mean; the call has k less its mean"])
        refused(*used, *scale, "--rotate", says=["k not rotated; the call has k rotated"])
        refused(*used, *scale, "--role", "q", says=["static_scale: ", "made for k; the call has q"])
        refused(*used, *scale, "--scales-for", "int8", says=["--scales-for: ", "says itself"])
    else:
        refused(*used, *scale, says=[f"static_scale: was made for k in {made}; the call has k in "])
        assert not (tmp_path / "n.npy").exists()
    result_json(*used, "--static-scale", plain)  # nobody knows
    for recipe, format in (("int8", "s8"), ("fp8", "e4m3")):
        named = (*used, "--static-scale", plain, "--scales-for", recipe)
        if format == asked:
            result_json(*named, "--smooth", "--mean", tmp_path / "mean.npy")
            refused(*named, says=[f"made for recipe {recipe}, k less its mean; the call has k w"])
        else:
            refused(*named, says=[f"made for recipe {recipe}, k in {format}; the call has k in "])
    refused(*used, "--scales-for", "int8", says=["--scales-for: needs --static-scale"])
    refused(*used, "--static-scale", plain, "--scales-for", "int9", says=["--scales-for: ", "int9"])


def read_header(path):
    data = path.read_bytes()
    return json.loads(data[8:8 + int.from_bytes(data[:8], "little")])


def test_files_of_scales_that_say_nonsense(tmp_path, tensors):
    np.save(tmp_path / "x.npy", tensors[1])
    scale = np.full((1, 2), 0.1, np.float32)
    path = tmp_path / "scale.safetensors"
    right = {"format": "qattn.scale", "version": "1", "codes": "s8", "role": "k", "smooth": "off",
             "rotate": "off"}
    used = ("quantize", tmp_path / "x.npy", "--granularity", "per_head", "-o", tmp_path / "n.npy",
            "--scale", tmp_path / "s.npy", "--static-scale", f"{path}:scale")
    for key, value in (("version", "2"), ("codes", "s9"), ("role", "x"), ("smooth", "1"),
                       ("rotate", None)):
        metadata = {**right, key: value}
        header = {"__metadata__": {n: x for n, x in metadata.items() if x is not None},
                  "scale": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + scale.tobytes())
        refused(*used, says=["static_scale: ", key])
    assert not (tmp_path / "n.npy").exists()
    write_safetensors(path, {"scale": ("F32", scale)})  # another's file, which says nothing
    result_json(*used)


def test_bench():
    report = result_json("bench", "--shape", "1,2,1,64,64,32", "--shape", "1,2,2,1,128,64",
                         "--recipe", "f32,int8_full", "--runs", "1")
    assert {"cpu", "isa", "threads", "version"} <= report["provenance"].keys()
    assert len(report["results"]) == 4
    for row in report["results"]:
        assert row["ms"] > 0 and row["tflops"] > 0 and "speedup_vs_f32" in row
    refused("bench", "--shape", "1,2", says=["--shape 1,2"])
    refused("bench", "--shape", "1000000,1,1,1000000,1000000,128", status=3, says=["GiB"])
    refused("bench", "--shape", ",".join(["4611686018427387904"] * 6))


def test_model(tmp_path):
    shape = {"batch": 4, "heads_q": 8, "heads_kv": 2, "queries": 1024, "keys": 1024, "dim": 128,
             "causal": True}
    cell = {"shape": {"group": "llm", **shape}, "candidate": "int8_full", "io": "bf16",
            "step": "kernel", "median_ms": 0.25}
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"cells": [cell | {"step": "e2e", "median_ms": 9}, cell]}))
    call = ("--shape", "4,8,2,1024,1024,128", "--causal", "--measured", record,
            "--recipe", "int8_full,bf16,f32")
    report = result_json(*call, program=MODEL)
    full, wide = report["rows"]
    assert full["shape"] == shape and full["kernel"] == "sm90a_prefill"
    # 4 x 8 heads, 1 + ... + 8 tiles of 1024 clocks of 8-bit products, on 132 multiprocessors.
    microseconds = 4 * 8 * 36 * 1024 / 132 / 1.755e9 * 1e6
    assert full["clocks_a_tile"]["tensor"] == pytest.approx(1024)
    assert full["bound_us"]["tensor"] == pytest.approx(microseconds)
    assert wide["bound_us"]["tensor"] == pytest.approx(2 * microseconds)
    assert full["predicted_ms"] == pytest.approx(max(full["bound_us"].values()) / 1e3)
    assert full["bound_us"][full["limit"]] == max(full["bound_us"].values())
    assert full["measured_ms"] == 0.25 and "measured_ms" not in wide
    assert full["measured_over_predicted"] == pytest.approx(0.25 / full["predicted_ms"])
    assert any("f32: " in why and "sm90a_prefill" in why for why in report["refused"])
    # The record's time is not the portable kernel's.
    (portable,) = result_json(*call[:-1], "int8_full", "--portable", program=MODEL)["rows"]
    assert portable["kernel"] == "sm80_prefill" and "measured_ms" not in portable
    table = qattn(*call, program=MODEL)
    assert table.returncode == 0 and "sm90a_prefill" in table.stdout and "0.25" not in table.stderr


@pytest.mark.slow
def test_the_committed_model_is_what_the_kernels_do():
    """Approximately: how often a maximum rises depends on the last bits of the C library."""
    path = Path(__file__).resolve().parents[2] / "bench" / "results" / "model-h200.json"
    committed, now = json.loads(path.read_text()), result_json(program=MODEL)
    assert now["machine"] == committed["machine"]
    assert len(now["rows"]) == len(committed["rows"])
    for a, b in zip(now["rows"], committed["rows"], strict=True):
        for key in ("clocks_a_tile", "bound_us"):
            assert a[key] == pytest.approx(b[key], rel=2e-3, abs=1), "run `make model`"
        for key in ("shape", "recipe", "kernel", "step"):
            assert a[key] == b[key], "run `make model`"


def test_model_refusals(tmp_path):
    def refuses(*arguments, **expected):
        refused(*arguments, program=MODEL, **expected)

    refuses("--shape", "1,2", says=["--shape 1,2"])
    refuses("--shape", "1,1,1,128,128,64", "--recipe", "nope", says=["nope"])
    refuses("--shape", "1,1,1,128,128,64", "--recipe", "f32", status=3, says=["_prefill"])
    refuses("--shape", "1,1,1,128,1073741952,64", status=3, says=["2^30"])
    refuses("--measured", tmp_path / "absent.json", says=["absent.json"])
    for text in ("{", "[]", '{"cells": 1}', '{"cells": [{"candidate": 1}]}'):
        (tmp_path / "bad.json").write_text(text)
        refuses("--measured", tmp_path / "bad.json", says=["bad.json"])


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason="no captured data")
def test_demo(tmp_path):
    embeddings = tmp_path / "embeddings.json"
    row = {"recipe": "int8<b>", "min_cosine": 0.999, "mean_cosine": 0.9999}
    embeddings.write_text(json.dumps({"model": "m", "sentences": 3, "results": [row]}))
    report = result_json("demo", "--data", DATA, "--report", tmp_path / "report.html",
                         "--embeddings", embeddings, "--runs", "1", "--tokens", "1024")
    measured = {row["recipe"]: row for row in report["results"]}
    assert set(RECIPES) <= measured.keys() | {row["recipe"] for row in report["skipped"]}
    assert len(measured["int8_full"]["nrmse_by_layer"]) == 6
    assert measured["f32"]["memory_vs_f16"] == pytest.approx(2)
    assert 0.5 < measured["int8_full"]["memory_vs_f16"] < 0.7
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 5 and "<script" not in page and "http" not in page
    assert report["provenance"]["cpu"] in page and report["provenance"]["isa"] in page
    # Speed against error: a point of its own colour for every recipe.
    colours = re.findall(r'<circle [^>]*r="5" fill="(#\w+)"', page)
    assert len(colours) == len(set(colours)) == len(measured)
    assert "int8&lt;b&gt;" in page and "int8<b>" not in page


def test_demo_refusals(tmp_path):
    report = tmp_path / "report.html"
    refused("demo", "--data", tmp_path / "absent.safetensors", "--report", report, says=["absent"])
    bad = tmp_path / "bad.json"
    bad.write_text('{"model": 1}')
    refused("demo", "--embeddings", bad, "--report", report, says=["bad.json", "sentences"])
    write_safetensors(tmp_path / "x.safetensors", {"a": ("I8", np.zeros(1, np.int8))})
    refused("demo", "--data", tmp_path / "x.safetensors", "--report", report, says=["layer0.q"])
    refused("demo", "--report", tmp_path / "none" / "r.html", says=["directory"])
    refused("demo", "--runs", "-1", "--report", report, says=["--runs -1"])
    refused("demo", "--tokens", "9", "--report", report, says=["--tokens 9", "at least 64"])
    assert not report.exists()


def test_piped_output_has_no_escape_codes(files):
    for arguments in (("info",), ("compare", *files, "--runs", "1"),
                      ("bench", "--shape", "1,1,1,32,32,32", "--runs", "1"), ("nonsense",)):
        done = qattn(*arguments)
        assert "\x1b" not in done.stdout + done.stderr
        assert "\r" not in done.stdout + done.stderr


def test_full_standard_output_is_an_error():
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run([PROGRAM, "info"], stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode != 0


@pytest.fixture
def kv_files(tmp_path):
    rng = np.random.default_rng(3)
    shapes = {"k": (1, 2, 6000, 64), "v": (1, 2, 6000, 64), "q": (1, 4, 9, 64)}
    for name, shape in shapes.items():
        np.save(tmp_path / f"{name}.npy", rng.standard_normal(shape).astype(np.float32))
    return tmp_path


def kv_arguments(files, *more):
    return ["kv", "--k", files / "k.npy", "--v", files / "v.npy", *more]


def test_kv_prints_tiers_bytes_and_errors(kv_files):
    budget = result_json(*kv_arguments(kv_files, "--budget", 3.2, "--q", kv_files / "q.npy"))
    assert budget["average_bits"] <= 3.2 and budget["bytes"] <= budget["allowed_bytes"]
    assert sum(tier["tokens"] for tier in budget["tiers"]) == 2 * 6000
    parts = budget["allocated"]
    assert parts["total"] == sum(n for name, n in parts.items() if name != "total")
    four = result_json(*kv_arguments(kv_files, "--tiers", "4", "--q", kv_files / "q.npy"))
    assert 0.09 < four["k_relative_rms_error"] < 0.101
    assert 0.1 < four["nrmse"] < 0.16 and four["nrmse"] < budget["nrmse"]
    pair = result_json(*kv_arguments(kv_files, "--tiers", "8/2"))
    assert pair["k_relative_rms_error"] < 0.007 and pair["v_relative_rms_error"] > 0.3
    probed = result_json(
        *kv_arguments(kv_files, "--budget", 3.2, "--probe", kv_files / "q.npy"),
        "--q", kv_files / "q.npy",
    )
    assert probed["nrmse"] < budget["nrmse"]
    for tier, same in (("8", True), ("2", False)):
        asked = kv_arguments(kv_files, "--tiers", tier, "--q", kv_files / "q.npy")
        straight, biased = result_json(*asked, "--debias"), result_json(*asked)
        assert (straight["nrmse"] == biased["nrmse"]) == same
    channel = result_json(*kv_arguments(kv_files, "--tiers", "4"), "--k-granularity", "per_channel")
    assert 0.075 < channel["k_relative_rms_error"] < 0.9 * four["k_relative_rms_error"]
    pages = four["allocated"]["scales"] // 64  # 16 tokens, a scale of K and of V each
    assert channel["allocated"]["scales"] == pages * (2 * 16 + 2 * 64 + 16)
    assert "average bits" in qattn(*kv_arguments(kv_files, "--budget", 3.2)).stdout


def test_kv_refusals(kv_files):
    refused(*kv_arguments(kv_files, "--budget", 2.0), says=["average_bits: 2.0 hold at no length"])
    refused(*kv_arguments(kv_files, "--budget", 3, "--budget-from", 50), says=["it holds from"])
    refused(*kv_arguments(kv_files, "--tiers", "4,x"), says=["--tiers 4,x"])
    refused(*kv_arguments(kv_files, "--k-granularity", "per_head"), says=["--k-granularity"])
    refused(*kv_arguments(kv_files, "--debias"), says=["--debias requires --q"])
    refused(*kv_arguments(kv_files, "--tiers", "5"), says=["tiers[0]: 5 bits"])
    refused(*kv_arguments(kv_files, "--tiers", "4,2"), says=["more than one without average_bits"])
    refused(*kv_arguments(kv_files, "--q", kv_files / "none.npy"), says=["q:", "none.npy"])
    refused("kv", "--k", kv_files / "k.npy", "--v", kv_files / "q.npy", says=["v: shape"])
