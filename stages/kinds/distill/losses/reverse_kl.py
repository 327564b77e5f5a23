"""The reverse KL over the whole vocabulary, as DeepSeek-V4 merges."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from stages.kinds.distill.teaching import MethodBase, TaughtTokens
from stages.objectives.registry import method

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class ReverseKLSettings(MethodBase):
    """The student keeps to what its teacher does: the exact KL, without sampling noise."""

    is_kl: ClassVar[bool] = True

    name: Literal["full_vocab_reverse_kl"] = "full_vocab_reverse_kl"


@method(ReverseKLSettings, source="DeepSeek-V4, Eq. 29")
def reverse_kl(
    tokens: TaughtTokens, settings: ReverseKLSettings
) -> Float[Tensor, "responses tokens"]:
    """Return KL(pi || pi_T) over the whole vocabulary, [B, R]."""
    return tokens.student.kl(tokens.teacher)
