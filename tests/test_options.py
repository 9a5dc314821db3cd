"""Flags to assignment: presets, precedence, and one sentence for every contradiction, while parsing."""

import argparse
import logging

import pytest
from conftest import parse
from fairseq.models import ARCH_MODEL_REGISTRY
from omegaconf import OmegaConf

from fairseq_sharing.arguments import as_namespace, get_sharing, resolve_sharing

CYCLE = "transformer_shared_cycle"


def picture_of(args, stack="encoder"):
    return str(get_sharing(args, stack))


def test_presets_are_the_papers():
    args = parse("transformer_shared_cycle_rev")
    assert (args.encoder_layers, args.encoder_unique_layers, args.encoder_sharing) == (12, 6, "cycle_rev")
    assert picture_of(args) == picture_of(args, "decoder") == "0 1 2 3 4 5 5 4 3 2 1 0"
    assert (args.encoder_embed_dim, args.encoder_ffn_embed_dim, args.decoder_attention_heads) == (512, 2048, 8)


def test_the_decoder_of_universal_follows_its_encoder():
    args = parse("transformer_shared_universal", "--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "96")
    assert (args.decoder_embed_dim, args.decoder_ffn_embed_dim) == (64, 96)


@pytest.mark.parametrize(
    ("size", "width", "ffn", "heads"),
    [
        ("", 1024, 4096, 16),
        ("_wmt_en_de", 1024, 4096, 16),
        ("_iwslt_de_en", 1024, 2048, 8),
        ("_wmt_en_de_big", 2048, 8192, 32),
    ],
)
def test_universal_is_wider(size, width, ffn, heads):
    args = parse(f"transformer_shared_universal{size}")
    for stack in ("encoder", "decoder"):
        assert getattr(args, f"{stack}_embed_dim") == width
        assert getattr(args, f"{stack}_ffn_embed_dim") == ffn
        assert getattr(args, f"{stack}_attention_heads") == heads
        assert picture_of(args, stack) == "0 0 0 0 0 0"


def test_each_stack_has_its_own_n_m_and_strategy():
    args = parse(
        CYCLE, *("--encoder-layers", "4", "--encoder-unique-layers", "2", "--decoder-layers", "3"),
        *("--decoder-unique-layers", "1", "--encoder-sharing", "sequence"),
    )  # fmt: skip
    assert picture_of(args) == "0 0 1 1"
    assert picture_of(args, "decoder") == "0 0 0"


def test_the_preset_m_is_only_a_default():
    args = parse(CYCLE, "--encoder-layers", "3", "--encoder-assignment", "0,1,0", "--decoder-sharing", "none")
    assert picture_of(args) == "0 1 0" and args.encoder_unique_layers == 2 and args.encoder_sharing is None
    assert picture_of(args, "decoder") == "0 1 2 3 4 5 6 7 8 9 10 11"


def test_nothing_shared_warns(caplog):
    with caplog.at_level(logging.WARNING):
        parse(CYCLE, "--encoder-layers", "6")
    assert "--encoder-unique-layers 6 (the default of this architecture) equals --encoder-layers 6" in caplog.text
    assert "decoder" not in caplog.text


def test_what_shares_nothing_is_called_none():
    for flags in (["--encoder-unique-layers", "12"], ["--encoder-assignment", "0,1,2,3,4,5,6,7,8,9,10,11"]):
        args = parse(CYCLE, *flags)
        assert (args.encoder_sharing, args.encoder_unique_layers, args.encoder_assignment) == ("none", None, None)


def test_an_output_may_have_another_width_unless_tied():
    parse(CYCLE, "--decoder-output-dim", "64", "--adaptive-softmax-cutoff", "10")
    parse(CYCLE, "--decoder-output-dim", "64")
    parse(CYCLE, "--decoder-output-dim", "512", "--share-decoder-input-output-embed")


@pytest.mark.parametrize(
    ("ours", "theirs", "flags", "different"),
    [
        ("transformer_shared_cycle", "transformer", [], {"encoder_layers", "decoder_layers"}),
        ("transformer_shared_cycle_wmt_en_de", "transformer_wmt_en_de", [], {"encoder_layers", "decoder_layers"}),
        ("transformer_lm_shared_cycle", "transformer_lm", ["--task", "language_modeling"], set()),
        (
            "transformer_lm_shared_cycle_wiki103",
            "transformer_lm_wiki103",
            ["--task", "language_modeling"],
            {"decoder_layers"},
        ),
        (
            "albert_encoder_base",
            "roberta_base",
            ["--task", "masked_lm", "--tokens-per-sample", "512"],
            {"activation_fn"},
        ),
    ],
)
def test_defaults_are_fairseqs(ours, theirs, flags, different):
    """All but the depth, and ALBERT's activation; speech has a test of its own."""
    ours, theirs = (vars(parse(arch, *flags)) for arch in (ours, theirs))
    assert {key for key, value in theirs.items() if ours[key] != value} == {"arch", *different}


def test_parts_come_out_in_their_order():
    assert parse(CYCLE, "--sharing-parts", "norm, attention").sharing_parts == "attention,norm"
    assert parse(CYCLE).sharing_parts == "attention,ffn,norm"


def test_resolving_twice_changes_nothing():
    for flags in (
        [],
        ["--encoder-sharing", "none"],
        ["--encoder-assignment", "0,1,2,3,4,5,0,1,2,3,4,0"],
        ["--decoder-sharing", "sequence", "--decoder-unique-layers", "4"],
    ):
        args = parse(CYCLE, *flags)
        again = argparse.Namespace(**vars(args))
        for stack in ("encoder", "decoder"):
            resolve_sharing(again, stack, "cycle_rev", 6)
        assert again == args


def test_configurations_from_yaml():
    config = OmegaConf.create(
        {"encoder_layers": 3, "encoder_assignment": [0, 1, 0], "sharing_parts": ["attention", "ffn"]}
    )
    args = as_namespace(config)
    resolve_sharing(args, "encoder", "cycle", 2)
    assert str(get_sharing(args, "encoder")) == "0 1 0 (attention,ffn only)" and args.encoder_assignment == "0,1,0"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--encoder-unique-layers", "0"], "--encoder-unique-layers 0 must be between 1 and --encoder-layers 12"),
        (["--decoder-unique-layers", "-2"], "--decoder-unique-layers -2 must be between 1 and --decoder-layers 12"),
        (["--encoder-unique-layers", "13"], "--encoder-unique-layers 13 must be between 1 and --encoder-layers 12"),
        (
            ["--encoder-layers", "4"],
            r"--encoder-unique-layers 6 \(the default of this architecture\) must be between 1 and --encoder-layers 4",
        ),
        (
            ["--encoder-sharing", "none", "--encoder-unique-layers", "6"],
            "--encoder-unique-layers 6 contradicts --encoder-sharing none, .* --encoder-layers 12",
        ),
        (
            ["--decoder-layers", "4", "--decoder-assignment", "0,1,0,1", "--decoder-unique-layers", "3"],
            "--decoder-assignment 0,1,0,1 uses 2 parameter sets, which contradicts --decoder-unique-layers 3",
        ),
        (
            ["--decoder-layers", "4", "--decoder-assignment", "0,1,1,0", "--decoder-sharing", "cycle"],
            "--decoder-assignment 0,1,1,0 contradicts --decoder-sharing cycle, which is 0 1 0 1",
        ),
        (
            ["--encoder-assignment", "0,1,0"],
            "--encoder-assignment 0,1,0 has 3 entries and must have one for each of --encoder-layers 12",
        ),
        (["--encoder-assignment", "0,1,zwei"], "--encoder-assignment '0,1,zwei' is not a list of whole numbers"),
        (["--encoder-assignment", "0,-1"], "--encoder-assignment '0,-1' holds the negative number -1"),
        (["--encoder-assignment", "0,2"], "--encoder-assignment '0,2' names parameter set 2 but leaves out 1"),
        (["--sharing-parts", "attention,embedding"], "--sharing-parts attention,embedding: 'embedding' is none of"),
        (["--sharing-parts", ""], "--sharing-parts : '' is none of"),
        (["--encoder-layers-to-keep", "0,1"], "--encoder-layers-to-keep 0,1 cannot prune"),
        (["--decoder-layers-to-keep", "0,1"], "--decoder-layers-to-keep 0,1 cannot prune"),
        (["--quant-noise-pq", "0.1"], "--quant-noise-pq 0.1 would disturb a parameter set once for each layer"),
        (["--quant-noise-scalar", "0.5"], "--quant-noise-scalar 0.5 would quantise only the first layer of each"),
        (["--quantization-config-path", "q.yaml"], "--quantization-config-path q.yaml would quantise"),
        (["--base-layers", "1"], "--base-layers 1 cannot be combined with --encoder-sharing cycle"),
        (
            ["--checkpoint-activations", "--distributed-world-size", "2"],
            "--ddp-backend pytorch_ddp stops .* 2 processes .* use --ddp-backend legacy_ddp",
        ),
        (
            ["--offload-activations", "--distributed-world-size", "2", "--find-unused-parameters"],
            "--ddp-backend pytorch_ddp stops .* 2 processes .* use --ddp-backend legacy_ddp",
        ),
        (
            ["--decoder-layerdrop", "0.2", "--distributed-world-size", "8"],
            r"--ddp-backend pytorch_ddp stops when one of 8 processes .* which --decoder-layerdrop 0.2 brings about: "
            "use --ddp-backend legacy_ddp, or add --find-unused-parameters",
        ),
        (["--ddp-backend", "fully_sharded"], "--ddp-backend fully_sharded .* use --ddp-backend legacy_ddp"),
        (["--ddp-backend", "slowmo"], "--ddp-backend slowmo has never been tried .* use --ddp-backend legacy_ddp"),
        (["--pipeline-model-parallel"], "--pipeline-model-parallel puts layers .* use --ddp-backend legacy_ddp"),
        (["--model-parallel-size", "2"], "--model-parallel-size 2 needs Megatron's layers, .* leave it at 1"),
        (
            ["--share-all-embeddings", "--encoder-embed-dim", "64", "--decoder-embed-dim", "32"],
            "--encoder-embed-dim is 64 and --decoder-embed-dim is 32",
        ),
        (
            ["--share-decoder-input-output-embed", "--decoder-output-dim", "64"],
            "--decoder-output-dim is 64 and --decoder-embed-dim is 512",
        ),
        (
            ["--merge-src-tgt-embed", "--encoder-embed-dim", "64", "--decoder-embed-dim", "32"],
            "--merge-src-tgt-embed needs one width, but --encoder-embed-dim is 64",
        ),
        (["--merge-src-tgt-embed", "--decoder-output-dim", "64"], "an output tied to .* --decoder-output-dim is 64"),
        (
            ["--merge-src-tgt-embed", "--adaptive-softmax-cutoff", "10,20"],
            "--adaptive-softmax-cutoff 10,20 has an output of its own .* --merge-src-tgt-embed",
        ),
        (
            ["--share-all-embeddings", "--adaptive-softmax-cutoff", "10,20"],
            "--adaptive-softmax-cutoff 10,20 has an output of its own .* --share-all-embeddings",
        ),
        (
            ["--encoder-attention-heads", "7"],
            "--encoder-embed-dim 512 must be a multiple of --encoder-attention-heads 7",
        ),
        (["--encoder-embed-dim", "0"], "--encoder-embed-dim 0 must be a multiple of --encoder-attention-heads 8"),
    ],
)
def test_contradictions_are_refused_and_logged(flags, sentence, caplog):
    with pytest.raises(ValueError, match=sentence) as caught:
        parse(CYCLE, *flags)
    assert str(caught.value) in caplog.messages


def test_activation_checkpointing_is_fine_with_one_process_or_legacy_ddp(monkeypatch):
    parse(CYCLE, "--checkpoint-activations")
    parse(CYCLE, "--checkpoint-activations", "--distributed-world-size", "2", "--ddp-backend", "legacy_ddp")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="4 processes"):
        parse(CYCLE, "--checkpoint-activations")


def test_a_set_without_gradient_is_fine_with_one_process_or_another_backend():
    drop = ["--encoder-layerdrop", "0.2", "--distributed-world-size"]
    parse(CYCLE, *drop, "1")
    parse(CYCLE, *drop, "2", "--find-unused-parameters")
    for backend in ("legacy_ddp", "no_c10d"):
        parse(CYCLE, *drop, "2", "--ddp-backend", backend)
    parse(CYCLE, *drop, "2", "--use-bmuf")


@pytest.mark.parametrize(
    ("arch", "flags", "sentence"),
    [
        ("transformer_lm_shared_cycle", ["--quant-noise-pq", "0.1"], "--quant-noise-pq 0.1 would disturb"),
        ("albert_encoder", ["--quant-noise-pq", "0.1"], "--quant-noise-pq 0.1 would disturb"),
        ("albert_encoder", ["--quant-noise-scalar", "0.5"], "--quant-noise-scalar 0.5 would quantise"),
        (
            "transformer_lm_shared_cycle",
            ["--decoder-layerdrop", "0.2", "--distributed-world-size", "2"],
            "which --decoder-layerdrop 0.2 brings about",
        ),
        (
            "albert_encoder",
            ["--encoder-layerdrop", "0.2", "--distributed-world-size", "2"],
            "which --encoder-layerdrop 0.2 brings about",
        ),
        (
            "s2t_transformer_shared_cycle",
            ["--encoder-freezing-updates", "10", "--distributed-world-size", "2"],
            "which --encoder-freezing-updates 10 brings about",
        ),
        ("s2t_transformer_shared_cycle", ["--ddp-backend", "fully_sharded"], "--ddp-backend fully_sharded wraps"),
        ("albert_encoder", ["--ddp-backend", "fully_sharded"], "--ddp-backend fully_sharded wraps"),
        ("transformer_lm_shared_cycle", ["--ddp-backend", "fully_sharded"], "--ddp-backend fully_sharded wraps"),
    ],
)
def test_every_family_refuses_them(arch, flags, sentence):
    task = {"s2t": "speech_to_text", "alb": "masked_lm"}.get(arch[:3], "language_modeling")
    with pytest.raises(ValueError, match=sentence):
        parse(arch, "--task", task, *flags)


def test_fp16_needs_a_gpu():
    for flag, other in (("--fp16", "--bf16"), ("--memory-efficient-fp16", "--memory-efficient-bf16")):
        with pytest.raises(ValueError, match=f"{flag} needs a GPU and cannot be combined with --cpu: use {other}$"):
            parse(CYCLE, flag, "--cpu", "--encoder-sharing", "none")


def test_what_a_checkpoint_was_trained_with_does_not_matter_when_it_is_loaded():
    """The architecture is called again with the arguments of the training, here a GPU's."""
    args = parse(CYCLE)
    loaded = argparse.Namespace(**vars(args), _name=CYCLE)
    loaded.cpu, loaded.fp16, loaded.ddp_backend = True, True, "slowmo"
    resolve_sharing(loaded, "encoder", "cycle", 6)
    del loaded._name
    with pytest.raises(ValueError, match="--fp16 needs a GPU"):
        resolve_sharing(loaded, "encoder", "cycle", 6)


def test_refused_only_where_something_is_shared():
    nothing = ["--encoder-sharing", "none", "--decoder-sharing", "none"]
    parse(CYCLE, *nothing, "--ddp-backend", "fully_sharded")
    parse(CYCLE, *nothing, "--encoder-layers-to-keep", "0,1")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--encoder-sharing", "spiral"], "argument --encoder-sharing: invalid choice: 'spiral'"),
        (["--decoder-unique-layers", "three"], "argument --decoder-unique-layers: invalid int value: 'three'"),
    ],
)
def test_one_bad_flag_is_argparses_business(flags, sentence, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(CYCLE, *flags)
    assert caught.value.code == 2 and sentence in capsys.readouterr().err


def test_every_flag_has_its_help():
    parser = argparse.ArgumentParser()
    ARCH_MODEL_REGISTRY[CYCLE].add_args(parser)
    shown = parser.format_help()
    for stack in ("encoder", "decoder"):
        for flag in ("sharing", "unique-layers", "assignment"):
            assert f"--{stack}-{flag}" in shown
    assert "--sharing-parts" in shown and "{none,sequence,cycle,cycle_rev}" in shown
