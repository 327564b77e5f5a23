"""The tensors of a checkpoint that stack what all experts of a layer have; never imports torch.

gpt-oss stores the experts' projections as [experts, inputs, outputs], with the outputs of the gate
and of the up projection alternating, and their biases as [experts, outputs]. Everywhere else the
projections are separate matrices [outputs, inputs] of each expert, as in other families.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from parallel.weights.boxes import Box


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor of a checkpoint that stacks the parts of every expert.

    `part_names` name them, with {expert}; all have `shape`, [outputs, inputs] or [outputs].

    Example: 4 experts whose gate and up projections are [16, 32]. An expert's slice has the columns
    gate 0, up 0, gate 1, up 1 and on, so rows 8-15 of both are its columns 16-31.

        >>> names = "experts.{expert}.gate_proj.weight", "experts.{expert}.up_proj.weight"
        >>> stack = Stack("experts.gate_up_proj", 4, names, (16, 32))
        >>> stack.stacked_shape, stack.covering(((8, 0), (8, 32)))
        ((4, 32, 32), ((0, 16), (32, 16)))
    """

    tensor: str
    experts: int
    part_names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def member_shape(self) -> tuple[int, ...]:
        """The shape of an expert's slice: [inputs, outputs of all parts], or the latter alone."""
        outputs, *inputs = self.shape
        return *inputs, len(self.part_names) * outputs

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.experts, *self.member_shape

    def names(self, expert: int) -> list[str]:
        """Return the names of an expert's parts."""
        return [name.format(expert=expert) for name in self.part_names]

    def part(self, member: Any, number: int) -> Any:
        """Return the view of one part in an expert's slice, or in a box of it of whole outputs.

        `member` is a tensor or an array.
        """
        view = member[..., number :: len(self.part_names)]
        return view.swapaxes(0, 1) if view.ndim == 2 else view

    def covering(self, box: Box) -> Box:
        """Return the box of an expert's slice that has a box of each of its parts."""
        (first_output, *offsets), (size, *sizes) = box
        count = len(self.part_names)
        return (*offsets, count * first_output), (*sizes, count * size)

    def covered(self, box: Box) -> Box:
        """Return the box that a box of an expert's slice has of each part; inverts `covering`."""
        (*offsets, first_output), (*sizes, size) = box
        count = len(self.part_names)
        if first_output % count or size % count:
            raise ValueError(f"{self.tensor}: {box} splits the outputs of its {count} parts")
        return (first_output // count, *offsets), (size // count, *sizes)


class Member(NamedTuple):
    """An expert's slice of a stacked tensor, which vLLM's loaders take one at a time."""

    stack: Stack
    expert: int

    @property
    def name(self) -> str:
        """The name that vLLM's loaders know the slice by."""
        parent, _, last = self.stack.tensor.rpartition(".")
        return f"{parent}.{self.expert}.{last}"

    @property
    def names(self) -> list[str]:
        """The names of the slice's parts."""
        return self.stack.names(self.expert)

    def boxes(self, box: Box) -> list[tuple[str, Box]]:
        """Return the names of the slice's parts, with the box that a box of it has of each."""
        part_box = self.stack.covered(box)
        return [(name, part_box) for name in self.names]
