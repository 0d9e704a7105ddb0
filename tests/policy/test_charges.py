"""What each checkpoint is charged with."""

from __future__ import annotations

import math

import pytest

from checkfreq.policy.charges import Charge, Charges
from checkfreq.policy.observations import Iteration, Measured

MEASURED = Measured(copy_s=0.1, persist_s=0.4, durable_s=0.5, state_bytes=10)


def settled(
    *iterations: Iteration, end_s: float, charges: Charges | None = None, t: float | None = 1.0
) -> Charge:
    """One checkpoint from 0 to ``end_s``, with T of 1 s."""
    charges = Charges() if charges is None else charges
    charges.begin("a", start_s=0.0, reserved_s=0.0)
    charges.end("a", end_s=end_s, measured=MEASURED)
    for iteration in iterations:
        charges.add(iteration, iteration_s=t)
    (charge,) = charges.settle(math.inf)
    return charge


def test_a_checkpoint_costs_what_its_iterations_took_longer() -> None:
    charge = settled(Iteration(0, 1.5, stall_s=0.25), Iteration(1.5, 2.75), end_s=2)
    assert charge.cost_s == pytest.approx(0.75)
    assert charge.stall_s == pytest.approx(0.25)
    assert (charge.num_touched, charge.touched_s) == (2, 2.75)
    assert not charge.is_partial


def test_an_iteration_it_did_not_touch_is_not_charged() -> None:
    charges = Charges()
    charges.begin("a", start_s=1.0, reserved_s=0.0)
    charges.end("a", end_s=2.0, measured=MEASURED)
    assert not charges.add(Iteration(0, 1), iteration_s=1.0)
    assert charges.add(Iteration(1, 2), iteration_s=1.0)
    assert not charges.add(Iteration(2, 9), iteration_s=1.0)
    assert charges.settle(9)[0].cost_s == 0


def test_two_share_an_iteration_by_how_long_they_were_in_it() -> None:
    charges = Charges()
    charges.begin("a", start_s=0.0, reserved_s=0.0)
    charges.begin("b", start_s=3.0, reserved_s=0.0)
    charges.end("a", end_s=3.0, measured=MEASURED)
    charges.end("b", end_s=4.0, measured=MEASURED)
    charges.add(Iteration(0, 4), iteration_s=2.0)
    assert [charge.cost_s for charge in charges.settle(4)] == pytest.approx([1.5, 0.5])


def test_an_iteration_that_says_nothing_is_charged_with_its_stall() -> None:
    charge = settled(Iteration(0, 30, stall_s=0.5), end_s=2, t=None)
    assert charge.is_partial
    assert (charge.cost_s, charge.num_touched) == (0.5, 0)


def test_what_is_far_above_t_is_not_the_checkpoints_until_it_is_usual() -> None:
    charges = Charges()
    costs = [settled(Iteration(0, 21), end_s=1, charges=charges).cost_s for _ in range(3)]
    assert costs == [3, 3, 20]


def test_a_rare_outlier_is_never_the_checkpoints_but_a_stall_always_is() -> None:
    charges = Charges()
    for _ in range(8):
        assert settled(Iteration(0, 1.5), end_s=1, charges=charges).cost_s == 0.5
    assert settled(Iteration(0, 31), end_s=1, charges=charges).cost_s == 3
    held = settled(Iteration(0, 31, stall_s=30), end_s=1, charges=charges)
    assert held.cost_s == 30


def test_forgotten_costs_are_no_longer_usual() -> None:
    charges = Charges()
    for _ in range(3):
        settled(Iteration(0, 21), end_s=1, charges=charges)
    charges.forget_costs()
    assert settled(Iteration(0, 21), end_s=1, charges=charges).cost_s == 3


def test_one_is_in_flight_until_its_end_and_open_until_that_was_told() -> None:
    charges = Charges()
    charges.begin("a", start_s=0.0, reserved_s=0.0)
    assert len(charges.in_flight(100.0)) == 1
    assert charges.end("a", end_s=5.0, measured=None)
    assert len(charges.in_flight(4.9)) == 1
    assert not charges.in_flight(5.0)
    assert not charges.settle(4.9)
    assert len(charges) == 1
    assert len(charges.settle(5.0)) == 1
    assert len(charges) == 0


def test_an_end_before_its_start_is_at_its_start() -> None:
    charges = Charges()
    charges.begin("a", start_s=3.0, reserved_s=0.0)
    charges.end("a", end_s=-math.inf, measured=None)
    assert not charges.settle(2.9)
    assert len(charges.settle(3.0)) == 1


def test_only_the_first_end_of_one_in_flight_counts() -> None:
    charges = Charges()
    charges.begin("a", start_s=0.0, reserved_s=0.0)
    assert not charges.end("b", end_s=1.0, measured=MEASURED)
    assert charges.end("a", end_s=1.0, measured=MEASURED)
    assert not charges.end("a", end_s=2.0, measured=None)
    assert charges.settle(1.0)[0].measured is MEASURED


def test_two_of_a_name_are_a_mistake_of_ours() -> None:
    charges = Charges()
    charges.begin("a", start_s=0.0, reserved_s=0.0)
    with pytest.raises(AssertionError, match="two attempts named a"):
        charges.begin("a", start_s=1.0, reserved_s=0.0)


def test_what_one_in_flight_costs_beyond_its_reservation_is_known() -> None:
    charges = Charges()
    charges.begin("a", start_s=0.0, reserved_s=0.5)
    charges.add(Iteration(0, 1.25), iteration_s=1.0)
    assert charges.unreserved_s() == 0
    charges.add(Iteration(1.25, 2.75), iteration_s=1.0)
    assert charges.unreserved_s() == pytest.approx(0.25)


def test_faster_than_is_judged_on_the_mean_of_its_iterations() -> None:
    charge = settled(Iteration(0, 0.75), Iteration(0.75, 1.5), end_s=1.5)
    assert charge.is_faster_than(0.76)
    assert not charge.is_faster_than(0.75)
    assert not Charge(0.0, 0.0).is_faster_than(1.0)
