"""tools/eval/train_byte_model.py: its parts by hand, and a tiny run from end to end."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "eval"))

import byte_model  # noqa: E402
import train_byte_model  # noqa: E402


def row(way, seed, *losses):
    curve = [[10 * (i + 1), loss, loss] for i, loss in enumerate(losses)]
    return {"attention": way, "seed": seed, "curve": curve, "held_out": losses[-1]}


def test_steps_to():
    curve = row("torch", 0, 4.0, 3.0, 2.0, 2.5)["curve"]
    assert train_byte_model.steps_to(curve, 4.5) == 10
    assert train_byte_model.steps_to(curve, 2.5) == pytest.approx(25)
    assert train_byte_model.steps_to(curve, 2.0) == 30
    assert train_byte_model.steps_to(curve, 1.9) is None
    assert train_byte_model.steps_to([[10, 1, 1.0], [20, 1, 3.0], [30, 1, 2.0]], 2.0) == 10


def test_summary():
    rows = [row("torch", 0, 3.0, 2.0), row("torch", 1, 3.0, 2.2), row("int8", 0, 3.1, 2.05),
            row("int8", 1, 3.0, 2.1), row("detached", 0, 3.5, 3.4)]  # fmt: skip
    made = train_byte_model.summary(rows)
    assert made["torch"]["spread"] == pytest.approx(0.2)
    assert made["torch"]["steps_over_torch"] == 1.0
    assert made["int8"]["steps_over_torch"] is None, "seed 0 never comes within 2 % of torch's end"
    assert made["int8"]["over_torch"] == pytest.approx(-0.025) and made["int8"]["within_spread"]
    assert made["int8"]["apart"] == pytest.approx(-0.1)
    assert made["detached"]["over_torch"] == pytest.approx(1.4)
    assert not made["detached"]["within_spread"] and made["detached"]["steps"] is None
    assert "over_torch" not in train_byte_model.summary(rows[2:])["int8"]
    same = train_byte_model.summary([row("torch", 0, 3.0, 2.0), row("int8", 0, 3.0, 2.0)])
    assert same["int8"]["steps_over_torch"] == 1.0


def test_weights_come_back(tmp_path):
    shape = byte_model.PRESETS["tiny"]
    torch.manual_seed(0)
    model, other = byte_model.ByteModel(shape), byte_model.ByteModel(shape)
    byte_model.save_weights(model, tmp_path / "model.safetensors")
    byte_model.load_weights(other, tmp_path / "model.safetensors")
    for x, y in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(x.half().float(), y)
    small = byte_model.PRESETS["small"]
    with pytest.raises(ValueError, match="other weights"):
        byte_model.load_weights(byte_model.ByteModel(small), tmp_path / "model.safetensors")


def test_a_tiny_run(tmp_path, capsys):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i}.txt").write_bytes(bytes(range(32, 120)) * 20)
    out = tmp_path / "result.json"
    asked = ["run", "-o", str(out), "--preset", "tiny", "--steps", "2", "--reports", "2", "--text",
             str(folder), "--device", "cpu", "--seeds", "0"]  # fmt: skip
    assert train_byte_model.main([*asked, "--attention", "torch", "int8"]) == 0
    first = json.loads(out.read_text())
    assert train_byte_model.main([*asked, "--resume", "--attention", "int8", "detached"]) == 0
    result = json.loads(out.read_text())
    assert result["rows"][:2] == first["rows"] and len(result["rows"]) == 3
    torch_loss, int8, detached = (x["held_out"] for x in result["rows"])
    assert int8 == pytest.approx(torch_loss, rel=1e-3) and detached != int8
    assert result["rows"][1]["held_out_torch"] == pytest.approx(int8, rel=1e-2)
    capsys.readouterr()
    assert train_byte_model.main(["table", str(out)]) == 0
    assert "| int8 |" in capsys.readouterr().out
    assert train_byte_model.main([*asked, "--resume", "--attention", "int7"]) == 1
    assert "int7" in capsys.readouterr().err
    out.write_text(json.dumps({"schema": 9}))
    assert train_byte_model.main(["table", str(out)]) == 1
