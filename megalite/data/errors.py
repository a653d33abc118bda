"""The one error of this folder that a user can cause."""

from __future__ import annotations


class DataError(ValueError):
    """The data that the user named cannot be used; one line with the config key, the numbers and the way out."""
