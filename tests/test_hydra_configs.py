"""The YAML files of the examples train with fairseq-hydra-train, and what was trained so, or by fairseq-train, is the
same model again in every command that takes it. Only sizes, data and lengths are made small.
"""

import math
import re
import subprocess
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from conftest import PLUGIN, REPOSITORY, read_corpus, run
from fairseq.dataclass import initialize
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import ARCH_MODEL_REGISTRY
from omegaconf import OmegaConf

from fairseq_sharing.tools.main import main

# Family -> (YAML, its small sizes, its settings, the same for fairseq-train, the picture of the first stack).
FAMILIES = {
    "translation": SimpleNamespace(
        config="cycle_rev",
        sizes=["encoder_embed_dim=32", "encoder_ffn_embed_dim=64"],
        settings=["dataset.max_tokens=1200"],
        flags=["--arch", "transformer_shared_cycle_rev", "--share-all-embeddings", "--max-tokens", 1200],
        picture="0 1 2 3 4 5 5 4 3 2 1 0",
    ),
    "language_modeling": SimpleNamespace(
        config="sequence_wiki103",
        sizes=[
            *(f"decoder_{name}=64" for name in ("embed_dim", "input_dim", "output_dim", "ffn_embed_dim")),
            *("adaptive_input_cutoff=50,200", "adaptive_softmax_cutoff=50,200"),
        ],
        settings=["task.tokens_per_sample=32", "dataset.max_tokens=512"],
        flags=[
            *("--arch", "transformer_lm_shared_sequence_wiki103", "--criterion", "adaptive_loss"),
            *("--ddp-backend", "legacy_ddp", "--tokens-per-sample", 32, "--max-tokens", 512),
        ],
        picture="0 0 1 1 2 2 3 3 4 4 5 5",
    ),
    "speech_to_text": SimpleNamespace(
        config="sequence_librispeech",
        sizes=["encoder_embed_dim=32", "encoder_ffn_embed_dim=64"],
        settings=["dataset.max_tokens=5000"],
        flags=[
            *("--arch", "s2t_transformer_shared_sequence_librispeech", "--max-tokens", 5000),
            *("--criterion", "label_smoothed_cross_entropy_with_ctc", "--ctc-weight", 0.3),
        ],
        picture="0 0 1 1 2 2 3 3 4 4 5 5 6 6 7 7",
    ),
    "masked_lm": SimpleNamespace(
        config="albert_base",
        sizes=["encoder_embed_dim=24", "encoder_ffn_embed_dim=32", "factorized_embed_dim=16"],
        settings=["task.tokens_per_sample=200", "dataset.batch_size=8"],
        flags=[
            *("--arch", "albert_encoder_base", "--criterion", "masked_lm", "--sample-break-mode", "complete"),
            *("--tokens-per-sample", 200, "--max-sentences", 8),
        ],
        picture="0 0 0 0 0 0 0 0 0 0 0 0",
    ),
}


@pytest.fixture(scope="module")
def sources(data, tmp_path_factory):
    """Return the data folder of each family, all of it real and shipped with the repository."""
    folder = tmp_path_factory.mktemp("sources")
    lines = [line for line in read_corpus("valid", "en") if 3 < len(line.split()) < 25]  # blocks are of 32 words
    (folder / "train").write_text("\n".join(lines[:300]) + "\n", encoding="utf-8")
    (folder / "valid").write_text("\n".join(lines[-60:]) + "\n", encoding="utf-8")
    run(
        [
            *("fairseq-preprocess", "--only-source", "--trainpref", folder / "train", "--validpref", folder / "valid"),
            *("--destdir", folder / "bin"),
        ]
    )
    clips = REPOSITORY / "examples" / "speech_to_text" / "data"
    subprocess.run(
        [
            *(sys.executable, REPOSITORY / "scripts" / "prepare_speech.py", "--audio-root", clips, "--features", "npy"),
            *("--train", clips / "train.tsv", "--valid", clips / "valid.tsv", "--vocab-type", "char"),
            *("--out", folder / "speech"),
        ],
        check=True,
        capture_output=True,
    )
    text = {"language_modeling": folder / "bin", "masked_lm": folder / "bin"}
    return {"translation": data, "speech_to_text": folder / "speech", **text}


def train(how: str, name: str, data, folder, family=None) -> str:
    """Train two updates from the shipped YAML or by fairseq-train; the checkpoints are in ``folder/save``."""
    family = family or FAMILIES[name]
    if how == "hydra":
        return run(
            [
                *("fairseq-hydra-train", "--config-dir", REPOSITORY / "examples" / name / "config"),
                *("--config-name", family.config, f"task.data={data}", f"checkpoint.save_dir={folder}/save"),
                *("common.fp16=false", "common.cpu=true", "optimization.max_update=2", "optimization.update_freq=[1]"),
                *(f"model.{size}".replace("=50,200", "='50,200'") for size in family.sizes),
                *family.settings,
                *("dataset.num_workers=0", f"hydra.run.dir={folder}/hydra"),
            ],
            cwd=REPOSITORY,
        )
    sizes = [word for size in family.sizes for word in f"--{size}".split("=")]
    return run(
        [
            *("fairseq-train", data, "--user-dir", PLUGIN, "--task", name, *family.flags),
            *(word.replace("_", "-") for word in sizes),
            *("--optimizer", "adam", "--lr", 0.001, "--max-update", 2, "--save-dir", folder / "save", "--cpu"),
            *("--num-workers", 0, "--no-progress-bar"),
        ]
    )


def valid_losses(output: str) -> list[str]:
    return re.findall(r"valid on 'valid' subset \| loss ([\d.]+)", output)


def hypotheses(output: str) -> list[str]:
    """Return what was decoded, in the order of the input, in the symbols of the dictionary."""
    found = re.findall(r"^H-(\d+)\t\S+\t(.*)$", output, re.MULTILINE)
    return [text for _, text in sorted((int(number), text) for number, text in found)]


SEARCH = ["--beam", 2, "--max-len-a", 0, "--max-len-b", 10]
SEARCH_HERE = {"beam": 2, "max_len_a": 0, "max_len_b": 10}


def decode_translation(data, use, hub) -> None:
    """Batches, single lines and the hub give the same text."""
    lines = (data.parent / "test.spm.en").read_text("utf-8").splitlines()
    found = hypotheses(use("fairseq-generate", "--gen-subset", "test", *SEARCH))
    assert len(found) == len(lines) == 30
    (data.parent / "few").write_text("".join(f"{line}\n" for line in lines[:5]), encoding="utf-8")
    assert hypotheses(use("fairseq-interactive", *SEARCH, "--input", data.parent / "few")) == found[:5]
    assert hub.translate(lines[:5], **SEARCH_HERE) == found[:5]


def decode_language_model(data, use, hub) -> None:
    """Perplexity is that of the hub's model, and the first three words of each line are continued in one way.

    The training log's perplexity is a little lower: fairseq's adaptive loss leaves out the second word of each tail.
    """
    hub.task.load_dataset("valid")
    dataset, scores = hub.task.dataset("valid"), []
    for first in range(0, len(dataset), 16):
        sample = dataset.collater([dataset[number] for number in range(first, min(first + 16, len(dataset)))])
        output = hub.models[0](**sample["net_input"])
        words = sample["target"].ne(hub.tgt_dict.pad())
        scores.append(hub.models[0].get_normalized_probs(output, True).gather(2, sample["target"][..., None])[words])
    evaluated = use("fairseq-eval-lm", "--gen-subset", "valid", "--tokens-per-sample", 32, "--max-tokens", 512)
    loss = float(re.search(r"Loss \(base 2\): ([\d.]+)", evaluated)[1])
    assert abs(loss + torch.cat(scores).mean().item() / math.log(2)) < 1e-3

    lines = (data.parent / "valid").read_text("utf-8").splitlines()
    starts = [" ".join(line.split()[:3]) for line in lines[:5]]
    (data.parent / "starts").write_text("".join(f"{start}\n" for start in starts), encoding="utf-8")
    blocks = ["--task", "language_modeling", "--sample-break-mode", "eos", *SEARCH]
    found = hypotheses(use("fairseq-generate", "--gen-subset", "valid", *blocks, "--prefix-size", 3))
    assert len(found) == len(lines) == 60
    assert hypotheses(use("fairseq-interactive", *blocks, "--input", data.parent / "starts")) == found[:5]
    assert hub.sample(starts, **SEARCH_HERE) == found[:5]


def decode_speech(data, use, hub) -> None:
    """Batches, single files and the hub give the same letters."""
    manifest = [line.split("\t") for line in (data / "valid.tsv").read_text("utf-8").splitlines()[1:]]
    (data / "files").write_text("".join(f"{data / row[1]}\n" for row in manifest), encoding="utf-8")
    found = hypotheses(use("fairseq-generate", "--gen-subset", "valid", "--task", "speech_to_text", *SEARCH))
    assert len(found) == len(manifest) == 4
    files = ["--input", data / "files", "--task", "speech_to_text", *SEARCH]
    assert hypotheses(use("fairseq-interactive", *files)) == found
    hub.task.load_dataset("valid")
    dataset = hub.task.dataset("valid")
    generator = hub.task.build_generator([hub.model], Namespace(**SEARCH_HERE))
    tokens = [
        generator.generate([hub.model], dataset.collater([dataset[number]]))[0][0]["tokens"]
        for number in range(len(dataset))
    ]
    assert [hub.task.target_dictionary.string(each) for each in tokens] == found


def fill_masks(data, use, hub) -> None:
    """A masked language model is read by fairseq-validate and the hub only."""
    tokens = hub.task.source_dictionary.encode_line("Select the <mask>", add_if_not_exist=False).long()
    assert hub.model(tokens[None], features_only=False)[0].shape == (1, 4, len(hub.task.source_dictionary))


DECODE = {
    "translation": decode_translation,
    "language_modeling": decode_language_model,
    "speech_to_text": decode_speech,
    "masked_lm": fill_masks,
}


# tests/test_end_to_end.py reads a translation model of fairseq-train by every command.
RUNS = [
    *(("hydra", name) for name in FAMILIES),
    *(pytest.param("cli", name, marks=pytest.mark.slow) for name in FAMILIES if name != "translation"),
]


@pytest.mark.parametrize(("how", "name"), RUNS)
def test_example_trains_and_every_command_rebuilds_its_model(how, name, sources, tmp_path, capsys):
    data, picture = sources[name], FAMILIES[name].picture
    output = train(how, name, data, tmp_path)
    assert f": {picture};" in output
    path = tmp_path / "save" / "checkpoint_last.pt"
    saved = torch.load(path, weights_only=True)
    assert saved["optimizer_history"][-1]["num_updates"] == 2

    assert main(["show", "--path", str(path)]) == 0
    shown = capsys.readouterr().out
    assert re.search("  set +" + picture.replace(" ", " +"), shown)
    tensors = [value for value in saved["model"].values() if value.is_floating_point() and value.numel() > 1]
    number = sum({value.data_ptr(): value.numel() for value in tensors}.values())
    assert f"num. shared model params: {number:,} " in output
    assert re.search(rf"^total +{number:,} ", shown, re.MULTILINE)

    def use(command: str, *flags) -> str:
        return run([command, data, "--user-dir", PLUGIN, "--path", path, "--cpu", *flags])

    validated = use("fairseq-validate", "--task", name, "--max-tokens", 5000, "--num-workers", 0)
    assert valid_losses(validated) == valid_losses(output)[-1:]
    hub = ARCH_MODEL_REGISTRY[FAMILIES[name].flags[1]].from_pretrained(
        *(str(path.parent), path.name, str(data)), **({"bpe": "characters"} if name == "masked_lm" else {})
    )
    model = hub.models[0] if hasattr(hub, "models") else hub.model
    rebuilt = model.state_dict()
    assert all(torch.equal(rebuilt[key], value) for key, value in saved["model"].items())
    assert str(model.get_submodule(next(iter(model.STACKS.values()))).sharing) == picture
    with torch.no_grad():
        DECODE[name](data, use, hub.eval())


def test_the_small_encoder_of_the_example_trains(sources, tmp_path):
    settings = ["task.tokens_per_sample=200", "dataset.max_tokens=512", "dataset.valid_subset=valid"]
    small = SimpleNamespace(config="albert_small", sizes=FAMILIES["masked_lm"].sizes, settings=settings)
    output = train("hydra", "masked_lm", sources["masked_lm"], tmp_path, small)
    assert "encoder: 3 layers from 1 parameter set (sequence): 0 0 0;" in output


# --- ways to train that are refused ---

TWO = {"distributed_training.distributed_world_size": 2}
WAYS = {  # settings, and the sentence; {} stands for the stack and its picture, … for what is left out
    "fully_sharded": (
        {"distributed_training.ddp_backend": "fully_sharded"},
        "--ddp-backend fully_sharded wraps each layer by itself and cannot share parameters across layers ({}): "
        "use --ddp-backend legacy_ddp",
    ),
    "slowmo": ({"distributed_training.ddp_backend": "slowmo"}, "--ddp-backend slowmo has never been tried with … {}"),
    "checkpoint": (
        {"model.checkpoint_activations": True, "distributed_training.ddp_backend": "pytorch_ddp", **TWO},
        "--ddp-backend pytorch_ddp stops with 'marked ready twice' when 2 processes train … with "
        "--checkpoint-activations: use --ddp-backend legacy_ddp",
    ),
    "layerdrop": (
        {"model.decoder_layerdrop": 0.1, "distributed_training.ddp_backend": "c10d", **TWO},
        "--decoder-layerdrop 0.1 brings about: use --ddp-backend legacy_ddp, or add --find-unused-parameters",
    ),
    "pipeline": ({"distributed_training.pipeline_model_parallel": True}, "--pipeline-model-parallel puts layers on"),
    "megatron": ({"common.model_parallel_size": 2}, "--model-parallel-size 2 needs Megatron's layers"),
    "fp16": ({"common.fp16": True, "common.cpu": False}, "--fp16 needs a GPU, and torch sees none on this machine"),
    "fp16 --cpu": ({"common.fp16": True}, "--fp16 needs a GPU and cannot be combined with --cpu: use --bf16"),
    "quantization": ({"common.quantization_config_path": "q.yaml"}, "--quantization-config-path q.yaml would quant"),
}
EVERYWHERE = [way for way in WAYS if way not in ("checkpoint", "layerdrop")]
CASES = [(name, way) for name in FAMILIES for way in EVERYWHERE]
CASES += [(name, way) for name in ("translation", "language_modeling") for way in ("checkpoint", "layerdrop")]


def compose(name: str, **settings):
    """Return the whole configuration that fairseq-hydra-train makes of a shipped YAML and these settings."""
    path = REPOSITORY / "examples" / name / "config" / f"{FAMILIES[name].config}.yaml"
    cfg = OmegaConf.merge(OmegaConf.structured(FairseqConfig), OmegaConf.load(path))
    for key, value in {"common.user_dir": str(PLUGIN), "task.data": "none", "common.cpu": True, **settings}.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    return OmegaConf.create(OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_way_to_train_that_cannot_be_right_is_refused(name, way, monkeypatch):
    """In every family, with the command line's sentences, as soon as fairseq shows the whole configuration."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    initialize.add_defaults(compose(name, **{"common.fp16": False}))
    settings, sentence = WAYS[way]
    stack = next(iter(ARCH_MODEL_REGISTRY[FAMILIES[name].flags[1]].STACKS))
    with pytest.raises(ValueError, match="--") as caught:
        initialize.add_defaults(compose(name, **{"common.fp16": False, **settings}))
    for part in sentence.split(" … "):
        assert part.format(f"{stack}: {FAMILIES[name].picture}") in str(caught.value)


def test_a_masked_language_model_has_positions_for_its_blocks():
    """As many as on the command line: blocks that do not fit would be skipped with a warning."""
    longer = {"common.fp16": False, "task.tokens_per_sample": 1024}
    for settings, positions in (({}, 512), (longer, 1024), ({**longer, "model.max_positions": 2048}, 2048)):
        cfg = compose("masked_lm", **{"common.fp16": False, **settings})
        initialize.add_defaults(cfg)
        assert cfg.model.max_positions == positions
    with pytest.raises(ValueError, match="--tokens-per-sample 1024 does not fit into --max-positions 512"):
        initialize.add_defaults(compose("masked_lm", **longer, **{"model.max_positions": 512}))


def test_what_is_allowed_on_a_gpu_or_without_sharing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    initialize.add_defaults(compose("translation", **{"common.fp16": True, "common.cpu": False}))
    unshared = {
        f"model.{stack}_{key}": value
        for stack in ("encoder", "decoder")
        for key, value in (("sharing", "none"), ("unique_layers", None))
    }
    settings, _ = WAYS["slowmo"]
    listed = {"model.decoder_assignment": ",".join("012345" * 2), "model.decoder_sharing": None}
    initialize.add_defaults(compose("language_modeling", **{"common.fp16": False}, **listed))
    initialize.add_defaults(compose("translation", **{"common.fp16": False}, **settings, **unshared))


@pytest.mark.parametrize(("name", "way"), [("speech_to_text", "fully_sharded"), ("language_modeling", "fp16 --cpu")])
def test_a_refused_training_leaves_nothing(name, way, tmp_path):
    """The command itself, with a shipped YAML: the sentence comes last, and before --save-dir is made."""
    settings = {"common.fp16": False, "common.cpu": True, **WAYS[way][0]}
    output = run(
        [
            *("fairseq-hydra-train", "--config-dir", REPOSITORY / "examples" / name / "config"),
            *("--config-name", FAMILIES[name].config, f"task.data={tmp_path}", f"hydra.run.dir={tmp_path}/hydra"),
            *(f"{key}={str(value).lower()}" for key, value in settings.items()),
            f"checkpoint.save_dir={tmp_path}/save",
        ],
        cwd=REPOSITORY,
        check=False,
    )
    *_, last = (line for line in output.splitlines() if line and "HYDRA_FULL_ERROR" not in line)
    assert last.startswith(f"ValueError: {WAYS[way][1].partition('{')[0]}")
    assert not (tmp_path / "save").exists()


def test_every_shipped_configuration_is_trained_here():
    shipped = {(path.parent.parent.name, path.stem) for path in (REPOSITORY / "examples").glob("*/config/*.yaml")}
    assert shipped == {*((name, family.config) for name, family in FAMILIES.items()), ("masked_lm", "albert_small")}
