"""KIVI's cache as a baseline: 2-bit codes in groups of 32 with an f16 scale and minimum each, which
is 3.0 bits a value; K along tokens by channel, V along channels by token (arXiv 2402.02750).

The values are decoded again at once: this simulates what the format loses, nothing else.
tests/kvcache/error_test.cpp has the same quantiser for its own inputs.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, DynamicLayer


def decoded(x: torch.Tensor, dim: int, bits: int = 2) -> torch.Tensor:
    """x (float32) as it reads after quantisation, a group being all of dimension `dim`."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    most = 2**bits - 1
    least, step = (y.half().float() for y in (low, (high - low) / most))
    codes = ((x - least) / step.where(step > 0, 1)).round().clamp(0, most)
    return least + codes * step


class KiviLayer(DynamicLayer):
    """The first `sinks` and the newest `window` tokens (up to a group more) stay in f16, as in a
    qattn.KvCache; the others are coded, 32 tokens together once the last of them leaves the window.

    The first call attends to keys and values as they come, as QattnCache does.
    """

    def __init__(self, window: int, sinks: int, bits: int = 2, group: int = 32) -> None:
        super().__init__()
        self.window, self.bits, self.group = window, bits, group
        self.begin = self.coded = sinks  # tokens [begin, coded) are coded

    def update(self, key_states, value_states, *args, **kwargs):
        first = self.get_seq_length() == 0
        super().update(*(x.half().to(x.dtype) for x in (key_states, value_states)))
        while self.coded + self.group <= self.get_seq_length() - self.window:
            place = slice(self.coded, self.coded + self.group)
            self.keys[:, :, place] = decoded(self.keys[:, :, place], 2, self.bits)
            values = self.values[:, :, place].unflatten(-1, (-1, self.group))
            self.values[:, :, place] = decoded(values, -1, self.bits).flatten(-2)
            self.coded += self.group
        return (key_states, value_states) if first else (self.keys, self.values)

    def average_bits(self) -> float:
        """Bits a value, scales, minima and the tokens in f16 counted."""
        length, coded = self.get_seq_length(), self.coded - self.begin
        return ((length - coded) * 16 + coded * (self.bits + 32 / self.group)) / length


def kivi_cache(layers: int, window: int, sinks: int) -> Cache:
    return Cache(layers=[KiviLayer(window, sinks) for _ in range(layers)])
