#!/usr/bin/env bash
# The published translation experiments at full size, from download to SacreBLEU: one call for each row of the table.
#
#   SYSTEM=cycle_rev N=18 examples/translation/wmt.sh              WMT16 English-German, 18 layers from 6 sets, with Admin
#   SYSTEM=vanilla examples/translation/wmt.sh --dry-run           print every command; do and write nothing
#   PAIR=en-fr SYSTEM=cycle_rev N=18 examples/translation/wmt.sh   WMT14 English-French
#   GENUINE=my/paracrawl SYNTHETIC=my/back-translated examples/translation/wmt.sh
#                                                                  the high-resource setting, from four files of yours
#   examples/translation/wmt.sh --smoke                            every step, with a little text, on one CPU thread
#   SHARDS=3 examples/translation/wmt.sh --smoke                   the same for the high-resource setting
#
# There is one training command. Admin's profile is taken in it, on the first batch, and lies in the checkpoints: nothing
# comes before training but the data, and no step of that looks like training. Stopped or failed, the same call goes on
# where it was. The data of a pair is prepared once, for all rows. Numbers without a remark are the authors' (code, README
# and table of takase/share_layer_params); what is not known of theirs is marked "our choice".
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
# shellcheck source=../steps.sh
source "$here/../steps.sh"
read_options "--dry-run --smoke" "$@"
if [ -n "$smoke" ]; then # other defaults for what follows
    WORK=${WORK:-wmt-smoke}
    N=${N:-4} M=${M:-2} VOCAB=${VOCAB:-400} DISK=${DISK:-1} WORKERS=${WORKERS:-1}
    GPUS=${GPUS:-0} UPDATES=${UPDATES:-8} WARMUP=${WARMUP:-4} AVERAGE=${AVERAGE:-2} MAX_TOKENS=${MAX_TOKENS:-2000}
    BATCHES=${BATCHES:-2} DECODE_ARGS=${DECODE_ARGS:---max-len-b 10}
    TRAIN_ARGS="${TRAIN_ARGS:-} --encoder-embed-dim 32 --decoder-embed-dim 32 --encoder-ffn-embed-dim 64"
    TRAIN_ARGS="$TRAIN_ARGS --decoder-ffn-embed-dim 64 --encoder-attention-heads 4 --decoder-attention-heads 4"
    VALID=wmt13
    TESTS=${TESTS:-wmt14/full}
    PAIR=${PAIR:-en-de} UPSAMPLE=${UPSAMPLE:-2}
    if [ "${SHARDS:-1}" != 1 ]; then SYNTHETIC=${SYNTHETIC:-$WORK/$PAIR-synthetic/imitation/synthetic}; fi
fi

# what
SYSTEM=${SYSTEM:-cycle_rev} # vanilla, admin, vanilla_big, universal, sequence, cycle, cycle_rev
PAIR=${PAIR:-en-de}         # en-de, de-en (WMT16); en-fr, fr-en (WMT14)
case $SYSTEM in
    sequence | cycle | cycle_rev) N=${N:-12} ;; # layers of each stack, 12 or 18
    *) N=${N:-6} ;;
esac
M=${M:-6} # parameter sets of each stack of sequence, cycle and cycle_rev
case $SYSTEM in
    sequence | cycle | cycle_rev | admin) RESIDUAL=${RESIDUAL:-admin} ;; # none, admin, admin-static
    *) RESIDUAL=${RESIDUAL:-none} ;;                                     # of universal: our choice
esac
SEED=${SEED:-1}   # the published averages are over three
WORK=${WORK:-wmt} # folder for everything that is written

# data: the raw corpora of the shared task (our choice; the authors took a copy that was cut into BPE before)
VOCAB=${VOCAB:-32767}         # pieces of both languages, with <s> the 32,768 symbols of the published size; by
MAX_PIECES=${MAX_PIECES:-250} # SentencePiece, our choice; longer training sentences are left out, and pairs whose
MAX_RATIO=${MAX_RATIO:-1.5}   # lengths differ by a higher ratio, both as in fairseq's prepare-wmt14en2de.sh, our choice
VALID=${VALID:-wmt13}         # sacrebleu's names: newstest2013 (for French our choice)
GENUINE=${GENUINE:-}          # prefixes of further pairs, split at spaces: PREFIX.en and PREFIX.de, also .gz or .xz
SYNTHETIC=${SYNTHETIC:-}      # prefix of back-translated pairs: the high-resource setting; no tag is added, our choice
if [ -n "$SYNTHETIC" ]; then  # published: 44.2 million genuine pairs and 284.3 million synthetic ones
    SHARDS=${SHARDS:-64}      # training reads one in each epoch: our choice
    UPSAMPLE=${UPSAMPLE:-6}   # times that an epoch has a genuine pair: about half of its pairs are genuine, our choice
    DISK=${DISK:-80}
else
    SHARDS=${SHARDS:-1} UPSAMPLE=
fi
case $PAIR in
    *de*) TESTS=${TESTS:-wmt10 wmt11 wmt12 wmt13 wmt14/full wmt15 wmt16} DISK=${DISK:-20} ;;
    *) TESTS=${TESTS:-wmt14/full} DISK=${DISK:-70} ;;
esac                     # DISK: GB that must be free, an estimate
WORKERS=${WORKERS:-8}    # threads and processes for the data
MIRROR=${MIRROR:-}       # URL to fetch the archives from, in place of statmt.org
CHECKSUMS=${CHECKSUMS:-} # file of sha256sum for them, in place of the known checksums

# training, the same for all systems (for vanilla_big and universal our choice)
GPUS=${GPUS:-4} # 0: one CPU thread
LR=${LR:-0.002}
WARMUP=${WARMUP:-8000}
UPDATES=${UPDATES:-50000}
MAX_TOKENS=${MAX_TOKENS:-3584} # of a batch on one GPU
BATCHES=${BATCHES:-128}        # in an update, over all GPUs
DROPOUT=${DROPOUT:-0.3}
CLIP=${CLIP:-0.0}            # the authors: 1.0 if training diverges
AVERAGE=${AVERAGE:-10}       # of the last epochs
BEAM=${BEAM:-4}              # the length penalty is 0.6 for newstest2014, 1.0 otherwise (for other pairs: our choice)
TRAIN_ARGS=${TRAIN_ARGS:-}   # further flags for fairseq-train, split at spaces
DECODE_ARGS=${DECODE_ARGS:-} # for fairseq-generate

NEEDS="fairseq sentencepiece sacrebleu"
export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
SRC=${PAIR%-*} TGT=${PAIR#*-}
need_whole_numbers N M SEED VOCAB MAX_PIECES SHARDS DISK WORKERS GPUS WARMUP UPDATES MAX_TOKENS BATCHES AVERAGE BEAM \
    ${SYNTHETIC:+UPSAMPLE}
case $RESIDUAL in none | admin | admin-static) ;; *) die "RESIDUAL=$RESIDUAL is none of none, admin, admin-static" ;; esac
wmt=(python "$here/wmt.py")

case $SYSTEM in
    vanilla) model=(--arch transformer_wmt_en_de) ;;
    vanilla_big) model=(--arch transformer_vaswani_wmt_en_de_big) ;;
    admin) model=(--arch transformer_shared_sequence_wmt_en_de --encoder-sharing none --decoder-sharing none) ;;
    universal) model=(--arch transformer_shared_universal_wmt_en_de) ;; # M = 1, 1024/4096: about the size of the others
    sequence | cycle | cycle_rev)
        [ "$M" -ge 1 ] && [ "$M" -le "$N" ] || die "M=$M must be between 1 and N=$N"
        model=(--arch "transformer_shared_${SYSTEM}_wmt_en_de" --encoder-unique-layers "$M" --decoder-unique-layers "$M")
        ;;
    *) die "SYSTEM=$SYSTEM is none of vanilla, admin, vanilla_big, universal, sequence, cycle, cycle_rev" ;;
esac
model+=(--encoder-layers "$N" --decoder-layers "$N" --share-all-embeddings --dropout "$DROPOUT")
case $SYSTEM in
    vanilla*) [ "$RESIDUAL" = none ] || die "SYSTEM=$SYSTEM has no scaled residual connections (RESIDUAL=$RESIDUAL)" ;;
    *) model+=(--residual-scaling "$RESIDUAL") ;;
esac
case $PAIR in en-de | de-en | en-fr | fr-en) ;; *) die "PAIR=$PAIR is none of en-de, de-en, en-fr, fr-en" ;; esac
[ "$SHARDS" -ge 1 ] || die "SHARDS=$SHARDS must be at least 1"
use_gpus --fp16
read -ra further <<<"$GENUINE"
for prefix in ${further[@]+"${further[@]}"} ${SYNTHETIC:+"$SYNTHETIC"}; do
    [ -z "$dry_run$smoke" ] || break # they may not be there yet
    for file in "$prefix.$SRC" "$prefix.$TGT"; do
        [ -e "$file" ] || [ -e "$file.gz" ] || [ -e "$file.xz" ] ||
            die "GENUINE and SYNTHETIC: there is none of $file, $file.gz, $file.xz"
    done
done

# --- data, once for all systems of a pair
setting=$PAIR${SYNTHETIC:+-synthetic}
RUN=$WORK/$setting
data=$RUN
[ -n "$dry_run" ] || [ -e "$RUN/binarise.done" ] || need_space "$DISK" "$WORK"
read -ra tests <<<"$TESTS"
sets=()
for name in $VALID "${tests[@]}"; do [[ " ${sets[*]-} " == *" $name "* ]] || sets+=("$name"); done
texts=("${tests[@]%%/*}")
begin PAIR VOCAB MAX_PIECES MAX_RATIO VALID TESTS GENUINE SYNTHETIC SHARDS
export SACREBLEU=$data/sacrebleu # where sacrebleu keeps test sets: it asks for a full path
[[ $data = /* ]] || SACREBLEU=$PWD/$SACREBLEU
download_archives "$here/wmt.py" --pair "$PAIR" --test-sets "${sets[@]}"
clear_unless_done text "$data/text"
SHOW='pairs|rror:' step text "${wmt[@]}" text --pair "$PAIR" --test-sets "${sets[@]}" --archives "$archives" \
    --further ${further[@]+"${further[@]}"} --sacrebleu "$SACREBLEU" --out "$data/text"
clear_unless_done vocabulary "$data/vocabulary"
SHOW='pieces|rror:' step vocabulary "${wmt[@]}" vocabulary --pair "$PAIR" --text "$data/text" --size "$VOCAB" \
    --workers "$WORKERS" --out "$data/vocabulary"
clear_unless_done binarise "$data/bin"
SHOW='pairs|rror:' step binarise "${wmt[@]}" binarise --pair "$PAIR" --valid "$VALID" --test-sets "${tests[@]}" \
    --text "$data/text" ${SYNTHETIC:+--synthetic "$SYNTHETIC"} --vocabulary "$data/vocabulary" \
    --max-pieces "$MAX_PIECES" --max-ratio "$MAX_RATIO" --shards "$SHARDS" --workers "$WORKERS" --out "$data/bin"

# --- one system
RUN=$WORK/$setting-$SYSTEM-$N-seed$SEED
checkpoints=$RUN/checkpoints
begin SYSTEM PAIR N M RESIDUAL SEED LR WARMUP UPDATES MAX_TOKENS BATCHES DROPOUT CLIP AVERAGE BEAM UPSAMPLE TRAIN_ARGS \
    DECODE_ARGS VOCAB MAX_PIECES MAX_RATIO VALID GENUINE SYNTHETIC SHARDS
shards=$data/bin/0 # joined by colons: epoch by epoch fairseq takes the next one, and the first one after the last one
for ((shard = 1; shard < SHARDS; shard++)); do shards+=:$data/bin/$shard; done
# shellcheck disable=SC2086  # TRAIN_ARGS is split on purpose
step train python -m fairseq_cli.train "$shards" --user-dir "$repo/fairseq_sharing" --task translation \
    -s "$SRC" -t "$TGT" "${model[@]}" ${UPSAMPLE:+--upsample-primary "$UPSAMPLE"} \
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1 \
    --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm "$CLIP" \
    --lr "$LR" --lr-scheduler inverse_sqrt --warmup-updates "$WARMUP" --warmup-init-lr 1e-07 \
    --max-tokens "$MAX_TOKENS" --max-update "$UPDATES" "${training[@]}" --seed "$SEED" \
    --save-dir "$checkpoints" --keep-last-epochs "$AVERAGE" --log-format simple --log-interval 100 $TRAIN_ARGS
SHOW='averaged|rror:' step average python -m fairseq_sharing.tools.main average --inputs "$checkpoints" \
    --num-epoch-checkpoints "$AVERAGE" --output "$checkpoints/averaged.pt" --force
for number in "${!tests[@]}"; do
    name=${texts[number]} subset=test${number/#0/}
    lenpen=1.0
    [ "$name" != wmt14 ] || lenpen=0.6
    translation=$RUN/$name.$TGT
    clear_unless_done "decode-$name" "$RUN/decode-$name.log"
    # shellcheck disable=SC2086  # DECODE_ARGS too
    SHOW='Translated|rror:' step "decode-$name" python -m fairseq_cli.generate "$data/bin/0" \
        --user-dir "$repo/fairseq_sharing" --task translation -s "$SRC" -t "$TGT" --path "$checkpoints/averaged.pt" \
        --gen-subset "$subset" --beam "$BEAM" --lenpen "$lenpen" --remove-bpe=sentencepiece --max-tokens 4096 \
        "${decoding[@]}" $DECODE_ARGS
    if [ -z "$dry_run" ]; then
        grep '^H-' "$RUN/decode-$name.log" | sed 's/^H-//' | sort -n -k1,1 | cut -f3 >"$translation"
    fi
    SHOW='BLEU' step "score-$name" python -m sacrebleu -t "${tests[number]}" -l "$PAIR" -i "$translation" -f text -w 2
done
if [ -z "$dry_run" ]; then
    printf '\n== %s, %s layers, %s\n' "$SYSTEM" "$N" "$setting"
    if [ -n "$smoke" ]; then echo "a smoke test of the steps, on other text: the scores say nothing"; fi
    for name in "${texts[@]}"; do printf '%s  %s\n' "$name" "$(grep BLEU "$RUN/score-$name.log" | tail -n 1)"; done |
        awk '{ print; for (i = 1; i < NF; i++) if ($i == "=") { sum += $(i + 1); break } }
            END { if (NR > 1) printf "average of %d  %.2f\n", NR, sum / NR }'
fi
