#!/usr/bin/env bash
# Compare the strategies with Vanilla and Universal at equal parameters, and at equal training time, on one CPU thread: the
# same clips, letters, batches, learning rates to choose from and seeds for all.
#
#   DATA=corpus examples/speech_to_text/strategies.sh    a folder with {train,valid,test}.tsv, and audio
#   DATA=corpus SYSTEMS="vanilla cycle" SEEDS=1 RUN=speech-some examples/speech_to_text/strategies.sh
#   DATA=corpus examples/speech_to_text/strategies.sh --dry-run    print every command; do and write nothing
#
# The TSVs have the columns audio (a path below AUDIO, which is DATA unless set) and text. Each system is trained at each
# of LRS with the first seed; the rate with the best validation loss is taken for the other seeds. Each training is
# decoded at its end, and where it was in the time that Vanilla takes. Stopped by Ctrl-C or otherwise, the same command
# goes on from the last saved model; what is finished is not done again. Several calls with the same RUN, one for each
# core (taskset -c 0, taskset -c 1), divide the trainings. More SYSTEMS, LRS and SEEDS (see ../strategies.sh) may be asked
# for in a later call.
LAYERS=${LAYERS:-6}              # N of each stack of the strategies, and of the model that shares nothing
UNIQUE=${UNIQUE:-3}              # M; Vanilla and Universal have so many layers
SHARED_WIDTH=${SHARED_WIDTH:-64} # of all but Universal; the FFN is four times as wide
UNIVERSAL_WIDTH=${UNIVERSAL_WIDTH:-108} # gives it the parameters of the others
CONV=${CONV:-64}                 # channels of the convolutions that shorten the input
HEADS=${HEADS:-4}
UPDATES=${UPDATES:-20000}      # training length
WARMUP=${WARMUP:-1600}         # updates until the learning rate is at its highest; then it falls with the square root
MAX_TOKENS=${MAX_TOKENS:-4000} # frames of 10 ms per update; no clip may be longer
CTC=${CTC:-0.3}                # weight of the CTC loss on the encoder
DROPOUT=${DROPOUT:-0}
SPECAUGMENT=${SPECAUGMENT:-none}  # none, lb or ld
LOG_INTERVAL=${LOG_INTERVAL:-500} # updates between two lines of the log
VALIDATE=${VALIDATE:-1000}        # updates between two validations, each of which saves the model
AVERAGE=${AVERAGE:-5}             # how many saved models to average for decoding, or as many as there are
BEAM=${BEAM:-5}
NORMS=${NORMS:-pre-ln}            # fairseq-train has no flag for others in speech
RUN=${RUN:-speech-strategies-run} # folder for everything that is written

patience=--exclusive # while another call prepares the clips
options=--dry-run
# shellcheck source=desk.sh
source "$(dirname "${BASH_SOURCE[0]}")/desk.sh"
# shellcheck source=../strategies.sh
source "$here/../strategies.sh"
[ ! "$DATA" -ef "$here/data" ] || die "DATA= must name a folder with train.tsv, valid.tsv, test.tsv and audio: the 28 clips in" \
    "$DATA are too few to compare anything"
[ "$NORMS" = pre-ln ] || die "NORMS=$NORMS: fairseq-train has no flag for a speech-to-text Transformer that is not Pre-LN"
results() { python "$here/strategies.py" "$RUN" "$@"; }

# rates NAME WHEN UPDATE: word error rates of the average of the last models up to an update, into $RUN/NAME.WHEN.txt.
rates() {
    local name=$1 when=$2 last=$3
    average_models "$name" "$when" "$last"
    recognise "$name-decode-$when" "$RUN/$name/averaged-$when.pt"
    word_error_rates "$name-rates-$when" "$name-decode-$when"
    grep words "$RUN/$name-rates-$when.log" >"$RUN/$name.$when.txt"
}

compare() {
    local name=$1 system=$2 norm=$3 lr=$4 seed=$5
    describe_model s2t_transformer "$system" "$norm" encoder decoder
    train "$name" "$RUN/$name" "${model[@]}" --lr "$lr" --seed "$seed" \
        --save-interval-updates "$VALIDATE" --save-interval 1000000 --log-format json --log-interval "$LOG_INTERVAL"
    pack "$name"
    try_twice "$name" "$system" "$norm" rates
}

begin LAYERS UNIQUE SHARED_WIDTH UNIVERSAL_WIDTH CONV HEADS UPDATES WARMUP MAX_TOKENS CTC DROPOUT SPECAUGMENT LOG_INTERVAL \
    VALIDATE AVERAGE BEAM DATA AUDIO
prepare_clips
each_training
