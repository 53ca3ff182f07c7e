#!/usr/bin/env bash
# Make a virtual environment that runs openrl without a GPU:  install.sh VENV [PYTHON]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=$1
cpu_index=https://download.pytorch.org/whl/cpu

usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; }

find_python() {
    for candidate in ${1:-python3 python3.13 python3.12 python3.11}; do
        if usable "$candidate"; then echo "$candidate"; return; fi
    done
    echo "openrl needs Python 3.11, 3.12 or 3.13 with venv, and found none." >&2
    echo "  try: install python3.11 and python3.11-venv, or name one: make setup PYTHON=/path/to/python3.11" >&2
    return 1
}

if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python "${2:-}")
    echo "Making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }  # -qq: errors only

# torch first: vLLM pins its CPU build, and what else is installed must not bring a CUDA one.
torch=$(grep -m1 '^torch==' "$here/cpu.txt")
extra=()
echo "Installing $torch"
if ! pip install -qq "$torch" 2>/dev/null; then
    echo "The configured package index has no $torch; adding $cpu_index"
    extra=(--extra-index-url "$cpu_index")
    pip install -qq "${extra[@]}" "$torch"
fi
echo "Installing requirements/cpu.txt, test.txt and docs.txt (minutes, about 4 GB)"
pip install -qq "${extra[@]}" -r "$here/cpu.txt" -r "$here/test.txt" -r "$here/docs.txt"

# PyPI's torchvision has its detection operators for CUDA alone, and two of its Python lines fail
# without them. They wait for the operators like the lines around them: transforms need none.
imports() { "$venv/bin/python" -c "import $1" 2>/dev/null; }
if ! imports torchvision; then
    packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    sed -i 's/^@torch.library.register_fake("torchvision::\(q\?nms\)")$/@register_meta("\1")/' \
        "$packages/torchvision/_meta_registrations.py"
fi
# vLLM pulls these along. Beside a CPU torch their CUDA builds break imports of transformers.
for package in torchvision torchaudio torchcodec; do
    imports "$package" || pip uninstall -qq --yes "$package"
done
pip install -qq --no-deps --no-build-isolation --editable "$here/.."
