"""The emulator's words (judge_words.cpp) on registers as numpy has them: [thread] or
[thread][register], 32 bits each."""

import ctypes

import numpy as np


class Words:
    """A test that plants a mistake overrides one method."""

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))

    def _call(self, name, *arguments):
        function = getattr(self.library, name)
        function.restype = ctypes.c_char_p
        pointers = [
            a.ctypes.data_as(ctypes.c_void_p) if isinstance(a, np.ndarray) else a
            for a in arguments
        ]
        error = function(*pointers)
        assert error is None, error.decode()

    def mma(self, kind, d, a, b, sa=None, sb=None):
        """d + a b, with scales where the kind has them; all registers of the result."""
        assert (d.shape[1], a.shape[1], b.shape[1]) == (4, 4, 2), "not a product of 16 x 8"
        d = np.ascontiguousarray(d, np.uint32).copy()
        rest = [None if x is None else np.ascontiguousarray(x, np.uint32) for x in (a, b, sa, sb)]
        self._call("judge_mma", kind.encode(), len(d), d, *rest)
        return d

    def load_matrix(self, kind, rows):
        """rows: [thread][16] bytes at the addresses that threads give. Four registers a thread, of
        which x1 and x2 set the first."""
        r = np.zeros((len(rows), 4), np.uint32)
        self._call("judge_load_matrix", kind.encode(), len(rows), np.ascontiguousarray(rows), r)
        return r

    def store_matrix(self, kind, rows, r):
        """The rows after the store; where `kind` uses fewer than all, the others as they were."""
        rows = np.ascontiguousarray(rows).copy()
        registers = np.zeros((len(rows), 4), np.uint32)
        registers[:, : r.shape[1]] = r
        self._call("judge_store_matrix", kind.encode(), len(rows), rows, registers)
        return rows

    def convert(self, kind, lo, hi):
        codes = np.zeros(len(lo), np.uint32)
        floats = [np.ascontiguousarray(x, np.float32) for x in (lo, hi)]
        self._call("judge_convert", kind.encode(), len(lo), *floats, codes)
        return codes

    def exp2(self, x):
        x = np.ascontiguousarray(x, np.float32)
        y = np.zeros_like(x)
        self._call("judge_exp2", len(x), x, y)
        return y
