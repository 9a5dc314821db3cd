"""Hold an export to CTranslate2 against fairseq-generate: size, speed, BLEU, and how many translations are equal.

Both translate the same pieces in batches of as many sentences, with as many threads, three times in turn. Of
fairseq-generate the time is its own, without loading; of CTranslate2 that of its one call, also without loading.
"""

import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = 3
BATCH = 64
LONGEST = 200  # pieces of a translation, the default of fairseq-generate
LINES = re.compile(r"^([STH])-(\d+)\t(?:(-?[\d.]+|nan|-?inf)\t)?(.*)$", re.MULTILINE)
TRANSLATED = re.compile(r"Translated ([\d,]+) sentences \(([\d,]+) tokens\) in .*, ([\d.,]+) tokens/s\)")


def check_benchmark(trained, data: Path | None, args) -> None:
    """Refuse a benchmark that could not be run, before anything is written.

    Raises:
        ValueError: with the option.
    """
    if trained.family != "translation":
        raise ValueError(f"--benchmark {args.benchmark} is for translation; {trained.path} is a {trained.family} model")
    pair = f"{trained.task['source_lang']}-{trained.task['target_lang']}"
    file = data / f"{args.benchmark}.{pair}.{trained.task['source_lang']}.idx"
    if not file.is_file():
        raise ValueError(f"--benchmark {args.benchmark}: --data {data} has no {file.name}")


def benchmark(trained, args) -> None:
    """Run both in turn and print the table."""
    import ctranslate2
    import sacrebleu
    import torch
    from tabulate import tabulate

    from .trained import find_data

    beam, threads = args.beam or 1, torch.get_num_threads()
    data = find_data(trained, args.data)
    translator = ctranslate2.Translator(args.out, device="cpu", intra_threads=threads, inter_threads=1)
    speeds = {"fairseq-generate": [], "ctranslate2": []}
    for number in range(ROUNDS):
        print(f"benchmark: round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
        sentences, speed = run_generate(trained, data, args.benchmark, beam, threads)
        speeds["fairseq-generate"].append(speed)
        sources = [source.split() for source, _, _ in sentences]
        if number == 0:
            translator.translate_batch(sources[:BATCH], beam_size=beam, max_batch_size=BATCH)  # memory is allocated
        translations, speed = run_ctranslate2(translator, sources, beam)
        speeds["ctranslate2"].append(speed)
    _, references, hypotheses = (list(column) for column in zip(*sentences, strict=True))
    equal = sum(ours == theirs for ours, theirs in zip(hypotheses, translations, strict=True))
    rows = [
        (name, size, statistics.median(speeds[name]), sacrebleu.corpus_bleu(join(texts), [join(references)]).score)
        for name, size, texts in (
            ("fairseq-generate", Path(trained.path).stat().st_size, hypotheses),
            ("ctranslate2", (Path(args.out) / "model.bin").stat().st_size, translations),
        )
    ]
    print(
        f"\n{args.benchmark}: {len(sentences):,} sentences, beam {beam}, batches of {BATCH}, {threads} "
        f"thread{'s' if threads > 1 else ''}, {translator.compute_type}; median of {ROUNDS} rounds in turn\n"
    )
    headers = ("", "bytes", "tokens/s", "BLEU")
    print(tabulate(rows, headers, intfmt=",", floatfmt=("", "", ",.0f", ".2f"), tablefmt="simple"))
    print(f"\n{equal:,} of {len(sentences):,} translations are equal ({equal / len(sentences):.1%})")


def run_generate(trained, data: Path, subset: str, beam: int, threads: int):
    """Run fairseq-generate in a process of its own.

    Returns:
        Source, reference and translation of each sentence, in pieces and in the order of the text; tokens per second.

    Raises:
        ValueError: it failed.
    """
    command = [
        *(sys.executable, "-m", "fairseq_cli.generate", data, "--path", trained.path, "--gen-subset", subset),
        *("--user-dir", Path(__file__).resolve().parent.parent, "--task", "translation", "--cpu", "--num-workers", 0),
        *("--source-lang", trained.task["source_lang"], "--target-lang", trained.task["target_lang"]),
        *("--beam", beam, "--batch-size", BATCH, "--required-batch-size-multiple", 1, "--max-len-b", LONGEST),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([str(word) for word in command], capture_output=True, encoding="utf-8", env=environment)
    summary = TRANSLATED.search(done.stdout) or TRANSLATED.search(done.stderr)
    if done.returncode != 0 or summary is None:
        raise ValueError(
            f"--benchmark: fairseq-generate failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}"
        )
    lines = {(kind, int(number)): text for kind, number, _, text in LINES.findall(done.stdout)}
    numbers = sorted(number for kind, number in lines if kind == "H")
    sentences = [tuple(lines[kind, number] for kind in "STH") for number in numbers]
    return sentences, float(summary[3].replace(",", ""))


def run_ctranslate2(translator, sources: list[list[str]], beam: int) -> tuple[list[str], float]:
    """Return the translations in pieces and tokens per second; ``</s>`` counts, as it does in fairseq."""
    start = time.perf_counter()
    results = translator.translate_batch(
        sources, beam_size=beam, max_batch_size=BATCH, max_input_length=0, max_decoding_length=LONGEST
    )
    seconds = time.perf_counter() - start
    pieces = [result.hypotheses[0] for result in results]
    return [" ".join(sentence) for sentence in pieces], sum(len(sentence) + 1 for sentence in pieces) / seconds


def join(sentences: list[str]) -> list[str]:
    """Put pieces together, those of SentencePiece or of subword-nmt."""
    from fairseq.data.data_utils import post_process

    marked = any("\u2581" in sentence for sentence in sentences)
    return [post_process(sentence, "sentencepiece" if marked else "subword_nmt") for sentence in sentences]
