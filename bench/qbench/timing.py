"""Times of callables that take turns, so that clocks and neighbours that drift hit all alike."""

import statistics
import time

EVICT_BYTES = 256 << 20  # several times an L2, or a CPU's L3
MIN_ROUNDS = 3


class WallClock:
    def milliseconds(self, call):
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3


class ColdClock(WallClock):
    """Of calls that find nothing of their operands in a CPU's caches, nor another call's."""

    def __init__(self, torch):
        self.evict = torch.zeros(EVICT_BYTES // 4, dtype=torch.int32)

    def milliseconds(self, call):
        self.evict.max()
        return super().milliseconds(call)


class CudaClock:
    """Between CUDA events. Before each, L2 is filled with something else by reading it.

    While the GPU does that, the host enqueues the call: its time is not measured.
    """

    def __init__(self, torch):
        self.torch = torch
        self.evict = torch.zeros(EVICT_BYTES // 4, dtype=torch.int32, device="cuda")

    def milliseconds(self, call):
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.evict.max()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def check_limits(seconds, rounds):
    """Raises ValueError."""
    if rounds < MIN_ROUNDS or seconds <= 0:
        raise ValueError(f"rounds: at least {MIN_ROUNDS}; seconds: more than 0")


def interleaved(clock, calls, seconds, rounds):
    """Lists of milliseconds by key, one call of each a round, after a round that warms up.

    As many rounds as fit into `seconds`, from MIN_ROUNDS to `rounds`.
    """
    before = time.monotonic()
    for call in calls.values():
        clock.milliseconds(call)
    one = max(time.monotonic() - before, 1e-6)
    count = min(rounds, max(MIN_ROUNDS, int(seconds / one) - 1))
    times = {key: [] for key in calls}
    for _ in range(count):
        for key, call in calls.items():
            times[key].append(clock.milliseconds(call))
    return times


def summary(times):
    """What a record keeps of a list of milliseconds. spread: interquartile range / median."""
    median = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return {
        "median_ms": median,
        "min_ms": min(times),
        "spread": (high - low) / median,
        "rounds": len(times),
    }
