#!/usr/bin/env bash
# The published LibriSpeech experiment at full size, from download to word error rates: one call for each row.
#
#   SYSTEM=sequence examples/speech_to_text/librispeech.sh           16 + 8 layers from 8 + 4 parameter sets
#   SYSTEM=vanilla examples/speech_to_text/librispeech.sh --dry-run  print every command; do and write nothing
#   examples/speech_to_text/librispeech.sh --smoke                   every step, with a few clips, on one CPU thread
#
# Stopped or failed, the same call goes on where it was. The data is prepared once, for all rows. Layers, parameter sets
# and Pre-LN are the paper's; the rest is fairseq's recipe for a model of this width (s2t_transformer_m), of which it is
# not known what the paper changed; what neither says is marked "our choice".
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
# shellcheck source=../steps.sh
source "$here/../steps.sh"
read_options "--dry-run --smoke" "$@"
if [ -n "$smoke" ]; then # other defaults for what follows
    WORK=${WORK:-librispeech-smoke}
    VOCAB=${VOCAB:-60} DISK=${DISK:-1} TESTS=${TESTS:-test-clean}
    ENCODER_LAYERS=${ENCODER_LAYERS:-4} DECODER_LAYERS=${DECODER_LAYERS:-4} ENCODER_UNIQUE=${ENCODER_UNIQUE:-2}
    DECODER_UNIQUE=${DECODER_UNIQUE:-2} WIDTH=${WIDTH:-32} HEADS=${HEADS:-4}
    GPUS=${GPUS:-0} UPDATES=${UPDATES:-6} WARMUP=${WARMUP:-4} AVERAGE=${AVERAGE:-2} MAX_TOKENS=${MAX_TOKENS:-2000}
    BATCHES=${BATCHES:-1} DECODE_ARGS=${DECODE_ARGS:---max-len-b 10}
fi

# what
SYSTEM=${SYSTEM:-sequence} # vanilla, universal, sequence, cycle, cycle_rev
case $SYSTEM in
    sequence | cycle | cycle_rev) ENCODER_LAYERS=${ENCODER_LAYERS:-16} DECODER_LAYERS=${DECODER_LAYERS:-8} ;; # N
    *) ENCODER_LAYERS=${ENCODER_LAYERS:-6} DECODER_LAYERS=${DECODER_LAYERS:-6} ;;
esac
ENCODER_UNIQUE=${ENCODER_UNIQUE:-8} # M, the parameter sets of sequence, cycle and cycle_rev
DECODER_UNIQUE=${DECODER_UNIQUE:-4}
case $SYSTEM in
    universal) WIDTH=${WIDTH:-1088} ;; # about the parameters of the others; the width is our choice
    *) WIDTH=${WIDTH:-512} ;;
esac                              # the FFN is four times as wide
HEADS=${HEADS:-8}                 # of universal: our choice
SEED=${SEED:-1}                   # our choice
WORK=${WORK:-librispeech}         # folder for everything that is written

# data
TRAIN=${TRAIN:-train-clean-100 train-clean-360 train-other-500}
VALID=${VALID:-dev-clean dev-other}
TESTS=${TESTS:-dev-clean dev-other test-clean test-other}
VOCAB=${VOCAB:-10000}             # unigram pieces
SPECAUGMENT=${SPECAUGMENT:-ld}    # none, lb or ld
DISK=${DISK:-250}                 # GB that must be free: archives 61, audio 62, features 113, checkpoints 8
MIRROR=${MIRROR:-}                # URL to fetch the archives from, in place of www.openslr.org
CHECKSUMS=${CHECKSUMS:-}          # file of sha256sum for them, in place of the known checksums

# training, the same for all systems
GPUS=${GPUS:-8}                   # our choice; 0: one CPU thread
LR=${LR:-0.001}
WARMUP=${WARMUP:-10000}
UPDATES=${UPDATES:-300000}
MAX_TOKENS=${MAX_TOKENS:-40000}   # frames of 10 ms of a batch on one GPU
BATCHES=${BATCHES:-8}             # in an update, over all GPUs
DROPOUT=${DROPOUT:-0.15}
CLIP=${CLIP:-10.0}
SMOOTHING=${SMOOTHING:-0.1}
AVERAGE=${AVERAGE:-10}            # of the last epochs
BEAM=${BEAM:-5}
TRAIN_ARGS=${TRAIN_ARGS:-}        # further flags for fairseq-train, such as --fp16, split at spaces
DECODE_ARGS=${DECODE_ARGS:-}      # for fairseq-generate

NEEDS="fairseq sentencepiece kaldi_native_fbank soundfile editdistance"
export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
need_whole_numbers ENCODER_LAYERS DECODER_LAYERS ENCODER_UNIQUE DECODER_UNIQUE WIDTH HEADS SEED VOCAB DISK GPUS WARMUP \
    UPDATES MAX_TOKENS BATCHES AVERAGE BEAM

case $SYSTEM in
    vanilla) model=(--arch s2t_transformer --share-decoder-input-output-embed) ;;
    universal) model=(--arch s2t_transformer_shared_universal --share-decoder-input-output-embed) ;; # M = 1
    sequence | cycle | cycle_rev)
        for stack in ENCODER DECODER; do
            layers=${stack}_LAYERS unique=${stack}_UNIQUE
            [ "${!unique}" -ge 1 ] && [ "${!unique}" -le "${!layers}" ] ||
                die "$unique=${!unique} must be between 1 and $layers=${!layers}"
        done
        model=(--arch "s2t_transformer_shared_${SYSTEM}_librispeech"
            --encoder-unique-layers "$ENCODER_UNIQUE" --decoder-unique-layers "$DECODER_UNIQUE")
        ;;
    *) die "SYSTEM=$SYSTEM is none of vanilla, universal, sequence, cycle, cycle_rev" ;;
esac
model+=(--encoder-layers "$ENCODER_LAYERS" --decoder-layers "$DECODER_LAYERS" --encoder-normalize-before
    --decoder-normalize-before --encoder-embed-dim "$WIDTH" --encoder-ffn-embed-dim "$((4 * WIDTH))"
    --encoder-attention-heads "$HEADS" --decoder-attention-heads "$HEADS" --dropout "$DROPOUT")
use_gpus --num-workers 4

# --- data, once for all systems
RUN=$WORK/data
data=$RUN
[ -n "$dry_run" ] || [ -e "$RUN/prepare.done" ] || need_space "$DISK" "$WORK"
read -ra training_sets <<<"$TRAIN"
read -ra valid_sets <<<"$VALID"
read -ra test_sets <<<"$TESTS"
further=() # sets that are not for training, each once
parts=()
for name in "${valid_sets[@]}" "${test_sets[@]}"; do
    [[ " ${further[*]-} " == *" $name "* ]] || further+=("$name") parts+=(--part "$name" "$data/tsv/$name.tsv")
done
sets=("${training_sets[@]}" "${further[@]}")
begin TRAIN VALID TESTS VOCAB SPECAUGMENT
download_archives "$here/librispeech.py" --sets "${sets[@]}"
SHOW='clips|already|rror:' step unpack python "$here/librispeech.py" unpack --sets "${sets[@]}" \
    --archives "$archives" --out "$data/audio"
clear_unless_done manifests "$data/tsv"
SHOW='clips|rror:' step manifests python "$here/librispeech.py" manifests --sets "${sets[@]}" \
    --audio "$data/audio" --out "$data/tsv"
clear_unless_done prepare "$data/features"
SHOW='clips|rror:' step prepare python "$repo/scripts/prepare_speech.py" --audio-root "$data/audio" \
    --train "$data/tsv/train.tsv" "${parts[@]}" --vocab-type unigram --vocab-size "$VOCAB" \
    --specaugment "$SPECAUGMENT" --resume --out "$data/features"

# --- one system
RUN=$WORK/$SYSTEM-$ENCODER_LAYERS-$DECODER_LAYERS-seed$SEED
checkpoints=$RUN/checkpoints
begin SYSTEM ENCODER_LAYERS DECODER_LAYERS ENCODER_UNIQUE DECODER_UNIQUE WIDTH HEADS SEED LR WARMUP UPDATES MAX_TOKENS \
    BATCHES DROPOUT CLIP SMOOTHING AVERAGE BEAM TRAIN_ARGS DECODE_ARGS TRAIN VALID VOCAB SPECAUGMENT
# shellcheck disable=SC2086  # TRAIN_ARGS is split on purpose
step train python -m fairseq_cli.train "$data/features" --user-dir "$repo/fairseq_sharing" --task speech_to_text \
    --config-yaml config.yaml --train-subset train --valid-subset "$(IFS=, && echo "${valid_sets[*]}")" "${model[@]}" \
    --criterion label_smoothed_cross_entropy --label-smoothing "$SMOOTHING" --report-accuracy \
    --optimizer adam --clip-norm "$CLIP" --lr "$LR" --lr-scheduler inverse_sqrt --warmup-updates "$WARMUP" \
    --max-tokens "$MAX_TOKENS" --max-update "$UPDATES" "${training[@]}" --seed "$SEED" \
    --save-dir "$checkpoints" --keep-last-epochs "$AVERAGE" --log-format simple --log-interval 100 $TRAIN_ARGS
SHOW='averaged|rror:' step average python -m fairseq_sharing.tools.main average --inputs "$checkpoints" \
    --num-epoch-checkpoints "$AVERAGE" --output "$checkpoints/averaged.pt" --force
for name in "${test_sets[@]}"; do
    clear_unless_done "decode-$name" "$RUN/decode-$name.log"
    # shellcheck disable=SC2086  # DECODE_ARGS too
    SHOW='WER|rror:' step "decode-$name" python -m fairseq_cli.generate "$data/features" \
        --user-dir "$repo/fairseq_sharing" --task speech_to_text --config-yaml config.yaml --gen-subset "$name" \
        --path "$checkpoints/averaged.pt" --beam "$BEAM" --scoring wer --max-tokens 50000 "${decoding[@]}" \
        $DECODE_ARGS
done
if [ -z "$dry_run" ]; then
    printf '\n== %s, %s + %s layers\n' "$SYSTEM" "$ENCODER_LAYERS" "$DECODER_LAYERS"
    if [ -n "$smoke" ]; then echo "a smoke test of the steps, on other clips: the rates say nothing"; fi
    printf '%-10s  %s\n' parameters "$(parameters_of "$RUN/train.log")"
    for name in "${test_sets[@]}"; do
        printf '%-10s  WER %s\n' "$name" "$(sed -n 's/.*: WER: //p' "$RUN/decode-$name.log" | tail -n 1)"
    done
fi
