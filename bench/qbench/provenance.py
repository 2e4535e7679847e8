"""Where, when and under which clocks a record was made."""

import math
import os
import pathlib
import platform
import statistics
import subprocess
import threading
import time

from .record import ROOT

#: what nvidia-smi is asked for while shapes are measured
FIELDS = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "power.draw": "power_w",
    "temperature.gpu": "celsius",
}
PERIOD_MS = 100


def command_output(*command):
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.strip()


def commit(given):
    """The commit of the tree; `given` where the tree is no git checkout."""
    if given:
        return given
    return command_output("git", "-C", ROOT, "describe", "--always", "--dirty") or "unknown"


def common(given_commit):
    return {
        "date": time.strftime("%Y-%m-%d"),
        "time": time.strftime("%H:%M:%S%z"),
        "commit": commit(given_commit),
        "python": platform.python_version(),
    }


def cpu_model():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def cpu_facts(torch, qattn, threads):
    return {
        "cpu": cpu_model(),
        "isa": qattn.cpu_isa(),
        "threads": threads,
        "torch": torch.__version__,
        "qattn": qattn.__version__,
        "load_before": os.getloadavg()[0],
    }


def smi_id(torch):
    """What nvidia-smi calls torch's device: indices differ where some GPUs are hidden."""
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return f"GPU-{uuid}" if uuid else str(torch.cuda.current_device())


def gpu_facts(torch):
    index = torch.cuda.current_device()
    query = "driver_version,power.limit,clocks.max.sm,clocks.max.mem,persistence_mode"
    answer = command_output(
        "nvidia-smi", f"--id={smi_id(torch)}", f"--query-gpu={query}", "--format=csv,noheader"
    )
    facts = dict(zip(query.split(","), (x.strip() for x in answer.split(",")))) if answer else {}
    major, minor = torch.cuda.get_device_capability()
    return {
        "gpu": torch.cuda.get_device_name(),
        "architecture": f"sm_{major}{minor}",
        "multiprocessors": torch.cuda.get_device_properties(index).multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nvidia_smi": facts,
    }


def parse_sample(line):
    """{field: number} of one line of nvidia-smi; fields that it does not know are left out."""
    sample = {}
    for name, text in zip(FIELDS.values(), line.split(",")):
        try:
            sample[name] = float(text)
        except ValueError:
            continue  # "[N/A]"
    return sample


class Sampler:
    """Clocks, power and temperature while shapes are measured. A context manager.

    One nvidia-smi in the background: starting one a shape would cost more than the shape.
    """

    def __init__(self, device_id, command=None):
        self.samples = []  # (time.monotonic(), {...})
        self.command = command or [
            "nvidia-smi",
            f"--id={device_id}",
            f"--query-gpu={','.join(FIELDS)}",
            "--format=csv,noheader,nounits",
            f"--loop-ms={PERIOD_MS}",
        ]
        self.process = None

    def __enter__(self):
        try:
            self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        except OSError:
            return self  # a record without clocks says so: summary() is empty
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        return self

    def _read(self):
        for line in self.process.stdout:
            sample = parse_sample(line)
            if sample:
                self.samples.append((time.monotonic(), sample))

    def __exit__(self, *_):
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.reader.join(timeout=5)

    def summary(self, spans=((0.0, math.inf),)):
        """Median, smallest and largest of each field in these times."""
        recent = [s for when, s in list(self.samples) if any(a <= when <= b for a, b in spans)]
        result = {}
        for name in FIELDS.values():
            values = [s[name] for s in recent if name in s]
            if values:
                result[name] = {
                    "median": statistics.median(values),
                    "min": min(values),
                    "max": max(values),
                }
        return result


class NoSampler:
    """Of devices without such a tool."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def summary(self, spans=()):  # noqa: ARG002
        return {}
