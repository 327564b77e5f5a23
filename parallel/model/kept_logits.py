"""Logits that wait for their use, as last hidden states: on the device, the host or a disk.

A row of hidden states is a hundredth of the row of logits that it gives with its output head.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal

import torch
from torch import Tensor

from parallel.errors import UserError
from parallel.files import open_in_place
from parallel.model.vocabulary import Head, HeadLogits, KeptLogits

Where = Literal["device", "host", "disk"]


class HiddenStates:
    """The hidden states that a rank keeps until its step ends; `bytes` counts those of the step."""

    def __init__(
        self, where: Where, dtype: torch.dtype | None, file: Path, advice: str = ""
    ) -> None:
        """Keep them in `dtype`, or as they are; `advice` ends the message of a full disk.

        On a disk they are in `file`, which exists only while it has any.
        """
        self.bytes = 0
        self._where, self._dtype, self._path, self._advice = where, dtype, file, advice
        self._file: BinaryIO | None = None

    def keep(self, logits: HeadLogits, head: Head | None = None) -> KeptLogits:
        """Keep logits, to be computed with another `head` than theirs where one is given.

        Raises:
            UserError: the disk is full.
        """
        hidden = logits.hidden if self._dtype is None else logits.hidden.to(self._dtype)
        self.bytes += hidden.nbytes
        if self._where != "device":
            hidden = hidden.cpu()
        read = self._write(hidden) if self._where == "disk" else lambda: hidden
        head = logits.head if head is None else head
        return KeptLogits(read, logits.hidden.dtype, head, logits.precise)

    def clear(self) -> None:
        """Forget everything kept."""
        self.bytes = 0
        if self._file is not None:
            self._file.close()
            self._file = None
        with suppress(FileNotFoundError):
            self._path.unlink()

    def _write(self, hidden: Tensor) -> Callable[[], Tensor]:
        """Append hidden states to the file; return what reads them."""
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open_in_place(self._path, "w+b", buffering=0)
            start = self._file.seek(0, os.SEEK_END)
            memory = hidden.contiguous().flatten().view(torch.uint8).numpy().data
            while memory:
                memory = memory[self._file.write(memory) :]
        except OSError as error:
            self.clear()
            where, why = self._path.parent, error.strerror
            raise UserError(
                f"{where}: cannot write hidden states ({why}); {self._advice}"
            ) from error
        return partial(self._read, start, hidden.shape, hidden.dtype)

    def _read(self, start: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        assert self._file is not None, "the step that kept them has ended"
        hidden = torch.empty(shape, dtype=dtype)
        memory = hidden.flatten().view(torch.uint8).numpy().data
        while memory:
            count = os.preadv(self._file.fileno(), [memory], start)
            if not count:
                raise OSError(f"{self._path} ends early: something else has changed it")
            memory, start = memory[count:], start + count
        return hidden
