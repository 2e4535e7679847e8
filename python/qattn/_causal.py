"""What lengths of sequences and causality by its corner mean, in what the extension knows."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np

from ._bit_mask import BitMask
from ._errors import InvalidArgument, Unsupported, shown
from ._interop import CPU, check_array, dtype_name, entry_shape, index_entry, is_torch
from ._recipe import integer

#: of queries or keys: those of each sequence, None on a GPU, and the longest that there may be
_OfRole = tuple[Any, int | None]


def _integers(x: Any) -> Any:
    """An index tensor in host memory as int64; None: it is none."""
    if is_torch(x) and x.device.type != "cpu":
        return None
    x = np.asarray(x)
    whole = x.ndim == 1 and (x.dtype.kind in "iu" or x.size == 0)
    return x.astype(np.int64) if whole else None


def _only_until(mask: Any, queries: int, keys: int, offset: int, like: Any) -> Any:
    """The mask, or none, of which query i keeps keys j <= i + offset, where `like` lies."""
    if mask is not None:
        check_array("mask", mask)
        if dtype_name(mask) not in ("bool", "float32", "float16", "bfloat16"):
            return mask  # the validator says what is wrong
        if len(mask.shape) > 1 and mask.shape[-2] != 1:
            queries = max(queries, mask.shape[-2])  # of packed sequences it may be larger
        if mask.shape and mask.shape[-1] != 1:
            keys = max(keys, mask.shape[-1])
        own = (1, 1, *mask.shape)[-2:]
        if own[0] not in (1, queries) or own[1] not in (1, keys):
            return mask  # likewise
    if is_torch(like):
        import torch

        seen = torch.ones((queries, keys), dtype=torch.bool, device=like.device).tril(offset)
        if mask is None:
            return seen
        return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)
    seen = np.tri(queries, keys, offset, dtype=bool)
    if mask is None:
        return seen
    if mask.dtype == bool:
        return mask & seen
    return np.where(seen, mask, np.asarray(-np.inf, mask.dtype))


class Lengths:
    """Of one call of attention(), whose arguments by name and tensors it adds to and changes."""

    def __init__(
        self, given: dict[str, Any], tensors: dict[str, tuple], q: Any, device: Any
    ) -> None:
        self._given, self._tensors, self._q, self._device = given, tensors, q, device

    def add(self) -> None:
        """The call's index tensors."""
        for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table"):
            if self._given[name] is not None:
                given = self._given[name] = self._one_for_all(name, self._given[name])
                self._tensors[name] = index_entry(name, given, self._device)

    def _one_for_all(self, name: str, x: Any) -> Any:
        """Of one number of used tokens as many as there are sequences."""
        if not name.startswith("seqused") or isinstance(x, (list, tuple)):
            return x
        if getattr(x, "shape", ()) != () or not isinstance(x, (int, np.integer)):
            return x
        count = integer(name, x)
        packed = self._given["cu_seqlens_q" if name == "seqused_q" else "cu_seqlens_k"]
        table = self._given["page_table"]
        if packed is not None:
            batch = len(packed) - 1
        elif table is not None and not isinstance(table, (list, tuple)):
            batch = table.shape[0]
        else:
            batch = len(table) if table is not None else entry_shape(self._tensors["q"])[0]
        if self._device == CPU:
            return [count] * batch
        if not is_torch(self._q):
            raise Unsupported(f"{name}: is one number; on a GPU give an array of {batch}")
        import torch

        return self._q.new_full((batch,), count, dtype=torch.int32)

    def take_causal(self) -> None:
        """causal by name and causal_offset, in what the extension knows: causal, window, mask."""
        given = self._given
        corner, offset = given["causal"], given["causal_offset"]
        if isinstance(corner, str) and corner not in ("upper_left", "lower_right"):
            raise InvalidArgument(
                f"causal: {shown(corner)} is not True, False, 'upper_left' or 'lower_right'"
            )
        if offset is not None:
            offset = integer("causal_offset", offset)
            if isinstance(corner, str):
                raise InvalidArgument(f"causal_offset: {offset} beside causal={corner!r}; give one")
            given["causal"] = False
        elif isinstance(corner, str):
            offset = 0 if corner == "upper_left" else None
            given["causal"] = offset is None
        if offset is not None:
            self._hide_behind(offset)

    def _hide_behind(self, offset: int) -> None:
        """Query i sees keys j <= i + offset."""
        given = self._given
        what = "causal: 'upper_left'" if given["causal_offset"] is None else "causal_offset"
        for name in ("window", "alibi_slopes"):
            if given[name] is not None:
                raise InvalidArgument(
                    f"{what}: is not known beside {name}; give a mask, or lower_right"
                )
        lengths = [self._lengths_of(role) for role in ("q", "k")]
        if any(x is None for x in lengths):
            return  # the validator says what is wrong
        (queries, longest_q), (keys, longest_k) = cast(list[_OfRole], lengths)
        rights = self._rights(queries, keys, offset)
        if rights is not None and (len(rights) == 0 or (len(rights) == 1 and rights[0] >= 0)):
            if len(rights) == 1:
                given["window"] = (-1, int(rights[0]))
            return
        if longest_q is None or longest_k is None:
            raise InvalidArgument(
                f"{what}: of packed sequences needs their lengths, which lie on a GPU; give a "
                "mask, or lower_right, which is the same where each has as many queries as keys"
            )
        mask = self.plain_mask(given["mask"])
        if isinstance(mask, BitMask):
            raise InvalidArgument(f"{what}: is not known beside a BitMask; put it there")
        given["mask"] = _only_until(mask, longest_q, longest_k, offset, self._q)

    def _lengths_of(self, role: str) -> _OfRole | None:
        """Of q or k; None where the validator refuses what tells them."""
        given, shape = self._given, entry_shape(self._tensors[role])
        packed, used = given[f"cu_seqlens_{role}"], given[f"seqused_{role}"]
        if len(shape) != (4 if packed is None else 3):
            return None
        here = self._device == CPU
        tokens = shape[(1 if given["layout"] == "bshd" else 2) - (packed is not None)]
        own: Any = np.array([tokens])
        if packed is not None:
            if not here:
                return None, None
            ends = _integers(packed)
            if ends is None:
                return None
            own = np.clip(np.diff(ends), 0, tokens)
            tokens = int(own.max(initial=0))
        elif role == "k" and "page_table" in self._tensors:
            table = entry_shape(self._tensors["page_table"])
            if len(table) != 2:
                return None
            tokens *= table[1]
        if used is not None:
            own = _integers(used) if here else None
            if own is None and here:
                return None
        return own, tokens

    def _rights(self, queries: Any, keys: Any, offset: int) -> Any:
        """The last keys that queries i see, less i + Sk - Sq, of all sequences; None: not known."""
        given = self._given
        if given["cu_seqlens_q"] is not None and given["cu_seqlens_q"] is given["cu_seqlens_k"]:
            if given["seqused_q"] is given["seqused_k"]:
                return [offset]
        if queries is None or keys is None:
            return None
        if len(queries) != len(keys) and 1 not in (len(queries), len(keys)):
            return None  # the validator says what is wrong
        return np.unique((offset + queries - keys)[(queries > 0) & (keys > 0)])

    def plain_mask(self, mask: Any) -> Any:
        """The mask; of torch's causal biases what they mean."""
        if not is_torch(mask):
            return mask
        from ._torch_tensors import as_mask

        lengths = None
        if not any(
            self._given[name] is not None for name in ("cu_seqlens_q", "cu_seqlens_k", "page_table")
        ):
            place = -3 if self._given["layout"] == "bshd" else -2
            shapes = [entry_shape(self._tensors[role]) for role in ("q", "k")]
            if min(len(shape) for shape in shapes) >= 3:
                lengths = tuple(shape[place] for shape in shapes)
        return as_mask("mask", mask, lengths, self._q.device if is_torch(self._q) else "cpu")
