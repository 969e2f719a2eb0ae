import pytest

from tieredmoe.backends.protocol import ReadOp
from tieredmoe.testing.faults import Fault, FaultPlan


def read_op(offset, nbytes, file_index=0):
    return ReadOp(file_index, offset, memoryview(bytearray(nbytes)), 0)


@pytest.mark.parametrize(
    ("offset", "nbytes", "hit"),
    [(0, 10, False), (0, 11, True), (10, 1, True), (11, 5, False), (5, 100, True)],
)
def test_a_fault_meets_every_read_that_covers_its_place(offset, nbytes, hit):
    plan = FaultPlan().at(0, 10)
    assert (plan.take(read_op(offset, nbytes)) == Fault()) is hit


def test_a_fault_belongs_to_one_file():
    assert FaultPlan().at(1, 0).take(read_op(0, 1)) is None


def test_a_fault_comes_as_often_as_it_was_ordered():
    plan = FaultPlan().at(0, 0, times=2)
    assert [plan.take(read_op(0, 1)) for _ in range(4)] == [Fault(), Fault(), None, None]
    assert plan.n_injected == 2


def test_a_fault_may_last_for_ever():
    plan = FaultPlan().at(0, 0, times=None)
    assert all(plan.take(read_op(0, 1)) for _ in range(100))


def test_faults_of_one_place_come_one_after_the_other():
    slow, torn = Fault("slow", delay_s=1.0), Fault("torn")
    plan = FaultPlan().at(0, 0, slow).at(0, 0, torn)
    assert [plan.take(read_op(0, 1)) for _ in range(3)] == [slow, torn, None]


def random_faults(seed):
    plan = FaultPlan(seed=seed, rate=0.25, faults=[Fault("torn"), Fault("eof")])
    return [plan.take(read_op(0, 1)) for _ in range(1000)], plan.n_injected


def test_random_faults_come_at_their_rate_and_by_their_seed():
    faults, n_injected = random_faults(1)
    assert 200 < n_injected < 300
    assert n_injected == 1000 - faults.count(None)
    assert {fault.kind for fault in faults if fault} == {"torn", "eof"}
    assert random_faults(1) == (faults, n_injected)
    assert random_faults(2) != (faults, n_injected)


def test_without_orders_nothing_fails():
    plan = FaultPlan()
    assert not any(plan.take(read_op(0, 1)) for _ in range(100))
