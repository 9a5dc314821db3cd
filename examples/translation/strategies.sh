#!/usr/bin/env bash
# Compare the strategies with Vanilla and Universal at equal parameters, and at equal training time, on one CPU thread: the
# same text, pieces, batches, learning rates to choose from and seeds for all.
#
#   examples/translation/strategies.sh
#   SYSTEMS="vanilla cycle" NORMS=admin SEEDS=1 RUN=strategies-some examples/translation/strategies.sh
#   examples/translation/strategies.sh --dry-run    print every command; do and write nothing
#
# Each system is trained at each of LRS with the first seed; the rate with the best validation loss is taken for the
# other seeds. Each training is decoded at its end, and where it was in the time that Vanilla of the same NORM takes.
# Stopped by Ctrl-C or otherwise, the same command goes on from the last saved model; what is finished is not done
# again. Several calls with the same RUN, one for each core (taskset -c 0, taskset -c 1), divide the trainings. More
# SYSTEMS, NORMS, LRS and SEEDS (see ../strategies.sh) may be asked for in a later call.
LAYERS=${LAYERS:-6}             # N of each stack of the strategies, and of the model that shares nothing
UNIQUE=${UNIQUE:-3}             # M; Vanilla and Universal have so many layers
SHARED_WIDTH=${SHARED_WIDTH:-64} # of all but Universal; the FFN is four times as wide
UNIVERSAL_WIDTH=${UNIVERSAL_WIDTH:-100} # gives it the parameters of the others
HEADS=${HEADS:-4}
VOCAB=${VOCAB:-2000}          # SentencePiece pieces for both languages together
MAX_PIECES=${MAX_PIECES:-48}  # longer training sentences are left out
UPDATES=${UPDATES:-20000}     # training length
WARMUP=${WARMUP:-1600}        # updates until the learning rate is at its highest; then it falls with the square root
MAX_TOKENS=${MAX_TOKENS:-500} # tokens per update
DROPOUT=${DROPOUT:-0}
LOG_INTERVAL=${LOG_INTERVAL:-500} # updates between two lines of the log
VALIDATE=${VALIDATE:-1000}        # updates between two validations, each of which saves the model
AVERAGE=${AVERAGE:-5}             # how many saved models to average for decoding, or as many as there are
BEAM=${BEAM:-4}
LENPEN=${LENPEN:-1.0}
RUN=${RUN:-strategies-run} # folder for everything that is written

NEEDS="fairseq sentencepiece sacrebleu"
patience=--exclusive # while another call prepares the text
options=--dry-run
# shellcheck source=desk.sh
source "$(dirname "${BASH_SOURCE[0]}")/desk.sh"
# shellcheck source=../strategies.sh
source "$here/../strategies.sh"
results() { python "$here/strategies.py" "$RUN" "$@"; }

# decode NAME WHEN UPDATE: the average of the last models up to an update, into $RUN/NAME.WHEN.de.xz.
decode() {
    local name=$1 when=$2 last=$3
    average_models "$name" "$when" "$last"
    clear_unless_done "$name-decode-$when" "$RUN/$name-decode-$when.log"
    SHOW='Translated|rror:' step "$name-decode-$when" python -m fairseq_cli.generate "$RUN/data/bin" \
        --user-dir "$repo/fairseq_sharing" --task translation -s en -t de --path "$RUN/$name/averaged-$when.pt" \
        --gen-subset test --beam "$BEAM" --lenpen "$LENPEN" --max-len-a 2 --max-len-b 20 \
        --remove-bpe=sentencepiece --max-tokens 3000 --required-batch-size-multiple 1 --cpu --num-workers 0
    grep '^H-' "$RUN/$name-decode-$when.log" | sed 's/^H-//' | sort -n -k1,1 | cut -f3 | xz -9e >"$RUN/$name.$when.de.xz"
}

compare() {
    local name=$1 system=$2 norm=$3 lr=$4 seed=$5
    describe_model transformer "$system" "$norm" encoder decoder
    train "$name" "${model[@]}" --lr "$lr" --seed "$seed"
    try_twice "$name" "$system" "$norm" decode
}

begin LAYERS UNIQUE SHARED_WIDTH UNIVERSAL_WIDTH HEADS VOCAB MAX_PIECES UPDATES WARMUP MAX_TOKENS DROPOUT LOG_INTERVAL \
    VALIDATE AVERAGE BEAM LENPEN DATA
prepare_text
each_training
