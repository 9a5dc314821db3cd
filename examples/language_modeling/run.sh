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

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
DATA=${DATA:-$here/data}
# shellcheck source=../steps.sh
source "$here/../steps.sh"
export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
plugin=$repo/fairseq_sharing
bin=$RUN/bin
best=$RUN/checkpoints/checkpoint_best.pt

evaluate=(python -m fairseq_cli.eval_lm "$bin" --user-dir "$plugin" --path "$best" --gen-subset test
    --sample-break-mode none --tokens-per-sample "$CONTEXT" --max-tokens 4096 --cpu --num-workers 0)

begin ARCH LAYERS UNIQUE EMBED FFN HEADS VOCAB UPDATES WARMUP LR CONTEXT WINDOW MAX_TOKENS DROPOUT SEED DATA
# What a stopped call left of these two is in the way.
[ -e "$RUN/prepare.done" ] || rm -rf "$RUN/data"
[ -e "$RUN/binarise.done" ] || rm -rf "$bin"
SHOW='paragraphs|error' step prepare python "$here/prepare.py" --data "$DATA" --out "$RUN/data" --vocab-size "$VOCAB"
SHOW='replaced|rror' step binarise python -m fairseq_cli.preprocess --only-source --destdir "$bin" \
    --trainpref "$RUN/data/train.pieces" --validpref "$RUN/data/valid.pieces" --testpref "$RUN/data/test.pieces"
SHOW='perplexity|error' step unigram python -m fairseq_sharing.tools.main unigram "$bin" --subsets valid test
sharing=()
case $ARCH in transformer_lm_shared_*) sharing=(--decoder-unique-layers "$UNIQUE") ;; esac
step train python -m fairseq_cli.train "$bin" --user-dir "$plugin" --task language_modeling --arch "$ARCH" \
    --decoder-layers "$LAYERS" ${sharing[@]+"${sharing[@]}"} --decoder-embed-dim "$EMBED" \
    --decoder-ffn-embed-dim "$FFN" \
    --decoder-input-dim "$EMBED" --decoder-output-dim "$EMBED" --decoder-attention-heads "$HEADS" \
    --share-decoder-input-output-embed --dropout "$DROPOUT" --attention-dropout "$DROPOUT" \
    --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0 --lr "$LR" --lr-scheduler polynomial_decay \
    --warmup-updates "$WARMUP" --total-num-update "$UPDATES" --max-update "$UPDATES" \
    --sample-break-mode none --tokens-per-sample "$CONTEXT" --max-tokens "$MAX_TOKENS" --max-tokens-valid 4096 \
    --required-batch-size-multiple 1 \
    --seed "$SEED" --cpu --num-workers 0 --save-dir "$RUN/checkpoints" --no-epoch-checkpoints \
    --save-interval-updates "$((UPDATES > SAVES ? UPDATES / SAVES : 1))" --keep-interval-updates 1 \
    --log-format simple --log-interval "$((UPDATES > 60 ? UPDATES / 60 : 1))"
step evaluate "${evaluate[@]}"
step evaluate-window "${evaluate[@]}" --context-window "$WINDOW"
echo "$PROMPT" >"$RUN/prompt.txt"
SHOW='^[SD]-' step sample python -m fairseq_cli.interactive "$bin" --input "$RUN/prompt.txt" \
    --user-dir "$plugin" --cpu \
    --task language_modeling --path "$best" --bpe sentencepiece --sentencepiece-model "$RUN/data/spm.model" \
    --sampling --sampling-topp 0.8 --beam 3 --nbest 3 --max-len-b 60 --seed "$SEED"
SHOW='\.png' step curve python -m fairseq_sharing.tools.main curves "$RUN/train.log" --out "$RUN/curve.png"
