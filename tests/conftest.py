"""What holds for the whole suite: one thread, and inputs that are the same on each run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

# tests/ranks.py forks this process. A fork has only the thread that called it, so a child would wait for ever for a
# pool of OpenMP threads that was started here: no test may start one.
torch.set_num_threads(1)

# No deadline, since a shared machine has no honest clock; derandomized, so that a failure comes again when one looks.
settings.register_profile("megalite", deadline=None, derandomize=True, database=None)
settings.load_profile("megalite")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out and how to run it."""
    if config.getoption("markexpr") == "not slow" and terminalreporter.stats.get("deselected"):
        terminalreporter.write_line("slow tests were left out: `pytest -m slow` runs them")
