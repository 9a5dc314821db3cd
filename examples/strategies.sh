# shellcheck shell=bash
# What the comparisons of strategies have in common, for all families: sourced, not run, after steps.sh and the variables.
#
# A script says what one training is in a function `compare NAME SYSTEM NORM LR SEED`, and calls `each_training` with the
# names of the stacks. There, `describe_model SYSTEM NORM STACK...` has set the array `model` (flags of architecture, depth,
# sharing and norms), WIDTH and FFN.
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

# describe_model FAMILY SYSTEM NORM STACK...: FAMILY is transformer or transformer_lm.
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

# try_twice NAME SYSTEM TRY: call `TRY NAME WHEN UPDATE` for the end of a training, and for where it was when Vanilla of the
# same norm and seed had ended; then delete all checkpoints but the best and the last.
try_twice() {
    local name=$1 system=$2 try=$3 last
    if [ -n "$dry_run" ] || [ -e "$RUN/$name.finished" ]; then return; fi
    "$try" "$name" end "$UPDATES"
    if [ "$system" != vanilla ]; then
        last=$(results --when-vanilla-ended "$name" --every "$VALIDATE")
        if [ -n "$last" ]; then "$try" "$name" same-time "$last"; fi
    fi
    find "$RUN/$name" -name 'checkpoint_*_*.pt' -delete
    touch "$RUN/$name.finished"
}

# each_training: call `compare NAME SYSTEM NORM LR SEED` for each.
each_training() {
    local norm system lr seed first=${SEEDS%% *} best
    for norm in $NORMS; do
        for system in $SYSTEMS; do
            for lr in $LRS; do compare "$norm-$system-lr$lr-seed$first" "$system" "$norm" "$lr" "$first"; done
            best=${LRS%% *}
            [ -n "$dry_run" ] || best=$(results --best-rate "$norm-$system")
            for seed in $SEEDS; do
                [ "$seed" = "$first" ] || compare "$norm-$system-lr$best-seed$seed" "$system" "$norm" "$best" "$seed"
            done
        done
    done
}
