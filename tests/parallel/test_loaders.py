"""Tensors without contents report the box that a loader reads and show given contents."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch
from torch import Tensor

from parallel.engine.loaders import Unread, copy_nothing

SHAPE = (8, 6, 4)

View = Callable[[Tensor], Tensor]

# Views, and the box that each shows.
BOXES: dict[str, tuple[View, tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "all": (lambda t: t, ((0, 0, 0), SHAPE)),
    "narrow": (lambda t: t.narrow(0, 2, 3), ((2, 0, 0), (3, 6, 4))),
    "narrow twice": (lambda t: t.narrow(0, 2, 5).narrow(0, 1, 2), ((3, 0, 0), (2, 6, 4))),
    "narrow all": (
        lambda t: t.narrow(2, 1, 2).narrow(1, 3, 3).narrow(0, 7, 1),
        ((7, 3, 1), (1, 3, 2)),
    ),
    "index": (lambda t: t[5], ((5, 0, 0), (1, 6, 4))),
    "slice": (lambda t: t[1:3, 2:4], ((1, 2, 0), (2, 2, 4))),
    "one element": (lambda t: t[4, 5, 3], ((4, 5, 3), (1, 1, 1))),
    "transpose": (lambda t: t.transpose(0, 2).narrow(0, 1, 2), ((0, 0, 1), (8, 6, 2))),
    "transpose back": (
        lambda t: t.narrow(1, 2, 2).transpose(1, 2).transpose(0, 1),
        ((0, 2, 0), (8, 2, 4)),
    ),
    "t": (lambda t: t[3].t().narrow(0, 2, 2), ((3, 0, 2), (1, 6, 2))),
    "permute": (lambda t: t.permute(2, 0, 1)[1:3], ((0, 0, 1), (8, 6, 2))),
    "unsqueeze": (
        lambda t: t.narrow(0, 4, 2).unsqueeze(0).narrow(2, 0, 3),
        ((4, 0, 0), (2, 3, 4)),
    ),
    "squeeze": (lambda t: t.narrow(0, 6, 1).squeeze(0), ((6, 0, 0), (1, 6, 4))),
    "chunk": (lambda t: t.chunk(3, 1)[1], ((0, 2, 0), (8, 2, 4))),
    "split": (lambda t: t.split([5, 3])[1], ((5, 0, 0), (3, 6, 4))),
    "unbind": (lambda t: t.unbind(1)[4], ((0, 4, 0), (8, 1, 4))),
    "view the same": (lambda t: t.view(8, 6, 4).narrow(0, 1, 1), ((1, 0, 0), (1, 6, 4))),
    "unchanged": (
        lambda t: t.contiguous().detach().to(torch.float32)[0],
        ((0, 0, 0), (1, 6, 4)),
    ),
}


def unread(copy: Callable[[Tensor, Unread], None] = copy_nothing) -> Unread:
    return Unread.of("w", SHAPE, torch.float32, copy)


@pytest.fixture
def whole() -> Tensor:
    return torch.arange(prod(SHAPE), dtype=torch.float32).view(SHAPE)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("chosen", BOXES)
def test_a_view_names_its_box_and_shows_its_contents(
    chosen: str, strided: bool, whole: Tensor
) -> None:
    view, (offsets, sizes) = BOXES[chosen]
    seen = view(unread())
    assert isinstance(seen, Unread) and seen.tensor_name == "w"
    assert seen.box() == (offsets, sizes)
    contents = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
    if not strided:  # as packed by a transport; else as a part of the trainer's parameter
        contents = contents.contiguous()
    shown = seen.as_seen(contents)
    assert torch.equal(shown, view(whole))
    shown.fill_(-1)  # a view of the contents: what is written to it lands in them
    assert bool((contents == -1).all())


def test_a_copy_asks_for_the_view_and_goes_where_the_loader_puts_it(whole: Tensor) -> None:
    asked = []

    def copy(target: Tensor, source: Unread) -> None:
        asked.append(source.box())
        target.copy_(source.as_seen(whole[2:4]))

    target = torch.zeros(2, 4, 6)
    target.copy_(unread(copy).narrow(0, 2, 2).transpose(1, 2))
    assert asked == [((2, 0, 0), (2, 6, 4))]
    assert torch.equal(target, whole[2:4].transpose(1, 2))


def test_an_assignment_to_a_part_is_a_copy_to_it(whole: Tensor) -> None:
    target = torch.zeros(4, 6, 4)
    target[1:3, ...] = unread(lambda part, source: part.copy_(source.as_seen(whole[2:4])))[2:4]
    assert torch.equal(target[1:3], whole[2:4])
    assert not target[0].any() and not target[3].any()


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[::3],
        lambda t: t[:, ::2],
        lambda t: t.view(48, 4).narrow(0, 3, 7),
        lambda t: t.flatten().narrow(0, 10, 20),
    ],
)
def test_a_view_that_is_no_box_is_refused(view: View) -> None:
    with pytest.raises(ValueError, match=r"w: a weight loader's view, .* is not one range"):
        view(unread()).box()


@pytest.mark.parametrize("view", [lambda t: t.view(48, 4), lambda t: t.view(2, 4, 6, 4)])
def test_dimensions_that_are_merged_or_cut_are_refused(view: View, whole: Tensor) -> None:
    seen = view(unread())
    contents = torch.empty(8, 6, 8)[..., :4]  # with gaps in memory
    with pytest.raises(ValueError, match="w: a weight loader merges or splits dimensions"):
        seen.as_seen(contents)


def test_a_loader_that_reads_contents_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="contents"):
        unread() + 1
    with pytest.raises(NotImplementedError, match="no view"):
        unread().transpose(0, 1).reshape(6, 32)


def test_bookkeeping_without_storage_copies_nothing() -> None:
    counted = torch.empty(3, 6, 4, device="meta")
    counted.copy_(unread().narrow(0, 0, 3))
    kept = torch.ones(8, 6, 4)
    kept.copy_(unread())
    assert bool((kept == 1).all())
