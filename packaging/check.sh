#!/bin/sh
# Build an sdist and a wheel, look into them, install each into a virtual environment of its own making, and run
# smoke_test.py there, outside of the repository.
#
#   sh packaging/check.sh
#
# PYTHON is the interpreter, python3 by default. TORCH names what is installed before envsup, so that pip does not choose
# a build of several GB.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM

"${PYTHON:-python3}" -m venv "$work/venv"
python=$work/venv/bin/python
"$python" -m pip install --quiet build
# A copy without what is ignored, so that neither build/ nor an egg-info of this folder plays a part.
mkdir "$work/source"
git -C "$root" ls-files -z --cached --others --exclude-standard | (cd "$root" && xargs -0 tar -cf -) | tar -xf - -C "$work/source"
"$python" -m build --outdir "$work/dist" "$work/source" >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
"$python" "$root/packaging/check_contents.py" "$work/dist"

"$python" -m pip install --quiet "${TORCH:-torch==2.13.0}"
cd "$work"
wheel=$(echo dist/*.whl)
"$python" -m pip install --quiet "$wheel[gymnasium,demo,threads,video]"
echo "the wheel:"
"$python" -I "$root/packaging/smoke_test.py"
"$python" -m pip install --quiet --no-deps --force-reinstall dist/*.tar.gz
echo "the sdist:"
"$python" -I "$root/packaging/smoke_test.py"
