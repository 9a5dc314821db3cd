"""Any combination of flags trains, saves, restores and decodes consistently, or is refused with a sentence.

One test for each family. The ordinary suite tries a few combinations, always the same; the slow tests try many.
"""

import contextlib
import io
from collections import Counter

import pytest
import test_albert_encoder as albert
import test_s2t_transformer_shared as s2t
import test_transformer_lm_shared as lm
import torch
from conftest import build, random_batch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from test_transformer_shared import assert_stepwise_equals_full

SHARING = st.sampled_from(["none", "sequence", "cycle", "cycle_rev"])
NUMBERS = st.lists(st.integers(0, 3), min_size=1, max_size=6).map(lambda numbers: ",".join(map(str, numbers)))
ZERO_OR_HALF = st.sampled_from([0.0, 0.5])
GIVEN = st.just(True)
OTHERS = {
    "normalize-before": GIVEN,
    "learned-pos": GIVEN,
    "layerdrop": ZERO_OR_HALF,
    "attention-heads": st.sampled_from([1, 2, 3]),
}


@st.composite
def stacks(draw, others: dict = OTHERS) -> dict:
    """Return flags of one stack: mostly a strategy with an M that fits, now and then anything."""
    flags = {"layers": draw(st.integers(1, 6)), **draw(st.fixed_dictionaries({}, optional=others))}
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


def some_of(**options) -> st.SearchStrategy:
    """Return flags of the whole model: any of these, and of those that all families have."""
    common = {
        "sharing-parts": st.sampled_from(
            ["attention", "ffn", "norm", "attention,ffn", "norm,ffn", "norm,attention", "ffn,ears"]
        ),
        "factorized-embed-dim": st.sampled_from([1, 8, 12, 12, 16, 16, 0]),
        "dropout": ZERO_OR_HALF,
        "attention-dropout": ZERO_OR_HALF,
        "activation-dropout": ZERO_OR_HALF,
        "activation-fn": st.sampled_from(["relu", "gelu", "gelu_accurate", "tanh", "linear", "swish"]),
        "ddp-backend": st.sampled_from([*["legacy_ddp"] * 9, "fully_sharded"]),
    }
    options = {name.replace("_", "-"): values for name, values in options.items()}
    return st.fixed_dictionaries({}, optional={**common, **options})


def as_flags(chosen: dict, prefix: str = "") -> list[str]:
    return [
        word
        for name, value in chosen.items()
        for word in ([f"--{prefix}{name}"] if value is True else [f"--{prefix}{name}={value}"])
    ]


OUTCOMES = Counter()


@pytest.fixture(autouse=True)
def some_are_built():
    """A plugin that refuses everything would pass otherwise."""
    OUTCOMES.clear()
    yield
    assert OUTCOMES["built"] >= OUTCOMES["refused"] / 4


def build_or_refuse(build_one, arch: str, flags: list[str]):
    """Build a model, or check that the refusal names an option and return None."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return build_one(arch, *flags)
    except ValueError as error:
        sentence = str(error)
    except SystemExit:  # argparse
        sentence = said.getvalue().strip().splitlines()[-1]
        assert " error: argument " in sentence
    assert "--" in sentence and "\n" not in sentence
    event("refused")
    OUTCOMES["refused"] += 1
    return None


def check_one(build_one, arch: str, flags: list[str], stacks: list[str], run, decode=None) -> None:
    """Train a step, save, restore and decode, or be refused.

    Args:
        build_one: builds a model in evaluation mode from architecture, flags and ``seed``.
        arch: the architecture.
        flags: its flags.
        stacks: where the model keeps its shared layers.
        run: takes the model to its output on one batch.
        decode: checks stepwise decoding against a full forward pass.
    """
    model = build_or_refuse(build_one, arch, flags)
    if model is None:
        return
    event("built")
    OUTCOMES["built"] += 1
    model.train()
    run(model).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for layers in map(model.get_submodule, stacks):
        for index, owner in enumerate(layers.sharing.owners):
            same = layers[index].fc1.weight is layers[owner].fc1.weight
            assert same == (index == owner or "ffn" in layers.sharing.parts)
    other = build_one(arch, *flags, seed=2)
    other.load_state_dict(model.state_dict())
    model.eval()
    with torch.no_grad():
        assert torch.equal(run(other), run(model))
        if decode is not None:
            decode(other)


PRESETS = st.sampled_from(["sequence", "cycle", "cycle_rev", "universal"])
WIDTHS = ["--encoder-embed-dim=12", "--encoder-ffn-embed-dim=8"]
HEADS = ["--encoder-attention-heads=2", "--decoder-attention-heads=2"]
QUANT_NOISE = {
    "quant_noise_pq": st.sampled_from([0.0, 0.0, 0.2]),
    "quant_noise_pq_block_size": st.sampled_from([1, 4, 4, 8]),
}
CUTOFFS = st.sampled_from(["10", "10,20", "30"])

TRANSLATION = {
    "preset": PRESETS,
    "encoder": stacks(),
    "decoder": stacks(),
    "common": some_of(
        share_all_embeddings=GIVEN,
        share_decoder_input_output_embed=GIVEN,
        layernorm_embedding=GIVEN,
        encoder_embed_dim=st.sampled_from([8, 12]),
        decoder_embed_dim=st.sampled_from([8, 12]),
        decoder_output_dim=st.sampled_from([8, 12]),
        no_token_positional_embeddings=GIVEN,
        no_scale_embedding=GIVEN,
        adaptive_softmax_cutoff=CUTOFFS,
        checkpoint_activations=GIVEN,
        **QUANT_NOISE,
    ),
}
DECODER_ONLY = {"learned-pos": GIVEN, "layerdrop": ZERO_OR_HALF, "attention-heads": st.sampled_from([1, 2, 3])}
LANGUAGE_MODEL = {
    "preset": PRESETS,
    "size": st.sampled_from(["", "", "_wiki103"]),
    "decoder": stacks(DECODER_ONLY),
    "common": some_of(
        share_decoder_input_output_embed=GIVEN,
        decoder_input_dim=st.sampled_from([8, 16]),
        decoder_output_dim=st.sampled_from([8, 16]),
        no_token_positional_embeddings=GIVEN,
        adaptive_input=GIVEN,
        tie_adaptive_weights=GIVEN,
        tie_adaptive_proj=GIVEN,
        adaptive_softmax_cutoff=CUTOFFS,
        scale_fc=GIVEN,
        scale_attn=GIVEN,
        scale_heads=GIVEN,
        scale_resids=GIVEN,
        checkpoint_activations=GIVEN,
        **QUANT_NOISE,
    ),
}
SPEECH_STACK = {"normalize-before": GIVEN, "attention-heads": st.sampled_from([1, 2, 3])}
SPEECH = {
    "preset": PRESETS,
    "encoder": stacks(SPEECH_STACK),
    "decoder": stacks(SPEECH_STACK),
    "common": some_of(
        share_decoder_input_output_embed=GIVEN,
        layernorm_embedding=GIVEN,
        no_scale_embedding=GIVEN,
        decoder_embed_dim=st.sampled_from([8, 12]),
        conv_kernel_sizes=st.sampled_from(["3", "5,5", "1,3,1", "5,3", "4", "3,"]),
        conv_channels=st.sampled_from([2, 4, 8, 8, 7]),
        conv_version=st.sampled_from(["s2t_transformer", "convtransformer"]),
    ),
}
MASKED_STACK = {
    "normalize-before": GIVEN,
    "layerdrop": ZERO_OR_HALF,
    "attention-heads": st.sampled_from([1, 2, 3]),
}
MASKED_LM = {
    "encoder": stacks(MASKED_STACK),
    "common": some_of(
        encoder_embed_dim=st.sampled_from([8, 12]),
        layernorm_eps=st.sampled_from(["1e-12", "1e-6", "1e-5", "1e-3", "0", "-1"]),
        untie_weights_roberta=GIVEN,
        max_positions=st.sampled_from([8, 32, 600]),
        pooler_dropout=ZERO_OR_HALF,
        **QUANT_NOISE,
    ),
}


def check_translation(preset, encoder, decoder, common):
    flags = [*WIDTHS, "--decoder-embed-dim=12", "--decoder-ffn-embed-dim=8", *HEADS]
    flags += [*as_flags(encoder, "encoder-"), *as_flags(decoder, "decoder-"), *as_flags(common)]
    names = ["encoder.layers", "decoder.layers"]
    arch = f"transformer_shared_{preset}"
    check_one(build, arch, flags, names, lambda model: model(**random_batch())[0], assert_stepwise_equals_full)


def check_language_model(preset, size, decoder, common):
    flags = ["--decoder-embed-dim=16", "--decoder-ffn-embed-dim=8", "--decoder-attention-heads=2"]
    flags += ["--adaptive-input-cutoff=10,20", *as_flags(decoder, "decoder-"), *as_flags(common)]
    arch = f"transformer_lm_shared_{preset}{size if preset != 'universal' else ''}"
    tokens = lm.random_tokens()
    check_one(lm.build, arch, flags, ["decoder.layers"], lambda model: model(tokens)[0], lm.assert_stepwise_equals_full)


def check_speech(preset, encoder, decoder, common):
    flags = [*WIDTHS, *HEADS, "--conv-channels=8", "--conv-out-channels=4"]
    flags += [*as_flags(encoder, "encoder-"), *as_flags(decoder, "decoder-"), *as_flags(common)]
    names = ["encoder.transformer_layers", "decoder.layers"]
    arch = f"s2t_transformer_shared_{preset}"
    batch = s2t.random_batch()
    check_one(s2t.build, arch, flags, names, lambda model: model(**batch)[0], s2t.assert_stepwise_equals_full)


def check_masked_lm(encoder, common):
    flags = [*WIDTHS, "--encoder-attention-heads=2", *as_flags(encoder, "encoder-"), *as_flags(common)]
    tokens = albert.random_tokens()
    names = ["encoder.sentence_encoder.layers"]
    check_one(albert.build, "albert_encoder", flags, names, lambda model: model(tokens)[0])


FAMILIES = {
    "translation": (check_translation, TRANSLATION),
    "language model": (check_language_model, LANGUAGE_MODEL),
    "speech": (check_speech, SPEECH),
    "masked LM": (check_masked_lm, MASKED_LM),
}


def try_combinations(family: str, examples: int) -> None:
    check, strategies = FAMILIES[family]
    quiet = settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    quiet(given(**strategies)(check))()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_combination_works_or_is_refused(family):
    try_combinations(family, 25)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_combinations_work_or_are_refused(family):
    try_combinations(family, 1000)
