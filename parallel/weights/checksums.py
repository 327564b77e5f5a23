"""Fingerprints of tensors that can be summed over their parts, on any ranks."""

from __future__ import annotations

import hashlib

import torch

from parallel.boxes import Box

ROWS, COLUMNS = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F  # odd, with their bits well mixed
CHUNK = 1 << 20  # elements per pass
BITS = {2: torch.int16, 4: torch.int32}


def fingerprint(tensor: str, box: Box, values: torch.Tensor) -> int:
    """Return the int64 fingerprint of the values in a box of the tensor with this name.

    It is the sum over the elements of their bits, each times a number derived from the position in
    the whole tensor, modulo 2^64. So the fingerprints of parts add up, in any order, to that of the
    whole, and changed, moved or swapped values practically always change it.
    """
    (first, *across), sizes = box
    width = values.numel() // sizes[0]
    rows = values.contiguous().view(BITS[values.element_size()]).view(sizes[0], width)
    device = values.device
    places = _salt(tensor) + torch.zeros(1, dtype=torch.int64, device=device)
    if across:
        places = places ^ (torch.arange(across[0], across[0] + width, device=device) + 1) * _signed(
            COLUMNS
        )
    total = torch.zeros((), dtype=torch.int64, device=device)
    step = max(1, CHUNK // width)
    for start in range(0, sizes[0], step):
        some = rows[start : start + step]
        lines = torch.arange(first + start, first + start + len(some), device=device) + 1
        total += (((lines * _signed(ROWS)).unsqueeze(1) ^ places) * some).sum()
    return int(total)


def add(first: int, second: int) -> int:
    """Return the fingerprint of two disjoint parts together."""
    return _signed((first + second) % (1 << 64))


def _salt(tensor: str) -> int:
    return _signed(int.from_bytes(hashlib.sha256(tensor.encode()).digest()[:8], "big"))


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >= 1 << 63 else bits
