# What the run.sh of the examples have in common: sourced, not run.
#
# A script sets its variables, calls `begin NAME...` with the names of those that may not change between two calls with
# the same RUN, and then `step NAME COMMAND...` for each thing to do. A step that came to its end is not done again; its
# output is in $RUN/NAME.log, and what the line pattern SHOW matches is shown. With the variable dry_run set nothing is done
# or written: each step's command is printed.
set -euo pipefail

export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONUNBUFFERED=1
dry_run=${dry_run:-}
NEEDS=${NEEDS:-fairseq sentencepiece} # modules of Python
child= viewer=
SHOW='train_inner|valid on|model params|parameter sets? \(|residual scalings|Loaded checkpoint|done training|Evaluated|Perplexity|rror:'

die() {
    printf '%s: %s\n' "$0" "$*" >&2
    exit 2
}

# Commands run in the background, so that a signal is answered at once and nothing outlives the script.
stop() {
    local result=$? pid
    trap - EXIT
    for pid in $child $viewer; do
        kill -TERM "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    if [ "$result" -ge 128 ]; then printf '\n%s: stopped; the same command goes on from here\n' "$0" >&2; fi
    exit "$result"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

# begin NAME...: make the folder RUN, or refuse one that was made with other settings or with other contents.
begin() {
    local name now before
    if [ -n "$dry_run" ]; then return; fi
    for name in $NEEDS; do
        python -c "import importlib.util as u, sys; sys.exit(u.find_spec('$name') is None)" 2>/dev/null ||
            die "the Python on PATH ($(command -v python || echo none)) has no $name: activate the environment first"
    done
    if [ -e "$RUN/settings.txt" ]; then
        while IFS='=' read -r name before; do
            now=${!name-}
            [ "$now" = "$before" ] || die "RUN=$RUN was made with $name=$before, and now $name=$now is asked for:" \
                "choose another RUN, or delete that folder"
        done <"$RUN/settings.txt"
    elif [ -e "$RUN" ] && [ -n "$(ls -A "$RUN")" ]; then
        die "RUN=$RUN is a folder with other contents: choose another RUN"
    else
        mkdir -p "$RUN"
        for name in "$@"; do printf '%s=%s\n' "$name" "${!name}"; done >"$RUN/settings.partial"
        mv "$RUN/settings.partial" "$RUN/settings.txt"
    fi
    if command -v flock >/dev/null; then
        exec 9>>"$RUN/.lock"
        flock -n 9 || die "another run is at work in RUN=$RUN"
    fi
}

# need_space GIGABYTES FOLDER: refuse to begin where so much is not free; FOLDER need not be there yet.
need_space() {
    local folder=$2 free
    while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
    free=$(($(df -Pk "$folder" | awk 'NR == 2 { print $4 }') / 1000000))
    [ "$free" -ge "$1" ] || die "$2 needs about $1 GB, and $free GB are free there"
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
    "$@" >>"$log" 2>&1 9>&- &
    child=$!
    tail -n "+$((before + 1))" -f "$log" 9>&- > >(grep --line-buffered -E "$SHOW" 9>&- || true) &
    viewer=$!
    wait "$child" || failed=1
    child=
    sleep 1 # for the last lines to be shown
    kill "$viewer"
    wait "$viewer" 2>/dev/null || true
    viewer=
    if [ "$failed" = 1 ]; then
        tail -n 5 "$log" >&2
        die "$name failed; its complete log: $log"
    fi
    echo "$((SECONDS - started)) seconds" >>"$RUN/$name.done"
}
