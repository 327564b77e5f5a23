"""How long a response is likely to be, from what was drawn before."""

from __future__ import annotations

from parallel.engine.answers import Question

MEMORY = 64  # responses that a mean looks back on, since the policy changes


class Lengths:
    """Running means of response lengths in tokens, by domain and length of the prompt."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, int | None], tuple[float, int]] = {}

    def expected(self, question: Question) -> float:
        """The mean of alike prompts, else of the domain, else the longest there can be."""
        for key in _keys(question):
            if key in self._means:
                return self._means[key][0]
        return float(question.sampling.max_tokens)

    def learn(self, question: Question, tokens: int) -> None:
        """Take note of a response's length."""
        for key in _keys(question):
            mean, count = self._means.get(key, (0.0, 0))
            count = min(count + 1, MEMORY)
            self._means[key] = (mean + (tokens - mean) / count, count)


def _keys(question: Question) -> list[tuple[str, int | None]]:
    return [(question.domain, len(question.prompt)), (question.domain, None)]
