"""The gradient norm that each layer contributes, and its way into fairseq's logs."""

import json
import lzma
from types import SimpleNamespace

import pytest
import torch
from conftest import FOUR_FROM_TWO, PLUGIN, TINY, build, build_dictionary, parse, random_batch, run, train_command
from fairseq.models import build_model

from fairseq_sharing.gradients import measure_gradient_norms
from fairseq_sharing.tools.gradients import read_norms
from fairseq_sharing.tools.main import main

REV = "transformer_shared_cycle_rev"
NO_DROPOUT = ["--dropout", "0"]


def loss_of(model):
    return model(**random_batch())[0].square().mean()


def norm_of(gradients) -> float:
    return torch.cat([gradient.flatten() for gradient in gradients]).norm().item()


def test_norms_are_those_of_an_unshared_model():
    shared = build(REV, *TINY, *FOUR_FROM_TWO, *NO_DROPOUT)
    four = ["--encoder-layers", "4", "--decoder-layers", "4", "--encoder-sharing", "none", "--decoder-sharing", "none"]
    plain = build(REV, *TINY, *four, *NO_DROPOUT)
    plain.load_state_dict({name: value.detach() for name, value in shared.named_parameters(remove_duplicate=False)})
    loss_of(plain).backward()
    norms = measure_gradient_norms(shared, shared.STACKS, loss_of)
    assert list(norms) == [f"{stack}_{index}" for stack in ("encoder", "decoder") for index in range(4)]
    for stack in ("encoder", "decoder"):
        for index, layer in enumerate(getattr(plain, stack).layers):
            expected = norm_of(parameter.grad for parameter in layer.parameters())
            assert norms[f"{stack}_{index}"] == pytest.approx(expected, rel=1e-4)
    # The gradient of a shared set is the sum of its uses', so its norm says nothing about any of them.
    loss_of(shared).backward()
    summed = norm_of(parameter.grad for parameter in shared.decoder.layers[0].parameters())
    assert summed != pytest.approx(norms["decoder_0"], rel=1e-2)


def test_measuring_leaves_model_gradients_and_random_numbers_alone():
    model = build(REV, *TINY, *FOUR_FROM_TWO, "--encoder-layerdrop", "0.5").train()
    loss_of(model).backward()
    used = [parameter for parameter in model.parameters() if parameter.grad is not None]
    before = [(parameter.clone(), parameter.grad.clone()) for parameter in used]
    state = torch.get_rng_state()
    norms = measure_gradient_norms(model, model.STACKS, loss_of)
    assert min(norms.values()) >= 0 and max(norms.values()) > 0
    assert torch.equal(torch.get_rng_state(), state)
    after = [(parameter, parameter.grad) for parameter in used]
    assert all(torch.equal(a, b) for pair in zip(before, after, strict=True) for a, b in zip(*pair, strict=True))
    assert model.encoder.layers[0].fc1.weight is model.encoder.layers[3].fc1.weight


def test_a_head_with_spectral_norm_is_measured():
    """Its weight was computed in the forward pass, with a history that torch refuses to copy."""
    flags = ["--encoder-layers", "4", "--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "32"]
    heads = ["--encoder-attention-heads", "2", "--spectral-norm-classification-head"]
    args = parse("albert_encoder", *flags, *heads)
    model = build_model(args, SimpleNamespace(source_dictionary=build_dictionary())).train()
    model.register_classification_head("cls", num_classes=2)

    def loss(twin):
        return twin(torch.randint(4, 40, (2, 6)), features_only=True, classification_head_name="cls")[0].square().sum()

    loss(model).backward()
    norms = measure_gradient_norms(model, model.STACKS, loss)
    assert len(norms) == 4 and min(norms.values()) > 0
    loss(model).backward()


def test_training_logs_them_and_is_not_changed(data, tmp_path):
    flags = [*FOUR_FROM_TWO, "--residual-scaling", "admin", "--dropout", 0.2, "--max-update", 4, "--log-interval", 2]
    plain = run([*train_command(data, tmp_path / "plain", REV, *flags), "--log-format", "json"])
    logged = run(
        [
            *train_command(data, tmp_path / "logged", REV, *flags, "--log-layer-gradient-norms"),
            *("--log-format", "json", "--tensorboard-logdir", tmp_path / "tensorboard"),
        ]
    )
    assert "gnorm_encoder" not in plain
    lines = [json.loads(line[line.index("{") :]) for line in logged.splitlines() if '"gnorm_encoder_0"' in line]
    lines = [line for line in lines if "num_updates" in line]
    assert [line["num_updates"] for line in lines] == ["2", "4"]
    for line in lines:
        norms = [float(line[f"gnorm_{stack}_{index}"]) for stack in ("encoder", "decoder") for index in range(4)]
        assert min(norms) > 0 and len(set(norms)) == 8
        assert any(norm != round(norm, 4) for norm in norms)  # a norm that vanishes is not written as 0
        # Norms of parts of the gradient: none can be far above the whole, whose parts may cancel.
        assert max(norms) < 10 * float(line["gnorm"])
    assert list((tmp_path / "tensorboard" / "train_inner").iterdir())

    saved = [torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=True) for name in ("plain", "logged")]
    assert all(torch.equal(value, saved[1]["model"][key]) for key, value in saved[0]["model"].items())

    (tmp_path / "train.log").write_text(logged, encoding="utf-8")
    for name in ("norms.png", "norms.svg"):
        assert main(["gradients", str(tmp_path / "train.log"), "--out", str(tmp_path / name)]) == 0
        assert (tmp_path / name).stat().st_size > 5000
    norms, sets = read_norms(tmp_path / "train.log")
    assert sets == {"encoder": ["0", "1", "1", "0"], "decoder": ["0", "1", "1", "0"]}
    assert norms["decoder"][3] == [float(line["gnorm_decoder_3"]) for line in lines]


SIMPLE = "| INFO | train_inner | epoch 001:      2 / 9 loss=9, gnorm=2, gnorm_encoder_0=0.5, gnorm_encoder_1=1e-3"


def test_the_picture_reads_the_simple_format_and_refuses_other_files(tmp_path, capsys):
    log, out = tmp_path / "train.log", tmp_path / "norms.png"
    log.write_text(f"{SIMPLE}\n", encoding="utf-8")
    packed = tmp_path / "train.log.xz"
    packed.write_bytes(lzma.compress(log.read_bytes()))
    assert read_norms(log) == read_norms(packed) == ({"encoder": {0: [0.5], 1: [0.001]}}, {})
    assert main(["gradients", str(log), "--out", str(out)]) == 0
    for arguments, sentence in (
        ([log, "--out", out], "exists"),
        ([log, "--out", tmp_path / "norms.pdf"], "must end in .png or .svg"),
        ([tmp_path / "none", "--out", tmp_path / "new.png"], "cannot read"),
        ([PLUGIN / "sharing.py", "--out", tmp_path / "new.png"], "--log-layer-gradient-norms"),
    ):
        assert main(["gradients", *map(str, arguments)]) == 2
        assert sentence in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "new.png").exists()
