#!/usr/bin/env bash
# Compare the strategies with Vanilla and Universal at equal parameters, and at equal training time, on one CPU thread: the
# same text, pieces, batches, learning rates to choose from and seeds for all.
#
#   examples/language_modeling/strategies.sh
#   SYSTEMS="vanilla cycle" NORMS=pre-ln SEEDS=1 RUN=lm-some examples/language_modeling/strategies.sh
#   examples/language_modeling/strategies.sh --dry-run    print every command; do and write nothing
#
# Each system is trained at each of LRS with the first seed; the rate with the best validation loss is taken for the
# other seeds. Each training is evaluated on the test part at its end, and where it was in the time that Vanilla of the
# same NORM takes. Stopped by Ctrl-C or otherwise, the same command goes on from the last saved model; what is finished
# is not done again. Several calls with the same RUN, one for each core (taskset -c 0, taskset -c 1), divide the
# trainings. More SYSTEMS, NORMS, LRS and SEEDS (see ../strategies.sh) may be asked for in a later call.
LAYERS=${LAYERS:-6}             # N of the strategies, and of the model that shares nothing
UNIQUE=${UNIQUE:-3}             # M; Vanilla and Universal have so many layers
SHARED_WIDTH=${SHARED_WIDTH:-64} # of all but Universal; the FFN is four times as wide
UNIVERSAL_WIDTH=${UNIVERSAL_WIDTH:-84} # gives it the parameters of the others
HEADS=${HEADS:-4}
VOCAB=${VOCAB:-4000}          # pieces
CONTEXT=${CONTEXT:-128}       # pieces a block in training and evaluation
UPDATES=${UPDATES:-20000}     # training length
WARMUP=${WARMUP:-1600}        # updates until the learning rate is at its highest; then it falls with the square root
MAX_TOKENS=${MAX_TOKENS:-512} # pieces per update
DROPOUT=${DROPOUT:-0}
LOG_INTERVAL=${LOG_INTERVAL:-500} # updates between two lines of the log
VALIDATE=${VALIDATE:-1000}        # updates between two validations, each of which saves the model
AVERAGE=${AVERAGE:-5}             # how many saved models to average for the evaluation, or as many as there are
RUN=${RUN:-lm-strategies-run}     # folder for everything that is written

patience=--exclusive # while another call prepares the text
options=--dry-run
# shellcheck source=desk.sh
source "$(dirname "${BASH_SOURCE[0]}")/desk.sh"
# shellcheck source=../strategies.sh
source "$here/../strategies.sh"
results() { python "$here/strategies.py" "$RUN" "$@"; }

# perplexity NAME WHEN UPDATE: of the average of the last models up to an update, into $RUN/NAME.WHEN.txt.
perplexity() {
    local name=$1 when=$2 last=$3
    average_models "$name" "$when" "$last"
    evaluate "$name-evaluate-$when" "$RUN/$name/averaged-$when.pt"
    grep -o 'Loss (base 2): .*' "$RUN/$name-evaluate-$when.log" | tail -n 1 >"$RUN/$name.$when.txt"
}

compare() {
    local name=$1 system=$2 norm=$3 lr=$4 seed=$5
    describe_model transformer_lm "$system" "$norm" decoder
    train "$name" "$RUN/$name" "${model[@]}" --decoder-input-dim "$WIDTH" --decoder-output-dim "$WIDTH" \
        --lr "$lr" --lr-scheduler inverse_sqrt --warmup-init-lr 1e-07 --seed "$seed" \
        --save-interval-updates "$VALIDATE" --validate-interval 1000000 --save-interval 1000000 \
        --log-format json --log-interval "$LOG_INTERVAL"
    pack "$name"
    try_twice "$name" "$system" "$norm" perplexity
}

begin LAYERS UNIQUE SHARED_WIDTH UNIVERSAL_WIDTH HEADS VOCAB CONTEXT UPDATES WARMUP MAX_TOKENS DROPOUT LOG_INTERVAL \
    VALIDATE AVERAGE DATA
prepare_text
each_training
