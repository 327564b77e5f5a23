"""A module that a case names, with another function than the case asks for."""


def score(problem: object, response: str) -> float:
    """Return a reward."""
    return 1.0
