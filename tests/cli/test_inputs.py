"""What files the program reads and how it writes over others: float64, Fortran order, big endian,
bf16 as ml_dtypes writes it, empty option values, modes."""

import json
import os
import stat
import struct
import subprocess

import numpy as np
import pytest

PROGRAM = os.environ.get("QATTN_CLI")
pytestmark = pytest.mark.skipif(not PROGRAM, reason="QATTN_CLI is not set")
R = np.random.default_rng(2)
Q, K, V = (R.standard_normal((1, 2, n, 16)).astype(np.float32) for n in (5, 9, 9))


def qattn(*arguments, **environment):
    return subprocess.run(
        [PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=120,
        env={**os.environ, **environment},
    )  # fmt: skip


@pytest.fixture
def files(tmp_path):
    def arguments(convert):
        made = []
        for name, x in zip("qkv", (Q, K, V)):
            path = tmp_path / f"{name}.npy"
            x = convert(x)
            path.write_bytes(x) if isinstance(x, bytes) else np.save(path, x)
            made += [f"--{name}", path]
        return made

    return arguments


def attention(arguments, out):
    done = qattn("attention", *arguments, "--recipe", "f32", "--output-format", "f32", "-o", out)
    assert done.returncode == 0, done.stderr
    return np.load(out), done.stderr


def bf16_of(x):
    """The upper halves of float32 numbers, as ml_dtypes' arrays lie in memory."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


CONVERTED = {
    "float64": (lambda x: x.astype(np.float64), "float64 to f32"),
    "big endian": (lambda x: x.astype(">f4"), "big to little endian"),
    "Fortran": (np.asfortranarray, "Fortran to C order"),
    "all": (lambda x: np.asfortranarray(x).astype(">f8"),
            "big to little endian, float64 to f32, Fortran to C order"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONVERTED)
def test_what_numpy_writes_is_read(case, files, tmp_path):
    want, said = attention(files(lambda x: x), tmp_path / "plain.npy")
    assert said == ""
    convert, words = CONVERTED[case]
    out, said = attention(files(convert), tmp_path / "out.npy")
    np.testing.assert_array_equal(out, want)
    assert said.count("converted: " + words) == 3 and "q: " in said and "k.npy" in said


@pytest.mark.parametrize("descr", ["<V2", "bfloat16"])
def test_descriptions_of_bf16(descr, files, tmp_path):
    def as_bf16(x):
        header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {x.shape}, }}\n".encode()
        size = struct.pack("<H", len(header))
        return b"\x93NUMPY\x01\x00" + size + header + bf16_of(x).tobytes()

    want, _ = attention([*files(bf16_of), "--bf16"], tmp_path / "uint16.npy")
    out, said = attention(files(as_bf16), tmp_path / "out.npy")
    np.testing.assert_array_equal(out, want)
    assert ("converted: raw <V2 to bf16" in said) == (descr == "<V2")


def test_ml_dtypes_itself(files, tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    out, said = attention(files(lambda x: x.astype(ml_dtypes.bfloat16)), tmp_path / "out.npy")
    assert "converted: raw <V2 to bf16" in said
    want, _ = attention([*files(lambda x: x.astype(ml_dtypes.bfloat16).view(np.uint16)), "--bf16"],
                        tmp_path / "uint16.npy")  # fmt: skip
    np.testing.assert_array_equal(out, want)


def test_what_cannot_be_converted_is_refused(files, tmp_path):
    def beyond(x):
        x = x.astype(np.float64)
        x.flat[3] = 1e300
        return x

    for convert, words in (
        (beyond, "element 3 is 1.000000e+300, beyond"),
        (lambda x: x.astype(np.int8).view("V1"), "any format of 8 bits"),
        (lambda x: x.astype(np.complex64), "dtype '<c8'"),
        (lambda x: x.astype(np.longdouble), "dtype '<f16'"),
    ):
        done = qattn("attention", *files(convert), "-o", tmp_path / "out.npy")
        assert done.returncode == 2 and "q: " in done.stderr and words in done.stderr, done.stderr
    assert not (tmp_path / "out.npy").exists()


def test_float64_in_safetensors(tmp_path):
    entries, data = {}, b""
    for name, x in zip("qkv", (Q, K, V)):
        raw = x.astype(np.float64).tobytes()
        entries[name] = {"dtype": "F64", "shape": list(x.shape),
                         "data_offsets": [len(data), len(data) + len(raw)]}  # fmt: skip
        data += raw
    text = json.dumps(entries).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    arguments = [a for name in "qkv" for a in (f"--{name}", f"{path}:{name}")]
    out, said = attention(arguments, tmp_path / "out.npy")
    assert said.count("converted: float64 to f32") == 3
    assert np.isfinite(out).all()


@pytest.mark.parametrize(
    "option", ["--scale", "--softcap", "--window", "--threads", "--recipe", "--lse", "--layout"]
)
def test_empty_values_are_refused(option, files, tmp_path):
    arguments = (*files(lambda x: x), "-o", tmp_path / "out.npy", option, "")
    done = qattn("attention", *arguments)
    assert done.returncode == 2 and option in done.stderr, done.stderr
    assert not (tmp_path / "out.npy").exists()
    done = qattn("kv", *files(lambda x: x)[2:], "--budget", "")
    assert done.returncode == 2 and "--budget" in done.stderr


@pytest.mark.parametrize("option", ["--block", "--warp"])
def test_a_size_of_0_is_refused_where_it_is_given(option, tmp_path):
    np.save(tmp_path / "x.npy", K)
    for value in ("0", "-64"):
        done = qattn(
            "quantize", tmp_path / "x.npy", "--granularity", "per_block", option, value,
            "-o", tmp_path / "codes.npy", "--scale", tmp_path / "scale.npy",
        )  # fmt: skip
        assert done.returncode == 2 and option in done.stderr, done.stderr
    assert not (tmp_path / "codes.npy").exists()
    for command in (("bench", "--shape", "1,1,1,64,64,64", "--runs", "0"),
                    ("kv", "--k", tmp_path / "x.npy", "--v", tmp_path / "x.npy",
                     "--budget-from", "0")):  # fmt: skip
        done = qattn(*command)
        assert done.returncode == 2 and command[-2] in done.stderr, done.stderr


def test_kv_of_heads_of_any_size(tmp_path):
    arguments = []
    for name, dim in (("k", 83), ("v", 41), ("q", 83)):
        np.save(tmp_path / f"{name}.npy", R.standard_normal((1, 2, 300, dim)).astype(np.float32))
        arguments += [f"--{name}", tmp_path / f"{name}.npy"]
    done = qattn("kv", *arguments, "--tiers", "8", "--window", "32", "--json")
    assert done.returncode == 0, done.stderr
    np.save(tmp_path / "k.npy", R.standard_normal((1, 2, 300, 577)).astype(np.float32))
    done = qattn("kv", *arguments)
    assert done.returncode == 2 and "577 is not from 1 to 576" in done.stderr


def test_attention_of_heads_of_any_size(tmp_path):
    arrays = [R.standard_normal((1, 2, 30, dim)).astype(np.float32) for dim in (21, 21, 13)]
    arguments = []
    for name, x in zip("qkv", arrays, strict=True):
        np.save(tmp_path / f"{name}.npy", x)
        arguments += [f"--{name}", tmp_path / f"{name}.npy"]
    out = tmp_path / "o.npy"
    done = qattn("attention", *arguments, "--recipe", "f32", "-o", out)
    assert done.returncode == 0, done.stderr
    q, k, v = (x.astype(np.float64) for x in arrays)
    p = np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(21))
    assert np.abs(np.load(out) - p @ v / p.sum(-1, keepdims=True)).max() < 1e-5


def test_a_file_that_is_written_anew_keeps_its_mode(files, tmp_path):
    out = tmp_path / "out.npy"
    for mode in (0o600, 0o664, 0o640):
        out.write_bytes(b"old")
        out.chmod(mode)
        attention(files(lambda x: x), out)
        assert stat.S_IMODE(out.stat().st_mode) == mode
        assert out.read_bytes() != b"old"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_file_that_may_not_be_written_is_not(files, tmp_path):
    out = tmp_path / "out.npy"
    out.write_bytes(b"old")
    out.chmod(0o444)
    done = qattn("attention", *files(lambda x: x), "-o", out)
    assert done.returncode == 2 and "cannot be written" in done.stderr
    assert out.read_bytes() == b"old"


def test_projection(files, tmp_path):
    w, b = R.standard_normal((6, 32)).astype(np.float32), np.arange(6, dtype=np.float32)
    for name, x in (("w", w), ("b", b), ("short", b[:4])):
        np.save(tmp_path / f"{name}.npy", x)
    rows, _ = attention(files(lambda x: x), tmp_path / "rows.npy")
    given = ["--projection", tmp_path / "w.npy", "--projection-bias", tmp_path / "b.npy"]
    out, _ = attention([*files(lambda x: x), *given], tmp_path / "out.npy")
    want = rows.transpose(0, 2, 1, 3).reshape(1, 5, 32).astype(np.float64) @ w.T + b
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    given[3] = tmp_path / "short.npy"
    for options, text in [
        (given, "projection_bias: shape (4) should be (6)"),
        (given[2:], "projection_bias: is given without projection"),
        (["--projection", tmp_path / "b.npy"], "projection: shape (6) should be (E, Hq * Dv)"),
    ]:
        new = tmp_path / "new.npy"
        done = qattn("attention", *files(lambda x: x), *options, "-o", new)
        assert done.returncode == 2 and text in done.stderr and not new.exists(), done.stderr
    done = qattn("explain", "--shape", "1,2,2,8,8,16", "--projection", 6)
    assert done.returncode == 0 and "projection: f32 products, after all heads" in done.stdout
    done = qattn("explain", "--shape", "1,2,2,8,8,64", "--projection", 6, "--device", "sm_90")
    assert done.returncode == 3 and "projection: this kernel has none" in done.stdout
