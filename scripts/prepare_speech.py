"""Make fairseq's speech_to_text data out of audio files and their transcripts.

    python scripts/prepare_speech.py --audio-root clips --train train.tsv --valid valid.tsv --test test.tsv \
        --vocab-type unigram --vocab-size 1000 --out data-s2t

Each TSV has a header line with the columns ``audio`` (a path below --audio-root, of a file that soundfile reads: wav,
flac, opus, ogg) and ``text``, and may have ``speaker``; other columns are left alone. The same clip may be in several
TSVs. Features are 80 log-mel filterbanks as Kaldi and torchaudio.compliance.kaldi compute them with fairseq's settings:
windows of 25 ms every 10 ms (povey), no dither, samples in the range of 16 bits, channels averaged. Text is taken as it
is, but for runs of white space. ``--part NAME TSV`` adds a part that is called otherwise, such as a second test set.

--out holds ``config.yaml`` (utterance CMVN always, SpecAugment while training), ``train.tsv`` and so on (id, audio,
n_frames, tgt_text, speaker), ``fbank80-000.zip`` and so on or ``fbank80/*.npy``, ``spm.model``, ``spm.vocab`` and
``dict.txt``. Everything is written beside --out under the name ``.NAME.partial``, read back through fairseq's own
dataset, and then renamed: --out is whole or not there. What a stopped call has written is deleted; with --resume it is
kept, and the same call goes on after the last whole zip. When you move --out, change ``audio_root`` in its
``config.yaml``. A thousand hours are 115 GB of features and take, by a short measurement, two hours of one processor.

    fairseq-train data-s2t --task speech_to_text --config-yaml config.yaml --train-subset train --valid-subset valid ...
"""

import argparse
import csv
import hashlib
import io
import logging
import re
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from whole_folder import write_whole_folder

PARTS = ("train", "valid", "test")
NUM_BINS = 80
CLIPS_IN_ZIP = 10_000
# The way in which fairseq reads its manifests; quotes are ordinary characters.
TSV = {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None, "doublequote": False, "lineterminator": "\n"}
COLUMNS = ("id", "audio", "n_frames", "tgt_text", "speaker")
# The policies of the SpecAugment paper (arXiv 1904.08779) as fairseq's recipes have them.
SPECAUGMENT = {
    "lb": {"freq_mask_N": 1, "freq_mask_F": 27, "time_mask_N": 1, "time_mask_T": 100, "time_mask_p": 1.0},
    "ld": {"freq_mask_N": 2, "freq_mask_F": 27, "time_mask_N": 2, "time_mask_T": 100, "time_mask_p": 1.0},
}


def read_clips(path: Path, audio_root: Path) -> list[dict]:
    """Read a TSV of clips.

    Returns:
        One dictionary a clip: ``audio`` (as written), ``path``, ``text`` (single spaces) and ``speaker``.

    Raises:
        ValueError: no such file, not UTF-8, a header without ``audio`` and ``text``, no clip at all, an incomplete
            line, empty text, a clip that is listed twice, or audio that is missing.
    """
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    try:
        reader = csv.DictReader(io.StringIO(path.read_text("utf-8-sig"), newline="\n"), **TSV)
        rows = list(reader)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error.reason}") from error
    except csv.Error as error:
        raise ValueError(f"{path} is not a TSV: {error}") from error
    header = reader.fieldnames or []
    missing = [name for name in ("audio", "text") if name not in header]
    if missing:
        raise ValueError(
            f"{path}: the first line must name the columns audio and text, separated by tabs; it names "
            f"{', '.join(header) or 'nothing'}"
        )
    if not rows:
        raise ValueError(f"{path} lists no clips")
    clips, seen = [], set()
    for number, row in enumerate(rows, 2):
        where = f"{path}, line {number}"
        if None in row or None in row.values():
            raise ValueError(f"{where}: must have {len(header)} columns, as the header has")
        clip = {"audio": row["audio"], "path": audio_root / row["audio"]}
        clip["text"] = " ".join(row["text"].split())
        clip["speaker"] = " ".join((row.get("speaker") or "").split())
        if not clip["text"]:
            raise ValueError(f"{where}: {row['audio']} has no text")
        if row["audio"] in seen:
            raise ValueError(f"{where}: {row['audio']} is listed twice")
        seen.add(row["audio"])
        if not clip["path"].is_file():
            raise ValueError(f"{where}: there is no audio file {clip['path']}")
        clips.append(clip)
    return clips


def read_audio(path: Path, sample_rate: int, resample: bool) -> np.ndarray:
    """Read an audio file as mono samples in the range of 16-bit integers, as Kaldi's features expect them.

    Several channels are averaged.

    Raises:
        ValueError: the file cannot be read, or has another sample rate and may not be resampled.
    """
    import soundfile

    try:
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, OSError) as error:
        raise ValueError(f"cannot read the audio of {path}: {error}") from error
    samples = samples.mean(axis=1)
    if rate != sample_rate:
        if not resample:
            raise ValueError(
                f"{path} has {rate} samples a second and must have --sample-rate {sample_rate}: add --resample"
            )
        from scipy.signal import resample_poly

        samples = resample_poly(samples, sample_rate, rate).astype(np.float32)
    if not np.isfinite(samples).all():
        raise ValueError(f"{path} holds samples that are no numbers")
    return samples * np.float32(2**15)


def compute_filterbanks(samples: np.ndarray, sample_rate: int) -> np.ndarray:
    """Return the log-mel filterbanks of a waveform.

    Args:
        samples: mono, in the range of 16-bit integers.
        sample_rate: samples a second.

    Returns:
        float32, frames x 80; one frame every 10 ms, none beyond the last whole window of 25 ms.
    """
    import kaldi_native_fbank

    options = kaldi_native_fbank.FbankOptions()
    options.frame_opts.samp_freq = sample_rate
    options.frame_opts.dither = 0
    options.frame_opts.window_type = "povey"
    options.frame_opts.frame_length_ms = 25
    options.frame_opts.frame_shift_ms = 10
    options.frame_opts.preemph_coeff = 0.97
    options.frame_opts.remove_dc_offset = True
    options.frame_opts.snip_edges = True
    options.mel_opts.num_bins = NUM_BINS
    options.mel_opts.low_freq = 20
    options.mel_opts.high_freq = 0  # half the sample rate
    options.use_energy = False
    computer = kaldi_native_fbank.OnlineFbank(options)
    computer.accept_waveform(sample_rate, samples.tolist())
    computer.input_finished()
    frames = [computer.get_frame(number) for number in range(computer.num_frames_ready)]
    return np.stack(frames).astype(np.float32) if frames else np.zeros((0, NUM_BINS), np.float32)


def train_sentencepiece(texts: list[str], vocab_type: str, vocab_size: int | None) -> bytes:
    """Train a SentencePiece model on the training transcripts and return it in serialised form.

    Raises:
        ValueError: the vocabulary is too large or too small for this text.
    """
    import sentencepiece

    # A vocabulary of characters has as many as the text: "▁" for the space, and three symbols of SentencePiece's own.
    size = vocab_size if vocab_type == "unigram" else len(set("".join(texts)) - {" "}) + 4
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type=vocab_type,
            vocab_size=size,
            character_coverage=1.0,
            normalization_rule_name="identity",
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        limit = re.search(r"Vocabulary size (?:is )?too high .*<= (\d+)", str(error))
        needed = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
        if limit:
            problem = f"is too large: {len(texts)} training transcripts yield at most {limit[1]} pieces"
        elif needed:
            problem = f"is too small: the characters of the training transcripts alone need {needed[1]} pieces"
        else:
            problem = f"does not suit the training transcripts: {error}"
        raise ValueError(f"--vocab-size {size} {problem}") from error
    return model.getvalue()


def write_vocabulary(folder: Path, model: bytes) -> None:
    """Write ``spm.model``, ``spm.vocab`` and ``dict.txt``, which leaves out <unk>, <s>, </s>: fairseq has its own."""
    import sentencepiece

    (folder / "spm.model").write_bytes(model)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [(processor.id_to_piece(i), processor.get_score(i)) for i in range(len(processor))]
    (folder / "spm.vocab").write_text("".join(f"{piece}\t{score:g}\n" for piece, score in pieces), "utf-8")
    own = [piece for i, (piece, _) in enumerate(pieces) if not processor.is_unknown(i) and not processor.is_control(i)]
    (folder / "dict.txt").write_text("".join(f"{piece} 1\n" for piece in own), "utf-8")


def write_config(folder: Path, audio_root: Path, specaugment: str, sample_rate: int) -> None:
    """Write ``config.yaml``, fairseq's description of the data."""
    import yaml

    transforms = {"*": ["utterance_cmvn"], "_train": ["utterance_cmvn"]}
    config = {
        "audio_root": str(audio_root),
        "bpe_tokenizer": {"bpe": "sentencepiece", "sentencepiece_model": "spm.model"},
        "input_channels": 1,
        "input_feat_per_channel": NUM_BINS,
        "sample_rate": sample_rate,
        "vocab_filename": "dict.txt",
        "feature_transforms": transforms,
    }
    if specaugment != "none":
        transforms["_train"] = ["utterance_cmvn", "specaugment"]
        config["specaugment"] = SPECAUGMENT[specaugment]
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=True), "utf-8")


def compute_all(clips: dict[str, Path], sample_rate: int, resample: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (audio, filterbanks) of each clip."""
    for audio, path in clips.items():
        features = compute_filterbanks(read_audio(path, sample_rate, resample), sample_rate)
        if len(features) == 0:
            raise ValueError(f"{path} is shorter than one window of 25 ms")
        yield audio, features


def write_features(folder: Path, clips: dict[str, Path], kind: str, rate: tuple[int, bool]) -> dict[str, tuple]:
    """Write the filterbanks as .npy files, or as uncompressed zips of 10,000 clips; a zip that is there is kept.

    Args:
        folder: where to.
        clips: the path of each clip's audio.
        kind: npy or zip.
        rate: samples a second, and whether other audio is resampled to it.

    Returns:
        For each clip, how a manifest names its features (a zip's member by offset and size in bytes), and its frames.
    """
    written = {}
    if kind == "npy":
        (folder / "fbank80").mkdir()
        for number, (audio, array) in enumerate(compute_all(clips, *rate)):
            written[audio] = f"fbank80/{number:06d}.npy", len(array)
            np.save(folder / written[audio][0], array)
        return written
    names = list(clips)
    for number, first in enumerate(range(0, len(names), CLIPS_IN_ZIP)):
        archive = folder / f"fbank80-{number:03d}.zip"
        own = {audio: clips[audio] for audio in names[first : first + CLIPS_IN_ZIP]}
        contents = fingerprint(rate[0], own)
        if not is_zip_of(archive, contents):
            write_zip(archive, compute_all(own, *rate), contents)
        written |= dict(zip(own, read_zip(archive), strict=True))
    return written


def fingerprint(sample_rate: int, clips: dict[str, Path]) -> bytes:
    """Return what a zip of these clips is known by: the rate, and name, place, size and time of each file."""
    lines = [str(sample_rate)]
    for audio, path in clips.items():
        state = path.stat()
        lines.append(f"{audio}\t{path.resolve()}\t{state.st_size}\t{state.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest().encode()


def is_zip_of(archive: Path, contents: bytes) -> bool:
    """Whether a stopped call wrote this zip, of the same clips; the comment at its end says so."""
    try:
        with zipfile.ZipFile(archive) as file:
            return file.comment == contents
    except (OSError, zipfile.BadZipFile):
        return False


def write_zip(archive: Path, features: Iterator[tuple[str, np.ndarray]], contents: bytes) -> None:
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as file:
        for number, (_, array) in enumerate(features):
            data = io.BytesIO()
            np.save(data, array)
            file.writestr(f"{number:06d}.npy", data.getvalue())
        file.comment = contents  # only now: a zip is also closed when this is stopped


def read_zip(archive: Path) -> Iterator[tuple[str, int]]:
    """Yield how a manifest names each member of a zip, and how many frames it has."""
    with zipfile.ZipFile(archive) as file, archive.open("rb") as raw:
        for member in file.infolist():
            raw.seek(member.header_offset + 26)  # the lengths of name and extra field in the member's own header
            lengths = np.frombuffer(raw.read(4), "<u2")
            start = member.header_offset + 30 + int(lengths.sum())
            raw.seek(start)
            np.lib.format.read_magic(raw)
            (frames, _), *_ = np.lib.format.read_array_header_1_0(raw)
            yield f"{archive.name}:{start}:{member.file_size}", frames


def write_manifest(path: Path, clips: list[dict], features: dict[str, tuple[str, int]]) -> None:
    """Write the manifest of one part in fairseq's format."""
    lines = ["\t".join(COLUMNS)]
    for clip in clips:
        name, frames = features[clip["audio"]]
        lines.append("\t".join((clip["audio"], name, str(frames), clip["text"], clip["speaker"])))
    path.write_text("\n".join(lines) + "\n", "utf-8")


def check_written(folder: Path, parts: dict[str, list[dict]]) -> dict[str, int]:
    """Read everything back as fairseq's task does.

    Returns:
        For each part, how many pieces are not in the dictionary (none of the training part's).

    Raises:
        ValueError: a clip does not come back with its frames and its text.
    """
    for name in (
        "tasks.text_to_speech",
        "data.audio.speech_to_text_dataset",
    ):  # one asks for tensorboardX when imported
        logging.getLogger(f"fairseq.{name}").setLevel(logging.WARNING)
    from fairseq.data import Dictionary, encoders
    from fairseq.data.audio.data_cfg import S2TDataConfig
    from fairseq.data.audio.speech_to_text_dataset import SpeechToTextDatasetCreator

    config = S2TDataConfig(folder / "config.yaml")
    config.config["audio_root"] = str(folder)  # where it is until it is renamed
    dictionary = Dictionary.load(str(folder / config.vocab_filename))
    bpe = encoders.build_bpe(argparse.Namespace(**config.bpe_tokenizer))
    unknown = {}
    for part, clips in parts.items():
        dataset = SpeechToTextDatasetCreator.from_tsv(
            str(folder), config, part, dictionary, None, bpe, is_train_split=part == "train", epoch=1, seed=1
        )
        if len(dataset) != len(clips):
            raise ValueError(f"{part}.tsv came back with {len(dataset)} clips, not {len(clips)}")
        unknown[part] = 0
        for number, clip in enumerate(clips):
            item = dataset[number]
            if tuple(item.source.shape) != (dataset.sizes[number], NUM_BINS) or not item.source.isfinite().all():
                raise ValueError(f"the features of {clip['audio']} did not come back as they were written")
            missing = int(item.target.eq(dictionary.unk()).sum())
            unknown[part] += missing
            if not missing and bpe.decode(dictionary.string(item.target)) != clip["text"]:
                raise ValueError(f"the text of {clip['audio']} did not come back as it was written")
    if unknown["train"]:
        raise ValueError(f"the dictionary lacks {unknown['train']} pieces of the training transcripts")
    return unknown


def prepare(args) -> None:
    """Do everything that the flags ask for, and print a line a part.

    Raises:
        ValueError: the flags or the data cannot be right.
    """
    out = args.out.absolute()
    if out.exists():
        raise ValueError(f"--out {args.out} exists: remove it or name another")
    if not out.parent.is_dir():
        raise ValueError(f"--out {args.out}: there is no folder {out.parent}")
    if args.features == "zip" and ":" in str(out):
        raise ValueError(f"--out {out}: fairseq cannot read a zip below a name with a colon: add --features npy")
    if args.resume and args.features != "zip":
        raise ValueError(f"--resume needs --features zip, not {args.features}")
    if (args.vocab_type == "unigram") != (args.vocab_size is not None):
        raise ValueError("--vocab-size goes with --vocab-type unigram, and only with it")
    if not args.audio_root.is_dir():
        raise ValueError(f"--audio-root {args.audio_root}: no such folder")
    tables = [(part, getattr(args, part)) for part in PARTS if getattr(args, part)]
    for part, table in args.part:
        if part in dict(tables) or not re.fullmatch(r"[\w-]+", part):
            raise ValueError(f"--part {part} must be a further name, of letters, digits, _ and -")
        tables.append((part, Path(table)))
    parts = {part: read_clips(table, args.audio_root) for part, table in tables}
    model = train_sentencepiece([clip["text"] for clip in parts["train"]], args.vocab_type, args.vocab_size)
    with write_whole_folder(out, resume=args.resume) as partial:
        write_vocabulary(partial, model)
        write_config(partial, out, args.specaugment, args.sample_rate)
        clips = {clip["audio"]: clip["path"] for part in parts.values() for clip in part}  # each once
        features = write_features(partial, clips, args.features, (args.sample_rate, args.resample))
        for part, clips in parts.items():
            write_manifest(partial / f"{part}.tsv", clips, features)
        try:
            unknown = check_written(partial, parts)
        except ValueError:
            shutil.rmtree(partial)  # nothing to go on from
            raise
    for part, clips in parts.items():
        seconds = sum(features[clip["audio"]][1] for clip in clips) / 100
        print(f"{part}: {len(clips):,} clips, {seconds / 60:.1f} minutes, {unknown[part]} unknown pieces")


def main(argv: list[str] | None = None) -> int:
    """Run the program; return 0, or 2 after one sentence on standard error when the input was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--audio-root", type=Path, required=True, metavar="DIR", help="where the TSVs' audio is")
    for part in PARTS:
        parser.add_argument(
            f"--{part}", type=Path, required=part == "train", metavar="TSV", help=f"clips of the {part} part"
        )
    parser.add_argument(
        "--part", nargs=2, action="append", default=[], metavar=("NAME", "TSV"), help="a further part; may be repeated"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument("--vocab-type", choices=("unigram", "char"), default="unigram", help="default: unigram")
    parser.add_argument("--vocab-size", type=int, metavar="V", help="SentencePiece pieces (with unigram)")
    parser.add_argument(
        "--specaugment", choices=("none", *SPECAUGMENT), default="ld", help="policy while training (default: ld)"
    )
    parser.add_argument("--features", choices=("zip", "npy"), default="zip", help="how they are kept (default: zip)")
    parser.add_argument("--resume", action="store_true", help="keep what a stopped call has written, and go on from it")
    parser.add_argument("--sample-rate", type=int, default=16000, metavar="HZ", help="default: 16000")
    parser.add_argument("--resample", action="store_true", help="resample audio of other rates instead of refusing it")
    args = parser.parse_args(argv)
    try:
        prepare(args)
    except KeyboardInterrupt:
        kept = "the same call goes on from here" if args.resume else "nothing was written"
        print(f"prepare_speech.py: stopped; {kept}", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"prepare_speech.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
