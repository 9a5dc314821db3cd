"""The invariants of shared language models, and fairseq's commands for them on real text."""

import re
import subprocess
import sys
import textwrap

import pytest
import torch
from conftest import PLUGIN, REPOSITORY, build_dictionary, read_corpus, run
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import build_model
from fairseq.tasks.language_modeling import LanguageModelingTask

from fairseq_sharing.models.transformer_lm_shared import PRESETS
from fairseq_sharing.tools.unigram import count_tokens, unigram_bits

TINY = [
    *("--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "32", "--decoder-attention-heads", "2"),
    *("--decoder-layers", "4"),
]
ADAPTIVE = [
    *("--adaptive-input", "--adaptive-input-cutoff", "10,20", "--adaptive-softmax-cutoff", "10,20"),
    *("--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp"),
]
VARIANTS = {
    "plain": [],
    "embeddings tied": ["--share-decoder-input-output-embed"],
    "factorised": ["--decoder-input-dim", "8", "--decoder-output-dim", "8", "--share-decoder-input-output-embed"],
    "adaptive": ADAPTIVE,
    "adaptive tied": [*ADAPTIVE, "--tie-adaptive-weights", "--tie-adaptive-proj"],
    "learned positions": ["--decoder-learned-pos"],
    "layerdrop": ["--decoder-layerdrop", "0.3"],
    "activation checkpointing": ["--checkpoint-activations"],
    "NormFormer": ["--scale-fc", "--scale-attn", "--scale-heads", "--scale-resids"],
}
ARCHS = [*(f"transformer_lm_shared_{preset}" for preset in PRESETS), "transformer_lm_shared_cycle_wiki103"]
CUTOFFS = ["--adaptive-input-cutoff", "10,20", "--adaptive-softmax-cutoff", "10,20"]


def configure(arch: str, *flags: str):
    """Return the configuration as fairseq-train makes it."""
    parser = options.get_training_parser()
    arguments = ["", "--task", "language_modeling", "--arch", arch, *flags]
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, arguments))


def build(arch: str, *flags: str, seed: int = 1, vocabulary: int = 40):
    if arch.endswith("_wiki103"):
        flags = (*CUTOFFS, *flags)
    config = configure(arch, *flags)
    torch.manual_seed(seed)
    dictionary = build_dictionary(vocabulary)
    return build_model(config.model, LanguageModelingTask(config.task, dictionary, dictionary)).eval()


def sizes_of(arch: str) -> list[str]:
    return TINY if arch.endswith("universal") else [*TINY, "--decoder-unique-layers", "2"]


def random_tokens(sentences: int = 3, length: int = 7) -> torch.Tensor:
    return torch.randint(4, 40, (sentences, length), generator=torch.Generator().manual_seed(0))


def normalised(model, output):
    return model.get_normalized_probs(output, log_probs=True)


@pytest.mark.parametrize("name", VARIANTS)
def test_strategy_none_is_upstream(name):
    widths = ["--decoder-input-dim", "16", "--decoder-output-dim", "16"]  # which stock transformer_lm leaves at 512
    flags = [*TINY, *widths, *VARIANTS[name]]
    ours = build("transformer_lm_shared_cycle", *flags, "--decoder-sharing", "none")
    theirs = build("transformer_lm", *flags, "--decoder-normalize-before")
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for key, value in theirs.state_dict().items():
        if key.endswith("_float_tensor"):
            continue  # only its type counts; upstream leaves its number uninitialised
        assert torch.equal(ours.state_dict()[key], value), key
    tokens = random_tokens()
    assert torch.equal(normalised(ours, ours(tokens)), normalised(theirs, theirs(tokens)))


@pytest.mark.parametrize("arch", ARCHS)
def test_writing_into_one_layer_is_read_in_the_other(arch):
    layers = build(arch, *sizes_of(arch)).decoder.layers
    assert layers.sharing.shares and len({id(layer) for layer in layers}) == 4
    for index, owner in enumerate(layers.sharing.owners):
        with torch.no_grad():
            layers[index].fc1.weight.fill_(index + 5)
        assert layers[owner].fc1.weight.eq(index + 5).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_gradient_is_the_sum_of_the_untied_gradients(arch):
    model = build(arch, *sizes_of(arch))
    copy = build(arch, *TINY, "--decoder-sharing", "none")
    copy.load_state_dict(
        {name: value.detach() for name, value in model.named_parameters(remove_duplicate=False)}
        | {name: value for name, value in copy.named_buffers() if name in copy.state_dict()}
    )
    for each in (model, copy):
        features, _ = each(random_tokens(), features_only=True)
        features.square().mean().backward()
    owners = model.decoder.layers.sharing.owners
    for owner in set(owners):
        for name, parameter in model.decoder.layers[owner].named_parameters():
            users = [index for index, its_owner in enumerate(owners) if its_owner == owner]
            summed = sum(dict(copy.decoder.layers[user].named_parameters())[name].grad for user in users)
            assert torch.allclose(parameter.grad, summed, rtol=1e-4, atol=1e-7), name


def layer_parameters(width: int, ffn: int) -> int:
    """Four biased d x d projections, two biased FFN matrices, two LayerNorms."""
    return 4 * (width * width + width) + 2 * width * ffn + ffn + width + 4 * width


def adaptive_parameters(vocabulary: int, width: int, cutoffs: tuple[int, ...], factor: int = 4) -> int:
    """Adaptive input and softmax, weights and projections tied: bands of width d, d/4, d/16, projected to d."""
    bands = zip((0, *cutoffs), (*cutoffs, vocabulary), strict=True)
    total = 0
    for band, (low, high) in enumerate(bands):
        inner = width // factor**band
        total += (high - low) * inner + inner * width  # the first projection, d x d, serves the input only
    return total + len(cutoffs) * width  # one row of the head for each tail


@pytest.mark.parametrize("preset", ["sequence", "cycle", "cycle_rev"])
def test_wiki103_has_the_published_count(preset):
    config = configure(f"transformer_lm_shared_{preset}_wiki103")
    dictionary = build_dictionary(267_744)
    with torch.device("meta"):
        model = build_model(config.model, LanguageModelingTask(config.task, dictionary, dictionary))
    expected = adaptive_parameters(267_744, 1024, (20_000, 60_000)) + 6 * layer_parameters(1024, 4096)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected == 120_971_264


@pytest.mark.parametrize("preset", PRESETS)
def test_counts_of_the_base_size(preset):
    config = configure(f"transformer_lm_shared_{preset}", "--share-decoder-input-output-embed")
    dictionary = build_dictionary(100)
    with torch.device("meta"):
        model = build_model(config.model, LanguageModelingTask(config.task, dictionary, dictionary))
    width, ffn, sets = (1024, 4096, 1) if preset == "universal" else (512, 2048, 6)
    expected = 100 * width + sets * layer_parameters(width, ffn) + 2 * width  # and the final LayerNorm
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def assert_stepwise_equals_full(model) -> None:
    """Decode step by step, reordering with repetition before each step, against a full forward pass."""
    generator = torch.Generator().manual_seed(3)
    tokens, state = random_tokens(sentences=6, length=6), {}
    for step in range(1, 7):
        if step > 1:
            order = torch.randint(0, 6, (6,), generator=generator)
            tokens = tokens[order]
            model.decoder.reorder_incremental_state_scripting(state, order)
        stepwise = model.decoder(tokens[:, :step], incremental_state=state)
        full = model.decoder(tokens[:, :step])
        difference = (normalised(model, stepwise)[:, -1] - normalised(model, full)[:, -1]).abs().max()
        assert difference < 1e-4, (step, difference)


@pytest.mark.parametrize("arch", ARCHS)
def test_stepwise_equals_full(arch):
    with torch.no_grad():
        assert_stepwise_equals_full(build(arch, *sizes_of(arch)))


@pytest.mark.parametrize("name", VARIANTS)
def test_stepwise_equals_full_in_every_variant(name):
    flags = [*TINY, "--decoder-unique-layers", "2", *VARIANTS[name]]
    with torch.no_grad():
        assert_stepwise_equals_full(build("transformer_lm_shared_cycle_rev", *flags))


@pytest.mark.parametrize("parts", ["attention", "ffn", "norm", "attention,ffn", "attention,ffn,norm"])
def test_parts_by_count(parts):
    whole = sum(
        parameter.numel()
        for parameter in build("transformer_lm_shared_cycle", *TINY, "--decoder-sharing", "none").parameters()
    )
    shared = build("transformer_lm_shared_cycle", *TINY, "--decoder-unique-layers", "2", "--sharing-parts", parts)
    attention, ffn, norm = 4 * (16 * 16 + 16), 2 * 16 * 32 + 32 + 16, 2 * 16
    saved = {
        "attention": attention + norm,
        "ffn": ffn + norm,
        "norm": 2 * norm,
        "attention,ffn": attention + ffn,
        "attention,ffn,norm": attention + ffn + 2 * norm,
    }[parts]
    assert whole - sum(parameter.numel() for parameter in shared.parameters()) == 2 * saved


@pytest.mark.parametrize("arch", ARCHS)
def test_checkpoints_keep_ties_and_refuse_another_sharing(arch):
    model, other = build(arch, *sizes_of(arch)), build(arch, *sizes_of(arch), seed=2)
    state = model.state_dict()
    layers = [key for key in state if ".layers." in key]
    assert len({state[key].data_ptr() for key in layers}) == len(layers)
    other.load_state_dict(state)
    assert other.decoder.layers[3].fc1.weight is other.decoder.layers[other.decoder.layers.sharing.owners[3]].fc1.weight
    assert torch.equal(other.decoder.layers[3].fc1.weight, model.decoder.layers[3].fc1.weight)
    assignment = ["--decoder-assignment", "0,1,1,1"]
    with pytest.raises(ValueError, match="decoder.layers were saved shared as .*; this model shares them as 0 1 1 1"):
        build(arch, *TINY, *assignment).load_state_dict(state)


# --- flags and configurations ---


def test_the_resolved_configuration_shows_the_sharing():
    model = configure("transformer_lm_shared_cycle_rev", "--decoder-embed-dim", "64").model
    assert (model.decoder_layers, model.decoder_unique_layers, model.decoder_sharing) == (12, 6, "cycle_rev")
    assert model.sharing_parts == "attention,ffn,norm"
    assert model.decoder_input_dim == model.decoder_output_dim == 64  # they follow the width unless given


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--decoder-unique-layers", "13"], "--decoder-unique-layers 13 must be between 1 and --decoder-layers 12"),
        (["--decoder-layers", "3", "--decoder-assignment", "0,2,2"], "names parameter set 2 but leaves out 1"),
        (["--sharing-parts", "ears"], "--sharing-parts ears: 'ears' is none of"),
        (
            ["--decoder-attention-heads", "7"],
            "--decoder-embed-dim 512 must be a multiple of --decoder-attention-heads 7",
        ),
        (["--decoder-layers-to-keep", "0,1"], "--decoder-layers-to-keep 0,1 cannot prune"),
        (["--base-layers", "1"], "--base-layers 1 cannot be combined"),
        (
            ["--share-decoder-input-output-embed", "--decoder-input-dim", "8"],
            "--decoder-input-dim is 8 and --decoder-output-dim is 512",
        ),
        (
            [*ADAPTIVE, "--decoder-input-dim", "12", "--decoder-output-dim", "12"],
            "--adaptive-input-cutoff 10,20 divides --decoder-input-dim 12 by --adaptive-input-factor 4",
        ),
        (["--tie-adaptive-weights"], "--tie-adaptive-weights needs --adaptive-input"),
        (["--adaptive-input"], "--adaptive-input needs --adaptive-input-cutoff"),
        (
            [*ADAPTIVE, "--tie-adaptive-weights", "--adaptive-input-cutoff", "10"],
            "needs --adaptive-input-cutoff 10 and --adaptive-softmax-cutoff 10,20 to be the same",
        ),
        (
            ["--adaptive-input", "--adaptive-input-cutoff", "10", "--share-decoder-input-output-embed"],
            "--adaptive-input cannot be tied by --share-decoder-input-output-embed",
        ),
        (
            ["--quant-noise-pq", "0.1", "--decoder-ffn-embed-dim", "12"],
            "--quant-noise-pq-block-size 8 must divide --decoder-ffn-embed-dim 12",
        ),
    ],
)
def test_contradictions_are_refused_while_parsing(flags, sentence, caplog):
    with pytest.raises(ValueError, match=sentence) as caught:
        configure("transformer_lm_shared_cycle", *flags)
    assert str(caught.value) in caplog.messages


def test_flags_switch_on_what_an_architecture_has_on():
    """Fairseq makes them switch it off: the flags of its WikiText-103 recipe would undo the architecture's."""
    flags = ["--adaptive-input", "--tie-adaptive-weights", "--tie-adaptive-proj", "--decoder-normalize-before"]
    plain, typed = (configure("transformer_lm_shared_cycle_wiki103", *words).model for words in ([], flags))
    assert plain == typed
    assert typed.adaptive_input and typed.tie_adaptive_weights and typed.tie_adaptive_proj


# --- fairseq's commands on real text ---


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Real English, binarised."""
    folder = tmp_path_factory.mktemp("text")
    lines = read_corpus("train", "en")
    (folder / "train").write_text("\n".join(lines[:800]) + "\n", encoding="utf-8")
    (folder / "valid").write_text("\n".join(lines[-60:]) + "\n", encoding="utf-8")
    run(
        [
            *("fairseq-preprocess", "--only-source", "--trainpref", folder / "train", "--validpref", folder / "valid"),
            *("--testpref", folder / "valid", "--destdir", folder / "bin", "--nwordssrc", 1000),
        ]
    )
    return folder / "bin"


def evaluate(text, checkpoint, *flags) -> float:
    output = run(
        [
            *("fairseq-eval-lm", text, "--path", checkpoint, "--user-dir", PLUGIN, "--cpu", "--max-tokens", 1000),
            *("--tokens-per-sample", 32, "--num-workers", 0, *flags),
        ]
    )
    return float(re.search(r"Perplexity: ([\d.]+)", output)[1])


@pytest.mark.parametrize("arch", ["transformer_lm_shared_cycle_rev", "transformer_lm_shared_sequence_wiki103"])
def test_train_resume_average_evaluate(text, tmp_path, arch):
    adaptive = [
        "--adaptive-input-cutoff",
        "200,500",
        "--adaptive-softmax-cutoff",
        "200,500",
        "--criterion",
        "adaptive_loss",
    ]
    command = [
        *("fairseq-train", text, "--user-dir", PLUGIN, "--task", "language_modeling", "--arch", arch, "--cpu"),
        *("--save-dir", tmp_path / "save", "--ddp-backend", "legacy_ddp", "--optimizer", "adam", "--lr", "2e-3"),
        *("--tokens-per-sample", 32, "--max-tokens", 1000, "--no-progress-bar", "--num-workers", 0),
        *("--decoder-embed-dim", 64, "--decoder-ffn-embed-dim", 128, "--decoder-attention-heads", 4),
        *("--decoder-layers", 4, "--decoder-unique-layers", 2, *(adaptive if "wiki103" in arch else [])),
    ]
    first = run([*command, "--max-epoch", 2])
    picture = "0 1 1 0" if "rev" in arch else "0 0 1 1"
    assert first.count(f": {picture};") == 1
    assert "Loaded checkpoint" in run([*command, "--max-epoch", 3])
    averaged = tmp_path / "averaged.pt"
    run(
        [
            "fairseq-sharing",
            "average",
            "--inputs",
            tmp_path / "save",
            "--num-epoch-checkpoints",
            2,
            "--output",
            averaged,
        ]
    )
    whole = evaluate(text, averaged)
    assert 1 < whole < 1000  # the dictionary has a thousand words
    assert evaluate(text, averaged, "--context-window", 16) < whole
    assert f"set   {picture}" in run(["fairseq-sharing", "show", "--path", averaged])
    continued = run(
        [
            *(
                "fairseq-generate",
                text,
                "--task",
                "language_modeling",
                "--path",
                averaged,
                "--user-dir",
                PLUGIN,
                "--cpu",
            ),
            *("--sample-break-mode", "eos", "--prefix-size", 2, "--beam", 2, "--max-len-b", 10, "--num-workers", 0),
        ]
    )
    assert len(re.findall(r"^H-\d+\t", continued, re.MULTILINE)) == 60


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """Real English in pieces, prepared by the example's script and binarised."""
    folder = tmp_path_factory.mktemp("pieces")
    for split, most in (("train", 4000), ("valid", 120), ("test", 120)):
        (folder / f"{split}.txt").write_text("\n".join(read_corpus(split, "en")[:most]) + "\n", encoding="utf-8")
    script = [sys.executable, REPOSITORY / "examples" / "language_modeling" / "prepare.py", "--data", folder]
    subprocess.run([*script, "--out", folder / "data", "--vocab-size", "500"], check=True, capture_output=True)
    prefixes = [word for split in ("train", "valid") for word in (f"--{split}pref", folder / f"data/{split}.pieces")]
    run(["fairseq-preprocess", "--only-source", *prefixes, "--destdir", folder / "bin"])
    return folder / "bin"


def test_half_the_unigram_perplexity(pieces, tmp_path):
    """The yardstick, what a model that heeds no context would pay, comes from the same text and pieces."""
    run(
        [
            *(
                "fairseq-train",
                pieces,
                "--user-dir",
                PLUGIN,
                "--task",
                "language_modeling",
                "--cpu",
                "--num-workers",
                0,
            ),
            *("--arch", "transformer_lm_shared_cycle_rev", "--decoder-layers", 4, "--decoder-unique-layers", 2),
            *("--decoder-embed-dim", 64, "--decoder-ffn-embed-dim", 128, "--decoder-attention-heads", 4),
            *("--share-decoder-input-output-embed", "--dropout", 0, "--tokens-per-sample", 32, "--max-tokens", 512),
            *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--clip-norm", 1, "--lr", 0.01),
            *("--lr-scheduler", "polynomial_decay", "--warmup-updates", 20, "--total-num-update", 200),
            *("--max-update", 200, "--save-dir", tmp_path, "--no-epoch-checkpoints", "--no-progress-bar"),
        ]
    )
    train, valid = (count_tokens(str(pieces), split) for split in ("train", "valid"))
    evaluated = run(
        [
            *("fairseq-eval-lm", pieces, "--user-dir", PLUGIN, "--path", tmp_path / "checkpoint_last.pt", "--cpu"),
            *("--gen-subset", "valid", "--tokens-per-sample", 32, "--max-tokens", 2000, "--num-workers", 0),
        ]
    )
    assert f"Evaluated {valid.sum():,} tokens" in evaluated  # the same ones, </s> among them
    assert float(re.search(r"Perplexity: ([\d.]+)", evaluated)[1]) < 2 ** unigram_bits(train, valid) / 2


@pytest.mark.parametrize(
    ("flags", "text", "sentence"),
    [
        ([], None, "holds neither train.txt nor train.txt.xz"),
        ([], "\n \n", "holds no text"),
        ([], "schön".encode("latin-1"), "cannot read"),
        (["--vocab-size", "9000"], "A line of text.\n", "--vocab-size 9000 does not suit the training text"),
        (["--out", "."], "A line of text.\n", "exists: remove it or choose another"),
    ],
)
def test_the_examples_preparation_refuses(tmp_path, flags, text, sentence):
    for split in ("train", "valid", "test") if text is not None else ():
        (tmp_path / f"{split}.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    before = sorted(tmp_path.iterdir())
    script = REPOSITORY / "examples" / "language_modeling" / "prepare.py"
    command = [sys.executable, script, "--data", tmp_path, "--out", tmp_path / "out", *flags]
    failed = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert failed.returncode == 2 and sentence in failed.stderr and len(failed.stderr.splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before


def test_hydra_trains_from_yaml(text, tmp_path):
    """An assignment in YAML takes the place of the architecture's strategy and M."""
    (tmp_path / "lm.yaml").write_text(
        textwrap.dedent(
            f"""\
            # @package _group_
            common: {{user_dir: "${{hydra:runtime.cwd}}/fairseq_sharing", cpu: true, no_progress_bar: true}}
            checkpoint: {{save_dir: {tmp_path}/save}}
            task: {{_name: language_modeling, data: {text}, tokens_per_sample: 32}}
            dataset: {{max_tokens: 1000, num_workers: 0}}
            criterion: {{_name: cross_entropy}}
            optimizer: {{_name: adam}}
            lr_scheduler: {{_name: fixed}}
            optimization: {{max_update: 5, lr: [0.002]}}
            model:
              _name: transformer_lm_shared_cycle
              decoder_embed_dim: 64
              decoder_input_dim: 64
              decoder_output_dim: 64
              decoder_ffn_embed_dim: 128
              decoder_attention_heads: 4
              decoder_layers: 3
              decoder_assignment: "0,1,0"
              residual_scaling: admin
            """
        )
    )
    output = run(
        ["fairseq-hydra-train", "--config-dir", tmp_path, "--config-name", "lm", f"hydra.run.dir={tmp_path}/hydra"],
        cwd=REPOSITORY,
    )
    assert "decoder: 3 layers from 2 parameter sets (assignment): 0 1 0;" in output
    assert "decoder: residual scalings measured on the first batch: 1.00 " in output
    assert evaluate(text, tmp_path / "save" / "checkpoint_best.pt") > 1
