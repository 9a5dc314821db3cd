#!/usr/bin/env bash
# Train a small language model whose layers share parameters, from text to perplexity and a sample, on one CPU thread.
#
#   examples/language_modeling/run.sh
#   ARCH=transformer_lm_shared_sequence RUN=lm-sequence examples/language_modeling/run.sh
#   DATA=my-text RUN=my-lm examples/language_modeling/run.sh          a folder with {train,valid,test}.txt, plain or .xz
#
# Stopped by Ctrl-C or otherwise, the same command goes on from the last saved model; a finished step is not done again.
ARCH=${ARCH:-transformer_lm_shared_cycle_rev}
LAYERS=${LAYERS:-6} # N
UNIQUE=${UNIQUE:-3} # M
EMBED=${EMBED:-128}
FFN=${FFN:-512}
HEADS=${HEADS:-4}
VOCAB=${VOCAB:-4000}     # pieces
UPDATES=${UPDATES:-2400} # training length; the learning rate falls to zero linearly
WARMUP=${WARMUP:-200}    # updates until the learning rate is LR
LR=${LR:-0.004}
CONTEXT=${CONTEXT:-128}      # pieces a block in training and evaluation
WINDOW=${WINDOW:-64}         # of these, pieces that the second evaluation gives as context only
MAX_TOKENS=${MAX_TOKENS:-1024} # pieces per update
DROPOUT=${DROPOUT:-0}
SAVES=${SAVES:-8} # how often during training to save and validate
SEED=${SEED:-1}
PROMPT=${PROMPT:-It was the opinion of the captain that}
RUN=${RUN:-lm-run} # folder for everything that is written

# shellcheck source=desk.sh
source "$(dirname "${BASH_SOURCE[0]}")/desk.sh"
best=$RUN/checkpoints/checkpoint_best.pt

begin ARCH LAYERS UNIQUE EMBED FFN HEADS VOCAB UPDATES WARMUP LR CONTEXT WINDOW MAX_TOKENS DROPOUT SEED DATA
prepare_text
sharing=()
case $ARCH in transformer_lm_shared_*) sharing=(--decoder-unique-layers "$UNIQUE") ;; esac
train train "$RUN/checkpoints" --arch "$ARCH" --decoder-layers "$LAYERS" ${sharing[@]+"${sharing[@]}"} \
    --decoder-embed-dim "$EMBED" --decoder-ffn-embed-dim "$FFN" --decoder-attention-heads "$HEADS" \
    --decoder-input-dim "$EMBED" --decoder-output-dim "$EMBED" \
    --lr "$LR" --lr-scheduler polynomial_decay --total-num-update "$UPDATES" --seed "$SEED" \
    --save-interval-updates "$((UPDATES > SAVES ? UPDATES / SAVES : 1))" --keep-interval-updates 1 \
    --log-format simple --log-interval "$((UPDATES > 60 ? UPDATES / 60 : 1))"
evaluate evaluate "$best"
evaluate evaluate-window "$best" --context-window "$WINDOW"
if [ "$(cat "$RUN/prompt.txt" 2>/dev/null)" != "$PROMPT" ]; then
    rm -f "$RUN/sample.done" "$RUN/sample.log" # of another prompt
    printf '%s\n' "$PROMPT" >"$RUN/prompt.txt"
fi
SHOW='^[SD]-' step sample python -m fairseq_cli.interactive "$bin" --input "$RUN/prompt.txt" \
    --user-dir "$plugin" --cpu \
    --task language_modeling --path "$best" --bpe sentencepiece --sentencepiece-model "$RUN/data/spm.model" \
    --sampling --sampling-topp 0.8 --beam 3 --nbest 3 --max-len-b 60 --seed "$SEED"
SHOW='\.png' step curve python -m fairseq_sharing.tools.main curves "$RUN/train.log" --out "$RUN/curve.png" --force
