#!/usr/bin/env bash
# ALBERT's table at desk size: share all, only attention, only the FFN or nothing, with embeddings as wide as the model and
# narrower ones. Each of the eight is run.sh with other variables: pretraining, then fine-tuning with several seeds.
#
#   examples/masked_lm/sharing.sh
#   SHARED="all none" WIDTHS=64 RUN=sharing-some examples/masked_lm/sharing.sh
#
# Stopped by Ctrl-C or otherwise, the same command goes on where it was. Two cores take a call each, one for each of WIDTHS,
# with the same RUN.
SHARED=${SHARED:-all attention ffn none} # what the layers share
export EMBED=${EMBED:-128}               # H
WIDTHS=${WIDTHS:-$EMBED 32}              # E
export LAYERS=${LAYERS:-4}
export UPDATES=${UPDATES:-8000} # of pretraining
export SETS=${SETS:-novels} STARTS=${STARTS:-pretrained}
RUN=${RUN:-sharing-run} # a folder in it for each

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=../steps.sh
source "$here/../steps.sh"
read_options "" "$@"
for shared in $SHARED; do
    [[ $shared =~ ^(all|attention|ffn|none)$ ]] ||
        die "SHARED=$SHARED names $shared: there are all, attention, ffn and none"
done
for width in $WIDTHS; do
    for shared in $SHARED; do
        unique=1 parts=
        case $shared in
            none) unique=$LAYERS ;;
            attention | ffn) parts="--sharing-parts $shared" ;;
        esac
        printf '\n==== %s shared, E=%s\n' "$shared" "$width"
        export MODEL_ARGS="--untie-weights-roberta $parts" UNIQUE=$unique FACTORIZED=$width
        RUN=$RUN/$shared-$width attend "$here/run.sh" || die "$RUN/$shared-$width was stopped or failed"
    done
done
python "$here/sharing.py" "$RUN"
