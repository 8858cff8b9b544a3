# GELU (git cherry-pick 3b3eca70 first), one H200, 590 s: kernels alone in whole steps, the start, ViT-L/14.
. experiments/next/setup.sh
timeout 60 python3 -m pytest -q -p no:cacheprovider -m gpu tests/models -n 6 2>&1 | tail -3
timeout 150 python3 experiments/blocks.py --models ViT-L-14 --size 2048 --steps 3 --variants all torch-gelu dynamic --output $OUT/l14.json > $OUT/l14.txt 2>&1; grep variant $OUT/l14.txt; echo T $SECONDS
timeout 150 python3 experiments/start.py --model ViT-L-14 --size 4096 --steps 3 > $OUT/start.txt 2>&1; tail -60 $OUT/start.txt; echo T $SECONDS
timeout $((585 - SECONDS)) python3 experiments/blocks.py --models ViT-B-16 --size 4096 --steps 3 --variants all torch-gelu --output $OUT/b16.json > $OUT/b16.txt 2>&1; grep variant $OUT/b16.txt
