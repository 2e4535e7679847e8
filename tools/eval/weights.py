"""Float16 weights in .safetensors files, by torch alone: the format is simple, and the package need
not be where the GPU is."""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
from pathlib import Path

import torch


def save(tensors: dict[str, torch.Tensor], path: Path) -> str:
    """Writes tensors as float16, in the order of their names; returns the file's SHA-256."""
    header, payload, at = {"__metadata__": {"format": "pt"}}, [], 0
    for name, x in sorted(tensors.items()):
        half = x.detach().to("cpu", torch.float16).contiguous()
        data = ctypes.string_at(half.data_ptr(), half.nbytes)  # numpy need not be there either
        header[name] = {
            "dtype": "F16",
            "shape": list(x.shape),
            "data_offsets": [at, at + len(data)],
        }
        payload.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    whole = b"".join([struct.pack("<Q", len(text)), text, *payload])
    path.write_bytes(whole)
    return hashlib.sha256(whole).hexdigest()


@torch.no_grad()
def load(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Fills tensors with what save() wrote. Raises ValueError for a file that holds others."""
    whole = path.read_bytes()
    (size,) = struct.unpack_from("<Q", whole)
    header, payload = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    header.pop("__metadata__", None)
    if sorted(header) != sorted(tensors):
        raise ValueError(f"{path}: holds other weights than the model's")
    for name, x in tensors.items():
        entry = header[name]
        if entry["dtype"] != "F16" or entry["shape"] != list(x.shape):
            raise ValueError(f"{path}: {name} is {entry['dtype']} of shape {entry['shape']}")
        part = bytearray(payload[slice(*entry["data_offsets"])])
        x.copy_(torch.frombuffer(part, dtype=torch.float16).view(x.shape))
