# shellcheck shell=bash
# What the scripts of the examples have in common: sourced, not run.
#
# A script sets its variables, calls `begin NAME...` with the names of those that may not change between two calls with
# the same RUN, and then `step NAME COMMAND...` for each thing to do. A step that came to its end is not done again; its
# output is in $RUN/NAME.log, and what the line pattern SHOW matches is shown. With the variable dry_run set nothing is done
# or written: each step's command is printed. Below `pack` is what only the recipes at full size use.
set -euo pipefail

export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONUNBUFFERED=1
dry_run=${dry_run:-}
smoke=
NEEDS=${NEEDS:-fairseq sentencepiece} # modules of Python
child='' viewer=''
SHOW='train_inner|valid on|valid_loss|model params|parameter sets? \(|residual scalings|Loaded checkpoint|done training|Evaluated|Perplexity|rror:'

die() {
    printf '%s: %s\n' "$0" "$*" >&2
    exit 2
}

# Commands run in the background, so that a signal is answered at once and nothing outlives the script.
stop() {
    local result=$? pid
    trap - EXIT
    if [ -n "$child" ]; then kill -TERM -- "-$child" 2>/dev/null || true; fi # with all that it has started
    for pid in $child $viewer; do wait "$pid" 2>/dev/null || true; done
    if [ "$result" -ge 128 ]; then printf '\n%s: stopped; the same command goes on from here\n' "$0" >&2; fi
    exit "$result"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

# attend COMMAND...: wait for a command that may take long, such as for a lock; a signal is answered meanwhile.
attend() {
    local failed=0
    set -m # a process group of its own
    "$@" </dev/null &
    child=$!
    set +m
    wait "$child" || failed=1
    child=
    return "$failed"
}

# begin NAME...: make the folder RUN, or refuse one that was made with other settings or with other contents.
begin() {
    local name now before
    if [ -n "$dry_run" ]; then return; fi
    for name in $NEEDS; do
        python -c "import importlib.util as u, sys; sys.exit(u.find_spec('$name') is None)" 2>/dev/null ||
            die "the Python on PATH ($(command -v python || echo none)) has no $name: activate the environment first"
    done
    if [ ! -e "$RUN/settings.txt" ] && [ ! -e "$RUN/.lock" ]; then need_empty; fi
    mkdir -p "$RUN"
    if command -v flock >/dev/null; then
        exec 9>>"$RUN/.lock"
        attend flock "${patience:---nonblock}" 9 || die "another run is at work in RUN=$RUN"
    fi
    if [ -e "$RUN/settings.txt" ]; then
        while IFS='=' read -r name before; do
            now=${!name-}
            [ "$now" = "$before" ] || die "RUN=$RUN was made with $name=$before, and now $name=$now is asked for:" \
                "choose another RUN, or delete that folder"
        done <"$RUN/settings.txt"
    else
        need_empty
        for name in "$@"; do printf '%s=%s\n' "$name" "${!name}"; done >"$RUN/settings.partial"
        mv "$RUN/settings.partial" "$RUN/settings.txt"
    fi
}

# need_empty: refuse a folder RUN with anything but what a call leaves that was stopped at its very beginning.
need_empty() {
    local found=
    # Not `grep -q`: it ends before `ls` where there is much, and with pipefail that looks like nothing.
    if [ -e "$RUN" ]; then found=$(ls -A "$RUN" | grep -vxE '\.lock|settings\.partial') || true; fi
    [ -z "$found" ] || die "RUN=$RUN is a folder with other contents: choose another RUN"
}

# need_space GIGABYTES FOLDER: refuse to begin where so much is neither free nor in FOLDER, which need not be there yet.
need_space() {
    local folder=$2 free there=0
    if [ -d "$2" ]; then there=$(($(du -sk "$2" | cut -f 1) / 1000000)); fi
    while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
    free=$(($(df -Pk "$folder" | awk 'NR == 2 { print $4 }') / 1000000))
    [ $((free + there)) -ge "$1" ] || die "$2 needs about $1 GB, and $there GB are there and $free GB free"
}

# step NAME COMMAND...
step() {
    local name=$1 log=$RUN/$1.log started=$SECONDS before failed=0
    shift
    printf '\n== %s\n' "$name"
    if [ -n "$dry_run" ]; then
        printf '%q ' "$@"
        printf '\n'
        return
    fi
    if [ -e "$RUN/$name.done" ]; then
        grep -E "$SHOW" "$log" | tail -n 1 || true
        echo "already done: $log"
        return
    fi
    # The log is written by the command itself, so that it is whole when the next step reads it.
    touch "$log"
    before=$(wc -l <"$log")
    set -m # a process group of its own
    "$@" </dev/null >>"$log" 2>&1 9>&- &
    child=$!
    set +m
    tail -n "+$((before + 1))" -f --pid="$child" -s 0.1 "$log" 9>&- | grep --line-buffered -E "$SHOW" 9>&- &
    viewer=$!
    wait "$child" || failed=1
    child=
    wait "$viewer" || true # it ends after the child, with the last line shown
    viewer=
    if [ "$failed" = 1 ]; then
        tail -n 5 "$log" >&2
        die "$name failed; its complete log: $log"
    fi
    echo "$((SECONDS - started)) seconds" >>"$RUN/$name.done"
}

# pack NAME: leave what tables and pictures read of a training's log in $RUN/NAME.log.xz, without paths and configuration.
pack() {
    [ -n "$dry_run" ] ||
        grep -E '\{"epoch"|train_inner|valid on|residual scalings|coder: [0-9]+ layer|shared model params|Loaded checkpoint' \
            "$RUN/$1.log" | sed "s|$RUN/||g" | xz -9e >"$RUN/$1.log.partial"
    [ -n "$dry_run" ] || mv "$RUN/$1.log.partial" "$RUN/$1.log.xz"
}

# read_options NAMES ARGUMENT...: set dry_run and smoke, where NAMES has --dry-run and --smoke; --help prints the comment at
# the top of the script.
read_options() {
    local names=$1 option
    for option in "${@:2}"; do
        case $option in
            -h | --help)
                sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p;}' "$0"
                exit
                ;;
        esac
        [[ " $names " == *" $option "* ]] || die "$option is not ${names:+one of $names }--help: all else is set by variables"
        case $option in
            --dry-run) dry_run=1 ;;
            --smoke) smoke=1 ;;
        esac
    done
}

# need_whole_numbers NAME...
need_whole_numbers() {
    local name
    for name in "$@"; do
        [[ ${!name} =~ ^[0-9]+$ ]] || die "$name=${!name} must be a whole number"
    done
}

# use_gpus FLAG...: set `training` and `decoding`, the flags of GPUS processes and of BATCHES in an update over all of
# them; FLAG is for GPUs only.
use_gpus() {
    local found
    decoding=("$@")
    if [ "$GPUS" = 0 ]; then
        decoding=(--cpu --num-workers 0)
        training=("${decoding[@]}" --update-freq "$BATCHES")
        return
    fi
    [ $((BATCHES % GPUS)) = 0 ] || die "BATCHES=$BATCHES must be a multiple of GPUS=$GPUS"
    training=("$@" --distributed-world-size "$GPUS" --update-freq "$((BATCHES / GPUS))")
    if [ -n "$dry_run" ]; then return; fi
    found=$(python -c 'import torch; print(torch.cuda.device_count())') || found=0
    [ "$found" -ge "$GPUS" ] || die "GPUS=$GPUS are asked for, and PyTorch sees $found (GPUS=0 is one CPU thread)"
}

# clear_unless_done STEP PATH: what a stopped call left of it is in the way.
clear_unless_done() { [ -n "$dry_run" ] || [ -e "$RUN/$1.done" ] || rm -rf "$2"; }

# download_archives PROGRAM FLAG...: `PROGRAM download` from MIRROR and against CHECKSUMS if set, into the folder `archives`.
# With smoke they are those that `PROGRAM imitate` makes of the data that ship with the example.
download_archives() {
    local program=$1 folder=$RUN
    shift
    archives=$WORK/archives # one for all data folders
    if [ -n "$smoke" ]; then
        [[ $folder = /* ]] || folder=$PWD/$folder
        MIRROR=${MIRROR:-file://$folder/imitation}
        CHECKSUMS=${CHECKSUMS:-$RUN/imitation/SHA256SUMS}
        archives=$RUN/archives
        clear_unless_done imitate "$RUN/imitation"
        SHOW='rror:' step imitate python "$program" imitate "$@" --data "$here/data" --out "$RUN/imitation"
    fi
    SHOW='bytes|already|rror:' step download python "$program" download "$@" --out "$archives" \
        ${MIRROR:+--mirror "$MIRROR"} ${CHECKSUMS:+--checksums "$CHECKSUMS"}
}

# parameters_of LOG: how many parameters fairseq-train has counted, each shared one once.
parameters_of() { sed -n 's/.*num\. shared model params: \([0-9,]*\).*/\1/p' "$1" | tail -n 1; }
