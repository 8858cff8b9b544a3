# . .sim/study.sh BUDGET DATA...: the next runs of the study, in a call of 600 s.
python3 -m pip install -q --no-index --no-deps --target /tmp/site .wh*/*.whl 2>&1 | grep -v WARN
export PYTHONPATH=/tmp/site:$PWD/src:$PWD/benchmarks PYTHONUNBUFFERED=1
mkdir -p /tmp/data; cp -n .npza/*.npz .npzb/*.npz /tmp/data/ 2>/dev/null
[ -f /tmp/bs.json ] || python3 .sim/again.py
budget=$1; shift
timeout -k 3 588 python3 benchmarks/batch_study.py --icons /tmp/data/icons.npz --texts /tmp/data/texts.npz --seeds 1 \
    --output /tmp/bs.json --gpus ${GPUS:-1} --budget-seconds $budget --data "$@"
cp /tmp/bs.json $OUT/
