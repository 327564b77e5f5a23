"""The base of everything that a person can mend."""


class BraidError(Exception):
    """A failure whose message alone tells a person what is wrong and what to do."""

    exit_code = 1
