"""The base of everything that a person can mend."""


class BraidError(Exception):
    """A failure whose message alone tells a person what is wrong and what to do."""

    exit_code = 1


def reason(error: Exception) -> str:
    """What went wrong, as a person is told: the message, and for an OSError the path."""
    if not isinstance(error, OSError):
        return str(error) or type(error).__name__
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"
