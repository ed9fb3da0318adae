#!/bin/sh
# One virtual environment per peer, because their requirements exclude each other.
#
#   sh benchmarks/make_environments.sh [DIRECTORY] [PEER ...]
#
# DIRECTORY defaults to .bench, PEER to all of them. benchmarks/run.py finds them with --environments DIRECTORY.
# TORCH names what is installed before a peer that needs torch, so that pip does not choose a build of several GB:
# set it, and PIP_EXTRA_INDEX_URL, to the CPU build that you want.
set -eu

directory=${1:-.bench}
[ $# -gt 0 ] && shift
peers=${*:-gymnasium sb3 tianshou pufferlib envpool ding}
base=${PYTHON:-python3}
torch=${TORCH:-torch==2.13.0}

# What a peer needs: a line for each call of pip. Two of them pin a torch or a setuptools that would bring another
# torch along, so they come without what they ask for, after what their environments' code really imports.
requirements() {
    case $1 in
        gymnasium) echo "gymnasium numpy" ;;
        envpool) echo "envpool gymnasium numpy" ;;
        sb3) printf '%s\n' "numpy $torch" "stable-baselines3" ;;
        tianshou) printf '%s\n' "numpy $torch" "tianshou ray" ;;
        pufferlib) printf '%s\n' "numpy $torch" "gymnasium psutil" "--no-deps pufferlib-core" ;;
        ding)
            printf '%s\n' "numpy<2 $torch" "setuptools<81 wheel" \
                "numpy<2 gymnasium gym==0.25.1 DI-treetensor DI-toolkit easydict pyyaml cloudpickle enum-tools tabulate" \
                "numpy<2 click requests trueskill tensorboardX matplotlib mpire einops flask URLObject hickle redis pynng" \
                "--no-deps DI-engine"
            ;;
        *) return 2 ;;
    esac
}

install() {
    wanted=$(requirements "$1") || { echo "unknown peer" >&2; return 2; }
    python=$directory/$1/bin/python
    [ -x "$python" ] || "$base" -m venv "$directory/$1" || return 1
    echo "$wanted" | while read -r packages; do
        # shellcheck disable=SC2086 # a list of requirements, to be split
        "$python" -m pip install --quiet $packages </dev/null || return 1
    done
}

failed=""
for peer in $peers; do
    echo "$peer ..."
    if ! install "$peer"; then
        failed="$failed $peer"
        echo "$peer could not be installed; the benchmark leaves it out" >&2
    fi
done
[ -z "$failed" ] || exit 1
