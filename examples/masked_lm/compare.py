"""Print what run.sh found: the accuracy of the fine-tuned models beside the majority class and bag-of-words models.

Every choice (epoch, learning rate, bag of words) is made on the validation reviews; the test reviews are only reported.

Example:
    python examples/masked_lm/compare.py --run masked-lm
"""

import argparse
import re
import statistics
from pathlib import Path

from prepare import choose, read_reviews
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import MultinomialNB
from sklearn.pipeline import make_pipeline
from sklearn.svm import LinearSVC
from tabulate import tabulate

LINE = re.compile(r"epoch (\d+) \| valid on '(valid|test)' subset .*\| accuracy ([\d.]+)")


def read_accuracy(log: Path) -> tuple[float, float] | None:
    """Return the validation accuracy of the best epoch and the test accuracy of the same epoch, in percent.

    An epoch that a resumed run repeated counts once. None where no epoch is complete.
    """
    epochs: dict[int, dict[str, float]] = {}
    for epoch, part, accuracy in LINE.findall(log.read_text("utf-8")):
        epochs.setdefault(int(epoch), {})[part] = float(accuracy)
    complete = [(found["valid"], found["test"]) for found in epochs.values() if len(found) == 2]
    return max(complete, key=lambda pair: pair[0], default=None)


def read_runs(folder: Path) -> dict[str, dict[int, tuple[float, float]]]:
    """Return (valid, test) of each finished run of one kind of start, by learning rate and seed."""
    runs: dict[str, dict[int, tuple[float, float]]] = {}
    for done in sorted(folder.glob("rate*-seed*/done")):
        rate, seed = re.fullmatch("rate(.+)-seed(.+)", done.parent.name).groups()
        accuracy = read_accuracy(done.parent / "train.log")
        if accuracy is not None:
            runs.setdefault(rate, {})[int(seed)] = accuracy
    return runs


def best_rate(runs: dict[str, dict[int, tuple[float, float]]]) -> str:
    """Return the learning rate with the best validation accuracy for the seed that all rates were tried with.

    Raises:
        ValueError: no seed was run with every rate.
    """
    common = set.intersection(*(set(seeds) for seeds in runs.values())) if runs else set()
    if not common:
        raise ValueError("no seed was run with every learning rate")
    return max(runs, key=lambda rate: (runs[rate][min(common)][0], -float(rate)))


def bags_of_words():
    """Yield the name and the pipeline of each model without word order to be tried."""
    for words, ngrams in (("words", (1, 1)), ("words and pairs", (1, 2))):
        yield f"naive Bayes, counts of {words}", make_pipeline(CountVectorizer(ngram_range=ngrams), MultinomialNB())
        for strength in (0.1, 0.3, 1, 3, 10):
            features = TfidfVectorizer(ngram_range=ngrams, sublinear_tf=True)
            yield (
                f"logistic regression C={strength}, TF-IDF of {words}",
                make_pipeline(features, LogisticRegression(C=strength, max_iter=1000)),
            )
            yield f"linear SVM C={strength}, TF-IDF of {words}", make_pipeline(features, LinearSVC(C=strength))


def best_bag_of_words(reviews: dict[str, tuple[list[str], list[str]]]) -> tuple[str, float, float]:
    """Return name, validation and test accuracy (percent) of the pipeline that is best on validation."""
    tried = []
    for name, pipeline in bags_of_words():
        pipeline.fit(reviews["train"][1], reviews["train"][0])
        valid, test = (100 * pipeline.score(reviews[part][1], reviews[part][0]) for part in ("valid", "test"))
        tried.append((name, valid, test))
    return max(tried, key=lambda row: row[1])


def majority(labels: list[str]) -> float:
    """Return the accuracy of the label that is most frequent in ``labels`` themselves, in percent."""
    return 100 * max(map(labels.count, set(labels))) / len(labels)


def mean_and_spread(values) -> str:
    """Return the mean and, over more than one seed, the standard deviation."""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="the RUN of run.sh")
    parser.add_argument(
        "--best-rate", choices=["unpretrained", "pretrained"], help="only print the learning rate chosen for this start"
    )
    args = parser.parse_args()
    runs = {start: read_runs(args.run / "tuned" / start) for start in ("unpretrained", "pretrained")}
    wanted = [args.best_rate] if args.best_rate else list(runs)
    try:
        rates = {start: best_rate(runs[start]) for start in wanted}
    except ValueError as error:
        parser.error(f"--run {args.run}: {error}")
    if args.best_rate:
        print(rates[args.best_rate])
        return

    reviews = {part: read_reviews(part, None) for part in ("train", "valid", "test")}
    labelled = len((args.run / "train.label").read_text("utf-8").splitlines())
    reviews["train"] = tuple(choose(part, labelled) for part in reviews["train"])
    rows = [("majority class", "", *(f"{majority(reviews[part][0]):.1f}" for part in ("valid", "test")), "")]
    for start, rate in rates.items():
        for other in sorted(runs[start], key=float):
            if other != rate:
                seed, (valid, _) = min(runs[start][other].items())
                print(f"{start}, learning rate {other}, seed {seed}: {valid:.1f} on valid, not chosen")
        valid, test = zip(*(accuracy for _, accuracy in sorted(runs[start][rate].items())), strict=True)
        by_seed = " ".join(f"{value:.1f}" for value in test)
        rows.append((f"albert_encoder, {start}", rate, mean_and_spread(valid), mean_and_spread(test), by_seed))
    name, valid, test = best_bag_of_words(reviews)
    rows.append((name, "", f"{valid:.1f}", f"{test:.1f}", ""))
    print(tabulate(rows, headers=("", "rate", "valid", "test", "test, by seed"), disable_numparse=True))


if __name__ == "__main__":
    main()
