# . .sim/setup.sh: packages and data of the carried folders.
python3 -m pip install -q --no-index --no-deps --target /tmp/site .whl/*.whl 2>&1 | grep -v WARN
export PYTHONPATH=/tmp/site:$PWD/src:$PWD/benchmarks TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
mkdir -p /tmp/data; cp -n .npza/*.npz .npzb/*.npz /tmp/data/ 2>/dev/null
[ -f .npzc/icons32.tar.xz ] && [ ! -d /tmp/data/icons32 ] && tar xJf .npzc/icons32.tar.xz -C /tmp/data
[ -f /tmp/bs.json ] || python3 .sim/again.py
