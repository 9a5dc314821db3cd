#!/usr/bin/env bash
# Train a small translation model whose layers share parameters, from text to BLEU, on the CPU.
#
#   examples/translation/quickstart.sh                            English-German, LibreOffice help, CYCLE (REV)
#   ARCH=transformer examples/translation/quickstart.sh           the same with another architecture
#   DATA="my.en my.de" RUN=my-run examples/translation/quickstart.sh
#
# Stopped by Ctrl-C or otherwise, the same command goes on where it was; a finished step is not done again.
# Everything is set by environment variables:
#
#   ARCH       transformer_shared_cycle_rev, transformer_shared_cycle, transformer_shared_sequence,
#              transformer_shared_universal, or transformer (nothing shared)
#   LAYERS     N, layers in each stack; UNIQUE: M, parameter sets in each stack
#   EMBED      width; FFN: inner width of the feed-forward sublayers; HEADS: attention heads
#   DATA       a folder with {train,valid,test}.{SRC,TGT}, plain or .xz; or a prefix, for the two files PREFIX.SRC and
#              PREFIX.TGT; or two files with a space between them. Where there are no valid and test parts,
#              VALID_SIZE and TEST_SIZE pairs are split off (training must keep more than that)
#   SRC, TGT   languages: the names of the files' endings
#   RUN        folder for everything that is written
#   VOCAB      SentencePiece pieces for both languages together; MAX_PIECES: longer training sentences are left out
#   UPDATES    training length; WARMUP: updates until the learning rate is LR, after which it falls to zero linearly
#   MAX_TOKENS tokens per batch of one process; BATCHES: batches per update, over all processes
#   DROPOUT, SEED
#   SAVES      how often during training to save and validate; AVERAGE: how many of the last saved models to average
#   BEAM       beam width of the search; LENPEN: its length penalty, where more than 1 makes translations longer
#   PROCESSES  training processes, one thread each; one for each core, two at most
#   TRAIN_ARGS further flags for fairseq-train, split at spaces
set -euo pipefail

ARCH=${ARCH:-transformer_shared_cycle_rev}
LAYERS=${LAYERS:-3}
case $ARCH in *_universal*) UNIQUE=${UNIQUE:-1} ;; *) UNIQUE=${UNIQUE:-2} ;; esac
EMBED=${EMBED:-128}
FFN=${FFN:-512}
HEADS=${HEADS:-4}
SRC=${SRC:-en}
TGT=${TGT:-de}
VOCAB=${VOCAB:-2000}
MAX_PIECES=${MAX_PIECES:-48}
VALID_SIZE=${VALID_SIZE:-500}
TEST_SIZE=${TEST_SIZE:-500}
UPDATES=${UPDATES:-3000}
LR=${LR:-0.004}
MAX_TOKENS=${MAX_TOKENS:-600}
BATCHES=${BATCHES:-2}
DROPOUT=${DROPOUT:-0}
SEED=${SEED:-1}
SAVES=${SAVES:-20}
AVERAGE=${AVERAGE:-2}
BEAM=${BEAM:-5}
LENPEN=${LENPEN:-1.4}
TRAIN_ARGS=${TRAIN_ARGS:-}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
DATA=${DATA:-$here/data}
if [ "$ARCH" = transformer_shared_cycle_rev ]; then
    RUN=${RUN:-$repo/quickstart-run}
else
    RUN=${RUN:-$repo/quickstart-run-$ARCH}
fi
# One thread per process: threads of several processes wait for each other far longer than they compute.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONUNBUFFERED=1

say() { printf '\n== %s\n' "$*"; }
die() {
    printf 'quickstart: %s\n' "$*" >&2
    exit "${status:-2}"
}
case ${1-} in
    '') ;;
    -h | --help)
        sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p;}' "$0"
        exit
        ;;
    *) die "$1 is not --help: all else is set by variables" ;;
esac
sharing() { PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}" python -m fairseq_sharing.tools.main "$@"; }

# --- children: every command runs in the background, so that a signal is answered at once and nothing outlives us
children=()
stop() {
    local result=$? pid
    trap - EXIT
    if [ "$result" -ge 128 ]; then printf '\nquickstart: stopping …\n' >&2; fi
    for pid in ${children[@]+"${children[@]}"}; do kill -TERM "$pid" 2>/dev/null || true; done
    for pid in ${children[@]+"${children[@]}"}; do wait "$pid" 2>/dev/null || true; done
    if [ -n "${step:-}" ] && [ -e "$RUN/settings.txt" ]; then finish; fi
    if [ "$result" -ge 128 ]; then printf 'quickstart: stopped; the same command goes on from here\n' >&2; fi
    exit "$result"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

# attend LOG PATTERN: wait for all children; meanwhile show the lines of LOG that match PATTERN, after the first SKIP
# lines. When one child fails, the others are ended too. Only builtins are used here: bash may lose a Ctrl-C that also
# hits a program it waits for.
attend() {
    local log=$1 pattern=$2 line text="" pid running failed=0 skip=${SKIP:-0}
    : >>"$log"
    exec 3<"$log"
    while true; do
        running=()
        for pid in "${children[@]}"; do
            if kill -0 "$pid" 2>/dev/null; then running+=("$pid"); fi
        done
        while true; do
            if ! IFS= read -r line <&3; then
                text+=$line # the beginning of a line that is still being written
                break
            fi
            text+=$line
            if [ $((skip--)) -le 0 ] && [[ $text =~ $pattern ]]; then
                text=${text/ | INFO | / | }
                printf '%s\n' "${text#????-??-?? }"
            fi
            text=""
        done
        if [ ${#running[@]} -lt ${#children[@]} ]; then
            for pid in "${children[@]}"; do
                [[ " ${running[*]-} " == *" $pid "* ]] || wait "$pid" || failed=1
            done
            children=(${running[@]+"${running[@]}"})
        fi
        if [ "$failed" = 1 ] || [ ${#children[@]} = 0 ]; then break; fi
        sleep 0.5 &
        wait $! || true
    done
    exec 3<&-
    for pid in ${children[@]+"${children[@]}"}; do kill -TERM "$pid" 2>/dev/null || true; done
    for pid in ${children[@]+"${children[@]}"}; do wait "$pid" 2>/dev/null || true; done
    children=()
    return "$failed"
}

# run_logged NAME LOG PATTERN COMMAND...: one command, its output in LOG.
run_logged() {
    local name=$1 log=$2 pattern=$3
    shift 3
    : >"$log"
    "$@" >"$log" 2>&1 &
    children=($!)
    attend "$log" "$pattern" || fail "$name" "$log"
}

fail() {
    local what=$1 log
    shift
    for log in "$@"; do printf '\n' >&2; tail -n 12 "$log" >&2; done
    status=1 die "$what failed; the complete log: $*"
}

# A step's seconds are added up over all calls that worked on it.
begin() { step=$1 started=$SECONDS; }
finish() {
    printf '%s %s\n' "$step" $((SECONDS - started)) >>"$RUN/seconds.txt"
    step=
}

# --- the environment and the run's folder
for module in fairseq sacrebleu sentencepiece; do
    python -c "import importlib.util as u, sys; sys.exit(u.find_spec('$module') is None)" 2>/dev/null ||
        die "the Python on PATH ($(command -v python || echo none)) has no $module:" \
            "use 'make quickstart', or activate the environment first"
done
for name in LAYERS UNIQUE EMBED FFN HEADS VOCAB VALID_SIZE TEST_SIZE UPDATES MAX_TOKENS BATCHES SAVES AVERAGE BEAM; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || die "$name=${!name} must be a whole number of at least 1"
done
WARMUP=${WARMUP:-$((UPDATES / 12))}
for name in WARMUP MAX_PIECES SEED; do
    [[ ${!name} =~ ^[0-9]+$ ]] || die "$name=${!name} must be a whole number"
done
for name in LR DROPOUT LENPEN; do
    [[ ${!name} =~ ^[0-9]*\.?[0-9]+(e-?[0-9]+)?$ ]] || die "$name=${!name} must be a number"
done
case $ARCH in
    transformer | transformer_*) ;;
    *) die "ARCH=$ARCH is none of transformer, transformer_shared_sequence, transformer_shared_cycle," \
        "transformer_shared_cycle_rev, transformer_shared_universal and their sizes" ;;
esac
if [ -z "${PROCESSES:-}" ]; then
    # nproc takes OMP_NUM_THREADS for the number of cores.
    cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    PROCESSES=$((cores < 2 ? cores : 2))
fi
[[ $PROCESSES =~ ^[1-9][0-9]*$ ]] || die "PROCESSES=$PROCESSES must be a whole number of at least 1"
[ $((BATCHES % PROCESSES)) = 0 ] || die "BATCHES=$BATCHES must be a multiple of PROCESSES=$PROCESSES"

model_args=(
    --arch "$ARCH" --encoder-layers "$LAYERS" --decoder-layers "$LAYERS" --share-all-embeddings
    --encoder-embed-dim "$EMBED" --decoder-embed-dim "$EMBED"
    --encoder-ffn-embed-dim "$FFN" --decoder-ffn-embed-dim "$FFN"
    --encoder-attention-heads "$HEADS" --decoder-attention-heads "$HEADS"
    --encoder-normalize-before --decoder-normalize-before --dropout "$DROPOUT"
)
case $ARCH in
    transformer_shared_*) model_args+=(--encoder-unique-layers "$UNIQUE" --decoder-unique-layers "$UNIQUE") ;;
    *) UNIQUE=$LAYERS ;;
esac
[ "$UNIQUE" -le "$LAYERS" ] || die "UNIQUE=$UNIQUE must be between 1 and LAYERS=$LAYERS"
[ $((EMBED % HEADS)) = 0 ] || die "EMBED=$EMBED must be a multiple of HEADS=$HEADS"

[ -e "$RUN/data/prepared.json" ] || sharing show "${model_args[@]}" >/dev/null ||
    die "ARCH=$ARCH cannot be built with these settings"

# What may not change between two calls with the same RUN. PROCESSES may: the batch is the same.
settings() {
    local name
    for name in ARCH LAYERS UNIQUE EMBED FFN HEADS DATA SRC TGT VOCAB MAX_PIECES UPDATES WARMUP LR MAX_TOKENS BATCHES \
        DROPOUT SEED SAVES AVERAGE BEAM LENPEN TRAIN_ARGS VALID_SIZE TEST_SIZE; do
        printf '%s=%s\n' "$name" "${!name}"
    done
}
checkpoints=$RUN/checkpoints
if [ -e "$checkpoints/checkpoint_last.pt" ] && [ -e "$RUN/settings.txt" ]; then
    while IFS= read -r now && IFS= read -r before <&3; do
        [ "$now" = "$before" ] ||
            die "RUN=$RUN was made with $before, and now $now is asked for: choose another RUN, or delete that folder"
    done < <(settings) 3<"$RUN/settings.txt"
elif [ ! -e "$RUN/data/prepared.json" ] && [ -d "$RUN" ] && [ -n "$(ls "$RUN")" ]; then
    die "RUN=$RUN is a folder with other contents: choose another RUN"
fi

# --- 1. data
say "1/5 data"
begin data
prepare=(python "$repo/scripts/prepare_translation.py" -s "$SRC" -t "$TGT" --out "$RUN/data" --vocab-size "$VOCAB"
    --max-pieces "$MAX_PIECES" --seed "$SEED" --valid-size "$VALID_SIZE" --test-size "$TEST_SIZE")
# part_file PART LANGUAGE: the file of a part in the folder DATA, plain or compressed; a missing one is named plain.
part_file() { if [ -e "$DATA/$1.$2.xz" ]; then echo "$DATA/$1.$2.xz"; else echo "$DATA/$1.$2"; fi; }
if [ -d "$DATA" ]; then
    for part in train valid test; do
        source_file=$(part_file $part "$SRC") target_file=$(part_file $part "$TGT")
        if [ "$part" = train ] || [ -e "$source_file" ] || [ -e "$target_file" ]; then
            prepare+=("--$part" "$source_file" "$target_file")
        fi
    done
elif [ -e "$DATA.$SRC" ] || [ -e "$DATA.$TGT" ]; then
    prepare+=(--train "$DATA.$SRC" "$DATA.$TGT")
elif [ -e "$DATA.$SRC.xz" ] || [ -e "$DATA.$TGT.xz" ]; then
    prepare+=(--train "$DATA.$SRC.xz" "$DATA.$TGT.xz")
else
    read -r source_file target_file more <<<"$DATA"
    if [ -z "${target_file:-}" ] || [ -n "${more:-}" ]; then
        die "DATA=$DATA is no folder, no prefix of two files (there is no $DATA.$SRC)," \
            "and no two files with a space between them"
    fi
    prepare+=(--train "$source_file" "$target_file")
fi
new=$([ -d "$RUN" ] && echo no || echo yes)
"${prepare[@]}" &
children=($!)
wait $! || {
    status=$?
    if [ "$new" = yes ]; then rmdir "$RUN" 2>/dev/null || true; fi
    if [ "$status" -lt 128 ]; then
        echo "quickstart: these options are set by VOCAB, MAX_PIECES, VALID_SIZE, TEST_SIZE and SEED" >&2
    fi
    exit "$status"
}
children=()
if command -v flock >/dev/null; then
    exec 9>>"$RUN/.lock"
    flock -n 9 || die "another quickstart is at work in RUN=$RUN"
fi
if [ ! -e "$checkpoints/checkpoint_last.pt" ]; then
    settings >"$RUN/settings.partial"
    mv "$RUN/settings.partial" "$RUN/settings.txt"
    finish
fi
step=
bin=$RUN/data/bin

# --- 2. training
at_least_1() { echo $(($1 > 1 ? $1 : 1)); }
save_every=$(at_least_1 $((UPDATES / SAVES)))
say "2/5 training: $ARCH, $UPDATES updates, $PROCESSES process(es) of one thread each"
log=$RUN/train.log
if [ -e "$RUN/train.done" ]; then
    echo "already done: $log"
else
    begin training
    train=(python -m fairseq_cli.train "$bin" --user-dir "$repo/fairseq_sharing" --task translation -s "$SRC" -t "$TGT"
        "${model_args[@]}"
        --criterion label_smoothed_cross_entropy --label-smoothing 0.1
        --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0
        --lr "$LR" --lr-scheduler polynomial_decay --warmup-updates "$WARMUP" --total-num-update "$UPDATES"
        --max-update "$UPDATES" --max-tokens "$MAX_TOKENS" --update-freq $((BATCHES / PROCESSES))
        --max-tokens-valid 4000 --required-batch-size-multiple 1
        --seed "$SEED" --cpu --num-workers 0
        --save-dir "$checkpoints" --tensorboard-logdir "$RUN/tensorboard"
        --save-interval-updates "$save_every" --keep-interval-updates "$AVERAGE"
        --save-interval 1000000 --validate-interval 1000000 --no-epoch-checkpoints
        --log-format simple --log-interval "$(at_least_1 $((UPDATES / 60)))")
    # shellcheck disable=SC2206  # TRAIN_ARGS is split on purpose
    train+=($TRAIN_ARGS)
    if [ "$PROCESSES" -gt 1 ]; then
        port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
        train+=(--ddp-backend legacy_ddp --distributed-backend gloo --distributed-world-size "$PROCESSES"
            --distributed-init-method "tcp://127.0.0.1:$port" --distributed-no-spawn
            --load-checkpoint-on-all-dp-ranks)
        if [ -e /sys/class/net/lo ]; then export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}; fi
    fi
    if [ -e "$checkpoints/checkpoint_last.pt" ]; then echo "going on from $checkpoints/checkpoint_last.pt"; fi
    echo "complete log: $log"
    touch "$log"
    before=$(wc -l <"$log")
    for ((rank = 0; rank < PROCESSES; rank++)); do
        rank_args=() rank_log=$log
        if [ "$PROCESSES" -gt 1 ]; then rank_args=(--distributed-rank "$rank" --device-id "$rank"); fi
        if [ "$rank" -gt 0 ]; then rank_log=$RUN/train.rank$rank.log; fi
        "${train[@]}" ${rank_args[@]+"${rank_args[@]}"} >>"$rank_log" 2>&1 9>&- &
        children+=($!)
    done
    shown='\| (train_inner|fairseq_sharing[.a-z_]*) \||valid on|shared model params|Loaded checkpoint|\| ERROR|Error:'
    SKIP=$before attend "$log" "$shown" ||
        fail "training (a process ended with an error, and the others were stopped)" "$RUN"/train*.log
    touch "$RUN/train.done"
    finish
fi

# --- 3. averaging
say "3/5 averaging the last $AVERAGE saved models"
averaged=$checkpoints/averaged.pt
if [ -e "$averaged" ]; then
    echo "already done: $averaged"
else
    begin averaging
    # fairseq names no file after an update that ends an epoch; the very last one is always in checkpoint_last.pt.
    inputs=() newest=
    for ((back = AVERAGE - 1; back >= 0; back--)); do
        update=$((UPDATES / save_every * save_every - back * save_every))
        for file in "$checkpoints"/checkpoint_*_"$update".pt; do
            if [ -e "$file" ]; then inputs+=("$file") newest=$update; fi
        done
    done
    if [ "$newest" != "$UPDATES" ]; then inputs+=("$checkpoints/checkpoint_last.pt"); fi
    run_logged averaging "$RUN/average.log" '^averaged|^  ' sharing average --inputs "${inputs[@]}" --output "$averaged"
    finish
fi

# --- 4. decoding
say "4/5 translating the test part, beam $BEAM"
output=$RUN/generate.txt
reference=$RUN/data/text/test.$TGT
if [ -e "$output" ]; then
    echo "already done: $output"
else
    begin decoding
    python "$repo/scripts/prepare_translation.py" --spm-model "$RUN/data/spm.model" --check "$bin/dict.$TGT.txt"
    # No process may be left without a batch: fairseq-generate would divide by its zero sentences.
    batches=$((($(wc -l <"$reference") + 63) / 64))
    shards=$((PROCESSES < batches ? PROCESSES : batches))
    logs=()
    for ((shard = 0; shard < shards; shard++)); do
        logs+=("$RUN/generate.shard$shard.log")
        python -m fairseq_cli.generate "$bin" --user-dir "$repo/fairseq_sharing" --task translation \
            -s "$SRC" -t "$TGT" --path "$averaged" --gen-subset test \
            --beam "$BEAM" --lenpen "$LENPEN" --max-len-a 2 --max-len-b 20 \
            --remove-bpe=sentencepiece --batch-size 64 --max-tokens 3000 --required-batch-size-multiple 1 \
            --distributed-world-size "$shards" --distributed-rank "$shard" --cpu --num-workers 0 \
            --log-format simple --log-interval 1 >"$RUN/generate.shard$shard.log" 2>&1 9>&- &
        children+=($!)
    done
    attend "${logs[0]}" 'sentences/s|Translated' || fail translating "${logs[@]}"
    cat "${logs[@]}" >"$output.partial"
    grep '^H-' "$output.partial" | sed 's/^H-//' | sort -n -k1,1 | cut -f3 >"$RUN/translation.$TGT"
    found=$(wc -l <"$RUN/translation.$TGT") total=$(wc -l <"$reference")
    [ "$found" -eq "$total" ] ||
        status=1 die "$output.partial has $found translations for the $total lines of $reference"
    mv "$output.partial" "$output"
    finish
fi

# --- 5. scores
say "5/5 scoring against the untokenised reference"
if [ -e "$RUN/scores.txt" ]; then
    echo "already done: $RUN/scores.txt"
else
    begin scoring
    python -m sacrebleu "$reference" -i "$RUN/translation.$TGT" -m bleu chrf -f text -w 2 >"$RUN/scores.partial"
    mv "$RUN/scores.partial" "$RUN/scores.txt"
    finish
fi
if [ ! -e "$RUN/curve.png" ]; then
    run_logged drawing "$RUN/curves.log" ' error: ' sharing curves "$log" --out "$RUN/curve.png"
fi
if [ ! -e "$RUN/show.txt" ]; then
    sharing show --path "$averaged" >"$RUN/show.partial" 2>"$RUN/show.log" || fail showing "$RUN/show.log"
    mv "$RUN/show.partial" "$RUN/show.txt"
fi

say "five of the $(wc -l <"$reference") test sentences"
total=$(wc -l <"$reference")
for fifth in 1 2 3 4 5; do
    line=$(((total * (2 * fifth - 1) + 9) / 10))
    printf '\nsource       %s\nreference    %s\ntranslation  %s\n' "$(sed -n "${line}p" "$RUN/data/text/test.$SRC")" \
        "$(sed -n "${line}p" "$reference")" "$(sed -n "${line}p" "$RUN/translation.$TGT")"
done
say "parameters"
cat "$RUN/show.txt"
say "scores"
cat "$RUN/scores.txt"
say "files"
printf 'checkpoints     %s\nTensorBoard     tensorboard --logdir %s\nlearning curve  %s\n' \
    "$checkpoints" "$RUN/tensorboard" "$RUN/curve.png"
awk '{ total += $2; if (!($1 in sum)) order[++n] = $1; sum[$1] += $2 }
    END { for (i = 1; i <= n; i++) steps = steps (i > 1 ? ", " : "") order[i] " " sum[order[i]];
          printf "time            %.1f minutes (seconds: %s)\n", total / 60, steps }' "$RUN/seconds.txt"
