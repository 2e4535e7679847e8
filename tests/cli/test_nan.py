"""What the program says of results that hold NaN or Inf: counts, and exit status 4."""

import json

import numpy as np
import pytest
from test_cli import PROGRAM, qattn, tensors, write_safetensors  # noqa: F401

pytestmark = pytest.mark.skipif(not PROGRAM, reason="QATTN_CLI is not set")


def spoiled(tmp_path, tensors, operand, value, rows):
    """--q and the like of copies, one with `value` in rows [b, h, s]."""
    arguments = []
    for name, tensor in zip("qkv", tensors):
        tensor = tensor.copy()
        if name == operand:
            tensor[rows] = value
        np.save(tmp_path / f"{name}.npy", tensor)
        arguments += [f"--{name}", tmp_path / f"{name}.npy"]
    return arguments


@pytest.mark.parametrize("operand", "qkv")
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_compare_counts_nan_rows(tmp_path, tensors, operand, value):
    queries = tensors[0].shape
    per_head = queries[2]
    hit = np.s_[0, 0, 3]  # K and V: one head, which a group of query heads shares
    files = spoiled(tmp_path, tensors, operand, value, hit)
    group = queries[1] // tensors[1].shape[1]
    bad = 1 if operand == "q" else group * per_head
    done = qattn("compare", *files, "--recipe", "int8_full,f32", "--runs", "1", "--json")
    assert done.returncode == 4 and "hold NaN or Inf" in done.stderr
    for row in json.loads(done.stdout)["results"]:
        assert row["nan_rows"] == row["reference_nan_rows"] == bad
        assert row["output_rows"] == queries[0] * queries[1] * per_head
        assert row["nrmse"] < 3e-2  # of the others
    text = qattn("compare", *files, "--recipe", "int8_full", "--runs", "1")
    assert text.returncode == 4 and "nan_rows" in text.stdout
    assert f"int8_full: {bad} of {row['output_rows']} output rows hold NaN" in text.stderr


def test_compare_counts_rows_that_the_reference_leaves_out(tmp_path, tensors):
    files = spoiled(tmp_path, tensors, "q", np.nan, np.s_[0, 0, 1])
    done = qattn("compare", *files, "--recipe", "f32", "--ref-rows", "2", "--json")
    (row,) = json.loads(done.stdout)["results"]
    assert done.returncode == 4 and row["nan_rows"] == 1 and row["reference_nan_rows"] == 0


def test_compare_of_nothing_but_nan_has_no_error_of_0(tmp_path, tensors):
    files = spoiled(tmp_path, tensors, "k", np.nan, np.s_[:])
    done = qattn("compare", *files, "--recipe", "int8_full,bf16", "--runs", "1", "--json")
    assert done.returncode == 4
    for row in json.loads(done.stdout)["results"]:
        assert row["nrmse"] is row["cosine"] is row["worst_row_cosine"] is None
        assert row["nan_rows"] == row["output_rows"]


def test_other_commands_tell_of_nan(tmp_path, tensors):
    files = spoiled(tmp_path, tensors, "q", np.nan, np.s_[0, 0, 3])
    out = tmp_path / "out.npy"
    done = qattn("attention", *files, "-o", out, "--recipe", "f32", "--json")
    assert done.returncode == 4 and json.loads(done.stdout)["nan_rows"] == 1
    assert f"{out}: 1 of" in done.stderr and np.isnan(np.load(out)).any()
    done = qattn("quantize", tmp_path / "q.npy", "-o", out, "--scale", tmp_path / "scale.npy")
    assert done.returncode == 4 and "x: holds NaN" in done.stderr and out.exists()
    layers = {}
    for name, tensor in zip("qkv", tensors):
        for layer in range(2):
            x = tensor.copy()
            if name == "q" and layer == 1:
                x[0, 0, 3] = np.nan
            layers[f"layer{layer}.{name}"] = ("F32", x)
    write_safetensors(tmp_path / "x.safetensors", layers)
    done = qattn("demo", "--data", tmp_path / "x.safetensors", "--report", tmp_path / "r.html",
                 "--runs", "1", "--tokens", "256", "--json")
    assert done.returncode == 4 and "layer 1: int8_full: 1 of" in done.stderr
    counts = {row["recipe"]: row["nan_rows"] for row in json.loads(done.stdout)["results"]}
    assert counts["int8_full"] == counts["f32"] == 1  # where a scale is shared, more
    assert min(counts.values()) >= 1
    assert "nan rows" in (tmp_path / "r.html").read_text()
