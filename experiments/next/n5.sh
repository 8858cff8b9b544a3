# The study, on each GPU of the machine. 590 s a call; /tmp/bs.json goes from call to call.
# The first call: benchmarks/batch_study.py --time 2 --output /tmp/bs.json on one GPU, with icons.npz and texts.npz.
. experiments/next/setup.sh; export PYTHONUNBUFFERED=1
[ -f /tmp/bs.json ] || cp benchmarks/results/batch-study.json /tmp/bs.json
timeout 585 python3 benchmarks/batch_study.py --icons /tmp/data/icons.npz --texts /tmp/data/texts.npz --output /tmp/bs.json --gpus $(nvidia-smi -L | wc -l) --sizes-only --budget-seconds 545 2>&1 | grep -v Warn | tail -20; cp /tmp/bs.json $OUT/
