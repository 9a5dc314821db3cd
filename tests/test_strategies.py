"""The assignments of the paper, for every N and M."""

import doctest

import pytest

from fairseq_sharing import strategies
from fairseq_sharing.strategies import STRATEGIES, build_assignment, owners, parse_assignment, picture

EVERY_PAIR = [(n, m) for n in range(1, 25) for m in range(1, n + 1)]


def one_based_rule(strategy: str, n: int, m: int) -> list[int]:
    """Write the rules down a second time: one-based as in the paper, ALBERT's grouping for SEQUENCE."""
    if strategy == "sequence":
        sizes = [sum(1 for i in range(n) if i * m // n == group) for group in range(m)]
        return [group for group, size in enumerate(sizes, 1) for _ in range(size)]
    if strategy == "cycle":
        return ([*range(1, m + 1)] * n)[:n]
    stacks = -(-n // m)
    forward = [*range(1, m + 1)] * max(1, stacks - 1)
    return (forward + [*range(m, 0, -1)])[:n] if stacks > 1 else forward[:n]


@pytest.mark.parametrize(
    ("strategy", "n", "m", "expected"),
    [
        ("sequence", 6, 3, "1 1 2 2 3 3"),
        ("cycle", 6, 3, "1 2 3 1 2 3"),
        ("cycle_rev", 6, 3, "1 2 3 3 2 1"),
        ("sequence", 18, 6, "1 1 1 2 2 2 3 3 3 4 4 4 5 5 5 6 6 6"),
        ("cycle", 18, 6, "1 2 3 4 5 6 1 2 3 4 5 6 1 2 3 4 5 6"),
        ("cycle_rev", 18, 6, "1 2 3 4 5 6 1 2 3 4 5 6 6 5 4 3 2 1"),
        ("sequence", 7, 3, "1 1 1 2 2 3 3"),
        ("cycle_rev", 8, 3, "1 2 3 1 2 3 3 2"),
        ("cycle_rev", 8, 6, "1 2 3 4 5 6 6 5"),
        ("cycle_rev", 7, 3, "1 2 3 1 2 3 3"),
        ("none", 4, 4, "1 2 3 4"),
    ],
)
def test_published_pictures(strategy, n, m, expected):
    assert picture([number + 1 for number in build_assignment(strategy, n, m)]) == expected


@pytest.mark.parametrize("strategy", ["sequence", "cycle", "cycle_rev"])
def test_every_pair_follows_the_rule(strategy):
    for n, m in EVERY_PAIR:
        assignment = build_assignment(strategy, n, m)
        assert [number + 1 for number in assignment] == one_based_rule(strategy, n, m), (n, m)
        assert len(assignment) == n and set(assignment) == set(range(m))
        assert assignment[:1] == [0]


@pytest.mark.parametrize("strategy", ["sequence", "cycle", "cycle_rev"])
def test_one_set_and_n_sets(strategy):
    for n in range(1, 25):
        assert build_assignment(strategy, n, 1) == [0] * n
        assert build_assignment(strategy, n, n) == list(range(n))


def test_cycle_rev_mirrors_cycle_in_its_last_stack():
    for n, m in EVERY_PAIR:
        if n % m == 0 and n > m:
            cycle, reverse = build_assignment("cycle", n, m), build_assignment("cycle_rev", n, m)
            assert reverse[:-m] == cycle[:-m] and reverse[-m:] == cycle[-m:][::-1]


@pytest.mark.parametrize(("n", "m"), [(6, 0), (6, -1), (6, 7)])
def test_impossible_numbers_are_refused(n, m):
    with pytest.raises(ValueError, match=rf"{m} must be between 1 and the number of layers {n}"):
        build_assignment("cycle", n, m)


def test_unknown_strategy_is_refused():
    with pytest.raises(ValueError, match="'spiral'.*sequence, cycle, cycle_rev"):
        build_assignment("spiral", 6, 3)


def test_none_refuses_fewer_sets():
    with pytest.raises(ValueError, match="6, not 3"):
        build_assignment("none", 6, 3)


def test_explicit_assignments():
    assert parse_assignment("0,1,2,2,1,0") == [0, 1, 2, 2, 1, 0]
    assert parse_assignment(" 1, 0 ,1") == [1, 0, 1]
    assert owners([1, 0, 1, 2]) == [0, 1, 0, 3]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0,1,x", "'0,1,x' is not a list of whole numbers"),
        ("", "'' is not a list"),
        ("0,,1", "is not a list"),
        ("0,-1,1", "negative number -1"),
        ("0,2,2", "names parameter set 2 but leaves out 1"),
        ("1,1,1", "names parameter set 1 but leaves out 0"),
        ("0.5,1", "is not a list"),
    ],
)
def test_bad_assignments_are_refused(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse_assignment(text)


def test_pictures_in_the_docstrings():
    result = doctest.testmod(strategies)
    assert result.attempted >= len(STRATEGIES) and result.failed == 0
