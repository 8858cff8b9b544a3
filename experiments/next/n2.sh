# Steps of the trainer with its defaults, one H200, 590 s a call and model: . n2.sh ViT-L-14 32768; ViT-B-16 32768; ViT-B-32 4096.
# ViT-L/14 took more than 400 s with four sizes compiled. The record goes on in /tmp/tp.json.
. experiments/next/setup.sh; [ -f /tmp/tp.json ] || cp benchmarks/results/throughput.json /tmp/tp.json
timeout 590 python3 benchmarks/throughput.py --append --output /tmp/tp.json --models $1 --batch-sizes $2 --contenders megabatch --steps 2 > $OUT/tp.txt 2>&1; cp /tmp/tp.json $OUT/; grep pairs/s $OUT/tp.txt | cut -c1-300
