"""The picture of `compare`: unique parameters by component, and against FLOPs."""

from .picture import STYLES, drawing, wrap_name, write_pictures

# Colour and hatch of each component in the stacked bars, from the left; hatches tell them apart in grey.
COLOURS = {
    "convolutions": ("#56B4E9", ""),
    "embeddings": ("#0072B2", ""),
    "encoder": ("#E69F00", "//"),
    "decoder": ("#D55E00", "\\\\"),
    "norms": ("#000000", ""),
    "head": ("#009E73", ".."),
    "other": ("#999999", ""),
}


def draw(figures: list, outs: list[str]) -> None:
    """Draw bars of unique parameters by component, and unique parameters against FLOPs."""
    largest = max(each.unique for each in figures) / 1e6
    known = any(each.flops is not None for each in figures)
    with drawing() as pyplot:
        height = max(3.4, 1.2 + 0.52 * len(figures))
        panels = 2 if known else 1
        widths = [1.45, 1][:panels]
        figure, axes = pyplot.subplots(
            1,
            panels,
            figsize=(6.2 + 3.9 * (panels - 1), height),
            layout="constrained",
            squeeze=False,
            width_ratios=widths,
        )
        bars = axes[0][0]
        ends = [0.0] * len(figures)
        names = [wrap_name(each.name, 24) for each in figures]
        for component, (color, hatch) in COLOURS.items():
            sizes = [each.parameters.get(component, {}).get("unique", 0) / 1e6 for each in figures]
            if sum(sizes) < 0.002 * largest:
                continue  # would not be seen, as LayerNorms never are
            bars.barh(
                range(len(figures)),
                sizes,
                left=ends,
                height=0.62,
                color=color,
                hatch=hatch,
                edgecolor="white",
                linewidth=0.8,
                label=component,
            )
            ends = [end + size for end, size in zip(ends, sizes, strict=True)]
        for place, each in enumerate(figures):
            bars.annotate(
                f"{each.unique / 1e6:,.1f}",
                (ends[place], place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
            )
        bars.set_yticks(range(len(figures)), names)
        bars.invert_yaxis()
        bars.set_xlim(0, 1.13 * largest)
        bars.set_xlabel("unique parameters (millions)")
        bars.grid(axis="y", visible=False)
        bars.spines["right"].set_visible(False)
        bars.legend(frameon=False, ncols=6, loc="lower left", bbox_to_anchor=(-0.02, 1), handlelength=1.6)
        if known:
            draw_points(axes[0][1], bars, figures)
            figure.get_layout_engine().set(wspace=0.06)
        write_pictures(figure, outs)


def draw_points(axis, bars, figures: list) -> None:
    """Draw unique parameters against FLOPs; the marker of each model also stands behind its bar.

    Models that cost the same lie on each other: the first ones are larger.
    """
    known = [each for each in figures if each.flops is not None]
    for place, each in enumerate(figures):
        if each.flops is None:
            continue
        color, _, marker = STYLES[place % len(STYLES)]
        style = {"color": color, "marker": marker, "markeredgecolor": "white", "linestyle": "none"}
        x, y = each.unique / 1e6, each.total_flops / 1e6
        axis.plot(x, y, markersize=14 - 7 * place / len(figures), clip_on=False, **style)
        bars.plot(1.03, place, markersize=10, clip_on=False, transform=bars.get_yaxis_transform(), **style)
    axis.set_xlim(0, 1.15 * max(each.unique for each in known) / 1e6)
    axis.set_ylim(0, 1.15 * max(each.total_flops for each in known) / 1e6)
    axis.set_xlabel("unique parameters (millions)")
    axis.set_ylabel("forward MFLOPs per token")
    axis.spines["right"].set_visible(False)
