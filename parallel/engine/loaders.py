"""Tensors without contents, for vLLM's own weight loaders.

A loader narrows, reshapes and transposes a Hugging Face tensor down to this rank's part, and copies
that. Given tensors without storage, it shows which box of each it would copy; given the contents of
the boxes, it loads them. All fusion, padding and packing remain vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from parallel.weights.boxes import Box

VIEWS = {
    Tensor.narrow,
    Tensor.view,
    Tensor.view_as,
    Tensor.reshape,
    Tensor.__getitem__,
    Tensor.unsqueeze,
    Tensor.squeeze,
    Tensor.transpose,
    Tensor.t,
    Tensor.permute,
    Tensor.flatten,
    Tensor.chunk,
    Tensor.split,
    Tensor.unbind,
}
UNCHANGED = {Tensor.contiguous, Tensor.detach, Tensor.cpu, Tensor.to}

Copy = Callable[[Tensor, "Unread"], None]


class Unread(Tensor):
    """A view of a tensor whose contents are elsewhere; copying from it calls `fill`.

    `tensor_name` is the Hugging Face tensor's; `seen` is the view on the meta device, whose shape,
    strides and offset say which elements of `whole` it shows, after any chain of views.
    """

    tensor_name: str
    seen: Tensor
    whole: Tensor
    fill: Copy

    @staticmethod
    def __new__(cls, name: str, seen: Tensor, whole: Tensor, fill: Copy) -> Unread:
        cpu = torch.device("cpu")
        view = Tensor._make_wrapper_subclass(cls, seen.shape, dtype=seen.dtype, device=cpu)
        view.tensor_name, view.seen, view.whole, view.fill = name, seen, whole, fill
        return view

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], dtype: torch.dtype, fill: Copy) -> Unread:
        """Return a view of the whole tensor."""
        whole = torch.empty(shape, dtype=dtype, device="meta")
        return cls(name, whole, whole, fill)

    def box(self) -> Box:
        """Return the box of the whole tensor that this view shows; raise ValueError without one."""
        lowest = highest = self.seen.storage_offset()
        for size, stride in zip(self.seen.shape, self.seen.stride(), strict=True):
            highest += (size - 1) * stride
        low, high = [], []
        for stride in self.whole.stride():
            low.append(lowest // stride)
            high.append(highest // stride)
            lowest, highest = lowest % stride, highest % stride
        sizes = tuple(end - start + 1 for start, end in zip(low, high, strict=True))
        if prod(sizes) != self.seen.numel():
            raise ValueError(
                f"{self.tensor_name}: a weight loader's view, {tuple(self.seen.shape)}, is not one"
                f" range of each dimension of {tuple(self.whole.shape)}; have it use narrow and"
                " transpose"
            )
        return tuple(low), sizes

    def as_seen(self, contents: Tensor) -> Tensor:
        """Return contents of the box, in the whole tensor's orientation, viewed as this view.

        Raises ValueError where the view merges or splits dimensions of the tensor.
        """
        shape, strides = tuple(self.seen.shape), []
        # By a dimension's size and stride in the whole tensor, the first in case of a tie.
        inner = zip(contents.shape, self.whole.stride(), contents.stride(), strict=True)
        contents_strides = {(size, stride): ours for size, stride, ours in reversed([*inner])}
        for size, stride in zip(shape, self.seen.stride(), strict=True):
            # Contents with gaps have no such view.
            if size > 1 and (size, stride) not in contents_strides:
                name = self.tensor_name
                raise ValueError(
                    f"{name}: a weight loader merges or splits dimensions of"
                    f" {tuple(self.whole.shape)} to {shape}; have it use narrow and transpose"
                )
            strides.append(contents_strides[size, stride] if size > 1 else 0)
        return contents.as_strided(shape, strides, contents.storage_offset())

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        if function is Tensor.copy_ and isinstance(arguments[1], cls):
            target, source = arguments[:2]
            source.fill(target, source)
            return target
        if function is Tensor.__setitem__ and isinstance(arguments[2], cls):
            target, index, source = arguments
            with torch._C.DisableTorchFunctionSubclass():
                target = target[index]
            source.fill(target, source)
            return None
        if function in UNCHANGED:
            return arguments[0]
        if function is torch.zeros_like:  # instead of a bias that another rank adds
            return torch.zeros(arguments[0].shape, dtype=arguments[0].dtype)
        with torch._C.DisableTorchFunctionSubclass():
            if function not in VIEWS:
                return function(*arguments, **keywords)
            source = arguments[0]
            views = function(source.seen, *arguments[1:], **keywords)
        if isinstance(views, tuple | list):
            return tuple(cls(source.tensor_name, view, source.whole, source.fill) for view in views)
        if views._base is None and views is not source.seen:
            raise NotImplementedError(f"{function.__name__} of {source.tensor_name} is no view")
        return cls(source.tensor_name, views, source.whole, source.fill)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves the function out
        cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        raise NotImplementedError(f"a loader reads the contents of a tensor, in {function}")


def copy_nothing(target: Tensor, source: Unread) -> None:
    """Copy to a target on the meta device, where loaders count the elements, and nowhere else."""
    if target.is_meta:
        with torch._C.DisableTorchFunctionSubclass():
            target.copy_(torch.empty(source.shape, dtype=source.dtype, device="meta"))
