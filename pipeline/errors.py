"""The errors that a user can fix."""

from parallel.errors import UserError


class BraidError(UserError):
    """A user's error in a command, which ends with `exit_code`."""

    exit_code = 1


def reason(error: Exception) -> str:
    """Return the message of an error; for an OSError with the path."""
    if not isinstance(error, OSError):
        return str(error) or type(error).__name__
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"
