# shellcheck shell=bash
# What run.sh and strategies.sh have in common: the clips, one training, its word error rates. Sourced, not run, once the
# variables are set: DATA, AUDIO, RUN, CONV, UPDATES, WARMUP, MAX_TOKENS, CTC, DROPOUT, SPECAUGMENT, BEAM.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
DATA=${DATA:-$here/data}
AUDIO=${AUDIO:-$DATA}
NEEDS="fairseq sentencepiece kaldi_native_fbank soundfile editdistance"
# shellcheck source=../steps.sh
source "$here/../steps.sh"
read_options "${options:-}" "$@"
export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
plugin=$repo/fairseq_sharing

# prepare_clips: the data folder of all trainings.
prepare_clips() {
    [ -n "$dry_run" ] || [ -e "$RUN/prepare.done" ] || rm -rf "$RUN/data" # of a call that was stopped
    SHOW='clips|error' step prepare python "$repo/scripts/prepare_speech.py" --audio-root "$AUDIO" \
        --train "$DATA/train.tsv" --valid "$DATA/valid.tsv" --test "$DATA/test.tsv" --vocab-type char \
        --specaugment "$SPECAUGMENT" --out "$RUN/data"
}

# train NAME FOLDER FLAGS...: train on one CPU thread. FLAGS are those of the model, the learning rate, the seed, and what
# to save and to log.
train() {
    local name=$1 folder=$2
    shift 2
    step "$name" python -m fairseq_cli.train "$RUN/data" --user-dir "$plugin" --task speech_to_text \
        --conv-channels "$CONV" --share-decoder-input-output-embed \
        --dropout "$DROPOUT" --attention-dropout "$DROPOUT" --activation-dropout "$DROPOUT" \
        --criterion label_smoothed_cross_entropy_with_ctc --ctc-weight "$CTC" --label-smoothing 0.1 --report-accuracy \
        --optimizer adam --adam-betas '(0.9, 0.98)' --lr-scheduler inverse_sqrt --warmup-updates "$WARMUP" \
        --clip-norm 10 --max-update "$UPDATES" --max-tokens "$MAX_TOKENS" --max-tokens-valid 20000 \
        --cpu --num-workers 0 --save-dir "$folder" --no-epoch-checkpoints --validate-interval 1000000 "$@"
}

# recognise NAME MODEL: decode the test part, and print the word error rates of each source of speech.
recognise() {
    clear_unless_done "$1" "$RUN/$1.log"
    SHOW='WER|^D-[0-7]	|rror:' step "$1" python -m fairseq_cli.generate "$RUN/data" --user-dir "$plugin" \
        --task speech_to_text --gen-subset test --path "$2" --beam "$BEAM" --scoring wer --max-tokens 20000 \
        --cpu --num-workers 0
}

# word_error_rates STEP NAME: of each source of speech, in what `recognise NAME` has left.
word_error_rates() {
    SHOW='words|rror' step "$1" python "$here/word_error_rates.py" "$RUN/$2.log" "$RUN/data/test.tsv"
}
