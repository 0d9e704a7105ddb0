"""When the baseline T is measured again, and how long checkpoints wait for it."""

from __future__ import annotations

import pytest

from checkfreq.policy.baseline import BaselineRefresh
from checkfreq.policy.charges import Charge
from checkfreq.policy.costs import RunCosts
from checkfreq.policy.observations import Iteration

#: Iterations without a clean one after which T is too old, and the clean ones that renew it.
TOO_MANY, PAUSE = 96, 6
#: The same where a checkpoint shows that T has changed.
CHANGED_PAUSE = 8


def known(*iterations_s: float) -> RunCosts:
    """Costs of a run in which these iterations were clean."""
    costs = RunCosts()
    for seconds in iterations_s:
        costs.add_clean(Iteration(0.0, seconds))
    assert costs.iteration_s is not None
    return costs


def clean(refresh: BaselineRefresh, costs: RunCosts, *iterations_s: float) -> None:
    for seconds in iterations_s:
        costs.add_clean(Iteration(0.0, seconds))
        refresh.add_clean()


def touched(refresh: BaselineRefresh, times: int) -> None:
    for _ in range(times):
        refresh.add_touched()


def charge(iteration_s: float, *, num: int = 4, slowdown_s: float = 0.0) -> Charge:
    """A checkpoint that touched ``num`` iterations of ``iteration_s`` each."""
    return Charge(
        0.0,
        0.0,
        touched_s=num * iteration_s,
        num_touched=num,
        capped_s=slowdown_s + 1.0,
        stall_s=1.0,
    )


class TestATimeThatIsOld:
    @pytest.mark.parametrize(("num_clean", "pauses"), [(PAUSE - 1, True), (PAUSE, False)])
    def test_a_pause_ends_with_its_sixth_clean_iteration(
        self, num_clean: int, pauses: bool
    ) -> None:
        costs = known(1.0)
        refresh = BaselineRefresh(costs)
        touched(refresh, TOO_MANY)
        assert refresh.must_pause()
        clean(refresh, costs, *num_clean * [1.0])
        assert refresh.must_pause() is pauses


class TestATimeThatHasChanged:
    @pytest.mark.parametrize(
        ("iteration_s", "is_wrong"), [(0.5, True), (0.89, True), (0.91, False), (1.5, False)]
    )
    def test_iterations_that_are_a_tenth_shorter_beside_a_checkpoint_contradict_it(
        self, iteration_s: float, is_wrong: bool
    ) -> None:
        costs = known(*[1.0] * 20)
        refresh = BaselineRefresh(costs)
        assert refresh.is_contradicted_by(charge(iteration_s)) is is_wrong
        assert refresh.must_pause() is is_wrong
        clean(refresh, costs, *[1.0] * (CHANGED_PAUSE - 1))
        assert refresh.is_pausing is is_wrong
        clean(refresh, costs, 1.0)
        assert not refresh.is_pausing


class TestATimeThatIsTooLong:
    @pytest.mark.parametrize(
        ("slowdowns_s", "is_wrong"),
        [
            ([-0.02] * 20, True),
            ([-0.004] * 20, False),  # less than 0.5 % of T
            ([-0.12, 0.08] * 10, False),  # by chance: -0.02, with a standard error of 0.022
            ([-0.07, 0.03] * 10, True),  # -0.02, with one of 0.011
            ([-0.02] * 19, False),  # too few to judge
        ],
    )
    def test_twenty_checkpoints_that_seem_to_save_time_contradict_it(
        self, slowdowns_s: list[float], is_wrong: bool
    ) -> None:
        refresh = BaselineRefresh(known(*[1.0] * 20))
        found = [refresh.is_contradicted_by(charge(1.0, slowdown_s=each)) for each in slowdowns_s]
        assert found == [*[False] * (len(found) - 1), is_wrong]
        assert refresh.is_pausing is is_wrong
