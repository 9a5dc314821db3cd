"""Admin's residual scaling: what is computed, the profile, and its way through training, checkpoints and decoding."""

import copy
import math
import re
from types import SimpleNamespace

import pytest
import test_transformer_lm_shared as lm
import torch
from conftest import FOUR_FROM_TWO, PLUGIN, TINY, build, build_dictionary, parse, random_batch, run, train_command
from fairseq.data import Dictionary, data_utils
from fairseq.models import build_model
from fairseq.optim.fp16_optimizer import FP16Optimizer
from omegaconf import OmegaConf
from torch.nn import functional

from fairseq_sharing import residual
from fairseq_sharing.residual import ScaledResidualNorm, fold_scalings, is_measured, list_scalings

REV = "transformer_shared_cycle_rev"
UNSHARED = [
    *("--encoder-layers", "4", "--decoder-layers", "4"),
    "--encoder-sharing",
    "none",
    "--decoder-sharing",
    "none",
]
SHARINGS = {
    "shared": FOUR_FROM_TWO,
    "unshared": UNSHARED,
    "attention only": [*FOUR_FROM_TWO, "--sharing-parts", "attention"],
}
ADMIN = ["--residual-scaling", "admin"]
NO_DROPOUT = ["--dropout", "0"]


def stacks(model):
    return [model.encoder.layers, model.decoder.layers]


def vary(model) -> None:
    """Give omega some spread, as training does."""
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, ScaledResidualNorm):
            with torch.no_grad():
                module.residual_delta.copy_(0.3 * torch.randn(module.residual_delta.shape, generator=generator))


# --- what is computed, written a second time ---


def attend(attention, query, key, mask):
    return attention(query=query, key=key, value=key, key_padding_mask=mask[0], attn_mask=mask[1], need_weights=False)[
        0
    ]


def feed_forward(layer, x):
    return layer.fc2(functional.relu(layer.fc1(x)))


def sublayers(layers, encoder_out=None, padding=None, future=None):
    """Yield each sublayer of a Post-LN stack in order as (LayerNorm, function)."""
    for index in range(len(layers)):
        layer = layers[index]
        own = (None, future) if encoder_out is not None else (padding, None)
        yield layer.self_attn_layer_norm, lambda x, layer=layer, own=own: attend(layer.self_attn, x, x, own)
        if encoder_out is not None:
            yield (
                layer.encoder_attn_layer_norm,
                lambda x, layer=layer: attend(layer.encoder_attn, x, encoder_out, (padding, None)),
            )
        yield layer.final_layer_norm, lambda x, layer=layer: feed_forward(layer, x)


def reference(x, steps, omegas=None):
    """Run a stack by Admin's definition; without omegas take them from the variances.

    Returns:
        The output and the omegas.
    """
    variance, used = 1.0, []
    for number, (norm, function) in enumerate(steps):
        omega = math.sqrt(variance) if omegas is None else omegas[number]
        branch = function(x)
        variance = float((x * omega).var() + branch.var())
        x = functional.layer_norm(x * omega + branch, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
        used.append(omega)
    return x, used


def run_reference(model, batch, omegas=(None, None)):
    """Return the decoder's features, B x T x C, and the omegas of both stacks."""
    embedded, _ = model.encoder.forward_embedding(batch["src_tokens"])
    padding = batch["src_tokens"].eq(1)
    encoder_in = (embedded * (~padding).unsqueeze(-1)).transpose(0, 1)
    encoder_out, found = reference(encoder_in, sublayers(stacks(model)[0], padding=padding), omegas[0])
    target = batch["prev_output_tokens"]
    scale = model.decoder.embed_scale
    decoder_in = scale * model.decoder.embed_tokens(target) + model.decoder.embed_positions(target)
    future = torch.full((target.size(1), target.size(1)), -torch.inf).triu(1)
    steps = sublayers(stacks(model)[1], encoder_out=encoder_out, padding=padding, future=future)
    features, found_too = reference(decoder_in.transpose(0, 1), steps, omegas[1])
    return features.transpose(0, 1), [found, found_too]


@pytest.mark.parametrize("sharing", SHARINGS)
def test_the_forward_pass_is_admins(sharing):
    model = build(REV, *TINY, *SHARINGS[sharing], "--residual-scaling", "admin-static")
    vary(model)
    batch = random_batch()
    omegas = [[norm.omega for norm in list_scalings(layers)] for layers in stacks(model)]
    assert [len(each) for each in omegas] == [8, 12]
    expected, _ = run_reference(model, batch, omegas)
    assert torch.allclose(model(**batch, features_only=True)[0], expected, atol=1e-5)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_the_profile_is_admins(sharing):
    model = build(REV, *TINY, *SHARINGS[sharing], *ADMIN, *NO_DROPOUT)
    assert not any(is_measured(list_scalings(layers)) for layers in stacks(model))
    batch = random_batch()
    _, expected = run_reference(model, batch)
    model.train()(**batch)
    for layers, omegas in zip(stacks(model), expected, strict=True):
        found = [norm.residual_scale.item() for norm in list_scalings(layers)]
        assert found[0] == 1 and found == pytest.approx(omegas, rel=1e-5)
    model(**random_batch(seed=5))
    assert [norm.residual_scale.item() for norm in list_scalings(stacks(model)[1])] == found  # taken once


def test_static_scalings_are_the_closed_form():
    model = build(REV, *TINY, "--encoder-layers", "12", "--decoder-layers", "12", "--residual-scaling", "admin-static")
    for layers, published in zip(stacks(model), (2.60, 3.04), strict=True):  # of the package admin-torch, 24 and 36
        assert {round(norm.residual_scale.item(), 2) for norm in list_scalings(layers)} == {published}


@pytest.mark.parametrize("method", ["admin", "admin-static"])
@pytest.mark.parametrize("sharing", SHARINGS)
def test_parameters_grow_by_five_vectors_a_layer(sharing, method):
    plain = build(REV, *TINY, *SHARINGS[sharing])
    scaled = build(REV, *TINY, *SHARINGS[sharing], "--residual-scaling", method)
    count = [sum(p.numel() for p in model.parameters()) for model in (plain, scaled)]
    assert count[1] - count[0] == 5 * 4 * 16
    names = {name for name in scaled.state_dict() if "residual" not in name}
    assert names == set(plain.state_dict())


def real_batch(data, count: int = 32) -> tuple[dict, int]:
    """Return real sentence pairs of about one length, as fairseq batches them, and the size of the dictionary."""
    dictionary = Dictionary.load(str(data / "dict.en.txt"))
    sides = [data_utils.load_indexed_dataset(str(data / f"train.en-de.{side}"), dictionary) for side in ("en", "de")]
    alike = [pair for pair in zip(*sides, strict=True) if all(18 <= len(side) <= 24 for side in pair)][:count]
    source, target = (data_utils.collate_tokens([pair[side] for pair in alike], dictionary.pad()) for side in (0, 1))
    lengths = source.ne(dictionary.pad()).sum(1)
    return {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": target.roll(1, 1)}, len(dictionary)


@pytest.mark.parametrize("initialised", ["as today", "as in fairseq 0.8"])
def test_real_profiles_lie_in_the_published_range(data, initialised):
    """Base size, 6+6 layers, dropout 0.3, real sentences: omega grows from 1 as in public logs of Admin.

    Those were made with fairseq 0.8, whose FFN was initialised by Xavier's rule. Today it is torch's default, with a
    fifth of the variance in fc2, so omega grows more slowly.
    """
    batch, vocabulary = real_batch(data)
    assert len(batch["src_tokens"]) >= 20
    six = ["--encoder-layers", "6", "--decoder-layers", "6", "--share-all-embeddings", "--dropout", "0.3"]
    model = build(REV, *six, *UNSHARED[4:], *ADMIN, vocabulary=vocabulary)
    if initialised == "as in fairseq 0.8":
        for layers in stacks(model):
            for linear in (linear for layer in layers for linear in (layer.fc1, layer.fc2)):
                torch.nn.init.xavier_uniform_(linear.weight)
                torch.nn.init.zeros_(linear.bias)
    model.train()(**batch)
    encoder, decoder = ([norm.residual_scale.item() for norm in list_scalings(layers)] for layers in stacks(model))
    for scales in (encoder, decoder):
        assert scales[0] == 1 and scales == sorted(scales) and 1.3 < scales[1] < 1.6
    if initialised == "as in fairseq 0.8":
        assert 2.2 < encoder[-1] < 2.5 and 2.6 < decoder[-1] < 3.1
    else:
        assert 1.8 < encoder[-1] < 2.1 and 2.2 < decoder[-1] < 2.6


# --- the profile and training ---


def test_the_profile_leaves_the_random_numbers_of_training_alone():
    flags = [*TINY, *FOUR_FROM_TWO, "--dropout", "0.3", "--encoder-layerdrop", "0.5", "--decoder-layerdrop", "0.5"]
    fresh = build(REV, *flags, *ADMIN).train()
    torch.manual_seed(7)
    first = fresh(**random_batch())[0]
    assert all(is_measured(list_scalings(layers)) for layers in stacks(fresh))  # of dropped layers too
    torch.manual_seed(7)
    assert torch.equal(fresh(**random_batch())[0], first)


def test_the_profile_survives_fp32_masters():
    """--fp16 copies parameters to fp32 before the first forward pass and writes them back after each update."""
    model = build(REV, *TINY, *FOUR_FROM_TWO, *ADMIN).train()
    parameters = list(model.parameters())
    masters = FP16Optimizer.build_fp32_params(None, parameters, flatten=False)
    model(**random_batch())
    scales = [norm.omega.clone() for norm in list_scalings(stacks(model)[1])]
    with torch.no_grad():
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.copy_(master)
    assert all(
        torch.equal(norm.omega, scale) for norm, scale in zip(list_scalings(stacks(model)[1]), scales, strict=True)
    )
    assert min(scale.min() for scale in scales[1:]) > 1.1


def test_a_measurement_that_failed_is_made_again(monkeypatch):
    """As where memory does not suffice: fairseq goes on with the next batch."""
    model = build("transformer_shared_cycle_rev", *TINY, *FOUR_FROM_TWO, "--residual-scaling", "admin").train()
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="out of memory"):
        patched.setattr(residual, "follow_variance", lambda _: (_ for _ in ()).throw(RuntimeError("out of memory")))
        model(**random_batch())
    assert model(**random_batch())[0].isfinite().all()
    assert is_measured(list_scalings(model.encoder.layers)) and not model._forward_pre_hooks


def test_a_half_precision_model_is_measured_in_fp32():
    model = build(REV, *TINY, *FOUR_FROM_TWO, *ADMIN, *NO_DROPOUT)
    half = copy.deepcopy(model).bfloat16()
    expected = copy.deepcopy(half).float().train()  # the same rounded weights
    expected(**random_batch())
    half.train()(**random_batch())
    for layers, wanted in zip(stacks(half), stacks(expected), strict=True):
        for norm, other in zip(list_scalings(layers), list_scalings(wanted), strict=True):
            assert norm.residual_scale == other.residual_scale.bfloat16()


def test_each_layer_keeps_its_own_scalings_and_gets_its_own_gradient():
    model = build(REV, *TINY, *FOUR_FROM_TWO, *ADMIN).train()
    model(**random_batch())[0].square().mean().backward()
    deltas = [norm.residual_delta for layers in stacks(model) for norm in list_scalings(layers)]
    assert len({id(delta) for delta in deltas}) == 20
    assert all(delta.grad.abs().sum() > 0 for delta in deltas)
    assert stacks(model)[0][0].fc1.weight is stacks(model)[0][3].fc1.weight
    assert stacks(model)[0][0].final_layer_norm.weight is stacks(model)[0][3].final_layer_norm.weight


def test_activation_checkpointing_computes_the_same():
    models = [
        build(REV, *TINY, *FOUR_FROM_TWO, *ADMIN, *NO_DROPOUT, *flags) for flags in ([], ["--checkpoint-activations"])
    ]
    for model in models:
        model.train()(**random_batch())[0].square().mean().backward()
    for (name, one), (_, other) in zip(*(model.named_parameters() for model in models), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-6), name


# --- copies, conversions, decoding ---


def test_stepwise_decoding_torchscript_and_copies_compute_the_same():
    model = build(REV, *TINY, *FOUR_FROM_TWO, *ADMIN)
    model.train()(**random_batch())
    model.eval()
    vary(model)
    batch = random_batch()
    expected = model(**batch)[0]
    encoder_out = model.encoder(batch["src_tokens"], batch["src_lengths"])
    state = {}
    for step in range(1, 8):
        logits, _ = model.decoder(batch["prev_output_tokens"][:, :step], encoder_out, incremental_state=state)
        assert torch.allclose(logits[:, -1], expected[:, step - 1], atol=1e-4)
    assert torch.allclose(torch.jit.script(model)(**batch)[0], expected, atol=1e-5)
    assert torch.equal(copy.deepcopy(model)(**batch)[0], expected)
    assert torch.equal(model.double().float()(**batch)[0], expected)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_folding_gives_plain_layers_that_compute_the_same(sharing):
    model = build(REV, *TINY, *SHARINGS[sharing], "--residual-scaling", "admin-static", "--layernorm-embedding")
    vary(model)
    weights = {name: value.detach() for name, value in model.named_parameters(remove_duplicate=False)}
    weights |= dict(model.named_buffers())
    for stack in ("encoder", "decoder"):
        omega = fold_scalings(weights, f"{stack}.layers").float()
        for leaf in ("weight", "bias"):
            weights[f"{stack}.layernorm_embedding.{leaf}"] = weights[f"{stack}.layernorm_embedding.{leaf}"] * omega
    plain = build("transformer", *TINY, *UNSHARED[:4], "--layernorm-embedding")
    plain.load_state_dict({name: weights[name] for name in plain.state_dict() if name in weights}, strict=False)
    assert not any("residual" in name for name in weights)
    assert torch.allclose(plain(**random_batch())[0], model(**random_batch())[0], atol=1e-5)


TIED = ["--share-all-embeddings"]
EXPORTED = {
    "tied": TIED,
    "untied": [],
    "decoder tied, learned positions": [
        "--share-decoder-input-output-embed",
        "--encoder-learned-pos",
        "--decoder-learned-pos",
    ],
    "no positions": ["--no-token-positional-embeddings", "--share-decoder-input-output-embed"],
    "LayerNorm of embeddings": [*TIED, "--layernorm-embedding"],
    "factorised": [*TIED, "--factorized-embed-dim", "8"],
    "language model": ["--share-decoder-input-output-embed"],
    "factorised language model": ["--share-decoder-input-output-embed", "--factorized-embed-dim", "8"],
}


@pytest.mark.parametrize("name", EXPORTED)
def test_the_export_to_fairseq_computes_the_same(name, tmp_path):
    from test_tools import save

    from fairseq_sharing.tools.export_fairseq import plain_model
    from fairseq_sharing.tools.trained import load_trained

    flags, path = [*EXPORTED[name], "--residual-scaling", "admin-static"], tmp_path / "model.pt"
    if "language model" in name:
        arch, flags = "transformer_lm_shared_cycle_rev", [*lm.TINY, "--decoder-unique-layers", "2", *flags]
        model, call = lm.build(arch, *flags), (lm.random_tokens(),)
        vary(model)
        config = OmegaConf.to_container(lm.configure(arch, *flags).model)
        torch.save({"cfg": {"model": config}, "model": model.state_dict(), "extra_state": {}}, path)
    else:
        flags = [*TINY, *FOUR_FROM_TWO, *flags]
        model, call = build(REV, *flags), tuple(random_batch().values())
        vary(model)
        save(model, path, (REV, *flags))
    config, weights = plain_model(load_trained(str(path)))
    dictionary = build_dictionary(40)
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    stock = build_model(OmegaConf.create({"model": config}).model, task, True).eval()
    assert type(stock).__module__.startswith("fairseq.models")
    stock.load_state_dict(weights)
    assert torch.allclose(stock(*call)[0], model(*call)[0], atol=1e-5)


def test_folding_refuses_what_it_would_lose():
    model = build(REV, *TINY, *UNSHARED, "--residual-scaling", "admin-static")
    norm = model.encoder.layers[1].final_layer_norm
    with torch.no_grad():
        norm.residual_delta[3] = -norm.residual_scale
    with pytest.raises(ValueError, match=r"encoder.layers.1.final_layer_norm has an entry of .*, too small"):
        fold_scalings(model.state_dict(), "encoder.layers")


# --- checkpoints ---


def test_checkpoints_bring_the_profile_and_refuse_another_scaling():
    scaled = build(REV, *TINY, *FOUR_FROM_TWO, *ADMIN)
    scaled.train()(**random_batch())
    saved = {key: value.clone() for key, value in scaled.eval().state_dict().items()}
    other = build(REV, *TINY, *FOUR_FROM_TWO, *ADMIN, seed=2)
    other.load_state_dict(saved)
    assert torch.equal(other(**random_batch())[0], scaled(**random_batch())[0])
    other.train()(**random_batch(seed=9))  # not measured again
    assert all(torch.equal(other.state_dict()[key], value) for key, value in saved.items())

    plain = build(REV, *TINY, *FOUR_FROM_TWO)
    with pytest.raises(
        ValueError, match=r"encoder.layers were saved with residual scaling; this model has no residual"
    ):
        plain.load_state_dict(saved)
    with pytest.raises(
        ValueError, match=r"encoder.layers were saved with no residual scaling; this model has residual"
    ):
        other.load_state_dict(plain.state_dict())


def test_flags_are_refused_with_pre_ln():
    for stack in ("encoder", "decoder"):
        with pytest.raises(ValueError, match=rf"--residual-scaling admin is for Post-LN .* --{stack}-normalize-before"):
            parse(REV, *TINY, *ADMIN, f"--{stack}-normalize-before")
    with pytest.raises(ValueError, match="--residual-scaling admin is for Post-LN .* --decoder-normalize-before"):
        lm.configure("transformer_lm_shared_cycle", *lm.TINY, *ADMIN, "--decoder-normalize-before")


# --- language models ---


@pytest.mark.parametrize("method", ["admin", "admin-static"])
def test_language_models_become_post_ln(method):
    flags = [*lm.TINY, "--decoder-unique-layers", "2", "--residual-scaling", method]
    model = lm.build("transformer_lm_shared_cycle_rev", *flags)
    plain = lm.build("transformer_lm_shared_cycle_rev", *flags[:-2])
    assert not any(layer.normalize_before for layer in model.decoder.layers)
    count = [sum(p.numel() for p in each.parameters()) for each in (plain, model)]
    assert count[1] - count[0] == 2 * 4 * 16 - 2 * 16  # and no LayerNorm behind the last layer
    tokens = lm.random_tokens()
    model.train()(tokens)
    norms = list_scalings(model.decoder.layers)
    assert len(norms) == 8 and is_measured(norms)
    model.eval()
    full, state = model(tokens)[0], {}
    for step in range(1, 8):
        stepwise, _ = model(tokens[:, :step], incremental_state=state)
        assert torch.allclose(stepwise[:, -1], full[:, step - 1], atol=1e-4)


# --- fairseq's commands ---


def scales_of(path) -> list[float]:
    saved = torch.load(path, weights_only=True)["model"]
    return [value.item() for key, value in saved.items() if key.endswith("residual_scale")]


def test_train_in_two_processes_resume_average_ema_and_decode(data, tmp_path):
    from test_end_to_end import train_in_two_processes

    flags = [*FOUR_FROM_TWO, *ADMIN, "--dropout", 0, "--save-interval-updates", 4]
    one = train_command(data, tmp_path / "one", REV, *flags, "--update-freq", 2, "--store-ema", "--ema-decay", 0.9)
    first = run([*one, "--max-update", 4])
    assert first.count("residual scalings measured on the first batch: 1.00 ") == 2
    second = run([*one, "--max-update", 8])
    assert "Loaded checkpoint" in second and "measured" not in second
    outputs = train_in_two_processes([*train_command(data, tmp_path / "two", REV, *flags), "--max-update", 8])
    assert "measured on the first batch" in outputs[0]

    saved = [torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=True) for name in ("one", "two")]
    for key, value in saved[0]["model"].items():
        assert torch.allclose(saved[1]["model"][key].double(), value.double(), atol=1e-5), key
    scales = scales_of(tmp_path / "one" / "checkpoint_last.pt")
    assert len(scales) == 20 and scales.count(1) == 2
    average = [value for key, value in saved[0]["extra_state"]["ema"].items() if key.endswith("residual_scale")]
    assert [value.item() for value in average] == scales

    averaged = tmp_path / "averaged.pt"
    run(
        [
            "fairseq-sharing",
            "average",
            "--inputs",
            tmp_path / "one",
            "--num-update-checkpoints",
            2,
            "--output",
            averaged,
        ]
    )
    assert scales_of(averaged) == scales
    number = int(re.search(r"num. shared model params: ([\d,]+)", first)[1].replace(",", ""))
    assert f"{number:,}" in run(["fairseq-sharing", "show", "--path", averaged])
    output = run(
        [
            *(
                "fairseq-generate",
                data,
                "--path",
                averaged,
                "--user-dir",
                PLUGIN,
                "--cpu",
                "--beam",
                2,
                "--num-workers",
                0,
            )
        ]
    )
    assert len(re.findall(r"^H-", output, re.MULTILINE)) == 30 and "measured" not in output
