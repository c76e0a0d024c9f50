"""Cores are shared out fairly, and a shortage is said."""

from itertools import chain

import pytest

from baton.local.cpus import Share, divide, oversubscription


def test_two_cores_two_workers() -> None:
    assert divide([0, 1], 2) == [Share((0,), 1), Share((1,), 1)]


@pytest.mark.parametrize("cores", range(1, 18))
@pytest.mark.parametrize("workers", range(1, 7))
def test_shares_are_disjoint_even_and_use_every_core(cores: int, workers: int) -> None:
    cpus = [3 * i for i in range(cores)]
    shares = divide(cpus, workers)
    assert len(shares) == workers
    if cores < workers:
        assert set(shares) == {Share((), 1)}
        return
    assert list(chain.from_iterable(share.cpus for share in shares)) == cpus
    assert all(share.threads == len(share.cpus) for share in shares)
    sizes = [share.threads for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert not oversubscription(cpus, shares)


def test_given_threads_are_kept_unpinned() -> None:
    assert divide([0, 1, 2, 3], 2, threads=3) == [Share((), 3), Share((), 3)]


def test_oversubscription_names_the_numbers() -> None:
    warning = oversubscription([0, 1], divide([0, 1], 3))
    assert "3 workers use 3 threads on 2 cores" in warning


def test_no_workers() -> None:
    assert divide([0, 1], 0) == []
