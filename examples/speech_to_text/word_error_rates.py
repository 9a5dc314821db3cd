"""Print the word error rate of each source of speech apart, from what ``fairseq-generate --scoring wer`` printed.

The source of a clip is the first folder of its audio path, as in the manifest that prepare_speech.py wrote. The rate is
fairseq's: edits over words of all references together, in percent; it can exceed 100.

Example:
    python examples/speech_to_text/word_error_rates.py speech-run/generate.log speech-run/data/test.tsv
"""

import argparse
import re
import sys
from collections import defaultdict
from pathlib import Path

import editdistance


def read_references(manifest: Path) -> list[tuple[str, list[str]]]:
    """Return (source, words) of each clip of a manifest."""
    header, *rows = (line.split("\t") for line in manifest.read_text("utf-8").rstrip("\n").split("\n"))
    clip, text = header.index("id"), header.index("tgt_text")
    return [(row[clip].split("/")[0], row[text].split()) for row in rows]


def read_hypotheses(log: Path) -> dict[int, list[str]]:
    """Return the words that were decoded for each clip, by its number in the manifest."""
    lines = re.findall(r"^D-(\d+)\t\S+\t(.*)$", log.read_text("utf-8"), re.MULTILINE)
    return {int(number): text.split() for number, text in lines}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="output of fairseq-generate")
    parser.add_argument("manifest", type=Path, help="the part that was decoded")
    args = parser.parse_args()
    references, hypotheses = read_references(args.manifest), read_hypotheses(args.log)
    if sorted(hypotheses) != list(range(len(references))):
        print(
            f"word_error_rates.py: error: {args.log} has {len(hypotheses)} hypotheses, "
            f"{args.manifest} has {len(references)} clips: they must be the same ones",
            file=sys.stderr,
        )
        return 2
    counts = defaultdict(lambda: [0, 0, 0])  # edits, words, clips
    for number, (source, words) in enumerate(references):
        edits = editdistance.eval(words, hypotheses[number])
        for name in (source, "all"):
            counts[name] = [sum(pair) for pair in zip(counts[name], (edits, len(words), 1), strict=True)]
    for name in sorted(counts, key=lambda name: (name == "all", name)):
        edits, words, clips = counts[name]
        print(f"{name}: {100 * edits / words:.2f} ({clips:,} clips, {words:,} words)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
