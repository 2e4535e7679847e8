"""emulated_attention: GPU kernels in the emulator on files, against the library on the CPU."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

CLI = os.environ.get("QATTN_CLI")
PROGRAM = CLI and str(Path(CLI).with_name("emulated_attention"))  # it comes with the tests
pytestmark = pytest.mark.skipif(not CLI, reason="QATTN_CLI is not set")

SCHEDULES = (
    ("--schedule", "early", "--order", "reverse"),
    ("--schedule", "late"),
    ("--schedule", "random", "--order", "random", "--seed", "7"),
)


def run(*arguments):
    command = [PROGRAM, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def refused(*arguments, status, says):
    done = run(*arguments)
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    for text in says:
        assert text in done.stderr, done.stderr


@pytest.fixture
def files(tmp_path):
    """--q, --k, --v in f16, and the tensors."""
    rng = np.random.default_rng(5)
    shapes = {"q": (1, 4, 70, 64), "k": (1, 2, 150, 64), "v": (1, 2, 150, 64)}
    tensors = {name: rng.standard_normal(shape).astype(np.float16)
               for name, shape in shapes.items()}
    arguments = []
    for name, tensor in tensors.items():
        np.save(tmp_path / f"{name}.npy", tensor)
        arguments += [f"--{name}", tmp_path / f"{name}.npy"]
    return arguments, tensors


def emulated(folder, arguments, arch, recipe, *options):
    """Output, LSE and report."""
    out, lse = folder / "o.npy", folder / "lse.npy"
    done = run("--arch", arch, *arguments, "--recipe", recipe, "-o", out, "--lse", lse, "--json",
               *options)
    assert done.returncode == 0, done.stderr
    return np.load(out), np.load(lse), json.loads(done.stdout)


def nrmse(a, b):
    a, b = a.astype(np.float64), b.astype(np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


BLOCK, THREAD = ("per_block", 64), ("per_thread", 64)


@pytest.mark.parametrize("arch, recipe, kernel, scales, bound", [
    ("sm80", "f16", "sm80_prefill", {}, 2e-3),
    ("sm90a", "f16", "sm90a_16bit_prefill", {}, 2e-3),
    ("sm80", "int8", "sm80_prefill", {"k_granularity": BLOCK}, 2e-3),
    ("sm90a", "int8", "sm90a_16bit_prefill", {"k_granularity": BLOCK}, 2e-3),
    # Its tiles are of 64 keys, the others' of 128: u8 P is rounded by other maxima.
    ("sm80", "int8_full", "sm80_prefill", {"k_granularity": BLOCK}, 1e-2),
    ("sm90a", "int8_full", "sm90a_prefill",
     {"k_granularity": THREAD, "v_granularity": THREAD}, 2e-3),
    ("sm89", "fp8", "sm80_prefill", {"k_granularity": BLOCK}, 3e-2),  # e4m3 P likewise
])
def test_kernels_compute_what_the_library_does(tmp_path, files, arch, recipe, kernel, scales,
                                               bound):
    qattn = pytest.importorskip("qattn")
    arguments, tensors = files
    want, want_lse = qattn.attention(**tensors, layout="bhsd", recipe=recipe, causal=True,
                                     return_lse=True, **scales)
    first = None
    for schedule in SCHEDULES:
        out, lse, report = emulated(tmp_path, arguments, arch, recipe, "--causal", *schedule)
        assert report["kernel"] == kernel and report["arch"] == arch
        assert report["schedule"] == schedule[1]
        assert nrmse(out, want) <= bound and np.abs(lse - want_lse).max() < 2e-2
        first = first or (out.tobytes(), lse.tobytes())
        assert (out.tobytes(), lse.tobytes()) == first, "the schedule changes the result"


def test_options_of_a_call(tmp_path, files):
    qattn = pytest.importorskip("qattn")
    arguments, tensors = files
    options = ("--window", "40,3", "--softcap", "5", "--scale", "0.3", "--output-format", "f32")
    out, _, report = emulated(tmp_path, arguments, "sm90a", "f16", *options)
    want = qattn.attention(**tensors, layout="bhsd", recipe="f16", window=(40, 3), softcap=5.0,
                           scale=0.3)
    assert out.dtype == np.float32 and nrmse(out, np.asarray(want)) <= 2e-3
    assert "window: 40,3" in report["plan"]


def test_words_are_counted(tmp_path, files):
    arguments, _ = files
    *_, sm80 = emulated(tmp_path, arguments, "sm80", "int8_full")
    *_, sm90a = emulated(tmp_path, arguments, "sm90a", "int8_full")
    portable, hopper = (x["counted"]["warp_instructions"] for x in (sm80, sm90a))
    assert portable["mma int8"] > 0 and "wgmma" not in portable and "tma_load" not in portable
    assert hopper["wgmma"] > 0 and hopper["tma_load"] > 0 and "mma int8" not in hopper
    # Rows and keys as whole tiles, both products.
    least = 2 * 4 * 70 * 150 * 64
    assert sm80["counted"]["multiply_accumulates"] >= least
    done = run("--arch", "sm80", *arguments, "-o", tmp_path / "o.npy", "--recipe", "int8_full")
    assert done.returncode == 0, done.stderr
    for text in ("sm80_prefill", "schedule late, lanes forward", "108 multiprocessors",
                 "mma int8", "warp instructions", "global memory:"):
        assert text in done.stdout
    assert "seed" not in done.stdout


def test_bad_values_end_with_4(tmp_path, files):
    arguments, tensors = files
    tensors["v"][0, 0, 3, 1] = np.nan
    np.save(tmp_path / "v.npy", tensors["v"])
    done = run("--arch", "sm80", *arguments, "-o", tmp_path / "o.npy", "--recipe", "f16")
    assert done.returncode == 4 and "140 of 280 rows hold NaN" in done.stderr


def test_refusals(tmp_path, files):
    arguments, _ = files
    out = tmp_path / "o.npy"
    call = (*arguments, "-o", out)
    refused(*call, status=2, says=["--arch"])
    refused("--arch", "sm100", *call, status=2, says=["--arch sm100", "sm80", "sm90a"])
    refused("--arch", "sm_90", *call, status=2, says=["--arch sm_90", "sm90a"])
    refused("--arch", "sm80", *call, "--schedule", "soon", status=2,
            says=["--schedule soon", "early, late, random"])
    refused("--arch", "sm80", *call, "--order", "up", status=2, says=["--order up", "reverse"])
    refused("--arch", "sm80", *call, "--seed", "3", status=2, says=["--seed 3", "random"])
    refused("--arch", "sm80", *call, "--multiprocessors", "0", status=2,
            says=["--multiprocessors 0"])
    refused("--arch", "sm80", *call, "--backend", "cpu", status=2, says=["--backend"])
    refused("--arch", "sm80", *call, "--threads", "2", status=2, says=["--threads"])
    refused("--arch", "sm80", *call, "--recipe", "int9", status=2, says=["int9"])
    refused("--arch", "sm80", *call, "--recipe", "fp8", status=3,
            says=["sm80_prefill: sm_80 has no FP8 products"])
    refused("--arch", "sm90a", *call, "--recipe", "nvfp4", status=3,
            says=["sm80_prefill: no GPU path for Q and K in nvfp4"])
    refused("--arch", "sm90a", *call, "--recipe", "bf16", status=3, says=["q is f16"])
    for dim, rule in ((260, "260"), (264, "264")):
        odd = tmp_path.parent / f"{tmp_path.name}_odd.npy"
        np.save(odd, np.zeros((1, 4, 70, dim), np.float16))
        same = ("--q", odd, "--k", odd, "--v", odd, "-o", out)
        refused("--arch", "sm90a", *same, "--recipe", "f16", status=2, says=["q", rule, "256"])
        mixed = ("--q", odd, *arguments[2:], "-o", out)
        refused("--arch", "sm90a", *mixed, "--recipe", "f16", status=2, says=[rule])
    assert not out.exists()
