# shellcheck shell=bash
# What the comparisons of strategies have in common, for all families: sourced, not run, after steps.sh and the variables.
#
# A script says what one training is in a function `compare NAME SYSTEM NORM LR SEED`, and calls `each_training`. In it,
# `describe_model FAMILY SYSTEM NORM STACK...` sets the array `model` (flags of architecture, depth, sharing and norms), WIDTH
# and FFN.
SYSTEMS=${SYSTEMS:-vanilla universal sequence cycle cycle_rev unshared}
NORMS=${NORMS:-pre-ln admin} # Pre-LN; Post-LN with --residual-scaling admin
LRS=${LRS:-0.002 0.004}      # the highest learning rate: all with the first seed, for the other seeds the best of them
SEEDS=${SEEDS:-1 2 3}
# glibc would give the memory of large tensors back to the system after each use: the same results, a tenth slower.
export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=2147483648 MALLOC_TOP_PAD_=268435456
for name in $SYSTEMS; do
    [[ $name =~ ^(vanilla|universal|sequence|cycle|cycle_rev|unshared)$ ]] ||
        die "SYSTEMS=$SYSTEMS names $name: there are vanilla, universal, sequence, cycle, cycle_rev and unshared"
done
for name in $NORMS; do
    [[ $name =~ ^(pre-ln|admin)$ ]] || die "NORMS=$NORMS names $name: there are pre-ln and admin"
done

need_whole_numbers UPDATES VALIDATE AVERAGE
[ "$AVERAGE" -gt 0 ] || die "AVERAGE=$AVERAGE must be at least 1"
[ "$VALIDATE" -gt 0 ] && [ $((UPDATES % VALIDATE)) = 0 ] && [ "$UPDATES" -gt 0 ] ||
    die "UPDATES=$UPDATES must be a multiple of VALIDATE=$VALIDATE, after which models are saved"

# describe_model FAMILY SYSTEM NORM STACK...: FAMILY is transformer, transformer_lm or s2t_transformer.
describe_model() {
    local family=$1 system=$2 norm=$3 layers=$LAYERS stack
    shift 3
    WIDTH=$SHARED_WIDTH
    case $system in
        vanilla | universal) layers=$UNIQUE ;;
    esac
    case $system in
        vanilla | unshared) model=(--arch "${family}_shared_sequence") ;;
        universal) model=(--arch "${family}_shared_universal") WIDTH=$UNIVERSAL_WIDTH ;;
        *) model=(--arch "${family}_shared_$system") ;;
    esac
    FFN=$((4 * WIDTH))
    [ "$norm" = pre-ln ] || model+=(--residual-scaling "$norm")
    for stack in "$@"; do
        model+=("--$stack-layers" "$layers" "--$stack-embed-dim" "$WIDTH" "--$stack-ffn-embed-dim" "$FFN"
            "--$stack-attention-heads" "$HEADS")
        case $system in
            vanilla | unshared) model+=("--$stack-sharing" none) ;;
            universal) ;;
            *) model+=("--$stack-unique-layers" "$UNIQUE") ;;
        esac
        [ "$norm" != pre-ln ] || model+=("--$stack-normalize-before")
    done
}

# average_models NAME WHEN UPDATE: the last AVERAGE models of a training up to an update, or as many as there are, into
# $RUN/NAME/averaged-WHEN.pt. fairseq saves no model of an update that ends an epoch.
average_models() {
    local name=$1 when=$2 last=$3 path update count=0
    if [ ! -e "$RUN/$name-average-$when.done" ]; then
        for path in "$RUN/$name"/checkpoint_*_*.pt; do
            update=${path##*_}
            if [ -e "$path" ] && [ "${update%.pt}" -le "$last" ]; then count=$((count + 1)); fi
        done
        [ "$count" -gt 0 ] || die "$RUN/$name has no model saved after VALIDATE=$VALIDATE updates, or a multiple of it, up to" \
            "$last: an epoch ends with each of them, and fairseq saves none then; choose another VALIDATE and another RUN"
    fi
    SHOW='averaged|rror:' step "$name-average-$when" python -m fairseq_sharing.tools.main average --inputs "$RUN/$name" \
        --num-update-checkpoints "$((count < AVERAGE ? count : AVERAGE))" --checkpoint-upper-bound "$last" \
        --output "$RUN/$name/averaged-$when.pt" --force
}

# try_twice NAME SYSTEM NORM TRY: call `TRY NAME WHEN UPDATE` for the end of a training, and for where it was in the time that
# Vanilla of the same norm takes; then delete all checkpoints but the best and the last.
try_twice() {
    local name=$1 system=$2 norm=$3 try=$4 vanilla last
    if [ -n "$dry_run" ]; then return; fi
    "$try" "$name" end "$UPDATES"
    if [ "$system" != vanilla ]; then
        vanilla=$norm-vanilla-lr${LRS%% *}-seed${SEEDS%% *}
        if [ -e "$RUN/$vanilla.lock" ]; then
            attend flock "$RUN/$vanilla.lock" true
            [ -e "$RUN/$vanilla.finished" ] || die "$name is compared with $vanilla, which was stopped: start both again"
        fi
        last=$(results --when-vanilla-ended "$name" --every "$VALIDATE")
        if [ -n "$last" ]; then "$try" "$name" same-time "$last"; fi
        if ! has_vanilla "$norm"; then # a later call may train it: until then nothing is deleted
            touch "$RUN/$name.untimed" "$RUN/$name.finished"
            return
        fi
    fi
    find "$RUN/$name" -name 'checkpoint_*_*.pt' -delete
    rm -f "$RUN/$name.untimed"
    touch "$RUN/$name.finished"
}

# has_vanilla NORM: whether it was trained.
has_vanilla() { compgen -G "$RUN/$1-vanilla-lr*-seed*.finished" >/dev/null; }

# finished NAME NORM: whether there is nothing left to do for a training.
finished() { [ -e "$RUN/$1.finished" ] && { [ ! -e "$RUN/$1.untimed" ] || ! has_vanilla "$2"; }; }

# once NAME SYSTEM NORM LR SEED: `compare`, unless it is finished or another call is at it; in the second round, wait for that
# call, and do what it has left.
once() {
    if [ -z "$dry_run" ] && finished "$1" "$3"; then return; fi
    if [ -z "$locks" ]; then
        compare "$@"
        return
    fi
    exec 8>>"$RUN/$1.lock" # open in the training too: it may outlive this script
    if attend flock "$patience" 8 && ! finished "$1" "$3"; then compare "$@"; fi
    exec 8>&-
}

# each_training: call `compare NAME SYSTEM NORM LR SEED` for each.
each_training() {
    local norm system lr seed first=${SEEDS%% *} best patience locks=
    exec 9>&- # other calls may begin
    if [ -z "$dry_run" ] && command -v flock >/dev/null; then locks="--nonblock --exclusive"; fi
    for patience in ${locks:-none}; do
        for norm in $NORMS; do
            for system in $SYSTEMS; do
                for lr in $LRS; do once "$norm-$system-lr$lr-seed$first" "$system" "$norm" "$lr" "$first"; done
            done
        done
        for norm in $NORMS; do
            for system in $SYSTEMS; do
                best=${LRS%% *}
                if [ -z "$dry_run" ]; then
                    for lr in $LRS; do [ -e "$RUN/$norm-$system-lr$lr-seed$first.finished" ] || continue 2; done
                    best=$(results --best-rate "$norm-$system")
                fi
                for seed in $SEEDS; do
                    [ "$seed" = "$first" ] || once "$norm-$system-lr$best-seed$seed" "$system" "$norm" "$best" "$seed"
                done
            done
        done
    done
    if [ -z "$dry_run" ]; then printf '\n%s\n' "all is done: $RUN"; fi
}
