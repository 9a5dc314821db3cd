"""Speech to text as a user does it: from real audio to a word error rate, with fairseq's own commands."""

import re
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from conftest import PLUGIN, REPOSITORY, run

from fairseq_sharing.models.s2t_transformer_shared import SharedS2TTransformerModel

CLIPS = REPOSITORY / "examples" / "speech_to_text" / "data"
REV = "s2t_transformer_shared_cycle_rev_s"
SIZES = [
    *("--encoder-layers", 6, "--encoder-unique-layers", 3, "--decoder-layers", 6, "--decoder-unique-layers", 2),
    *("--encoder-embed-dim", 96, "--encoder-ffn-embed-dim", 192, "--conv-channels", 96),
]
SHARED = [
    "encoder: 6 layers from 3 parameter sets (cycle_rev): 0 1 2 2 1 0;",
    "decoder: 6 layers from 2 parameter sets (cycle_rev): 0 1 0 1 1 0;",
]


def prepare(out, *flags):
    """Prepare the twenty shipped training clips, as training, validation and test part at once."""
    parts = [word for part in ("train", "valid", "test") for word in (f"--{part}", CLIPS / "train.tsv")]
    command = [sys.executable, REPOSITORY / "scripts" / "prepare_speech.py", "--audio-root", CLIPS, *parts]
    subprocess.run([*map(str, command), "--vocab-type", "char", "--out", str(out), *flags], check=True)
    return out


def train(data, save_dir, *flags) -> str:
    return run(
        [
            *("fairseq-train", data, "--user-dir", PLUGIN, "--task", "speech_to_text", "--save-dir", save_dir, "--cpu"),
            *("--arch", REV, *SIZES, "--share-decoder-input-output-embed", "--report-accuracy"),
            *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--lr", "2e-3", "--lr-scheduler", "inverse_sqrt"),
            *("--warmup-updates", 60, "--clip-norm", 10, "--label-smoothing", 0.1, "--max-tokens", 1600),
            *("--max-tokens-valid", 5000, "--num-workers", 0, "--no-progress-bar", "--log-interval", 10, *flags),
        ]
    )


def word_error_rate(data, checkpoint, *flags) -> tuple[float, dict[int, str]]:
    """Return fairseq's score and the hypothesis of each clip."""
    output = run(
        [
            *("fairseq-generate", data, "--user-dir", PLUGIN, "--task", "speech_to_text", "--gen-subset", "test"),
            *("--path", checkpoint, "--beam", 5, "--scoring", "wer", "--max-tokens", 5000, "--cpu", *flags),
            *("--num-workers", 0),
        ]
    )
    lines = re.findall(r"^D-(\d+)\t\S+\t(.*)$", output, re.MULTILINE)
    return float(re.search(r"WER: ([\d.]+)", output)[1]), {int(number): text for number, text in lines}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("plain") / "data", "--specaugment", "none")


@pytest.fixture(scope="module")
def augmented(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("augmented") / "data", "--features", "npy")


@pytest.fixture(scope="module")
def overfitted(plain, tmp_path_factory):
    """A shared model that knows twenty real utterances by heart, averaged over its last checkpoints."""
    save_dir = tmp_path_factory.mktemp("overfitted")
    log = train(
        *(plain, save_dir, "--criterion", "label_smoothed_cross_entropy", "--max-update", 450),
        *("--dropout", 0.1, "--attention-dropout", 0, "--activation-dropout", 0),
        *("--validate-interval", 75, "--save-interval", 5, "--keep-last-epochs", 5),
    )
    assert all(log.count(line) == 1 for line in SHARED)
    averaged = save_dir / "averaged.pt"
    run(["fairseq-sharing", "average", "--inputs", save_dir, "--num-epoch-checkpoints", 5, "--output", averaged])
    return averaged


def test_an_overfitted_model_decodes_what_it_learned(plain, overfitted):
    error_rate, hypotheses = word_error_rate(plain, overfitted)
    texts = [line.split("\t")[1] for line in (CLIPS / "train.tsv").read_text("utf-8").splitlines()[1:]]
    assert error_rate < 10
    assert len(hypotheses) == 20
    assert sum(hypotheses[number] == text for number, text in enumerate(texts)) >= 16


def test_word_error_rates_of_each_source(tmp_path):
    """By hand: one word of two is wrong at home; abroad one is left out and one too many is said, of three."""
    rows = ["home/a.flac\ta\t9\tyes no\t", "abroad/b.flac\tb\t9\tone two\t", "abroad/c.flac\tc\t9\tthree\t"]
    (tmp_path / "test.tsv").write_text("\n".join(["id\taudio\tn_frames\ttgt_text\tspeaker", *rows]) + "\n", "utf-8")
    (tmp_path / "log").write_text("T-1\tone two\nD-1\t-0.1\ttwo\nD-0\t-0.2\tyes so\nD-2\t-1\tthree four\n", "utf-8")
    script = [sys.executable, REPOSITORY / "examples" / "speech_to_text" / "word_error_rates.py", tmp_path / "log"]
    printed = subprocess.run([*script, tmp_path / "test.tsv"], check=True, capture_output=True, text=True).stdout
    assert printed.splitlines() == [
        "abroad: 66.67 (2 clips, 3 words)",
        "home: 50.00 (1 clips, 2 words)",
        "all: 60.00 (3 clips, 5 words)",
    ]
    (tmp_path / "test.tsv").write_text("id\ttgt_text\na\tyes\n", "utf-8")
    failed = subprocess.run([*script, tmp_path / "test.tsv"], capture_output=True, text=True)
    assert failed.returncode == 2 and "has 3 hypotheses" in failed.stderr and "has 1 clips" in failed.stderr


def test_an_empty_manifest_is_refused(plain, tmp_path):
    """Preparation writes none; fairseq says so when one got there in another way."""
    shutil.copytree(plain, tmp_path / "data")
    manifest = tmp_path / "data" / "train.tsv"
    manifest.write_text(manifest.read_text("utf-8").splitlines()[0] + "\n", "utf-8")
    flags = ["--task", "speech_to_text", "--arch", REV, *SIZES, "--max-tokens", 1600, "--cpu", "--save-dir", tmp_path]
    output = run(["fairseq-train", tmp_path / "data", "--user-dir", PLUGIN, *flags], check=False)
    assert output.strip().splitlines()[-1] == f"ValueError: Empty manifest: {manifest}"
    assert not list(tmp_path.glob("*.pt"))


def test_show_reads_the_checkpoint(overfitted):
    shown = run(["fairseq-sharing", "show", "--path", overfitted])
    saved = torch.load(overfitted, weights_only=True)["model"].values()
    saved = [value for value in saved if value.is_floating_point() and value.numel() > 1]
    number = sum({value.data_ptr(): value.numel() for value in saved}.values())
    assert "encoder: 6 layers from 3 parameter sets" in shown and "set   0 1 2 2 1 0" in shown
    assert next(line for line in shown.splitlines() if line.startswith("total")).split()[1] == f"{number:,}"


def test_the_scores_of_decoding_are_those_of_a_full_forward_pass(plain, overfitted):
    """The word error rate alone would not tell: a model that knows few sentences by heart survives wrong caches.

    The same parameters, first in six layer objects, then in two: only the attention caches differ. The model comes from
    `from_pretrained`, whose own filterbanks need torchaudio; the features of the data do not.
    """
    hub = SharedS2TTransformerModel.from_pretrained(str(overfitted.parent), overfitted.name, str(plain))
    layers = hub.model.decoder.layers
    assert str(layers.sharing) == "0 1 0 1 1 0"
    hub.task.load_dataset("test")
    dataset = hub.task.dataset("test")
    samples = [dataset.collater([dataset[number]]) for number in range(5)]
    found = [hub.get_prediction(hub.task, hub.model, hub.generator, sample) for sample in samples]
    assert sum(text == expected for text, expected in zip(found, dataset.tgt_texts, strict=False)) >= 4

    @torch.no_grad()
    def difference(sample) -> float:
        hypothesis = hub.generator.generate([hub.model], sample)[0][0]
        tokens = hypothesis["tokens"]
        inputs = torch.cat([tokens.new_tensor([dataset.tgt_dict.eos()]), tokens[:-1]])[None]
        output = hub.model(sample["net_input"]["src_tokens"], sample["net_input"]["src_lengths"], inputs)
        full = hub.model.get_normalized_probs(output, log_probs=True)[0].gather(1, tokens[:, None])[:, 0]
        return float((hypothesis["positional_scores"] - full).abs().max())

    assert max(map(difference, samples)) < 1e-3
    for index, owner in enumerate(layers.sharing.owners):
        layers[index] = layers[owner]
    assert max(map(difference, samples)) > 0.05


def test_ctc_specaugment_freezing_resuming_and_a_pretrained_encoder(augmented, tmp_path):
    ctc = ["--criterion", "label_smoothed_cross_entropy_with_ctc", "--ctc-weight", 0.3, "--no-epoch-checkpoints"]
    first = train(augmented, tmp_path / "first", *ctc, "--max-update", 3)
    assert "SpecAugmentTransform" in first and "UtteranceCMVN" in first and "ctc_loss" in first
    resumed = train(augmented, tmp_path / "first", *ctc, "--max-update", 6)
    assert "Loaded checkpoint" in resumed and "@ 3 updates" in resumed
    pretrained = tmp_path / "first" / "checkpoint_last.pt"
    flags = ["--load-pretrained-encoder-from", pretrained, "--encoder-freezing-updates", 100, "--max-update", 3]
    second = train(augmented, tmp_path / "second", *ctc, *flags, "--decoder-sharing", "sequence")
    assert f"loaded pretrained encoder from: {pretrained}" in second
    before, after = (
        torch.load(tmp_path / run / "checkpoint_last.pt", weights_only=True)["model"] for run in ("first", "second")
    )
    encoder = [key for key in before if key.startswith("encoder.") and "ctc_proj" not in key]
    assert len(encoder) > 50 and all(torch.equal(before[key], after[key]) for key in encoder)  # loaded, then frozen
    error_rate, hypotheses = word_error_rate(augmented, tmp_path / "second" / "checkpoint_last.pt", "--max-len-b", 10)
    assert error_rate > 0 and len(hypotheses) == 20


def test_hydra_trains_from_yaml(plain, tmp_path):
    """The preset of the architecture holds. fairseq's task is a legacy one: what it and the criterion would tell the
    model on the command line is in the YAML twice.
    """
    (tmp_path / "s2t.yaml").write_text(
        textwrap.dedent(
            f"""\
            # @package _group_
            common: {{user_dir: "${{hydra:runtime.cwd}}/fairseq_sharing", cpu: true, no_progress_bar: true}}
            checkpoint: {{save_dir: {tmp_path}/save}}
            task:
              _name: speech_to_text
              task: speech_to_text
              data: {plain}
              config_yaml: config.yaml
              max_source_positions: 6000
              max_target_positions: 1024
              seed: 1
            dataset: {{max_tokens: 5000, num_workers: 0}}
            criterion: {{_name: label_smoothed_cross_entropy_with_ctc, ctc_weight: 0.3}}
            optimizer: {{_name: adam}}
            lr_scheduler: {{_name: fixed}}
            optimization: {{max_update: 2, lr: [0.002]}}
            model:
              _name: s2t_transformer_shared_sequence_s
              encoder_embed_dim: 32
              encoder_ffn_embed_dim: 64
              conv_channels: 32
              decoder_layers: 3
              decoder_assignment: [0, 1, 0]
              max_source_positions: 6000
              max_target_positions: 1024
              ctc_weight: 0.3
              input_feat_per_channel: 80
              input_channels: 1
              speaker_to_id: null
            """
        )
    )
    output = run(
        ["fairseq-hydra-train", "--config-dir", tmp_path, "--config-name", "s2t", f"hydra.run.dir={tmp_path}/hydra"],
        cwd=REPOSITORY,
    )
    assert "encoder: 16 layers from 8 parameter sets (sequence): 0 0 1 1 2 2 3 3 4 4 5 5 6 6 7 7;" in output
    assert "decoder: 3 layers from 2 parameter sets (assignment): 0 1 0;" in output
    _, hypotheses = word_error_rate(plain, tmp_path / "save" / "checkpoint_best.pt", "--max-len-b", 5)
    assert len(hypotheses) == 20
