"""What a user does, with fairseq's own commands in their own processes, on real text."""

import json
import re
import shutil
import socket
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import sacrebleu
import torch
from conftest import PLUGIN, REPOSITORY, binarise, run, short_pairs, train_command, write_text

FOUR_FROM_TWO = [
    *("--encoder-layers", 4, "--decoder-layers", 4),
    *("--encoder-unique-layers", 2, "--decoder-unique-layers", 2),
]
PRE_LN = ["--encoder-normalize-before", "--decoder-normalize-before"]
PICTURES = {"sequence": "0 0 1 1", "cycle": "0 1 0 1", "cycle_rev": "0 1 1 0", "universal": "0 0 0 0"}


def generate(data, checkpoint, *flags, **kwargs) -> str:
    return run(
        [
            *("fairseq-generate", data, "--path", checkpoint, "--user-dir", PLUGIN, "--cpu"),
            *("--remove-bpe", "sentencepiece", "--beam", 4, "--num-workers", 0, *flags),
        ],
        **kwargs,
    )


def hypotheses(output: str) -> list[str]:
    """Return detokenised translations in the order of the test set."""
    found = re.findall(r"^D-(\d+)\t\S+\t(.*)$", output, re.MULTILINE)
    return [text for _, text in sorted((int(number), text) for number, text in found)]


@pytest.mark.parametrize(
    "preset",
    [pytest.param(name, marks=[pytest.mark.slow] if name in ("sequence", "cycle") else []) for name in PICTURES],
)
def test_train_resume_average_generate_score(data, tmp_path, preset):
    save_dir = tmp_path / "checkpoints"
    arch = f"transformer_shared_{preset}"
    sizes = FOUR_FROM_TWO if preset != "universal" else ["--encoder-layers", 4, "--decoder-layers", 4]
    command = train_command(data, save_dir, arch, *sizes)
    first = run([*command, "--max-epoch", 2, "--tensorboard-logdir", tmp_path / "tensorboard"])
    unique = 1 if preset == "universal" else 2
    for stack in ("encoder", "decoder"):
        strategy = "cycle" if preset == "universal" else preset
        sets = "1 parameter set" if unique == 1 else "2 parameter sets"
        line = f"{stack}: 4 layers from {sets} ({strategy}): {PICTURES[preset]};"
        assert first.count(line) == 1
    assert list((tmp_path / "tensorboard" / "valid").iterdir())

    saved = torch.load(save_dir / "checkpoint_last.pt", weights_only=True)
    number = int(re.search(r"num. shared model params: ([\d,]+)", first)[1].replace(",", ""))
    model = [value for key, value in saved["model"].items() if value.is_floating_point() and value.numel() > 1]
    assert sum({value.data_ptr(): value.numel() for value in model}.values()) == number
    moments = saved["last_optimizer_state"]["state"].values()
    assert sum(moment["exp_avg"].numel() for moment in moments) == number

    second = run([*command, "--max-epoch", 4])
    assert "Loaded checkpoint" in second and "(epoch 3 @" in second

    averaged = tmp_path / "averaged.pt"
    run(["fairseq-sharing", "average", "--inputs", save_dir, "--num-epoch-checkpoints", 2, "--output", averaged])
    shown = run(["fairseq-sharing", "show", "--path", averaged])
    assert f"set   {PICTURES[preset]}" in shown and f"{number:,}" in shown

    output = generate(data, averaged)
    assert "Generate test with beam=4: BLEU4 =" in output
    lines = hypotheses(output)
    assert len(lines) == 30
    (tmp_path / "hypothesis").write_text("\n".join(lines) + "\n")
    reference = data.parent / "test.de"
    scored = run(["sacrebleu", reference, "-i", tmp_path / "hypothesis", "-m", "bleu", "chrf"])
    score, _ = json.JSONDecoder().raw_decode(scored)
    assert [entry["name"] for entry in score] == ["BLEU", "chrF2"]
    translated, text = ((tmp_path / "hypothesis").read_text("utf-8"), reference.read_text("utf-8"))
    for entry, metric in zip(score, (sacrebleu.corpus_bleu, sacrebleu.corpus_chrf), strict=True):
        assert entry["score"] == pytest.approx(metric(translated.splitlines(), [text.splitlines()]).score, abs=0.06)


def train_in_two_processes(command: list) -> list[str]:
    """Run fairseq-train as two processes with one thread each, as the README says; return their outputs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    distributed = [
        *("--distributed-world-size", 2, "--distributed-init-method", address, "--distributed-no-spawn"),
        *("--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp"),
    ]
    with ThreadPoolExecutor(2) as pool:
        ranks = [[*command, *distributed, "--distributed-rank", rank, "--device-id", rank] for rank in (0, 1)]
        return list(pool.map(run, ranks))


def test_two_processes_train_and_resume_as_one(data, tmp_path):
    """Two workers, stopped and resumed, end where one process with two batches per update does."""
    flags = [*FOUR_FROM_TWO, "--dropout", 0, "--max-update"]
    arch = "transformer_shared_cycle_rev"
    train_in_two_processes([*train_command(data, tmp_path / "two", arch, *flags), 4])
    resumed, _ = train_in_two_processes([*train_command(data, tmp_path / "two", arch, *flags), 8])
    assert "Loaded checkpoint" in resumed and "@ 4 updates" in resumed
    run([*train_command(data, tmp_path / "one", arch, *flags), 8, "--update-freq", 2])
    two, one = (torch.load(tmp_path / run / "checkpoint_last.pt")["model"] for run in ("two", "one"))
    assert two.keys() == one.keys()
    for key, value in one.items():
        assert torch.allclose(two[key].double(), value.double(), atol=1e-5), key


def test_hydra_trains_from_yaml(data, tmp_path):
    """A preset of the architecture holds, and lists in YAML are as good as text."""
    (tmp_path / "mt.yaml").write_text(
        textwrap.dedent(
            f"""\
            # @package _group_
            common: {{user_dir: "${{hydra:runtime.cwd}}/fairseq_sharing", cpu: true, no_progress_bar: true}}
            checkpoint: {{save_dir: {tmp_path}/save}}
            task: {{_name: translation, data: {data}}}
            dataset: {{max_tokens: 1200, num_workers: 0}}
            criterion: {{_name: label_smoothed_cross_entropy}}
            optimizer: {{_name: adam}}
            lr_scheduler: {{_name: fixed}}
            optimization: {{max_update: 3, lr: [0.002]}}
            model:
              _name: transformer_shared_sequence
              encoder_embed_dim: 32
              encoder_ffn_embed_dim: 64
              encoder_attention_heads: 4
              decoder_attention_heads: 4
              share_all_embeddings: true
              decoder_layers: 3
              decoder_assignment: [0, 1, 0]
              sharing_parts: [attention, ffn]
            """
        )
    )
    output = run(
        ["fairseq-hydra-train", "--config-dir", tmp_path, "--config-name", "mt", f"hydra.run.dir={tmp_path}/hydra"],
        cwd=REPOSITORY,
    )
    assert "encoder: 12 layers from 6 parameter sets (sequence): 0 0 1 1 2 2 3 3 4 4 5 5 (attention,ffn only)" in output
    assert "decoder: 3 layers from 2 parameter sets (assignment): 0 1 0 (attention,ffn only)" in output
    assert len(hypotheses(generate(data, tmp_path / "save" / "checkpoint_best.pt"))) == 30
    shown = run(["fairseq-sharing", "show", "--path", tmp_path / "save" / "checkpoint_best.pt"])
    assert "decoder: 3 layers from 2 parameter sets, sharing only attention, ffn" in shown


@pytest.fixture(scope="module")
def fifty(tmp_path_factory):
    """Fifty real pairs that are training, validation and test set at once."""
    folder = tmp_path_factory.mktemp("fifty")
    pairs = short_pairs(50, most_words=10)
    write_text(folder, train=pairs, valid=pairs, test=pairs)
    return binarise(folder, vocabulary=300)


@pytest.fixture(scope="module")
def overfitted(fifty, tmp_path_factory):
    """A deep shared model that has learned the fifty pairs by heart, after training with --eval-bleu."""
    save_dir = tmp_path_factory.mktemp("overfitted")
    sizes = ["--encoder-layers", 6, "--decoder-layers", 6, "--encoder-unique-layers", 3, "--decoder-unique-layers", 3]
    log = run(
        [
            *train_command(fifty, save_dir, "transformer_shared_cycle_rev", *sizes, *PRE_LN),
            *("--max-epoch", 130, "--dropout", 0, "--label-smoothing", 0, "--no-epoch-checkpoints"),
            *("--validate-interval", 65, "--save-interval", 65, "--eval-bleu", "--eval-bleu-args", '{"beam": 4}'),
            *("--eval-bleu-remove-bpe", "sentencepiece", "--best-checkpoint-metric", "bleu"),
            "--maximize-best-checkpoint-metric",
        ]
    )
    (save_dir / "log").write_text(log, encoding="utf-8")
    return save_dir / "checkpoint_best.pt"


def bleu(reference, lines) -> float:
    from sacrebleu.metrics import BLEU

    return BLEU().corpus_score(lines, [reference.read_text("utf-8").splitlines()]).score


def test_an_overfitted_model_decodes_what_it_learned(fifty, overfitted):
    """A wrong cache in a shared layer would train as well and decode to noise."""
    lines = hypotheses(generate(fifty, overfitted))
    assert bleu(fifty.parent / "test.de", lines) > 90


def test_all_ways_to_decode_agree(fifty, overfitted):
    """Batches, single lines, the hub and an ensemble of the model with itself give the same text."""
    expected = hypotheses(generate(fifty, overfitted))
    assert hypotheses(generate(fifty, f"{overfitted}:{overfitted}")) == expected

    source = fifty.parent / "test.spm.en"
    interactive = run(
        [
            *("fairseq-interactive", fifty, "--path", overfitted, "--user-dir", PLUGIN, "--cpu", "--beam", 4),
            *("--remove-bpe", "sentencepiece", "--input", source),
        ]
    )
    assert hypotheses(interactive) == expected

    from fairseq_sharing.models.transformer_shared import SharedTransformerModel

    hub = SharedTransformerModel.from_pretrained(
        str(overfitted.parent),
        overfitted.name,
        str(fifty),
        bpe="sentencepiece",
        sentencepiece_model=f"{fifty.parent}/spm.model",
    )
    sentences = (fifty.parent / "test.en").read_text("utf-8").splitlines()
    assert hub.translate(sentences[:10], beam=4) == expected[:10]


def test_validation_reads_the_checkpoint(fifty, overfitted):
    output = run(
        [
            *("fairseq-validate", fifty, "--path", overfitted, "--user-dir", PLUGIN, "--cpu", "--task", "translation"),
            *("--valid-subset", "valid", "--max-tokens", 1200, "--num-workers", 0),
        ]
    )
    found = r"valid on 'valid' subset .* ppl ([\d.]+)"
    assert re.search(found, output)[1] in re.findall(found, (overfitted.parent / "log").read_text("utf-8"))


# --- wrong input, through the commands ---


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--encoder-unique-layers", 0], "--encoder-unique-layers 0 must be between 1 and --encoder-layers 12"),
        (["--decoder-assignment", "0,1"], "--decoder-assignment 0,1 has 2 entries"),
        (["--ddp-backend", "fully_sharded"], "--ddp-backend fully_sharded"),
    ],
)
def test_wrong_flags_leave_no_trace(data, tmp_path, flags, sentence):
    output = run(train_command(data, tmp_path / "save", "transformer_shared_cycle", *flags), check=False)
    assert sentence in output
    assert not (tmp_path / "save").exists()


def test_wrong_data_leaves_no_trace(tmp_path):
    output = run(train_command(tmp_path / "no", tmp_path / "save", "transformer_shared_cycle"), check=False)
    assert f"data folder {tmp_path / 'no'} does not exist" in output
    assert not (tmp_path / "save").exists()


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    save_dir = tmp_path_factory.mktemp("trained")
    run([*train_command(data, save_dir, "transformer_shared_cycle_rev", *FOUR_FROM_TWO), "--max-update", 3])
    return save_dir


@pytest.mark.parametrize(
    ("arch", "flags"),
    [
        ("transformer_shared_cycle", FOUR_FROM_TWO),
        ("transformer_shared_cycle_rev", [*FOUR_FROM_TWO, "--sharing-parts", "attention,ffn"]),
    ],
)
@pytest.mark.parametrize("how", ["--restore-file", "--finetune-from-model"])
def test_resuming_another_sharing_is_refused(data, trained, tmp_path, arch, flags, how):
    checkpoint = trained / "checkpoint_last.pt"
    command = [*train_command(data, tmp_path / "save", arch, *flags), "--max-update", 6, how, checkpoint]
    output = run(command, check=False)
    error = next(line for line in output.splitlines() if "ERROR" in line)  # logged before fairseq's own message
    assert "cannot load this checkpoint: its encoder.layers were saved shared as 0 1 1 0;" in error
    last = output.strip().splitlines()[-1]  # and below it, where it is read
    assert last.startswith("The reason: cannot load this checkpoint: its encoder.layers were saved shared as 0 1 1 0;")
    assert not list((tmp_path / "save").glob("*.pt"))


def test_overriding_the_sharing_when_decoding_is_refused(data, trained):
    overrides = "{'encoder_sharing': 'sequence'}"
    output = generate(data, trained / "checkpoint_last.pt", "--model-overrides", overrides, check=False)
    assert "were saved shared as 0 1 1 0; this model shares them as 0 0 1 1" in output


def test_a_full_disk_keeps_the_old_checkpoint(data, trained, tmp_path):
    """A limit on the size of files stands for the full disk: the write fails half-way."""
    save_dir = tmp_path / "save"
    shutil.copytree(trained, save_dir)
    before = {path.name: path.read_bytes() for path in save_dir.iterdir()}
    command = [*train_command(data, save_dir, "transformer_shared_cycle_rev", *FOUR_FROM_TWO), "--max-update", 6]
    limit = len(before["checkpoint_last.pt"]) // 2
    output = run(command, largest_file=limit, check=False)
    assert "cannot write checkpoint" in output and "checkpoints written before are untouched" in output
    assert {path.name: path.read_bytes() for path in save_dir.iterdir()} == before
