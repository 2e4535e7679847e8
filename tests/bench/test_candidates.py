"""bench/bench.py run, on the GPU kernels in the emulator: other implementations, static scales."""

from test_driver import Record, bench, cells_of, library

__all__ = ["library"]  # the fixture


PEERS = """
import torch

NAMES = ("exact", "wrong")


def make(name, q, k, v, causal):
    if causal:
        raise ValueError("causal: not here")
    out = torch.empty_like(q)

    def call():
        x, y, z = (t.transpose(1, 2).double() for t in (q, k, v))
        y, z = (t.repeat_interleave(x.shape[1] // t.shape[1], 1) for t in (y, z))
        p = (x @ y.mT * x.shape[-1] ** -0.5).softmax(-1)
        out.copy_((p @ z).transpose(1, 2) * (1 if name == "exact" else 2))

    return {"e2e": call, "kernel": call}, lambda: out
"""


def test_other_implementations_take_turns(library, tmp_path):
    path, peers = tmp_path / "record.json", tmp_path / "peers.py"
    peers.write_text(PEERS)
    done = bench(
        "run", "--device", "emulated", "--library", library, "--beside", peers, "--no-errors",
        "-o", path, "--shape", "1,2,1,130,100,64", "--shape", "1,2,1,130,130,64,causal",
        "--rounds", 3, "--commit", "abc", "--recipes", "int8",
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr  # "wrong" is
    cells = Record.load(path).cells
    exact = [c for c in cells if c["candidate"] == "exact"]
    assert [c["step"] for c in exact if c.measured] == ["e2e", "kernel"]
    assert exact[0]["nrmse"] < 5e-3 and "causal" in exact[-1]["refused"]
    assert "failed" in next(c for c in cells if c["candidate"] == "wrong")
    assert {c["candidate"] for c in cells if c.measured} == {"torch", "exact", "int8"}


def test_static_scales_on_the_emulated_gpu(library, tmp_path):
    names = [r + word for r in ("int8", "int8_full") for word in ("", "+static", "+static_mean")]
    cells = cells_of(names, library, tmp_path)
    for name in names:
        assert {step for n, step in cells if n == name} == {"e2e", "quantise", "kernel"}
        assert 1e-3 < cells[name, "e2e"]["nrmse"] < 5e-2, name
    for r in ("int8", "int8_full"):
        dynamic, static = cells[r, "e2e"]["nrmse"], cells[r + "+static", "e2e"]["nrmse"]
        assert dynamic < static  # a scale a head is coarser than one a token
