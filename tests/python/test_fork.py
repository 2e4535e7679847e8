"""A child of os.fork() never waits for a lock that another thread of its parent held."""

import os
import signal
import threading

import numpy as np
import pytest

import qattn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork()"),
]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


K, Q, NEW = normal(1, 100, 2, 64), normal(1, 2, 4, 64, seed=1), normal(1, 5, 2, 64, seed=2)


class Parent:
    """A cache that a thread appends to, one that it does not change, and what calls give."""

    def __init__(self):
        self.cache = qattn.KvCache(kv_heads=2, head_dim=64, window=16, sinks=0)
        self.still = qattn.KvCache(kv_heads=2, head_dim=64, window=16, sinks=0)
        self.sequence, self.other = self.cache.add_sequence(), self.still.add_sequence()
        self.cache.append(0, self.sequence, K, K)
        self.still.append(0, self.other, K, K)
        self.decoded = self.still.decode(Q, 0, self.other)
        self.attended = self.attend()
        self.codes = qattn.quantize(K).codes

    def attend(self):
        return qattn.attention(K, K, K, recipe="int8_full", causal=True)

    def decode(self):
        self.cache.decode(normal(1, 8, 4, 64), 0, self.sequence)

    def append(self):
        if self.cache.length(self.sequence) > 3000:
            self.cache.truncate(self.sequence, 100)
        self.cache.append(0, self.sequence, NEW, NEW)

    def make(self):
        made = qattn.KvCache(kv_heads=2, head_dim=64, window=16, sinks=0)
        made.append(0, made.add_sequence(), NEW, NEW)

    def all(self):
        for work in (self.decode, self.append, self.attend, self.make):
            work()
        qattn.quantize(K)
        qattn.explain(K, K, K)

    def is_right(self):
        """What a child finds: every call works, and no append is there in part."""
        if self.cache.length(self.sequence) % 5 != 0:
            return False
        self.cache.append(0, self.sequence, NEW, NEW)
        if not np.isfinite(self.cache.decode(Q, 0, self.sequence)).all():
            return False
        self.make()
        return (
            np.array_equal(self.still.decode(Q, 0, self.other), self.decoded)
            and np.array_equal(self.attend(), self.attended)
            and np.array_equal(qattn.quantize(K).codes, self.codes)
        )


def ends_well(child):
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            os._exit(0 if child() else 1)
        finally:
            os._exit(2)
    return os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("work", ["decode", "append", "attend", "make", "all"])
def test_children_wait_for_nobody(work):
    parent, stop = Parent(), threading.Event()

    def load():
        while not stop.is_set():
            getattr(parent, work)()

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        failed = sum(not ends_well(parent.is_right) for _ in range(20))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failed == 0
    assert parent.is_right(), "the parent is as it was"


def test_two_threads_fork_at_once():
    parent, results = Parent(), []

    def fork():
        for _ in range(10):
            parent.decode()
            results.append(ends_well(parent.is_right))

    threads = [threading.Thread(target=fork) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 30


def test_a_handler_that_forks_inside_a_call():
    parent, ended = Parent(), []

    def handler(*_):
        ended.append(ends_well(parent.is_right))
        signal.setitimer(signal.ITIMER_REAL, 0.02)  # not while it waits: calls would nest for ever

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        while len(ended) < 5:
            parent.decode()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert all(ended)


def test_a_grandchild():
    parent = Parent()
    assert ends_well(lambda: ends_well(parent.is_right) and parent.is_right())
