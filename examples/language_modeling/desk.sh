# shellcheck shell=bash
# What run.sh and strategies.sh have in common: the text, one training, its evaluation. Sourced, not run, once the variables
# are set: DATA, RUN, VOCAB, CONTEXT, WARMUP, MAX_TOKENS, DROPOUT, UPDATES.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
DATA=${DATA:-$here/data}
# shellcheck source=../steps.sh
source "$here/../steps.sh"
read_options "${options:-}" "$@"
export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
plugin=$repo/fairseq_sharing
bin=$RUN/bin

# prepare_text: the data folder of all trainings, and what its unigrams are worth.
prepare_text() {
    # What a stopped call left of the first two is in the way.
    [ -n "$dry_run" ] || [ -e "$RUN/prepare.done" ] || rm -rf "$RUN/data"
    [ -n "$dry_run" ] || [ -e "$RUN/binarise.done" ] || rm -rf "$bin"
    SHOW='paragraphs|error' step prepare python "$here/prepare.py" --data "$DATA" --out "$RUN/data" --vocab-size "$VOCAB"
    SHOW='replaced|rror' step binarise python -m fairseq_cli.preprocess --only-source --destdir "$bin" \
        --trainpref "$RUN/data/train.pieces" --validpref "$RUN/data/valid.pieces" --testpref "$RUN/data/test.pieces"
    SHOW='perplexity|error' step unigram python -m fairseq_sharing.tools.main unigram "$bin" --subsets valid test
}

# train NAME FOLDER FLAGS...: train on one CPU thread. FLAGS are those of the model, the learning rate and its schedule, the
# seed, and what to save and to log.
train() {
    local name=$1 folder=$2
    shift 2
    step "$name" python -m fairseq_cli.train "$bin" --user-dir "$plugin" --task language_modeling \
        --share-decoder-input-output-embed --dropout "$DROPOUT" --attention-dropout "$DROPOUT" \
        --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0 --warmup-updates "$WARMUP" --max-update "$UPDATES" \
        --sample-break-mode none --tokens-per-sample "$CONTEXT" --max-tokens "$MAX_TOKENS" --max-tokens-valid 4096 \
        --required-batch-size-multiple 1 --cpu --num-workers 0 --save-dir "$folder" --no-epoch-checkpoints "$@"
}

# evaluate NAME MODEL FLAGS...: the perplexity of the test part.
evaluate() {
    local name=$1 path=$2
    shift 2
    step "$name" python -m fairseq_cli.eval_lm "$bin" --user-dir "$plugin" --path "$path" --gen-subset test \
        --sample-break-mode none --tokens-per-sample "$CONTEXT" --max-tokens 4096 --cpu --num-workers 0 "$@"
}
