# source: wheels once, and the environment
[ -d /tmp/site ] || python3 -m pip install -q --no-index --no-deps --target /tmp/site .whl/*.whl 2>&1 | grep -v WARN
export PYTHONPATH=/tmp/site:$PWD/src:$PWD/benchmarks
export TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
