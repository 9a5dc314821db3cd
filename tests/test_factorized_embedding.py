"""Factorised embeddings, V x E + E x H, in translation, language modelling and speech to text."""

import re

import pytest
import test_s2t_transformer_shared as speech
import test_transformer_lm_shared as lm
import test_transformer_shared as translation
import torch
from conftest import PLUGIN, TINY, binarise, build, random_batch, run, short_pairs, train_command, write_text

V, H = 40, 16  # of the tiny models
WIDTHS = [4, 8, 16, 24]  # E smaller than, equal to and larger than H
TYINGS = {"none": [], "decoder": ["--share-decoder-input-output-embed"], "all": ["--share-all-embeddings"]}
SHARED = [*TINY, *translation.FOUR_FROM_TWO]
LM = [*lm.TINY, "--decoder-unique-layers", "2"]


def count(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def projection(width: int) -> int:
    """E x H without bias, and none where E = H."""
    return width * H if width != H else 0


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tying", TYINGS)
def test_translation_by_count(width, tying):
    flags = [*SHARED, *TYINGS[tying]]
    tables = {"none": 3, "decoder": 2, "all": 1}[tying]
    saved = count(build(translation.REV, *flags)) - count(
        build(translation.REV, *flags, "--factorized-embed-dim", str(width))
    )
    assert saved == tables * V * (H - width) - 3 * projection(
        width
    )  # one projection in each stack, one before the output


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tied", [False, True])
def test_language_model_by_count(width, tied):
    flags = [*LM, *(["--share-decoder-input-output-embed"] if tied else [])]
    arch = "transformer_lm_shared_cycle_rev"
    saved = count(lm.build(arch, *flags)) - count(lm.build(arch, *flags, "--factorized-embed-dim", str(width)))
    assert saved == (1 if tied else 2) * V * (H - width) - 2 * projection(width)


ADAPTIVE = ["--adaptive-softmax-cutoff", "10,20", "--criterion", "adaptive_loss"]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("tying", "more"), [*((tying, []) for tying in TYINGS), ("none", ADAPTIVE)])
def test_translation_stepwise_equals_full_and_checkpoints(width, tying, more):
    flags = [*SHARED, *TYINGS[tying], "--factorized-embed-dim", str(width), *more]
    model, other = build(translation.REV, *flags), build(translation.REV, *flags, seed=2)
    with torch.no_grad():
        translation.assert_stepwise_equals_full(model)
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(**random_batch())[0], model(**random_batch())[0])
    if tying == "all":
        encoder = model.encoder.embed_tokens if width == H else model.encoder.embed_tokens.embedding
        assert encoder.weight is model.decoder.embed_tokens.weight
    if tying != "none" and not more:
        assert model.decoder.output_projection.weight is model.decoder.embed_tokens.weight


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["plain", "embeddings tied", "layerdrop"])
def test_language_model_stepwise_equals_full(width, name):
    flags = [*LM, *lm.VARIANTS[name], "--factorized-embed-dim", str(width)]
    with torch.no_grad():
        lm.assert_stepwise_equals_full(lm.build("transformer_lm_shared_cycle", *flags))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tied", [False, True])
def test_speech_to_text_by_count_and_stepwise(width, tied):
    flags = [*speech.SETS, *(["--share-decoder-input-output-embed"] if tied else [])]
    plain = speech.build(speech.REV, *flags)
    model = speech.build(speech.REV, *flags, "--factorized-embed-dim", str(width))
    assert count(plain) - count(model) == (1 if tied else 2) * V * (H - width) - 2 * projection(width)
    with torch.no_grad():
        speech.assert_stepwise_equals_full(model)
    other = speech.build(speech.REV, *flags, "--factorized-embed-dim", str(width), seed=2)
    other.load_state_dict(model.state_dict())


def test_language_model_is_fairseqs_own_factorisation():
    """The flag is short for fairseq's --decoder-input-dim and --decoder-output-dim."""
    arch = "transformer_lm_shared_cycle"
    ours = lm.build(arch, *LM, "--factorized-embed-dim", "8")
    theirs = lm.build(arch, *LM, "--decoder-input-dim", "8", "--decoder-output-dim", "8")
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in ours.state_dict().items())


def test_widths_equal_change_nothing():
    """E = H is no factorisation: the same tensors under the same names."""
    plain, factorised = (
        build(translation.REV, *SHARED),
        build(translation.REV, *SHARED, "--factorized-embed-dim", str(H)),
    )
    assert list(plain.state_dict()) == list(factorised.state_dict())
    assert all(torch.equal(value, factorised.state_dict()[key]) for key, value in plain.state_dict().items())


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--factorized-embed-dim", "0"], "--factorized-embed-dim 0 must be at least 1"),
        (
            ["--factorized-embed-dim", "8", "--decoder-output-dim", "4"],
            "--decoder-output-dim 4 contradicts --factorized-embed-dim 8",
        ),
    ],
)
def test_contradictions_are_refused(flags, sentence):
    for configure in (
        lambda *more: build(translation.REV, *SHARED, *more),
        lambda *more: lm.configure("transformer_lm_shared_cycle", *more),
        lambda *more: speech.parse("s2t_transformer_shared_cycle", *more),
    )[: 2 if "--decoder-output-dim" in flags else 3]:  # which speech to text does not have
        with pytest.raises(ValueError, match=sentence):
            configure(*flags)


def test_adaptive_inputs_are_factorised_already():
    with pytest.raises(ValueError, match="--factorized-embed-dim 8 cannot be combined with --adaptive-input"):
        lm.configure("transformer_lm_shared_cycle", *lm.ADAPTIVE, "--factorized-embed-dim", "8")


def test_a_factorised_model_learns_and_decodes(tmp_path):
    """Thirty real pairs by heart, through fairseq's commands."""
    pairs = short_pairs(30, most_words=8)
    write_text(tmp_path, train=pairs, valid=pairs, test=pairs)
    data = binarise(tmp_path, vocabulary=200)
    flags = [
        *("--encoder-layers", 4, "--decoder-layers", 4, "--encoder-unique-layers", 2, "--decoder-unique-layers", 2),
        *("--encoder-normalize-before", "--decoder-normalize-before", "--factorized-embed-dim", 24),
        *("--max-epoch", 150, "--dropout", 0, "--label-smoothing", 0, "--no-epoch-checkpoints", "--save-interval", 150),
        *("--disable-validation",),
    ]
    run(train_command(data, tmp_path / "save", translation.REV, *flags))
    output = run(
        [
            *("fairseq-generate", data, "--path", tmp_path / "save" / "checkpoint_last.pt", "--user-dir", PLUGIN),
            *("--cpu", "--remove-bpe", "sentencepiece", "--beam", 4, "--num-workers", 0),
        ]
    )
    assert float(re.search(r"BLEU4 = ([\d.]+)", output)[1]) > 80
    shown = run(["fairseq-sharing", "show", "--path", tmp_path / "save" / "checkpoint_last.pt"])
    assert "set   0 1 1 0" in shown
