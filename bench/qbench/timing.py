"""Times of callables that take turns, so that clocks and neighbours that drift hit all alike."""

import itertools
import random
import statistics
import time

EVICT_BYTES = 256 << 20  # several times an L2, or a CPU's L3
MIN_ROUNDS = 3
ORDERS_TRIED = 1000


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


class LongTurns:
    """Turns of so many seconds, of whose second half the times are, call behind call.

    A GPU at its power limit then has the clocks that the candidate's own power leaves it, as where
    a program calls it all the time. In turns of one call all candidates have about the same clocks,
    and those that need less power lose by that what they leave to others.
    """

    BATCH_MS = 10  # that are timed together

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds
        self.spans = {}  # by call: (begin, end) of what counts, as time.monotonic()

    def __call__(self, call):
        count = max(1, round(self.BATCH_MS / max(self.clock.milliseconds(call), 1e-3)))

        def batch():
            for _ in range(count):
                call()

        begin = time.monotonic()
        while time.monotonic() < begin + self.seconds / 2:
            self.clock.milliseconds(batch)
        middle, times = time.monotonic(), []
        while not times or time.monotonic() < begin + self.seconds:
            times.append(self.clock.milliseconds(batch) / count)
        self.spans.setdefault(call, []).append((middle, time.monotonic()))
        return times


def check_limits(seconds, rounds):
    """Raises ValueError."""
    if rounds < MIN_ROUNDS or seconds <= 0:
        raise ValueError(f"rounds: at least {MIN_ROUNDS}; seconds: more than 0")


def orders(keys):
    """Endless orders of `keys`, the same in every run.

    Where there are keys enough, none follows itself, nor whom it followed in the two rounds before:
    a GPU at its power limit gives calls the clocks that others left (H100: the same calls took 2.52
    to 2.80 ms in variants-h100-codes*.json, whose rounds all had one order).
    """
    shuffle, order, recent, last = random.Random(0).shuffle, list(keys), [], None
    while True:
        for _ in range(ORDERS_TRIED):
            shuffle(order)
            pairs = set(zip([last, *order], order))
            if last != order[0] and not any(pairs & old for old in recent):
                break
        recent, last = [*recent[-1:], pairs], order[-1]
        yield tuple(order)


def interleaved(clock, calls, seconds, rounds, turns=None):
    """Lists of milliseconds by key, one call of each a round, after a round that warms up.

    As many rounds as fit into `seconds`, from MIN_ROUNDS to `rounds`, in changing orders (orders).
    `turns`: LongTurns instead of single calls.
    """
    before = time.monotonic()
    for call in calls.values():
        clock.milliseconds(call)
    one = max(time.monotonic() - before, turns.seconds * len(calls) if turns else 0, 1e-6)
    count = min(rounds, max(MIN_ROUNDS, int(seconds / one) - 1))
    times = {key: [] for key in calls}
    for order in itertools.islice(orders(calls), count):
        for key in order:
            call = calls[key]
            times[key] += turns(call) if turns else [clock.milliseconds(call)]
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
