"""Any combination of flags trains, saves, restores and decodes consistently, or is refused with a sentence."""

import torch
from conftest import build, random_batch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from test_transformer_shared import assert_stepwise_equals_full

SHARING = st.sampled_from(["none", "sequence", "cycle", "cycle_rev"])
NUMBERS = st.lists(st.integers(0, 3), min_size=1, max_size=6).map(lambda numbers: ",".join(map(str, numbers)))
OTHERS = st.fixed_dictionaries(
    {},
    optional={
        "normalize-before": st.just(True),
        "learned-pos": st.just(True),
        "layerdrop": st.sampled_from([0.0, 0.5]),
        "attention-heads": st.sampled_from([1, 2, 3]),
    },
)


@st.composite
def stacks(draw) -> dict:
    """Return flags of one stack: mostly a strategy with an M that fits, now and then anything."""
    flags = {"layers": draw(st.integers(1, 6)), **draw(OTHERS)}
    kind = draw(st.sampled_from(["strategy", "strategy", "strategy", "assignment", "anything"]))
    if kind == "strategy":
        flags |= {"unique-layers": draw(st.integers(1, flags["layers"])), "sharing": draw(SHARING)}
    elif kind == "assignment":
        flags |= {"assignment": draw(NUMBERS)}
    else:
        flags |= draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "sharing": SHARING,
                    "unique-layers": st.integers(-1, 7),
                    "assignment": st.one_of(NUMBERS, st.sampled_from(["", "0,", "0;1", "0,-1,1", "1,1", "a"])),
                },
            )
        )
    return flags


COMMON = st.fixed_dictionaries(
    {},
    optional={
        "sharing-parts": st.sampled_from(
            ["attention", "ffn", "norm", "attention,ffn", "norm,ffn", "norm,attention", "ffn,ears"]
        ),
        "dropout": st.sampled_from([0.0, 0.5]),
        "share-all-embeddings": st.just(True),
        "layernorm-embedding": st.just(True),
        "encoder-embed-dim": st.sampled_from([8, 12]),
        "ddp-backend": st.sampled_from(["legacy_ddp", "legacy_ddp", "fully_sharded"]),
    },
)


def as_flags(chosen: dict, prefix: str = "") -> list[str]:
    return [
        word
        for name, value in chosen.items()
        for word in ([f"--{prefix}{name}"] if value is True else [f"--{prefix}{name}={value}"])
    ]


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    preset=st.sampled_from(["sequence", "cycle", "cycle_rev", "universal"]),
    encoder=stacks(),
    decoder=stacks(),
    common=COMMON,
)
def test_every_combination_works_or_is_refused(preset, encoder, decoder, common):
    widths = [
        "--encoder-embed-dim=12",
        "--encoder-ffn-embed-dim=8",
        "--decoder-embed-dim=12",
        "--decoder-ffn-embed-dim=8",
    ]
    heads = ["--encoder-attention-heads=2", "--decoder-attention-heads=2"]
    flags = [*widths, *heads, *as_flags(encoder, "encoder-"), *as_flags(decoder, "decoder-"), *as_flags(common)]
    arch = f"transformer_shared_{preset}"
    try:
        model = build(arch, *flags)
    except ValueError as error:
        assert "--" in str(error) and "\n" not in str(error)
        event("refused")
        return
    event("built")

    model.train()
    model(**random_batch())[0].square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    state = model.state_dict()
    for stack in (model.encoder, model.decoder):
        for index, owner in enumerate(stack.layers.sharing.owners):
            if "ffn" in stack.layers.sharing.parts:
                assert stack.layers[index].fc1.weight is stack.layers[owner].fc1.weight
    other = build(arch, *flags, seed=2)
    other.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        assert torch.equal(other(**random_batch())[0], model(**random_batch())[0])
        assert_stepwise_equals_full(other)
