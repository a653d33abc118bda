"""What refused data has to say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megalite.data import DataError


def refusal(call: Callable[[], Any]) -> str:
    """The one line with which a call refuses: what a user named is wrong, so a ValueError."""
    with pytest.raises(DataError) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, ValueError) and "\n" not in message
    return message
