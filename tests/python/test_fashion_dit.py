"""tools/eval/fashion_dit.py: its parts by hand, and every command in miniature."""

import gzip
import json
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
sys.path.insert(0, str(ROOT / "tools" / "eval"))

import dit_evaluate  # noqa: E402
import dit_finetune  # noqa: E402
import dit_model  # noqa: E402
import dit_sheet  # noqa: E402
import fashion_dit  # noqa: E402

pytestmark = pytest.mark.slow


def write_data(folder, count):
    """Squares whose side says their class, in the data set's format."""
    folder.mkdir()
    for part in ("train", "t10k"):
        pixels, labels = np.zeros((count, 28, 28), np.uint8), np.arange(count) % 10
        for image, label in zip(pixels, labels):
            image[4 : 6 + 2 * label, 4 : 6 + 2 * label] = 255
        head = struct.pack(">IIII", 0x803, count, 28, 28)
        for kind, data in (("images-idx3", head + pixels.tobytes()),
                           ("labels-idx1", struct.pack(">II", 0x801, count)
                            + labels.astype(np.uint8).tobytes())):  # fmt: skip
            (folder / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(data))
    return folder


def pixels_of(png):
    """Height, width and bytes of a picture, by the format's own rules."""
    data, at, found = png.read_bytes(), 8, b""
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack_from(">I", data, at + 8 + size)[0] == zlib.crc32(kind + body)
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack_from(">IIBB", body)
            assert (depth, colour) == (8, 0)
        found += body if kind == b"IDAT" else b""
        at += size + 12
    rows = np.frombuffer(zlib.decompress(found), np.uint8).reshape(height, width + 1)
    assert not rows[:, 0].any()
    return rows[:, 1:]


def test_the_data_set_is_read_and_checked(tmp_path):
    data = write_data(tmp_path / "data", 30)
    images = dit_model.read_images(data, "t10k", 20)
    assert images.pixels.shape == (20, 1, 32, 32) and images.labels.tolist() == [*range(10)] * 2
    assert images.pixels[3, 0, 6:14, 6:14].eq(1).all() and images.pixels[3].sum() == 2 * 64 - 1024
    path = data / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1]))
    with pytest.raises(ValueError, match="is no file of Fashion-MNIST"):
        dit_model.read_images(data, "t10k")


def test_frechet_distance_by_hand():
    """Of normal distributions with diagonal covariances: squares of what means and roots differ."""
    a = torch.zeros(2, dtype=torch.float64), torch.diag(torch.tensor([4.0, 1.0]).double())
    b = torch.tensor([3.0, 0.0]).double(), torch.diag(torch.tensor([1.0, 9.0]).double())
    assert dit_model.frechet(a, b) == pytest.approx(9 + 1 + 4)
    assert dit_model.frechet(a, a) == pytest.approx(0, abs=1e-9)


def test_patches_come_back_in_their_place():
    """A network whose layers do nothing, with an inlet and outlet that are the identity."""
    model = dit_model.DiT(dit_model.Shape(patch=8, hidden=64, layers=1))
    with torch.no_grad():
        for layer in (model.inlet, model.outlet):
            layer.weight.copy_(torch.eye(64))
            layer.bias.zero_()
        model.position.zero_()
    x = torch.randn(2, 1, 32, 32)
    patches = x.unfold(2, 8, 8).unfold(3, 8, 8)
    mean = patches.mean((-1, -2), keepdim=True)
    spread = patches.var((-1, -2), keepdim=True, correction=0)
    wanted = (patches - mean) / (spread + 1e-5).sqrt()
    made = model(x, torch.tensor([0.1, 0.9]), torch.tensor([3, 7]))
    torch.testing.assert_close(made.unfold(2, 8, 8).unfold(3, 8, 8), wanted)


def test_psnr_and_picture(tmp_path):
    x = torch.zeros(2, 1, 32, 32)
    assert dit_evaluate.psnr(x + 0.02, x) == pytest.approx([40, 40]) and dit_evaluate.psnr(
        x, x
    ) == pytest.approx([200, 200])
    dit_evaluate.write_sheet(tmp_path / "x.png", [x, torch.stack([x[0] + 1, x[1] - 1])])
    grey = pixels_of(tmp_path / "x.png")
    assert grey.shape == (4 * 29, 4 * 29)
    assert [grey[a, b] for a, b in ((0, 0), (60, 0), (60, 60), (57, 57))] == [128, 255, 0, 255]


def test_sheet_beside_float32(tmp_path):
    """Three ways of ten images each; the second differs by one step of grey, the third by many."""
    pytest.importorskip("matplotlib")
    x = torch.zeros(dit_model.CLASSES, 1, 32, 32)
    result = tmp_path / "x.json"
    result.write_text(json.dumps({"sheet": [["float32", ""], ["torch", ""], ["fp8", "table"]]}))
    dit_evaluate.write_sheet(tmp_path / "x.png", [x, x + 1.5 / 127.5, x + 0.5])
    rows = dit_sheet.rows_of(result, (("torch", ""), ("fp8", "table")))
    assert [name for name, _ in rows] == ["float32", "torch, bf16", "difference x 16",
                                          "fp8, table", "difference x 16"]  # fmt: skip
    assert [pixels[3, 3] for _, pixels in rows] == [128, 129, 16, 191, 255]
    assert all(pixels[57, 3] == pixels[3, 57] == 255 for _, pixels in rows)
    dit_sheet.draw(rows, tmp_path / "y.png")
    assert (tmp_path / "y.png").read_bytes()[16:24] == struct.pack(">II", 730, 290)
    with pytest.raises(ValueError, match=r"no row of \[\('int8_full', 'table'\)\]"):
        dit_sheet.rows_of(result)


def test_budget():
    budget = fashion_dit.Budget(100)
    budget.took(10)
    assert budget.allows() and budget.allows(8) and not budget.allows(10)
    assert fashion_dit.Budget(None).allows(1e9)


def test_every_command_in_miniature(tmp_path, capsys):
    data, model = write_data(tmp_path / "data", 40), tmp_path / "model"
    common = ["--data", str(data), "--device", "cpu", "--no-compile", "--commit", "abc"]
    assert fashion_dit.main(["train", *common, "-o", str(model), "--preset", "tiny", "--steps", "8",
                             "--classifier-steps", "3", "--batch", "16"]) == 0  # fmt: skip
    training = json.loads((model / fashion_dit.TRAINING).read_text())
    assert training["steps"] == 8 and training["curve"][-1][1] < training["curve"][0][1]
    with torch.no_grad():  # so few steps leave blocks that add nothing
        made = dit_model.make(dit_model.PRESETS["tiny"], "cpu", model / fashion_dit.MODEL)
        for x in made.parameters():
            x.add_(0.05 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))
    import weights

    weights.save(dict(made.named_parameters()), model / fashion_dit.MODEL)
    common += ["--model", str(model)]
    _evaluate(common, tmp_path / "e.json", capsys)
    _finetune(common, tmp_path / "f.json", capsys)


def _evaluate(common, out, capsys):
    asked = ["evaluate", *common, "-o", str(out), "--samples", "12", "--batch", "10", "--steps",
             "3", "--late", "1"]  # fmt: skip
    assert fashion_dit.main([*asked, "--budget-seconds", "0"]) == 3
    assert "left to --resume" in capsys.readouterr().out
    first = json.loads(out.read_text())
    assert first["rows"] == [] and not first["complete"]
    assert fashion_dit.main([*asked, "--resume"]) == 0
    result = json.loads(out.read_text())
    assert result["paired"] == first["paired"] and result["complete"]
    assert [(dit_evaluate.Way(x["recipe"], x["policy"]), x["seed"]) for x in result["rows"]] == [
        *dit_evaluate.DISTANCES
    ]
    by_way = {dit_evaluate.Way(x["recipe"], x["policy"]): x for x in result["paired"]}
    assert set(by_way) == set(dit_evaluate.PAIRED)
    # In float32 nothing but attention differs, and the last step of "late" is in 16 bits.
    assert min(by_way[dit_evaluate.TORCH]["psnr"]) == 200
    int8, late = (by_way[dit_evaluate.Way("int8_full", p)]["psnr"] for p in ("dynamic", "late"))
    assert int8[:2] == late[:2] and 30 < int8[2] < late[2]
    rows = {(x["recipe"], x["policy"], x["seed"]): x for x in result["rows"]}
    for recipe, operands in (("int8", 2), ("int8_full", 3)):
        row = rows[recipe, "table", 0]
        assert row["codes"] == 12 * 16 * 64 * 2 * 3 * operands and len(row["clipped"]) == 3
    assert rows["torch", "", 0]["distance"] == pytest.approx(rows["float32", "", 0]["distance"])
    assert rows["torch", "", 0]["distance"] != rows["torch", "", 1]["distance"]
    assert set(result["timing"]["step"]) == {"torch", "bf16", *(
        f"{r} {p}" for r in dit_evaluate.RECIPES for p in ("dynamic", "table")
    )}  # fmt: skip
    assert set(result["timing"]["attention"]) == set(result["timing"]["step"])
    grey = pixels_of(out.with_suffix(".png"))
    assert grey.shape == (58 * len(result["sheet"]), 580) and len(result["sheet"]) == 10
    assert fashion_dit.main([*asked, "--resume", "--samples", "11"]) == 1
    assert "begin one without --resume" in capsys.readouterr().err
    assert fashion_dit.main(["table", str(out)]) == 0
    assert "| int8_full late | 0 |" in capsys.readouterr().out


def _finetune(common, out, capsys):
    asked = ["finetune", *common, "-o", str(out), "--batch", "8", "--steps", "6", "--reports", "3",
             "--seeds", "0"]  # fmt: skip
    assert fashion_dit.main([*asked, "--attention", "torch"]) == 0
    assert fashion_dit.main([*asked, "--resume"]) == 0
    result = json.loads(out.read_text())
    rows = {row["attention"]: row for row in result["rows"]}
    assert [*rows] == ["torch", "int8", "detached"] and result["complete"]
    assert result["training"]["images"] == 32 and result["training"]["held_out"] == 8
    assert rows["torch"]["held_out"] < result["start"]
    assert rows["int8"]["held_out"] == pytest.approx(rows["torch"]["held_out"], rel=1e-3)
    apart = {x: abs(rows[x]["held_out"] - rows["torch"]["held_out"]) for x in ("int8", "detached")}
    assert apart["int8"] < apart["detached"]
    assert fashion_dit.main(["table", str(out)]) == 0
    assert "| detached |" in capsys.readouterr().out


def test_the_committed_records():
    """What the pages say of them: 8-bit attention within what bf16's noise does, and a
    training with INT8 that ends where torch's does, unlike the control."""
    for name in ("fashion-dit.json", "fashion-dit-training.json"):
        assert fashion_dit.main(["table", str(RESULTS / name)]) == 3  # some of it is left
    result = json.loads((RESULTS / "fashion-dit.json").read_text())
    distance = {(x["recipe"], x["policy"], x["seed"]): x["distance"] for x in result["rows"]}
    of_torch = [x for (recipe, _, _), x in distance.items() if recipe == "torch"]
    spread = max(of_torch) - min(of_torch)
    assert len(of_torch) == 3 and result["floor"] < min(of_torch)
    for recipe in ("int8", "int8_full"):
        for policy in ("dynamic", "table", "late"):
            apart = distance[recipe, policy, 0] / distance["torch", "", 0] - 1
            assert apart < min(0.005, spread / distance["torch", "", 0]), (recipe, policy)
    tuned = json.loads((RESULTS / "fashion-dit-training.json").read_text())["summary"]
    assert tuned["int8"]["within_spread"] and tuned["int8"]["steps_over_torch"] < 1.05
    assert not tuned["detached"]["within_spread"] and tuned["detached"]["steps"] is None


def test_images_to_train_on_are_turned_and_apart(tmp_path):
    images = dit_model.read_images(write_data(tmp_path / "data", 45), "t10k")
    train, held_out = dit_finetune.split(images, 4, "cpu")
    assert len(train.labels) == 41 and len(held_out.labels) == 4
    assert held_out.labels.tolist() == [1, 2, 3, 4]
    assert train.pixels[3, 0, 18:26, 6:14].eq(1).all()
    with pytest.raises(ValueError, match="less than two batches"):
        dit_finetune.split(images, 30, "cpu")


@pytest.mark.parametrize("missing", ["qbench", "weights"])
def test_what_is_missing_stops_a_training_before_it_begins(tmp_path, capsys, monkeypatch, missing):
    data, out = write_data(tmp_path / "data", 20), tmp_path / "model"
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(dit_model, "train_classifier", lambda *_: pytest.fail("trained"))
    asked = ["train", "--data", str(data), "-o", str(out), "--device", "cpu", "--preset", "tiny"]
    assert fashion_dit.main(asked) == 1
    assert missing in capsys.readouterr().err and not out.exists()


def test_a_training_is_kept_whose_loss_held_out_fails(tmp_path, capsys, monkeypatch):
    data, out = write_data(tmp_path / "data", 20), tmp_path / "model"

    def fails(*_):
        raise ValueError("no loss")

    monkeypatch.setattr(dit_model, "held_out_loss", fails)
    asked = ["train", "--data", str(data), "-o", str(out), "--device", "cpu", "--preset", "tiny",
             "--no-compile", "--steps", "2", "--classifier-steps", "1", "--batch", "4"]  # fmt: skip
    assert fashion_dit.main(asked) == 1
    training = json.loads((out / fashion_dit.TRAINING).read_text())
    assert training["steps"] == 2 and training["held_out"] is None


def test_refusals(tmp_path, capsys):
    assert fashion_dit.main(["train", "--data", str(tmp_path), "-o", str(tmp_path / "x")]) == 1
    assert "train-images-idx3-ubyte.gz" in capsys.readouterr().err
    (tmp_path / "x.json").write_text('{"schema": 9}')
    assert fashion_dit.main(["table", str(tmp_path / "x.json")]) == 1
    assert "should be 1" in capsys.readouterr().err
