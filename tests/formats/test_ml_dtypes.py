"""The codecs against ml_dtypes and numpy, which share no code with them.

Needs numpy, ml_dtypes and the formats_dump program, whose path is in QATTN_FORMATS_DUMP.
"""

import json
import os
import subprocess

import ml_dtypes
import numpy as np
import pytest

# name -> (the judge's type, bits of a code, largest finite value)
FLOATS = {
    "f16": (np.float16, 16, None),
    "bf16": (ml_dtypes.bfloat16, 16, None),
    "e4m3": (ml_dtypes.float8_e4m3fn, 8, 448.0),
    "e4m3fnuz": (ml_dtypes.float8_e4m3fnuz, 8, 240.0),
    "e5m2": (ml_dtypes.float8_e5m2, 8, 57344.0),
    "e2m1": (ml_dtypes.float4_e2m1fn, 4, 6.0),
}


def all_codes(name):
    dtype, bits, _ = FLOATS[name]
    codes = np.arange(1 << bits, dtype=np.uint16 if bits == 16 else np.uint8)
    return codes.view(dtype)


def widened(name):
    with np.errstate(invalid="ignore"):  # there are signalling NaNs among the codes
        return all_codes(name).astype(np.float32)


def encode(name, values):
    """The judge's codes. float8 and float4 saturate here but become NaN or infinite beyond their
    range in ml_dtypes, so finite inputs are clipped first: in range that changes nothing."""
    dtype, bits, largest = FLOATS[name]
    if largest is not None:
        values = np.clip(values, -largest, largest)
    with np.errstate(over="ignore"):
        coded = values.astype(np.float32).astype(dtype)
    return coded.view(np.uint16 if bits == 16 else np.uint8)


def decisions(name):
    """Every value, every halfway point, and their float32 neighbours."""
    values = widened(name)
    values = np.unique(values[np.isfinite(values)].astype(np.float64))
    points = np.concatenate([values, 0.5 * (values[1:] + values[:-1])]).astype(np.float32)
    above = np.nextafter(points, np.float32(np.inf))
    below = np.nextafter(points, np.float32(-np.inf))
    return np.concatenate([points, above, below])


def make_inputs():
    rng = np.random.default_rng(2024)
    patterns = rng.integers(0, 1 << 32, 100_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    scales = rng.choice(np.float32([0.01, 1, 30, 1000, 30000]), 100_000)
    spread = rng.standard_normal(100_000).astype(np.float32) * scales
    grid = np.arange(-600, 601, dtype=np.float32) * np.float32(0.5)
    special = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 65519.996, 65520, 3.4e38, -3.4e38])
    return np.concatenate([patterns, spread, grid, special, *map(decisions, FLOATS)])


@pytest.fixture(scope="module")
def inputs():
    return make_inputs()


@pytest.fixture(scope="module")
def tables(inputs):
    program = os.environ.get("QATTN_FORMATS_DUMP")
    assert program, "set QATTN_FORMATS_DUMP to the path of formats_dump"
    text = "\n".join(map(str, inputs.view(np.uint32)))
    out = subprocess.run([program], input=text, capture_output=True, text=True, check=True).stdout
    rows = [json.loads(line) for line in out.splitlines()]
    return {row["format"]: row for row in rows}


def decoded(row):
    return np.array(row["decode"], dtype=np.uint32).view(np.float32)


def assert_same(got, expected, inputs):
    wrong = np.flatnonzero(got != expected)
    shown = [(float(inputs[i]).hex(), int(got[i]), int(expected[i])) for i in wrong[:5]]
    assert wrong.size == 0, f"{wrong.size} differ; (input, got, expected): {shown}"


@pytest.mark.parametrize("name", FLOATS)
def test_decode_every_code(tables, name):
    ours = decoded(tables[name])
    theirs = widened(name)
    assert np.array_equal(np.isnan(ours), np.isnan(theirs))
    numbers = ~np.isnan(theirs)
    assert np.array_equal(ours[numbers].view(np.uint32), theirs[numbers].view(np.uint32))


@pytest.mark.parametrize("name", FLOATS)
def test_encode_finite(tables, inputs, name):
    finite = np.isfinite(inputs)
    ours = np.array(tables[name]["encode"])
    assert_same(ours[finite], encode(name, inputs[finite]), inputs[finite])


@pytest.mark.parametrize("name", ["e4m3", "e4m3fnuz", "e5m2"])
def test_float8_turns_nan_and_infinities_into_nan(tables, inputs, name):
    broken = ~np.isfinite(inputs)
    codes = np.array(tables[name]["encode"])[broken]
    assert np.all(np.isnan(all_codes(name)[codes].astype(np.float32)))


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_16_bit_keeps_infinities_and_nan(tables, inputs, name):
    broken = ~np.isfinite(inputs)
    values = all_codes(name)[np.array(tables[name]["encode"])[broken]].astype(np.float32)
    assert np.array_equal(values, inputs[broken], equal_nan=True)


def test_e2m1_saturates_infinities_and_drops_nan(tables, inputs):
    codes = np.array(tables["e2m1"]["encode"])
    assert np.all(codes[inputs == np.inf] == 7)
    assert np.all(codes[inputs == -np.inf] == 15)
    assert np.all(codes[np.isnan(inputs)] == 0)


def test_ue8m0(tables, inputs):
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)
    assert np.array_equal(decoded(tables["ue8m0"]), codes.astype(np.float32), equal_nan=True)
    ours = np.array(tables["ue8m0"]["encode"])
    finite = np.isfinite(inputs)
    exponent = np.frexp(inputs[finite].astype(np.float64))[1] - 1
    expected = np.where(inputs[finite] == 0, 0, np.clip(exponent + 127, 0, 254))
    assert_same(ours[finite], expected, inputs[finite])
    assert np.all(ours[~finite] == 255)


def assert_integers(tables, inputs, name, expected):
    numbers = ~np.isnan(inputs)
    ours = np.array(tables[name]["encode"])
    assert_same(ours[numbers], expected(inputs[numbers].astype(np.float64)), inputs[numbers])
    assert np.all(ours[~numbers] == 0)


@pytest.mark.parametrize("name,low,high", [("s8", -127, 127), ("u8", 0, 255)])
def test_integers(tables, inputs, name, low, high):
    assert_integers(tables, inputs, name, lambda x: np.clip(np.rint(x), low, high))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_kv_grid(tables, inputs, bits):
    half = 1 << (bits - 1)
    grid = np.arange(2 * half) - half + 0.5
    assert np.array_equal(decoded(tables[f"kv{bits}"]), grid)
    code = lambda x: np.clip(np.floor(x) + half, 0, 2 * half - 1)
    assert_integers(tables, inputs, f"kv{bits}", code)
