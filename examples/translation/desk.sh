# shellcheck shell=bash
# What the comparisons at desk size have in common: the quick start's text, and one training. Sourced, not run, once the
# variables are set: DATA, RUN, VOCAB, MAX_PIECES, WARMUP, MAX_TOKENS, DROPOUT, UPDATES, LOG_INTERVAL, VALIDATE.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
DATA=${DATA:-$here/data}
# shellcheck source=../steps.sh
source "$here/../steps.sh"
read_options "${options:-}" "$@"
export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}

# prepare_text: the data folder of all trainings.
prepare_text() {
    [ -n "$dry_run" ] || [ -e "$RUN/prepare.done" ] || rm -rf "$RUN/data"
    SHOW='pairs|rror' step prepare python "$repo/scripts/prepare_translation.py" -s en -t de --out "$RUN/data" \
        --train "$DATA/train.en.xz" "$DATA/train.de.xz" --valid "$DATA/valid.en.xz" "$DATA/valid.de.xz" \
        --test "$DATA/test.en.xz" "$DATA/test.de.xz" --vocab-size "$VOCAB" --max-pieces "$MAX_PIECES"
}

# train NAME FLAGS...: train on one CPU thread, into $RUN/NAME. FLAGS are those of the model, the learning rate, the seed
# and what to keep.
train() {
    local name=$1
    shift
    SHOW='valid_loss|residual scalings|Loaded checkpoint|rror:' \
        step "$name" python -m fairseq_cli.train "$RUN/data/bin" --user-dir "$repo/fairseq_sharing" \
        --task translation -s en -t de --share-all-embeddings --dropout "$DROPOUT" \
        --criterion label_smoothed_cross_entropy --label-smoothing 0.1 \
        --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 0 \
        --lr-scheduler inverse_sqrt --warmup-updates "$WARMUP" --warmup-init-lr 1e-07 \
        --max-tokens "$MAX_TOKENS" --required-batch-size-multiple 1 --max-update "$UPDATES" \
        --cpu --num-workers 0 --save-dir "$RUN/$name" --no-epoch-checkpoints \
        --save-interval-updates "$VALIDATE" --validate-interval 1000000 --save-interval 1000000 \
        --log-format json --log-interval "$LOG_INTERVAL" "$@"
    pack "$name"
}
