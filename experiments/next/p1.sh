# Two H200s (needs_h200: ViT-L/14 with 512 rows), 590 s.
. .sim/setup.sh
(on 0; tp 0 ViT-L-14 32768 2; steps 0 ViT-L-14 0 1; steps 0 ViT-B-32 2 3; steps 0 ViT-B-16 3 2) &
(on 1; tp 1 ViT-B-16 32768 3; timeout 230 python3 .sim/blocks.py --models ViT-L-14 --size 2048 --steps 3 --variants torch-gelu all dynamic --output $OUT/l14.json > $OUT/b.txt 2>&1; said l14
steps 1 minilm 0 8; steps 1 bert-base 2 6; steps 1 ViT-B-16 3 2) &
wait; last 0 1 b
