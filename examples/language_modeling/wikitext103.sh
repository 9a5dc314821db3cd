#!/usr/bin/env bash
# The published WikiText-103 experiment at full size, from download to perplexity: one call for each row of the table.
#
#   SYSTEM=sequence examples/language_modeling/wikitext103.sh           12 layers from 6 parameter sets
#   SYSTEM=vanilla examples/language_modeling/wikitext103.sh --dry-run  print every command; do and write nothing
#   examples/language_modeling/wikitext103.sh --smoke                   every step, with a little text, on one CPU thread
#
# Stopped or failed, the same call goes on where it was. The data is prepared once, for all rows. Layers, parameter sets,
# adaptive inputs and the number of updates are the paper's; the rest is fairseq's recipe for adaptive inputs, of which it
# is not known what the paper changed; what neither says is marked "our choice".
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
# shellcheck source=../steps.sh
source "$here/../steps.sh"
read_options "--dry-run --smoke" "$@"
if [ -n "$smoke" ]; then # other defaults for what follows
    WORK=${WORK:-wikitext103-smoke}
    DISK=${DISK:-1} WORKERS=${WORKERS:-1}
    N=${N:-4} M=${M:-2} WIDTH=${WIDTH:-32} HEADS=${HEADS:-4} CUTOFFS=${CUTOFFS:-500,1000}
    GPUS=${GPUS:-0} UPDATES=${UPDATES:-8} WARMUP=${WARMUP:-4} BATCHES=${BATCHES:-1}
    CONTEXT=${CONTEXT:-256} WINDOW=${WINDOW:-192}
fi

# what
SYSTEM=${SYSTEM:-sequence} # vanilla, universal, sequence, cycle, cycle_rev
case $SYSTEM in
    sequence | cycle | cycle_rev) N=${N:-12} ;; # layers
    *) N=${N:-6} ;;
esac
M=${M:-6} # parameter sets of sequence, cycle and cycle_rev
case $SYSTEM in
    universal) WIDTH=${WIDTH:-1808} ;; # the parameters of the others; the width is our choice
    *) WIDTH=${WIDTH:-1024} ;;
esac                              # the FFN is four times as wide
HEADS=${HEADS:-8}                 # of universal: our choice
SEED=${SEED:-1}                   # our choice
WORK=${WORK:-wikitext103}         # folder for everything that is written

# data
CUTOFFS=${CUTOFFS:-20000,60000}   # of the adaptive inputs and softmax, by frequency of the 267,744 words
DISK=${DISK:-6}                   # GB that must be free, an estimate
WORKERS=${WORKERS:-8}             # processes for the data
MIRROR=${MIRROR:-}                # URL to fetch the archive from, in place of wikitext.smerity.com
CHECKSUMS=${CHECKSUMS:-}          # file of sha256sum for it, in place of the known checksum

# training, the same for all systems
GPUS=${GPUS:-8}                   # our choice; 0: one CPU thread
LR=${LR:-1.0}
WARMUP=${WARMUP:-16000}
UPDATES=${UPDATES:-50000}         # the cosine after the warmup is one, and ends here: our choice
CONTEXT=${CONTEXT:-3072}          # words of a block, and of a batch on one GPU
BATCHES=${BATCHES:-24}            # in an update, over all GPUs: fairseq's 3 on each of our 8
CLIP=${CLIP:-0.1}
WINDOW=${WINDOW:-2560}            # words of a block that the evaluation gives as context only
TRAIN_ARGS=${TRAIN_ARGS:-}        # further flags for fairseq-train, such as --fp16, split at spaces

NEEDS="fairseq"
export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
need_whole_numbers N M WIDTH HEADS SEED DISK WORKERS GPUS WARMUP UPDATES CONTEXT BATCHES WINDOW

case $SYSTEM in
    vanilla) model=(--arch transformer_lm_baevski_wiki103) ;;
    universal) model=(--arch transformer_lm_shared_cycle_wiki103 --decoder-unique-layers 1) ;;
    sequence | cycle | cycle_rev)
        [ "$M" -ge 1 ] && [ "$M" -le "$N" ] || die "M=$M must be between 1 and N=$N"
        model=(--arch "transformer_lm_shared_${SYSTEM}_wiki103" --decoder-unique-layers "$M")
        ;;
    *) die "SYSTEM=$SYSTEM is none of vanilla, universal, sequence, cycle, cycle_rev" ;;
esac
model+=(--decoder-layers "$N" --decoder-embed-dim "$WIDTH" --decoder-input-dim "$WIDTH" --decoder-output-dim "$WIDTH"
    --decoder-ffn-embed-dim "$((4 * WIDTH))" --decoder-attention-heads "$HEADS"
    --adaptive-input-cutoff "$CUTOFFS" --adaptive-softmax-cutoff "$CUTOFFS")
[ "$UPDATES" -gt "$WARMUP" ] || die "UPDATES=$UPDATES must be more than WARMUP=$WARMUP"
[ "$WINDOW" -lt "$CONTEXT" ] || die "WINDOW=$WINDOW must be less than CONTEXT=$CONTEXT"
use_gpus

# --- data, once for all systems
RUN=$WORK/data
data=$RUN
[ -n "$dry_run" ] || [ -e "$RUN/binarise.done" ] || need_space "$DISK" "$WORK"
begin
download_archives "$here/wikitext103.py"
clear_unless_done text "$data/text"
SHOW='lines|rror:' step text python "$here/wikitext103.py" text --archives "$archives" --out "$data/text"
clear_unless_done binarise "$data/bin"
SHOW='types|replaced|rror:' step binarise python -m fairseq_cli.preprocess --only-source --workers "$WORKERS" \
    --trainpref "$data/text/wiki.train.tokens" --validpref "$data/text/wiki.valid.tokens" \
    --testpref "$data/text/wiki.test.tokens" --destdir "$data/bin"

# --- one system
RUN=$WORK/$SYSTEM-$N-seed$SEED
begin SYSTEM N M WIDTH HEADS CUTOFFS SEED LR WARMUP UPDATES CONTEXT BATCHES CLIP WINDOW TRAIN_ARGS
# fairseq asks for this backend with adaptive_loss.
# shellcheck disable=SC2086  # TRAIN_ARGS is split on purpose
step train python -m fairseq_cli.train "$data/bin" --user-dir "$repo/fairseq_sharing" --task language_modeling \
    "${model[@]}" --criterion adaptive_loss --ddp-backend legacy_ddp --optimizer nag --clip-norm "$CLIP" \
    --lr "$LR" --lr-scheduler cosine --warmup-updates "$WARMUP" --warmup-init-lr 1e-07 --min-lr 0.0001 \
    --lr-period-updates "$((UPDATES - WARMUP))" --sample-break-mode none --tokens-per-sample "$CONTEXT" \
    --max-tokens "$CONTEXT" --skip-invalid-size-inputs-valid-test --max-update "$UPDATES" "${training[@]}" \
    --seed "$SEED" --save-dir "$RUN/checkpoints" --no-epoch-checkpoints --log-format simple --log-interval 100 $TRAIN_ARGS
for part in valid test; do
    SHOW='Evaluated|Perplexity|rror:' step "evaluate-$part" python -m fairseq_cli.eval_lm "$data/bin" \
        --user-dir "$repo/fairseq_sharing" --task language_modeling --path "$RUN/checkpoints/checkpoint_best.pt" \
        --gen-subset "$part" --sample-break-mode none --tokens-per-sample "$CONTEXT" --max-tokens "$CONTEXT" \
        --context-window "$WINDOW" --softmax-batch 1024 ${decoding[@]+"${decoding[@]}"}
done
if [ -z "$dry_run" ]; then
    printf '\n== %s, %s layers\n' "$SYSTEM" "$N"
    if [ -n "$smoke" ]; then echo "a smoke test of the steps, on other text: the perplexities say nothing"; fi
    printf '%-10s  %s\n' parameters "$(parameters_of "$RUN/train.log")"
    for part in valid test; do
        printf '%-10s  perplexity %s\n' "$part" "$(sed -n 's/.*Perplexity: //p' "$RUN/evaluate-$part.log" | tail -n 1)"
    done
fi
