#!/usr/bin/env bash
# The published ALBERT experiment on what to share, at full size: pretraining on plain text, then a task of GLUE. One call
# for each cell of the table and each task.
#
#   TEXT="wiki books" GLUE_DIR=glue examples/masked_lm/albert.sh                     base, all shared, E=128, SST-2
#   TEXT="wiki books" GLUE_DIR=glue SHARED=attention TASK=mrpc examples/masked_lm/albert.sh
#   TEXT="wiki books" GLUE_DIR=glue examples/masked_lm/albert.sh --dry-run           print every command
#   examples/masked_lm/albert.sh --smoke                                             every step, on one CPU thread
#
# Nothing is downloaded: TEXT and GLUE_DIR are what you have. Stopped or failed, the same call goes on where it was; text is
# prepared once, a model is pretrained once for all tasks. Sizes and the settings of pretraining are the paper's, those of
# fine-tuning are its authors' (google-research/albert, run_glue.sh); what neither says is marked "our choice". Not as
# published, because fairseq has none of it: segments, sentence order, n-grams masked together, no decay of biases and norms.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
# shellcheck source=../steps.sh
source "$here/../steps.sh"
read_options "--dry-run --smoke" "$@"
if [ -n "$smoke" ]; then # other defaults for what follows
    WORK=${WORK:-albert-smoke}
    TEXT=${TEXT:-$WORK/data/imitation/text.txt} GLUE_DIR=${GLUE_DIR:-$WORK/data/imitation/glue} TASK=${TASK-mrpc}
    VOCAB=${VOCAB:-300} HELD_OUT=${HELD_OUT:-3} DISK=${DISK:-1} WORKERS=${WORKERS:-1}
    MODEL_ARGS=${MODEL_ARGS:---encoder-layers 2 --encoder-embed-dim 32 --encoder-ffn-embed-dim 64 --encoder-attention-heads 4}
    E=${E:-16} GPUS=${GPUS:-0} UPDATES=${UPDATES:-4} WARMUP=${WARMUP:-2} CONTEXT=${CONTEXT:-64}
    SENTENCES=${SENTENCES:-8} BATCHES=${BATCHES:-1} RATES=${RATES:-1e-3} SEEDS=${SEEDS:-1}
    TUNE_UPDATES=${TUNE_UPDATES:-4} TUNE_WARMUP=${TUNE_WARMUP:-1} TUNE_BATCH=${TUNE_BATCH:-16}
fi

# what
SIZE=${SIZE:-base}            # base, large, xlarge, xxlarge
SHARED=${SHARED:-all}         # all, attention, ffn, none: of the parameters of a layer, with the LayerNorms beside them
E=${E:-128}                   # width of the embeddings; 768 is that of the layers of base
MODEL_ARGS=${MODEL_ARGS:-}    # further flags of the model, split at spaces
SEED=${SEED:-1}               # our choice
WORK=${WORK:-albert}          # folder for everything that is written

# text: files and folders, split at spaces, with one paragraph or sentence a line
TEXT=${TEXT:-}                # published: BookCorpus and English Wikipedia
VOCAB=${VOCAB:-29998}         # pieces: with <pad> and <mask>, the 30,000 symbols of the published size
HELD_OUT=${HELD_OUT:-1000}    # one in so many blocks of 100 lines is for validation: our choice
DISK=${DISK:-30}              # GB that must be free, an estimate for the published text and two tasks
WORKERS=${WORKERS:-8}         # threads for the data

# pretraining
GPUS=${GPUS:-8}               # our choice; 0: one CPU thread
OPTIMIZER=${OPTIMIZER:-}      # lamb, which fairseq takes from apex, or adam; unless set, lamb where apex is there
WARMUP=${WARMUP:-3125}
UPDATES=${UPDATES:-125000}
CONTEXT=${CONTEXT:-512}       # pieces of a block; a block may begin in the middle of a line, our choice
SENTENCES=${SENTENCES:-32}    # blocks of a batch on one GPU: our choice
BATCHES=${BATCHES:-128}       # in an update, over all GPUs: 4,096 blocks
MASKED=${MASKED:-0.15}        # share of pieces to predict: our choice
DROPOUT=${DROPOUT:-0.1}       # our choice
TRAIN_ARGS=${TRAIN_ARGS:-}    # further flags for pretraining, split at spaces

# fine-tuning, on one GPU
TASK=${TASK-sst2}             # cola, sst2, mrpc, qqp, mnli, qnli, rte; empty: none
GLUE_DIR=${GLUE_DIR:-}        # folder of GLUE's folders: SST-2 with train.tsv and dev.tsv, and so on
RATES=${RATES:-1e-5 2e-5 3e-5 5e-5} # learning rates: those of the authors for all tasks, each tried with the first seed, the
SEEDS=${SEEDS:-1 2 3}         # one that is best on dev with all: our choice
case $TASK in
    sst2) TUNE_UPDATES=${TUNE_UPDATES:-20935} TUNE_WARMUP=${TUNE_WARMUP:-1256} TUNE_BATCH=${TUNE_BATCH:-32} ;;
    mnli) TUNE_UPDATES=${TUNE_UPDATES:-10000} TUNE_WARMUP=${TUNE_WARMUP:-1000} TUNE_BATCH=${TUNE_BATCH:-128} ;;
    cola) TUNE_UPDATES=${TUNE_UPDATES:-5336} TUNE_WARMUP=${TUNE_WARMUP:-320} TUNE_BATCH=${TUNE_BATCH:-16} ;;
    qnli) TUNE_UPDATES=${TUNE_UPDATES:-33112} TUNE_WARMUP=${TUNE_WARMUP:-1986} TUNE_BATCH=${TUNE_BATCH:-32} ;;
    qqp) TUNE_UPDATES=${TUNE_UPDATES:-14000} TUNE_WARMUP=${TUNE_WARMUP:-1000} TUNE_BATCH=${TUNE_BATCH:-128} ;;
    rte | mrpc) TUNE_UPDATES=${TUNE_UPDATES:-800} TUNE_WARMUP=${TUNE_WARMUP:-200} TUNE_BATCH=${TUNE_BATCH:-32} ;;
    '') TUNE_UPDATES=0 TUNE_WARMUP=0 TUNE_BATCH=0 ;;
    *) die "TASK=$TASK is none of cola, sst2, mrpc, qqp, mnli, qnli, rte" ;;
esac
TUNE_DROPOUT=${TUNE_DROPOUT:-0.1} # our choice

NEEDS="fairseq sentencepiece sklearn"
export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
need_whole_numbers E SEED VOCAB HELD_OUT DISK WORKERS GPUS WARMUP UPDATES CONTEXT SENTENCES BATCHES TUNE_UPDATES \
    TUNE_WARMUP TUNE_BATCH
case $SIZE in base | large | xlarge | xxlarge) ;; *) die "SIZE=$SIZE is none of base, large, xlarge, xxlarge" ;; esac
model=(--arch "albert_encoder_$SIZE" --factorized-embed-dim "$E")
case $SHARED in
    all) ;; # the default: one parameter set
    attention | ffn) model+=(--sharing-parts "$SHARED") ;;
    none) model+=(--encoder-sharing none) ;;
    *) die "SHARED=$SHARED is none of all, attention, ffn, none" ;;
esac
read -ra flags <<<"$MODEL_ARGS"
model+=(${flags[@]+"${flags[@]}"})
apex=1
python -c 'from apex.optimizers import FusedLAMB' 2>/dev/null || apex=
if [ -z "$OPTIMIZER" ]; then OPTIMIZER=${apex:+lamb} OPTIMIZER=${OPTIMIZER:-adam}; fi
case $OPTIMIZER in # the coefficients and the decay of weights are the authors', for both
    lamb)
        [ -n "$apex$dry_run" ] || die "OPTIMIZER=lamb needs apex, which the Python on PATH has not"
        LR=${LR:-0.00176}
        optimizer=(--optimizer lamb --lamb-betas '(0.9, 0.999)' --lamb-eps 1e-06
            --fp16-no-flatten-grads) # without which fairseq refuses it
        ;;
    adam)
        LR=${LR:-0.0005} # our choice
        optimizer=(--optimizer adam --adam-betas '(0.9, 0.999)' --adam-eps 1e-06)
        ;;
    *) die "OPTIMIZER=$OPTIMIZER is neither lamb nor adam" ;;
esac
[ "$UPDATES" -gt "$WARMUP" ] || die "UPDATES=$UPDATES must be more than WARMUP=$WARMUP"
[ "$HELD_OUT" -ge 2 ] || die "HELD_OUT=$HELD_OUT must be at least 2"
use_gpus --fp16
read -ra texts <<<"$TEXT"
[ "${#texts[@]}" -ge 1 ] || die "TEXT= must name files or folders of plain text, with one paragraph or sentence a line"
[ -z "$TASK" ] || [ -n "$GLUE_DIR" ] || die "GLUE_DIR= must name the folder of GLUE's folders, or TASK= be empty"
for path in "${texts[@]}" ${GLUE_DIR:+"$GLUE_DIR"}; do
    [ -n "$dry_run$smoke" ] || [ -e "$path" ] || die "TEXT and GLUE_DIR: there is no $path"
done
read -ra rates <<<"$RATES"
read -ra seeds <<<"$SEEDS"
albert=(python "$here/albert.py")

# --- data, once for all models
RUN=$WORK/data
data=$RUN
[ -n "$dry_run" ] || [ -e "$RUN/text.done" ] || need_space "$DISK" "$WORK"
begin TEXT VOCAB HELD_OUT
if [ -n "$smoke" ]; then
    clear_unless_done imitate "$data/imitation"
    SHOW='rror:' step imitate "${albert[@]}" imitate --data "$here/data" --out "$data/imitation"
fi
clear_unless_done vocabulary "$data/vocabulary"
SHOW='pieces|rror:' step vocabulary "${albert[@]}" vocabulary --text "${texts[@]}" --size "$VOCAB" \
    --workers "$WORKERS" --out "$data/vocabulary"
clear_unless_done text "$data/text"
SHOW='lines|rror:' step text "${albert[@]}" text --text "${texts[@]}" --vocabulary "$data/vocabulary" \
    --held-out "$HELD_OUT" --workers "$WORKERS" --out "$data/text"
if [ -n "$TASK" ]; then # before anything is trained, so that files with other columns are refused now
    if [ -z "$dry_run" ] && [ "$(cat "$data/$TASK.from" 2>/dev/null)" != "$GLUE_DIR" ]; then
        rm -f "$data/$TASK.done" # it was made from another folder
        printf '%s\n' "$GLUE_DIR" >"$data/$TASK.from"
    fi
    clear_unless_done "$TASK" "$data/$TASK"
    SHOW='lines|rror:' step "$TASK" "${albert[@]}" task --task "$TASK" --glue "$GLUE_DIR" \
        --vocabulary "$data/vocabulary" --workers "$WORKERS" --out "$data/$TASK"
fi

# --- one model
RUN=$WORK/$SIZE-$SHARED-E$E-seed$SEED
pretrained=$RUN/checkpoints/checkpoint_last.pt log=$RUN/train.log
begin SIZE SHARED E MODEL_ARGS SEED OPTIMIZER LR WARMUP UPDATES CONTEXT SENTENCES BATCHES MASKED DROPOUT TRAIN_ARGS \
    TEXT VOCAB HELD_OUT
common=(--user-dir "$repo/fairseq_sharing" "${model[@]}" --lr-scheduler polynomial_decay --weight-decay 0.01
    --no-epoch-checkpoints --log-format simple --log-interval 100)
# shellcheck disable=SC2086  # TRAIN_ARGS is split on purpose
step train python -m fairseq_cli.train "$data/text" "${common[@]}" --task masked_lm --criterion masked_lm \
    --sample-break-mode none --tokens-per-sample "$CONTEXT" --mask-prob "$MASKED" \
    --dropout "$DROPOUT" --attention-dropout "$DROPOUT" "${optimizer[@]}" --clip-norm 1.0 \
    --lr "$LR" --warmup-updates "$WARMUP" --total-num-update "$UPDATES" --max-update "$UPDATES" \
    --max-sentences "$SENTENCES" "${training[@]}" --seed "$SEED" \
    --save-interval-updates 5000 --validate-interval-updates 5000 --keep-interval-updates 1 \
    --save-dir "$RUN/checkpoints" $TRAIN_ARGS
[ -n "$TASK" ] || exit 0

# --- fine-tuning
RUN=$RUN/$TASK
begin TASK GLUE_DIR TUNE_UPDATES TUNE_WARMUP TUNE_BATCH TUNE_DROPOUT
classes=2 metric=accuracy report=()
case $TASK in
    mnli) classes=3 ;;
    cola) metric=mcc report=(--report-mcc) ;;
    mrpc | qqp) metric=acc_and_f1 report=(--report-acc-and-f1) ;;
esac

# tune RATE SEED
tune() {
    local name=tune-$TASK-pretrained-$1-seed$2
    SHOW="valid on|Loaded checkpoint|rror:" step "$name" python -m fairseq_cli.train "$data/$TASK" "${common[@]}" \
        --task sentence_prediction --criterion sentence_prediction --num-classes "$classes" \
        --init-token 0 --separator-token 2 --max-positions "$((CONTEXT > 512 ? CONTEXT : 512))" --shorten-method truncate \
        --finetune-from-model "$pretrained" --dropout "$TUNE_DROPOUT" --attention-dropout "$TUNE_DROPOUT" \
        --optimizer adam --adam-betas '(0.9, 0.999)' --adam-eps 1e-06 --clip-norm 1.0 \
        --lr "$1" --warmup-updates "$TUNE_WARMUP" --total-num-update "$TUNE_UPDATES" --max-update "$TUNE_UPDATES" \
        --max-sentences "$TUNE_BATCH" "${decoding[@]}" --distributed-world-size 1 --seed "$2" \
        ${report[@]+"${report[@]}"} --best-checkpoint-metric "$metric" --maximize-best-checkpoint-metric \
        --save-dir "$RUN/$name"
}
for rate in "${rates[@]}"; do tune "$rate" "${seeds[0]}"; done
best=BEST
if [ -z "$dry_run" ]; then best=$("${albert[@]}" table --run "$RUN" --task "$TASK" --best-rate); fi
for seed in "${seeds[@]:1}"; do tune "$best" "$seed"; done
if [ -z "$dry_run" ]; then
    printf '\n== %s: %s, shared: %s, E=%s\n' "$TASK" "$SIZE" "$SHARED" "$E"
    if [ -n "$smoke" ]; then echo "a smoke test of the steps, on other text: the scores say nothing"; fi
    echo "parameters with the head for masked language modelling: $(parameters_of "$log")"
    "${albert[@]}" table --run "$RUN" --task "$TASK" | tee "$RUN/table.txt"
    case $SIZE-$SHARED-$E in
        base-all-128) published=80.1 ;;
        base-attention-128) published=81.7 ;;
        base-ffn-128) published=80.2 ;;
        base-none-128) published=81.6 ;;
        *) published= ;;
    esac
    if [ -n "$published" ]; then
        echo "published for this row: $published, the mean of SQuAD 1.1, SQuAD 2.0, MNLI, SST-2 and RACE; no single task is it"
    fi
fi
