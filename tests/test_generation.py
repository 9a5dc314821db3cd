"""Whatever fairseq decodes with: a shared model gives what the same parameters give unshared, to the last digit.

Each family trains a small model by fairseq-train. Its parameters are then written out for every layer under the name of
fairseq's own architecture, and both are decoded with the same flags: what fairseq prints (texts, scores, alignments)
must be the same. fairseq's commands run in this process, through the functions that the console scripts call.
"""

import contextlib
import copy
import dataclasses
import functools
import importlib
import io
import itertools
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import PLUGIN, REPOSITORY, binarise, run, short_pairs, train_command, write_text
from fairseq import checkpoint_utils, options
from fairseq.dataclass.configs import GenerationConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models.speech_to_text import S2TTransformerModel
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from omegaconf import OmegaConf

from fairseq_sharing import inference
from fairseq_sharing.models.s2t_transformer_shared import SharedS2TTransformerModel
from fairseq_sharing.models.transformer_lm_shared import SharedLanguageModel
from fairseq_sharing.models.transformer_shared import SharedTransformerModel

OWNERS = [0, 1, 1, 0]  # CYCLE (REV) with N = 4, M = 2
DEPTH = ["--decoder-layers", 4, "--decoder-unique-layers", 2]
BOTH = ["--encoder-layers", 4, "--encoder-unique-layers", 2, *DEPTH]
TRAIN = [
    *("--cpu", "--user-dir", PLUGIN, "--optimizer", "adam", "--lr", "5e-3", "--max-tokens", 2000, "--dropout", 0),
    *("--no-progress-bar", "--num-workers", 0, "--no-epoch-checkpoints", "--disable-validation"),
    *("--save-interval", 1000, "--decoder-attention-heads", 2),
]


@dataclasses.dataclass
class Family:
    """A trained model, once shared and once as fairseq's architecture with a copy of each parameter for each layer."""

    data: Path
    shared: Path
    plain: Path
    flags: list
    encoder_attention: bool


def train(data: Path, folder: Path, upstream: str, command: list, *flags) -> Family:
    run(command)
    shared = folder / "checkpoint_last.pt"
    return Family(data, shared, untie(shared, upstream), list(flags), "lm" not in upstream)


def untie(path: Path, architecture: str) -> Path:
    """Write every layer's parameters out, as a checkpoint of fairseq's own model."""
    state = torch.load(path, weights_only=True)
    tensors = {name: value for name, value in state["model"].items() if not name.endswith("sharing_version")}
    for name, value in list(tensors.items()):
        layer = re.match(r"(.*\b(?:transformer_)?layers)\.(\d)\.(.*)", name)
        for index, owner in enumerate(OWNERS if layer else []):
            if owner == int(layer[2]):
                tensors[f"{layer[1]}.{index}.{layer[3]}"] = value.clone()
    model = state["cfg"]["model"]
    settings = model if isinstance(model, dict) else vars(model)
    for name in [name for name in settings if re.search("sharing|unique_layers|assignment|factorized", name)]:
        del settings[name]
    settings["_name"] = settings["arch"] = architecture
    state["model"] = tensors
    target = path.with_name("plain.pt")
    torch.save(state, target)
    return target


@pytest.fixture(scope="module")
def translation(tmp_path_factory) -> Family:
    folder = tmp_path_factory.mktemp("translation")
    pairs = short_pairs(12, most_words=6)
    write_text(folder, train=pairs, valid=pairs, test=pairs)
    data = binarise(folder, vocabulary=100)
    shutil.copy(data / "dict.de.txt", data / "dict.txt")  # where --lm-path looks for its dictionary
    command = train_command(data, folder, "transformer_shared_cycle_rev", *BOTH, *TRAIN, "--max-update", 60)
    pre_ln = ["--encoder-normalize-before", "--decoder-normalize-before"]
    return train(data, folder, "transformer", [*command, *pre_ln], "--max-len-b", 12)


@pytest.fixture(scope="module")
def language_model(translation, tmp_path_factory) -> Family:
    """With the dictionary of the translation's target side, so that it can be fused with it."""
    folder, text = tmp_path_factory.mktemp("lm"), translation.data.parent
    parts = [word for split in ("train", "valid", "test") for word in (f"--{split}pref", text / f"{split}.spm.de")]
    dictionary = ["--srcdict", translation.data / "dict.de.txt", "--destdir", folder / "bin"]
    run(["fairseq-preprocess", "--only-source", *parts, *dictionary])
    command = [
        *("fairseq-train", folder / "bin", "--save-dir", folder, "--task", "language_modeling", *DEPTH, *TRAIN),
        *("--arch", "transformer_lm_shared_cycle_rev", "--sample-break-mode", "eos", "--tokens-per-sample", 64),
        *("--decoder-embed-dim", 32, "--decoder-ffn-embed-dim", 64, "--max-update", 60),
        "--share-decoder-input-output-embed",
    ]
    flags = ["--task", "language_modeling", "--sample-break-mode", "eos", "--max-len-b", 12]
    return train(folder / "bin", folder, "transformer_lm", command, *flags)


@pytest.fixture(scope="module")
def speech(tmp_path_factory) -> Family:
    """Clips that are noise of different lengths; each has a word of its own."""
    folder = tmp_path_factory.mktemp("speech")
    data, generator = folder / "data", np.random.default_rng(0)
    data.mkdir()
    rows, letters = ["id\taudio\tn_frames\ttgt_text\tspeaker"], "abcdefgh"
    for number in range(8):
        frames = 20 + 5 * number
        np.save(data / f"{number}.npy", generator.normal(size=(frames, 8)).astype(np.float32))
        text = " ".join(letters[(number * step) % 8] for step in range(1, 7))
        rows.append(f"clip{number}\t{data / f'{number}.npy'}\t{frames}\t{text}\tme")
    for split in ("train", "valid", "test"):
        (data / f"{split}.tsv").write_text("\n".join(rows) + "\n", "utf-8")
    (data / "dict.txt").write_text("".join(f"{letter} 1\n" for letter in letters), "utf-8")
    (data / "config.yaml").write_text("vocab_filename: dict.txt\ninput_feat_per_channel: 8\n", "utf-8")
    command = [
        *("fairseq-train", data, "--save-dir", folder, "--task", "speech_to_text", *BOTH, *TRAIN),
        *("--arch", "s2t_transformer_shared_cycle_rev_s", "--encoder-embed-dim", 32, "--encoder-ffn-embed-dim", 64),
        *("--encoder-attention-heads", 2, "--conv-channels", 16, "--max-update", 40),
        *("--criterion", "label_smoothed_cross_entropy"),
    ]
    return train(data, folder, "s2t_transformer", command, "--task", "speech_to_text", "--max-len-b", 12)


@pytest.fixture(params=["translation", "language_model", "speech"])
def family(request) -> Family:
    return request.getfixturevalue(request.param)


# --- fairseq's commands in this process ---

PARSERS = {
    "generate": options.get_generation_parser,
    "interactive": options.get_interactive_generation_parser,
    "eval_lm": options.get_eval_lm_parser,
}


@functools.cache  # composing a configuration takes longer than decoding with it
def configure(name: str, *words: str):
    arguments = options.parse_args_and_arch(PARSERS[name](), ["--cpu", "--num-workers", "0", *words])
    return convert_namespace_to_omegaconf(arguments)


def command(name: str, path, *words) -> list[str]:
    """Run fairseq-generate, -interactive or -eval-lm; return what it printed, without times."""
    config = copy.deepcopy(configure(name, *map(str, words)))
    config.common_eval.path = str(path)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        importlib.import_module(f"fairseq_cli.{name}").main(config)
    return [line for line in printed.getvalue().splitlines() if re.match(r"[A-V]-\d|Generate", line)]


def decode(family: Family, path, *flags) -> list[str]:
    return command("generate", path, family.data, *family.flags, "--no-progress-bar", *flags)


def decode_alike(family: Family, *flags) -> list[str]:
    """Decode the shared model; the other must give the same."""
    output = decode(family, family.shared, *flags)
    assert output == decode(family, family.plain, *flags)
    return output


def lines_of(kind: str, output: list[str]) -> list[list[str]]:
    """Return the fields of the lines of a kind (H: hypotheses, P: scores of tokens, A: alignments) by sentence."""
    fields = [line[2:].split("\t") for line in output if line.startswith(f"{kind}-")]
    return sorted(fields, key=lambda field: int(field[0]))


def texts(output: list[str]) -> list[str]:
    return [text for _, _, text in lines_of("D", output)]


# --- every option of fairseq-generate ---

EVERYWHERE = {
    "one beam": ["--beam", 1],
    "five beams": ["--beam", 5, "--nbest", 5, "--no-early-stop", "--no-beamable-mm"],
    "penalties": ["--beam", 3, "--nbest", 2, "--lenpen", 0.3, "--unkpen", 2, "--min-len", 3, "--temperature", 0.7],
    "unnormalized": ["--unnormalized", "--no-repeat-ngram-size", 2, "--batch-size", 3],
    "prefix": ["--prefix-size", 2, "--beam", 3, "--nbest", 3],
    "sampling": ["--sampling", "--beam", 3, "--nbest", 3, "--seed", 7],
    "sampling from the top": ["--sampling", "--sampling-topk", 5, "--beam", 2, "--nbest", 2, "--seed", 7],
    "sampling from a nucleus": ["--sampling", "--sampling-topp", 0.8, "--beam", 2, "--nbest", 2, "--seed", 7],
    "diverse groups": ["--diverse-beam-groups", 2, "--beam", 4, "--nbest", 4, "--batch-size", 4],
    "diverse siblings": ["--diversity-rate", 0.5, "--beam", 3, "--nbest", 3],
    "reference": ["--score-reference"],
}
TEXT_ONLY = {
    "hard alignment": ["--print-alignment", "hard", "--beam", 3, "--nbest", 3],
    "soft alignment": ["--print-alignment", "soft", "--beam", 1],
    "alignment of the reference": ["--score-reference", "--print-alignment"],
    "length of the source": ["--match-source-len", "--beam", 2],
}


QUICK = ("one beam", "prefix", "sampling", "diverse groups")  # for every family in the ordinary suite
WAYS = [
    pytest.param(name, way, marks=[] if name == "translation" or way in QUICK else [pytest.mark.slow])
    for name in ("translation", "language_model", "speech")
    for way in EVERYWHERE
]


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_every_way_to_search_gives_what_the_unshared_model_gives(name, way, request):
    output = decode_alike(request.getfixturevalue(name), *EVERYWHERE[way])
    assert len(set(texts(output))) > 3  # not one text for everything


@pytest.mark.parametrize("name", TEXT_ONLY)
def test_what_needs_a_source_text_gives_what_the_unshared_model_gives(translation, name):
    output = decode_alike(translation, *TEXT_ONLY[name])
    if "alignment" in name:
        assert any(fields[1] for fields in lines_of("A", output))


def test_another_seed_samples_another_text(family):
    """Or the comparison of samples would show nothing."""
    one, other = (decode(family, family.shared, *EVERYWHERE["sampling"][:-1], seed) for seed in (7, 8))
    assert one != other


def test_one_cache_for_two_layers_would_be_caught(translation, monkeypatch):
    """The fault that N layer objects avoid; the scores tell."""
    load = SharedTransformerModel.load_state_dict

    def load_and_merge(self, *args, **kwargs):
        result = load(self, *args, **kwargs)
        self.decoder.layers[3] = self.decoder.layers[0]
        return result

    expected = decode(translation, translation.plain)
    monkeypatch.setattr(SharedTransformerModel, "load_state_dict", load_and_merge)
    assert decode(translation, translation.shared) != expected


def test_models_fused_with_a_language_model(translation, language_model):
    def fused(each, lm):
        return decode(translation, each, "--lm-path", lm, "--lm-weight", 0.5, "--beam", 3)

    output = fused(translation.shared, language_model.shared)
    assert output == fused(translation.plain, language_model.plain)
    assert output != decode(translation, translation.shared, "--beam", 3)


def test_ensembles_of_shared_and_unshared(family):
    """Shared beside plain: the same parameters, so the text of each alone, and to the digit that of plain twice."""
    mixed = decode(family, f"{family.shared}:{family.plain}", "--beam", 2)
    assert mixed == decode(family, f"{family.plain}:{family.plain}", "--beam", 2)
    assert texts(mixed) == texts(decode(family, family.shared, "--beam", 2))


def test_options_of_iterative_refinement_do_not_apply(family):
    """Only non-autoregressive models have steps and a history; fairseq stops with the same words for its own model."""
    for flag, key in (("--print-step", "steps"), ("--retain-iter-history", "history")):
        for path in (family.shared, family.plain):
            with pytest.raises(KeyError, match=key):
                decode(family, path, flag, "--beam", 1, "--max-len-b", 3)


def test_packed_matrices_give_the_texts_of_the_unshared_model(family, monkeypatch):
    """Those of models as small as these are not packed, or the other tests could not compare every digit."""
    monkeypatch.setattr(inference, "SMALLEST", 0)
    packed, multiply = [], inference.multiply
    monkeypatch.setattr(inference, "multiply", lambda *given: (packed.append(given), multiply(*given))[1])
    flags = ["--beam", 3, "--nbest", 3, *(["--print-alignment"] if family.flags[0] == "--max-len-b" else [])]
    ours = decode(family, family.shared, *flags)
    assert packed
    theirs = decode(family, family.plain, *flags)
    for one, other in zip(itertools.chain(*map(split, ours)), itertools.chain(*map(split, theirs)), strict=True):
        assert one == other if isinstance(one, str) else one == pytest.approx(other, abs=1e-5)


def split(line: str) -> list[str | float]:
    """Return the words of a line, its scores as numbers."""
    return [float(word) if re.fullmatch(r"-?\d+\.\d+(e-\d+)?", word) else word for word in line.split()]


def test_raw_text(translation, tmp_path):
    """--dataset-impl raw: the same texts and scores as from binarised data."""
    for language in ("en", "de"):
        shutil.copy(translation.data / f"dict.{language}.txt", tmp_path)
        shutil.copy(translation.data.parent / f"test.spm.{language}", tmp_path / f"test.en-de.{language}")
    raw = dataclasses.replace(translation, data=tmp_path)
    assert decode_alike(raw, "--dataset-impl", "raw") == decode(translation, translation.shared)


# --- the caches ---


def load(path, task=None):
    models, config, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], task=task)
    return models[0].eval(), config, task


def first_batch(family, task) -> dict:
    task.load_dataset("test")
    return next(task.get_batch_iterator(task.dataset("test"), max_sentences=3).next_epoch_itr(shuffle=False))


@pytest.mark.parametrize("beam", [1, 5])
def test_scores_are_those_of_a_full_forward_pass_and_caches_are_apart(family, beam):
    """Step by step through the beams' reordering, every hypothesis gets the scores of one pass over its tokens.

    Each layer has its own cache of what was written; that of the source belongs to the parameter set.
    """
    model, _, task = load(family.shared)
    if not family.encoder_attention:
        task.args.sample_break_mode = "eos"
    sample = first_batch(family, task)
    generator = task.build_generator([model], OmegaConf.structured(GenerationConfig(beam=beam, max_len_b=8)))
    states = []

    def reorder(state, order, original=model.decoder.reorder_incremental_state_scripting):
        states.append({name: dict(entry) for name, entry in state.items()})
        return original(state, order)

    model.decoder.reorder_incremental_state_scripting = reorder
    prefix = None if family.encoder_attention else sample["target"][:, :2]
    found = task.inference_step(generator, [model], sample, prefix_tokens=prefix)

    for sentence, hypotheses in enumerate(found):
        assert len(hypotheses) == beam
        for hypothesis in hypotheses:
            tokens = hypothesis["tokens"]
            inputs = torch.cat([tokens.new_tensor([2]), tokens[:-1]])[None]
            with torch.no_grad():
                if family.encoder_attention:  # in the whole batch, since convolutions see the padding behind a clip
                    net = sample["net_input"]
                    output = model(net["src_tokens"], net["src_lengths"], inputs.repeat(len(found), 1))
                else:
                    output = model(inputs.repeat(len(found), 1))
            full = model.get_normalized_probs(output, log_probs=True)[sentence].gather(1, tokens[:, None])[:, 0]
            assert torch.allclose(hypothesis["positional_scores"], full, atol=1e-4)

    layers = model.decoder.layers
    attentions = [layer.self_attn for layer in layers]
    if family.encoder_attention:
        attentions += [layer.encoder_attn for layer in layers]
    names = {f"{attention._incremental_state_id}.attn_state" for attention in attentions}
    assert len(names) == (4 + 2 if family.encoder_attention else 4)
    assert all(state.keys() == names for state in states) and len(states) > 2
    for state in states:
        keys = [state[f"{layer.self_attn._incremental_state_id}.attn_state"]["prev_key"] for layer in layers]
        assert len({key.data_ptr() for key in keys}) == 4
        assert not any(torch.equal(keys[index], keys[owner]) for index, owner in enumerate(OWNERS) if index != owner)


# --- without the plugin ---

FORGOTTEN = [  # what fairseq's last line says, as in docs/limits.md
    ("translation", ["fairseq-generate"], "Weights only load failed"),
    ("translation", ["fairseq-validate", "--task", "translation", "--max-tokens", 1000], "Weights only load failed"),
    ("speech", ["fairseq-generate", "--task", "speech_to_text"], "Weights only load failed"),
    ("language_model", ["fairseq-eval-lm"], "KeyError: \"'_name'\""),
    ("language_model", ["fairseq-generate", "--task", "language_modeling"], "KeyError: \"'_name'\""),
]


@pytest.mark.parametrize(("name", "words", "message"), FORGOTTEN)
def test_a_forgotten_user_dir_is_explained(name, words, message, request):
    family = request.getfixturevalue(name)
    program, *flags = words
    output = run([program, family.data, "--path", family.shared, "--cpu", "--num-workers", 0, *flags], check=False)
    assert message in output
    assert f"| `{message}" in (REPOSITORY / "docs" / "limits.md").read_text("utf-8")


# --- the other ways in ---


def interact(family, path, source: str, monkeypatch, *flags) -> list[str]:
    """Type lines into fairseq-interactive."""
    monkeypatch.setattr("sys.stdin", io.StringIO(source))
    task = family.flags if family.encoder_attention else family.flags[:2] + family.flags[4:]
    return command("interactive", path, family.data, *task, *flags)


@pytest.mark.parametrize("buffer", [1, 5])
def test_interactive_gives_the_texts_of_generate(family, buffer, monkeypatch):
    """From standard input, one line at a time and in buffers with a smaller batch size."""
    flags = ["--beam", 2, "--buffer-size", buffer, "--batch-size", min(buffer, 3)]
    if family.encoder_attention and "speech_to_text" in family.flags:
        source = [str(family.data / f"{number}.npy") for number in range(8)]
        expected = decode(family, family.shared, "--beam", 2, "--batch-size", 1)
    elif family.encoder_attention:
        source = (family.data.parent / "test.spm.en").read_text("utf-8").splitlines()
        expected = decode(family, family.shared, "--beam", 2)
    else:  # continue the first two symbols of each line
        generated = decode(family, family.shared, "--beam", 2, "--prefix-size", 2)
        source = [" ".join(text.split()[:2]) for _, text in lines_of("T", generated)]
        expected = generated
    output = interact(family, family.shared, "\n".join(source) + "\n", monkeypatch, *flags)
    assert texts(output) == texts(expected)
    assert output == interact(family, family.plain, "\n".join(source) + "\n", monkeypatch, *flags)


@pytest.mark.parametrize("order", ["ordered", "unordered"])
def test_constraints_are_met_as_by_the_unshared_model(translation, order, monkeypatch):
    english, german = (
        (translation.data.parent / f"test.spm.{side}").read_text("utf-8").splitlines()[:4] for side in ("en", "de")
    )
    wanted = [line.split()[1:3] for line in german]
    source = "".join("\t".join([line, *words]) + "\n" for line, words in zip(english, wanted, strict=True))
    flags = ["--constraints", order, "--beam", 6, "--max-len-b", 25, "--buffer-size", 4, "--batch-size", 4]
    ours, theirs = (
        interact(translation, path, source, monkeypatch, *flags) for path in (translation.shared, translation.plain)
    )
    assert ours == theirs
    assert all(set(words) <= set(text.split()) for words, text in zip(wanted, texts(ours), strict=True))


def test_the_hub_gives_the_texts_of_generate(translation):
    flags = {"bpe": "sentencepiece", "sentencepiece_model": str(translation.data.parent / "spm.model")}
    sentences = (translation.data.parent / "test.en").read_text("utf-8").splitlines()
    shared, plain = (
        model.from_pretrained(str(path.parent), path.name, str(translation.data), **flags)
        for model, path in ((SharedTransformerModel, translation.shared), (TransformerModel, translation.plain))
    )
    expected = texts(decode(translation, translation.shared, "--remove-bpe", "sentencepiece", "--beam", 3))
    assert shared.translate(sentences, beam=3, max_len_b=12) == expected
    assert [shared.translate(sentence, beam=3, max_len_b=12) for sentence in sentences] == expected
    for way in ({"beam": 2}, {"sampling": True, "sampling_topk": 5, "beam": 2}):
        drawn = []
        for hub in (shared, plain):
            torch.manual_seed(3)
            drawn.append(hub.sample(sentences, max_len_b=12, **way))
        assert drawn[0] == drawn[1]
    encoded = [shared.encode(sentence) for sentence in sentences[:4]]
    ours, theirs = (hub.generate(encoded, beam=2, max_len_b=12) for hub in (shared, plain))
    for one, other in zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True):
        assert torch.equal(one["positional_scores"], other["positional_scores"])


def test_the_hub_of_language_models(language_model):
    ways = {SharedLanguageModel: language_model.shared, TransformerLanguageModel: language_model.plain}
    shared, plain = (
        model.from_pretrained(str(path.parent), path.name, str(language_model.data)) for model, path in ways.items()
    )
    generated = decode(language_model, language_model.shared, "--beam", 3, "--prefix-size", 2)
    starts = [" ".join(text.split()[:2]) for _, text in lines_of("T", generated)]
    assert shared.sample(starts, beam=3, max_len_b=12) == plain.sample(starts, beam=3, max_len_b=12) == texts(generated)
    for one, other in zip(*(hub.score(starts) for hub in (shared, plain)), strict=True):
        assert torch.equal(one["positional_scores"], other["positional_scores"])


def test_the_hub_of_speech(speech):
    expected = texts(decode(speech, speech.shared, "--beam", 5, "--batch-size", 1))
    for model, path in ((SharedS2TTransformerModel, speech.shared), (S2TTransformerModel, speech.plain)):
        hub = model.from_pretrained(str(path.parent), path.name, str(speech.data))
        hub.task.load_dataset("test")
        dataset = hub.task.dataset("test")
        generator = hub.task.build_generator([hub.model], OmegaConf.structured(GenerationConfig(beam=5, max_len_b=12)))
        samples = [dataset.collater([dataset[number]]) for number in range(8)]
        assert [hub.get_prediction(hub.task, hub.model, generator, sample) for sample in samples] == expected


def test_word_error_rates(speech):
    flags = ["--scoring", "wer", "--beam", 2]
    output = decode_alike(speech, *flags)
    assert "WER" in output[-1]
    assert decode(speech, f"{speech.shared}:{speech.plain}", *flags)[-1] == output[-1]


def test_evaluating_language_models(language_model, caplog):
    """--softmax-batch changes how the vocabulary is gone through, and nothing else."""

    def evaluate_alike(*flags) -> list[str]:
        said = []
        for path in (language_model.shared, language_model.plain):
            caplog.clear()
            with caplog.at_level("INFO", logger="fairseq_cli.eval_lm"):
                command("eval_lm", path, language_model.data, "--output-word-probs", "--output-word-stats", *flags)
            lines = [record.getMessage() for record in caplog.records if record.name == "fairseq_cli.eval_lm"]
            said.append([line for line in lines if "[-" in line or "\t" in line or "Perplexity" in line])
        assert said[0] == said[1]
        return said[0]

    whole = evaluate_alike("--sample-break-mode", "eos")
    assert len(whole) > 20 and "Perplexity" in whole[-1]
    assert evaluate_alike("--sample-break-mode", "eos", "--softmax-batch", 7)[-1] == whole[-1]
    assert evaluate_alike("--context-window", 8, "--tokens-per-sample", 16)[-1] != whole[-1]
