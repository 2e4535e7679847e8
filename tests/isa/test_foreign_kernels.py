"""The emulator's words judged by kernels of another compiler.

Triton writes PTX for sm_120a, without a GPU; a small machine executes it with the words in the
place of the instructions; the results are those of float64. Where a word has lanes, bytes or order
otherwise than Triton expects, they are not.

Not judged, because Triton's kernels are right either way: from which lane of four B's scale is
taken, since all four have it (in CuTe's layouts, too), and an order of k that A and B share. Nor
what they do not use: scales that do not begin at byte 0, mma_f8f6f4, conversions to e2m1 and ue8m0;
judge_cutlass.cpp and judge_conversions.cpp have these but for the bytes.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from emulator_words import Words
from ptx_machine import Machine

LIBRARY = os.environ.get("QATTN_JUDGE_WORDS")
pytestmark = pytest.mark.skipif(not LIBRARY, reason="QATTN_JUDGE_WORDS is not set")


# ---- Numbers, from their definitions -------------------------------------------------------------


def floats(exponent, mantissa, bias):
    """The values of all codes of sign, exponent and mantissa, without infinities and NaN."""
    codes = np.arange(1 << (1 + exponent + mantissa))
    e, m = codes >> mantissa & (1 << exponent) - 1, codes & (1 << mantissa) - 1
    value = np.where(
        e > 0,
        (1 + m / 2**mantissa) * 2.0 ** (e - bias),
        m / 2**mantissa * 2.0 ** (1 - bias),
    )
    return np.where(codes >> (exponent + mantissa), -value, value)


E2M1, E4M3, E5M2 = floats(2, 1, 1), floats(4, 3, 7), floats(5, 2, 15)


class Operand:
    """Random codes and the values that they stand for."""

    def __init__(self, random, name, shape):
        if name == "s8":
            self.codes = random.integers(-128, 128, shape).astype(np.int8)
            self.values = self.codes.astype(np.float64)
        elif name in ("bf16", "f16"):
            rounded = random.standard_normal(shape).astype(np.float16).astype(np.float32)
            bits = rounded.view(np.uint32) >> 16
            if name == "bf16":
                rounded = (bits << np.uint32(16)).view(np.float32)
            self.values = rounded.astype(np.float64)
            self.codes = bits.astype(np.uint16)
            if name == "f16":
                self.codes = rounded.astype(np.float16)
        elif name == "e2m1":
            nibbles = random.integers(0, 16, shape)
            self.values = E2M1[nibbles]
            self.codes = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).astype(np.uint8)
        else:  # neither the largest exponents, where infinities and NaN are, nor numbers below 1/64
            table, bits, bias = {"e4m3": (E4M3, 3, 7), "e5m2": (E5M2, 2, 15)}[name]
            exponents = random.integers(bias - 6, bias + 3, shape) << bits
            signs = random.integers(0, 2, shape) << 7
            codes = signs | exponents | random.integers(0, 1 << bits, shape)
            self.codes, self.values = codes.astype(np.uint8), table[codes]


TRITON = {"s8": "*i8", "bf16": "*bf16", "f16": "*fp16", "e4m3": "*fp8e4nv", "e5m2": "*fp8e5"}


def distance(found, wanted):
    """The largest difference, of the largest value; infinite where there is NaN."""
    worst = np.abs(found - wanted).max() / np.abs(wanted).max()
    return worst if np.isfinite(worst) else np.inf


# ---- Kernels -------------------------------------------------------------------------------------


class Kernels:
    """foreign_kernels.py as a process, and what it answered."""

    def __init__(self, cache):
        self.process = subprocess.Popen(
            [sys.executable, str(pathlib.Path(__file__).with_name("foreign_kernels.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
        )  # fmt: skip
        self.answers = {}

    def compiled(self, kernel, types, constants, warps):
        """PTX and bytes of shared memory. `types`: of the arguments that are no constants."""
        request = {"kernel": kernel, "types": types, "constants": constants, "warps": warps}
        line = json.dumps(request)
        if line not in self.answers:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            self.answers[line] = json.loads(self.process.stdout.readline())
        answer = self.answers[line]
        assert "error" not in answer, answer["error"]
        return answer["ptx"], answer["shared"]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    kernels = Kernels(tmp_path_factory.mktemp("triton"))
    yield kernels
    kernels.process.communicate()
    assert kernels.process.returncode == 0


def scaled_product(kernels, words, kind, warps):
    """A kind of scaled product by Triton's kernel: the distance from float64, and the machine."""
    form = "e4m3" if kind == "mxfp8" else "e2m1"
    block, packed = (16 if kind == "nvfp4" else 32), (1 if form == "e4m3" else 2)
    m = n = 32 * warps
    k = 128
    random = np.random.default_rng(3)
    a, b = Operand(random, form, (m, k)), Operand(random, form, (n, k))
    if kind == "nvfp4":
        scales = [random.integers(40, 80, (x, k // block)).astype(np.uint8) for x in (m, n)]
        factors = [E4M3[x] for x in scales]
    else:
        scales = [random.integers(120, 134, (x, k // block)).astype(np.uint8) for x in (m, n)]
        factors = [2.0 ** (x.astype(float) - 127) for x in scales]
    pointer = "*fp8e4nv" if kind == "nvfp4" else "*u8"
    ptx, shared = kernels.compiled(
        "scaled_product",
        {"a": "*u8", "b": "*u8", "sa": pointer, "sb": pointer, "c": "*fp32"},
        {"m": m, "n": n, "k": k, "form": form, "packed": packed, "block": block},
        warps,
    )
    found = np.zeros((m, n), np.float32)
    machine = Machine(ptx, words, shared)
    machine.run(a.codes, b.codes, *scales, found)
    x, y = (o.values * np.repeat(f, block, 1) for o, f in zip((a, b), factors))
    return distance(found, x @ y.T), ptx


def product(kernels, words, form, across):
    warps = 4
    m, n, k, depth = 32, 64, 64, 128
    random = np.random.default_rng(5)
    a, b = Operand(random, form, (m, depth)), Operand(random, form, (n, depth))
    whole = form == "s8"
    ptx, shared = kernels.compiled(
        "product",
        {"a": TRITON[form], "b": TRITON[form], "c": "*i32" if whole else "*fp32", "depth": "i32"},
        {"m": m, "n": n, "k": k, "across": across,
         "whole": whole},
        warps,
    )  # fmt: skip
    found = np.zeros((m, n), np.int32 if whole else np.float32)
    codes = np.ascontiguousarray(b.codes.T) if across else b.codes
    Machine(ptx, words, shared).run(a.codes, codes, found, depth)
    return distance(found, a.values @ b.values.T), ptx


def bytes_across(kernels, words, form):
    m, n, k = 64, 64, 64
    random = np.random.default_rng(9)
    a, b = Operand(random, form, (m, k)), Operand(random, form, (k, n))
    types = {"a": TRITON[form], "b": TRITON[form], "c": "*fp32"}
    ptx, shared = kernels.compiled(
        "bytes_across", types, {"m": m, "n": n, "k": k}, warps=4
    )
    found = np.zeros((m, n), np.float32)
    Machine(ptx, words, shared).run(a.codes, b.codes, found)
    return distance(found, a.values @ b.values), ptx


def attention(kernels, words, qk, pv):
    warps = 4
    rows, keys, tile, width = 64, 128, 32, 64
    random = np.random.default_rng(7)
    q, k = (Operand(random, qk, (x, width)) for x in (rows, keys))
    v = Operand(random, pv, (keys, width))
    scale = 2.0 / np.std(q.values @ k.values.T)
    ptx, shared = kernels.compiled(
        "attention",
        {"q": TRITON[qk], "k": TRITON[qk], "v": TRITON[pv], "o": "*fp32", "scale": "fp32",
         "keys": "i32"},
        {"rows": rows, "tile": tile, "width": width},
        warps,
    )  # fmt: skip
    found = np.zeros((rows, width), np.float32)
    Machine(ptx, words, shared).run(q.codes, k.codes, v.codes, found, float(scale), keys)
    s = np.float32(scale).astype(float) * (q.values @ k.values.T)
    p = np.exp2(s - s.max(1, keepdims=True))
    wanted = p @ v.values / p.sum(1, keepdims=True)
    error = np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2))
    return error if np.isfinite(error) else np.inf, ptx


# ---- The words are right -------------------------------------------------------------------------

# Sums in float32, of random signs.
EXACT = 1e-6
# P is rounded to v's format.
ROUNDED = {"bf16": 3e-3, "f16": 5e-4, "e4m3": 4e-2}


@pytest.fixture(scope="module")
def words():
    return Words(pathlib.Path(LIBRARY))


@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4", "nvfp4"])
def test_products_with_scales(kernels, words, kind, warps):
    error, ptx = scaled_product(kernels, words, kind, warps)
    assert error < EXACT
    assert {"mxfp8": "::1X.", "mxfp4": "::2X.", "nvfp4": "::4X."}[kind] in ptx


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("form", ["bf16", "f16", "s8", "e4m3", "e5m2"])
def test_plain_products(kernels, words, form, across):
    error, ptx = product(kernels, words, form, across)
    assert error == 0 if form == "s8" else error < EXACT
    assert f".{form}.{form}." in ptx and "ldmatrix" in ptx


@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_bytes_loaded_across(kernels, words, form):
    error, ptx = bytes_across(kernels, words, form)
    assert error < EXACT
    assert "m16n16.x2.trans.shared.b8" in ptx


@pytest.mark.parametrize(
    "qk, pv", [("bf16", "bf16"), ("f16", "f16"), ("e4m3", "e4m3"), ("s8", "e4m3")]
)
def test_attention(kernels, words, qk, pv):
    error, ptx = attention(kernels, words, qk, pv)
    assert error < ROUNDED[pv]
    assert f".{qk}.{qk}." in ptx and f".{pv}.{pv}." in ptx and "ex2" in ptx


# ---- Wrong words are caught ----------------------------------------------------------------------


class Mma(Words):
    """Operands changed by `change(kind, d, a, b, sa, sb)`."""

    def __init__(self, change):
        super().__init__(LIBRARY)
        self.change = change

    def mma(self, kind, d, a, b, sa=None, sb=None):
        return super().mma(*self.change(kind, d, a, b, sa, sb))


def lanes(registers, change):
    """Registers as those of the lane `change(lane)`."""
    return registers[change(np.arange(len(registers)))]


def nibbles(registers):
    return (registers & 0x0F0F0F0F) << 4 | (registers & 0xF0F0F0F0) >> 4


def bytes_apart(registers, number):
    """Byte b of the result is byte b + number."""
    return registers >> np.uint32(8 * number) | registers << np.uint32(32 - 8 * number)


def rename(old, new):
    return Mma(lambda kind, *operands: (kind.replace(old, new), *operands))


class Loads(Words):
    def __init__(self, change):
        super().__init__(LIBRARY)
        self.change = change

    def load_matrix(self, kind, rows):
        return self.change(kind, rows, super().load_matrix)


def bytes_in_order(registers):
    """Bytes loaded with these registers of four as their first to last."""

    def change(kind, rows, load):
        return load(kind, rows)[:, registers if kind == "b8.trans" else slice(None)]

    return Loads(change)


class Conversions(Words):
    def convert(self, kind, lo, hi):
        return super().convert(kind, hi, lo)


def scaled_by(kind):
    return lambda kernels, words: scaled_product(kernels, words, kind, warps=1)


def multiplied(form, across):
    return lambda kernels, words: product(kernels, words, form, across)


def loaded_across(kernels, words):
    return bytes_across(kernels, words, "e4m3")


def attended(qk, pv):
    return lambda kernels, words: attention(kernels, words, qk, pv)


# What is wrong, the words that have it so, the kernel that tells.
MISTAKES = [
    ("scales of rows g and g + 8 exchanged", scaled_by("mxfp8"),
     lambda: Mma(lambda kind, d, a, b, sa, sb: (kind, d, a, b, lanes(sa, lambda l: l ^ 1), sb))),
    ("scales of columns from the next group of lanes", scaled_by("mxfp4"),
     lambda: Mma(lambda kind, d, a, b, sa, sb: (kind, d, a, b, sa, lanes(sb, lambda l: l ^ 4)))),
    ("scales from the next byte", scaled_by("mxfp8"), lambda: rename("mxfp8 0", "mxfp8 1")),
    ("the bytes of two scales exchanged", scaled_by("mxfp4"),
     lambda: Mma(lambda kind, d, a, b, sa, sb: (kind, d, a, b, bytes_apart(sa, 1), sb))),
    ("scales in the wrong order", scaled_by("nvfp4"),
     lambda: Mma(lambda kind, d, a, b, sa, sb: (kind, d, a, b, bytes_apart(sa, 2), sb))),
    ("scales of a block of 16 as of 32", scaled_by("nvfp4"),
     lambda: Mma(lambda kind, d, a, b, sa, sb: (kind, d, a, b, sa & 0xFF00FF | (sa & 0xFF00FF) << 8,
                                                sb))),
    ("the higher nibble first", scaled_by("nvfp4"),
     lambda: Mma(lambda kind, d, a, b, sa, sb: (kind, d, nibbles(a), b, sa, sb))),
    ("registers of rows and of k exchanged", multiplied("e4m3", False),
     lambda: Mma(lambda kind, d, a, *rest: (kind, d, a[:, [0, 2, 1, 3]], *rest))),
    ("B's k in the wrong order", multiplied("bf16", False),
     lambda: Mma(lambda kind, d, a, b, *rest: (kind, d, a, b[:, ::-1], *rest))),
    ("e4m3 for e5m2", multiplied("e5m2", False), lambda: rename("e5m2.e5m2", "e5m2.e4m3")),
    ("no signs", multiplied("s8", False), lambda: rename("s8.s8", "u8.s8")),
    ("matrices in the wrong order", multiplied("s8", False),
     lambda: Loads(lambda kind, rows, load: load(kind, rows)[:, [0, 2, 1, 3]])),
    ("a matrix that is not transposed", multiplied("f16", True),
     lambda: Loads(lambda kind, rows, load: load(kind.removesuffix(".trans"), rows))),
    ("columns g and g + 8 of bytes exchanged", loaded_across,
     lambda: bytes_in_order([1, 0, 3, 2])),
    ("matrices of bytes exchanged", loaded_across, lambda: bytes_in_order([2, 3, 0, 1])),
    ("columns before matrices of bytes", loaded_across, lambda: bytes_in_order([0, 2, 1, 3])),
    ("codes of P exchanged", attended("s8", "e4m3"), lambda: Conversions(LIBRARY)),
]  # fmt: skip


@pytest.mark.parametrize("mistake, kernel, words", MISTAKES, ids=[m[0] for m in MISTAKES])
def test_mistakes_are_caught(kernels, mistake, kernel, words):
    error, _ = kernel(kernels, words())
    assert error > 0.05, mistake
