"""The base class of errors that a user can fix; never imports torch."""

from __future__ import annotations


class UserError(Exception):
    """An error whose message alone says what is wrong, where, and how to fix it.

    Programs end with the message and without a traceback.
    """
