"""qattn explain --device: what a GPU that is not here would get."""

import json
import os
import subprocess

import pytest

PROGRAM = os.environ.get("QATTN_CLI")
pytestmark = pytest.mark.skipif(not PROGRAM, reason="QATTN_CLI is not set")

SHAPE = "1,32,8,4096,4096,128"
GPUS = ["sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120",
        "sm_121"]


def explain(*arguments, shape=SHAPE):
    command = [PROGRAM, "explain", "--shape", shape, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def explained(*arguments, shape=SHAPE):
    done = explain(*arguments, "--json", shape=shape)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refused(*arguments, status, says):
    """Both streams: the explanation is printed all the same."""
    done = explain(*arguments)
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    for text in says:
        assert text in done.stderr, done.stderr
    return done


@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_gets_a_kernel_of_its_own_plan(gpu):
    said = explained("--device", gpu, "--recipe", "int8_full", "--causal")
    assert said["possible"]
    assert said["kernel"] == ("sm90a_prefill" if gpu == "sm_90" else "sm80_prefill")
    of_int8 = explained("--device", gpu, "--recipe", "int8", "--input-format", "bf16")
    own = {"sm_120": "sm120a_prefill", "sm_121": "sm120a_prefill"}
    if gpu != "sm_90":
        assert of_int8["kernel"] == own.get(gpu, "sm80_prefill")
    assert f"architecture: {gpu}\n" in said["plan"]
    assert said["device"]["name"] == gpu and said["device"]["multiprocessors"] > 0
    assert "90a" in said["device"]["code"].split()
    if gpu != "sm_90":
        assert "sm90a_prefill: is for sm_90\n" in said["explanation"]


def test_the_text_says_what_is_taken_for_given():
    bf16 = ("--device", "sm_120", "--recipe", "int8", "--input-format", "bf16")
    done = explain(*bf16)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()[:2]
    assert first.startswith("device: sm_120 (") and "170 multiprocessors" in first
    assert second == "library: libqattn_cuda with code for 80 89 90a 100f 120f"
    assert "sm120a_prefill: chosen" in done.stdout
    done = explain(*bf16, "--softcap", "30")
    assert "sm80_prefill: chosen" in done.stdout
    assert "sm120a_prefill: of int8 it serves the plain calls" in done.stdout


def test_rules_are_those_of_the_kernels():
    fp8 = ("--recipe", "fp8", "--input-format", "bf16")
    for gpu, kernel in (("sm_89", "sm80_prefill"), ("sm_90", "sm90a_prefill"),
                        ("sm_120", "sm120a_prefill"), ("sm_121", "sm120a_prefill")):
        assert explained("--device", gpu, *fp8)["kernel"] == kernel
    done = refused("--device", "sm_100", *fp8, status=3, says=["emulates mma.sync of FP8"])
    assert "sm80_prefill: sm_100 emulates mma.sync" in done.stdout
    refused("--device", "sm_86", *fp8, status=3, says=["sm_86 has no FP8 products"])
    refused("--device", "sm_75", status=3, says=["needs sm_80 or newer"])
    assert explained("--device", "sm_120", "--recipe", "nvfp4")["kernel"] == "sm120a_prefill"
    refused("--device", "sm_90", "--recipe", "nvfp4", status=3,
            says=["no GPU path for Q and K in nvfp4"])
    refused("--device", "sm_90", "--recipe", "bf16", status=3, says=["q is f32"])


def test_a_gpu_without_kernels():
    for gpu in ("gfx942", "gfx950"):
        says = [f"{gpu}: qattn has no kernels for AMD GPUs"]
        done = refused("--device", gpu, status=3, says=says)
        assert says[0] in done.stdout
        done = explain("--device", gpu, "--json")
        said = json.loads(done.stdout)
        assert done.returncode == 3 and not said["possible"] and said["device"]["name"] == gpu


def test_multiprocessors_decide_how_few_queries_are_shared():
    def splits(*arguments):
        plan = explained("--device", "sm_90", *arguments, shape="1,8,8,1,8192,128")["plan"]
        return int(plan.split("\nsplits: ")[1].split("\n")[0])

    assert splits("--multiprocessors", "1") == 1
    assert splits() == splits("--multiprocessors", "132") > 1


def test_bad_devices_are_refused():
    refused("--device", "sm_91", status=2, says=['--device "sm_91"', "sm_90", "gfx950"])
    refused("--device", "cpu", status=2, says=['--device "cpu"'])
    refused("--device", "sm_90", "--backend", "cpu", status=2, says=["--backend cpu", "--device"])
    refused("--device", "sm_90", "--threads", "4", status=2, says=["threads: 4 is for CPUs"])
    refused("--multiprocessors", "3", status=2, says=["--multiprocessors", "--device"])
    for count in ("0", "-1", "4097"):
        refused("--device", "sm_90", "--multiprocessors", count, status=2,
                says=[f"--multiprocessors {count}"])
