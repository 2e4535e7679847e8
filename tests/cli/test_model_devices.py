"""qattn_model on GPUs that nothing was measured on: rates, machine code, refusals."""

import json
import os
import subprocess
from pathlib import Path

import pytest

PROGRAM = os.environ.get("QATTN_CLI")
MODEL = PROGRAM and str(Path(PROGRAM).with_name("qattn_model"))  # it comes with the tests
RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
SLOTS = RESULTS / "gpu-slots.json"
pytestmark = pytest.mark.skipif(not PROGRAM, reason="QATTN_CLI is not set")


def model(*arguments):
    command = [MODEL, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def devices(*arguments):
    done = model(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["devices"]


def test_rates_are_of_the_device():
    call = ("--device", "5090,pro6000", "--shape", "1,1,1,1024,1024,64", "--recipe", "nvfp4")
    first, second = devices(*call, "--compiled", SLOTS)
    assert first["machine"]["name"] == "NVIDIA GeForce RTX 5090"
    assert second["machine"]["multiprocessors"] == 188
    row = first["rows"][0]
    assert row["kernel"] == "sm120a_prefill" and row["compiled"]
    # FP4 products of 128 x 128 scores and those of row sums, at 2048 a clock.
    assert row["clocks_a_tile"]["tensor"] == pytest.approx(2 * 64 * 128 * 128 / 2048 + 64)
    wanted = {"kernel": "sm120a_prefill", "recipe": "nvfp4", "dim": 64}
    rows = json.loads(SLOTS.read_text())["rows"]
    slot = next(x for x in rows if wanted.items() <= x.items())
    assert row["clocks_a_tile"]["issue"] == pytest.approx(slot["a_tile"]["issue"] / 4)
    flop = 4 * 64 * 1024 * 1024
    assert row["tflops"] == pytest.approx(flop / (row["predicted_ms"] * 1e-3) / 1e12)
    assert row["tflops_in_turn"] < row["tflops"]


def test_the_committed_predictions_are_of_the_kernels():
    committed = json.loads((RESULTS / "model-sm120.json").read_text())["devices"]
    wanted = committed[0]["rows"][-1]
    shape = wanted["shape"]
    names = ("batch", "heads_q", "heads_kv", "queries", "keys", "dim")
    call = ["--device", "5090,a100", "--shape", ",".join(str(shape[x]) for x in names)]
    call += ["--recipe", wanted["recipe"] + ",bf16", "--compiled", SLOTS]
    row = devices(*call, *(["--causal"] if shape["causal"] else []))[0]["rows"][0]
    for key in ("clocks_a_tile", "bound_us"):
        assert row[key] == pytest.approx(wanted[key], rel=2e-3, abs=1), "run `make model`"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--device", "5090,3090"), "--device 3090"),
        (("--compiled", "absent.json"), "absent.json"),
        (("--compiled", RESULTS / "model-sm120.json"), "no record of tools/gpu_slots.py"),
        (("--device", "5090,h200", "--measured", RESULTS / "gpu-h200-prefill.json"), "one device"),
    ],
)
def test_refusals(arguments, says):
    done = model(*arguments)
    assert done.returncode == 2 and says in done.stderr and not done.stdout
