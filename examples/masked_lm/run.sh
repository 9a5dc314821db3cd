#!/usr/bin/env bash
# Pretrain a small ALBERT on novels, addresses and the text of film reviews, fine-tune it on two small sets of labelled
# sentences, and compare it with the same model from random weights and with bag-of-words models. One thread, on the CPU.
#
#   examples/masked_lm/run.sh
#   RUN=other LAYERS=6 UPDATES=5000 examples/masked_lm/run.sh
#
# Stopped by Ctrl-C or otherwise, the same command goes on where it was; a finished step is not done again.
# Everything is set by environment variables:
LAYERS=${LAYERS:-3}                                # N layers
UNIQUE=${UNIQUE:-1}                                # from M parameter sets
EMBED=${EMBED:-128}                                # width H
FFN=${FFN:-512}                                    # inner width of the feed-forward sublayers
HEADS=${HEADS:-4}                                  # attention heads
FACTORIZED=${FACTORIZED:-64}                       # width E of the embeddings
MODEL_ARGS=${MODEL_ARGS---untie-weights-roberta}   # further flags of the model, split at spaces
VOCAB=${VOCAB:-6000}                               # SentencePiece pieces
COPIES=${COPIES:-8}                                # how often the training reviews are in the text for pretraining
UPDATES=${UPDATES:-30000}                          # length of pretraining
WARMUP=${WARMUP:-500}                              # updates until the learning rate is LR
LR=${LR:-2e-3}                                     # from where it falls in a line to zero
MAX_TOKENS=${MAX_TOKENS:-1024}                     # tokens per update
MASKED=${MASKED:-0.25}                             # share of pieces to predict
VALIDATE=${VALIDATE:-2500}                         # updates from one validation to the next
SETS=${SETS:-novels reviews}                       # what to fine-tune on
STARTS=${STARTS:-unpretrained pretrained}          # from what
LABELLED_NOVELS=${LABELLED_NOVELS:-1000}           # sentences with labels, of 34,854
LABELLED_REVIEWS=${LABELLED_REVIEWS:-2000}         # of 8,024
EPOCHS_NOVELS=${EPOCHS_NOVELS:-12}                 # epochs of fine-tuning
EPOCHS_REVIEWS=${EPOCHS_REVIEWS:-6}
TUNE_BATCH=${TUNE_BATCH:-16}                       # sentences per update
TUNE_RATES=${TUNE_RATES:-1e-3 2e-3}                # learning rates: each is tried with the first seed, the best on valid
SEEDS=${SEEDS:-1 2 3}                              # is taken for all of these, over which the table averages
RUN=${RUN:-masked-lm}                              # folder for everything that is written

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
# shellcheck source=../steps.sh
source "$here/../steps.sh"
read_options "" "$@"
export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}

NEEDS="fairseq sentencepiece sklearn"
for set in $SETS; do
    [[ $set =~ ^(novels|reviews)$ ]] || die "SETS=$SETS names $set: there are novels and reviews"
done
for start in $STARTS; do
    [[ $start =~ ^(unpretrained|pretrained)$ ]] || die "STARTS=$STARTS names $start: there are unpretrained and pretrained"
done
# Sets, starts, rates and seeds may change between two calls: others are added.
begin LAYERS UNIQUE EMBED FFN HEADS FACTORIZED MODEL_ARGS VOCAB COPIES UPDATES WARMUP LR MAX_TOKENS MASKED VALIDATE \
    LABELLED_NOVELS LABELLED_REVIEWS EPOCHS_NOVELS EPOCHS_REVIEWS TUNE_BATCH

SHOW='sentences,' step prepare python "$here/prepare.py" --out "$RUN" --vocabulary "$VOCAB" \
    --review-copies "$COPIES" --labelled-novels "$LABELLED_NOVELS" --labelled-reviews "$LABELLED_REVIEWS"
binarise() {
    local set part symbols preprocess=(python -m fairseq_cli.preprocess --only-source)
    rm -rf "$RUN/bin" "$RUN/novels" "$RUN/reviews"
    "${preprocess[@]}" --trainpref "$RUN/train.text" --validpref "$RUN/valid.text,$RUN/valid1.text" \
        --testpref "$RUN/test.text" --destdir "$RUN/bin" || return
    for set in novels reviews; do
        for part in input0 label; do
            symbols=()
            [ $part = label ] || symbols=(--srcdict "$RUN/bin/dict.txt")
            "${preprocess[@]}" --trainpref "$RUN/$set.train.$part" --validpref "$RUN/$set.valid.$part" \
                --testpref "$RUN/$set.test.$part" --destdir "$RUN/$set/$part" \
                ${symbols[@]+"${symbols[@]}"} || return
        done
    done
}
SHOW='types' step binarise binarise

# shellcheck disable=SC2206  # MODEL_ARGS is split on purpose
common=(
    --user-dir "$repo/fairseq_sharing" --cpu --arch albert_encoder
    --encoder-layers "$LAYERS" --encoder-unique-layers "$UNIQUE" --encoder-embed-dim "$EMBED"
    --encoder-ffn-embed-dim "$FFN" --encoder-attention-heads "$HEADS" --factorized-embed-dim "$FACTORIZED" $MODEL_ARGS
    --optimizer adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-6 --clip-norm 1.0 --lr-scheduler polynomial_decay
    --required-batch-size-multiple 1 --num-workers 0 --log-format simple --no-epoch-checkpoints
)
step pretrain python -m fairseq_cli.train "$RUN/bin" "${common[@]}" --task masked_lm --criterion masked_lm \
    --sample-break-mode eos --tokens-per-sample 128 --mask-prob "$MASKED" --dropout 0 --attention-dropout 0 \
    --lr "$LR" --warmup-updates "$WARMUP" --total-num-update "$UPDATES" --max-update "$UPDATES" \
    --max-tokens "$MAX_TOKENS" --valid-subset valid,valid1 --log-interval 100 \
    --save-interval-updates "$VALIDATE" --keep-interval-updates 1 --validate-interval-updates "$VALIDATE" \
    --save-dir "$RUN/pretrained" --seed 1
pack pretrain

# tune SET START RATE SEED: fine-tune from the pretrained checkpoint or from random weights; all else is the same.
tune() {
    local set=$1 start=$2 rate=$3 seed=$4 name restore=() labelled=LABELLED_${1^^} epochs=EPOCHS_${1^^} updates classes
    name=tune-$set-$start-$rate-seed$seed
    [ "$start" != pretrained ] || restore=(--finetune-from-model "$RUN/pretrained/checkpoint_last.pt")
    updates=$(((${!labelled} + TUNE_BATCH - 1) / TUNE_BATCH * ${!epochs}))
    classes=$(sort -u "$RUN/$set.train.label" | wc -l)
    SHOW="valid on 'valid' subset|Loaded checkpoint|rror:" step "$name" python -m fairseq_cli.train "$RUN/$set" \
        "${common[@]}" --task sentence_prediction --criterion sentence_prediction --init-token 0 \
        --num-classes "$classes" --classification-head-name sentence_classification_head \
        --dropout 0.1 --attention-dropout 0.1 --weight-decay 0.01 --lr "$rate" \
        --warmup-updates $((updates * 6 / 100)) --total-num-update "$updates" --max-epoch "${!epochs}" \
        --max-sentences "$TUNE_BATCH" --valid-subset valid,test --log-interval 100 \
        --best-checkpoint-metric accuracy --maximize-best-checkpoint-metric \
        "${restore[@]+"${restore[@]}"}" --save-dir "$RUN/$name" --seed "$seed"
    pack "$name"
}
for set in $SETS; do
    for start in $STARTS; do
        for rate in $TUNE_RATES; do tune "$set" $start "$rate" "${SEEDS%% *}"; done
        rate=$(python "$here/compare.py" --run "$RUN" --set "$set" --best-rate $start)
        for seed in $SEEDS; do tune "$set" $start "$rate" "$seed"; done
    done
done
printf '\n'
python "$here/compare.py" --run "$RUN" $(printf -- '--set %s ' $SETS) | tee "$RUN/table.txt"
