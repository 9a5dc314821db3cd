"""Sharing is data: a strategy turns (N layers, M parameter sets) into an assignment.

An *assignment* is a list with one entry for each layer: the number of the parameter set that the layer uses.

Source: Takase & Kiyono, "Lessons on Parameter Sharing across Layers in Transformers", arXiv 2104.06022, section 2 and
figure 1. This file knows neither torch nor fairseq.
"""

from math import ceil


def sequence(num_layers: int, num_unique: int) -> list[int]:
    """Give neighbouring layers the same set.

    Where M does not divide N, this is ALBERT's grouping floor(i M / N): always exactly M sets.

    >>> picture(sequence(6, 3)), picture(sequence(7, 3))
    ('0 0 1 1 2 2', '0 0 0 1 1 2 2')
    """
    return [i * num_unique // num_layers for i in range(num_layers)]


def cycle(num_layers: int, num_unique: int) -> list[int]:
    """Stack M layers, then repeat that stack in the same order.

    >>> picture(cycle(6, 3)), picture(cycle(7, 3))
    ('0 1 2 0 1 2', '0 1 2 0 1 2 0')
    """
    return [i % num_unique for i in range(num_layers)]


def cycle_rev(num_layers: int, num_unique: int) -> list[int]:
    """Repeat the stack of M layers as CYCLE does, but run through the last repetition in reverse.

    >>> picture(cycle_rev(6, 3)), picture(cycle_rev(9, 3)), picture(cycle_rev(8, 3))
    ('0 1 2 2 1 0', '0 1 2 0 1 2 2 1 0', '0 1 2 0 1 2 2 1')
    """
    start_of_last = max(num_unique, num_unique * (ceil(num_layers / num_unique) - 1))
    return [i % num_unique if i < start_of_last else num_unique - 1 - i % num_unique for i in range(num_layers)]


def none(num_layers: int, num_unique: int | None = None) -> list[int]:
    """Give every layer a set of its own, as in the plain Transformer (M = N).

    >>> picture(none(6))
    '0 1 2 3 4 5'
    """
    if num_unique not in (None, num_layers):
        raise ValueError(f"strategy none has as many parameter sets as layers: {num_layers}, not {num_unique}")
    return list(range(num_layers))


STRATEGIES = {"none": none, "sequence": sequence, "cycle": cycle, "cycle_rev": cycle_rev}


def build_assignment(strategy: str, num_layers: int, num_unique: int) -> list[int]:
    """Return the assignment of a strategy.

    Args:
        strategy: a key of `STRATEGIES`.
        num_layers: N, at least 1.
        num_unique: M, from 1 to N.

    Raises:
        ValueError: the strategy is unknown or M is outside 1..N.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown sharing strategy {strategy!r}: choose from {', '.join(STRATEGIES)}")
    if not 1 <= num_unique <= num_layers:
        raise ValueError(
            f"the number of parameter sets {num_unique} must be between 1 and the number of layers {num_layers}"
        )
    return STRATEGIES[strategy](num_layers, num_unique)


def parse_assignment(text: str) -> list[int]:
    """Read an explicit assignment such as ``0,1,2,2,1,0``.

    Any numbering of the sets is welcome as long as it uses each of 0..M-1.

    Raises:
        ValueError: the text is no list of whole numbers from 0, or skips a number.
    """
    try:
        assignment = [int(entry) for entry in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r} is not a list of whole numbers such as 0,1,2,2,1,0") from None
    if min(assignment) < 0:
        raise ValueError(f"{text!r} holds the negative number {min(assignment)}: parameter sets are counted from 0")
    missing = sorted(set(range(max(assignment) + 1)) - set(assignment))
    if missing:
        raise ValueError(
            f"{text!r} names parameter set {max(assignment)} but leaves out {missing[0]}: use each of 0..M-1"
        )
    return assignment


def owners(assignment: list[int]) -> list[int]:
    """Return for each layer the layer that owns its parameters: the first one with the same set.

    Two assignments share in the same way exactly when their owners agree, whatever the numbering of the sets.

    >>> owners([0, 1, 2, 2, 1, 0]), owners([2, 1, 0, 0, 1, 2])
    ([0, 1, 2, 2, 1, 0], [0, 1, 2, 2, 1, 0])
    """
    return [assignment.index(number) for number in assignment]


def picture(assignment: list[int]) -> str:
    """Return the assignment as people read it.

    >>> picture([0, 1, 1, 0])
    '0 1 1 0'
    """
    return " ".join(map(str, assignment))
