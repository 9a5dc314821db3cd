"""Print what run.sh found: the accuracy of the fine-tuned models beside the majority class and bag-of-words models.

Every choice (epoch, learning rate, bag of words) is made on the validation part; the test part is only reported.

Example:
    python examples/masked_lm/compare.py --run masked-lm --set novels --set reviews
"""

import argparse
from pathlib import Path

from prepare import read_labelled
from runs import best_rate, mean_and_spread, read_runs
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import MultinomialNB
from sklearn.pipeline import make_pipeline
from sklearn.svm import LinearSVC
from tabulate import tabulate

STARTS = ("unpretrained", "pretrained")


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


def best_bag_of_words(parts: dict[str, tuple[list[str], list[str]]]) -> tuple[str, float, float]:
    """Return name, validation and test accuracy (percent) of the pipeline that is best on validation."""
    tried = []
    for name, pipeline in bags_of_words():
        pipeline.fit(parts["train"][1], parts["train"][0])
        valid, test = (100 * pipeline.score(parts[part][1], parts[part][0]) for part in ("valid", "test"))
        tried.append((name, valid, test))
    return max(tried, key=lambda row: row[1])


def majority(labels: list[str]) -> float:
    """Return the accuracy of the label that is most frequent in ``labels`` themselves, in percent."""
    return 100 * max(map(labels.count, set(labels))) / len(labels)


def format_table(run: Path, name: str) -> str:
    """Return the table of one set, after a line for each learning rate that was not chosen.

    Raises:
        ValueError: no seed was run with every learning rate.
    """
    labelled = len((run / f"{name}.train.label").read_text("utf-8").splitlines())
    parts = read_labelled(name, labelled)
    lines = [f"{name}: {labelled:,} labelled sentences, {len(set(parts['train'][0]))} classes"]
    rows = [("majority class", "", *(f"{majority(parts[part][0]):.1f}" for part in ("valid", "test")), "")]
    found = {start: read_runs(run, name, start) for start in STARTS}
    for start, runs in found.items():
        if not runs and any(found.values()):
            continue  # not asked for
        chosen = best_rate(runs)
        for other in sorted(runs.keys() - {chosen}, key=float):
            seed, (valid, _) = min(runs[other].items())
            lines.append(f"{start}, learning rate {other}, seed {seed}: {valid:.1f} on valid, not chosen")
        valid, test = zip(*(accuracy for _, accuracy in sorted(runs[chosen].items())), strict=True)
        by_seed = " ".join(f"{value:.1f}" for value in test)
        rows.append((f"albert_encoder, {start}", chosen, mean_and_spread(valid), mean_and_spread(test), by_seed))
    best, valid, test = best_bag_of_words(parts)
    rows.append((best, "", f"{valid:.1f}", f"{test:.1f}", ""))
    table = tabulate(rows, headers=("", "rate", "valid", "test", "test, by seed"), disable_numparse=True)
    return "\n".join([*lines, table])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="the RUN of run.sh")
    parser.add_argument(
        "--set", choices=["novels", "reviews"], action="append", required=True, help="a set that was fine-tuned on"
    )
    parser.add_argument("--best-rate", choices=STARTS, help="only print the learning rate chosen for this start")
    args = parser.parse_args()
    try:
        if args.best_rate:
            print(*(best_rate(read_runs(args.run, name, args.best_rate)) for name in args.set))
        else:
            print("\n\n".join(format_table(args.run, name) for name in args.set))
    except ValueError as error:
        parser.error(f"--run {args.run}: {error}")


if __name__ == "__main__":
    main()
