"""Print the table of `sharing.sh`: what is shared, E, parameters, masked-LM loss, accuracy after fine-tuning.

Example:
    python examples/masked_lm/sharing.py sharing-run
"""

import argparse
import re
import sys
from pathlib import Path

from runs import best_rate, mean_and_spread, read_runs
from tabulate import tabulate

SHARED = {"all": "all", "attention": "attention", "ffn": "FFN", "none": "nothing"}
PARAMETERS = re.compile(r"shared model params: ([\d,]+)")
VALID = re.compile(r"valid on 'valid' subset \| loss ([\d.]+)")


def read_row(folder: Path, shared: str, width: int) -> dict[str, str] | None:
    """Return a row from one run.sh, or None where its pretraining has not ended."""
    log = folder / "pretrain.log"
    if not log.with_suffix(".done").exists():
        return None
    text = log.read_text("utf-8")
    row = {"shared": SHARED[shared], "E": str(width), "parameters": PARAMETERS.search(text)[1]}
    row["masked-LM loss (bits)"] = VALID.findall(text)[-1]
    for name in ("novels", "reviews"):
        runs = read_runs(folder, name, "pretrained")
        if runs:
            tests = [test for _, test in runs[best_rate(runs)].values()]
            row[f"{name}, accuracy (%)"] = mean_and_spread(tests)
            row["seeds"] = str(len(tests))
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="RUN of sharing.sh")
    args = parser.parse_args()
    folders = [(re.fullmatch(r"(all|attention|ffn|none)-(\d+)", folder.name), folder) for folder in args.run.glob("*")]
    found = [(-int(name[2]), list(SHARED).index(name[1]), folder) for name, folder in folders if name]
    rows = [read_row(folder, list(SHARED)[shared], -width) for width, shared, folder in sorted(found)]
    if not any(rows):
        print(f"{parser.prog}: error: {args.run} holds no finished pretraining of sharing.sh", file=sys.stderr)
        return 2
    print(tabulate([row for row in rows if row], headers="keys", tablefmt="github", disable_numparse=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
