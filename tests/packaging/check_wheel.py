"""Tests an installed qattn in an environment that has numpy and nothing else.

check_wheel.py [--write RECORD.json --wheel FILE --commit NAME]: besides writes a record of size and
import time, which bench/qbench/wheel.py renders.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import qattn

LIMIT = 0.3  #: seconds that the fastest `import qattn` may take, numpy included
RUNS = 15


def seconds(before: str = "") -> list[float]:
    """Times of `import qattn` in new interpreters, after the statement `before`."""
    code = f"""
from time import perf_counter
{before}
start = perf_counter()
import qattn
print(perf_counter() - start)
"""
    return [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(RUNS)]


def check_environment() -> None:
    for name in ("torch", "ml_dtypes", "transformers"):
        assert importlib.util.find_spec(name) is None, f"{name} is installed; this proves nothing"
    assert importlib.metadata.version("qattn") == qattn.__version__
    installed = {file.name for file in importlib.metadata.files("qattn") or []}
    assert {"py.typed", "_qattn.pyi", "torch.py", "comfyui.py", "LICENSE"} <= installed
    assert not any(name.endswith((".a", ".h", ".hpp", ".cmake", ".pc")) for name in installed)


def check_attention() -> None:
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, 100, 4, 64), np.float32) for _ in range(3))
    exact = qattn.reference_attention(q, k, v, causal=True)
    for recipe, limit in (("f32", 1e-6), ("int8_full", 0.03), ("nvfp4", 0.3)):
        out = qattn.attention(q, k, v, causal=True, recipe=recipe)
        nrmse = np.linalg.norm(out - exact) / np.linalg.norm(exact)
        assert nrmse < limit, (recipe, nrmse)
    codes = qattn.quantize(k, format="s8", role="k")
    assert np.abs(qattn.dequantize(codes) - k).max() < 0.05
    try:
        qattn.attention(q, k[..., :8], v)
    except qattn.InvalidArgument:
        return
    raise AssertionError("operands that do not fit were accepted")


def has_cuda_library() -> bool:
    return any(file.name == "libqattn_cuda.so" for file in importlib.metadata.files("qattn") or [])


def check_cuda_library() -> None:
    """A wheel with libqattn_cuda finds it beside the extension; without a driver it says so."""
    built = has_cuda_library()
    try:
        qattn.device_errors("cuda:0")
    except qattn.Unsupported as error:
        assert ("libqattn_cuda.so: is neither in" in str(error)) != built, error
    else:
        assert built
    print("with" if built else "without", "libqattn_cuda.so")


def check_import_time() -> tuple[float, float]:
    """Medians. Whatever else runs here makes an import longer, never shorter: the limit is for the
    fastest one."""
    all_of, after_numpy = seconds(), seconds("import numpy")
    total, own = statistics.median(all_of), statistics.median(after_numpy)
    fastest = min(all_of)
    print(f"import qattn: {total:.3f} s, the fastest of {RUNS} {fastest:.3f} s; where numpy is "
          f"imported already: {own:.3f} s")  # fmt: skip
    assert fastest < LIMIT, f"import qattn takes {fastest:.3f} s, more than {LIMIT} s"
    return total, own


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def record(wheel: Path, commit: str, seconds: tuple[float, float]) -> dict:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cuda": has_cuda_library(),
        "bytes": wheel.stat().st_size,
        "import_s": round(seconds[0], 4),
        "import_after_numpy_s": round(seconds[1], 4),
        "runs": RUNS,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path)
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--commit")
    options = parser.parse_args()
    if options.write and not (options.wheel and options.commit):
        parser.error("--write needs --wheel and --commit")
    check_environment()
    check_attention()
    check_cuda_library()
    seconds = check_import_time()
    if options.write:
        made = record(options.wheel, options.commit, seconds)
        options.write.write_text(json.dumps(made, indent=1) + "\n")
    print(f"qattn {qattn.__version__} on Python {sys.version.split()[0]}, {qattn.cpu_isa()}: ok")


if __name__ == "__main__":
    main()
