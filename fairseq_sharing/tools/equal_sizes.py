"""Give the models that `compare` compares one depth, or widths for one number of unique parameters."""

import math

from .configurations import Entry

UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}
STEP = 8  # widths are multiples of it
WIDEST = 2**17


def make_equally_deep(entries: list[Entry]) -> None:
    """Give every other entry the number of layers of the first.

    Raises:
        ValueError: a checkpoint, or an architecture with other stacks, cannot be given them.
    """
    from .model import stacks_of

    depths = {stack: len(layers) for stack, layers in stacks_of(entries[0].subject.model).items()}
    for entry in entries[1:]:
        own = {stack: len(layers) for stack, layers in stacks_of(entry.subject.model).items()}
        if own == depths:
            continue
        if entry.path is not None or own.keys() != depths.keys():
            raise ValueError(f"--equal depth: {entry.name} has layers {own}, {entries[0].name} has {depths}")
        entry.build(*(word for stack, depth in depths.items() for word in (f"--{stack}-layers", str(depth))))
        entry.notes.append(f"{entry.name}: N = {depths} as {entries[0].name}, in place of {own}")


def read_budget(text: str, entries: list[Entry]) -> int:
    """Read --match-params: a number such as 61M, or the name of an entry.

    Raises:
        ValueError: it is neither.
    """
    for entry in entries:
        if entry.name == text:
            return entry.size()
    number, unit = (text[:-1], UNITS[text[-1].lower()]) if text[-1:].lower() in UNITS else (text, 1)
    try:
        budget = round(float(number.replace(",", "").replace("_", "")) * unit)
    except (ValueError, OverflowError):
        budget = 0
    if budget < 1:
        raise ValueError(f"--match-params {text} is neither a number of parameters nor the name of a model here")
    return budget


def is_universal(entry: Entry) -> bool:
    """Whether all layers of each stack use one set."""
    from .model import sharing_of, stacks_of

    sharings = [sharing_of(layers) for layers in stacks_of(entry.subject.model).values()]
    return all(len(set(sharing.assignment)) == 1 for sharing in sharings) and any(each.shares for each in sharings)


def match_width(entry: Entry, budget: int) -> None:
    """Give an architecture the width whose unique parameters are closest to the budget.

    Raises:
        ValueError: it is a checkpoint, its stacks differ in width, or even the narrowest has more parameters.
    """
    if entry.path is not None:
        raise ValueError(f"{entry.name} is a checkpoint and cannot be given another width")
    from .cost import describe_stack
    from .model import stacks_of

    stacks = {stack: describe_stack(layers) for stack, layers in stacks_of(entry.subject.model).items()}
    widths = sorted({each["width"] for each in stacks.values()})
    if len(widths) > 1:
        raise ValueError(f"{entry.name} has stacks of widths {widths[0]} and {widths[1]}: match them by hand")
    step = math.lcm(STEP, *(each["heads"] for each in stacks.values()))
    config, flags, sizes = entry.subject.config, list(entry.flags), {}

    def resize(width: int) -> int:
        more = []
        for stack, each in stacks.items():
            ffn = round(each["ffn"] * width / widths[0])
            more += [f"--{stack}-embed-dim", str(width), f"--{stack}-ffn-embed-dim", str(ffn)]
        if list(stacks) == ["decoder"]:  # a language model's embeddings are as wide as its layers unless factorised
            for name in ("decoder_input_dim", "decoder_output_dim"):
                if getattr(config, name) == widths[0]:
                    more += ["--" + name.replace("_", "-"), str(width)]
        if width not in sizes:
            entry.flags = flags
            entry.build(*more)
            sizes[width] = entry.size()
        return sizes[width]

    narrow, wide = 1, max(2, widths[0] // step)
    while resize(wide * step) < budget:
        if wide * step > WIDEST:
            raise ValueError(f"{entry.name} would have to be wider than {WIDEST} for {budget:,} parameters")
        narrow, wide = wide, wide * 2
    if resize(narrow * step) > budget:
        raise ValueError(
            f"{entry.name} has {sizes[step]:,} parameters at its least width {step} already, and should have {budget:,}"
        )
    while wide - narrow > 1:
        middle = (narrow + wide) // 2
        narrow, wide = (middle, wide) if resize(middle * step) <= budget else (narrow, middle)
    best = min((narrow * step, wide * step), key=lambda width: abs(sizes[width] - budget))
    del sizes[best]  # to build it again
    found = resize(best)
    stack = describe_stack(next(iter(stacks_of(entry.subject.model).values())))
    entry.notes.append(
        f"{entry.name}: width {widths[0]} -> {best} (FFN {stack['ffn']}, {stack['heads']} heads), "
        f"{found:,} parameters for {budget:,} ({(found - budget) / budget:+.1%}); widths are multiples of {step}"
    )


def make_equal(entries: list[Entry], args) -> None:
    """Change the entries as --equal or --match-params asks.

    Raises:
        ValueError: they cannot be.
    """
    from .progress import progress

    if args.equal == "depth":
        make_equally_deep(entries)
    elif args.equal == "parameters":
        budget = entries[0].size()
        for entry in progress([each for each in entries[1:] if each.size() != budget], "matching widths"):
            match_width(entry, budget)
    elif args.match_params is not None:
        budget = read_budget(args.match_params, entries)
        universal = [entry for entry in entries if is_universal(entry) and entry.name != args.match_params]
        if not universal:
            raise ValueError(
                f"--match-params {args.match_params} needs a Universal model (M = 1), and none is compared"
            )
        for entry in progress(universal, "matching widths"):
            match_width(entry, budget)
