"""tools/eval/terrain.py: the interpreter by hand, and six steps of a diffusion model."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "eval"))
onnx = pytest.importorskip("onnx", reason="onnx is not installed")
import onnx_network  # noqa: E402
import terrain  # noqa: E402

RECORD = ROOT / "bench" / "results" / "diffusion-terrain.json"


# ---- The interpreter -----------------------------------------------------------------------------


def network(path, *, tail=()):
    """1 x 1 convolution to q, k, v; attention of one head; and what `tail` appends to "out"."""
    helper, array = onnx.helper, onnx.numpy_helper.from_array
    weight = np.random.default_rng(3).standard_normal((24, 8, 1, 1)).astype(np.float32) / 3
    constants = {
        "a.qkv.weight": weight,
        "a.qkv.bias": np.linspace(-1, 1, 24, dtype=np.float32),
        "flat": np.array([0, 0, -1], np.int64),
        "shape": np.array([-1, 8, 3, 4], np.int64),
    }
    conv = {"group": 1, "pads": [0] * 4, "strides": [1, 1], "dilations": [1, 1]}
    nodes = [
        helper.make_node("Conv", ["x", "a.qkv.weight", "a.qkv.bias"], ["qkv"], **conv,
                         auto_pad="NOTSET"),
        helper.make_node("Reshape", ["qkv", "flat"], ["rows"], allowzero=0),
        helper.make_node("Split", ["rows"], ["q", "k", "v"], axis=1, num_outputs=3),
        helper.make_node("Einsum", ["q", "k"], ["scores"], equation="bct,bcs->bts"),
        helper.make_node("Softmax", ["scores"], ["p"], axis=-1),
        helper.make_node("Einsum", ["p", "v"], ["o"], equation="bts,bcs->bct"),
        helper.make_node("Reshape", ["o", "shape"], ["out"], allowzero=0),
        *tail,
    ]  # fmt: skip
    shaped = [helper.make_tensor_value_info(x, onnx.TensorProto.FLOAT, None) for x in ("x", "out")]
    graph = helper.make_graph(
        nodes, "net", shaped[:1], shaped[1:], [array(x, name) for name, x in constants.items()]
    )
    onnx.save(helper.make_model(graph), path)
    return constants


def test_a_network_by_hand(tmp_path):
    constants = network(tmp_path / "net.onnx")
    made = onnx_network.Network(tmp_path / "net.onnx")
    assert made.layers == ["a"]
    x = np.random.default_rng(4).standard_normal((2, 8, 3, 4)).astype(np.float32)
    qkv = np.einsum("oc,bcs->bos", constants["a.qkv.weight"][:, :, 0, 0], x.reshape(2, 8, 12))
    q, k, v = np.split(qkv + constants["a.qkv.bias"][:, None], 3, 1)
    p = np.exp(np.einsum("bct,bcs->bts", q, k))
    wanted = np.einsum("bts,bcs->bct", p / p.sum(-1, keepdims=True), v).reshape(x.shape)
    np.testing.assert_allclose(made.run({"x": torch.from_numpy(x)})["out"], wanted, atol=2e-6)

    def attention(layer, *operands):
        for given, own in zip(operands, (q, k, v)):
            np.testing.assert_allclose(given, own, atol=2e-6)
        return operands[2] * (2 if layer == "a" else 0)

    twice = made.run({"x": torch.from_numpy(x)}, attention)["out"]
    np.testing.assert_allclose(twice, 2 * v.reshape(x.shape), atol=4e-6)


def test_unknown_operators_are_refused(tmp_path):
    network(tmp_path / "net.onnx", tail=[onnx.helper.make_node("Tanh", ["out"], ["more"])])
    with pytest.raises(ValueError, match="operators that are not known: Tanh"):
        onnx_network.Network(tmp_path / "net.onnx")


def test_psnr_is_by_the_references_range():
    reference = np.array([[0.0, 4.0], [1.0, 2.0]])
    assert terrain.psnr(reference + 0.04, reference) == pytest.approx(40)


# ---- The record ----------------------------------------------------------------------------------


def rows_of(result):
    return {(row["recipe"], row["policy"]): row for row in result["rows"]}


def test_the_record_shows_what_was_asked():
    """60 dB against float32's sampling: its mean error is a thousandth of the range."""
    rows = rows_of(json.loads(RECORD.read_text()))
    for recipe in ("int8", "int8_full"):
        for policy in ("dynamic", "table"):
            assert rows[recipe, policy]["worst"] >= 60
        assert rows[recipe, "law"]["psnr"] < rows[recipe, "table"]["psnr"] - 20
    assert {recipe for recipe, _ in rows} == {*terrain.STATIC, *terrain.DYNAMIC}
    assert terrain.main(["table", str(RECORD)]) == 0


# ---- The model -----------------------------------------------------------------------------------


@pytest.mark.slow  # a quarter of a minute
@pytest.mark.skipif(
    importlib.util.find_spec(terrain.MODULE) is None,
    reason="adaptive-terrain-diffusion is not installed",
)
def test_six_steps_of_a_diffusion_model(tmp_path):
    asked = argparse.Namespace(
        images=1, seeds=[1], calibration_seeds=[90], recipes=["int8", "int8_full"],
        policies=["dynamic", "table", "law"], threads=torch.get_num_threads(), commit="abc",
    )  # fmt: skip
    result = terrain.evaluate(asked)
    assert result["model"]["attentions"] == 28
    # The network normalises: sigma moves by 400, the maxima by 2 and no more than 5.
    assert all(x["median"] < 4 and x["worst"] < 20 for x in result["maxima"].values())
    rows = rows_of(result)
    for recipe in ("int8", "int8_full"):
        assert rows[recipe, "dynamic"]["psnr"] >= 60
        assert rows[recipe, "table"]["psnr"] >= 60
        assert rows[recipe, "law"]["psnr"] < rows[recipe, "table"]["psnr"] - 15
        assert sum(rows[recipe, "table"]["clipped"]) < 1e-3 * rows[recipe, "table"]["codes"]


def test_a_missing_package_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(terrain, "MODULE", "no_such_package_of_terrains")
    assert terrain.main(["evaluate", "-o", str(tmp_path / "x.json")]) == 1
    assert "adaptive-terrain-diffusion: is not installed" in capsys.readouterr().err
