#!/usr/bin/env bash
# Train a small speech-to-text model whose layers share parameters, from audio to word error rates, on one CPU thread.
#
#   DATA=corpus examples/speech_to_text/run.sh                    a folder with {train,valid,test}.tsv, and audio
#   DATA=corpus AUDIO=/audio RUN=speech-sequence ARCH=s2t_transformer_shared_sequence_s examples/speech_to_text/run.sh
#
# The TSVs have the columns audio (a path below AUDIO, which is DATA unless set) and text. Stopped by Ctrl-C or
# otherwise, the same command goes on from the last saved model; a finished step is not done again.
ARCH=${ARCH:-s2t_transformer_shared_sequence_s}
ENCODER_LAYERS=${ENCODER_LAYERS:-6} # N of the encoder
ENCODER_UNIQUE=${ENCODER_UNIQUE:-3} # M of the encoder
DECODER_LAYERS=${DECODER_LAYERS:-4} # N of the decoder
DECODER_UNIQUE=${DECODER_UNIQUE:-2} # M of the decoder
EMBED=${EMBED:-128}
FFN=${FFN:-512}
CONV=${CONV:-128} # channels of the convolutions that shorten the input
HEADS=${HEADS:-4}
UPDATES=${UPDATES:-3000} # training length
WARMUP=${WARMUP:-300}    # updates until the learning rate is LR, after which it falls with the square root
LR=${LR:-0.002}
MAX_TOKENS=${MAX_TOKENS:-8000} # frames of 10 ms per update
CTC=${CTC:-0.3}                # weight of the CTC loss on the encoder
DROPOUT=${DROPOUT:-0.1}
SPECAUGMENT=${SPECAUGMENT:-lb} # none, lb or ld
SAVES=${SAVES:-8}              # how often during training to save and validate
BEAM=${BEAM:-5}
SEED=${SEED:-1}
RUN=${RUN:-speech-run} # folder for everything that is written

# shellcheck source=desk.sh
source "$(dirname "${BASH_SOURCE[0]}")/desk.sh"

begin ARCH ENCODER_LAYERS ENCODER_UNIQUE DECODER_LAYERS DECODER_UNIQUE EMBED FFN CONV HEADS UPDATES WARMUP LR \
    MAX_TOKENS CTC DROPOUT SPECAUGMENT SAVES BEAM SEED DATA AUDIO
prepare_clips
sharing=()
case $ARCH in
    s2t_transformer_shared_*)
        sharing=(--encoder-unique-layers "$ENCODER_UNIQUE" --decoder-unique-layers "$DECODER_UNIQUE") ;;
esac
train train "$RUN/checkpoints" --arch "$ARCH" \
    --encoder-layers "$ENCODER_LAYERS" --decoder-layers "$DECODER_LAYERS" ${sharing[@]+"${sharing[@]}"} \
    --encoder-embed-dim "$EMBED" --encoder-ffn-embed-dim "$FFN" \
    --encoder-attention-heads "$HEADS" --decoder-attention-heads "$HEADS" --lr "$LR" --seed "$SEED" \
    --save-interval-updates "$((UPDATES > SAVES ? UPDATES / SAVES : 1))" --keep-interval-updates 1 \
    --log-format simple --log-interval "$((UPDATES > 60 ? UPDATES / 60 : 1))"
recognise generate "$RUN/checkpoints/checkpoint_best.pt"
word_error_rates word-error-rates generate
SHOW='\.png' step curve python -m fairseq_sharing.tools.main curves "$RUN/train.log" --out "$RUN/curve.png" --force
