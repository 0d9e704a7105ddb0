"""What noise explains of a cost is paid later, and all of it in the end."""

from __future__ import annotations

from random import Random

import pytest

from checkfreq.policy.instalments import Instalments


def test_what_noise_explains_is_set_aside_and_paid_a_sixteenth_at_a_time() -> None:
    instalments = Instalments()
    assert instalments.due_s(3.0, usual_s=1.0, noise_s=2.0) == pytest.approx(1.0 + 2.0 / 16)
    assert instalments.set_aside_s == pytest.approx(2.0 * 15 / 16)
    paid_s = sum(instalments.due_s(1.0, usual_s=1.0, noise_s=2.0) - 1.0 for _ in range(200))
    assert paid_s == pytest.approx(2.0 * 15 / 16, rel=1e-3)


def test_what_chance_cannot_explain_is_paid_at_once_however_noisy_it_is() -> None:
    instalments = Instalments()
    for _ in range(40):
        instalments.due_s(1.0 + 0.1, usual_s=1.0, noise_s=0.5)
    assert instalments.due_s(101.0, usual_s=1.0, noise_s=0.5) > 98.0


def test_costs_that_vary_by_themselves_are_paid_as_they_come() -> None:
    dice, instalments = Random(1), Instalments()
    costs_s = [dice.choice((0.0, 10.0)) for _ in range(400)]
    paid_s = [instalments.due_s(cost_s, usual_s=5.0, noise_s=0.5) for cost_s in costs_s]
    assert max(abs(a - b) for a, b in zip(costs_s[40:], paid_s[40:], strict=True)) < 0.5
