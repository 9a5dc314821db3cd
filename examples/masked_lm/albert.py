"""Make plain text and the tasks of GLUE ready for ALBERT, and print what fine-tuning gave.

    vocabulary   a SentencePiece model of plain text, and its pieces as a dictionary of fairseq
    text         that text in these pieces, for --task masked_lm
    task         the training and development set of a task of GLUE, for --task sentence_prediction
    table        scores on the development set, by learning rate and seed
    imitate      a little text, and all tasks, in the same form from the film reviews that ship with the example

Text is one file or several, or folders of them, with one paragraph or sentence a line.

Example:
    python examples/masked_lm/albert.py vocabulary --text wiki books.txt --out vocabulary
    python examples/masked_lm/albert.py text --text wiki books.txt --vocabulary vocabulary --out text
    python examples/masked_lm/albert.py task --task sst2 --glue glue --vocabulary vocabulary --out sst2
"""

import argparse
import contextlib
import itertools
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # also for those who import this file
from archives import read_lines, run, write_whole
from pieces import BATCH, Pieces, clean, read_text, train_pieces, write_indexed
from runs import best_rate, mean_and_spread, read_runs

BLOCK = 100  # lines that are held out together: their neighbours are not trained on


@dataclass(frozen=True)
class Task:
    """A task of GLUE, as the files of gluebenchmark.com have it.

    Attributes:
        folder: its folder.
        columns: of train.tsv, here with commas between them; the files' first line names them, where there is one.
        inputs: the columns with the one or two sentences.
        label: the column with the class.
        classes: what stands there, in the order of fairseq's numbers.
        metric: fairseq's name for what GLUE scores; acc_and_f1 is the mean of accuracy and F1.
        dev: name of the development set, without .tsv.
        header: whether the first line names the columns.
    """

    folder: str
    columns: str
    inputs: str
    label: str = "label"
    classes: tuple[str, ...] = ("0", "1")
    metric: str = "accuracy"
    dev: str = "dev"
    header: bool = True


ENTAILMENT = ("entailment", "not_entailment")
PARSES = "sentence1_binary_parse,sentence2_binary_parse,sentence1_parse,sentence2_parse"
TASKS = {
    "cola": Task("CoLA", "source,label,mark,sentence", "sentence", metric="mcc", header=False),
    "sst2": Task("SST-2", "sentence,label", "sentence"),
    "mrpc": Task(
        *("MRPC", "Quality,#1 ID,#2 ID,#1 String,#2 String", "#1 String,#2 String", "Quality"),
        metric="acc_and_f1",
    ),
    "qqp": Task(
        *("QQP", "id,qid1,qid2,question1,question2,is_duplicate", "question1,question2", "is_duplicate"),
        metric="acc_and_f1",
    ),
    "mnli": Task(
        *("MNLI", f"index,promptID,pairID,genre,{PARSES},sentence1,sentence2,label1,gold_label"),
        *("sentence1,sentence2", "gold_label", ("contradiction", "entailment", "neutral")),
        dev="dev_matched",
    ),
    "qnli": Task("QNLI", "index,question,sentence,label", "question,sentence", classes=ENTAILMENT),
    "rte": Task("RTE", "index,sentence1,sentence2,label", "sentence1,sentence2", classes=ENTAILMENT),
}


# --- text for pretraining


def find_texts(paths: list[Path]) -> list[Path]:
    """Return the files that are named, and those below the folders that are named, in the order of their names.

    Raises:
        ValueError: there is no file.
    """
    found = []
    for path in paths:
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        if not files or not files[0].is_file():
            raise ValueError(f"--text {path}: there is no file")
        found += files
    return found


def train_vocabulary(args) -> None:
    """Write SentencePiece's model and fairseq's dictionary, with the settings of ALBERT's authors.

    They are in google-research/albert, issue 149. The authors' lower-casing is part of the model here.
    """
    texts = find_texts(args.text)
    with write_whole(args.out) as out:
        train_pieces(
            out,
            texts,
            args.size,
            model_type="unigram",
            character_coverage=0.99995,
            input_sentence_size=10_000_000,
            user_defined_symbols=list('()"-.\u2013£€'),
            normalization_rule_name="nmt_nfkc_cf",
            num_threads=args.workers,
        )


def write_text(args) -> None:
    """Write train and valid; one block of lines in so many is for validation, the first one among them."""
    pieces = Pieces(args.vocabulary, args.workers)
    read = itertools.chain.from_iterable(map(read_text, find_texts(args.text)))
    lines = enumerate(filter(None, map(clean, read)))
    with write_whole(args.out) as out:
        shutil.copyfile(args.vocabulary / "dict.txt", out / "dict.txt")
        counts = {"train": [0, 0], "valid": [0, 0]}
        with contextlib.ExitStack() as stack:
            append = {part: stack.enter_context(write_indexed(out / part, len(pieces.dictionary))) for part in counts}
            while batch := list(itertools.islice(lines, BATCH)):
                for (number, _), symbols in zip(batch, pieces.encode(line for _, line in batch), strict=True):
                    part = "train" if number // BLOCK % args.held_out else "valid"
                    append[part](symbols)
                    counts[part][0] += 1
                    counts[part][1] += len(symbols)
        if not counts["train"][0]:
            raise ValueError(
                f"--text has {counts['valid'][0]} lines, and one block of {BLOCK} in --held-out {args.held_out} is for"
                " validation: none is left to train on"
            )
    for part, (number, size) in counts.items():
        print(f"{part}: {number:,} lines, {size:,} pieces")


# --- tasks


def read_rows(path: Path, task: Task) -> tuple[list[tuple[str, ...]], int]:
    """Return inputs and class of each line of a task's file, and how many lines there are.

    A line without a class or with another number of columns is left out: QQP has such.

    Raises:
        ValueError: the file cannot be read, or has not the columns.
    """
    lines = [line.decode("utf-8", "replace").rstrip("\r\n").split("\t") for line in read_text(path)]
    columns = task.columns.split(",")
    if task.header and lines:
        columns = [name.lstrip("\ufeff") for name in lines.pop(0)]
    wanted = [*task.inputs.split(","), task.label]
    for name in wanted:
        if name not in columns:
            raise ValueError(f"{path} has no column {name}, but {', '.join(columns)}")
    places = [columns.index(name) for name in wanted]
    rows = [tuple(line[place] for place in places) for line in lines if len(line) == len(columns)]
    rows = [row for row in rows if row[-1] in task.classes]
    if not rows:
        raise ValueError(f"{path} has no line with {len(columns)} columns and one of {', '.join(task.classes)}")
    return rows, len(lines)


def write_task(args) -> None:
    """Write a folder for each input and one for the label, with a dictionary each."""
    task = TASKS[args.task]
    files = {part: args.glue / task.folder / f"{name}.tsv" for part, name in (("train", "train"), ("valid", task.dev))}
    read = {part: read_rows(path, task) for part, path in files.items()}
    pieces = Pieces(args.vocabulary, args.workers)
    with write_whole(args.out) as out:
        inputs = [out / f"input{number}" for number, _ in enumerate(task.inputs.split(","))]
        for folder in inputs:
            folder.mkdir()
            shutil.copyfile(args.vocabulary / "dict.txt", folder / "dict.txt")
        (out / "label").mkdir()
        (out / "label" / "dict.txt").write_text("".join(f"{name} 1\n" for name in task.classes), "utf-8")
        labels = pieces.dictionary.load(str(out / "label" / "dict.txt"))
        for part, (rows, total) in read.items():
            *columns, names = zip(*rows, strict=True)
            for folder, sentences in zip(inputs, columns, strict=True):
                with write_indexed(folder / part, len(pieces.dictionary)) as append:
                    for symbols in pieces.encode(sentences):
                        append(symbols)
            with write_indexed(out / "label" / part, len(labels)) as append:
                for name in names:
                    append([labels.index(name), labels.eos()])
            print(f"{part}: {len(rows):,} of {total:,} lines")


def print_table(args) -> None:
    """Print the scores of a folder of fine-tuning runs, or the best learning rate."""
    from tabulate import tabulate

    metric = TASKS[args.task].metric
    runs = read_runs(args.run, args.task, "pretrained", metric=metric, parts=("valid",))
    try:
        best = best_rate(runs)
    except ValueError as error:
        raise ValueError(f"--run {args.run}: {error}") from error
    if args.best_rate:
        print(best)
        return
    rows = []
    for rate, scores in sorted(runs.items(), key=lambda item: float(item[0])):
        values = [value for _, (value,) in sorted(scores.items())]
        rows.append((rate, mean_and_spread(values), " ".join(f"{value:.1f}" for value in values)))
    print(tabulate(rows, headers=("rate", f"{metric} on dev", "by seed"), disable_numparse=True))


# --- a little text in the same form


def imitate(args) -> None:
    """Write ``text.txt``, and the files of all tasks below ``glue``, with classes from the mood of film reviews."""
    with write_whole(args.out) as out:
        for part, most in (("train", args.lines), ("valid", args.lines // 10)):
            reviews = [line.split("\t") for line in read_lines(args.data / f"{part}.tsv.xz")[:most]]
            if part == "train":
                (out / "text.txt").write_text("".join(f"{review}\n" for _, review in reviews), "utf-8")
            for task in TASKS.values():
                columns = task.columns.split(",")
                lines = ["\t".join(columns)] if task.header else []
                for number, (mood, review) in enumerate(reviews):
                    cells = dict.fromkeys(columns, str(number)) | dict.fromkeys(task.inputs.split(","), review)
                    cells[task.label] = task.classes[int(mood)]
                    lines.append("\t".join(cells.values()))
                path = out / "glue" / task.folder / f"{'train' if part == 'train' else task.dev}.tsv"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="STEP")
    flags = {
        "--out": {"type": Path, "help": "folder to write"},
        "--text": {"type": Path, "nargs": "+", "help": "files, or folders of them"},
        "--vocabulary": {"type": Path, "help": "folder of the model"},
        "--task": {"choices": TASKS, "help": "of GLUE"},
    }

    def add(name: str, function, help: str, *names: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help)
        command.set_defaults(function=function)
        for flag in names:
            command.add_argument(flag, required=True, **flags[flag])
        return command

    vocabulary = add("vocabulary", train_vocabulary, "train SentencePiece", "--text", "--out")
    vocabulary.add_argument("--size", type=int, default=29998, help="pieces (default: %(default)s)")
    text = add("text", write_text, "binarise the text", "--text", "--vocabulary", "--out")
    text.add_argument(
        "--held-out", type=int, default=1000, help=f"one of so many blocks of {BLOCK} lines (default: %(default)s)"
    )
    task = add("task", write_task, "binarise a task of GLUE", "--task", "--vocabulary", "--out")
    task.add_argument("--glue", type=Path, required=True, help="folder of GLUE's folders")
    for command in (vocabulary, text, task):
        command.add_argument("--workers", type=int, default=1, help="threads (default: %(default)s)")
    table = add("table", print_table, "print the scores", "--task")
    table.add_argument("--run", type=Path, required=True, help="folder of the logs")
    table.add_argument("--best-rate", action="store_true", help="only print the learning rate that is best on dev")
    command = add("imitate", imitate, "a little text and all tasks in the same form", "--out")
    command.add_argument("--data", type=Path, required=True, help="folder with {train,valid}.tsv.xz")
    command.add_argument("--lines", type=int, default=300, help="of text and training set (default: %(default)s)")
    return parser


def main(argv: list[str] | None = None) -> int:
    return run(build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
