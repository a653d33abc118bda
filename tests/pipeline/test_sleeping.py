"""The executor takes the time that its schedule takes on paper: timed with stages that sleep."""

from __future__ import annotations

import pytest

from megalite.pipeline.simulate import Costs, simulate
from tests.pipeline.sleeping import Job, Slept, slept

SLEEP_SECONDS = 0.02
# An action wakes late by up to a millisecond, which the simulator is told of, and its messages take about as long again
# on a machine where ranks share processors: a twentieth of so short a sleep, on a path of all actions; and as much for
# a machine at work for others.
SLACK = 1.12


def closest(job: Job) -> Slept:
    """The step whose ratio is least: whatever else the machine does makes it longer only. If that is too much, of more
    steps, in case the machine was busy all the while."""
    best = slept(job, steps=2)[0]
    for steps in (4, 8):
        if best.ratio <= SLACK:
            break
        best = min(best, slept(job, steps=steps)[0], key=lambda one: one.ratio)
    return best


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_v"])
def test_a_step_takes_what_the_simulator_makes_of_the_times_of_its_actions(name):
    """Never less: what begins before its input has come would show here."""
    found = closest(Job(name, 4, 8, SLEEP_SECONDS, SLEEP_SECONDS, SLEEP_SECONDS))
    assert 1 <= found.ratio <= SLACK


def test_weight_gradients_that_are_put_off_fill_what_would_be_idle():
    """Below what zb_h1 would take if each W, as long as it took, were a part of its B."""
    job = Job("zb_h1", 4, 4, SLEEP_SECONDS, SLEEP_SECONDS, SLEEP_SECONDS)
    found = closest(job)
    lasted = {event.action: event.end - event.start for row in found.measured.rows for event in row}
    for action in [action for action in lasted if action.kind == "W"]:
        lasted[action._replace(kind="B")] += lasted[action]
        lasted[action] = 0.0
    whole = simulate(job.schedule(), Costs(of=lasted)).makespan
    assert whole > 1.3 * found.simulated.makespan
    assert found.measured.makespan < whole
