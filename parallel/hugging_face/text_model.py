"""The text model's tensors in the files of a vision-language model, as Qwen3.5-MoE is published.

Its names have another prefix there, and a layer's experts are stacked: [experts, outputs, inputs],
the outputs of the gate above those of the up projection. Braid writes the text model alone, as
transformers does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

PREFIX = "model.language_model."
MOST_EXPERTS = 10_000  # of a layer: a header may state any number, and each is a tensor
# Of all layers: 60 layers of 384 experts have 69,000, and each is an object of some hundred bytes.
MOST_TENSORS = 1 << 18
STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")


class StackError(ValueError):
    """A tensor with the name of a layer's experts that is no stack of them."""


class TextTensor(NamedTuple):
    """A tensor of the text model: the stored one, and the part of its elements, in order, it is."""

    name: str
    stored: str
    offset: int
    shape: tuple[int, ...]


def text_tensors(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[TextTensor]:
    """Yield the text model's tensors; none unless `shapes` are a vision-language model's.

    Raises StackError for a stack of experts of an impossible shape, or too many experts in all.
    """
    count = 0
    for stored, shape in shapes.items():
        if not stored.startswith(PREFIX):
            continue
        name = f"model.{stored.removeprefix(PREFIX)}"
        stack = STACK.fullmatch(name)
        if stack is None or len(shape) != 3:
            yield TextTensor(name, stored, 0, shape)
            continue
        experts, rows, columns = shape
        projections = ("gate_proj", "up_proj") if stack[2] == "gate_up_proj" else ("down_proj",)
        projection_rows, odd = divmod(rows, len(projections))
        if not 0 < experts <= MOST_EXPERTS or odd or min(rows, columns) <= 0:
            raise StackError(
                f"{stored} is {[*shape]}, which is no stack of 1 to {MOST_EXPERTS} experts"
            )
        count += experts * len(projections)
        if count > MOST_TENSORS:
            raise StackError(f"{stored} and those before it have over {MOST_TENSORS:,} tensors")
        for expert in range(experts):
            for number, projection in enumerate(projections):
                offset = (expert * rows + number * projection_rows) * columns
                tensor_name = f"{stack[1]}.{expert}.{projection}.weight"
                yield TextTensor(tensor_name, stored, offset, (projection_rows, columns))
