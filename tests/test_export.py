"""`fairseq-sharing export` and `import`: what other programs compute from the files, and how both commands fail."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import environment
from conftest import FOUR_FROM_TWO, PLUGIN, REPOSITORY, TINY, run, train_command
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import build_model
from fairseq.models.roberta import RobertaModel
from fairseq.modules.gelu import gelu_accurate
from omegaconf import OmegaConf

from fairseq_sharing.checkpoint import RECORD
from fairseq_sharing.models.albert_encoder import AlbertEncoderModel, gelu_tanh
from fairseq_sharing.models.transformer_shared import SharedTransformerModel
from fairseq_sharing.tools import benchmark
from fairseq_sharing.tools.hf_albert import find_groups, order_of_groups
from fairseq_sharing.tools.main import main
from fairseq_sharing.tools.model import filler_dictionary
from fairseq_sharing.tools.trained import load_trained

REV = "transformer_shared_cycle_rev"
ALBERT = [
    *("--encoder-embed-dim", "32", "--encoder-ffn-embed-dim", "48", "--encoder-attention-heads", "4"),
    *("--encoder-layers", "4", "--factorized-embed-dim", "16", "--max-positions", "64"),
]
AS_ROBERTA = ["--factorized-embed-dim", "32", "--layernorm-eps", "1e-5"]
QUICK = ["--max-update", "8", "--no-epoch-checkpoints", "--disable-validation", "--num-workers", "0"]
ODD_TEXTS = [
    *("", " ", "  a  b ", "tab\there", "\u2581x", "x\u2581y", "\u2661\u2665 hearts", "\ufb01 ligature", "e\u0301 \xe9"),
    *(
        "a\xa0b",
        "a\u200bb",
        "\u65e5\u672c\u8a9e",
        "\U0001f600\U0001f600 a",
        "A" * 50,
        "\xbd \u2122",
        "\x00x",
        "madeupword0000 x",
    ),
]


# --- trained checkpoints ---


def preprocess_monolingual(prefixes: dict, destination) -> Path:
    parts = [word for part, path in prefixes.items() for word in (f"--{part}pref", path)]
    run(["fairseq-preprocess", "--only-source", *parts, "--destdir", destination])
    return destination


@pytest.fixture(scope="module")
def translation(data, tmp_path_factory):
    """A shared translation model that knows which words are frequent."""
    folder = tmp_path_factory.mktemp("translation")
    flags = [*FOUR_FROM_TWO, "--encoder-normalize-before", "--decoder-normalize-before", "--dropout", "0"]
    run(train_command(data, folder, REV, *flags, *QUICK, "--max-update", "30"))
    return SimpleNamespace(path=folder / "checkpoint_last.pt", data=data, spm=data.parent / "spm.model")


@pytest.fixture(scope="module")
def factorized(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("factorized")
    run(train_command(data, folder, REV, *FOUR_FROM_TWO, "--factorized-embed-dim", "16", *QUICK))
    return SimpleNamespace(path=folder / "checkpoint_last.pt", data=data, spm=data.parent / "spm.model")


@pytest.fixture(scope="module")
def language_model(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("language_model")
    prefixes = {part: data.parent / f"{part}.spm.en" for part in ("train", "valid", "test")}
    binary = preprocess_monolingual(prefixes, folder / "bin")
    run(
        [
            *("fairseq-train", binary, "--user-dir", PLUGIN, "--task", "language_modeling", "--cpu", *QUICK),
            *("--arch", "transformer_lm_shared_cycle_rev", "--decoder-layers", "4", "--decoder-unique-layers", "2"),
            *("--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "64", "--decoder-attention-heads", "4"),
            *("--factorized-embed-dim", "16", "--share-decoder-input-output-embed", "--tokens-per-sample", "128"),
            *("--sample-break-mode", "eos", "--max-tokens", "1200", "--optimizer", "adam", "--lr", "3e-3"),
            *("--save-dir", folder),
        ]
    )
    return SimpleNamespace(path=folder / "checkpoint_last.pt", data=binary, spm=data.parent / "spm.model")


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speech")
    clips = REPOSITORY / "examples" / "speech_to_text" / "data"
    rows = (clips / "train.tsv").read_text("utf-8").splitlines(keepends=True)[:5]
    (folder / "four.tsv").write_text("".join(rows), encoding="utf-8")
    script = [sys.executable, REPOSITORY / "scripts" / "prepare_speech.py", "--audio-root", clips]
    parts = [word for part in ("train", "valid", "test") for word in (f"--{part}", folder / "four.tsv")]
    command = [*script, *parts, "--vocab-type", "char", "--out", folder / "data"]
    subprocess.run([*map(str, command)], check=True, capture_output=True)
    run(
        [
            *("fairseq-train", folder / "data", "--user-dir", PLUGIN, "--task", "speech_to_text", "--cpu", *QUICK),
            *("--arch", "s2t_transformer_shared_cycle_rev_s", *FOUR_FROM_TWO, "--share-decoder-input-output-embed"),
            *("--encoder-embed-dim", "32", "--encoder-ffn-embed-dim", "64", "--conv-channels", "32"),
            *("--factorized-embed-dim", "16", "--criterion", "label_smoothed_cross_entropy", "--max-tokens", "4000"),
            *("--optimizer", "adam", "--lr", "2e-3", "--save-dir", folder),
        ]
    )
    return SimpleNamespace(path=folder / "checkpoint_last.pt", data=folder / "data", spm=folder / "data" / "spm.model")


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """A masked language model of four layers from two groups, and the same fine-tuned with a head."""
    folder = tmp_path_factory.mktemp("masked")
    script = [sys.executable, REPOSITORY / "examples" / "masked_lm" / "prepare.py"]
    subprocess.run(
        [*script, "--out", folder, "--vocabulary", "400", "--most-lines", "200"], check=True, capture_output=True
    )
    binary = preprocess_monolingual({part: folder / f"{part}.text" for part in ("train", "valid")}, folder / "bin")
    reviews = folder / "reviews"
    for part in ("input0", "label"):
        dictionary = ["--srcdict", binary / "dict.txt"] if part == "input0" else []
        prefixes = ["--trainpref", folder / f"reviews.train.{part}"]
        prefixes += ["--validpref", folder / f"reviews.valid.{part}"]
        run(["fairseq-preprocess", "--only-source", *prefixes, "--destdir", reviews / part, *dictionary])
    common = [
        *("--user-dir", PLUGIN, "--arch", "albert_encoder", *ALBERT, "--encoder-unique-layers", "2", "--cpu", *QUICK),
        *("--max-positions", "512", "--optimizer", "adam", "--lr", "2e-3", "--max-tokens", "2000"),
    ]
    mlm = [
        "--task",
        "masked_lm",
        "--criterion",
        "masked_lm",
        "--sample-break-mode",
        "eos",
        "--tokens-per-sample",
        "512",
    ]
    run(["fairseq-train", binary, *mlm, *common, "--save-dir", folder / "mlm"])
    classify = [
        *("--task", "sentence_prediction", "--criterion", "sentence_prediction", "--num-classes", "2"),
        *("--init-token", "0", "--classification-head-name", "sentence_classification_head"),
        *("--reset-optimizer", "--reset-dataloader", "--reset-meters"),
    ]
    restore = ["--restore-file", folder / "mlm" / "checkpoint_last.pt"]
    run(["fairseq-train", reviews, *classify, *common, *restore, "--save-dir", folder / "tuned", "--max-update", "4"])
    return SimpleNamespace(
        path=folder / "mlm" / "checkpoint_last.pt",
        tuned=folder / "tuned" / "checkpoint_last.pt",
        data=binary,
        reviews=reviews,
        spm=folder / "spm.model",
        texts=(folder / "reviews.valid.input0").read_text("utf-8").splitlines(),
        flags=[*classify, *common],
    )


def export(trained, target: str, out, *flags, spm: bool = True) -> Path:
    model = ["--sentencepiece-model", trained.spm] if spm else []
    command = ["export", trained.path, "--to", target, "--out", out, "--data", trained.data, *model, *flags]
    assert main(list(map(str, command))) == 0
    return Path(out)


# --- small models without training, for what only their configuration decides ---


def save(path, arch: str, *flags, task: str = "translation", size: int = 40, data=None):
    """Write a checkpoint of a model with random weights, biases and LayerNorms, as fairseq's trainer would."""
    dictionary = filler_dictionary(size)
    if data is None:
        data = Path(path).parent / "dictionaries"
        data.mkdir(exist_ok=True)
        for name in ("dict.txt", "dict.en.txt", "dict.de.txt"):
            lines = [f"{symbol} 1\n" for symbol in dictionary.symbols[4 : -1 if task == "masked_lm" else None]]
            (data / name).write_text("".join(lines))
    languages = ["--source-lang", "en", "--target-lang", "de"] if task == "translation" else []
    arguments = [str(data), "--task", task, *languages, "--arch", arch, *flags]
    args = options.parse_args_and_arch(options.get_training_parser(), arguments)
    cfg = convert_namespace_to_omegaconf(args)
    model = build_model(cfg.model, SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name and name.endswith("weight") else 0.3 * noise)
    saved = {
        name: OmegaConf.to_container(group, resolve=True, enum_to_str=True) if OmegaConf.is_config(group) else group
        for name, group in cfg.items()
    }
    torch.save({"cfg": saved, "model": model.state_dict(), "extra_state": {}}, path)
    return SimpleNamespace(path=path, data=data, model=model.eval(), spm=None)


def save_albert(path, *flags, **more):
    return save(path, "albert_encoder", *ALBERT, "--tokens-per-sample", "64", *flags, task="masked_lm", **more)


def fails(capsys, *argv) -> str:
    """Run a command that must fail with one sentence; return the sentence."""
    assert main(list(map(str, argv))) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.strip().splitlines()) == 1, captured.err
    return captured.err.strip()


def random_tokens() -> torch.Tensor:
    """Return <s> … </s>, the first sentence padded on the right."""
    tokens = torch.randint(4, 40, (3, 9), generator=torch.Generator().manual_seed(0))
    tokens[:, 0], tokens[:, -1] = 0, 2
    tokens[0, -3:] = torch.tensor([2, 1, 1])
    return tokens


# --- fairseq without the plugin ---

STOCK = """
import contextlib, importlib, io, json, logging, sys
logging.getLogger().setLevel(logging.INFO)
sys.modules["fairseq_sharing"] = None  # whoever imports it fails
results = []
for program, *arguments in json.loads(sys.argv[1]):
    sys.argv = [program, *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        handler = logging.StreamHandler(printed)
        logging.getLogger().addHandler(handler)
        if program == "hub":
            from fairseq.models.transformer import TransformerModel
            print("\\n".join(TransformerModel.from_pretrained(arguments[0]).translate(arguments[1:], beam=3)))
        else:
            importlib.import_module("fairseq_cli." + program.removeprefix("fairseq-").replace("-", "_")).cli_main()
        logging.getLogger().removeHandler(handler)
    results.append(printed.getvalue())
sys.stdout.write(json.dumps(results))
"""


def run_stock(*commands) -> list[str]:
    """Run fairseq's commands, one after the other, in a process that cannot import the plugin."""
    words = json.dumps([[str(word) for word in command] for command in commands])
    env = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", STOCK, words], capture_output=True, text=True, env=env, cwd=PLUGIN.anchor
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout[done.stdout.index('["') :])


def hypotheses(output: str) -> dict[int, tuple[float, str]]:
    found = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", output, re.MULTILINE)
    return {int(number): (float(score), text) for number, score, text in found}


def test_stock_fairseq_computes_the_same(translation, factorized, language_model, speech, tmp_path):
    """Identical where nothing is multiplied out; elsewhere the same text, and scores up to rounding."""
    models = {"translation": translation, "factorized": factorized, "lm": language_model, "speech": speech}
    plain = {name: export(model, "fairseq", tmp_path / name) for name, model in models.items()}
    decode = ["--cpu", "--num-workers", "0", "--required-batch-size-multiple", "1", "--max-len-b", "15", "--beam", "3"]
    commands = {
        "translation": ["fairseq-generate", translation.data, *decode],
        "factorized": ["fairseq-generate", factorized.data, *decode],
        "lm": ["fairseq-eval-lm", language_model.data, "--cpu", "--num-workers", "0", "--tokens-per-sample", "64"],
        "speech": ["fairseq-generate", speech.data, "--task", "speech_to_text", "--max-tokens", "9000", *decode],
    }
    texts = ["Select the cell.", "Show references in color"]
    *stock, hub = run_stock(
        *([*command, "--path", plain[name] / "model.pt"] for name, command in commands.items()),
        ["hub", plain["translation"], *texts],
    )
    stock = dict(zip(commands, stock, strict=True))
    ours = {
        name: run([*command, "--user-dir", PLUGIN, "--path", models[name].path]) for name, command in commands.items()
    }
    assert len(hypotheses(ours["translation"])) == 30 and hypotheses(ours["translation"]) == hypotheses(
        stock["translation"]
    )
    for name in ("factorized", "speech"):
        one, other = hypotheses(ours[name]), hypotheses(stock[name])
        assert {number: text for number, (_, text) in one.items()} == {
            number: text for number, (_, text) in other.items()
        }
        assert one and all(abs(one[number][0] - other[number][0]) < 1e-4 for number in one)
    losses = [re.search(r"Loss \(base 2\): (\S+), Perplexity: (\S+)", output) for output in (ours["lm"], stock["lm"])]
    assert losses[0][0] == losses[1][0]
    shared = SharedTransformerModel.from_pretrained(
        *(str(translation.path.parent), translation.path.name, str(translation.data)),
        bpe="sentencepiece",
        sentencepiece_model=str(translation.spm),
    )
    assert hub.splitlines()[-2:] == shared.translate(texts, beam=3)
    assert sorted(path.name for path in plain["speech"].iterdir()) == [
        *("config.yaml", "dict.txt", "model.pt", "sentencepiece.bpe.model", "spm.model")
    ]
    settings = (plain["speech"] / "config.yaml").read_text("utf-8")
    assert str(REPOSITORY) not in settings and "audio_root" not in settings


def test_a_plain_checkpoint_is_hardly_larger(translation, tmp_path):
    folder = export(translation, "fairseq", tmp_path / "plain")
    saved = torch.load(folder / "model.pt", weights_only=True)
    assert saved["cfg"]["model"]["_name"] == "transformer" and saved["cfg"]["common"]["user_dir"] is None
    assert not [name for name in saved["model"] if RECORD in name]
    assert "sharing" not in json.dumps(saved["cfg"]) and "factorized" not in json.dumps(saved["cfg"])
    unique = {tensor.data_ptr(): tensor.numel() for tensor in saved["model"].values()}
    ours = torch.load(translation.path, weights_only=True)["model"]
    expected = {tensor.data_ptr(): tensor.numel() for tensor in ours.values() if tensor.is_floating_point()}
    assert sum(unique.values()) == sum(expected.values())


def test_a_language_model_with_adaptive_softmax_is_exported(tmp_path):
    flags = [
        "--decoder-layers",
        "2",
        "--decoder-unique-layers",
        "1",
        "--decoder-embed-dim",
        "16",
        "--tokens-per-sample",
        "9",
    ]
    adaptive = ["--adaptive-input", "--adaptive-input-cutoff", "10,20", "--adaptive-softmax-cutoff", "10,20"]
    flags += ["--decoder-attention-heads", "2", "--decoder-input-dim", "16", "--decoder-output-dim", "16"]
    lm = save(tmp_path / "lm.pt", "transformer_lm_shared_sequence", *flags, *adaptive, task="language_modeling")
    folder = export(lm, "fairseq", tmp_path / "plain", spm=False)
    saved = torch.load(folder / "model.pt", weights_only=True)
    assert "decoder.layers.1.fc1.weight" in saved["model"] and saved["cfg"]["model"]["_name"] == "transformer_lm"


def test_roberta(tmp_path, capsys):
    albert = save_albert(tmp_path / "albert.pt", *AS_ROBERTA, "--encoder-unique-layers", "2")
    folder = export(albert, "fairseq", tmp_path / "roberta", spm=False)
    hub = RobertaModel.from_pretrained(str(folder), bpe=None)
    assert type(hub.model) is RobertaModel
    expected = albert.model(random_tokens())[0]
    torch.testing.assert_close(hub.eval().model(random_tokens())[0], expected)
    for module in hub.model.modules():  # by the same kernel for the activation, exactly
        if hasattr(module, "activation_fn"):
            assert module.activation_fn is gelu_accurate
            module.activation_fn = gelu_tanh
    assert torch.equal(hub.model(random_tokens())[0], expected)
    command = ["export", tmp_path / "narrow.pt", "--to", "fairseq", "--out", tmp_path / "no"]
    save_albert(tmp_path / "narrow.pt")
    capsys.readouterr()
    sentence = fails(capsys, *command)
    assert "--factorized-embed-dim 16 and --encoder-embed-dim 32" in sentence and "LayerNorm" in sentence
    save_albert(tmp_path / "narrow.pt", "--factorized-embed-dim", "32")
    assert "--layernorm-eps 1e-12, and that of RoBERTa is 1e-05" in fails(capsys, *command)


# --- CTranslate2 ---


def fairseq_scores(model, pairs: list[tuple[list[int], list[int]]]) -> list[torch.Tensor]:
    """Return the log-probability of each target symbol, ``</s>`` included."""
    scores = []
    for source, target in pairs:
        target = torch.tensor([target])
        inputs = torch.cat([target[:, -1:], target[:, :-1]], 1)
        with torch.no_grad():
            logits, _ = model(torch.tensor([source]), torch.tensor([len(source)]), inputs)
        scores.append(logits.log_softmax(-1)[0].gather(1, target[0, :, None])[:, 0])
    return scores


@pytest.mark.parametrize("kind", ["translation", "factorized"])
def test_ctranslate2_gives_every_symbol_its_probability(kind, request, tmp_path):
    ctranslate2 = pytest.importorskip("ctranslate2")
    trained = request.getfixturevalue(kind)
    folder = export(trained, "ctranslate2", tmp_path / "ct2")
    hub = SharedTransformerModel.from_pretrained(str(trained.path.parent), trained.path.name, str(trained.data))
    lines = [
        (trained.data.parent / f"test.spm.{language}").read_text("utf-8").splitlines() for language in ("en", "de")
    ]
    dictionary = hub.task.source_dictionary
    pairs = [
        tuple(dictionary.encode_line(side, add_if_not_exist=False).tolist() for side in pair)
        for pair in zip(*lines, strict=True)
    ]
    translator = ctranslate2.Translator(str(folder), device="cpu", inter_threads=1, intra_threads=1)
    found = translator.score_batch(*([side.split() for side in language] for language in lines))
    for ours, theirs in zip(fairseq_scores(hub.models[0], pairs), found, strict=True):
        assert (ours - torch.tensor(theirs.log_probs)).abs().max() < 1e-4


def test_ctranslate2_decodes_like_fairseq_generate(translation, tmp_path, capsys, monkeypatch):
    """The command's own benchmark, one round and short translations; a well-trained model has the slow test."""
    pytest.importorskip("ctranslate2")
    monkeypatch.setattr(benchmark, "ROUNDS", 1)
    monkeypatch.setattr(benchmark, "LONGEST", 15)
    export(translation, "ctranslate2", tmp_path / "ct2", "--benchmark", "test", "--beam", "2")
    printed = capsys.readouterr().out
    assert re.search(r"test: 30 sentences, beam 2, batches of 64, 1 thread, float32; median of 1 round", printed)
    assert int(re.search(r"(\d+) of 30 translations are equal", printed)[1]) >= 29
    rows = dict(re.findall(r"^(fairseq-generate|ctranslate2) +([\d,]+) ", printed, re.MULTILINE))
    assert rows["ctranslate2"] == f"{(tmp_path / 'ct2' / 'model.bin').stat().st_size:,}"


def test_ctranslate2_stores_shared_tensors_once(translation, tmp_path):
    ctranslate2 = pytest.importorskip("ctranslate2")
    ours = torch.load(translation.path, weights_only=True)["model"]
    unique = {tensor.data_ptr(): tensor.numel() for tensor in ours.values() if tensor.numel() > 1}
    positions = 1024 * 64  # computed once, written once for both stacks
    sizes = {}
    for kind in ("float32", "int8", "int8_float16"):
        folder = export(translation, "ctranslate2", tmp_path / kind, "--quantization", kind)
        sizes[kind] = (folder / "model.bin").stat().st_size
        translator = ctranslate2.Translator(str(folder), device="cpu", inter_threads=1, intra_threads=1)
        assert translator.translate_batch([["\u2581the"]], max_decoding_length=3)[0].hypotheses
    expected = 4 * (sum(unique.values()) + positions)
    assert expected < sizes["float32"] < expected + 20_000  # names, and sinusoids of symbols beyond the last position
    assert sizes["int8_float16"] < sizes["int8"] < sizes["float32"] / 2
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "model.bin", "sentencepiece.bpe.model", "shared_vocabulary.json")
    }


def test_ctranslate2_scores_a_language_model(language_model, tmp_path):
    ctranslate2 = pytest.importorskip("ctranslate2")
    from fairseq.models.transformer_lm import TransformerLanguageModel

    folder = export(language_model, "ctranslate2", tmp_path / "ct2")
    hub = TransformerLanguageModel.from_pretrained(
        str(language_model.path.parent), language_model.path.name, str(language_model.data)
    )
    pieces = hub.task.source_dictionary.symbols[10:20]
    generator = ctranslate2.Generator(str(folder), device="cpu", inter_threads=1, intra_threads=1)
    found = generator.score_batch([["</s>", *pieces]])[0].log_probs
    tokens = torch.tensor([[2, *range(10, 20)]])
    with torch.no_grad():
        logits = hub.models[0](tokens[:, :-1])[0]
    expected = logits.log_softmax(-1)[0].gather(1, tokens[0, 1:, None])[:, 0]
    assert (expected - torch.tensor(found)).abs().max() < 1e-4


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small translation model, loaded as the exporters load it."""
    folder = tmp_path_factory.mktemp("small")
    return load_trained(str(save(folder / "small.pt", REV, *TINY, *FOUR_FROM_TWO).path))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"adaptive_softmax_cutoff": "10,20"}, "--adaptive-softmax-cutoff"),
        ({"no_token_positional_embeddings": True}, "--no-token-positional-embeddings"),
        ({"cross_self_attention": True}, "--cross-self-attention"),
        ({"no_cross_attention": True}, "--no-cross-attention"),
        ({"activation_fn": "tanh"}, "--activation-fn tanh"),
        ({"decoder_attention_heads": 4}, "--encoder-attention-heads 2 and --decoder-attention-heads 4"),
        ({"encoder_normalize_before": True}, "--encoder-normalize-before True and --decoder-normalize-before False"),
        ({"decoder_normalize_before": True, "no_decoder_final_norm": True}, "--no-decoder-final-norm"),
        ({"decoder_output_dim": 8}, "--decoder-output-dim 8 and --decoder-embed-dim 16"),
    ],
)
def test_ctranslate2_refuses_what_it_cannot_hold(changes, sentence, small, monkeypatch):
    from fairseq_sharing.tools.export_ctranslate2 import check

    check(small)
    for name, value in changes.items():
        monkeypatch.setattr(small.config, name, value, raising=False)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        check(small)


def test_ctranslate2_refuses_modules_that_its_converter_would_not_see(tmp_path, capsys):
    pytest.importorskip("ctranslate2")
    noise = ["--quant-noise-pq", "0.1", "--quant-noise-pq-block-size", "4"]
    unshared = ["--encoder-sharing", "none", "--decoder-sharing", "none"]  # noise and sharing exclude each other
    model = save(tmp_path / "a.pt", REV, *TINY, *unshared, *noise)
    capsys.readouterr()
    command = ["export", model.path, "--to", "ctranslate2", "--out", tmp_path / "ct2", "--data", model.data]
    assert "has encoder.quant_noise.weight, for which CTranslate2 has no place" in fails(capsys, *command)
    assert not (tmp_path / "ct2").exists()


def test_ctranslate2_refuses_other_families(speech, masked, tmp_path, capsys):
    pytest.importorskip("ctranslate2")
    for path, family in ((speech.path, "speech"), (masked.path, "masked language")):
        sentence = fails(capsys, "export", path, "--to", "ctranslate2", "--out", tmp_path / "no")
        assert f"is a {family} model; CTranslate2 takes fairseq's translation and language models" in sentence


# --- Hugging Face's ALBERT ---


def huggingface(folder, name: str = "AlbertForMaskedLM"):
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    return getattr(transformers, name).from_pretrained(str(folder)).eval()


def load_hub(masked, path, data):
    return AlbertEncoderModel.from_pretrained(
        *(str(path.parent), path.name, str(data)), bpe="sentencepiece", sentencepiece_model=str(masked.spm)
    ).eval()


def test_hugging_face_reads_the_same_text_alike(masked, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = export(masked, "hf-albert", tmp_path / "albert")
    assert json.loads((folder / "config.json").read_text())["num_hidden_groups"] == 2
    hub, tokenizer = load_hub(masked, masked.path, masked.data), transformers.AutoTokenizer.from_pretrained(str(folder))
    pieces = [text.replace(" ", "").replace("\u2581", " ") for text in masked.texts]
    for text in [*pieces, *ODD_TEXTS]:
        assert tokenizer(text).input_ids == hub.encode(text).tolist(), repr(text)
    assert tokenizer("Save it.", "Close it.").input_ids == hub.encode("Save it.", "Close it.").tolist()
    assert tokenizer.decode(hub.encode("save the file.")[1:-1]) == "save the file."
    model, encoder = huggingface(folder), huggingface(folder, "AlbertModel")
    batch = tokenizer(pieces[:8], padding=True, return_tensors="pt")
    with torch.no_grad():
        logits, features = model(**batch).logits, encoder(**batch).last_hidden_state
        for row, text in enumerate(pieces[:8]):
            tokens = hub.encode(text)
            assert (hub.model(tokens[None])[0][0] - logits[row, : len(tokens)]).abs().max() < 1e-4
            assert (hub.extract_features(tokens)[0] - features[row, : len(tokens)]).abs().max() < 1e-4
        filled = tokenizer("Select the <mask> cell.", return_tensors="pt")
        place = filled.input_ids[0].tolist().index(tokenizer.mask_token_id)
        chances, best = model(**filled).logits[0, place].softmax(-1).topk(5)
    expected = {piece: chance for _, chance, piece in hub.fill_mask("Select the <mask> cell.", topk=5)}
    for chance, symbol in zip(chances.tolist(), best.tolist(), strict=True):
        piece = hub.task.source_dictionary[symbol].replace("\u2581", " ")
        assert symbol < 4 or abs(expected[piece] - chance) < 1e-4


def test_hugging_face_classifies_alike(masked, tmp_path):
    transformers = pytest.importorskip("transformers")
    tuned = SimpleNamespace(path=masked.tuned, data=masked.reviews, spm=masked.spm)
    folder = export(tuned, "hf-albert", tmp_path / "albert")
    hub, tokenizer = (
        load_hub(masked, masked.tuned, masked.reviews),
        transformers.AutoTokenizer.from_pretrained(str(folder)),
    )
    model = huggingface(folder, "AlbertForSequenceClassification")
    labels = [hub.task.label_dictionary[number + 4] for number in range(2)]
    assert list(model.config.id2label.values()) == labels
    for text in ("A good film.", "I did not like it at all, and left."):
        with torch.no_grad():
            theirs = model(**tokenizer(text, return_tensors="pt")).logits
            ours = hub.predict("sentence_classification_head", hub.encode(text), return_logits=True)
        assert (ours - theirs).abs().max() < 1e-4


def test_a_classifier_keeps_its_head(masked, tmp_path, capsys):
    """Whether fairseq-train or fairseq-hydra-train wrote the checkpoint, which differ in the configuration's type."""
    state = torch.load(masked.tuned, weights_only=True)
    arguments = state["cfg"]["model"]
    state["cfg"]["model"] = {key: value for key, value in vars(arguments).items() if key != "load_checkpoint_heads"}
    torch.save(state, tmp_path / "hydra.pt")
    heads = {key: value for key, value in state["model"].items() if key.startswith("classification_heads.")}
    assert heads
    for path in (masked.tuned, tmp_path / "hydra.pt"):
        tuned = SimpleNamespace(path=path, data=masked.reviews, spm=masked.spm)
        folder = export(tuned, "hf-albert", tmp_path / path.stem)
        assert json.loads((folder / "config.json").read_text())["architectures"] == ["AlbertForSequenceClassification"]
        untied, again = tmp_path / f"{path.stem}-untied.pt", tmp_path / f"{path.stem}-again.pt"
        assert main(["untie", "--from", str(path), "--out", str(untied)]) == 0
        flags = ["--arch", "albert_encoder", *ALBERT, "--encoder-unique-layers", "1", "--max-positions", "512"]
        assert main(["init", "--from", str(untied), "--rule", "mean", "--out", str(again), *map(str, flags)]) == 0
        for written in (untied, again):
            model = torch.load(written, weights_only=True)["model"]
            assert all(torch.equal(model[key], value) for key, value in heads.items())


def assert_twins(ours, folder) -> None:
    """Compare a fairseq model with what Hugging Face loads from a folder."""
    tokens = random_tokens()
    real = tokens.ne(1)
    twin = huggingface(folder)
    with torch.no_grad():
        logits = ours(tokens)[0]
        theirs = twin(input_ids=tokens, attention_mask=real.long()).logits[..., :40]
    assert logits.std() > 0.1 and (logits - theirs)[real].abs().max() < 1e-4


@pytest.mark.parametrize(
    ("flags", "groups"),
    [
        (["--encoder-unique-layers", "2"], (4, 2, 1)),
        (["--encoder-sharing", "none"], (4, 4, 1)),
        (["--encoder-sharing", "cycle", "--encoder-unique-layers", "2"], (2, 1, 2)),
        (["--factorized-embed-dim", "32"], (4, 1, 1)),
        (["--untie-weights-roberta"], (4, 1, 1)),
        (["--activation-fn", "gelu", "--layernorm-eps", "1e-3"], (4, 1, 1)),
    ],
)
def test_hugging_face_computes_the_same(flags, groups, tmp_path):
    albert = save_albert(tmp_path / "albert.pt", *flags)
    folder = export(albert, "hf-albert", tmp_path / "hf", spm=False)
    config = json.loads((folder / "config.json").read_text())
    assert groups == tuple(config[name] for name in ("num_hidden_layers", "num_hidden_groups", "inner_group_num"))
    assert_twins(albert.model, folder)


@pytest.mark.parametrize(
    "flags",
    [
        ["--encoder-sharing", "cycle_rev", "--encoder-unique-layers", "2"],
        ["--sharing-parts", "attention"],
    ],
)
def test_what_groups_cannot_say_is_refused_or_written_unshared(flags, tmp_path, capsys):
    albert = save_albert(tmp_path / "albert.pt", *flags)
    capsys.readouterr()
    command = ["export", albert.path, "--to", "hf-albert", "--out", tmp_path / "hf", "--data", albert.data]
    assert "num_hidden_groups and inner_group_num of Hugging Face cannot say: --unshare" in fails(capsys, *command)
    folder = export(albert, "hf-albert", tmp_path / "hf", "--unshare", spm=False)
    assert json.loads((folder / "config.json").read_text())["num_hidden_groups"] == 4
    assert_twins(albert.model, folder)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"encoder_normalize_before": True}, "--encoder-normalize-before"),
        ({"activation_fn": "relu_squared"}, "--activation-fn relu_squared"),
    ],
)
def test_hugging_face_has_no_place_for(changes, sentence, masked, monkeypatch):
    from fairseq_sharing.tools.export_hf_albert import check

    trained = load_trained(str(masked.path))
    check(trained)
    vars(trained.config).update(changes)
    with pytest.raises(ValueError, match=sentence):
        check(trained)


def test_the_head_to_write(masked, tmp_path, capsys):
    from fairseq_sharing.tools.export_hf_albert import choose_head

    trained = load_trained(str(masked.tuned))
    assert choose_head(trained, None) == "sentence_classification_head"
    trained.model.register_classification_head("other", num_classes=3)
    trained.model.register_classification_head("narrow", num_classes=3, inner_dim=5)
    assert choose_head(trained, "other") == "other"
    for name, sentence in (
        (None, "says which of"),
        ("none", "has sentence_classification_head"),
        ("narrow", "width 5"),
    ):
        with pytest.raises(ValueError, match=sentence):
            choose_head(trained, name)


def test_groups_are_said_as_hugging_face_uses_them():
    for owners in ([0, 0, 2, 2, 4, 4], [0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 4, 5, 4, 5], [0] * 5, list(range(7))):
        groups = find_groups(owners)
        order = order_of_groups(len(owners) // len(groups[0]), len(groups))
        assert [layer for group in order for layer in groups[group]] == owners
        assert len(groups) * len(groups[0]) == len(set(owners))
    assert find_groups([0, 1, 2, 2, 1, 0]) is None and find_groups([0, 0, 0, 3]) is None


TRAINERS = {
    "unigram": {"model_type": "unigram"},
    "bpe": {"model_type": "bpe"},
    "lower case": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc_cf"},
    "bytes": {"model_type": "unigram", "byte_fallback": True, "vocab_size": 560},
    "whole words": {"model_type": "bpe", "user_defined_symbols": ["<sep>", "LibreOffice"]},
    "spaces kept": {"model_type": "unigram", "remove_extra_whitespaces": False},
    "no prefix": {"model_type": "unigram", "add_dummy_prefix": False},
}


@pytest.mark.parametrize("name", TRAINERS)
def test_the_tokenizer_cuts_like_sentencepiece(name, data, tmp_path):
    """Every tenth piece is missing from the dictionary: fairseq reads it as <unk>, but it is cut all the same."""
    pytest.importorskip("tokenizers")
    import sentencepiece

    from fairseq_sharing.tools.hf_tokenizer import build_tokenizer

    settings = {"vocab_size": 300, "hard_vocab_limit": False, "minloglevel": 2, **TRAINERS[name]}
    prefix = tmp_path / "spm"
    sentencepiece.SentencePieceTrainer.train(input=str(data.parent / "train.en"), model_prefix=str(prefix), **settings)
    model = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    pieces = [model.id_to_piece(number) for number in range(len(model)) if not model.is_control(number)]
    known = [piece for number, piece in enumerate(pieces) if piece != "<unk>" and number % 10]
    symbols = ["<s>", "<pad>", "</s>", "<unk>", *known, "madeupword0000", "<mask>"]
    tokenizer, unread = build_tokenizer(f"{prefix}.model", symbols)
    assert len(unread) > 10
    places = {symbol: place for place, symbol in enumerate(symbols)}
    texts = (data.parent / "test.en").read_text("utf-8").splitlines()
    for text in [*texts, *ODD_TEXTS, "a <sep>b LibreOffices", "  two  spaces  "]:
        expected = [0, *(places.get(piece, 3) for piece in model.encode(text, out_type=str)), 2]
        found = [number if number < len(symbols) else 3 for number in tokenizer.encode(text).ids]
        assert found == expected, (text, model.encode(text, out_type=str), tokenizer.encode(text).tokens)


def test_pieces_that_the_dictionary_lacks_read_as_unknown(masked, tmp_path):
    """A dictionary of a few pieces: Hugging Face's logits are those that fairseq computes from <unk>."""
    transformers = pytest.importorskip("transformers")
    symbols = (masked.data / "dict.txt").read_text("utf-8").splitlines()[:60]
    folder = tmp_path / "few"
    folder.mkdir()
    (folder / "dict.txt").write_text("\n".join(symbols) + "\n", encoding="utf-8")
    albert = save_albert(tmp_path / "albert.pt", size=65, data=folder)
    albert.spm = masked.spm
    out = export(albert, "hf-albert", tmp_path / "hf")
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(str(out)), huggingface(out)
    text = masked.texts[0].replace(" ", "").replace("\u2581", " ")
    dictionary = [*("<s>", "<pad>", "</s>", "<unk>"), *(line.split()[0] for line in symbols)]
    pieces = masked.texts[0].split()[:60]
    tokens = [0, *(dictionary.index(piece) if piece in dictionary else 3 for piece in pieces), 2]
    batch = tokenizer(text, return_tensors="pt")
    batch = {name: torch.cat([value[:, :61], value[:, -1:]], 1)[:, : len(tokens)] for name, value in batch.items()}
    assert 3 in tokens and batch["input_ids"].max() >= 65
    with torch.no_grad():
        ours, theirs = albert.model(torch.tensor([tokens]))[0], model(**batch).logits
    assert (ours - theirs[..., :65]).abs().max() < 1e-4
    assert theirs[..., 65:].max() < -1000


# --- import ---


@pytest.fixture(scope="module")
def published(data, tmp_path_factory):
    """The published layout of ALBERT v2: config.json, spiece.model with its own ids, and weights, here random ones."""
    transformers = pytest.importorskip("transformers")
    import sentencepiece

    folder = tmp_path_factory.mktemp("published")
    sentencepiece.SentencePieceTrainer.train(
        **{"input": str(data.parent / "train.en"), "model_prefix": str(folder / "spiece"), "vocab_size": 300},
        **{"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "hard_vocab_limit": False, "minloglevel": 2},
        control_symbols=["[CLS]", "[SEP]"],
        user_defined_symbols=["[MASK]"],
    )
    config = transformers.AlbertConfig(
        **{"vocab_size": 310, "embedding_size": 16, "hidden_size": 32, "intermediate_size": 48},
        **{"num_hidden_layers": 4, "num_hidden_groups": 2, "num_attention_heads": 4, "max_position_embeddings": 64},
    )
    return SimpleNamespace(spiece=folder / "spiece.model", config=config)


def write_published(published, folder, kind: str, binary: bool = False):
    import shutil

    import transformers

    torch.manual_seed(5)
    model = getattr(transformers, kind)(published.config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape) if "norm" not in name.lower() else 0.1)
    model.save_pretrained(folder)
    if binary:
        (folder / "model.safetensors").unlink()
        weights = {**model.state_dict(), "albert.embeddings.position_ids": torch.arange(64)[None]}
        torch.save(weights, folder / "pytorch_model.bin")
    shutil.copyfile(published.spiece, folder / "spiece.model")
    return model


def import_hf(folder, out) -> Path:
    assert main(["import", str(folder), "--from", "hf-albert", "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize(
    "kind", ["AlbertForPreTraining", "AlbertForMaskedLM", "AlbertModel", "AlbertForSequenceClassification"]
)
def test_import_computes_the_same(kind, published, tmp_path, capsys):
    import sentencepiece

    theirs = write_published(published, tmp_path / "hf", kind, binary=kind == "AlbertForPreTraining")
    out = import_hf(tmp_path / "hf", tmp_path / "out")
    printed = capsys.readouterr().out
    assert ("left out: albert.pooler.bias" in printed) == (kind in ("AlbertForPreTraining", "AlbertModel"))
    assert "--encoder-unique-layers 2" in printed and "must become lower case and lose its accents" in printed
    hub = AlbertEncoderModel.from_pretrained(
        str(out), bpe="sentencepiece", sentencepiece_model=str(out / "sentencepiece.bpe.model")
    ).eval()
    spm = sentencepiece.SentencePieceProcessor(model_file=str(published.spiece))
    for text in ("select the cell and press", "a document"):
        ids = torch.tensor([[spm.piece_to_id("[CLS]"), *spm.encode(text), spm.piece_to_id("[SEP]")]])
        tokens = hub.encode(text)
        assert len(tokens) == ids.shape[1]
        with torch.no_grad():
            if kind == "AlbertForSequenceClassification":
                ours = hub.predict("sentence_classification_head", tokens, return_logits=True)
                assert (ours - theirs(ids).logits).abs().max() < 1e-4
                continue
            encoder = theirs if kind == "AlbertModel" else theirs.albert
            difference = hub.extract_features(tokens) - encoder(ids).last_hidden_state
            assert difference.abs().max() < 1e-4
            if kind == "AlbertModel":
                assert "starts from random weights" in printed
                continue
            output = theirs(ids)
            logits = output.logits if "MaskedLM" in kind else output.prediction_logits
            ours = hub.model(tokens[None])[0]
        for place, symbol in enumerate(hub.task.source_dictionary.symbols[4:300], 4):
            if not symbol.startswith(("madeupword", "<mask>")):
                assert (ours[..., place] - logits[..., spm.piece_to_id(symbol)]).abs().max() < 1e-4
        assert (ours[..., -1] - logits[..., spm.piece_to_id("[MASK]")]).abs().max() < 1e-4


def test_there_and_back(masked, tmp_path):
    folder = export(masked, "hf-albert", tmp_path / "hf")
    out = import_hf(folder, tmp_path / "out")
    assert (out / "dict.txt").read_text("utf-8").split()[::2] == (masked.data / "dict.txt").read_text("utf-8").split()[
        ::2
    ]
    before, after = (torch.load(path, weights_only=True)["model"] for path in (masked.path, out / "model.pt"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        first = 2 if "embed_positions" in name else 0  # the rows before the first position are never read
        assert torch.equal(tensor[first:], after[name][first:]), name


@pytest.mark.parametrize(
    "flags", [["--encoder-sharing", "cycle", "--encoder-unique-layers", "2"], ["--untie-weights-roberta"]]
)
def test_there_and_back_without_a_tokenizer_of_ours(flags, tmp_path):
    albert = save_albert(tmp_path / "albert.pt", *flags)
    folder = export(albert, "hf-albert", tmp_path / "hf", spm=False)
    vocabulary = [
        ["<s>", 0],
        ["<pad>", 0],
        ["</s>", 0],
        ["<unk>", 0],
        *([f"symbol{n}", 0] for n in range(35)),
        ["<mask>", 0],
    ]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    roles = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": {"content": "</s>"}, "mask_token": "<mask>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    out = import_hf(folder, tmp_path / "out")
    hub = AlbertEncoderModel.from_pretrained(str(out), bpe=None).eval()
    assert torch.allclose(hub.model(random_tokens())[0], albert.model(random_tokens())[0], atol=1e-5)


def test_fine_tuning_from_an_import(masked, tmp_path):
    """fairseq-train goes on from it, and starts from its weights: a learning rate of 0 leaves the encoder as it was."""
    out = import_hf(export(masked, "hf-albert", tmp_path / "hf"), tmp_path / "out")
    command = ["fairseq-train", masked.reviews, *masked.flags, "--restore-file", out / "model.pt", "--lr", "0"]
    log = run([*command, "--save-dir", tmp_path / "save", "--max-update", "2"])
    assert f"Loaded checkpoint {out / 'model.pt'}" in log
    after = torch.load(tmp_path / "save" / "checkpoint_last.pt", weights_only=True)["model"]
    before = torch.load(out / "model.pt", weights_only=True)["model"]
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


# --- safetensors ---


@pytest.mark.parametrize("kind", ["translation", "language_model", "masked"])
def test_safetensors_there_and_back(kind, request, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    trained = request.getfixturevalue(kind)
    folder = export(trained, "safetensors", tmp_path / "st")
    before = torch.load(trained.path, weights_only=True)
    unique = {tensor.data_ptr() for name, tensor in before["model"].items() if not name.endswith(RECORD)}
    with safetensors.safe_open(str(folder / "model.safetensors"), "pt") as file:
        assert len(file.keys()) == len(unique)
        sharing = json.loads(file.metadata()["sharing"])
    assert all(record["parts"] == ["attention", "ffn", "norm"] for record in sharing.values())
    assert [0, 0, 1, 1] in [record["assignment"] for record in sharing.values()] or kind != "masked"
    for name in (".cache/huggingface/download/x.metadata", "more/notes/notes.txt", "model.pt"):  # as on the hub
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("theirs")
    assert main(["import", str(folder), "--from", "safetensors", "--out", str(tmp_path / "back")]) == 0
    assert (tmp_path / "back/more/notes/notes.txt").is_file() and not (tmp_path / "back/.cache").exists()
    after = torch.load(tmp_path / "back" / "model.pt", weights_only=True)
    assert before["model"].keys() == after["model"].keys()
    for name, tensor in before["model"].items():
        assert torch.equal(tensor, after["model"][name]) and tensor.dtype == after["model"][name].dtype, name
    old, new = before["cfg"]["model"], after["cfg"]["model"]
    assert type(old) is type(new)
    old, new = (model if isinstance(model, dict) else vars(model) for model in (old, new))
    assert {key: (value, new[key]) for key, value in old.items() if value != new[key]} == {}
    assert len({tensor.data_ptr() for tensor in after["model"].values()}) <= len(unique) + len(sharing)
    dictionary = "dict.en.txt" if kind == "translation" else "dict.txt"
    assert (tmp_path / "back" / dictionary).read_bytes() == (trained.data / dictionary).read_bytes()
    assert main(["show", "--path", str(tmp_path / "back" / "model.pt")]) == 0


@pytest.mark.parametrize("beside", [False, True])
def test_dictionaries_are_looked_for_beside_what_was_imported(beside, tmp_path, monkeypatch):
    """Its data folder is recorded as `.`, which is not the one that a command is called in."""
    trained = save(tmp_path / "a.pt", "transformer_shared_cycle", *TINY, *FOUR_FROM_TWO)
    state = torch.load(trained.path, weights_only=True)
    state["cfg"]["task"]["data"] = "."
    (tmp_path / "model").mkdir()
    torch.save(state, tmp_path / "model" / "model.pt")
    for language in ("en", "de"):
        text = (trained.data / f"dict.{language}.txt").read_text()
        if beside:
            (tmp_path / "model" / f"dict.{language}.txt").write_text(text)
        (trained.data / f"dict.{language}.txt").write_text(text.replace("symbol", "other"))
    monkeypatch.chdir(trained.data)
    command = ["export", str(tmp_path / "model" / "model.pt"), "--to", "safetensors", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    found = tmp_path / "out" / "dict.en.txt"
    assert "symbol" in found.read_text() if beside else not found.exists()


# --- mistakes ---


@pytest.mark.parametrize("command", ["export", "import"])
def test_help_has_examples(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0 and f"    fairseq-sharing {command} " in capsys.readouterr().out


def test_mistakes_cost_one_sentence_and_no_file(translation, masked, tmp_path, capsys, monkeypatch):
    out, text, cut = tmp_path / "out", tmp_path / "text.pt", tmp_path / "cut.pt"
    text.write_text("no checkpoint")
    cut.write_bytes(translation.path.read_bytes()[:5000])

    def refused(*flags, path=translation.path, to="fairseq") -> str:
        sentence = fails(capsys, "export", path, "--to", to, "--out", out, *flags)
        assert not [file.name for file in tmp_path.iterdir() if "out" in file.name]
        return sentence

    for to in ("fairseq", "ctranslate2", "hf-albert", "safetensors"):
        assert "there is no file" in refused(path=tmp_path / "missing.pt", to=to)
        assert "no checkpoint" in refused(path=text, to=to)
        assert "truncated" in refused(path=cut, to=to)
    assert "--quantization is for --to ctranslate2, not for --to fairseq" in refused("--quantization", "int8")
    assert "--unshare is for --to hf-albert, not for --to fairseq" in refused("--unshare")
    assert "--beam 2 needs --benchmark" in refused("--beam", "2", to="ctranslate2")
    assert "there is no such folder" in refused("--data", tmp_path / "nowhere")
    assert "does not say its languages" in refused("--data", tmp_path)
    (tmp_path / "test.en-de.en.idx").touch()
    assert "has no dictionary dict.en.txt" in refused("--data", tmp_path)
    assert "only albert_encoder is ALBERT" in refused(to="hf-albert")
    (tmp_path / "dict.en.txt").write_text("a 1\n")
    assert "has 5 symbols, but" in refused("--data", tmp_path)
    assert "is no SentencePiece model" in refused("--sentencepiece-model", text)
    assert "there is no such file" in refused("--sentencepiece-model", tmp_path / "spm.model")
    sentence = refused("--benchmark", "dev", "--data", translation.data, to="ctranslate2")
    assert "--benchmark dev" in sentence and "has no dev.en-de.en.idx" in sentence
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name != "fairseq" else name)
    for to, package in (("ctranslate2", "ctranslate2"), ("hf-albert", "safetensors"), ("safetensors", "safetensors")):
        assert f"--to {to} needs the package {package}: install it with pip install {package}" in refused(to=to)


def test_an_existing_folder_is_kept(translation, tmp_path, capsys):
    out = export(translation, "fairseq", tmp_path / "out")
    first = (out / "model.pt").read_bytes()
    command = ["export", translation.path, "--to", "safetensors", "--out", out]
    capsys.readouterr()
    assert f"--out {out} exists: remove it or add --force" in fails(capsys, *command)
    assert "holds model.pt, which --force would not replace" in fails(capsys, *command, "--force")
    assert (out / "model.pt").read_bytes() == first
    (out / "model.pt").write_text("old")
    export(translation, "fairseq", out, "--force")
    capsys.readouterr()
    assert (out / "model.pt").read_bytes() == first and [path.name for path in tmp_path.iterdir()] == ["out"]
    assert "there is no folder" in fails(capsys, *command[:-1], tmp_path / "no" / "out")
    assert "is a file" in fails(capsys, *command[:-1], out / "model.pt")


@pytest.mark.parametrize("to", ["fairseq", "ctranslate2", "safetensors", "hf-albert"])
def test_a_full_disk_leaves_nothing(to, translation, masked, tmp_path, capsys):
    trained = masked if to == "hf-albert" else translation
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        sentence = fails(capsys, "export", trained.path, "--to", to, "--data", trained.data, "--out", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"cannot write {tmp_path / 'out'}" in sentence and not list(tmp_path.iterdir())


def test_import_refuses(published, translation, tmp_path, capsys):
    folder, out = tmp_path / "hf", tmp_path / "out"

    def refused(source="hf-albert") -> str:
        sentence = fails(capsys, "import", folder, "--from", source, "--out", out)
        assert not out.exists()
        return sentence

    assert "there is no folder" in refused()
    folder.mkdir()
    assert "no config.json of an ALBERT" in refused()
    assert "there is no model.safetensors" in refused("safetensors")
    write_published(published, folder, "AlbertForMaskedLM")
    capsys.readouterr()
    assert "was not written by fairseq-sharing export" in refused("safetensors")
    newer = {"a": torch.ones(1)}, str(folder / "newer.safetensors"), {"fairseq_sharing": "2"}
    pytest.importorskip("safetensors.torch").save_file(*newer)
    theirs = (folder / "model.safetensors").read_bytes()
    (folder / "newer.safetensors").rename(folder / "model.safetensors")
    assert "has format 2, this version of fairseq_sharing reads format 1" in refused("safetensors")
    (folder / "model.safetensors").write_bytes(theirs)
    config = json.loads((folder / "config.json").read_text())
    for change, sentence in (
        ({"hidden_act": "mish"}, "hidden_act mish is none of fairseq's"),
        ({"vocab_size": 20}, "vocab_size is 20"),
        ({"hidden_size": 48}, "config.json makes encoder"),
        ({"num_attention_heads": 5}, "--encoder-embed-dim 32 must be a multiple of --encoder-attention-heads 5"),
        ({"embedding_size": 32}, "the layer between them changes something"),
        ({"model_type": "bert"}, "model_type is bert"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        assert sentence in refused(), change
    (folder / "config.json").write_text("{")
    assert "is no JSON, or truncated" in refused()
    (folder / "config.json").write_text(json.dumps(config))
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:1000])
    assert "truncated" in refused() and "truncated" in refused("safetensors")
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "spiece.model").write_bytes(b"")
    assert "is no SentencePiece model" in refused()
    (folder / "spiece.model").unlink()
    assert "no tokenizer.json or spiece.model" in refused()


# --- a model that translates ---


@pytest.mark.slow
def test_ctranslate2_translates_a_real_test_set_alike(tmp_path, capsys, monkeypatch):
    """At least 99 % of fairseq-generate's translations at beam 1, and its BLEU within 0.1 at beam 5."""
    pytest.importorskip("ctranslate2")
    monkeypatch.setattr(benchmark, "ROUNDS", 1)  # of the times nothing is asked here
    script = REPOSITORY / "examples" / "translation" / "quickstart.sh"
    env = environment(RUN=str(tmp_path / "run"), UPDATES="1000", BEAM="1")
    subprocess.run(["bash", str(script)], check=True, env=env, capture_output=True)
    folder = tmp_path / "run"
    trained = SimpleNamespace(
        path=folder / "checkpoints" / "averaged.pt", data=folder / "data" / "bin", spm=folder / "data" / "spm.model"
    )
    export(trained, "ctranslate2", tmp_path / "one", "--benchmark", "test", "--beam", "1")
    found = re.search(r"([\d,]+) of ([\d,]+) translations are equal", capsys.readouterr().out)
    equal, number = (int(text.replace(",", "")) for text in found.groups())
    assert number > 500 and equal >= 0.99 * number
    export(trained, "ctranslate2", tmp_path / "five", "--benchmark", "test", "--beam", "5")
    scores = re.findall(r"^(?:fairseq-generate|ctranslate2) .* ([\d.]+)$", capsys.readouterr().out, re.MULTILINE)
    ours, theirs = map(float, scores)
    assert ours > 2 and abs(ours - theirs) <= 0.1
