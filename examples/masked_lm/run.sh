#!/usr/bin/env bash
# Pretrain a small ALBERT on LibreOffice's help and the text of film reviews, fine-tune it on some labelled reviews, and
# compare it with the same model from random weights and with bag-of-words models. One thread, on the CPU.
#
#   examples/masked_lm/run.sh
#   RUN=other LAYERS=6 UPDATES=5000 examples/masked_lm/run.sh
#
# Stopped by Ctrl-C or otherwise, the same command goes on where it was; a finished step is not done again.
# Everything is set by environment variables:
#
#   RUN            folder for everything that is written
#   LAYERS, UNIQUE N layers from M parameter sets
#   EMBED, FFN, HEADS, FACTORIZED
#                  width H, inner width of the feed-forward sublayers, attention heads, width E of the embeddings
#   MODEL_ARGS     further flags of the model, split at spaces: by default an output table of its own
#   VOCAB          SentencePiece pieces; COPIES: how often the training reviews are in the text for pretraining
#   LABELLED       how many of the 8,024 training reviews have a label in fine-tuning
#   UPDATES, LR, WARMUP, MAX_TOKENS, MASKED
#                  pretraining: updates, highest learning rate, updates until it is reached, tokens per update, and the
#                  share of pieces to predict
#   TUNE_RATES     learning rates of fine-tuning; each is tried with the first seed, the best on valid is taken
#   TUNE_EPOCHS, TUNE_BATCH, SEEDS
#                  fine-tuning: epochs, sentences per update, and the seeds over which the table averages
set -euo pipefail

LAYERS=${LAYERS:-3}
UNIQUE=${UNIQUE:-1}
EMBED=${EMBED:-128}
FFN=${FFN:-512}
HEADS=${HEADS:-4}
FACTORIZED=${FACTORIZED:-64}
MODEL_ARGS=${MODEL_ARGS---untie-weights-roberta}
VOCAB=${VOCAB:-6000}
COPIES=${COPIES:-20}
LABELLED=${LABELLED:-2000}
UPDATES=${UPDATES:-3000}
LR=${LR:-2e-3}
WARMUP=${WARMUP:-300}
MAX_TOKENS=${MAX_TOKENS:-1024}
MASKED=${MASKED:-0.25}
TUNE_RATES=${TUNE_RATES:-1e-3}
TUNE_EPOCHS=${TUNE_EPOCHS:-6}
TUNE_BATCH=${TUNE_BATCH:-16}
SEEDS=${SEEDS:-1 2 3}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
RUN=${RUN:-$repo/masked-lm}
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONUNBUFFERED=1

say() { printf '\n== %s\n' "$*"; }
die() {
    printf 'run.sh: %s\n' "$*" >&2
    exit 2
}
# shown LOG PATTERN COMMAND...: one command; its whole output is added to LOG, the lines with PATTERN are shown.
shown() {
    local log=$1 pattern=$2 status=0
    shift 2
    "$@" 2>&1 | tee -a "$log" | { grep --line-buffered -E "$pattern" || true; } || status=$?
    if [ "$status" -ne 0 ]; then
        tail -n 12 "$log" >&2
        die "failed: the complete log is $log"
    fi
}

for module in fairseq sentencepiece sklearn; do
    python -c "import importlib.util as u, sys; sys.exit(u.find_spec('$module') is None)" 2>/dev/null ||
        die "the Python on PATH ($(command -v python || echo none)) has no $module: activate the environment first"
done
for name in LAYERS UNIQUE EMBED FFN HEADS FACTORIZED VOCAB COPIES LABELLED UPDATES MAX_TOKENS TUNE_EPOCHS TUNE_BATCH; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || die "$name=${!name} must be a whole number of at least 1"
done

# What may not change between two calls with the same RUN. Rates and seeds may: others are added.
mkdir -p "$RUN"
for name in LAYERS UNIQUE EMBED FFN HEADS FACTORIZED MODEL_ARGS VOCAB COPIES LABELLED UPDATES LR WARMUP MAX_TOKENS \
    MASKED TUNE_EPOCHS TUNE_BATCH; do
    printf '%s=%s\n' "$name" "${!name}"
done >"$RUN/settings.now"
if [ -e "$RUN/settings.txt" ]; then
    difference=$(diff "$RUN/settings.txt" "$RUN/settings.now" | grep '^[<>]' | tr '\n' ' ') || true
    [ -z "$difference" ] || die "RUN=$RUN was made with other settings ($difference): choose another RUN"
elif [ -n "$(find "$RUN" -mindepth 1 ! -name settings.now -print -quit)" ]; then
    die "RUN=$RUN is a folder with other contents: choose another RUN"
fi
mv "$RUN/settings.now" "$RUN/settings.txt"

say "1/4 pieces"
if [ ! -e "$RUN/data.done" ]; then
    python "$here/prepare.py" --out "$RUN" --vocabulary "$VOCAB" --review-copies "$COPIES" \
        --labelled "$LABELLED" | tee "$RUN/entropy.txt"
    preprocess() { python -m fairseq_cli.preprocess --only-source "$@" >>"$RUN/preprocess.log" 2>&1; }
    rm -rf "$RUN/bin" "$RUN/reviews"
    preprocess --trainpref "$RUN/train.text" --validpref "$RUN/valid.text,$RUN/valid1.text" \
        --testpref "$RUN/test.text" --destdir "$RUN/bin"
    for part in input0 label; do
        preprocess --trainpref "$RUN/train.$part" --validpref "$RUN/valid.$part" --testpref "$RUN/test.$part" \
            --destdir "$RUN/reviews/$part" $([ $part = label ] || echo --srcdict "$RUN/bin/dict.txt")
    done
    touch "$RUN/data.done"
else
    cat "$RUN/entropy.txt"
fi

# shellcheck disable=SC2206  # MODEL_ARGS is split on purpose
common=(
    --user-dir "$repo/fairseq_sharing" --cpu --arch albert_encoder
    --encoder-layers "$LAYERS" --encoder-unique-layers "$UNIQUE" --encoder-embed-dim "$EMBED"
    --encoder-ffn-embed-dim "$FFN" --encoder-attention-heads "$HEADS" --factorized-embed-dim "$FACTORIZED" $MODEL_ARGS
    --optimizer adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-6 --clip-norm 1.0 --lr-scheduler polynomial_decay
    --required-batch-size-multiple 1 --num-workers 0 --log-format simple --no-epoch-checkpoints
)

say "2/4 pretraining, $UPDATES updates"
if [ ! -e "$RUN/pretrain.done" ]; then
    shown "$RUN/pretrain.log" 'train_inner|valid on|parameter set|num. shared|Loaded checkpoint' \
        python -m fairseq_cli.train "$RUN/bin" "${common[@]}" --task masked_lm --criterion masked_lm \
        --sample-break-mode eos --tokens-per-sample 128 --mask-prob "$MASKED" --dropout 0 --attention-dropout 0 \
        --lr "$LR" --warmup-updates "$WARMUP" --total-num-update "$UPDATES" --max-update "$UPDATES" \
        --max-tokens "$MAX_TOKENS" --valid-subset valid,valid1 --log-interval 100 \
        --save-interval-updates 500 --keep-interval-updates 1 --validate-interval-updates 500 \
        --save-dir "$RUN/pretrained" --seed 1
    touch "$RUN/pretrain.done"
fi
grep 'valid on' "$RUN/pretrain.log" | tail -n 2

updates=$((($(wc -l <"$RUN/train.label") + TUNE_BATCH - 1) / TUNE_BATCH * TUNE_EPOCHS))
# tune START RATE SEED: fine-tune from the pretrained checkpoint or from random weights; all else is the same.
tune() {
    local folder=$RUN/tuned/$1/rate$2-seed$3 restore=()
    [ ! -e "$folder/done" ] || return 0
    [ "$1" != pretrained ] || restore=(--finetune-from-model "$RUN/pretrained/checkpoint_last.pt")
    mkdir -p "$folder"
    printf '%s, learning rate %s, seed %s\n' "$1" "$2" "$3"
    shown "$folder/train.log" 'valid on|Loaded checkpoint' \
        python -m fairseq_cli.train "$RUN/reviews" "${common[@]}" \
        --task sentence_prediction --criterion sentence_prediction --init-token 0 --num-classes 2 \
        --classification-head-name sentence_classification_head --dropout 0.1 --attention-dropout 0.1 \
        --weight-decay 0.01 --lr "$2" --warmup-updates $((updates * 6 / 100)) --total-num-update "$updates" \
        --max-epoch "$TUNE_EPOCHS" --max-sentences "$TUNE_BATCH" --valid-subset valid,test --log-interval 100 \
        --best-checkpoint-metric accuracy --maximize-best-checkpoint-metric \
        "${restore[@]+"${restore[@]}"}" --save-dir "$folder" --seed "$3"
    touch "$folder/done"
}

say "3/4 fine-tuning: learning rates $TUNE_RATES with seed ${SEEDS%% *}, then the best one with seeds $SEEDS"
for start in unpretrained pretrained; do
    for rate in $TUNE_RATES; do tune $start "$rate" "${SEEDS%% *}"; done
    rate=$(python "$here/compare.py" --run "$RUN" --best-rate $start)
    for seed in $SEEDS; do tune $start "$rate" "$seed"; done
done

say "4/4 accuracy in percent; every choice was made on valid"
python "$here/compare.py" --run "$RUN" | tee "$RUN/table.txt"
