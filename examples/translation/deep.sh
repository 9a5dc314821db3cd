#!/usr/bin/env bash
# Train deep Post-LN stacks with and without scaled residual connections (Admin), and Pre-LN beside them, on one CPU
# thread, one after another with the same data, seed and learning rate.
#
#   examples/translation/deep.sh
#   LAYERS="12 18" SEEDS="1 2 3" LRS="0.002 0.008" examples/translation/deep.sh
#   examples/translation/deep.sh --dry-run    print every command; do and write nothing
#
# Stopped by Ctrl-C or otherwise, the same command goes on from the last saved model; a finished training is not done
# again. More LAYERS, SEEDS, LRS and SYSTEMS may be asked for in a later call with the same RUN.
LAYERS=${LAYERS:-12}                                # N of each stack; several with spaces between them, like the next three
SEEDS=${SEEDS:-1}
LRS=${LRS:-0.002}                                   # the highest learning rate, reached after WARMUP updates
SYSTEMS=${SYSTEMS:-none admin admin-static pre-ln}  # --residual-scaling of Post-LN; or Pre-LN
ARCH=${ARCH:-transformer_shared_cycle_rev}
UNIQUE=${UNIQUE:-6} # M
EMBED=${EMBED:-64}
FFN=${FFN:-256}
HEADS=${HEADS:-4}
VOCAB=${VOCAB:-2000}           # SentencePiece pieces for both languages together
MAX_PIECES=${MAX_PIECES:-48}   # longer training sentences are left out
UPDATES=${UPDATES:-400}        # training length
WARMUP=${WARMUP:-64}           # the recipe's share of training: 8,000 of 50,000 updates
MAX_TOKENS=${MAX_TOKENS:-1000} # tokens per update
DROPOUT=${DROPOUT:-0}
LOG_INTERVAL=${LOG_INTERVAL:-20} # updates between two lines of the log
VALIDATE=${VALIDATE:-100}       # updates between two validations, each of which saves the model
RUN=${RUN:-deep-run}           # folder for everything that is written

options=--dry-run
# shellcheck source=desk.sh
source "$(dirname "${BASH_SOURCE[0]}")/desk.sh"

begin ARCH UNIQUE EMBED FFN HEADS VOCAB MAX_PIECES UPDATES WARMUP MAX_TOKENS DROPOUT LOG_INTERVAL VALIDATE DATA
prepare_text
widths=(--encoder-embed-dim "$EMBED" --decoder-embed-dim "$EMBED" --encoder-ffn-embed-dim "$FFN"
    --decoder-ffn-embed-dim "$FFN" --encoder-attention-heads "$HEADS" --decoder-attention-heads "$HEADS")
sharing=()
case $ARCH in transformer_shared_*) sharing=(--encoder-unique-layers "$UNIQUE" --decoder-unique-layers "$UNIQUE") ;; esac
for layers in $LAYERS; do
    for lr in $LRS; do
        for seed in $SEEDS; do
            for system in $SYSTEMS; do
                case $system in
                    pre-ln) residual=(--encoder-normalize-before --decoder-normalize-before) ;;
                    *) residual=(--residual-scaling "$system") ;;
                esac
                train "$system-layers$layers-lr$lr-updates$UPDATES-tokens$MAX_TOKENS-seed$seed" --arch "$ARCH" \
                    --encoder-layers "$layers" --decoder-layers "$layers" "${widths[@]}" \
                    ${sharing[@]+"${sharing[@]}"} "${residual[@]}" --lr "$lr" --seed "$seed" --log-layer-gradient-norms --keep-interval-updates 1
            done
        done
    done
done
