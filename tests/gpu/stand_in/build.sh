#!/usr/bin/env bash
# MLX for CUDA over the stand-in, in a folder ($1): `. FOLDER/use.sh` makes it what `import mlx` finds.
# Linux on x86-64, with gcc, g++, nm and readelf, and the .venv that ./regen.sh sets up. Downloads MLX's CUDA wheel and
# NVRTC (160 MB).
set -euo pipefail
[ $# = 1 ] || { echo "usage: build.sh FOLDER" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
folder=$(realpath -m "$1")
python=$root/.venv/bin/python
[ -x "$python" ] || { echo "$python is not there; run ./regen.sh --check first" >&2; exit 2; }
mlx=$("$python" -c "import importlib.metadata as m; print(m.version('mlx'))")
mkdir -p "$folder"
cd "$folder"
get() { # PACKAGE: its wheel, unpacked
  "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_35_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2010_x86_64 -d wheels "$1"
}
if [ ! -e "cuda/of $mlx" ]; then
  rm -rf cuda wheels
  get "mlx-cuda-13==$mlx"
  get "nvidia-cuda-nvrtc<13.1" # of the CUDA 13.0 that this wheel is built with
  "$python" - <<'PY'
import glob, zipfile
for wheel in glob.glob("wheels/*.whl"):
    zipfile.ZipFile(wheel).extractall("cuda")
PY
  rm -rf wheels
  touch "cuda/of $mlx"
fi
# The wheel for CUDA has the library only; all else is that of the wheel in .venv.
installed=$("$python" -c "import mlx.core; print(next(iter(__import__('mlx').__path__)))")
rm -rf site
mkdir -p site/mlx libraries
cp -r "$installed/." site/mlx/
rm -rf site/mlx/lib site/mlx/include
ln -sfn "$folder/cuda/mlx/lib" site/mlx/lib
ln -sfn "$folder/cuda/mlx/include" site/mlx/include
# Its runtime's functions, and what it asks of libraries that are not there.
library=cuda/mlx/lib/libmlx.so
{
  echo "static const struct { unsigned long offset; const char* name; } LOCAL[] = {"
  nm "$library" | sed -nE 's/^0*([0-9a-f]+) t ((__cudaRegisterFunction|cuda[A-Z][A-Za-z0-9_]*))$/{0x\1, "\2"},/p'
  echo "};"
} > local.h
asked=$(nm -D -u "$library" | awk '{print $2}' | grep -E "^(cu[A-Z]|cublas|cudnn|cufft|cusolver|nccl)" | sed 's/@.*//')
given=$(grep -oE "^int cu[A-Za-z0-9_]+" "$here/driver.cpp" | cut -d" " -f2)
comm -23 <(sort -u <<< "$asked") <(sort -u <<< "$given") | sed 's/.*/int &(void) { return 0; }/' > asked.c
nm -D -u "$library" | grep -oE "@lib(cu|nccl)[a-zA-Z]*\.so\.[0-9]+" | sort -u | sed 's/@\(.*\)/\1 { };/' > versions.map
gcc -w -O1 -fPIC -c asked.c -o asked.o
g++ -std=c++17 -Wall -O2 -fPIC -shared -I. -I"$here" "$here/driver.cpp" "$here/graphs.cpp" asked.o -Wl,--version-script=versions.map -o libraries/stand_in.so
for name in $(readelf -d "$library" | grep -oE "lib(cuda|cublasLt|cudnn|cufft|cusolver|nccl)\.so\.[0-9]+"); do
  ln -sf stand_in.so "libraries/$name"
done
cat > use.sh <<USE
export LD_LIBRARY_PATH=$folder/libraries:$(find "$folder/cuda/nvidia" -name lib -type d | tr '\n' ':')$folder/cuda/mlx_cuda_13.libs
export PYTHONPATH=$folder/site\${PYTHONPATH:+:\$PYTHONPATH} STAND_IN=$folder/libraries/stand_in.so
export MLX_PTX_CACHE_DIR=$folder/ptx STRAIGHTLINE_CACHE=$folder/cache
USE
echo "built in $folder"
