"""The YAML files of the examples train with fairseq-hydra-train; only sizes, data and lengths are made small."""

import re
import subprocess
import sys

import pytest
import torch
from conftest import REPOSITORY, read_corpus, run

TINY_MODEL = {
    "translation/cycle_rev": ["encoder_embed_dim=32", "encoder_ffn_embed_dim=64"],
    "language_modeling/sequence_wiki103": [
        *(f"decoder_{name}=64" for name in ("embed_dim", "input_dim", "output_dim", "ffn_embed_dim")),
        *("adaptive_input_cutoff='50,200'", "adaptive_softmax_cutoff='50,200'"),
    ],
    "speech_to_text/sequence_librispeech": ["encoder_embed_dim=32", "encoder_ffn_embed_dim=64"],
    "masked_lm/albert_base": ["encoder_embed_dim=24", "encoder_ffn_embed_dim=32", "factorized_embed_dim=16"],
    "masked_lm/albert_small": ["encoder_embed_dim=24", "encoder_ffn_embed_dim=32", "factorized_embed_dim=16"],
}
SETTINGS = {
    "translation/cycle_rev": ["dataset.max_tokens=1200"],
    "language_modeling/sequence_wiki103": ["task.tokens_per_sample=32", "dataset.max_tokens=512"],
    "speech_to_text/sequence_librispeech": ["dataset.max_tokens=5000"],
    "masked_lm/albert_base": ["task.tokens_per_sample=200", "dataset.batch_size=8"],
    "masked_lm/albert_small": ["task.tokens_per_sample=200", "dataset.max_tokens=512", "dataset.valid_subset=valid"],
}
PICTURES = {
    "translation/cycle_rev": "0 1 2 3 4 5 5 4 3 2 1 0",
    "language_modeling/sequence_wiki103": "0 0 1 1 2 2 3 3 4 4 5 5",
    "speech_to_text/sequence_librispeech": "0 0 1 1 2 2 3 3 4 4 5 5 6 6 7 7",
    "masked_lm/albert_base": "0 0 0 0 0 0 0 0 0 0 0 0",
    "masked_lm/albert_small": "0 0 0",
}


@pytest.fixture(scope="module")
def sources(data, tmp_path_factory):
    """Return the data folder of each family, all of it real and shipped with the repository."""
    folder = tmp_path_factory.mktemp("sources")
    lines = read_corpus("valid", "en")
    (folder / "train").write_text("\n".join(lines[:300]) + "\n", encoding="utf-8")
    (folder / "valid").write_text("\n".join(lines[-60:]) + "\n", encoding="utf-8")
    run(
        [
            *("fairseq-preprocess", "--only-source", "--trainpref", folder / "train", "--validpref", folder / "valid"),
            *("--destdir", folder / "bin"),
        ]
    )
    return {"translation": data, "language_modeling": folder / "bin", "masked_lm": folder / "bin"}


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    out = tmp_path_factory.mktemp("speech") / "data"
    clips = REPOSITORY / "examples" / "speech_to_text" / "data"
    subprocess.run(
        [
            *(sys.executable, REPOSITORY / "scripts" / "prepare_speech.py", "--audio-root", clips, "--out", out),
            *("--train", clips / "train.tsv", "--valid", clips / "valid.tsv", "--vocab-type", "char"),
        ],
        check=True,
        capture_output=True,
    )
    return out


@pytest.mark.parametrize("name", TINY_MODEL)
def test_example_trains(name, sources, request, tmp_path):
    family, config = name.split("/")
    data = request.getfixturevalue("speech") if family == "speech_to_text" else sources[family]
    output = run(
        [
            *("fairseq-hydra-train", "--config-dir", REPOSITORY / "examples" / family / "config"),
            *("--config-name", config, f"task.data={data}", f"checkpoint.save_dir={tmp_path}/save"),
            *("common.fp16=false", "common.cpu=true", "optimization.max_update=2", "optimization.update_freq=[1]"),
            *(f"model.{setting}" for setting in TINY_MODEL[name]),
            *SETTINGS[name],
            *("dataset.num_workers=0", f"hydra.run.dir={tmp_path}/hydra"),
        ],
        cwd=REPOSITORY,
    )
    assert f": {PICTURES[name]};" in output
    saved = torch.load(tmp_path / "save" / "checkpoint_last.pt", weights_only=True)
    assert saved["optimizer_history"][-1]["num_updates"] == 2
    shown = run(["fairseq-sharing", "show", "--path", tmp_path / "save" / "checkpoint_last.pt"])
    assert re.search("  set +" + PICTURES[name].replace(" ", " +"), shown)
