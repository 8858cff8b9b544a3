# The study on each GPU of the machine, 590 s a call; /tmp/bs.json goes from call to call. Texts first: 1,024 s2 (156 s),
# 16,384 (3 x 104 s), 65,536 (tuning and seeds, 109 s each), then equal time. Copies the record: an empty one begins anew.
. experiments/next/setup.sh; [ -f /tmp/bs.json ] || cp benchmarks/results/batch-study.json /tmp/bs.json
timeout 590 python3 benchmarks/batch_study.py --data ${1:-texts} --icons /tmp/data/icons.npz --texts /tmp/data/texts.npz --output /tmp/bs.json --gpus $(nvidia-smi -L | wc -l) $2 --budget-seconds 550 2>&1 | grep -v Warn | tail -20; cp /tmp/bs.json $OUT/
